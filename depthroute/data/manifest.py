"""What was asked of the preparation, and what came out of it: `PrepareConfig` and the `manifest.json` of a data directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from depthroute.common.config import from_json, to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, write_json
from depthroute.data.multi_hop import MULTI_HOP, MultiHopConfig
from depthroute.data.split import SPLITS, Split
from depthroute.data.tokenizer import EOS, SMALLEST_VOCABULARY

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How documents become token shards.

    The Role-Decoupled paper (C.1) sets aside 0.5 % of 9.7 million documents, 50 million tokens, for validation, and trains its tokenizer on
    one training document in 20. A corpus of a few thousand documents needs larger shares: 0.5 % of the default one is twenty documents.

    Raises:
        RequestError: a value is not allowed.
    """

    source: str = "docstrings"
    """`docstrings`, `multi-hop`, or the path of a file or folder (see `FileCorpus`)."""
    text_column: str = "text"
    id_column: str | None = None
    vocabulary: int = 2048
    """Entries of the tokenizer, 4 special tokens and 256 bytes included."""
    sample_one_in: int = 4
    """The tokenizer is trained on one training document in so many."""
    tokenizer: str | None = None
    """The path of a ready tokenizer, a tokenizer.json of the `tokenizers` library; None trains one."""
    end_of_document: str | None = None
    """The token of the ready tokenizer that ends a document; None finds it (see `ready_tokenizer`)."""
    begin_of_document: str | None = None
    """The token of the ready tokenizer that is put in front of a document, as a checkpoint may have been trained; None puts none."""
    validation_share: float = 0.05
    test_share: float = 0.005
    salt: str = "depthroute"
    multi_hop: MultiHopConfig | None = None
    """What the source `multi-hop` makes; None for every other source."""

    def __post_init__(self) -> None:
        if not self.source:
            raise RequestError("source cannot be empty; it takes 'docstrings' or the path of a file or folder.")
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise RequestError(
                f"vocabulary cannot be {self.vocabulary}; it takes {SMALLEST_VOCABULARY} (4 special tokens and 256 bytes) or more."
            )
        if self.sample_one_in < 1:
            raise RequestError(f"sample_one_in cannot be {self.sample_one_in}; it takes 1 (all training documents) or more.")
        if not 0 < self.validation_share < 1:
            raise RequestError(f"validation_share cannot be {self.validation_share}; it takes a fraction above 0 and below 1.")
        if not 0 <= self.test_share < 1:
            raise RequestError(f"test_share cannot be {self.test_share}; it takes a fraction from 0 to below 1.")
        if self.validation_share + self.test_share >= 1:
            raise RequestError(
                f"validation_share {self.validation_share} and test_share {self.test_share} leave nothing to train on; "
                "their sum must be below 1."
            )
        if not self.salt or "\0" in self.salt:
            raise RequestError(f"salt cannot be {self.salt!r}; it takes any text that is not empty and has no zero character.")
        if (self.source == MULTI_HOP) != (self.multi_hop is not None):
            raise RequestError(
                f"source {self.source!r} and multi_hop {self.multi_hop!r} do not go together: the source {MULTI_HOP!r} needs a "
                f"MultiHopConfig, and no other source takes one. (A folder of that name is ./{MULTI_HOP}.)"
            )
        training, ready = ("vocabulary", "sample_one_in"), ("tokenizer", "end_of_document", "begin_of_document")
        if self.multi_hop is not None:
            self._leave_out(("text_column", "id_column", *training, *ready), f"the source {MULTI_HOP!r}, which has its own tokens")
        if self.tokenizer is not None:
            self._leave_out(training, f"the ready tokenizer {self.tokenizer}")
        else:
            self._leave_out(ready, "a tokenizer that is trained, which has its own token for it")

    def _leave_out(self, names: Sequence[str], beside: str) -> None:
        for name in names:
            if getattr(self, name) != getattr(PrepareConfig, name):
                raise RequestError(f"{name} cannot be {getattr(self, name)!r} with {beside}; leave it out.")


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
        """The SHA-256 that identifies the tokens and how they are evaluated: over format, dtype, the name, size and hash of every file,
        and the markers, where there are some. Where the data lie, and what the source was called, is no part of it."""
        identity: dict[str, Any] = {"format": self.format, "dtype": self.dtype}
        identity["files"] = sorted((f.name, f.bytes, f.sha256) for f in self.files)
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
        return from_json(Manifest, value)
    except RequestError as error:
        raise FailureError(f"{path} is not a whole manifest: {error}") from error
