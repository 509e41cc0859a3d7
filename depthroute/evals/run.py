"""Evaluates a run on several tasks: what is finished stays, and results are written as they come."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.common.files import write_json
from depthroute.data import Split
from depthroute.evals.local_tasks import CACHE, MAKERS, LocalTasks, follow_move
from depthroute.evals.paired import compare_evaluations
from depthroute.evals.perplexity import PERPLEXITY, perplexity_items, perplexity_metrics
from depthroute.evals.presets import PRESETS, average
from depthroute.evals.scoring import BATCH_TOKENS
from depthroute.evals.store import read_evaluation, refuse_other_settings, write_evaluation
from depthroute.evals.subject import Subject, open_subject
from depthroute.evals.tasks import Tasks, require_harness
from depthroute.train.config import Device, Precision
from depthroute.train.run_folder import root_of

LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is evaluated, and how.

    Attributes:
        tasks: names of tasks, groups or tags of the lm-evaluation-harness, "perplexity", "local" or the name of a local task, or
            "low-rank", the eight tasks of the Low-Rank paper.
        split: the held-out text that perplexity and local tasks are of.
        tokens: held-out tokens of perplexity. None: all there are.
        items: of each local task, at most; few of the needle are spread over its cells.
        context: tokens of the longest prompt of a local task with its answer, no more than the model's context, which None stands for.
        limit: items of each task that are asked, the first ones; of the needle they are spread over its cells. None: all. It has no effect
            on perplexity, which `tokens` bounds.
        fewshot: solved examples before each question. None: as the task says, as a rule none. Tasks that are fixed at none stay so.
        seed: of local tasks, of the choice of examples, and of generation where a task samples.
        download: may data sets be fetched?
        batch_tokens: tokens of a pass, padding included. Results do not depend on it beyond rounding.
    """

    tasks: tuple[str, ...]
    split: Split = "validation"
    tokens: int | None = None
    items: int = 200
    context: int | None = None
    limit: int | None = None
    fewshot: int | None = None
    seed: int = 0
    precision: Precision = "auto"
    device: Device = "auto"
    batch_tokens: int = BATCH_TOKENS
    download: bool = False

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks):
            raise RequestError(f"tasks = {','.join(self.tasks)!r} is not allowed; name one or more, with commas between them.")
        for name in self.tasks:
            if "/" in name or "\\" in name or ".." in name:
                raise RequestError(f"task {name!r} is not allowed; tasks are asked for by name, and a name has no / and no .. in it.")
        if self.split not in ("validation", "test"):
            raise RequestError(f"split = {self.split!r} is not allowed; it takes validation or test.")
        lowest = {"tokens": 1, "items": 1, "context": 1, "limit": 1, "fewshot": 0, "seed": 0, "batch_tokens": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} = {value} is not allowed; it takes {least} or more.")

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks with presets and "local" written out, each once."""
        expanded = {LOCAL: tuple(MAKERS), **{name: tuple(task.name for task in tasks) for name, tasks in PRESETS.items()}}
        return tuple(dict.fromkeys(name for asked in self.tasks for name in expanded.get(asked, (asked,))))


def evaluate_run(
    run: Path, config: EvalConfig, *, out: Path | None = None, data: Path | None = None, again: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate a run, task by task. A task that is finished in the folder, with the same settings, is not run again.

    Args:
        run: a run folder, for its last checkpoint, or one of its checkpoint folders.
        out: where results go. None: RUN/evals.
        data: token shards in place of those the run names.
        again: run finished tasks again.
        report: told a line as each task ends.

    Returns:
        `run`, `checkpoint`, `folder`, `precision`; `evaluations`: what NAME.json holds, by name (`Tasks.run`, with `settings`, `seconds`
        and `harness`, its version); `left_out`: by name, why a local task could not be made; `averages`: of the presets of which a task
        is there.

    Raises:
        RequestError: a wrong request, by name: a task that is not known or whose data are not here, other settings in the same folder.
        FailureError: the run or its data are damaged, or the model gives no probabilities.
    """
    return _evaluate(open_subject(run, data=data, device=config.device, precision=config.precision), config, out, again, report)


def _evaluate(
    subject: Subject, config: EvalConfig, out: Path | None, again: bool, report: Callable[[str], None]
) -> dict[str, Any]:
    folder = out or subject.results
    context = _context(subject, config)
    follow_move(_task_folder(folder))
    finished: dict[str, dict[str, Any]] = {}
    for name in config.names:
        found = None if again else read_evaluation(folder, name)
        if found is not None:
            refuse_other_settings(folder, name, found["settings"], _settings(config, subject, name, context))
            finished[name] = found
    waiting = [name for name in config.names if name not in finished]
    left_out, parts = _write_local_tasks(config, subject, folder, context, waiting)
    waiting = [name for name in waiting if name not in left_out]
    if not waiting and not finished:
        raise RequestError(f"none of the tasks can be made of {subject.dataset.directory}: {'; '.join(left_out.values())}")
    harness = _Harness(config, subject, folder, waiting)
    for name in waiting:
        started = time.perf_counter()
        evaluation, items = _perplexity(config, subject) if name == PERPLEXITY else harness.run(name)
        evaluation |= {"settings": _settings(config, subject, name, context), "seconds": time.perf_counter() - started}
        if name in parts:
            evaluation["tasks"][name]["left_out"] = parts[name]
        write_evaluation(folder, name, evaluation, items)
        report(f"{name}: {len(items)} items in {evaluation['seconds']:.0f} s")
        stored = read_evaluation(folder, name)
        assert stored is not None
        finished[name] = stored
    shutil.rmtree(_task_folder(folder) / CACHE, ignore_errors=True)
    measured = {task: entry for name in finished for task, entry in finished[name]["tasks"].items()}
    presets = [preset for preset, tasks in PRESETS.items() if any(task.name in measured for task in tasks)]
    return {
        "run": str(subject.path),
        "checkpoint": subject.checkpoint,
        "folder": str(folder),
        "precision": subject.precision,
        "evaluations": {name: finished[name] for name in config.names if name in finished},
        "left_out": left_out,
        "averages": {preset: average(preset, measured) for preset in presets},
    }


def compare_runs(
    run: Path, against: Path, config: EvalConfig, *, out: Path | None = None, data: Path | None = None, again: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate two runs as `evaluate_run` does, compare them item by item, and write the comparison beside the results of `run`.

    The file is against-ARM-RUN-CHECKPOINT-WEIGHTS.json: the last two folders of the other run's path, its checkpoint, and the first 8
    digits of the SHA-256 of its weights.

    Args:
        out: where the results of `run` go; those of `against` go to its own folder.

    Returns:
        What `compare_evaluations` says; `left_out` has the tasks too that could not be made for one of the two.

    Raises:
        RequestError: a wrong request, or runs that cannot have the same items: other data or another context for perplexity or local
            tasks, which is said before anything is evaluated.
        FailureError: as for `evaluate_run`.
    """
    a, b = (open_subject(path, data=data, device=config.device, precision=config.precision) for path in (run, against))
    _refuse_other_items(a, b, config)
    ours, theirs = _evaluate(a, config, out, again, report), _evaluate(b, config, None, again, report)
    names = [name for name in ours["evaluations"] if name in theirs["evaluations"]]
    found = compare_evaluations(Path(ours["folder"]), Path(theirs["folder"]), names)
    for name in config.names:
        reasons = [f"of {which}, {of['left_out'][name]}" for which, of in (("a", ours), ("b", theirs)) if name in of["left_out"]]
        if reasons:
            found["left_out"][name] = " ".join(reasons)
    write_json(Path(ours["folder"]) / f"against-{_called(b)}.json", found)
    return found


def _refuse_other_items(a: Subject, b: Subject, config: EvalConfig) -> None:
    of_text = [name for name in config.names if name == PERPLEXITY or name in MAKERS]
    if of_text and a.dataset.fingerprint != b.dataset.fingerprint:
        raise RequestError(
            f"{', '.join(of_text)} cannot be compared: the data of {a.path} are {a.dataset.directory} and those of {b.path} are "
            f"{b.dataset.directory}, with other tokens. Give both the same with --data, or leave these tasks out."
        )
    for name in of_text:
        first, second = (subject.config.model.context if name == PERPLEXITY else _context(subject, config) for subject in (a, b))
        if first != second:
            advice = "leave it out" if name == PERPLEXITY else f"give --context {min(first, second)}, which both have room for"
            raise RequestError(f"{name} cannot be compared: the context of {a.path} is {first} and that of {b.path} {second}; {advice}.")


def _called(subject: Subject) -> str:
    run = root_of(subject.path.resolve())
    return "-".join(part for part in (run.parent.name, run.name, subject.checkpoint, subject.weights[:8]) if part)


def _context(subject: Subject, config: EvalConfig) -> int:
    """Of local tasks."""
    most = subject.config.model.context
    if config.context is not None and config.context > most:
        raise RequestError(f"context = {config.context} is not allowed; the model of {subject.path} has a context of {most} tokens.")
    return config.context or most


class _Harness:
    """The harness with the run as its model, where a task needs it; the data of all are read before the first runs."""

    def __init__(self, config: EvalConfig, subject: Subject, folder: Path, waiting: list[str]) -> None:
        self._config, self._subject = config, subject
        wanted = [name for name in waiting if name != PERPLEXITY]
        if not wanted:
            return
        self._version = require_harness()
        from depthroute.evals.harness import DepthrouteLM

        local = [name for name in wanted if name in MAKERS]
        self._tasks = Tasks(_task_folder(folder) if local else None, known=len(local) < len(wanted), download=config.download)
        self._tasks.load(wanted, also=(*MAKERS, *PRESETS, LOCAL, PERPLEXITY))
        self._model = DepthrouteLM(subject=subject, batch_tokens=config.batch_tokens, seed=config.seed)

    def run(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        config = self._config
        found, items = self._tasks.run(self._model, name, limit=config.limit, fewshot=config.fewshot, seed=config.seed)
        return {"harness": self._version, **found}, items


def _perplexity(config: EvalConfig, subject: Subject) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    items = perplexity_items(subject, config.split, limit_tokens=config.tokens, batch_tokens=config.batch_tokens)
    of = subject.dataset.manifest.split(config.split).documents
    entry = {"items": len(items), "of": of, "fewshot": 0, "reported": "nll", "metrics": perplexity_metrics(items)}
    return {"harness": None, "tasks": {PERPLEXITY: entry}, "groups": {}, "cut": 0}, items


def _write_local_tasks(
    config: EvalConfig, subject: Subject, folder: Path, context: int, waiting: list[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Write the local tasks that are waiting; by name, why one cannot be made, and why a part of one cannot."""
    wanted = [name for name in waiting if name in MAKERS]
    if not wanted:
        return {}, {}
    require_harness()
    made = LocalTasks(dataset=subject.dataset, split=config.split, context=context, items=config.items, seed=config.seed)
    written = made.write(_task_folder(folder), wanted)
    whole, parts = ({task.name: task.reason for task in written if task.reason and bool(task.items) is some} for some in (False, True))
    return whole, parts


def _task_folder(folder: Path) -> Path:
    return folder / "tasks"


def _settings(config: EvalConfig, subject: Subject, name: str, context: int) -> dict[str, Any]:
    """All that decides the result of a task."""
    settings: dict[str, Any] = {
        "checkpoint": subject.checkpoint,
        "weights": subject.weights,
        "data": subject.dataset.fingerprint,
        "precision": subject.precision,
    }
    if name == PERPLEXITY:
        return settings | {"split": config.split, "tokens": config.tokens, "context": subject.config.model.context}
    settings |= {"seed": config.seed, "limit": config.limit}
    if name in MAKERS:
        return settings | {"split": config.split, "items": config.items, "context": context}
    return settings | {"fewshot": config.fewshot}
