"""A data directory written without the preparation, so that its files can be damaged one by one."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.data import SPLITS, DocumentSplit, Manifest, PrepareConfig, Source, SourceFacts, SplitFacts, TextTokenizer, train_tokenizer
from depthroute.data.corpus import Document
from depthroute.data.manifest import FORMAT, MANIFEST, CorpusFacts, Splits, TokenizerFacts, read_manifest
from depthroute.data.shards import DTYPES, IDS_DTYPE, INDEX_DTYPE, dtype_for, file_facts, ids_file, index_file, token_file

LEXICON = ["depth", "route", "query", "key", "value", "source", "block", "mixture", "layer", "norm", "größe", "流", "weight", "loss"]
VALIDATION_SHARE, TEST_SHARE = 0.2, 0.1


def documents(count: int, name: str = "document", words: int = 20) -> list[Document]:
    chosen = random.Random(name)
    return [Document(f"{name} {number}", " ".join(chosen.choice(LEXICON) for _ in range(words)) + f" {number}") for number in range(count)]


@cache
def tokenizer() -> TextTokenizer:
    return train_tokenizer([document.text for document in documents(50)], 300)


def write(
    directory: Path, sources: dict[str, Sequence[Document]], *, made: TextTokenizer | None = None, recorded: bool = True, **settings: Any
) -> Manifest:
    """Fill a directory with the documents of `sources`.

    Args:
        made: the tokenizer; None: one that was trained here.
        recorded: whether ids and sources are; they were not before.
        settings: other fields of `PrepareConfig`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    made = made or tokenizer()
    config = PrepareConfig(
        sources=tuple(Source(path=path) for path in sources), validation_share=VALIDATION_SHARE, test_share=TEST_SHARE, **settings
    )
    split = DocumentSplit(
        validation_share=config.validation_share, test_share=config.test_share, sample_one_in=config.sample_one_in, salt=config.salt
    )
    made.save(directory / "tokenizer.json")
    dtype = dtype_for(made.vocabulary)
    front = [] if made.begin is None else [made.begin]
    whole, parts = {}, {}
    for name in SPLITS:
        mine = {path: [one for one in given if split.split_of(one.id) == name] for path, given in sources.items()}
        ids = {path: [[*front, *made.encode(one.text), made.end] for one in given] for path, given in mine.items()}
        parts[name] = {
            path: SplitFacts(
                documents=len(mine[path]), tokens=sum(map(len, ids[path])), bytes=sum(len(one.text.encode()) for one in mine[path])
            )
            for path in sources
        }
        flat = [one for path in sources for one in ids[path]]
        lengths = [0, *map(len, flat)]
        (directory / token_file(name)).write_bytes(np.array([token for one in flat for token in one], dtype=DTYPES[dtype]).tobytes())
        (directory / index_file(name)).write_bytes(np.cumsum(lengths, dtype=INDEX_DTYPE).tobytes())
        if recorded:
            hashes = np.array([split.split_hash(one.id) for path in sources for one in mine[path]], dtype=IDS_DTYPE)
            (directory / ids_file(name)).write_bytes(hashes.tobytes())
        totals = {what: sum(getattr(part, what) for part in parts[name].values()) for what in ("documents", "tokens", "bytes")}
        whole[name] = SplitFacts(**totals)
    saved = file_facts(directory / "tokenizer.json")
    kinds = (token_file, index_file, ids_file) if recorded else (token_file, index_file)
    manifest = Manifest(
        format=FORMAT,
        corpus=CorpusFacts(name="by hand", content_hash="0" * 64, contents=(), missing=()),
        prepare=config,
        tokenizer=TokenizerFacts(sha256=saved.sha256, training_documents=0, training_bytes=0),
        vocabulary=made.vocabulary,
        dtype=dtype,
        splits=Splits(**whole),
        skipped=(),
        unigram_entropy_nats=entropy(directory, dtype),
        bytes_per_token=whole["train"].bytes / whole["train"].tokens,
        files=(saved, *(file_facts(directory / kind(name)) for name in SPLITS for kind in kinds)),
        sources=tuple(
            SourceFacts(name=path, columns=("text",), splits=Splits(**{name: parts[name][path] for name in SPLITS})) for path in sources
        )
        if recorded
        else (),
        end=made.end,
        begin=made.begin,
    )
    manifest.write(directory)
    return manifest


def entropy(directory: Path, dtype: str) -> float:
    """Of the training tokens that a directory has, in nats."""
    tokens = np.frombuffer((directory / token_file("train")).read_bytes(), dtype=DTYPES[dtype]).tolist()
    return -sum(count / len(tokens) * math.log(count / len(tokens)) for count in Counter(tokens).values())


def alter(directory: Path, name: str, dtype: np.dtype[Any], change: Callable[[np.ndarray], object]) -> None:
    """Change the values of a file in place, and leave the manifest as it is."""
    path = directory / name
    values = np.frombuffer(path.read_bytes(), dtype=dtype).copy()
    change(values)
    path.write_bytes(values.tobytes())


def alter_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of the manifest."""
    value = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    change(value)
    (directory / MANIFEST).write_text(json.dumps(value), encoding="utf-8")


def seal(directory: Path) -> None:
    """Let the manifest name the sizes and hashes that the files have now."""
    manifest = read_manifest(directory)
    files = tuple(file_facts(directory / file.name) for file in manifest.files)
    tokenizer = dataclasses.replace(manifest.tokenizer, sha256=next(file.sha256 for file in files if file.name == "tokenizer.json"))
    dataclasses.replace(manifest, files=files, tokenizer=tokenizer).write(directory)
