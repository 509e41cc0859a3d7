"""Peak memory belongs to the process that is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from depthroute.train.devices import peak_memory_bytes


def test_peak_memory_sees_an_allocation_that_is_gone() -> None:
    before = peak_memory_bytes("cpu")
    block = np.ones(before // 8 + (1 << 23))
    del block
    assert peak_memory_bytes("cpu") >= before + (1 << 25)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system keeps no peak per address space")
def test_a_child_does_not_start_at_the_peak_of_its_parent() -> None:
    """`ru_maxrss` does: it would make every arm of a study that is started by a large process equal."""
    block = np.ones(1 << 27)  # 1 GiB
    code = "from depthroute.train.devices import peak_memory_bytes; print(peak_memory_bytes('cpu'))"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert int(child.stdout) < block.nbytes
