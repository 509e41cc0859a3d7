"""`depthroute cost`: what a shape and its residual method cost, on a device with the given numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from depthroute.cli.options import changes, read

if TYPE_CHECKING:
    from depthroute.cost.estimate import Device
    from depthroute.cost.shapes import Shape
    from depthroute.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parameters, arithmetic, memory, traffic and time of a recipe, a run or a published shape, from its configuration alone.

    Times are bounds from the numbers given below, not measurements.
    """

    target: tyro.conf.Positional[str]
    """A recipe (`depthroute recipes` lists them), a run folder, or a published shape: kimi-linear-48b, kimi-k3."""
    residual: str | None = None
    """For a recipe or a published shape: NAME[:BLOCK][,FIELD=VALUE...], such as block:8 or rd:8,rank=64."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """For a recipe: change a field, such as model.width=640; with --parallel train.sequences and train.microbatch too."""
    methods: bool = False
    """Only the residual methods side by side on this body."""
    sequence: int | None = None
    """Tokens of a sequence: trained on, prefilled, or already there when the next one is decoded. Default: the model's context."""
    batch: int | None = None
    """Sequences at once; with --parallel those of a whole training step. Default: 1; with --parallel what the recipe trains on."""
    chunk: int | None = None
    """Tokens of a prompt that a prefill takes at once. Default: all."""
    dtype: Literal["float32", "bfloat16", "float16", "float8"] = "bfloat16"
    """Of weights, caches and activations."""
    bandwidth: float = 3_000.0
    """Of a device's memory, GB/s."""
    flops: float = 1_000.0
    """Of a device, dense products, TFLOP/s."""
    efficiency: float = 0.4
    """The part of --flops that large products reach."""
    memory: float = 80.0
    """Of a device, GB."""
    link: float = 50.0
    """Between pipeline stages, GB/s; with --parallel of all that a process sends."""
    devices: int = 1
    """How many share the work evenly."""
    pipeline: int = 0
    """Physical stages of a pipeline. Default: none."""
    virtual: int = 1
    """Virtual stages on each physical one."""
    microbatches: int | None = None
    """Of a training step in the pipeline, each --batch sequences. Default: one a stage."""
    parallel: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LAYOUT"), tyro.conf.UseAppendAction] = ()
    """Only a training step on several processes, laid out as `depthroute train --parallel` takes it, such as pp:8,virtual=2,fsdp:8. Give
    it several times to compare; docs/parallel.md."""
    groups: int = 8
    """Into how many groups of sub-layers Full AttnRes is read in the paper's table of traffic."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "cost", arguments)
    from depthroute.cost.estimate import Device
    from depthroute.cost.sheet import Workload, cost_sheet, method_sheet

    shape, settings = _shape(options.target, options.residual, changes(options.set))
    device = Device(
        bandwidth=options.bandwidth, flops=options.flops, efficiency=options.efficiency, memory=options.memory, link=options.link,
        number=options.devices,
    )  # fmt: skip
    sequence = shape.body.context if options.sequence is None else options.sequence
    if options.methods:
        sheet = method_sheet(shape)
    elif options.parallel:
        sheet = _layouts(options, shape, device, settings, sequence)
    else:
        workload = Workload(
            sequence=sequence, batch=1 if options.batch is None else options.batch, dtype=options.dtype, chunk=options.chunk,
            stages=options.pipeline, virtual=options.virtual, microbatches=options.microbatches, groups=options.groups,
        )  # fmt: skip
        sheet = cost_sheet(shape, device, workload)
    if options.json:
        print(json.dumps(sheet, indent=2))
    elif options.methods:
        _table(sheet)
    elif options.parallel:
        _columns(sheet["layout"])
    else:
        _sections(sheet)


def _layouts(
    options: Options, shape: Shape, device: Device, settings: TrainConfig | None, sequence: int
) -> dict[str, dict[str, Any]]:
    from depthroute.common.errors import RequestError
    from depthroute.cost.sheet import layout_sheet
    from depthroute.parallel.layout import parse_layout

    sequences = options.batch if options.batch is not None else settings.sequences if settings is not None else None
    if sequences is None:
        raise RequestError(f"{options.target} is a published shape without a batch; --parallel needs --batch, the sequences of a step.")
    microbatch = 1 if settings is None else settings.microbatch or sequences
    layouts = [parse_layout(text) for text in options.parallel]
    found = layout_sheet(
        shape, device, layouts, sequences=sequences, microbatch=microbatch, context=sequence, dtype=options.dtype
    )  # fmt: skip
    return {"layout": found}


def _shape(target: str, residual: str | None, settings: dict[str, Any]) -> tuple[Shape, TrainConfig | None]:
    """The shape that a name or a folder stands for, and how it is trained if that is known."""
    from depthroute.common.errors import RequestError, choose
    from depthroute.cost.shapes import SHAPES, published, shape_of
    from depthroute.recipes import RECIPES, recipe, run_of
    from depthroute.residual import AttnResConfig, parse_residual
    from depthroute.train import recorded_config

    if target in SHAPES:
        if settings:
            raise RequestError(f"{target} is a published shape; --set changes recipes only.")
        shape = published(target)
        base = shape.body.residual
        assert isinstance(base, AttnResConfig)
        return shape if residual is None else shape.with_residual(parse_residual(residual, base)), None
    if target not in RECIPES and Path(target).is_dir():
        if residual or settings:
            raise RequestError(f"{target} is a folder; --residual and --set change recipes only.")
        config = recorded_config(Path(target))
        if config is None:
            raise RequestError(f"{target} is no run folder: it has no config.json.")
        return shape_of(config.model), config.train
    if target not in RECIPES:
        raise RequestError(choose("recipe, run folder or published shape", target, [*RECIPES, *SHAPES]))
    run = run_of(recipe(target), Path(), residual=residual, settings=settings)
    return shape_of(run.model), run.train


def _sections(sheet: Mapping[str, Mapping[str, Any]]) -> None:
    width = max(len(name) for facts in sheet.values() for name in facts)
    for section, facts in sheet.items():
        print(section.replace("_", " "))
        for name, value in facts.items():
            print(f"  {name:<{width}}  {_text(name, value)}")


def _table(sheet: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(next(iter(sheet.values())))
    first = max(map(len, sheet))
    print(" " * first, *names, sep="  ")
    for method, facts in sheet.items():
        print(f"{method:<{first}}", *(f"{_text(name, facts[name]):>{len(name)}}" for name in names), sep="  ")


def _columns(sheet: Mapping[str, Mapping[str, Any]]) -> None:
    """A layout in each column. What does not apply to any of them is left out."""
    names = [name for name in next(iter(sheet.values())) if any(facts[name] for facts in sheet.values()) or name == "fits"]
    cells = {layout: [_text(name, facts[name]) for name in names] for layout, facts in sheet.items()}
    widths = {layout: max(map(len, [layout, *column])) for layout, column in cells.items()}
    first = max(map(len, names))
    print("layout".ljust(first), *(layout.rjust(widths[layout]) for layout in cells), sep="  ")
    for row, name in enumerate(names):
        print(name.ljust(first), *(column[row].rjust(widths[layout]) for layout, column in cells.items()), sep="  ")


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if name.endswith("bytes"):
        return _scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), "B")
    if "seconds" in name:
        return _scaled(value, ((1.0, "s"), (1e-3, "ms")), "us", 1e-6)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 10_000 else f"{value:.4g}"


def _scaled(value: float, units: Sequence[tuple[float, str]], smallest: str, scale: float = 1.0) -> str:
    for size, unit in units:
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / scale:.4g} {smallest}"
