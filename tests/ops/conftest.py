"""Skips what needs the compiled kernel on a machine without a C compiler, and lets tests import `literal`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from depthroute.ops import native

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing by itself


@pytest.fixture
def requires_native() -> None:
    reason = native.missing()
    if reason is not None:
        pytest.skip(reason)
