"""What a process of a parallel run holds and sends, and how long a step takes, for a shape in a layout of `depthroute.parallel`.

Memory and traffic follow what the library does. The tests hold parameters, what pipelines have gathered of them, and all that is sent, to
processes that run; the rest, and which activations are held at once, is counted from the order of the passes.

- A pipeline cuts parameters by chunk; what several chunks use (a tied embedding) is on each of their stages. `fsdp` shards what is left,
  `tp` the matrices of attention and MLPs. Everything else is a group of its own, in shards over `fsdp` x `tp`. `ddp` copies.
- Parameters, gradients and AdamW's two moments are float32, and so are sums of gradients. FSDP gathers what a pass needs, and where it has
  no shards (`ddp` with `tp` or `pp`) copies it: matrices of sub-layers in the precision of autocast, norms and all outside sub-layers in
  float32. A sub-layer is gathered for each pass and let go behind it; in a pipeline it stays from a backward pass to the end of the next
  forward pass. What is outside sub-layers is gathered for a whole pass, in a pipeline for a whole step.
- Gradients are summed into shards behind every micro-batch, over copies behind the last one. In a pipeline they add up whole, and all are
  summed at the end of the step.
- Activations are those of `training_activations`, shared evenly by the layers, for every micro-batch that is between its passes through a
  chunk. What a sub-layer reads is on every process of a `tp` axis whole. To them come the sources that a chunk was sent.

Rows that do not divide are padded by FSDP, which is left out, and so are gradients of cached sources, the loss, and `train.recompute`.

Shapes: D width, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from depthroute.common.errors import RequestError
from depthroute.cost.estimate import Device, training
from depthroute.cost.memory import training_activations
from depthroute.cost.pipeline import Event, bubble, timed
from depthroute.cost.recorded import copies_of_input
from depthroute.cost.shapes import Shape
from depthroute.model import Decoder, ModelConfig
from depthroute.model.layer_work import attended, body_products, layer_products, state_products
from depthroute.parallel.cut import Cut, cut, layers_of_chunks, passages
from depthroute.parallel.layout import AXES, REST, Layout
from depthroute.parallel.tensor import check_tensor
from depthroute.residual import Trace

EXACT = 4  # bytes of float32
PREFETCHED = 2  # sub-layers that are gathered at once: the one that runs and the next


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one process. `gathered`: what FSDP holds whole for a time, parameters and gradients. `received`: sources that were sent."""

    parameters: float
    gradients: float
    optimiser: float
    gathered: float
    activations: float
    received: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimiser + self.gathered + self.activations + self.received


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one process sends in a step, collectives as rings: n - 1 parts of n to gather or to scatter sums, twice that for both.

    `gathers`: FSDP's, of parameters. `gradients`: their sums over processes. `stages`: between chunks, both ways. `tensors`: `tp`'s.
    """

    gathers: float
    gradients: float
    stages: float
    tensors: float

    @property
    def total(self) -> float:
        return self.gathers + self.gradients + self.stages + self.tensors


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """A step of a layout. `held` and `sent`: by stage of the pipeline, each the same for all its processes."""

    processes: int
    microbatches: int
    microbatch: int
    """Sequences of each."""
    bubble: float
    """The part of a step in which a stage waits: chunks that are not even, the head in the last one, count."""
    computing: float
    """Seconds, the bubble among them."""
    communicating: float
    """Seconds that are not hidden behind them."""
    held: tuple[Held, ...]
    sent: tuple[Sent, ...]

    @property
    def seconds(self) -> float:
        return self.computing + self.communicating

    @property
    def fullest(self) -> Held:
        return max(self.held, key=lambda held: held.total)

    @property
    def busiest(self) -> Sent:
        return max(self.sent, key=lambda sent: sent.total)


def layout_cost(
    shape: Shape, device: Device, layout: Layout, *, sequences: int, microbatch: int, context: int, mixed: bool
) -> LayoutCost:
    """A training step of `sequences` sequences of `context` tokens, at most `microbatch` of them in one pass of a process.

    The time is a bound to plan with, as in `estimate`. Processes compute at the pace of one `device` (its `number` has no part in it), each
    its part of the work, longer by the bubble. Everything is sent at the device's `link`, and these are hidden: FSDP's gathers behind the
    computation, sums of gradients behind the backward pass that makes them, over copies the last one, and in a pipeline not at all. Traffic
    between stages and of `tp` is not hidden. Latencies and the optimiser's step are not in it.

    Args:
        mixed: bf16 autocast; otherwise float32.

    Raises:
        RequestError: the layout has an axis without a size, or does not fit the shape or the batch.
    """
    if any(getattr(layout, axis) == REST for axis in AXES):
        raise RequestError(f"--parallel {layout.describe()}: a cost is of a number of processes; give every axis a size, such as fsdp:8.")
    body = replace(shape.body, context=context)
    check_tensor(body, layout.tp)
    rows = layout.rows(sequences)
    count = layout.microbatches(sequences, microbatch) if layout.pp > 1 else -(-rows // microbatch)
    each = -(-rows // count)
    chunks = layers_of_chunks(body, layout.chunks)
    plan = cut(
        body, chunks, rows=each, tokens=context // layout.tp, kind="cpu", dtype=torch.float32,
        precision=torch.bfloat16 if mixed else None,
    )  # fmt: skip
    events = timed(_work(shape, context, chunks), layout.pp, count, layout.order)
    bill = training(
        shape, replace(device, number=1), tokens=sequences * context, context=context, size=2 if mixed else EXACT,
        memory_size=2 if mixed and body.memory_dtype == "compute" else EXACT,
    )  # fmt: skip
    waiting = bubble(events, layout.pp)
    computing = bill.seconds / layout.processes / (1 - waiting)
    step = _Step(shape, body, layout, plan, events, count, mixed=mixed)
    held, sent = tuple(map(step.held, range(layout.pp))), tuple(map(step.sent, range(layout.pp)))
    busiest = Sent(**{field.name: max(getattr(one, field.name) for one in sent) for field in fields(Sent)})
    link = device.link * 1e9
    hidden = 0.0
    if layout.pp == 1:
        scattered, copied, backward = step.scattered(0) / link, step.copied(0) / link, 2 / 3 * computing / count
        hidden = (count - 1) * min(scattered, backward) + min(scattered + copied, backward)
    exposed = busiest.gradients / link - hidden + max(0.0, busiest.gathers / link + hidden - computing)
    communicating = exposed + (busiest.stages + busiest.tensors) / link
    return LayoutCost(
        processes=layout.processes, microbatches=count, microbatch=each, bubble=waiting, computing=computing, communicating=communicating,
        held=held, sent=sent,
    )  # fmt: skip


class _Parts:
    """Numbers of a model's parameters by chunk: `split` by tp and `whole` in sub-layers, `rest` outside them; and the largest sub-layer."""

    def __init__(self, shape: Shape, plan: Cut) -> None:
        with torch.device("meta"):
            decoder = Decoder(shape.body)
        self.sizes = {name: float(parameter.numel()) for name, parameter in decoder.named_parameters()}
        inside = {name for name in self.sizes if _in_sublayer(name)}
        norms = {name for name in inside if "_norm." in name}
        self.split = [self._count(names & inside - norms) for names in plan.parameters]
        self.whole = [self._count(names & norms) for names in plan.parameters]
        self.rest = [self._count(names - inside) for names in plan.parameters]
        groups: dict[str, float] = {}
        for name in inside:
            group = ".".join(name.split(".")[:3])
            groups[group] = groups.get(group, 0.0) + self.sizes[name]
        self.largest = max(groups.values())

    def _count(self, names: Collection[str]) -> float:
        return sum(self.sizes[name] for name in names)


def _in_sublayer(name: str) -> bool:
    path = name.split(".")
    return path[0] == "layers" and path[2] in ("attention", "mlp")


def _work(shape: Shape, context: int, chunks: Sequence[range]) -> list[float]:
    """Multiply-adds of a token in every chunk; the head is the last one's."""
    body = shape.body
    head = body.vocabulary * body.width
    gains = (shape.active - head - body_products(body)) / body.layers  # and biases

    def work(layer: int) -> float:
        pairs = (context + 1) / 2 * attended(body, layer)
        return layer_products(body, layer) + gains + pairs + state_products(body, layer, chunked=True)

    works = [work(layer) for layer in range(body.layers)]
    return [sum(works[layer] for layer in own) + head * (own.stop == body.layers) for own in chunks]


def _activations(body: ModelConfig, parts: int, mixed: bool) -> float:
    """Bytes of a token of the whole sequence on one of `parts` processes, over the depth."""
    total = training_activations(body, mixed=mixed).total
    if parts == 1:
        return float(total)
    if mixed and body.memory_dtype != "compute":
        read = 2 * body.width * sum(map(copies_of_input, range(2 * body.layers)))
    else:
        read = (2 if mixed else EXACT) * body.width * sum(_reads(body))
    return read + (total - read) / parts


def _reads(body: ModelConfig) -> list[int]:
    """How many tensors every sub-layer reads: roles that share a read share the tensor. For methods that do not look inside sub-layers."""
    found = []
    with FakeTensorMode(), torch.no_grad():
        residual = body.residual.module(body.body)
        memory = residual.open(torch.empty(1, 1, body.width))
        for site in range(2 * body.layers):
            inputs = residual.read(memory, site, None)
            found.append(len({id(leaf) for leaf in tree_leaves(inputs)}))
            output = torch.empty(1, 1, body.width)
            memory = residual.write(memory, site, output, Trace(inputs, output, None))
    return found


class _Step:
    """What the stages of a pipeline hold and send in a step."""

    def __init__(
        self, shape: Shape, body: ModelConfig, layout: Layout, plan: Cut, events: Sequence[Event], count: int, *, mixed: bool
    ) -> None:
        self.layout, self.plan, self.events, self.count = layout, plan, events, count
        self.shards, self.rounded = layout.fsdp * layout.tp, 2 if mixed else EXACT  # of what is outside sub-layers; bytes of what is inside
        self.parts = _Parts(shape, plan)
        travels = passages(plan, layout.pp, layout.keeps).sent
        self.passing = [sum(plan.sources[number].bytes for number in numbers) for numbers in travels]  # of a micro-batch, at every cut
        self.tokens = plan.tokens[0] * plan.tokens[1] * layout.tp
        all_layers = self.tokens * _activations(body, layout.tp, mixed) / body.layers
        self.working = [all_layers * len(own) for own in plan.layers]
        self.traded = [0.0] * plan.chunks  # by tp, of a micro-batch in each chunk, in both passes
        if layout.tp > 1:
            read, written = 2 if mixed and body.memory_dtype == "compute" else EXACT, 2 if mixed else EXACT
            reads = _reads(body)
            for chunk, own in enumerate(plan.layers):
                widths = sum(2 * (reads[site] * read + written) for site in range(2 * own.start, 2 * own.stop))
                self.traded[chunk] = _ring(layout.tp) * self.tokens * body.width * widths

    def held(self, stage: int) -> Held:
        own = EXACT * (self._inside(stage) / self.layout.fsdp + self._rest(stage) / self.shards)
        activations, received = self._in_flight(stage)
        return Held(
            parameters=own, gradients=own, optimiser=2 * own, gathered=self._gathered(stage),
            activations=activations, received=received,
        )  # fmt: skip

    def _gathered(self, stage: int) -> float:
        """Parameters in copies, and gradients of which the process keeps less."""
        layout, rest = self.layout, EXACT * self._rest(stage)
        if layout.ddp == layout.processes or layout.shares * layout.tp == 1:
            return 0.0  # without FSDP
        found = rest * (2 if self.shards > 1 else 1)
        if layout.shares == 1:
            return found
        if layout.pp == 1:
            # a gradient as it is made, and the buffer that an earlier one is sent from
            return found + self.parts.largest / layout.tp * (PREFETCHED * self.rounded + self.rounded + EXACT)
        whole = EXACT * self._inside(stage) if layout.fsdp > 1 else 0.0
        return found + whole + sum(map(self._copy, range(stage, self.plan.chunks, layout.pp)))

    def scattered(self, stage: int) -> float:
        """Sent for sums of gradients into shards, once."""
        return EXACT * (_ring(self.layout.fsdp) * self._inside(stage) + _ring(self.shards) * self._rest(stage))

    def copied(self, stage: int) -> float:
        """Sent for sums of gradients over copies."""
        return 2 * _ring(self.layout.ddp) * EXACT * (self._inside(stage) / self.layout.fsdp + self._rest(stage) / self.shards)

    def sent(self, stage: int) -> Sent:
        layout, chunks = self.layout, range(stage, self.plan.chunks, self.layout.pp)
        times = 1 if layout.pp > 1 else self.count
        gathers = times * _ring(self.shards) * EXACT * self._rest(stage)
        gathers += _ring(layout.fsdp) * sum(self._gathers(chunk) * self._copy(chunk) for chunk in chunks)
        gradients = times * self.scattered(stage) + self.copied(stage)
        for name, users in self.plan.shared().items():
            stages = {chunk % layout.pp for chunk in users}
            if stage in stages:
                gradients += 2 * _ring(len(stages)) * EXACT * self.parts.sizes[name] / self.shards
        passing = [0, *self.passing, 0]  # before the first chunk, at every cut, behind the last
        return Sent(
            gathers=gathers, gradients=gradients, stages=float(self.count * sum(passing[chunk] + passing[chunk + 1] for chunk in chunks)),
            tensors=self.count * sum(self.traded[chunk] for chunk in chunks),
        )  # fmt: skip

    def _of(self, chunk: int) -> float:
        """Numbers in the sub-layers of a chunk, before FSDP shards them."""
        return self.parts.split[chunk] / self.layout.tp + self.parts.whole[chunk]

    def _copy(self, chunk: int) -> float:
        """Bytes of those as FSDP gathers them."""
        return self.rounded * self.parts.split[chunk] / self.layout.tp + EXACT * self.parts.whole[chunk]

    def _inside(self, stage: int) -> float:
        return sum(map(self._of, range(stage, self.plan.chunks, self.layout.pp)))

    def _rest(self, stage: int) -> float:
        return sum(self.parts.rest[stage :: self.layout.pp])

    def _gathers(self, chunk: int) -> int:
        """How often FSDP gathers the sub-layers of a chunk. In a pipeline a pass finds them gathered if a backward pass came before it."""
        if self.layout.pp == 1:
            return 2 * self.count
        passes = [event.backward for event in self.events if event.chunk == chunk]
        return sum(not before for before in [False, *passes[:-1]])

    def _in_flight(self, stage: int) -> tuple[float, float]:
        """Activations and received sources, where together they are most: a chunk holds them from its forward to its backward pass."""
        now, most = (0.0, 0.0), (0.0, 0.0)
        for event in self.events:
            if event.stage == stage:
                sign = -1 if event.backward else 1
                working = self.working[event.chunk]
                received = self.passing[event.chunk - 1] if event.chunk else 0
                now = now[0] + sign * working, now[1] + sign * received
                most = max(most, now, key=sum)
        return most


def _ring(processes: int) -> float:
    """What one of them sends of a whole that they gather, or whose sum they scatter."""
    return (processes - 1) / processes
