"""The windows that an evaluation reads: the same ones, in the same order, for every model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from depthroute.common.errors import RequestError
from depthroute.data.order import gather


def evaluation_windows(tokens: np.ndarray, context: int, *, sequences: int = 16) -> Iterator[np.ndarray]:
    """Yield the windows an evaluation reads, in order and always the same: int64 [n, context + 1] with n <= sequences, and, where the
    targets do not fill whole windows, those that are left over as one shorter window, int64 [1, rest + 1], at the end.

    Together they hold every target, once and in order.

    Args:
        tokens: [targets + 1], as `TokenDataset.held_out` gives them: the first is an input alone.

    Raises:
        RequestError: a value is not allowed, or there is no target.
    """
    for name, value in (("context", context), ("sequences", sequences)):
        if value < 1:
            raise RequestError(f"{name} cannot be {value}; it takes 1 or more.")
    targets = len(tokens) - 1
    if targets < 1:
        raise RequestError(
            f"the split has {len(tokens)} tokens, and an evaluation needs one and another that follows it; raise its share of the data."
        )
    return _windows(tokens, context, targets, sequences)


def _windows(tokens: np.ndarray, context: int, targets: int, sequences: int) -> Iterator[np.ndarray]:
    whole, rest = divmod(targets, context)
    starts = np.arange(whole, dtype=np.int64) * context
    for first in range(0, whole, sequences):
        yield gather(tokens, starts[first : first + sequences], context)
    if rest:
        yield gather(tokens, np.array([whole * context]), rest)
