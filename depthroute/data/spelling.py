"""What the tokens of a document stand for, one by one, in a form that a terminal can show."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence

from depthroute.data.tiktoken import BYTE_CHARACTERS
from depthroute.data.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes, and so at most as many ids."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""What tokenizers that write unknown characters in bytes call these ids."""


class Speller:
    """The bytes of tokens. A byte-level tokenizer's are exact; what others make of an id depends on those before it, and a character that
    several ids make belongs to the last of them."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        file = json.loads(tokenizer.file)
        byte_level = _byte_level(file.get("decoder"))
        self._bytes = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)} if byte_level else None
        self._specials = {token["id"] for token in file.get("added_tokens") or () if token["special"]} | {tokenizer.end, tokenizer.begin}
        self._known: dict[int, bytes] = {}

    def spelling(self, token: int) -> str:
        """An id by itself: the text of a byte-level one, or else what the tokenizer calls it."""
        if self._bytes is None or self.special(token):
            return visible(self._tokenizer.name_of(token))
        return shown(self._of(token))

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The UTF-8 bytes of every id of a document. Together they are those of its text; special ids have none."""
        if self._bytes is not None:
            return [self._of(token) for token in ids]
        found = [b""] * len(ids)
        places = [place for place, token in enumerate(ids) if not self.special(token)]  # decoders do not see special ids
        ids = [ids[place] for place in places]
        before = done = 0
        for at in range(1, len(ids) + 1):
            # Decoders look at the ids before (a space, a character in bytes), so the ids of the piece before are decoded with these.
            known, text = self._tokenizer.decode(ids[before:done]), self._tokenizer.decode(ids[before:at])
            if at < len(ids) and text.endswith(REPLACEMENT) and self._may_go_on(ids[done:at]):
                continue
            found[places[at - 1]] = text[len(known) :].encode("utf-8")
            before, done = done, at
        return found

    def special(self, token: int) -> bool:
        """Whether an id has a name and no text."""
        return token in self._specials

    def _may_go_on(self, pending: Sequence[int]) -> bool:
        """Whether ids whose text ends with U+FFFD may lack bytes of a character. If not, the text holds U+FFFD."""
        names = [self._tokenizer.name_of(token) for token in pending]
        if len(pending) >= LONGEST_CHARACTER or REPLACEMENT in names[-1]:
            return False
        found = [BYTE.fullmatch(name) for name in names]
        octets = bytes(int(match[1], 16) for match in found if match)
        return octets != REPLACEMENT.encode("utf-8")

    def _of(self, token: int) -> bytes:
        """Of a byte-level tokenizer."""
        if token not in self._known:  # a document has many more tokens than ids
            self._known[token] = self._decoded(token)
        return self._known[token]

    def _decoded(self, token: int) -> bytes:
        assert self._bytes is not None
        if self.special(token) or self._tokenizer.decode([token]) == "":  # the second: the tokenizer has no such id
            return b""
        name = self._tokenizer.name_of(token)
        # As the library's decoder does it: a name with any other character is an added token, and stands for itself.
        return bytes(self._bytes[c] for c in name) if all(c in self._bytes for c in name) else name.encode("utf-8")


def shown(piece: bytes) -> str:
    """Bytes as text; those that are no whole character as \\xNN."""
    return visible(piece.decode("utf-8", "backslashreplace"))


def visible(text: str) -> str:
    """Control characters by their pictures (a newline is U+240A), what else has no shape or turns the line around as \\u{...}."""
    return "".join(map(_picture, text))


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if character != " " and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"\\u{{{code:x}}}"
    return character


def _byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return [_byte_level(part) for part in decoder["decoders"]] == [True]
    return decoder.get("type") == "ByteLevel"
