"""`depthroute data`: text to token shards (here), and what is in them (`data_views`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from depthroute.cli.options import read, show
from depthroute.common.errors import RequestError, choose

COMMANDS = {
    "prepare": "turn text into token shards; resumes by itself",
    "verify": "prove that token shards are whole, or say what is wrong with them",
    "show": "documents with the borders of their tokens",
    "stats": "lengths, ids, entropy, and what occurs more than once",
}
HELP = f"""usage: depthroute data COMMAND [OPTIONS]

{chr(10).join(f"  {name:<8} {text}" for name, text in COMMANDS.items())}

  depthroute data COMMAND --help   the options of a command
"""
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Split text into documents, train a tokenizer (or take a ready one) and write token shards. An interrupted folder is gone on with, a
    complete one is left as it is."""

    sources: tyro.conf.Positional[tuple[str, ...]] = ()
    """`docstrings` (the documentation of the installed Python packages), `multi-hop` (synthetic facts, and questions that take a known
    number of look-ups), parquet, JSONL or text files, folders of them, or hf:NAME, a data set of the Hugging Face hub, which is downloaded.
    They follow each other in every split. Default: docstrings."""
    out: Path
    """The folder of the shards."""
    weights: tuple[float, ...] = ()
    """The share of each source in the training tokens, relative to each other. Default: as long as they are."""
    text_column: tuple[str, ...] = ()
    """The column or key of the text, dots lead into nested ones: one for all sources, or one for each; `none` finds it. Default: that of a
    schema that is known, or `text`."""
    id_column: tuple[str, ...] = ()
    """The column or key that identifies a document: one for all sources, or one for each; `none` finds it. Default: that of a schema that
    is known, or else a hash of the text."""
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
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What happens at a row that cannot be read: an error, or it is left out and counted."""
    workers: int | None = None
    """Processes that read and tokenize. Default: one for every processor."""
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
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        if not arguments:
            raise SystemExit(2)
        return
    name, *rest = arguments
    if name not in COMMANDS:
        if any(word.partition("=")[0] == "--source" for word in arguments):
            raise RequestError("`depthroute data OUT --source SOURCE` is now `depthroute data prepare SOURCE --out OUT`.")
        raise RequestError(choose("data command", name, COMMANDS))
    if name == "prepare":
        _prepare(rest)
        return
    from depthroute.cli import data_views

    data_views.main(name, rest)


def _prepare(arguments: Sequence[str]) -> None:
    options = read(Prepare, "data prepare", arguments)
    from depthroute.cli.facts import data_facts
    from depthroute.cli.progress import Lines
    from depthroute.data import MULTI_HOP, MultiHopConfig, PrepareConfig, Source, prepare
    from depthroute.data.config import DOCSTRINGS

    paths = options.sources or (DOCSTRINGS,)
    if options.weights and len(options.weights) != len(paths):
        raise RequestError(f"--weights has {len(options.weights)} values for {len(paths)} sources; it takes one for each, or leave it out.")
    texts, ids = _columns("--text-column", options.text_column, paths), _columns("--id-column", options.id_column, paths)
    weights = options.weights or (None,) * len(paths)
    sources = tuple(
        Source(path=path, text_column=text, id_column=id_, weight=weight)
        for path, text, id_, weight in zip(paths, texts, ids, weights, strict=True)
    )
    made = {name: value for name in _names(MultiHopConfig) if (value := getattr(options, name)) is not None}
    multi_hop = MultiHopConfig(**made) if MULTI_HOP in paths or made else None
    fields = {name: getattr(options, name) for name in _names(PrepareConfig) if name not in ("sources", "multi_hop")}
    config = PrepareConfig(sources=sources, multi_hop=multi_hop, **fields)
    with Lines() as lines:
        prepare(config, options.out, workers=options.workers, report=lines.report, progress=lines.progress)
    show(data_facts(options.out), options.json)


def _columns(option: str, given: tuple[str, ...], paths: tuple[str, ...]) -> tuple[str | None, ...]:
    """One for each source."""
    if len(given) not in (0, 1, len(paths)):
        raise RequestError(
            f"{option} has {len(given)} values for {len(paths)} sources; it takes one for all, one for each ({NONE} for those without), or "
            "leave it out."
        )
    return tuple(None if name == NONE else name for name in (given * len(paths) if len(given) == 1 else given or (NONE,) * len(paths)))


def _names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]
