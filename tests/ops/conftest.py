"""Skips what needs the compiled kernel on a machine without a C compiler."""

from __future__ import annotations

import pytest

from depthroute.ops import native


@pytest.fixture
def requires_native() -> None:
    reason = native.unavailable()
    if reason is not None:
        pytest.skip(reason)
