"""The documents of a data directory one by one, with the borders of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from depthroute.common.errors import RequestError
from depthroute.data.dataset import TokenDataset
from depthroute.data.manifest import MANIFEST
from depthroute.data.scan import pieces
from depthroute.data.shards import IDS_DTYPE, ids_file, read_array
from depthroute.data.spelling import Speller, shown
from depthroute.data.split import DocumentSplit, Split

BORDER = "·"
"""Stands between two tokens."""
COLOURS = ("\033[30;46m", "\033[30;43m")
PLAIN = "\033[0m"


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
        """
        if count < 1:
            raise RequestError(f"count cannot be {count}; it takes 1 or more.")
        boundaries = self._data.boundaries(split)
        documents = len(boundaries) - 1
        if not -documents <= number < documents:
            allowed = f"it takes 0 to {documents - 1}, or -1 to {-documents} from the end" if documents else "it is empty"
            raise RequestError(f"the {split} split has no document {number}; {allowed}.")
        first = number % documents
        tokens = self._data.tokens(split)
        return [
            self._document(split, at, tokens[boundaries[at] : boundaries[at + 1]].tolist())
            for at in range(first, min(documents, first + count))
        ]

    def with_id(self, document_id: str) -> list[ShownDocument]:
        """The documents of an id; several, where the corpus gave it to several.

        Raises:
            RequestError: there is none, or the directory is from before ids were recorded.
        """
        prepare = self._data.manifest.prepare
        decides = DocumentSplit(
            validation_share=prepare.validation_share, test_share=prepare.test_share, sample_one_in=prepare.sample_one_in, salt=prepare.salt
        )
        split, wanted = decides.split_of(document_id), np.uint64(decides.split_hash(document_id))
        path = self._data.directory / ids_file(split)
        if path.name not in {file.name for file in self._data.manifest.files}:
            raise RequestError(
                f"{self._data.directory / MANIFEST} names no {path.name}: the data were prepared before ids were recorded; give the number "
                "of the document, or prepare the data again in a new directory."
            )
        found = [first + int(at) for first, piece in pieces(read_array(path, IDS_DTYPE)) for at in np.flatnonzero(piece == wanted)]
        if not found:
            raise RequestError(f"no document has the id {document_id!r}; one that had it would be in {split}.")
        return [document for number in found for document in self.documents(split, number)]

    def _document(self, split: Split, number: int, ids: list[int]) -> ShownDocument:
        parts = self._speller.pieces(ids)
        edges = {self._data.end, self._data.begin}
        tokens = (
            Token(id=token, spelling=self._speller.spelling(token) if token in edges else shown(part), bytes=len(part))
            for token, part in zip(ids, parts, strict=True)
        )
        source = self._source(split, number)
        return ShownDocument(split=split, number=number, source=source, text=self._tokenizer.decode(ids), tokens=tuple(tokens))

    def _source(self, split: Split, number: int) -> str | None:
        end = 0
        for source in self._data.manifest.sources:
            end += getattr(source.splits, split).documents
            if number < end:
                return source.name
        return None


def _painted(spelling: str, colour: str) -> str:
    """A colour that ran over the end of a line would fill the rest of it on some terminals."""
    lines = spelling.split("␊")
    return f"{PLAIN}\n".join(f"{colour}{line}{'␊' * (place < len(lines) - 1)}" for place, line in enumerate(lines)) + PLAIN
