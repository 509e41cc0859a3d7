"""Where blocks end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthroute.common.errors import RequestError
from depthroute.residual import block_ends


@given(sublayers=st.integers(1, 60), block=st.integers(1, 60))
def test_blocks_of_a_size_fill_up_and_the_last_takes_the_rest(sublayers: int, block: int) -> None:
    if block > sublayers:
        with pytest.raises(RequestError, match=f"block = {block} is not allowed; it takes 1 to {sublayers} for {sublayers} sub-layers"):
            block_ends(sublayers, block=block)
        return
    ends = block_ends(sublayers, block=block)
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert sizes[:-1] == [block] * (len(ends) - 1) and 1 <= sizes[-1] <= block and ends[-1] == sublayers


@given(sublayers=st.integers(1, 60), count=st.integers(1, 80))
def test_a_number_of_blocks_has_ceil_boundaries(sublayers: int, count: int) -> None:
    count_used = min(count, sublayers)
    assert block_ends(sublayers, num_blocks=count) == tuple(math.ceil(sublayers * j / count_used) for j in range(1, count_used + 1))


@given(layers=st.integers(1, 30), size=st.integers(1, 30))
def test_layers_are_two_sub_layers(layers: int, size: int) -> None:
    if size <= layers:
        assert block_ends(2 * layers, layers_per_block=size) == block_ends(2 * layers, block=2 * size)


def test_by_hand() -> None:
    assert block_ends(4) == (1, 2, 3, 4)
    assert block_ends(7, block=3) == (3, 6, 7)
    assert block_ends(6, num_blocks=4) == (2, 3, 5, 6)
    assert block_ends(10, layers_per_block=2) == (4, 8, 10)
    assert block_ends(3, num_blocks=9) == (1, 2, 3)
    assert block_ends(6, ends=(1, 4, 6)) == (1, 4, 6)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"block": 0}, "block = 0 is not allowed; it takes 1 to 6"),
        ({"num_blocks": 0}, "num_blocks = 0 is not allowed; it takes 1 or more"),
        ({"layers_per_block": 4}, "layers_per_block = 4 is not allowed; it takes 1 to 3 for 6 sub-layers"),
        ({"block": 2, "num_blocks": 3}, "only one of block, layers_per_block, num_blocks and ends, not block and num_blocks together"),
        ({"block": 2, "ends": (2, 6)}, "not block and ends together"),
        ({"ends": ()}, "ends = \\[\\] is not allowed; it rises from 1 or more to 6"),
        ({"ends": (0, 6)}, "ends = \\[0, 6\\] is not allowed"),
        ({"ends": (2, 2, 6)}, "ends = \\[2, 2, 6\\] is not allowed"),
        ({"ends": (2, 5)}, "ends = \\[2, 5\\] is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        block_ends(6, **arguments)
