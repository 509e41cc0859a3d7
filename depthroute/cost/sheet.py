"""Everything that can be said about the cost of a shape, gathered as plain numbers by section.

Sizes are in bytes, times in seconds, traffic and activations per token unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, get_args

from depthroute.common.config import to_json
from depthroute.common.errors import RequestError
from depthroute.cost.body_words import body_facts
from depthroute.cost.estimate import (
    BYTES,
    Bank,
    Bill,
    Device,
    Dtype,
    ServingMemory,
    TrainingMemory,
    bank,
    decoding,
    prefilling,
    serving_memory,
    staged,
    training,
    training_memory,
)
from depthroute.cost.layouts import layout_cost
from depthroute.cost.memory import training_activations
from depthroute.cost.pipeline import cached_formula, cached_with_own_formula, naive_formula, plain_stream
from depthroute.cost.recorded import carried_numbers
from depthroute.cost.shapes import Shape
from depthroute.cost.summary import parameter_parts, residual_parameters
from depthroute.cost.traffic import FORMULAS, least_traffic, table_traffic
from depthroute.cost.work import body_work, routing_work
from depthroute.model import ModelConfig
from depthroute.parallel.layout import Keeps, Layout
from depthroute.residual import SPECIFICATIONS, AttnResConfig, parse_residual
from depthroute.residual.bank import BankConfig

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run. `chunk`: tokens of a prompt that a prefill takes at once; None is all. `stages`: of a pipeline; 0 is none."""

    sequence: int
    batch: int = 1
    dtype: Dtype = "bfloat16"
    chunk: int | None = None
    stages: int = 0
    virtual: int = 1
    microbatches: int | None = None
    groups: int = 8

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "chunk", "virtual", "microbatches", "groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} = {value} is not allowed; it takes 1 or more.")
        if self.dtype not in BYTES:
            raise RequestError(f"dtype = {self.dtype!r} is not allowed; it takes {', '.join(BYTES)}.")
        if self.stages < 0 or self.stages == 1:
            raise RequestError(f"stages = {self.stages} is not allowed; a pipeline has 2 or more, 0 is none.")

    @property
    def size(self) -> int:
        return BYTES[self.dtype]


def cost_sheet(shape: Shape, device: Device, workload: Workload) -> dict[str, Facts]:
    """All sections."""
    work, size = workload, workload.size
    sheet = {
        "shape": _shape(shape),
        "parameters": _parameters(shape),
        "multiply_adds": _work(shape),
        "traffic": _traffic(shape.body, work),
    }
    memory_size = size if shape.body.memory_dtype == "compute" else BYTES["float32"]
    sheet["activations"] = _activations(shape.body, mixed=size < BYTES["float32"])
    sheet["bank"] = _sizes(bank(shape, batch=work.batch, tokens=work.sequence, size=size, devices=device.number, chunk=work.chunk))
    serving = serving_memory(shape, device, batch=work.batch, context=work.sequence, size=size, chunk=work.chunk)
    sheet["serving"] = _sizes(serving)
    sheet["decode"] = _bill(decoding(shape, device, batch=work.batch, context=work.sequence, size=size))
    sheet["prefill"] = _bill(prefilling(shape, device, batch=work.batch, tokens=work.sequence, size=size, chunk=work.chunk))
    tokens = work.batch * work.sequence
    for name, checkpointed in (("training", False), ("training_checkpointed", True)):
        bill = training(shape, device, tokens=tokens, context=work.sequence, size=size, memory_size=memory_size, checkpointed=checkpointed)
        sheet[name] = _bill(bill)
        needs = training_memory(shape, device, tokens=tokens, mixed=size < BYTES["float32"], checkpointed=checkpointed)
        sheet[name] |= {f"held_{part}": value for part, value in _sizes(needs).items()}
    if work.stages:
        sheet["pipeline"] = _pipeline(shape, device, work)
    return sheet


def layout_sheet(
    shape: Shape, device: Device, layouts: Sequence[Layout], *, sequences: int, microbatch: int, context: int, dtype: Dtype
) -> dict[str, Facts]:
    """A training step in each of `layouts`, by how it is typed: what the fullest process holds, what one sends at most, and time.

    `sequences`: of the whole step. `microbatch`: of one pass, at most. The dtype is float32, or bfloat16 for mixed precision.

    Raises:
        RequestError: a layout that does not fit, or another dtype.
    """
    if dtype not in ("float32", "bfloat16"):
        raise RequestError(f"dtype = {dtype!r} is not allowed with a layout; training takes bfloat16 (mixed precision) or float32.")
    sheet: dict[str, Facts] = {}
    for layout in layouts:
        found = layout_cost(
            shape, device, layout, sequences=sequences, microbatch=microbatch, context=context, mixed=dtype == "bfloat16"
        )  # fmt: skip
        held, sent = found.fullest, found.busiest
        sheet[layout.describe()] = {
            "processes": found.processes,
            "microbatches": found.microbatches,
            "sequences_each": found.microbatch,
            **{f"{name}_bytes": value for name, value in asdict(held).items()},
            "held_bytes": held.total,
            "fits": held.total <= device.memory * 1e9,
            **{f"sent_{name}_bytes": value for name, value in asdict(sent).items()},
            "sent_bytes": sent.total,
            "bubble_percent": 100 * found.bubble,
            "computing_seconds": found.computing,
            "communicating_seconds": found.communicating,
            "seconds": found.seconds,
            "tokens_per_second": sequences * context / found.seconds,
        }
    return sheet


def method_sheet(shape: Shape) -> dict[str, Facts]:
    """Every method of the registry on one body: parameters, multiply-adds as a percentage of the body's, and, in widths, traffic per
    sub-layer and what is carried.

    A method that does not fit the body is left out.
    """
    model = shape.body
    base = model.residual if isinstance(model.residual, AttnResConfig) else AttnResConfig(layers_per_block=max(1, model.layers // 8))
    if not base.has_blocks:
        base = replace(base, layers_per_block=max(1, model.layers // 8))
    base = replace(base, rank=base.rank or max(1, model.width // 8))
    sheet: dict[str, Facts] = {}
    for name in SPECIFICATIONS:
        try:
            body = replace(model, residual=parse_residual(name, base))
        except RequestError:
            continue
        if type(body.residual) not in FORMULAS:
            continue
        sublayers, width = 2 * body.layers, body.width
        sheet[name] = {
            "parameters": residual_parameters(body),
            "multiply_adds_percent": 100 * routing_work(body).total / body_work(body),
            "traffic_widths": least_traffic(body).total / sublayers / width,
            "carried_widths": carried_numbers(body) / width,
        }
    return sheet


def _shape(shape: Shape) -> Facts:
    body = shape.body
    return {"layers": body.layers, "width": body.width, **body_facts(to_json(body)), "residual": body.residual.describe()}


def _parameters(shape: Shape) -> Facts:
    parts = parameter_parts(shape.body)
    return parts if shape.body.experts is None else parts | {"active": shape.active}


def _work(shape: Shape) -> Facts:
    work, core = routing_work(shape.body), body_work(shape.body)
    return {**asdict(work), "total": work.total, "body": core, "percent_of_body": 100 * work.total / core}


def _traffic(body: ModelConfig, work: Workload) -> Facts:
    """Per sub-layer."""
    sublayers, width = 2 * body.layers, body.width
    least = least_traffic(body)
    table = table_traffic(body.residual, width=width, sublayers=sublayers, groups=work.groups)
    facts: Facts = {
        "read": least.read / sublayers,
        "written": least.written / sublayers,
        "widths": least.total / sublayers / width,
        "bytes": least.total / sublayers * work.size,
    }
    if isinstance(body.residual, AttnResConfig) and body.residual.phases:
        again = replace(body, residual=replace(body.residual, phases=False))
        facts["widths_without_phases"] = least_traffic(again).total / sublayers / width
    return facts if table is None else facts | {"table_widths": table / width}


def _activations(model: ModelConfig, mixed: bool) -> Facts:
    kept, again = (training_activations(model, checkpointed=checkpointed, mixed=mixed) for checkpointed in (False, True))
    return {
        **{f"{name}_bytes": value for name, value in asdict(kept).items()},
        "bytes": kept.total,
        "checkpointed_bytes": again.total,
    }


def _sizes(found: Bank | ServingMemory | TrainingMemory) -> Facts:
    return {name if name in ("rows", "fits") else f"{name}_bytes": value for name, value in asdict(found).items()}


def _bill(bill: Bill) -> Facts:
    return {
        "weights_bytes": bill.weights, "cache_bytes": bill.cache, "residual_bytes": bill.residual, "plain_residual_bytes": bill.plain,
        "multiply_adds": bill.multiply_adds, "seconds": bill.seconds, "overhead_percent": 100 * bill.overhead,
    }  # fmt: skip


def _pipeline(shape: Shape, device: Device, work: Workload) -> Facts:
    method, sublayers, chunks = shape.body.residual, 2 * shape.body.layers, work.stages * work.virtual
    if not isinstance(method, BankConfig):
        raise RequestError(f"the residual method {method.name!r} has no blocks to send; leave the pipeline out or take one that has.")
    per_chunk = Fraction(len(method.block_ends(sublayers)), chunks)
    facts: Facts = {
        "plain_tensors": plain_stream(work.stages, work.virtual),
        "formula_naive": naive_formula(work.stages, work.virtual, per_chunk),
        "formula_cached": cached_formula(work.stages, work.virtual, per_chunk),
        "formula_cached_with_own": cached_with_own_formula(work.stages, work.virtual, per_chunk),
    }
    policies: tuple[Keeps, ...] = get_args(Keeps)
    for keeps in policies:
        found = staged(
            shape, device, stages=work.stages, virtual=work.virtual, microbatches=work.microbatches or work.stages,
            tokens=work.batch * work.sequence, size=work.size, keeps=keeps,
        )  # fmt: skip
        facts |= {f"keeps_{keeps}_{name}": value for name, value in asdict(found).items() if name != "keeps"}
    return facts
