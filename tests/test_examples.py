"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


SAYS = {"own_model.py": "nats", "custom_residual.py": "a = 0: PreNorm: holds", "adopted_llama.py": "route queries have moved"}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs(name: str) -> None:
    path = ROOT / "examples" / name
    program = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
