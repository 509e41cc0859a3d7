"""Ids to text while they come: no broken characters, and nothing shown of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from depthroute.common.errors import RequestError

Decode = Callable[[Sequence[int]], str]
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders put for bytes that are not UTF-8, and so for a character whose last bytes are still to come."""
HELD_IDS = 8
"""A character has at most four bytes, and a token that has text has one or more: what has been incomplete for so many tokens is broken."""


class TextStream:
    """The text of a sequence of ids, in pieces.

    The pieces together are `decode([*before, *ids])` without the text of `before`, cut at the first stop string (`first_stop`). What could
    still turn out to be part of a character or of a stop string is held back until that is decided. Every id costs a few calls of `decode`
    on the last few ids, however long the text is; until there is text, on `before` too.

    This holds for decoders whose text, but for an incomplete character at its end, stays as it is when ids are added: byte-level BPE
    always, SentencePiece with byte fallback where the bytes are UTF-8. Where they are not, the latter's text of earlier bytes changes, and
    what was given out stays.

    Args:
        before: ids that the text goes on from. They give nothing out, but a decoder may need them: some drop a space at the beginning.
        stop: strings that end the text.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise RequestError("a stop string is empty; give at least one character, or leave it out.")
        self._decode, self._stop = decode, tuple(stop)
        self._window = list(before)
        self._out = len(self._window)  # so many ids of the window have given out their text
        self._out_text = decode(self._window)
        self._held = ""
        self.stopped = False
        """Whether the text has reached a stop string; nothing comes after it."""

    def add(self, token: int) -> str:
        """The text that the next id sets free, often none."""
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(BROKEN):
            return self._broken(text) if len(self._window) - self._out > HELD_IDS else ""
        if len(text) <= len(self._out_text):
            if text and self._out == len(self._window) - 1:  # an id without text, which the window need not keep
                self._window.pop()
            return ""
        return self._give(text, len(self._window))

    def finish(self) -> str:
        """What is still held back, a broken character included: no more ids come."""
        if self.stopped:
            return ""
        return self._free(self._decode(self._window)[len(self._out_text):], last=True)

    def _give(self, text: str, end: int) -> str:
        """Give out `text`, that of the first `end` ids of the window. They stay in it, for the next to be decoded behind."""
        piece = text[len(self._out_text):]
        del self._window[: self._out]
        self._out = end - self._out
        self._out_text = self._decode(self._window[: self._out])
        return self._free(piece)

    def _broken(self, text: str) -> str:
        """Give out what no further byte can repair, up to the last border of ids that does not part bytes which stand for one U+FFFD."""
        for start in range(len(self._window) - 1, max(self._out, len(self._window) - 4), -1):
            head, tail = self._decode(self._window[:start]), self._decode(self._window[start:])
            if tail and head + tail == text and len(head) > len(self._out_text):
                piece = head[len(self._out_text):]
                del self._window[:start]
                self._out, self._out_text = 0, ""
                return self._free(piece)
        return ""

    def _free(self, piece: str, *, last: bool = False) -> str:
        """Of the text held back and `piece`, what cannot become part of a stop string any more."""
        text = self._held + piece
        cut = first_stop(text, self._stop)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        longest = 0 if last else min(len(text), max(map(len, self._stop), default=1) - 1)
        held = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
        self._held = text[len(text) - held:]
        return text[: len(text) - held]


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string in `text` begins: the one that ends first, and of several that end there the longest. None without any.

    That does not depend on how the text came in pieces.
    """
    begins = ((text.find(string), len(string)) for string in stop)
    ends = [(begin + length, begin) for begin, length in begins if begin >= 0]
    return min(ends)[1] if ends else None
