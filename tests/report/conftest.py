"""Made-up studies and a browser for the tests of reports."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteStudy = Callable[..., Path]


@pytest.fixture(scope="session")
def scenarios() -> dict[str, Callable[..., dict[str, Any]]]:
    """The studies of scenarios.py by name, as keyword arguments of `write_study`."""
    return runpy.run_path(str(Path(__file__).with_name("scenarios.py")))


@pytest.fixture(scope="session")
def write_study() -> WriteStudy:
    """`write_study(folder, seeds=..., unfinished=..., arms=..., comparisons=...)` of synthetic_study.py."""
    function: WriteStudy = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))["write_study"]
    return function
