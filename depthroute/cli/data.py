"""`depthroute data`: text to token shards."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from depthroute.cli.options import read, show


@dataclass(frozen=True, kw_only=True)
class Options:
    """Split text into documents, train a tokenizer and write token shards. A folder that is complete is left as it is."""

    out: tyro.conf.Positional[Path]
    """The folder of the shards."""
    source: str = "docstrings"
    """`docstrings` (the documentation of the installed Python packages), or a parquet, JSONL(.gz) or text file, or a folder of them."""
    text_column: str = "text"
    """The column or key that holds the text."""
    id_column: str | None = None
    """The column or key that identifies a document. Default: a hash of its text."""
    vocabulary: int = 2048
    """Entries of the tokenizer."""
    sample_one_in: int = 4
    """The tokenizer is trained on one training document in so many."""
    validation_share: float = 0.05
    """Share of the documents set aside for validation."""
    test_share: float = 0.005
    """Share of the documents set aside and not used."""
    salt: str = "depthroute"
    """Another salt gives another split."""
    json: bool = False
    """Print the manifest's facts as JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "data", arguments)
    from depthroute.cli.facts import data_facts
    from depthroute.data import PrepareConfig, prepare

    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(PrepareConfig)}
    prepare(PrepareConfig(**fields), options.out, report=lambda line: print(line, file=sys.stderr))
    show(data_facts(options.out), options.json)
