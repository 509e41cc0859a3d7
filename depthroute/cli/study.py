"""`depthroute study`: matched arms over seeds, from text to the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from depthroute.cli.options import changes, pairs, read
from depthroute.common.say import say

if TYPE_CHECKING:
    from depthroute.data import PrepareConfig
    from depthroute.study.executors import Executor
    from depthroute.study.plan import Study


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train matched arms over seeds and write the report. The same command continues an interrupted study; what is complete is kept.

    Without options: PreNorm, Block AttnRes and RD-AttnRes in one small body on the documentation of the installed Python packages.
    """

    out: tyro.conf.Positional[Path] = Path("runs/study")
    """The study folder."""
    study: str | None = None
    """A study of a paper, in place of --arm: role-decoupled, low-rank, ...; `depthroute recipes` lists them."""
    form: Literal["small", "paper"] = "small"
    """Of --study: the paper's sizes, or all of it scaled down for two cores."""
    baselines: bool = False
    """Every residual method against PreNorm, and a learning-rate check in each family, in place of --arm. Its small form, half an hour on
    two cores: --seeds 1 --set train.steps=150."""
    arm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]METHOD"), tyro.conf.UseAppendAction] = ()
    """A residual method, the parent first: --arm prenorm --arm block:8 --arm mine=rd:8,rank=32. Default: prenorm, block, rd."""
    seeds: tuple[int, ...] = ()
    """One pair a seed. Default: 1 2 3, or those of --study."""
    recipe: str | None = None
    """The body and its training, with --arm or --baselines; `depthroute recipes` lists them. Default: small."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """Change a field in every arm, such as train.steps=100 or model.width=64."""
    data: Path | None = None
    """Token shards made by `depthroute data`. Default: the default corpus, prepared once and kept in the study folder."""
    plan: bool = False
    """Write the plan, say what it costs, and stop."""
    extend: bool = False
    """Add arms, seeds or comparisons to the plan that is there. Reports mark what was added."""
    workers: int | None = None
    """Runs trained at the same time. Default: as many as the cores allow at train.threads each; where that is not set, whatever split of
    the cores is measured to be the fastest."""
    cores: int | None = None
    """Cores to use. Default: those that this process may use."""
    memory: str | None = None
    """Memory to use, such as 12G. Default: what the machine has free."""
    slurm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE"), tyro.conf.UseAppendAction] = ()
    """Train every run as a Slurm job: --slurm partition=gpu --slurm time=120. Needs the extra `slurm`."""
    log: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SINK"), tyro.conf.UseAppendAction] = ()
    """Also send the metrics of every run to tensorboard, trackio or wandb."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "study", arguments)
    from depthroute.common.errors import RequestError
    from depthroute.data import TokenDataset
    from depthroute.data.cache import prepare_shared
    from depthroute.ops import kernel_unavailable
    from depthroute.report import write_report
    from depthroute.study.budget import size_in_bytes
    from depthroute.study.collect import check_complete
    from depthroute.study.executors import LocalExecutor
    from depthroute.study.runner import run_study
    from depthroute.study.slurm import on_slurm

    if options.out.exists() and not options.out.is_dir():
        raise RequestError(f"{options.out} is a file; name a folder for the study.")
    data = options.data or options.out / "data"
    first = _study(options, data)  # a wrong request is refused before the text is read
    if options.data is None:
        prepare_shared(_source(options, first.base.model.vocabulary), data, report=lambda line: say(line, sys.stderr))
    dataset = TokenDataset.open(data)
    study = _study(options, data, dataset.vocabulary, dataset.end)
    slow = kernel_unavailable()
    if slow and study.base.train.device != "cuda":
        say(f"depth attention runs without its native kernel and is slower: {slow}.", sys.stderr)
    memory = None if options.memory is None else size_in_bytes(options.memory)
    executor = on_slurm(pairs("--slurm", options.slurm, "KEY=VALUE, such as partition=gpu")) if options.slurm else LocalExecutor
    if options.plan:
        _say_plan(study, options, memory, executor)
        return
    statistics = run_study(
        study, options.out, workers=options.workers, cores=options.cores, memory_bytes=memory, executor=executor, sinks=options.log,
        extend=options.extend,
    )  # fmt: skip
    print(f"report: {write_report(options.out)}")
    check_complete(statistics)


def _say_plan(study: Study, options: Options, memory: int | None, executor: Callable[[Path, int], Executor]) -> None:
    """Write the plan, as a run would, and say what it costs."""
    from depthroute.study.price import price_lines, price_of
    from depthroute.study.runner import plan_study

    plan = plan_study(
        study, options.out, workers=options.workers, cores=options.cores, memory_bytes=memory, executor=executor, extend=options.extend
    )
    here = not options.slurm  # the speed of the node that submits says nothing about the others
    print("\n".join(price_lines(price_of(plan, options.out, measure=here, workers=options.workers, cores=options.cores))))
    print(f"\nplan: {options.out / 'plan.json'}, hash {plan['hash'][:12]}. The same command without --plan trains it.")


def _study(options: Options, data: Path, vocabulary: int | None = None, end: int | None = None) -> Study:
    from depthroute.common.errors import RequestError
    from depthroute.recipes import baseline_study, matched_study, recipe, run_of
    from depthroute.recipes.registry import study_recipe
    from depthroute.recipes.studies import DEFAULT_ARMS

    settings = changes(options.set)
    if "train.seed" in settings:
        raise RequestError("--set train.seed does not apply to a study; name its seeds: --seeds 1 2 3.")
    if "model.residual" in settings:
        raise RequestError("--set model.residual does not apply to a study, whose arms differ in it; name them with --arm.")
    ways = {"--study": options.study, "--baselines": options.baselines, "--arm": options.arm}
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are different studies; give one of them.")
    if options.study is not None:
        if options.recipe is not None:
            raise RequestError("--recipe does not go with --study, which has its own bodies; choose them with --form and --set.")
        build = study_recipe(options.study).build
        return build(data, form=options.form, vocabulary=vocabulary, end=end, seeds=options.seeds, settings=settings)
    if options.form != "small":
        raise RequestError("--form belongs to --study; name a body with --recipe.")
    chosen = recipe(options.recipe or "small")
    base = run_of(chosen, data, vocabulary=vocabulary, end=end, residual="prenorm", settings=settings)
    seeds = options.seeds or (1, 2, 3)
    if options.baselines:
        return baseline_study(chosen, base, seeds=seeds)
    return matched_study(chosen, base, arms=options.arm or DEFAULT_ARMS, seeds=seeds)


def _source(options: Options, vocabulary: int) -> PrepareConfig:
    from depthroute.data import PrepareConfig
    from depthroute.recipes.registry import study_recipe

    return study_recipe(options.study).data(vocabulary) if options.study is not None else PrepareConfig(vocabulary=vocabulary)
