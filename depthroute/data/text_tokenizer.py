"""Text to token ids and back, with a tokenizer of the `tokenizers` library: ours (see `train_tokenizer`) or a ready one.

The text of a special token inside a document is text: it never becomes a special id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import write_bytes
from depthroute.data.long_documents import PIECE, pieces

if TYPE_CHECKING:
    import tokenizers

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")
BATCH_CHARACTERS = 2**20


class TextTokenizer:
    """Text to token ids and back. Only `end` is put into token streams, after every document, and `begin`, where there is one, before
    it; the other special ids are reserved."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, end: int = EOS, *, begin: int | None = None, file: bytes | None = None) -> None:
        self._tokenizer, self._file = tokenizer, file
        self.end = end
        """The id that ends a document."""
        self.begin = begin
        """The id that stands in front of a document; None: nothing does."""
        # The library matches added tokens in the text before anything else, unless told that special tokens are to be encoded as text;
        # tokenizer.json does not hold that setting. Our merges cannot spell a special token: the pre-tokenizer parts letters from `<`, `>`.
        self._tokenizer.encode_special_tokens = True
        self._vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def vocabulary(self) -> int:
        """All ids are below it: the number of entries, special tokens included, where no id is left out."""
        return self._vocabulary

    def encode(self, text: str) -> list[int]:
        """The ids of a text, none of them special."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids that `encode` gives each text, uint16 where the vocabulary has 65,536 entries or fewer, or else uint32.

        Long texts are encoded in pieces (see `long_documents`), so that memory stays near what the texts and their ids take.

        Raises:
            RequestError: a text is too long to be encoded whole and cannot be cut for this tokenizer, or it cannot encode it.
            FailureError: the tokenizer gives an id that is not below `vocabulary`.
        """
        found: list[np.ndarray] = []
        batch: list[str] = []
        characters = 0
        for text in texts:
            long = len(text) > PIECE
            if batch and (long or characters + len(text) > BATCH_CHARACTERS):
                found += self._arrays(batch)
                batch, characters = [], 0
            if long:
                ids = array(self._typecode)
                for piece in pieces(self._tokenizer, text):
                    ids.extend(self._ids([piece])[0])
                found.append(np.frombuffer(ids, dtype=ids.typecode))
            else:
                batch.append(text)
                characters += len(text)
        return found + self._arrays(batch)

    @property
    def _typecode(self) -> str:
        return "H" if self.vocabulary <= 65_536 else "I"

    def _arrays(self, texts: list[str]) -> list[np.ndarray]:
        typecode = self._typecode
        return [np.array(ids, dtype=typecode) for ids in self._ids(texts)]

    def _ids(self, texts: list[str]) -> list[array[int]]:
        typecode, vocabulary = self._typecode, self.vocabulary
        found = []
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception: a word that a tokenizer without an unknown token does not have, say
            raise RequestError(f"the tokenizer cannot encode it ({error}); take a tokenizer that encodes any text.") from error
        for encoding in encodings:
            ids = encoding.ids
            highest = max(ids, default=0)
            if highest >= vocabulary:
                raise FailureError(
                    f"the tokenizer gives the id {highest}, which is not below its vocabulary of {vocabulary}; its file is broken."
                )
            found.append(array(typecode, ids))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ids have none, and bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def name_of(self, token: int) -> str:
        """What the tokenizer calls an id, special ones too."""
        return str(self._tokenizer.id_to_token(token))

    @property
    def file(self) -> bytes:
        """Its `tokenizer.json` in the format of the `tokenizers` library; of a ready tokenizer, the file as it came."""
        return (self._tokenizer.to_str(pretty=True) + "\n").encode("utf-8") if self._file is None else self._file

    def save(self, path: Path) -> None:
        """Write `file`."""
        write_bytes(path, self.file)
