"""What came out of a preparation: the `manifest.json` of a data directory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from depthroute.common.config import from_json, to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, write_json
from depthroute.data.config import DOCSTRINGS, PrepareConfig
from depthroute.data.multi_hop import MULTI_HOP
from depthroute.data.split import SPLITS, Split
from depthroute.data.tokenizer import EOS

MANIFEST = "manifest.json"
SOURCE = "source.json"
"""The stamps of the sources, which show the next call that nothing has changed. A preparation begins with it."""
LOCK = ".lock"
TOKENIZER = "tokenizer.json"
FORMAT = 1
IDS = ".ids.bin"


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """The corpus that was read. `content_hash` is `ContentHash` over all its documents."""

    name: str
    content_hash: str
    contents: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """Counts of a split. `tokens` includes one end per document, and one begin where there is one; `bytes` are those of the
    texts in UTF-8."""

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Splits:
    train: SplitFacts
    validation: SplitFacts
    test: SplitFacts


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What one of the sources gave. In every split its documents are one stretch, in the order of the sources."""

    name: str
    columns: tuple[str, ...]
    """How its text and its ids were found in its files, one entry for each way: `text`, `content`, `body.text, id: uid`."""
    splits: Splits


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Something that did not become a document, and how many of it there were."""

    reason: str
    count: int


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The hash of `tokenizer.json`, and what the tokenizer was trained on: nothing where it was there before."""

    sha256: str
    training_documents: int
    training_bytes: int
    words_left_out: int = 0
    """Of the sample, words that are too long to be trained on (`word_counts.WORD_BYTES`)."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A slice of the targets that an evaluation reports by itself: those that lie `distance` tokens behind one of `ids`.

    A marker and its target must lie in one window: what stands before a window's first token is not looked at.

    Raises:
        RequestError: no id, a negative one, a distance below 1, or the name of a split.
    """

    name: str
    ids: tuple[int, ...]
    distance: int = 1
    """1: the marker is the target's input, the token just before it."""

    def __post_init__(self) -> None:
        if not self.name or self.name in SPLITS:
            raise RequestError(f"a marker cannot be called {self.name!r}; it takes any name but that of a split ({', '.join(SPLITS)}).")
        if not self.ids or min(self.ids) < 0:
            raise RequestError(f"the marker {self.name!r} cannot have the ids {list(self.ids)}; it takes one or more token ids.")
        if self.distance < 1:
            raise RequestError(f"the marker {self.name!r} cannot have the distance {self.distance}; it takes 1 (just before) or more.")


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that is known of a data directory. It is written last: a directory with a manifest is complete."""

    format: int
    corpus: CorpusFacts
    prepare: PrepareConfig
    tokenizer: TokenizerFacts
    vocabulary: int
    """Entries of the tokenizer; fewer than asked for where the text has too few different pairs to merge."""
    dtype: Literal["uint16", "uint32"]
    splits: Splits
    skipped: tuple[Skipped, ...]
    unigram_entropy_nats: float
    """Of the training tokens, ends of documents included: the loss of the best model that looks at no context."""
    bytes_per_token: float
    """UTF-8 bytes of the training texts over training tokens."""
    files: tuple[FileFacts, ...]
    sources: tuple[SourceFacts, ...] = ()
    """Of each source of `prepare`, in their order; empty in manifests from before there could be several."""
    markers: tuple[Marker, ...] = ()
    """The slices of the targets that evaluations report beside the whole split."""
    end: int = EOS
    """The id behind every document."""
    begin: int | None = None
    """The id in front of every document; None: there is none."""

    def __post_init__(self) -> None:
        names = [marker.name for marker in self.markers]
        for marker in self.markers:
            if names.count(marker.name) > 1:
                raise RequestError(f"the marker {marker.name!r} is there twice; give each a name of its own.")
            if max(marker.ids) >= self.vocabulary:
                raise RequestError(
                    f"the marker {marker.name!r} cannot have the id {max(marker.ids)}; ids are below the vocabulary of {self.vocabulary}."
                )

    @property
    def fingerprint(self) -> str:
        """The SHA-256 that identifies the tokens, how they are mixed and how they are evaluated: over format, dtype, the name, size and
        hash of every file but those of the ids, the lengths and weights of the sources, where there are several, and the markers, where
        there are some. Where the data lie, and what a source was called, is no part of it."""
        identity: dict[str, Any] = {"format": self.format, "dtype": self.dtype}
        identity["files"] = sorted((f.name, f.bytes, f.sha256) for f in self.files if not f.name.endswith(IDS))
        if len(self.sources) > 1:
            weights = [None] * len(self.sources) if self.prepare.weights is None else list(map(str, self.prepare.weights))
            lengths = [[getattr(source.splits, split).tokens for split in SPLITS] for source in self.sources]
            identity["mixture"] = list(zip(weights, lengths, strict=True))
        if self.markers:
            identity["markers"] = [(marker.name, marker.ids, marker.distance) for marker in self.markers]
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode("utf-8")).hexdigest()

    def split(self, split: Split) -> SplitFacts:
        facts: SplitFacts = getattr(self.splits, split)
        return facts

    def write(self, directory: Path) -> None:
        write_json(directory / MANIFEST, to_json(self))


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a data directory.

    Raises:
        RequestError: there is none, so the directory is not one of ours or its preparation was interrupted.
        FailureError: it is broken, or of a format of another version of this library.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise RequestError(f"{directory} holds no {MANIFEST}: it is no data directory, or its preparation did not finish; prepare it.")
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else None
        raise FailureError(f"{path} has the format {found!r}, this version reads {FORMAT}; prepare the data again in a new directory.")
    try:
        return from_json(Manifest, _with_sources(value))
    except RequestError as error:
        raise FailureError(f"{path} is not a whole manifest: {error}") from error


def _with_sources(value: dict[str, Any]) -> dict[str, Any]:
    """A manifest from when there was one source, and its columns were fields of `prepare`."""
    prepare = value.get("prepare")
    if not isinstance(prepare, dict) or "sources" in prepare:
        return value
    path = prepare.get("source", DOCSTRINGS)
    columns = {} if path in (DOCSTRINGS, MULTI_HOP) else {name: prepare.get(name) for name in ("text_column", "id_column")}
    kept = {name: setting for name, setting in prepare.items() if name not in ("source", "text_column", "id_column")}
    return {**value, "prepare": {**kept, "sources": [{"path": path, **columns}]}}
