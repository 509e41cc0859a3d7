"""The documents of a data directory one by one, with the borders of their tokens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from depthroute.common.errors import FailureError, RequestError
from depthroute.data.dataset import TokenDataset
from depthroute.data.manifest import MANIFEST
from depthroute.data.scan import ends_of_sources, pieces, whole_items
from depthroute.data.shards import DTYPES, IDS_DTYPE, INDEX_DTYPE, ids_file, index_file, token_file
from depthroute.data.spelling import Speller, shown
from depthroute.data.split import DocumentSplit, Split

BORDER = "·"
"""Stands between two tokens."""
COLOURS = ("\033[30;46m", "\033[30;43m")
PLAIN = "\033[0m"
UNFIT = "is not the index of the tokens beside it; `depthroute data verify` says what is wrong."


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a document."""

    id: int
    spelling: str
    """Its text with control characters by their pictures; of a special one, its name."""
    bytes: int
    """Of its text in UTF-8; 0 for special ones, and for all but the last of several that make one character of a tokenizer that is not
    byte-level."""


@dataclass(frozen=True, kw_only=True)
class ShownDocument:
    """One document, its begin and end included."""

    split: Split
    number: int
    source: str | None
    """None: the manifest is from before it recorded sources."""
    text: str
    """Decoded."""
    tokens: tuple[Token, ...]

    @property
    def bytes(self) -> int:
        """Of the text in UTF-8."""
        return len(self.text.encode("utf-8"))

    @property
    def header(self) -> str:
        """Split, number, tokens, bytes and source in one line."""
        source = "" if self.source is None else f", from {self.source}"
        return f"{self.split} document {self.number}: {len(self.tokens):,} tokens, {self.bytes:,} bytes{source}"

    def marked(self, *, colours: bool) -> str:
        """The text with `BORDER` between tokens, or with two colours in turn. Lines are broken where the text breaks them."""
        if not colours:
            return BORDER.join(token.spelling.replace("␊", "␊\n") for token in self.tokens)
        return "".join(_painted(token.spelling, COLOURS[place % 2]) for place, token in enumerate(self.tokens))


class Shower:
    """Reads documents of a data directory.

    Raises:
        RequestError: it is no data directory.
        FailureError: a file is absent or cut short.
    """

    def __init__(self, directory: Path) -> None:
        self._data = TokenDataset.open(directory)
        self._tokenizer = self._data.tokenizer()
        self._speller = Speller(self._tokenizer)

    def documents(self, split: Split, number: int, count: int = 1) -> list[ShownDocument]:
        """`count` documents from `number` on, or those that there are; a negative number counts from the end.

        Raises:
            RequestError: there is no such document, or `count` is below 1.
            FailureError: the index or the manifest does not fit the tokens.
        """
        if count < 1:
            raise RequestError(f"count cannot be {count}; it takes 1 or more.")
        directory = self._data.directory
        boundaries = whole_items(directory / index_file(split), INDEX_DTYPE)
        tokens = whole_items(directory / token_file(split), DTYPES[self._data.manifest.dtype])
        documents = len(boundaries) - 1
        if documents < 0 or boundaries[0] != 0 or boundaries[-1] != len(tokens):
            raise FailureError(f"{directory / index_file(split)} {UNFIT}")
        ends = ends_of_sources(directory, self._data.manifest, split, documents)
        if not -documents <= number < documents:
            allowed = f"it takes 0 to {documents - 1}, or -1 to {-documents} from the end" if documents else "it is empty"
            raise RequestError(f"the {split} split has no document {number}; {allowed}.")
        first = number % documents
        last = min(documents, first + count)
        # The whole index is not read for a document.
        edges = boundaries[first : last + 1].tolist()
        if not all(0 <= start < end <= len(tokens) for start, end in pairwise(edges)):
            raise FailureError(f"{directory / index_file(split)} {UNFIT}")
        return [
            self._document(split, at, tokens[start:end].tolist(), self._source(ends, at))
            for at, (start, end) in enumerate(pairwise(edges), first)
        ]

    def with_id(self, document_id: str) -> list[ShownDocument]:
        """The documents of an id; several, where the corpus gave it to several.

        Raises:
            RequestError: there is none, or the directory is from before ids were recorded.
            FailureError: a file does not fit the others.
        """
        prepare = self._data.manifest.prepare
        decides = DocumentSplit(
            validation_share=prepare.validation_share, test_share=prepare.test_share, sample_one_in=prepare.sample_one_in, salt=prepare.salt
        )
        try:
            value = decides.split_hash(document_id)
        except UnicodeEncodeError as error:
            raise RequestError(f"the id {document_id!r} is no UTF-8, and those of documents are; give another id.") from error
        split, wanted = decides.split_at(value), np.uint64(value)
        path = self._data.directory / ids_file(split)
        if path.name not in {file.name for file in self._data.manifest.files}:
            raise RequestError(
                f"{self._data.directory / MANIFEST} names no {path.name}: the data were prepared before ids were recorded; give the number "
                "of the document, or prepare the data again in a new directory."
            )
        found = [first + int(at) for first, piece in pieces(whole_items(path, IDS_DTYPE)) for at in np.flatnonzero(piece == wanted)]
        if not found:
            raise RequestError(f"no document has the id {document_id!r}; one that had it would be in {split}.")
        return [document for number in found for document in self.documents(split, number)]

    def _document(self, split: Split, number: int, ids: list[int], source: str | None) -> ShownDocument:
        pairs, speller = list(zip(ids, self._speller.pieces(ids), strict=True)), self._speller
        known = {  # a long document has few different ones
            (token, part): Token(id=token, spelling=speller.spelling(token) if speller.special(token) else shown(part), bytes=len(part))
            for token, part in set(pairs)
        }
        tokens = tuple(known[pair] for pair in pairs)
        return ShownDocument(split=split, number=number, source=source, text=self._tokenizer.decode(ids), tokens=tokens)

    def _source(self, ends: list[int], number: int) -> str | None:
        sources = self._data.manifest.sources
        return sources[bisect_right(ends, number) - 1].name if sources else None


def _painted(spelling: str, colour: str) -> str:
    """A colour that ran over the end of a line would fill the rest of it on some terminals."""
    lines = spelling.split("␊")
    return f"{PLAIN}\n".join(f"{colour}{line}{'␊' * (place < len(lines) - 1)}" for place, line in enumerate(lines)) + PLAIN
