from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed

from tests.parallel.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes that run functions of test files as the ranks of a group: `world.run(2, function, *arguments)`."""
    if not distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    found = World(4)
    yield found
    found.close()
