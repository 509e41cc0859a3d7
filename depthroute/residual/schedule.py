"""Where blocks of sub-layers end. Sizes are counted in sub-layers; a name that counts layers says so."""

from __future__ import annotations

from itertools import pairwise

from depthroute.common.errors import RequestError


def block_ends(
    sublayers: int,
    *,
    block: int | None = None,
    layers_per_block: int | None = None,
    num_blocks: int | None = None,
    ends: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The 1-based index of the last sub-layer of every block; the last entry is always `sublayers`.

    Give at most one of: `block`, a size in sub-layers; `layers_per_block`, a size in layers (two sub-layers each); `num_blocks`, whose
    boundaries are ceil(sublayers * j / num_blocks) for j = 1..num_blocks (Low-Rank AttnRes, Appendix H; more blocks than sub-layers means
    one each); or the `ends` themselves, for blocks of no one size. With a fixed size the last block is shorter where the size does not
    divide (Attention Residuals, section 3.2). None of them: every sub-layer is its own block, which is Full AttnRes.

    Raises:
        RequestError: more than one of them, ends that do not rise to `sublayers`, or a size that is not positive or larger than the
        network.
    """
    given = {"block": block, "layers_per_block": layers_per_block, "num_blocks": num_blocks}
    named = {name: value for name, value in given.items() if value is not None}
    if ends is not None:
        named["ends"] = len(ends)
    if len(named) > 1:
        raise RequestError(f"give only one of block, layers_per_block, num_blocks and ends, not {' and '.join(named)} together.")
    if ends is not None:
        if not ends or ends[0] < 1 or ends[-1] != sublayers or any(left >= right for left, right in pairwise(ends)):
            raise RequestError(f"ends = {list(ends)} is not allowed; it rises from 1 or more to {sublayers}, the number of sub-layers.")
        return ends
    for name, value in named.items():
        largest = {"block": sublayers, "layers_per_block": sublayers // 2}.get(name)
        if value < 1 or (largest is not None and value > largest):
            bound = f"1 to {largest} for {sublayers} sub-layers" if largest is not None else "1 or more"
            raise RequestError(f"{name} = {value} is not allowed; it takes {bound}.")
    if num_blocks is not None:
        blocks = min(num_blocks, sublayers)
        return tuple(-(-sublayers * j // blocks) for j in range(1, blocks + 1))
    size = block if block is not None else 2 * layers_per_block if layers_per_block is not None else 1
    return (*range(size, sublayers, size), sublayers)
