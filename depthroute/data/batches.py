"""Which tokens a training step and an evaluation see: pure functions of the data, the seed and the step.

B sequences in a batch, T tokens of context; a window is T + 1 tokens, so that it holds T inputs and their T targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from depthroute.common.errors import RequestError
from depthroute.data.manifest import Manifest, read_manifest
from depthroute.data.shards import DTYPES, INDEX_DTYPE, check_files, index_file, read_array, token_file
from depthroute.data.split import Split
from depthroute.data.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """A directory made by `prepare`, opened for reading."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: Path, *, verify: bool = False) -> TokenDataset:
        """Open a directory after comparing the size of every file with the manifest, and its SHA-256 where `verify` asks for it.

        Raises:
            RequestError: it is not a prepared directory.
            FailureError: a file is absent, cut short or altered; the message names it.
        """
        manifest = read_manifest(directory)
        check_files(directory, manifest, hashes=verify)
        return cls(directory=directory, manifest=manifest)

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that identify the tokens, wherever they lie; see `Manifest.fingerprint`."""
        return self.manifest.fingerprint

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer; every token id is below it."""
        return self.manifest.vocabulary

    @property
    def end(self) -> int:
        """The id behind every document."""
        return self.manifest.end

    @property
    def begin(self) -> int | None:
        """The id in front of every document; None: there is none."""
        return self.manifest.begin

    def tokens(self, split: Split) -> np.ndarray:
        """The token ids of a split, uint16 or uint32 [tokens], read-only through the memory map."""
        return read_array(self.directory / token_file(split), DTYPES[self.manifest.dtype])

    def boundaries(self, split: Split) -> np.ndarray:
        """int64 [documents + 1]: document i is `tokens(split)[boundaries[i] : boundaries[i + 1]]`, its begin and its end included."""
        return read_array(self.directory / index_file(split), INDEX_DTYPE)

    def tokenizer(self) -> TextTokenizer:
        ready = self.manifest.prepare.tokenizer is not None
        return load_tokenizer(self.directory / "tokenizer.json", end=self.end if ready else None, begin=self.begin)


@dataclass(frozen=True)
class BatchOrder:
    """The order in which training reads its tokens.

    The stream is cut into windows of `context` targets that do not overlap: window w starts at token w x context. Every epoch is a
    permutation of all windows drawn from (seed, epoch); the epochs follow each other, and a batch takes the next `sequences` windows, over
    the border of epochs where it falls so. Ranks and micro-batches are rows of that batch: nothing depends on how many there are.

    Raises:
        RequestError: a value is not allowed, or the corpus is smaller than one batch.
    """

    number_of_tokens: int
    context: int
    sequences: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("context", "sequences"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} cannot be {getattr(self, name)}; it takes 1 or more.")
        if self.seed < 0:
            raise RequestError(f"seed cannot be {self.seed}; it takes 0 or more.")
        if self.windows_per_epoch < self.sequences:
            raise RequestError(
                f"the training split has {self.number_of_tokens} tokens, which is less than a batch of {self.sequences} sequences "
                f"x {self.context} tokens and one more; give more text, fewer sequences or a shorter context."
            )

    @property
    def windows_per_epoch(self) -> int:
        """Whole windows in the split; the tokens of a last partial one are never trained on."""
        return max(0, self.number_of_tokens - 1) // self.context

    def windows(self, step: int) -> np.ndarray:
        """The start offsets, int64 [sequences], of the batch of a step, counted from 0."""
        if step < 0:
            raise RequestError(f"step cannot be {step}; it takes 0 or more.")
        epoch, first = divmod(step * self.sequences, self.windows_per_epoch)
        chosen = _permutation(self.seed, epoch, self.windows_per_epoch)[first : first + self.sequences]
        if len(chosen) < self.sequences:  # one epoch holds at least a batch, so a batch touches two at most
            rest = self.sequences - len(chosen)
            chosen = np.concatenate([chosen, _permutation(self.seed, epoch + 1, self.windows_per_epoch)[:rest]])
        return chosen * self.context

    def batch(self, tokens: np.ndarray, step: int, rows: slice = slice(None)) -> np.ndarray:
        """The tokens, int64 [rows, context + 1], of a step: inputs are `[:, :-1]`, targets `[:, 1:]`.

        Args:
            tokens: [number_of_tokens], the split this order was made for.
            rows: which sequences of the batch to read: a rank's share, or a micro-batch.
        """
        return _gather(tokens, self.windows(step)[rows], self.context)


def evaluation_windows(
    tokens: np.ndarray, context: int, limit_tokens: int | None = None, *, sequences: int = 16
) -> Iterator[np.ndarray]:
    """Yield the windows an evaluation reads, in order and always the same: int64 [n, context + 1] with n <= sequences.

    Together they cover the first `limit_tokens` targets of the split, rounded up to whole windows, and never more than the whole windows it
    holds; None stands for all of those.

    Raises:
        RequestError: a value is not allowed, or the split does not hold one window.
    """
    for name, value in (("context", context), ("sequences", sequences), ("limit_tokens", limit_tokens)):
        if value is not None and value < 1:
            raise RequestError(f"{name} cannot be {value}; it takes 1 or more.")
    windows = max(0, len(tokens) - 1) // context
    if windows == 0:
        raise RequestError(
            f"the split has {len(tokens)} tokens, which is less than a window of {context} and one more; raise its share of the data."
        )
    if limit_tokens is not None:
        windows = min(windows, -(-limit_tokens // context))
    starts = np.arange(windows, dtype=np.int64) * context
    return (_gather(tokens, starts[i : i + sequences], context) for i in range(0, windows, sequences))


def _gather(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, windows: int) -> np.ndarray:
    """int64 [windows]. NumPy keeps the streams of bit generators between versions and not what `Generator.permutation` makes of
    them: so the raw words are sorted here."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(windows)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False  # it is shared by all callers
    return order
