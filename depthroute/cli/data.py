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
    """Split text into documents, train a tokenizer (or take a ready one) and write token shards. A complete folder is left as it is."""

    out: tyro.conf.Positional[Path]
    """The folder of the shards."""
    source: str = "docstrings"
    """`docstrings` (the documentation of the installed Python packages), `multi-hop` (synthetic facts, and questions that take a known
    number of look-ups), or a parquet, JSONL(.gz) or text file, or a folder of them."""
    text_column: str = "text"
    """The column or key that holds the text."""
    id_column: str | None = None
    """The column or key that identifies a document. Default: a hash of its text."""
    vocabulary: int = 2048
    """Entries of the tokenizer that is trained."""
    sample_one_in: int = 4
    """The tokenizer is trained on one training document in so many."""
    tokenizer: str | None = None
    """A ready tokenizer, such as a checkpoint's: a tokenizer.json of the `tokenizers` library; or cl100k, which the extra `cl100k` has.
    Default: one is trained."""
    end_of_document: str | None = None
    """The token of the ready tokenizer that ends a document. Default: the `eos_token` of the tokenizer_config.json beside it, or a usual
    name."""
    begin_of_document: str | None = None
    """A token of the ready tokenizer to put in front of every document, as its checkpoint was trained; `depthroute adopt` says which.
    Default: none."""
    validation_share: float = 0.05
    """Share of the documents set aside for validation."""
    test_share: float = 0.005
    """Share of the documents set aside and not used."""
    salt: str = "depthroute"
    """Another salt gives another split."""
    entities: int | None = None
    """Of multi-hop: entities in a document, on one cycle. Default: 8."""
    hops: int | None = None
    """Of multi-hop: the most look-ups that a question takes. Default: 4."""
    queries: int | None = None
    """Of multi-hop: questions in a document. Default: 12."""
    statements: int | None = None
    """Of multi-hop: how often a document states its facts before it asks. Default: 2."""
    documents: int | None = None
    """Of multi-hop: documents in all. Default: 40000."""
    seed: int | None = None
    """Of multi-hop: another seed gives other documents. Default: 0."""
    json: bool = False
    """Print the manifest's facts as JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "data", arguments)
    from depthroute.cli.facts import data_facts
    from depthroute.data import MULTI_HOP, MultiHopConfig, PrepareConfig, prepare

    names = [field.name for field in dataclasses.fields(MultiHopConfig)]
    made = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(PrepareConfig) if field.name != "multi_hop"}
    multi_hop = MultiHopConfig(**made) if options.source == MULTI_HOP or made else None
    prepare(PrepareConfig(**fields, multi_hop=multi_hop), options.out, report=lambda line: print(line, file=sys.stderr))
    show(data_facts(options.out), options.json)
