"""From documents to token shards: split, tokenizer, tokens, manifest. Two passes over a stream of documents, which is never held."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import explain_os_errors, read_json, waiting_lock, write_json
from depthroute.data.corpus import ContentHash, Corpus, Document, docstring_corpus
from depthroute.data.manifest import (
    FORMAT,
    MANIFEST,
    CorpusFacts,
    Manifest,
    Marker,
    PrepareConfig,
    Skipped,
    Splits,
    TokenizerFacts,
    read_manifest,
)
from depthroute.data.multi_hop import ANSWER_DISTANCE, MultiHopCorpus
from depthroute.data.readers import FileCorpus
from depthroute.data.shards import ShardWriter, check_files, dtype_for, file_facts
from depthroute.data.split import HASH_RANGE, SPLITS, DocumentSplit
from depthroute.data.tokenizer import TextTokenizer, ready_tokenizer, train_tokenizer

DOCSTRINGS = "docstrings"
TOKENIZER = "tokenizer.json"
SOURCE = "source.json"
"""Written first: it marks the directory as ours, and holds the stamp of the corpus, which shows the next call that nothing has changed."""
BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 2**20

Report = Callable[[str], None]


def prepare(config: PrepareConfig, directory: Path, *, report: Report | None = None) -> Manifest:
    """Fill `directory` with token shards, a tokenizer and a manifest, or return the manifest at once if it is already filled from the same
    configuration and corpus. After a crash the next call starts over in the same directory. Two processes may call it at the same time: one
    works, the other waits.

    Args:
        report: called with a line about what is being done, a few times in all.

    Raises:
        RequestError: the directory was prepared with another configuration or from another corpus, or is not empty and not ours; the corpus
            has no documents, or none for training, for the tokenizer or for validation; or the source or the tokenizer is refused (see
            `FileCorpus`, `ready_tokenizer`).
        FailureError: the source or the directory's files are damaged, or the disk is full.
    """
    tell: Report = report or (lambda line: None)
    corpus = open_corpus(config, report=tell)
    ready = None if config.tokenizer is None else ready_tokenizer(Path(config.tokenizer), config.end_of_document, config.begin_of_document)
    if directory.exists() and not directory.is_dir():
        raise RequestError(f"{directory} is a file; give the path of a directory.")
    with explain_os_errors(directory, "creating"):
        directory.mkdir(parents=True, exist_ok=True)
    if (directory / MANIFEST).exists():  # without the lock, so that a directory nobody may write to can be used
        return _existing(config, corpus, ready, directory, tell)
    with waiting_lock(directory / ".lock", lambda: tell(f"another process is preparing {directory}; waiting for it")):
        if (directory / MANIFEST).exists():
            return _existing(config, corpus, ready, directory, tell)
        if not (directory / SOURCE).exists() and any(not path.name.startswith(".") for path in directory.iterdir()):
            raise RequestError(f"{directory} is not empty and holds no prepared data; give an empty or a new directory.")
        write_json(directory / SOURCE, corpus.stamp())
        return _prepare(config, corpus, ready, directory, tell)


def open_corpus(config: PrepareConfig, *, report: Report | None = None) -> Corpus:
    """The corpus that `config.source` names.

    Raises:
        RequestError: the source does not exist or is of a kind that cannot be read, or the docstrings are asked for by column.
    """
    if config.multi_hop is not None:
        return MultiHopCorpus(config=config.multi_hop)
    if config.source != DOCSTRINGS:
        return FileCorpus(Path(config.source), text_column=config.text_column, id_column=config.id_column)
    if (config.text_column, config.id_column) != ("text", None):
        raise RequestError("text_column and id_column belong to files; leave them out, or give a path as the source.")
    return docstring_corpus(report=report)


def _existing(config: PrepareConfig, corpus: Corpus, ready: TextTokenizer | None, directory: Path, tell: Report) -> Manifest:
    manifest = read_manifest(directory)
    before, now = (dict(_fields(to_json(settings))) for settings in (manifest.prepare, config))
    # The same documents may have moved, and so may a tokenizer: the hashes below decide about both, not their paths.
    moved = {"source"}
    if ready is not None and manifest.prepare.tokenizer is not None:
        moved |= {"tokenizer", "end_of_document", "begin_of_document"}
        before_it = manifest.tokenizer.sha256, manifest.end, manifest.begin
        if (hashlib.sha256(ready.file).hexdigest(), ready.end, ready.begin) != before_it:
            raise RequestError(
                f"{directory} was prepared with another tokenizer ({manifest.prepare.tokenizer}, {manifest.tokenizer.sha256[:12]}, end "
                f"{manifest.end}{'' if manifest.begin is None else f', begin {manifest.begin}'}); give another directory, or delete this "
                "one."
            )
    for name in now:
        if name not in moved and before.get(name) != now[name]:
            raise RequestError(
                f"{directory} was prepared with {name} {before.get(name)!r}, not {now[name]!r}; give another directory, or delete this one."
            )
    check_files(directory, manifest, hashes=False)
    stamp = to_json(corpus.stamp())
    path = directory / SOURCE
    if not path.exists() or read_json(path) != stamp:
        tell("the source's files have changed since the data were prepared; comparing their content")
        content = ContentHash()
        for document in corpus.documents(Counter()):
            content.add(document)
        if content.hexdigest() != manifest.corpus.content_hash:
            raise RequestError(
                f"{directory} was prepared from another corpus ({manifest.corpus.name}, content {manifest.corpus.content_hash[:12]}, now "
                f"{content.hexdigest()[:12]}); give another directory, or delete this one."
            )
        with suppress(FailureError):  # it only saves the next call the comparison
            write_json(path, stamp)
    return manifest


def _prepare(config: PrepareConfig, corpus: Corpus, ready: TextTokenizer | None, directory: Path, tell: Report) -> Manifest:
    split = DocumentSplit(
        validation_share=config.validation_share, test_share=config.test_share, sample_one_in=config.sample_one_in, salt=config.salt
    )
    first = _FirstPass(config, corpus, split)
    markers: tuple[Marker, ...] = ()
    if ready is not None:
        first.count()
        tokenizer = ready
    elif isinstance(corpus, MultiHopCorpus):
        first.count()
        slices = corpus.markers().items()
        tokenizer, markers = corpus.tokenizer(), tuple(Marker(name=name, ids=ids, distance=ANSWER_DISTANCE) for name, ids in slices)
    else:
        tell(f"training a tokenizer of {config.vocabulary} entries on one training document in {config.sample_one_in}")
        tokenizer = train_tokenizer(first.sample(), config.vocabulary)
    tokenizer.save(directory / TOKENIZER)
    tell(f"tokenizing {first.documents} documents with {tokenizer.vocabulary} entries")
    with ExitStack() as stack:
        writers = {}
        for name in SPLITS:
            writers[name] = ShardWriter(directory, name, tokenizer.vocabulary, tokenizer.end, tokenizer.begin)
            stack.callback(writers[name].close)
        content = ContentHash()
        for batch in _batches(corpus.documents(Counter())):
            ids: dict[str, list[list[int]]] = {name: [] for name in SPLITS}
            text_bytes = dict.fromkeys(SPLITS, 0)
            for document, document_ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
                content.add(document)
                name = split.split_of(document.id)
                ids[name].append(document_ids)
                text_bytes[name] += len(document.text.encode("utf-8"))
            for name in SPLITS:
                writers[name].add(ids[name], text_bytes[name])
        if content.hexdigest() != first.content.hexdigest():
            raise FailureError(f"the corpus {corpus.name} changed while it was being read; prepare it again when nothing writes to it.")
        finished = {name: writers[name].finish() for name in SPLITS}
    train = finished["train"][0]
    saved = file_facts(directory / TOKENIZER)
    manifest = Manifest(
        format=FORMAT,
        corpus=CorpusFacts(name=corpus.name, content_hash=content.hexdigest(), contents=corpus.contents, missing=corpus.missing),
        prepare=config,
        tokenizer=TokenizerFacts(
            sha256=saved.sha256, training_documents=first.sampled_documents, training_bytes=first.sampled_bytes
        ),
        vocabulary=tokenizer.vocabulary,
        dtype=dtype_for(tokenizer.vocabulary),
        splits=Splits(train=train, validation=finished["validation"][0], test=finished["test"][0]),
        skipped=tuple(Skipped(reason=reason, count=count) for reason, count in sorted(first.skipped.items()) if count),
        unigram_entropy_nats=_entropy(writers["train"].token_counts),
        bytes_per_token=train.bytes / train.tokens,
        files=(saved, *(facts for name in SPLITS for facts in finished[name][1])),
        markers=markers,
        end=tokenizer.end,
        begin=tokenizer.begin,
    )
    manifest.write(directory)
    tell(f"{train.tokens} training and {manifest.splits.validation.tokens} validation tokens")
    return manifest


@dataclass
class _FirstPass:
    """Counts and hashes all documents, and while it does so hands a tokenizer that is to be trained its sample."""

    config: PrepareConfig
    corpus: Corpus
    split: DocumentSplit
    skipped: Counter[str] = field(default_factory=Counter)
    content: ContentHash = field(default_factory=ContentHash)
    counts: Counter[str] = field(default_factory=Counter)
    sampled_documents: int = 0
    sampled_bytes: int = 0
    lowest_hash: int = HASH_RANGE

    @property
    def documents(self) -> int:
        return self.counts.total()

    def sample(self) -> Iterator[str]:
        for document in self._documents():
            if self.split.trains_tokenizer(document.id):
                self.sampled_documents += 1
                self.sampled_bytes += len(document.text.encode("utf-8"))
                yield document.text
        # Raised inside the tokenizer's iterator, so before the merges are computed.
        if self.sampled_documents == 0:
            raise RequestError(
                f"none of the {self.counts['train']} training documents of {self.corpus.name} fell into the tokenizer's sample; set "
                "sample_one_in to 1."
            )

    def count(self) -> None:
        """The pass where no tokenizer is trained."""
        deque(self._documents(), maxlen=0)

    def _documents(self) -> Iterator[Document]:
        for document in self.corpus.documents(self.skipped):
            self.content.add(document)
            self.counts[self.split.split_of(document.id)] += 1
            self.lowest_hash = min(self.lowest_hash, self.split.split_hash(document.id))
            yield document
        self._refuse_empty_parts()

    def _refuse_empty_parts(self) -> None:
        config, documents, name = self.config, self.documents, self.corpus.name
        if documents == 0:
            left_out = "; ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()) if count)
            raise RequestError(f"the corpus {name} has no documents ({left_out or 'its files are empty'}).")
        if self.counts["validation"] == 0:
            needed = (self.lowest_hash + 1) / HASH_RANGE
            if documents == 1 or needed + config.test_share >= 1:
                raise RequestError(
                    f"the corpus {name} has {documents} document{'s' * (documents > 1)}, too few to set one aside for validation; give "
                    "every document a row of a JSONL file or a text file of its own."
                )
            raise RequestError(
                f"none of the {documents} documents of {name} fell into validation at validation_share {config.validation_share}; "
                f"raise validation_share above {needed:.4f}."
            )
        if self.counts["train"] == 0:
            raise RequestError(f"none of the {documents} documents of {name} fell into training; lower validation_share and test_share.")


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Enough documents to keep every core busy, few enough to hold."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _fields(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration in JSON by their dotted names."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _entropy(counts: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """Of the empirical distribution of counts [V], in nats."""
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())
