"""The lines of a file by ranges of its bytes, whether it is compressed or not. Bytes are counted as they are unpacked."""

from __future__ import annotations

import gzip
import io
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import rows

PIECE_BYTES = 2**20
UNPACKED_BYTES = 2**16
"""Of a file that is cut short, about so much is lost before its end."""
PACKINGS = {".gz": "gzip", ".zst": "zstd"}
FIRST_BYTES = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}


class Lines:
    """A file of lines. It stays open where the last range ended: of a compressed file, which can only be read forwards, a range further on
    costs the unpacking of what lies between, and one further back that of all that is before it.

    Args:
        path: the file; a name that ends in `.gz` or `.zst` says that it is compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packing = PACKINGS.get(path.suffix.lower())
        self._left: _Reading | None = None

    def check_name(self) -> None:
        """Raises RequestError where the file is compressed and its name does not say so."""
        with self.path.open("rb") as file:
            first = file.read(4)
        for suffix, begin in FIRST_BYTES.items() if self.packing is None else ():
            if first.startswith(begin):
                raise RequestError(f"{self.path} is compressed ({PACKINGS[suffix]}); rename it so that it ends in {suffix}.")

    def size(self) -> int:
        """How many bytes it has. A compressed file is read for it, to its end.

        Raises:
            FailureError: the compressed file is damaged.
        """
        size = self.path.stat().st_size
        if self.packing is None:
            return size
        if not size:
            raise FailureError(f"{self.path} is not a whole {self.packing} file: it is empty.")
        size, row = 0, 0
        with self._unpack() as file, self._explained(lambda: f"row {row}"):
            while piece := file.read(UNPACKED_BYTES):
                size += len(piece)
                row += piece.count(b"\n")
        return size

    def read(self, start: int, end: int) -> Iterator[tuple[int, bytes | None]]:
        """Where each line begins that begins at `start` or behind it and before `end`, and its bytes; None of one that is too long.

        Raises:
            FailureError: the compressed file is damaged.
        """
        reading, self._left = self._left, None
        if reading is None or start < reading.end:
            reading = _Reading(self._unpack())
        with self._explained(lambda: f"byte {reading.position} of what is unpacked"):
            # Where the reading stands behind `start`, no line begins between them: the last range has read its last line to the end.
            if start > reading.position:
                # The line that reaches into the range from before it belongs to the range in which it begins.
                reading.skip(start - 1, seek=self.packing is None)
                reading.line()
            while (position := reading.position) < end and (line := reading.line()) != b"":
                yield position, line
        reading.end = end
        self._left = reading

    def row(self, position: int) -> int:
        """The number of the line that begins at `position`, from 0."""
        row = 0
        with self._unpack() as file, self._explained(lambda: f"row {row}"):
            while position and (piece := file.read(min(position, PIECE_BYTES))):
                row += piece.count(b"\n")
                position -= len(piece)
        return row

    def _unpack(self) -> IO[bytes]:
        if self.packing is None:
            return self.path.open("rb", buffering=PIECE_BYTES)
        if self.packing == "gzip":
            return cast("IO[bytes]", gzip.open(self.path, "rb"))
        import pyarrow

        return cast("IO[bytes]", io.BufferedReader(pyarrow.input_stream(str(self.path), compression="zstd"), UNPACKED_BYTES))

    @contextmanager
    def _explained(self, where: Callable[[], str]) -> Iterator[None]:
        if self.packing is None:
            yield
            return
        import pyarrow

        try:
            yield
        except (EOFError, zlib.error, pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # the system's, not the decoder's
                raise
            raise FailureError(f"{self.path} is not a whole {self.packing} file: reading stopped after {where()} ({error}).") from error


class _Reading:
    """An open file and where it stands; closed when nothing holds it any more."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.position = 0
        self.end = 0
        """Of the last range that was read; no line begins between it and `position`."""
        weakref.finalize(self, file.close)

    def line(self) -> bytes | None:
        """The next line; empty at the end of the file, None where it is too long."""
        line = self._file.readline(rows.LARGEST_DOCUMENT + 1)
        self.position += len(line)
        if len(line) <= rows.LARGEST_DOCUMENT:
            return line
        while not line.endswith(b"\n") and (line := self._file.readline(PIECE_BYTES)):
            self.position += len(line)
        return None

    def skip(self, position: int, *, seek: bool) -> None:
        """Go on to a position. `seek`: the file can."""
        if seek:
            self.position = self._file.seek(position)
        while self.position < position and (piece := self._file.read(min(position - self.position, PIECE_BYTES))):
            self.position += len(piece)
