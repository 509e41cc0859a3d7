"""The folder of one run: what may be written into it, and when. docs/run-folder.md has its fields."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from depthroute.common.config import from_json, to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import explain_os_errors, read_json, read_json_lines, write_json, write_text
from depthroute.model import Decoder
from depthroute.train import checkpoint
from depthroute.train.config import RunConfig
from depthroute.train.sinks import Sinks

FORMAT = 1
FLUSH_SECONDS = 1.0


class RunFolder:
    """A run folder that is being written. Metrics wait in memory for at most about a second; a kill loses no more than that.

    `writes`: false for the other processes of a run, for which nothing that would be written is.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self._writes = path, writes
        self.sinks: Sinks | None = None
        self._waiting: list[str] = []
        self._flushed_at = time.perf_counter()

    @contextmanager
    def claimed(self, config: RunConfig, environment: dict[str, Any]) -> Iterator[None]:
        """Make the folder this run's, alone, while the context lasts; writes config.json and environment.json.

        Raises:
            RequestError: it holds another run or something else, or another process is training in it.
        """
        if not self._writes:
            yield
            return
        with explain_os_errors(self.path, "creating"):
            self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "config.json").exists():
            foreign = [entry.name for entry in self.path.iterdir() if entry.name != "log.txt" and not entry.name.startswith(".")]
            if foreign:
                raise RequestError(f"{self.path} is not a run folder (it holds {sorted(foreign)[0]!r}); choose an empty or new one.")
        with explain_os_errors(self.path, "writing into"):
            log = (self.path / "log.txt").open("a")
        with log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RequestError(f"another process is training in {self.path}; wait for it, or choose another folder.") from None
            recorded = recorded_config(self.path)
            if recorded != config:
                refuse_other_configuration(self.path, recorded, config)
                # first of all files: it makes the folder ours, so that a crash right here does not lock us out
                write_json(self.path / "config.json", {"format": FORMAT, **to_json(config)})
            if not (self.path / "environment.json").exists() or not holds_a_step(self.path):  # then nothing of a start before remains
                write_json(self.path / "environment.json", environment)
            yield

    def cut_back(self, step: int) -> None:
        """Drop every line after `step`, so that no step is written twice.

        Raises:
            FailureError: metrics.jsonl lacks steps up to `step`.
        """
        if not self._writes:
            return
        self._waiting.clear()
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            path = self.path / name
            if path.exists():
                kept = [line for line in read_json_lines(path) if line["step"] <= step]
                write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        steps = [line["step"] for line in self.metrics()]
        if steps != list(range(1, step + 1)):
            raise FailureError(
                f"{self.path / 'metrics.jsonl'} holds {len(steps)} of the {step} steps before the checkpoint; it was changed by hand. "
                f"Delete {self.path} to start this run again."
            )

    def add_metrics(self, line: dict[str, Any]) -> None:
        if not self._writes:
            return
        self._waiting.append(json.dumps(line, allow_nan=False) + "\n")
        if time.perf_counter() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()
        if self.sinks is not None:
            self.sinks.metrics(line)

    def add_evaluation(self, *lines: dict[str, Any]) -> None:
        """Add the lines of one evaluation, all of them or, after a crash, none: a step that has a line is not evaluated again."""
        self.flush()
        path = self.path / "evaluations.jsonl"
        write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in (*read_json_lines(path), *lines)))
        if self.sinks is not None:
            for line in lines:
                self.sinks.evaluation(line)

    def flush(self, *, sync: bool = False) -> None:
        """Hand the waiting metrics to the system; with `sync`, to the disk (before a checkpoint that says they are there)."""
        if not self._writes:
            return
        text = "".join(self._waiting)
        self._waiting.clear()
        self._flushed_at = time.perf_counter()
        if text or sync:
            _append(self.path / "metrics.jsonl", text, sync=sync)

    def metrics(self) -> list[dict[str, Any]]:
        return read_json_lines(self.path / "metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        return read_json_lines(self.path / "evaluations.jsonl")

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.path / "result.json", result)


def recorded_config(path: Path) -> RunConfig | None:
    """The configuration of the run in `path`, or None where there is none.

    Raises:
        RequestError: config.json is of a format or has fields that this version does not know.
    """
    if not (path / "config.json").exists():
        return None
    value = read_json(path / "config.json")
    found = value.pop("format", None) if isinstance(value, dict) else None
    if found != FORMAT:
        raise RequestError(f"{path / 'config.json'} has the format {found!r} and this version reads {FORMAT}.")
    return from_json(RunConfig, value)


def recorded_result(path: Path) -> dict[str, Any] | None:
    """result.json of a complete run, or None."""
    if not (path / "result.json").exists():
        return None
    result: dict[str, Any] = read_json(path / "result.json")
    return result


def root_of(path: Path) -> Path:
    """The run folder that `path` is, or that it is a checkpoint folder of."""
    one = path.resolve().parent.name == "checkpoints" and not (path / "config.json").exists()
    return path.resolve().parent.parent if one else path


def holds_a_step(path: Path) -> bool:
    """Whether a run folder keeps a step of its own training: the weights of step 0 (`depthroute adopt`) are none."""
    return checkpoint.latest(path) not in (None, checkpoint.folder(path, 0))


def load_trained(path: Path) -> tuple[RunConfig, Decoder]:
    """The configuration of a run and its model with the weights of the last checkpoint, on the CPU.

    `path` may also be one checkpoint folder of a run, RUN/checkpoints/step-00000500.

    Raises:
        RequestError: `path` holds no run, or a run without a checkpoint.
        FailureError: the checkpoint is truncated or altered.
    """
    config, found = run_and_checkpoint(path)
    checkpoint.verify(found)
    model = Decoder(config.model)
    checkpoint.load_model(found, model)
    return config, model


def run_and_checkpoint(path: Path) -> tuple[RunConfig, Path]:
    """The configuration and the checkpoint of a run folder, its last one, or of a checkpoint folder itself.

    Raises:
        RequestError: `path` holds no run, or a run without a checkpoint.
    """
    root = root_of(path)
    config = recorded_config(root)
    if config is None:
        raise RequestError(f"{path} is not a run folder: it has no config.json.")
    found = checkpoint.latest(path) if root == path else path
    if found is None:
        raise RequestError(f"{path} has no checkpoint yet; train it first.")
    return config, found


def refuse_other_configuration(path: Path, recorded: RunConfig | None, wanted: RunConfig) -> None:
    """Refuse to go on in a folder whose run differs from the one wanted, naming the first field that does and both values.

    The path of the data may differ: the fingerprint says whether it is the same data. A run that has weights and has kept no step
    (`depthroute adopt`) has no training yet: that may still be chosen, and its data where it names none.
    """
    if recorded is None:
        return
    if checkpoint.latest(path) == checkpoint.folder(path, 0):
        recorded = dataclasses.replace(recorded, train=wanted.train, data_fingerprint=wanted.data_fingerprint)
    there = flattened(to_json(dataclasses.replace(recorded, data="")))
    here = flattened(to_json(dataclasses.replace(wanted, data="")))
    for name in [*here, *(name for name in there if name not in here)]:
        if there.get(name) != here.get(name):
            raise RequestError(
                f"{path} holds a run with {name} = {there.get(name)!r}, not {here.get(name)!r}; choose another folder, or delete it."
            )


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their dotted names."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(flattened(inner, f"{prefix}.{key}" if prefix else key))
    return flat


def _append(path: Path, text: str, *, sync: bool) -> None:
    # Unbuffered: after a full disk, nothing is left in a buffer that would be written again on closing.
    with explain_os_errors(path, "writing"):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            data = text.encode("utf-8")
            while data:
                data = data[os.write(handle, data):]
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
