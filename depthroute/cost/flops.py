"""Multiply-adds per token of depth routing, against those of the Transformer it is added to.

The accounting is that of Low-Rank Attention Residuals, Appendix F: score products and value mixtures are counted; normalisation and
softmax are not. Which reads and which sources count follows its pseudo-code (Appendix H) and reproduces its Table 5 digit for digit:

- every site reads the embedding, each closed block, and the open block's partial sum if there is one;
- the read after the last sub-layer, before the output head, counts;
- the read before the first sub-layer does not: its only source is the embedding, which it returns as it is.

One multiply-add is counted as one operation on both sides of a ratio, so a percentage is the same in FLOPs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from depthroute.common.errors import RequestError
from depthroute.cost.parameters import check_rank, projected_key_parameters


def source_counts(sublayers: int, ends: Sequence[int]) -> tuple[int, ...]:
    """How many sources each of the `sublayers + 1` sites reads, the first (always 1) and the output site included.

    Args:
        sublayers: two per layer.
        ends: the 1-based last sub-layer of each block, as `depthroute.residual.schedule.block_ends` returns them. Blocks of one
            sub-layer give Full AttnRes.

    Raises:
        RequestError: `ends` does not rise strictly from at least 1 to `sublayers`.
    """
    if not ends or ends[0] < 1 or ends[-1] != sublayers or any(left >= right for left, right in pairwise(ends)):
        raise RequestError(f"block ends {tuple(ends)} are not allowed; they rise strictly from 1 or more and end with {sublayers}.")
    counts = []
    for written in range(sublayers + 1):
        closed = bisect_right(ends, written)
        open_block = written > (ends[closed - 1] if closed else 0)
        counts.append(1 + closed + open_block)
    return tuple(counts)


def routing_flops(width: int, rank: int, counts: Sequence[int]) -> int:
    """Multiply-adds per token of scoring and mixing: (width + rank) x the sources read (Appendix F, eq. 35).

    Args:
        width: coordinates of a source, which is what is mixed.
        rank: coordinates of a key, which is what is scored; `width` for plain Attention Residuals (eq. 33).
        counts: sources of each read, as `source_counts` returns them. A site read in two roles (Role-Decoupled) is two reads: give its
            count twice. A read of one source costs nothing.

    Raises:
        RequestError: a rank outside 1 to `width`.
    """
    check_rank(width, rank)
    return (width + rank) * sum(count for count in counts if count > 1)


def projected_key_flops(layers: int, width: int, mlp_width: int, rank: int, attention_width: int | None = None) -> int:
    """Multiply-adds per token of projecting keys: rank x (layers x (width + mlp_width) + width) (Appendix F, eq. 41).

    Each output projection grows by `rank` rows, and the embedding gets a projection of its own. It comes on top of `routing_flops`.

    Raises:
        RequestError: a rank outside 1 to `width`.
    """
    return projected_key_parameters(layers=layers, width=width, mlp_width=mlp_width, rank=rank, attention_width=attention_width)


def core_flops(
    layers: int, width: int, mlp_width: int, *, attention_width: int | None = None, key_value_width: int | None = None
) -> int:
    """Multiply-adds per token of the weight matrices of a SwiGLU Transformer: layers x (4 width^2 + 3 width mlp_width) (eq. 68).

    `attention_width` is that of all heads together, `key_value_width` that of all key-value heads; None is `width` for the first and
    `attention_width` for the second.

    Embedding, output head and attention scores are left out, as in the paper; with them, routing is a smaller part of the whole.
    """
    attention_width = attention_width or width
    key_value_width = key_value_width or attention_width
    return layers * (2 * width * attention_width + 2 * width * key_value_width + 3 * width * mlp_width)


def kernel_reduction(width: int, rank: int) -> float:
    """The fraction of `routing_flops` that keys of `rank` coordinates save against full-width keys (Appendix F, eq. 38)."""
    check_rank(width, rank)
    return (width - rank) / (2 * width)


def projected_cache_increase(width: int, rank: int) -> float:
    """The fraction by which projected keys enlarge the stored sources (Appendix F, eq. 51). Sliced keys are views and add nothing."""
    check_rank(width, rank)
    return rank / width
