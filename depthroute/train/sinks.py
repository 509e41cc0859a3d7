"""Where the numbers of a run also go, if the user asks for it: TensorBoard, Trackio, Weights & Biases.

A sink is given the very lines that metrics.jsonl and evaluations.jsonl hold, after they went there, and the run folder stays the one
thing that everything else reads. Sinks change no result, so they are no part of the configuration. docs/watching.md says what each does
when a run is continued.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from heapq import merge
from pathlib import Path
from typing import Any, Protocol

from depthroute.common.config import to_json
from depthroute.common.errors import DepthrouteError, RequestError, choose
from depthroute.common.files import read_json, read_json_lines
from depthroute.train.config import RunConfig

PROJECT = "depthroute"
MARK_WIDTH = 12  # digits, so that a mark is written over the one before and never leaves a part of it
Line = Mapping[str, Any]


class Sink(Protocol):
    """What takes the numbers of one run. Any exception of its methods drops it, and the run goes on."""

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Take `values` by name ("train/loss") at a step; `seconds` is how long ago the step ended."""

    def close(self, complete: bool) -> None:
        """Hand over what waits; `complete` false: the run was interrupted or failed, and may be continued."""


def check_sinks(names: Sequence[str]) -> tuple[str, ...]:
    """The names without repetitions, in the order given.

    Raises:
        RequestError: a name that is no sink, or one whose package is not installed.
    """
    for name in names:
        if name not in OPENERS:
            raise RequestError(f"--log: {choose('sink', name, OPENERS)}")
        if importlib.util.find_spec(name) is None:
            raise RequestError(f"--log {name} needs the package {name}: pip install 'depthroute[{name}]'.")
    return tuple(dict.fromkeys(names))


class Sinks:
    """The sinks of one run: each is given what it has not had yet, and one that fails is dropped with a line in the log.

    Args:
        names: "tensorboard", "trackio", "wandb"; none by default.
        path: The run folder; the lines that its files hold already are handed over first.
        say: Writes one line to the log.
    """

    def __init__(self, names: Sequence[str], config: RunConfig, path: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, tuple[Sink, _Mark]] = {}
        self._handed = {"metrics": 0, "evaluations": 0}
        for name in names:
            with self._guarded(name):
                self._open[name] = OPENERS[name](config, path, say)
        if self._open:
            lines = [*_written(path)]
            left = sum(line.get("seconds", 0.0) for kind, line in lines)
            for kind, line in lines:
                left -= line.get("seconds", 0.0)
                self._hand(kind, line, left)

    def metrics(self, line: Line) -> None:
        """A line of metrics.jsonl."""
        self._hand("metrics", line, 0.0)

    def evaluation(self, line: Line) -> None:
        """A line of evaluations.jsonl."""
        self._hand("evaluations", line, 0.0)

    def close(self, *, complete: bool) -> None:
        for name, (sink, mark) in list(self._open.items()):
            with self._guarded(name):
                sink.close(complete)
                mark.close()
        self._open.clear()

    def _hand(self, kind: str, line: Line, seconds: float) -> None:
        self._handed[kind] += 1
        if not self._open:
            return
        group = "train" if kind == "metrics" else line["split"]
        values = {f"{group}/{name}": float(value) for name, value in line.items() if name not in ("step", "split") and _number(value)}
        for name, (sink, mark) in list(self._open.items()):
            if self._handed[kind] > mark.had[kind]:
                with self._guarded(name):
                    sink.log(values, line["step"], seconds)
                    mark.note(kind, self._handed[kind])

    def _guarded(self, name: str) -> _Guard:
        return _Guard(self, name)

    def drop(self, name: str, error: Exception) -> None:
        """Go on without a sink that failed, and say so once."""
        self._open.pop(name, None)
        what = (str(error).strip().splitlines() or [""])[0]
        with suppress(DepthrouteError):  # a full disk stops the run where it writes its own files, with its own sentence
            self._say(f"--log {name} is left out from here on, the run goes on: {type(error).__name__}: {what}")


class _Guard:
    """Drops a sink where its code raises."""

    def __init__(self, sinks: Sinks, name: str) -> None:
        self._sinks, self._name = sinks, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._sinks.drop(self._name, error)
            return True
        return False


class _Mark:
    """How many lines a sink has had, and the name of its run there.

    A service that keeps what it was given cannot be told to forget the steps after a checkpoint, and a continued run takes them again with
    the same values. So the count of lines handed over is kept in the run folder, and those are not handed over twice. Without a path
    nothing is kept: the sink starts from nothing each time.
    """

    def __init__(self, path: Path | None) -> None:
        self.run = secrets.token_hex(4)
        self.had = {"metrics": 0, "evaluations": 0}
        self._handle: int | None = None
        if path is None:
            return
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            found = read_json(path)
            self.run, self.had = found["run"], {name: int(found[name]) for name in self.had}
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._write()

    def note(self, kind: str, count: int) -> None:
        self.had[kind] = count
        self._write()

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _write(self) -> None:
        if self._handle is not None:
            counts = ", ".join(f"{json.dumps(name)}: {count:>{MARK_WIDTH}}" for name, count in self.had.items())
            os.pwrite(self._handle, f'{{"run": {json.dumps(self.run)}, {counts}}}\n'.encode(), 0)


class _TensorBoard:
    """Event files in RUN/tensorboard, written again from the run's own files whenever it is continued: they hold no step twice."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = path / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder), flush_secs=10)
        self._writer.add_text("config", f"```json\n{json.dumps(to_json(config), indent=2)}\n```", 0)

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time.time() - seconds)

    def close(self, complete: bool) -> None:
        self._writer.close()


class _Trackio:
    """A run of Trackio, in the local database unless the user's environment names a Space or a server.

    What it prints is dropped: it would stand between the lines of the progress, and after the sentence that says why a run failed.
    """

    def __init__(self, config: RunConfig, path: Path, run: str) -> None:
        import trackio

        self._trackio = trackio
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=f"{run_name(path)}-{run}", config=to_json(config),
                resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self, complete: bool) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()


class _Wandb:
    """A run of Weights & Biases; WANDB_MODE, WANDB_PROJECT, WANDB_NAME and the rest of the user's environment hold.

    The step is a value like the others and not wandb's own counter, which refuses a number at a step that it believes is over: the
    validation that a continued run catches up on would be lost.
    """

    def __init__(self, config: RunConfig, path: Path, run: str, say: Callable[[str], None]) -> None:
        import wandb

        given = {"project": ("WANDB_PROJECT", PROJECT), "name": ("WANDB_NAME", run_name(path))}
        self._run = wandb.init(
            **{name: value for name, (variable, value) in given.items() if variable not in os.environ},
            id=run, resume="allow", dir=str(path), config=to_json(config), settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            say(f"--log wandb: {self._run.url}")

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log({"step": step, **values})

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


def run_name(path: Path) -> str:
    """What a service calls a run: the name of its folder, with the arm's before it in a study (STUDY/runs/ARM/seed-S)."""
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.parent.parent.name == "runs" else path.name


def _tensorboard(config: RunConfig, path: Path, say: Callable[[str], None]) -> tuple[Sink, _Mark]:
    return _TensorBoard(config, path), _Mark(None)


def _trackio(config: RunConfig, path: Path, say: Callable[[str], None]) -> tuple[Sink, _Mark]:
    mark = _Mark(path / "sinks" / "trackio.json")
    return _Trackio(config, path, mark.run), mark


def _wandb(config: RunConfig, path: Path, say: Callable[[str], None]) -> tuple[Sink, _Mark]:
    mark = _Mark(path / "sinks" / "wandb.json")
    return _Wandb(config, path, mark.run, say), mark


OPENERS: Mapping[str, Callable[[RunConfig, Path, Callable[[str], None]], tuple[Sink, _Mark]]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}


def _written(path: Path) -> Iterator[tuple[str, Line]]:
    """Every line of both files in the order of the steps, a step before the evaluations after it."""
    kinds = [[(kind, line) for line in read_json_lines(path / f"{kind}.jsonl")] for kind in ("metrics", "evaluations")]
    return merge(*kinds, key=lambda entry: entry[1]["step"])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
