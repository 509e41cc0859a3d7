"""What the tests of the preparation share."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from depthroute.data import Corpus, Document, FileCorpus, PrepareConfig

Writer = Callable[..., Path]
LINE_KINDS = pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.jsonl.zst"])


def config(source: Path, **changes: Any) -> PrepareConfig:
    settings: dict[str, Any] = {"id_column": "id", "vocabulary": 300, "validation_share": 0.1, "test_share": 0.05}
    return PrepareConfig.of(str(source), **(settings | changes))


def packed(path: Path, lines: bytes) -> Path:
    """The file, compressed as its name says."""
    made = {".gz": gzip.compress, ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)}.get(path.suffix, bytes)
    path.write_bytes(made(lines))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


def read(corpus: Corpus, skipped: Counter[str] | None = None) -> list[Document]:
    """All documents of a corpus."""
    counted = Counter[str]() if skipped is None else skipped
    return [document for part in corpus.parts(counted) for document in corpus.documents(part, counted)]


def documents_of(source: Path) -> list[Document]:
    return read(FileCorpus(source, id_column="id"))


def run_prepare(settings: PrepareConfig, directory: Path, *, before: str = "", report: str = "None", **environment: str) -> int:
    """`prepare` in a new process; its exit status."""
    code = f"""
import json, os, signal, sys
from pathlib import Path
from depthroute.common.config import from_json
from depthroute.data import Manifest, PrepareConfig, prepare
{before}
prepare(from_json(PrepareConfig, json.loads(sys.argv[1])), Path(sys.argv[2]), report={report})
"""
    command = [sys.executable, "-W", "error", "-c", code, json.dumps(dataclasses.asdict(settings)), str(directory)]
    return subprocess.run(command, env=os.environ | environment).returncode
