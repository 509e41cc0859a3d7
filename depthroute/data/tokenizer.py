"""Byte-level BPE (Sennrich et al., 2016) trained on the user's own documents, with ids 0 to 3 for the special tokens.

Any text can be encoded and comes back exactly. The text of a special token inside a document is text: it never becomes a special id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import write_text

if TYPE_CHECKING:
    import tokenizers

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
"""The special tokens and one entry per byte."""


class TextTokenizer:
    """Text to token ids and back. Only `EOS` is put into token streams, after every document; the other special ids are reserved."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The library matches added tokens in the text before anything else, unless told that special tokens are to be encoded as text;
        # tokenizer.json does not hold that setting. Merges cannot spell a special token: the pre-tokenizer parts letters from `<` and `>`.
        self._tokenizer.encode_special_tokens = True

    @property
    def vocabulary(self) -> int:
        """The number of entries, special tokens included; ids are below it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, none of them special."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ids have none, and bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` in the format of the `tokenizers` library."""
        write_text(path, self._tokenizer.to_str(pretty=True) + "\n")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> TextTokenizer:
    """Train on `texts`; the same texts give the same tokenizer, whatever their order, the process and the number of threads.

    The vocabulary is smaller than asked for where the texts have too few different pairs to merge.

    Raises:
        RequestError: `vocabulary` is below 260, the special tokens and the bytes. An error raised by `texts` passes through.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary < SMALLEST_VOCABULARY:
        raise RequestError(f"vocabulary cannot be {vocabulary}; it takes {SMALLEST_VOCABULARY} (4 special tokens and 256 bytes) or more.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return TextTokenizer(tokenizer)


def load_tokenizer(path: Path) -> TextTokenizer:
    """Load a `tokenizer.json` written by `TextTokenizer.save`.

    Raises:
        RequestError: the file does not exist, or its special tokens do not have the ids 0 to 3.
        FailureError: the file is not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except FileNotFoundError as error:
        raise RequestError(
            f"{path.parent} holds no {path.name}: it is no data directory, or its preparation did not finish; prepare it."
        ) from error
    except ValueError as error:
        raise FailureError(f"{path} is not valid JSON ({error}); it was cut short or changed by hand.") from error
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise FailureError(f"{path} is not a tokenizer that this version of tokenizers can read ({error}).") from error
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if ids != [PAD, UNK, BOS, EOS]:
        raise RequestError(f"{path} gives {', '.join(SPECIAL_TOKENS)} the ids {ids}; they must be 0, 1, 2 and 3.")
    return TextTokenizer(tokenizer)
