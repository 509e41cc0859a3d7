"""`depthroute study`: matched arms over seeds, from text to the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from depthroute.cli.options import changes, read

if TYPE_CHECKING:
    from depthroute.study.plan import Study
    from depthroute.train import RunConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train matched arms over seeds and write the report. The same command continues an interrupted study; what is complete is kept.

    Without options: PreNorm, Block AttnRes and RD-AttnRes in one small body on the documentation of the installed Python packages.
    """

    out: tyro.conf.Positional[Path] = Path("runs/study")
    """The study folder."""
    baselines: bool = False
    """Every residual method against PreNorm, and a learning-rate check in each family, in place of --arm. Its small form, half an hour on
    two cores: --seeds 1 --set train.steps=150."""
    arm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]METHOD"), tyro.conf.UseAppendAction] = ()
    """A residual method, the parent first: --arm prenorm --arm block:8 --arm mine=rd:8,rank=32. Default: prenorm, block, rd."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One pair a seed."""
    recipe: str = "small"
    """The body and its training; `depthroute recipes` lists them."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """Change a field in every arm, such as train.steps=100 or model.width=64."""
    data: Path | None = None
    """Token shards made by `depthroute data`. Default: the default corpus, prepared in the study folder."""
    workers: int | None = None
    """Runs trained at the same time. Default: as many as the cores allow at train.threads each; one where that is not set."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "study", arguments)
    from depthroute.common.errors import RequestError
    from depthroute.common.processors import usable_processors
    from depthroute.data import PrepareConfig, TokenDataset, prepare
    from depthroute.ops import kernel_unavailable
    from depthroute.recipes import recipe, run_of
    from depthroute.recipes.studies import DEFAULT_ARMS, baseline_study, matched_study
    from depthroute.report import write_report
    from depthroute.study.collect import check_complete
    from depthroute.study.runner import run_study

    if options.out.exists() and not options.out.is_dir():
        raise RequestError(f"{options.out} is a file; name a folder for the study.")
    settings = changes(options.set)
    if "train.seed" in settings:
        raise RequestError("--set train.seed does not apply to a study; name its seeds: --seeds 1 2 3.")
    chosen = recipe(options.recipe)
    data = options.data or options.out / "data"
    wanted = run_of(chosen, data, residual="prenorm", settings=settings)
    if options.baselines and options.arm:
        raise RequestError("--baselines is all methods, and --arm names some; give one of the two.")

    def plan(base: RunConfig) -> Study:
        if options.baselines:
            return baseline_study(chosen, base, seeds=options.seeds)
        return matched_study(chosen, base, arms=options.arm or DEFAULT_ARMS, seeds=options.seeds)

    plan(wanted)  # a wrong request is refused before the text is read
    if options.data is None:
        prepare(PrepareConfig(vocabulary=wanted.model.vocabulary), data, report=lambda line: print(line, file=sys.stderr))
    base = run_of(chosen, data, vocabulary=TokenDataset.open(data).vocabulary, residual="prenorm", settings=settings)
    study = plan(base)
    slow = kernel_unavailable()
    if slow and base.train.device != "cuda":
        print(f"depth attention runs without its native kernel and is slower: {slow}.", file=sys.stderr)
    threads = base.train.threads
    workers = options.workers or (min(usable_processors() // threads, len(study.arms) * len(options.seeds)) if threads else 1)
    statistics = run_study(study, options.out, workers=max(1, workers))
    print(f"report: {write_report(options.out)}")
    check_complete(statistics)
