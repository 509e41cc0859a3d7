"""How a run is laid out over processes, and the short specifications that people type: `ddp`, `fsdp`, `pp:2,virtual=2,fsdp:4`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from depthroute.common.errors import RequestError, choose

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Keeps = Literal["none", "received", "all"]

AXES = {
    "pp": "pipeline stages",
    "ddp": "copies of the model, on shares of the batch",
    "fsdp": "shares of the batch, with parameters, gradients and optimiser state sharded",
    "tp": "shares of every attention and MLP, and of the sequence elsewhere",
}
REST = 0  # an axis that takes the processes that the others leave


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes; their product is the number of processes. It decides nothing about what is trained.

    Neighbouring ranks differ in `tp`, then `fsdp`, `ddp`, `pp`: the axis that talks most has the fastest links.

    Attributes:
        virtual: Stages a process of the pipeline holds, V; each is a run of layers.
        schedule: Of the pipeline: "gpipe", "1f1b" or, with more than one stage a process, "interleaved" 1F1B. None: the last two, by that.
        microbatch: Sequences that pass through the pipeline together. None: as few as keep all stages busy, see `microbatches`.
        keeps: What a process of a pipeline keeps of a micro-batch's depth memory from one of its stages to the next, so that it is not sent
            again: "none"; "received", what was sent to it (Attention Residuals, section 4.1); "all", what it made itself as well.
    """

    pp: int = 1
    ddp: int = 1
    fsdp: int = 1
    tp: int = 1
    virtual: int = 1
    schedule: Schedule | None = None
    microbatch: int | None = None
    keeps: Keeps = "all"

    def __post_init__(self) -> None:
        for name in ("virtual", "microbatch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise RequestError(f"--parallel {name} = {value} is not allowed; it takes 1 or more.")
        if sum(getattr(self, axis) == REST for axis in AXES) > 1:
            raise RequestError("--parallel: only one axis may be without a size, which then takes the rest of the processes.")
        if any(getattr(self, axis) < 0 for axis in AXES):
            raise RequestError("--parallel: the size of an axis is 1 or more.")
        for name, kind in (("schedule", Schedule), ("keeps", Keeps)):
            if getattr(self, name) not in (*get_args(kind), getattr(Layout, name)):
                raise RequestError(f"--parallel {name}: {choose('value', str(getattr(self, name)), get_args(kind))}")
        if self.pp == 1:
            given = [name for name in ("virtual", "schedule", "microbatch", "keeps") if getattr(self, name) != getattr(Layout, name)]
            if given:
                raise RequestError(f"--parallel {given[0]} belongs to a pipeline; give its stages, such as pp:2.")
        if (self.schedule == "interleaved") != (self.virtual > 1) and self.schedule is not None:
            raise RequestError(
                f"--parallel schedule={self.schedule} does not go with virtual={self.virtual}; several stages a process are 'interleaved', "
                "and only they."
            )

    @property
    def processes(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def shares(self) -> int:
        """Of the batch."""
        return self.ddp * self.fsdp

    @property
    def chunks(self) -> int:
        """Runs of layers that the depth is cut into."""
        return self.pp * self.virtual

    def fitted(self, processes: int) -> Layout:
        """With the size of the axis that takes the rest.

        Raises:
            RequestError: the sizes do not multiply to `processes`.
        """
        open_axes = [axis for axis in AXES if getattr(self, axis) == REST]
        given = math.prod(getattr(self, axis) for axis in AXES if axis not in open_axes)
        layout = replace(self, **{open_axes[0]: max(1, processes // given)}) if open_axes else self
        if layout.processes != processes:
            raise RequestError(
                f"--parallel {self.describe()} is a layout for {given if not open_axes else f'a multiple of {given}'} processes, and there "
                f"are {processes}: start it with torchrun --nproc-per-node, or change the sizes."
            )
        return layout

    @property
    def order(self) -> Schedule:
        """The schedule, chosen."""
        return self.schedule or ("interleaved" if self.virtual > 1 else "1f1b")

    def rows(self, sequences: int) -> int:
        """Sequences of a batch that one share has. Raises RequestError where they do not divide."""
        if sequences % self.shares:
            raise RequestError(f"train.sequences = {sequences} does not divide into the {self.shares} shares of the batch (ddp x fsdp).")
        return sequences // self.shares

    def microbatches(self, sequences: int, largest: int) -> int:
        """How many micro-batches of equal size pass through the pipeline in a step, of `sequences` in a batch.

        As chosen by `microbatch`; else of at most `largest` sequences, and at least four a stage, if the batch has as many.

        Raises:
            RequestError: the sequences do not divide, or the schedule does not take that number.
        """
        rows = self.rows(sequences)
        if self.microbatch is not None:
            if rows % self.microbatch:
                raise RequestError(
                    f"--parallel microbatch={self.microbatch} does not divide the {rows} sequences that a pipeline has of a batch."
                )
            count = rows // self.microbatch
            if not self._takes(count):
                raise RequestError(
                    f"--parallel microbatch={self.microbatch} makes {count} micro-batches of {rows} sequences; the schedule "
                    f"{self.order} of {self.pp} stages takes {self._numbers}."
                )
            return count
        counts = [count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= largest and self._takes(count)]
        if not counts:
            raise RequestError(
                f"train.sequences = {sequences} cannot be cut into micro-batches for {self.pp} stages: a pipeline has {rows} of them, and "
                f"the schedule {self.order} takes {self._numbers}; change the batch or the layout."
            )
        return next((count for count in counts if count >= 4 * self.pp), counts[-1])

    def _takes(self, count: int) -> bool:
        return {"interleaved": count % self.pp == 0, "1f1b": count >= self.pp}.get(self.order, True)

    @property
    def _numbers(self) -> str:
        return {"interleaved": f"multiples of {self.pp}", "1f1b": f"{self.pp} or more"}.get(self.order, "any number")

    def describe(self) -> str:
        """As it is typed."""
        words = []
        for axis in AXES:
            size = getattr(self, axis)
            if size != 1:
                words.append(axis if size == REST else f"{axis}:{size}")
            if axis == "pp" and size != 1:
                words += [
                    f"{name}={getattr(self, name)}" for name in ("virtual", "schedule", "microbatch", "keeps")
                    if getattr(self, name) != getattr(Layout, name)
                ]  # fmt: skip
        return ",".join(words) or "none"


def parse_layout(text: str) -> Layout:
    """A layout from parts with commas between: an axis, `NAME` or `NAME:SIZE`, or a setting of the pipeline, `NAME=VALUE`.

    `ddp` alone takes all processes; `pp:2,virtual=2,fsdp` gives two stages and shards over the rest.

    Raises:
        RequestError: an unknown name (with the nearest right one), or a value that is not allowed.
    """
    settings = ("virtual", "schedule", "microbatch", "keeps")
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        axis, colon, size = name.partition(":")
        if axis in found:
            raise RequestError(f"--parallel {text}: {axis} is given twice; give it once.")
        if equals and name in settings:
            found[name] = value if name in ("schedule", "keeps") else _whole(text, name, value)
        elif not equals and axis in AXES:
            found[axis] = _whole(text, axis, size) if colon else REST
        else:
            raise RequestError(f"--parallel {text}: {choose('axis or setting', axis, (*AXES, *settings))}")
    return Layout(**found)


def _whole(text: str, name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise RequestError(f"--parallel {text}: {name} takes a whole number of 1 or more, not {value!r}.")
    return int(value)
