"""Data directories whose every token is chosen by a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.common.files import write_json
from depthroute.data import SPLITS, TokenDataset

END = 3


def directory(path: Path, sources: dict[str, dict[str, Sequence[int]]], weights: Sequence[float] | None = None) -> TokenDataset:
    """A directory of several sources, of which each split holds documents of the given lengths in tokens.

    Token number i of a split, counted over all sources, is i + 10; that before a boundary is END.
    """
    path.mkdir(parents=True)
    files, facts = [], {}
    for split in SPLITS:
        lengths = [length for source in sources.values() for length in source.get(split, ())]
        boundaries = np.cumsum([0, *lengths], dtype="<i8")
        tokens = np.arange(10, boundaries[-1] + 10, dtype="<u2")
        tokens[boundaries[1:] - 1] = END
        facts[split] = {"documents": len(lengths), "tokens": len(tokens), "bytes": len(tokens)}
        for name, array in ((f"{split}.bin", tokens), (f"{split}.index.bin", boundaries)):
            array.tofile(path / name)
            files.append({"name": name, "bytes": array.nbytes, "sha256": ""})
    every = list(weights or [None] * len(sources))
    manifest: dict[str, Any] = {
        "format": 1,
        "corpus": {"name": "by hand", "content_hash": "", "contents": [], "missing": []},
        "prepare": {"sources": [{"path": name, "weight": weight} for name, weight in zip(sources, every, strict=True)]},
        "tokenizer": {"sha256": "", "training_documents": 0, "training_bytes": 0},
        "vocabulary": 60_000,
        "dtype": "uint16",
        "splits": facts,
        "skipped": [],
        "unigram_entropy_nats": 1.0,
        "bytes_per_token": 1.0,
        "files": files,
        "sources": [{"name": name, "columns": ["text"], "splits": _of_source(source)} for name, source in sources.items()],
        "end": END,
    }
    write_json(path / "manifest.json", manifest)
    return TokenDataset.open(path)


def _of_source(source: dict[str, Sequence[int]]) -> dict[str, dict[str, int]]:
    tokens = {split: sum(source.get(split, ())) for split in SPLITS}
    return {split: {"documents": len(source.get(split, ())), "tokens": tokens[split], "bytes": tokens[split]} for split in SPLITS}
