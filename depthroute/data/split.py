"""Which split a document belongs to, and whether the tokenizer is trained on it: salted hashes of its id, nothing else.

The decision for one document depends on no other, so it does not change when a corpus grows, is reordered or is cut into files.
The split of the Role-Decoupled paper, section C.1, which states the hash and the shares (99 / 0.5 / 0.5 %), not the bytes that are hashed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from depthroute.data.shares import exact

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
HASH_RANGE = 2**64


def document_hash(salt: str, document_id: str) -> int:
    """BLAKE2b with a digest of 64 bits over the salt in UTF-8, one zero byte and the id in UTF-8; the digest as a big-endian integer."""
    data = salt.encode("utf-8") + b"\0" + document_id.encode("utf-8")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def threshold(share: float) -> int:
    """How many of the 2^64 hash values a share takes: the shortest decimal that stands for the float, times 2^64, rounded down."""
    return int(exact(share) * HASH_RANGE)


class DocumentSplit:
    """Assigns documents to splits.

    The lowest hash values are the validation split and the highest the test split: a larger share of either keeps the documents it had.

    Args:
        validation_share, test_share: fractions of the documents, in expectation.
        sample_one_in: the tokenizer is trained on one training document in so many, in expectation.
        salt: the split hashes with `salt + "/split"`, the tokenizer's sample with `salt + "/tokenizer"`.
    """

    def __init__(self, *, validation_share: float, test_share: float, sample_one_in: int, salt: str) -> None:
        self._validation_end = threshold(validation_share)
        self._test_start = HASH_RANGE - threshold(test_share)
        self._sample_one_in = sample_one_in
        self._split_salt, self._sample_salt = f"{salt}/split", f"{salt}/tokenizer"

    def split_hash(self, document_id: str) -> int:
        """The value, from 0 to 2^64 - 1, that decides the split."""
        return document_hash(self._split_salt, document_id)

    def split_of(self, document_id: str) -> Split:
        """The split of a document."""
        return self.split_at(self.split_hash(document_id))

    def split_at(self, value: int) -> Split:
        """The split of the documents whose `split_hash` is `value`."""
        if value < self._validation_end:
            return "validation"
        return "test" if value >= self._test_start else "train"

    def trains_tokenizer(self, document_id: str) -> bool:
        """Whether a document is a training document that the tokenizer is trained on."""
        return document_hash(self._sample_salt, document_id) % self._sample_one_in == 0 and self.split_of(document_id) == "train"
