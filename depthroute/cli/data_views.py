"""`depthroute data verify`, `show` and `stats`: what is in token shards."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from depthroute.cli.options import read
from depthroute.cli.progress import Lines

if TYPE_CHECKING:
    from depthroute.data.statistics import SplitStatistics, Statistics, StretchStatistics
    from depthroute.data.verify import Check

NAMED_FAILURES = 3
BAR = 40
COLUMNS = {
    "documents": "documents", "tokens": "tokens", "bytes": "bytes", "bytes_per_token": "bytes per token", "lengths.mean": "mean length",
    "lengths.p10": "10 % have at most", "lengths.median": "50 %", "lengths.p90": "90 %", "lengths.p99": "99 %", "lengths.max": "longest",
    "entropy_nats": "entropy, nats", "entropy_bits": "entropy, bits", "vocabulary_used": "ids that occur",
    "duplicates": "texts again in the split",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Prove token shards: sizes and hashes of all files, counts, borders of documents, ids, splits, and a sample decoded and encoded again.

    Every file is read once. The exit status is 1 where something is wrong.
    """

    directory: tyro.conf.Positional[Path]
    """The folder of the shards."""
    sample: int = 200
    """Documents that are decoded and encoded again; 0: none."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print documents with the borders of their tokens: in two colours on a terminal, with a mark in a pipe or where NO_COLOR is set."""

    directory: tyro.conf.Positional[Path]
    """The folder of the shards."""
    split: Literal["train", "validation", "test"] | None = None
    """Default: train."""
    document: int | None = None
    """The number of the first document; a negative one counts from the end. Default: 0."""
    count: int | None = None
    """How many documents. Default: 1."""
    id: str | None = None
    """The documents with this id, whatever their split."""
    tokens: bool = False
    """A table with the id, the text and the bytes of every token."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Lengths of documents, ids, entropy, and documents that occur more than once, by split and by source. All tokens are read once."""

    directory: tyro.conf.Positional[Path]
    """The folder of the shards."""
    json: bool = False
    """Print JSON."""


def main(name: str, arguments: Sequence[str]) -> None:
    commands: dict[str, Callable[[Sequence[str]], None]] = {"verify": _verify, "show": _show, "stats": _stats}
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts and names hold characters that a terminal's encoding may lack
        sys.stdout.reconfigure(errors="backslashreplace")
    commands[name](arguments)


def _verify(arguments: Sequence[str]) -> None:
    options = read(Verify, "data verify", arguments)
    from depthroute.common.config import to_json
    from depthroute.common.errors import FailureError
    from depthroute.data.verify import verify

    with Lines() as lines:
        found = verify(options.directory, sample=options.sample, progress=lines.progress)
    if options.json:
        text = json.dumps({"ok": found.ok, **to_json(found)}, indent=2)
    else:
        width = max(len(check.name) for check in found.checks)
        text = "\n".join(f"{_verdict(check):<5}  {check.name:<{width}}  {check.found}" for check in found.checks)
    try:
        print(text, flush=True)
    except OSError:  # what is wrong is said on standard error, whoever reads the list
        if found.ok:
            raise
    if not found.ok:
        first = "; ".join(f"{check.name}: {check.found}" for check in found.failures[:NAMED_FAILURES])
        more = len(found.failures) - NAMED_FAILURES
        raise FailureError(f"{options.directory} is not what its manifest says. {first}{f'; and {more} more' if more > 0 else ''}.")


def _verdict(check: Check) -> str:
    return {True: "ok", False: "FAILS", None: "-"}[check.ok]


def _show(arguments: Sequence[str]) -> None:
    options = read(Show, "data show", arguments)
    from depthroute.common.errors import RequestError
    from depthroute.data.show import Shower

    if options.id is not None and (options.split, options.document, options.count) != (None, None, None):
        raise RequestError("--id finds its documents by itself; leave out --split, --document and --count.")
    shower = Shower(options.directory)
    if options.id is not None:
        documents = shower.with_id(options.id)
    else:
        count = 1 if options.count is None else options.count
        documents = shower.documents(options.split or "train", options.document or 0, count)
    if options.json:
        print(json.dumps([{**asdict(document), "bytes": document.bytes} for document in documents], indent=2))
        return
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for place, document in enumerate(documents):
        print(f"{chr(10) * (place > 0)}{document.header}")
        if not options.tokens:
            print(document.marked(colours=colours))
            continue
        print(f"{'id':>8}  {'bytes':>5}  text")
        for token in document.tokens:
            print(f"{token.id:>8}  {token.bytes:>5}  {_spaced(token.spelling)}")


def _spaced(spelling: str) -> str:
    """A space at the edge of a cell would not be seen."""
    return spelling.replace(" ", "␠")


def _stats(arguments: Sequence[str]) -> None:
    options = read(Stats, "data stats", arguments)
    from depthroute.common.config import to_json
    from depthroute.data.statistics import statistics_of

    with Lines() as lines:
        found = statistics_of(options.directory, progress=lines.progress)
    if options.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        print("\n".join(_report(found)))


def _report(found: Statistics) -> list[str]:
    lines = _table([(split.split, split.all) for split in found.splits])
    lines += [_row("texts of training documents", [_number(split.in_train) for split in found.splits])]
    if found.ids_in_several_splits is None:
        lines += ["ids of documents are not recorded"]
    else:
        lines += [_row("ids again in the split", [_number(split.duplicate_ids) for split in found.splits])]
        lines += [f"ids in more than one split: {found.ids_in_several_splits:,}"]
    for split in found.splits:
        if split.all.documents:
            lines += ["", *_of_split(split)]
    return lines


def _of_split(split: SplitStatistics) -> list[str]:
    lengths = split.all.lengths
    assert lengths is not None
    lines = [f"{split.split}: tokens of a document, and how many have so many"]
    most = max(one.documents for one in lengths.histogram)
    for one in lengths.histogram:
        # A bin that has documents has a bar.
        bar = "#" * -(-BAR * one.documents // most)
        lines.append(f"  {f'{one.low:,} to {one.high:,}':>23}  {one.documents:>12,}  {bar}".rstrip())
    lines.append(f"{split.split}: the most frequent ids")
    lines += [f"  {one.id:>23}  {one.count:>12,}  {_spaced(one.spelling)}" for one in split.all.frequent]
    if split.sources:
        lines += [f"{split.split}: by source", *_table([(source.name, source.all) for source in split.sources])]
    return lines


def _table(columns: Sequence[tuple[str, StretchStatistics]]) -> list[str]:
    """Columns by their titles; two sources may have the same."""
    lines = [_row("", [title for title, _ in columns])]
    for path, title in COLUMNS.items():
        lines.append(_row(title, [_number(_field(stretch, path)) for _, stretch in columns]))
    return lines


def _row(title: str, cells: Sequence[str]) -> str:
    return f"{title:<28}" + "".join(f"  {cell:>18}" for cell in cells)


def _field(stretch: StretchStatistics, path: str) -> int | float | None:
    value: object = stretch
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    assert value is None or isinstance(value, int | float)
    return value


def _number(value: int | float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
