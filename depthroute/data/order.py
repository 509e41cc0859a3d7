"""The order in which training reads its windows: a pure function of the data, the seed and the step, with no index in memory.

B sequences in a batch, T tokens of context; a window is T + 1 tokens, so that it holds T inputs and their T targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from depthroute.common.errors import RequestError
from depthroute.data.permutation import NAME, permuted, round_keys
from depthroute.data.shares import shares

ORDER = NAME
"""The name of this order of batches. Checkpoints record it: no run continues in another one."""
BLOCK = 1_000
"""Of so many samples in a row each weighted source has its exact share, rounded to whole ones."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Where in the training split the documents of a source lie: tokens `start` to `end` - 1; and its share of what is read."""

    name: str
    start: int
    end: int
    weight: Fraction | float


@dataclass(frozen=True)
class BatchOrder:
    """Which windows the batch of a step holds. Ranks and micro-batches are rows of that batch: nothing depends on how many there are.

    Samples, one a sequence, are numbered through: sample n is row n mod B of the batch of step n div B, steps counting from 0.

    Without stretches the split is cut into W windows of T targets that do not overlap: window w starts at token w x T. Sample n is
    window `permuted(n mod W, W, round_keys(seed, "source 0", n div W))`: every epoch reads every window once.

    With stretches, the sources of a weighted mixture, each is cut into windows by itself, from its start, and none reads over its end.
    Of every 1,000 samples in a row, a block, source i has c_i: 1,000 times its weight over all weights, rounded down, and what is left of
    the 1,000 one each to the largest remainders, of equal ones to the first sources. Sample n has the number
    q = `permuted(n mod 1000, 1000, round_keys(seed, "blocks", n div 1000))` in its block: the c_0 lowest are the first source's, the next
    c_1 the second's, and so on. The r-th of those of source i, r from 0, is the source's sample m = (n div 1000) x c_i + r: window
    `permuted(m mod W_i, W_i, round_keys(seed, "source i", m div W_i))`. A small source is so read more often than a large one.

    Raises:
        RequestError: a value is not allowed, the corpus is smaller than one batch, or a source than one window.
    """

    number_of_tokens: int
    context: int
    sequences: int
    seed: int
    stretches: tuple[Stretch, ...] = ()

    def __post_init__(self) -> None:
        for name in ("context", "sequences"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} cannot be {getattr(self, name)}; it takes 1 or more.")
        if self.seed < 0:
            raise RequestError(f"seed cannot be {self.seed}; it takes 0 or more.")
        if self.windows_per_epoch < self.sequences:
            parts = f" of {len(self.stretches)} sources" if self.stretches else ""
            raise RequestError(
                f"the {self.number_of_tokens} training tokens{parts} hold {self.windows_per_epoch} whole windows of {self.context} tokens "
                f"and one more, which is less than a batch of {self.sequences} sequences; give more text, fewer sequences or a shorter "
                "context."
            )
        for stretch, windows in zip(self.stretches, self._windows, strict=True):
            if not windows:
                raise RequestError(
                    f"the source {stretch.name} has {stretch.end - stretch.start} training tokens, which is less than a window of "
                    f"{self.context} and one more; give it more text, or leave it out of the mixture."
                )

    @property
    def windows_per_epoch(self) -> int:
        """Whole windows in the split, or in all its stretches; the tokens of a last partial one are never trained on."""
        return sum(self._windows) if self.stretches else max(0, self.number_of_tokens - 1) // self.context

    @cached_property
    def _windows(self) -> list[int]:
        return [max(0, stretch.end - stretch.start - 1) // self.context for stretch in self.stretches]

    @cached_property
    def _counts(self) -> list[int]:
        """Of each source, its samples in a block."""
        return shares(BLOCK, [stretch.weight for stretch in self.stretches]) if self.stretches else []

    def windows(self, step: int) -> np.ndarray:
        """The start offsets in tokens, int64 [sequences], of the batch of a step, counted from 0."""
        if step < 0:
            raise RequestError(f"step cannot be {step}; it takes 0 or more.")
        samples = np.arange(step * self.sequences, (step + 1) * self.sequences, dtype=np.int64)
        if not self.stretches:
            return self._in_source(0, samples, self.windows_per_epoch)
        blocks, places = np.divmod(samples, BLOCK)
        numbers = np.empty_like(places)
        for block in range(int(blocks[0]), int(blocks[-1]) + 1):
            mine = blocks == block
            numbers[mine] = permuted(places[mine], BLOCK, round_keys(self.seed, "blocks", block))
        found, first = np.empty_like(samples), 0
        for source, (stretch, windows, count) in enumerate(zip(self.stretches, self._windows, self._counts, strict=True)):
            mine = (numbers >= first) & (numbers < first + count)
            found[mine] = stretch.start + self._in_source(source, blocks[mine] * count + numbers[mine] - first, windows)
            first += count
        return found

    def _in_source(self, source: int, samples: np.ndarray, windows: int) -> np.ndarray:
        """Where the windows of a source's samples begin, in tokens from its own start."""
        epochs, positions = np.divmod(samples, windows)
        found = np.empty_like(samples)
        for epoch in sorted(set(epochs.tolist())):
            mine = epochs == epoch
            found[mine] = permuted(positions[mine], windows, round_keys(self.seed, f"source {source}", epoch))
        return found * self.context

    def batch(self, tokens: np.ndarray, step: int, rows: slice = slice(None)) -> np.ndarray:
        """The tokens, int64 [rows, context + 1], of a step: inputs are `[:, :-1]`, targets `[:, 1:]`.

        Args:
            tokens: [number_of_tokens], the split this order was made for.
            rows: which sequences of the batch to read: a rank's share, or a micro-batch.
        """
        return gather(tokens, self.windows(step)[rows], self.context)


def gather(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """The windows, int64 [len(starts), context + 1], that begin at `starts`, of tokens that hold a window or more."""
    windows: np.ndarray = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), context + 1)[starts]
    return windows.astype(np.int64)
