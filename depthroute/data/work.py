"""What a worker does: one job, a stretch of a corpus, at a time.

Everything that a job needs is in it: it depends on no other, and what it writes lies in files of its own until the preparation takes them.

    words    the words of the stretch's documents that the tokenizer is trained on    OUT.words, OUT.json
    train    a tokenizer from such files                                              the file that is named
    tokens   the tokens of the stretch's documents                                    OUT.SPLIT.bin, OUT.documents.bin
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from depthroute.common.config import from_json
from depthroute.common.errors import DepthrouteError
from depthroute.common.files import explain_os_errors, write_json
from depthroute.data.config import DOCSTRINGS, PrepareConfig, Source
from depthroute.data.corpus import Corpus, Document, Part, docstring_corpus, document_digest
from depthroute.data.multi_hop import MULTI_HOP, MultiHopCorpus
from depthroute.data.readers import open_source
from depthroute.data.shards import DTYPES, dtype_for
from depthroute.data.split import HASH_RANGE, SPLITS, DocumentSplit
from depthroute.data.text_tokenizer import BATCH_CHARACTERS
from depthroute.data.tokenizer import TextTokenizer, load_tokenizer
from depthroute.data.train_tokenizer import train_from_counts
from depthroute.data.word_counts import WORDS, WordCounter, most_frequent
from depthroute.data.workers import Job, Result

BATCH_DOCUMENTS = 256
DOCUMENT_ROW = np.dtype([("split", "u1"), ("tokens", "<i8"), ("bytes", "<i8"), ("id", "<u8"), ("digest", "V32")])
"""What is known of a document beside its tokens: the index of its split, their number, the bytes of its text, the hash of its id that
decides the split, and `document_digest`."""


class Placed(NamedTuple):
    """A document and what it is a part of, for messages."""

    name: str
    document: Document


def work(job: Job, corpora: Sequence[Corpus] = ()) -> Result:
    """Do a job; what it found beside its files.

    Args:
        corpora: those of the sources, where they are open already.

    Raises:
        RequestError, FailureError: what reading, encoding or writing raises.
    """
    if job["kind"] == "train":
        return _train(job)
    config = from_json(PrepareConfig, job["config"])
    corpus = corpora[job["source"]] if corpora else _opened(config.sources[job["source"]], config)
    parts = [Part(*part) for part in job["parts"]]
    return (_words if job["kind"] == "words" else _tokens)(job, config, corpus, parts)


def open_corpus(source: Source, config: PrepareConfig, *, report: Callable[[str], None] | None = None) -> Corpus:
    """The corpus that a source names.

    Raises:
        RequestError: it does not exist or is of a kind that cannot be read.
    """
    if source.path == MULTI_HOP and config.multi_hop is not None:
        return MultiHopCorpus(config=config.multi_hop)
    return docstring_corpus(report=report) if source.path == DOCSTRINGS else open_source(source, config.bad_rows, report)


@lru_cache
def _opened(source: Source, config: PrepareConfig) -> Corpus:
    """In a worker, which lives as long as its corpora may not change."""
    return open_corpus(source, config)


def document_split(config: PrepareConfig) -> DocumentSplit:
    """The split that a configuration asks for."""
    return DocumentSplit(
        validation_share=config.validation_share, test_share=config.test_share, sample_one_in=config.sample_one_in, salt=config.salt
    )


def _words(job: Job, config: PrepareConfig, corpus: Corpus, parts: Iterable[Part]) -> Result:
    split, skipped, counts = document_split(config), Counter[str](), Counter[str]()
    sampled_documents, sampled_bytes, lowest = 0, 0, HASH_RANGE
    out = Path(job["out"])
    words = WordCounter(out.with_suffix(".words"))
    for _, document in _documents(corpus, parts, skipped):
        counts[split.split_of(document.id)] += 1
        lowest = min(lowest, split.split_hash(document.id))
        if split.trains_tokenizer(document.id):
            sampled_documents += 1
            sampled_bytes += len(document.text.encode("utf-8"))
            words.add(document.text)
    words.finish()
    found = {
        "documents": dict(counts), "skipped": dict(skipped), "lowest": lowest, "sampled_documents": sampled_documents,
        "sampled_bytes": sampled_bytes, "words_left_out": words.left_out,
    }  # fmt: skip
    write_json(out.with_suffix(".json"), found)
    return found


def _train(job: Job) -> Result:
    counts = most_frequent(list(map(Path, job["words"])), WORDS, Path(job["scratch"]))
    train_from_counts(counts, job["vocabulary"]).save(Path(job["out"]))
    return {}


def _tokens(job: Job, config: PrepareConfig, corpus: Corpus, parts: Iterable[Part]) -> Result:
    split, skipped = document_split(config), Counter[str]()
    tokenizer = _tokenizer(job["tokenizer"], job["sha256"], job["end"], job["begin"])
    dtype = DTYPES[dtype_for(tokenizer.vocabulary)]
    front = np.array([] if tokenizer.begin is None else [tokenizer.begin], dtype=dtype)
    back = np.array([tokenizer.end], dtype=dtype)
    with ExitStack() as stack:
        stack.enter_context(explain_os_errors(Path(job["out"]), "writing"))
        files = [stack.enter_context(open(f"{job['out']}.{name}.bin", "wb")) for name in SPLITS]
        listed = stack.enter_context(open(f"{job['out']}.documents.bin", "wb"))
        for batch in _batches(_documents(corpus, parts, skipped)):
            pieces: tuple[list[np.ndarray], ...] = tuple([] for _ in SPLITS)
            found = np.zeros(len(batch), dtype=DOCUMENT_ROW)
            for place, ((_, document), ids) in enumerate(zip(batch, _encode(tokenizer, batch), strict=True)):
                value = split.split_hash(document.id)
                number = SPLITS.index(split.split_at(value))
                pieces[number].extend((front, ids.astype(dtype, copy=False), back))
                text_bytes = len(document.text.encode("utf-8"))
                found[place] = (number, len(front) + len(ids) + 1, text_bytes, value, document_digest(document))
            for file, arrays in zip(files, pieces, strict=True):
                if arrays:
                    file.write(np.concatenate(arrays).data)
            listed.write(found.tobytes())
    return {"skipped": dict(skipped)}


@lru_cache(maxsize=1)
def _tokenizer(path: str, sha256: str, end: int | None, begin: int | None) -> TextTokenizer:
    """Of a file with this hash: another call may have put another one there."""
    return load_tokenizer(Path(path), end=end, begin=begin)


def _encode(tokenizer: TextTokenizer, batch: list[Placed]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_documents([document.text for _, document in batch])
    except DepthrouteError:
        for name, document in batch:  # once more, to know which
            try:
                tokenizer.encode_documents([document.text])
            except DepthrouteError as error:
                raise type(error)(f"{name}, the document {document.id}: {error}") from error
        raise


def _documents(corpus: Corpus, parts: Iterable[Part], skipped: Counter[str]) -> Iterator[Placed]:
    return (Placed(part.name, document) for part in parts for document in corpus.documents(part, skipped))


def _batches(documents: Iterator[Placed]) -> Iterator[list[Placed]]:
    """Enough documents to keep every core busy, few enough to hold."""
    batch: list[Placed] = []
    characters = 0
    for placed in documents:
        batch.append(placed)
        characters += len(placed.document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
