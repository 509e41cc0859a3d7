"""Block boundaries from a pilot run: sub-layers whose outputs point the same way share a block.

Attention Residuals leaves adaptive blocks open. Here the pilot decides once, and training with the boundaries it found is as static as
with any block size: `block,ends=[...]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from depthroute.analysis.watch import watching
from depthroute.common.errors import RequestError
from depthroute.model import Decoder


@torch.no_grad()
def output_similarity(model: Decoder, batches: Iterable[Tensor]) -> list[float]:
    """The cosine between what consecutive sub-layers write, mean over tokens: 2L - 1 numbers from -1 to 1, the first that of attention
    0 and MLP 0.

    Args:
        batches: token ids [B, T] each (int64), on the model's device. Sums are float64, and memory does not grow with the batches.
    """
    previous: list[Tensor] = []
    totals = torch.zeros(2 * len(model.layers) - 1, dtype=torch.float64)
    tokens = 0

    def compare(site: int, output: Tensor) -> None:
        exact = output.double()
        if previous:
            totals[site - 1] += F.cosine_similarity(previous.pop(), exact, dim=-1).sum().item()
        previous.append(exact)

    training = model.training
    model.eval()
    try:
        with watching(model.residual, on_write=compare):
            for batch in batches:
                previous.clear()
                model(batch)
                tokens += batch.numel()
    finally:
        model.train(training)
    if not tokens:
        raise RequestError("no tokens were given; output similarity is a mean over tokens.")
    return (totals / tokens).tolist()


def ends_of(similarity: Sequence[float], blocks: int) -> tuple[int, ...]:
    """The 1-based last sub-layers of that many blocks: cut where consecutive outputs are least alike, the earliest of equals first.

    Raises:
        RequestError: more blocks than sub-layers, or none.
    """
    sublayers = len(similarity) + 1
    if not 1 <= blocks <= sublayers:
        raise RequestError(f"blocks = {blocks} is not allowed; it takes 1 to {sublayers}, the number of sub-layers.")
    cuts = sorted(range(1, sublayers), key=lambda end: similarity[end - 1])[: blocks - 1]
    return (*sorted(cuts), sublayers)
