"""What is asked of the preparation: the sources, the split, the tokenizer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from depthroute.common.errors import RequestError
from depthroute.data.multi_hop import MULTI_HOP, MultiHopConfig
from depthroute.data.order import BLOCK
from depthroute.data.shares import exact, shares
from depthroute.data.tokenizer import SMALLEST_VOCABULARY

DOCSTRINGS = "docstrings"
HUB = "hf:"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents come from.

    Raises:
        RequestError: a value is not allowed.
    """

    path: str
    """`docstrings`, `multi-hop`, the path of a file or folder (see `FileCorpus`), or `hf:NAME` (see `HubCorpus`)."""
    text_column: str | None = None
    """The column of the text; dots lead into nested ones. None: that of a schema that is known, or `text`."""
    id_column: str | None = None
    """The column of the id, text or whole numbers. None: that of a schema that is known, or else the SHA-256 of the text."""
    weight: float | None = None
    """This source's share of the training tokens, relative to the other weights. None, for all sources: as long as they are."""

    def __post_init__(self) -> None:
        for name in ("path", "text_column", "id_column"):
            if getattr(self, name) == "":
                raise RequestError(f"{name} of a source cannot be empty.")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise RequestError(f"the weight of {self.path} cannot be {self.weight}; it takes a number above 0.")
        if self.path in (DOCSTRINGS, MULTI_HOP) and (self.text_column, self.id_column) != (None, None):
            raise RequestError(f"text_column and id_column belong to files; leave them out for {self.path}.")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How documents become token shards.

    The Role-Decoupled paper (C.1) sets aside 0.5 % of 9.7 million documents, 50 million tokens, for validation, and trains its tokenizer on
    one training document in 20. A corpus of a few thousand documents needs larger shares: 0.5 % of the default one is twenty documents.

    Raises:
        RequestError: a value is not allowed.
    """

    sources: tuple[Source, ...] = (Source(path=DOCSTRINGS),)
    """Their documents follow each other in this order in every split."""
    vocabulary: int = 2048
    """Entries of the tokenizer, 4 special tokens and 256 bytes included."""
    sample_one_in: int = 4
    """The tokenizer is trained on one training document in so many."""
    tokenizer: str | None = None
    """The path of a ready tokenizer, a tokenizer.json of the `tokenizers` library, or `cl100k`; None trains one."""
    end_of_document: str | None = None
    """The token of the ready tokenizer that ends a document; None finds it (see `ready_tokenizer`)."""
    begin_of_document: str | None = None
    """The token of the ready tokenizer that is put in front of a document, as a checkpoint may have been trained; None puts none."""
    validation_share: float = 0.05
    test_share: float = 0.005
    salt: str = "depthroute"
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What happens at a row that cannot be read (not UTF-8, not JSON, not text): an error, or it is left out and counted."""
    multi_hop: MultiHopConfig | None = None
    """What the source `multi-hop` makes; None for every other source."""

    def __post_init__(self) -> None:
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
        for what, path in (("tokenizer", self.tokenizer), *(("source", source.path) for source in self.sources)):
            if path is not None and any("\ud800" <= character <= "\udfff" for character in path):
                raise RequestError(f"the path of the {what} {path!r} is not UTF-8, and could not be written down; rename it.")
        self._check_sources()
        training, ready = ("vocabulary", "sample_one_in"), ("tokenizer", "end_of_document", "begin_of_document")
        if self.multi_hop is not None:
            self._leave_out((*training, *ready), f"the source {MULTI_HOP!r}, which has its own tokens")
        if self.tokenizer is not None:
            self._leave_out(training, f"the ready tokenizer {self.tokenizer}")
        else:
            self._leave_out(ready, "a tokenizer that is trained, which has its own token for it")

    @classmethod
    def of(cls, path: str, *, text_column: str | None = None, id_column: str | None = None, **settings: Any) -> PrepareConfig:
        """Of a single source; `settings` are the other fields."""
        return cls(sources=(Source(path=path, text_column=text_column, id_column=id_column),), **settings)

    @property
    def weights(self) -> tuple[Fraction, ...] | None:
        """Of the sources, adding up to 1, exactly; None where they have none."""
        given = [exact(source.weight) for source in self.sources if source.weight is not None]
        return tuple(weight / sum(given) for weight in given) or None

    def _check_sources(self) -> None:
        paths = [source.path for source in self.sources]
        if not paths:
            raise RequestError("sources cannot be empty; it takes one source or more.")
        places = [path if path in (DOCSTRINGS, MULTI_HOP) or path.startswith(HUB) else os.path.realpath(path) for path in paths]
        twice = next((path for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
        if twice is not None:
            raise RequestError(f"the source {twice} is there twice; name it once, with a weight.")
        weighted = sum(source.weight is not None for source in self.sources)
        if weighted not in (0, len(paths)):
            raise RequestError(f"{weighted} of {len(paths)} sources have a weight; give all of them one, or none.")
        if self.weights is not None:
            for path, weight, count in zip(paths, self.weights, shares(BLOCK, self.weights), strict=True):
                if not count:
                    raise RequestError(
                        f"the weight of {path} is {float(weight):g} of all, which is none of {BLOCK:,} windows; raise it, or leave the "
                        "source out."
                    )
        if (MULTI_HOP in paths) != (self.multi_hop is not None):
            raise RequestError(
                f"the sources {', '.join(paths)} and multi_hop {self.multi_hop!r} do not go together: the source {MULTI_HOP!r} needs a "
                f"MultiHopConfig, and no other source takes one. (A folder of that name is ./{MULTI_HOP}.)"
            )
        if MULTI_HOP in paths and len(paths) > 1:
            raise RequestError(f"the source {MULTI_HOP!r} has its own tokens and cannot be mixed with others.")

    def _leave_out(self, names: Sequence[str], beside: str) -> None:
        for name in names:
            if getattr(self, name) != getattr(PrepareConfig, name):
                raise RequestError(f"{name} cannot be {getattr(self, name)!r} with {beside}; leave it out.")
