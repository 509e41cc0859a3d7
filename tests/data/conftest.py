from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = ["depth", "route", "query", "key", "value", "source", "block", "mixture", "layer", "norm", "residual", "stream", "weight", "loss"]


def _text(number: int) -> str:
    words = random.Random(number)
    return " ".join(words.choice(WORDS) for _ in range(60)) + f" ({number})."


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write documents made of a few words, with ids, to a JSONL file."""

    def write(documents: int = 300, name: str = "documents.jsonl") -> Path:
        path = tmp_path / name
        rows = ({"id": f"document {i}", "text": _text(i)} for i in range(documents))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
