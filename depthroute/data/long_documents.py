"""Long texts in pieces that have, one after the other, the ids of the whole text, for any tokenizer.

A tokenizer looks for ids inside the words of its pre-tokenizer, so that a text may be cut where a word ends. Where that is, is proved from
the text around the cut: both sides together must have the words, and the ids, of one side and then of the other. Only ends of runs of
letters, of digits, of punctuation and of white space are looked at, since where a long run is parted may depend on where it starts. A
tokenizer without a pre-tokenizer (Llama 2's, say) has no words, and its texts are never cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from depthroute.common.errors import RequestError

if TYPE_CHECKING:
    import tokenizers

PIECE = 2**18
"""Characters. Longer texts are cut; encoding takes some 150 bytes of memory per byte of the piece."""
WHOLE = 2**20
"""Characters. A longer stretch in which there is no place to cut is refused."""
WINDOW = 512
"""Characters on either side of a cut that prove it."""
STRIDE = 256
"""Characters that are skipped after the first cut that is not proved, twice as many after the second, and so on: some 180 are tried."""

# Most words begin with a space, for every tokenizer. Where a language or a file has none, other ends of runs are tried.
_SPACE = re.compile("(?<=[0-9A-Za-z]) ")
_RUN_END = re.compile(r"(?<=\s)(?=\S)|(?<=[^\W\d_])(?=[\W\d_])|(?<=\d)(?=\D)|(?<=[^\w\s])(?=[\w\s])|(?<=_)(?=[^\W_]|\s)")


def pieces(tokenizer: tokenizers.Tokenizer, text: str) -> Iterator[str]:
    """Pieces of `text`, of somewhat more than `PIECE` characters where it can be cut there, and of at most `WHOLE`.

    Raises:
        RequestError: there is no place to cut in more than `WHOLE` characters.
    """
    start = 0
    while len(text) - start > PIECE:
        end = _cut(tokenizer, text, start)
        if end is None:
            if len(text) - start > WHOLE:
                raise RequestError(
                    f"the {WHOLE} characters from character {start} on have no place where they can be cut without changing the ids that "
                    "this tokenizer gives, and are too many to be encoded at once; leave the document out, divide it, or take a tokenizer "
                    "with a pre-tokenizer."
                )
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(tokenizer: tokenizers.Tokenizer, text: str, start: int) -> int | None:
    """The first proved cut of those that are tried from `start` + `PIECE` on, or None."""
    if tokenizer.pre_tokenizer is None:
        return None
    last = min(start + WHOLE, len(text))
    for pattern in (_SPACE, _RUN_END):
        at, stride = start + PIECE, STRIDE
        while candidate := pattern.search(text, at, last):
            cut = candidate.start()
            if _is_proved(tokenizer, text[max(0, cut - WINDOW) : cut], text[cut : cut + WINDOW]):
                return cut
            at, stride = cut + stride, stride + STRIDE
    return None


def _is_proved(tokenizer: tokenizers.Tokenizer, left: str, right: str) -> bool:
    if _words(tokenizer, left) + _words(tokenizer, right) != _words(tokenizer, left + right):
        return False
    one, other, both = (encoding.ids for encoding in tokenizer.encode_batch_fast([left, right, left + right], add_special_tokens=False))
    return bool(one + other == both)


def _words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    normal = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
