"""Time and memory of decoding, prefill, training and pipelines from a device's bandwidth and FLOP/s.

These are bounds to plan with, not measurements: weights, caches and the residual method move at the device's full bandwidth, products run
at `efficiency` of its FLOP/s, and what is read for the one does not wait for the other. The residual method's own passes are bound by
memory and overlap with nothing, so that they add to the time. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from depthroute.common.errors import RequestError
from depthroute.cost.memory import training_activations
from depthroute.cost.pipeline import chunk_ends, pipeline_traffic, schedule
from depthroute.cost.recorded import carried_numbers
from depthroute.cost.shapes import Shape
from depthroute.cost.summary import residual_parameters
from depthroute.cost.traffic import least_traffic
from depthroute.cost.work import routing_work
from depthroute.parallel.layout import Keeps
from depthroute.residual import PreNormConfig
from depthroute.residual.bank import BankConfig

Dtype = Literal["float32", "bfloat16", "float16", "float8"]
BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
STATE = 4  # bytes of a number of a state that does not grow, which is float32 whatever else is not
BACKWARD = 2  # of the residual method's traffic: sources are read again, and as many gradients are written


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one device can do. The defaults are round numbers of a current accelerator; give your own."""

    bandwidth: float = 3_000.0
    """Of its memory, GB/s (1e9 bytes)."""
    flops: float = 1_000.0
    """Dense products in the dtype of the computation, TFLOP/s (1e12); a multiply-add is two."""
    efficiency: float = 0.4
    """The part of `flops` that large products reach."""
    memory: float = 80.0
    """GB."""
    link: float = 50.0
    """Between pipeline stages, one direction, GB/s."""
    number: int = 1
    """How many devices share weights, cache and work evenly."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "efficiency", "memory", "link", "number"):
            if not getattr(self, name) > 0:
                raise RequestError(f"{name} = {getattr(self, name)} is not allowed; it must be positive.")
        if self.efficiency > 1:
            raise RequestError(f"efficiency = {self.efficiency} is not allowed; it takes more than 0 and at most 1.")

    def moving(self, size: float) -> float:
        return size / (self.bandwidth * 1e9 * self.number)

    def computing(self, multiply_adds: float) -> float:
        return 2 * multiply_adds / (self.flops * 1e12 * self.efficiency * self.number)


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What one pass takes."""

    weights: float = 0.0
    cache: float = 0.0
    residual: float = 0.0
    """Bytes that the residual method moves."""
    plain: float = 0.0
    """Bytes that a plain residual stream would move in its place."""
    multiply_adds: float
    seconds: float
    plain_seconds: float

    @property
    def overhead(self) -> float:
        """Time beyond that with a plain residual stream, as a part of the latter."""
        return self.seconds / self.plain_seconds - 1


def decoding(shape: Shape, device: Device, *, batch: int, context: int, size: int) -> Bill:
    """One more token for each of `batch` sequences that hold `context` tokens; numbers of `size` bytes."""
    weights = shape.weights_read(batch) * size
    cache = batch * (context * shape.cache * size + 2 * shape.state * STATE)
    products = batch * (shape.active + (context + 1) * shape.attended_cached + shape.updates)
    return _bill(shape, device, tokens=batch, weights=weights, cache=cache, products=products, size=size)


def prefilling(shape: Shape, device: Device, *, batch: int, tokens: int, size: int, chunk: int | None = None) -> Bill:
    """`batch` prompts of `tokens` tokens, in chunks of at most `chunk` tokens a prompt; each chunk reads the weights again.

    The keys and values that MLA makes of the latent vectors of earlier chunks are not counted.
    """
    chunk = min(chunk or tokens, tokens)
    chunks = -(-tokens // chunk)
    weights = chunks * shape.weights_read(batch * chunk) * size
    cache = batch * (tokens * shape.cache * (1 + (chunks - 1) / 2) * size + 2 * chunks * shape.state * STATE)
    products = batch * (tokens * (shape.active + shape.updates_chunked) + tokens * (tokens + 1) / 2 * shape.attended)
    return _bill(shape, device, tokens=batch * tokens, weights=weights, cache=cache, products=products, size=size)


def training(
    shape: Shape, device: Device, *, tokens: int, context: int, size: int, memory_size: int | None = None, checkpointed: bool = False
) -> Bill:
    """Forward and backward of `tokens` tokens in sequences of `context`. The optimiser's step is not in it.

    `memory_size`: bytes of a number that the residual method carries; None is `size`. `checkpointed`: the residual method's reads run
    again before their backward.
    """
    products = 3 * tokens * (shape.active + shape.updates_chunked + (context + 1) / 2 * shape.attended)
    weights = 3 * shape.weights_read(tokens) * size
    passes = 1 + BACKWARD + checkpointed
    return _bill(
        shape, device, tokens=tokens, weights=weights, cache=0, products=products, size=memory_size or size, passes=passes, arithmetic=3
    )


def _bill(
    shape: Shape, device: Device, *, tokens: int, weights: float, cache: float, products: float, size: int, passes: int = 1,
    arithmetic: int = 1,
) -> Bill:  # fmt: skip
    body = shape.body
    residual = passes * tokens * least_traffic(body).total * size
    plain = min(passes, 1 + BACKWARD) * tokens * least_traffic(replace(body, residual=PreNormConfig())).total * size
    work = arithmetic * tokens * routing_work(body).total
    rest = max(device.moving(weights + cache), device.computing(products))
    routed = max(device.moving(residual), device.computing(work))
    return Bill(
        weights=weights, cache=cache, residual=residual, plain=plain, multiply_adds=products + work, seconds=rest + routed,
        plain_seconds=rest + device.moving(plain),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bank:
    """What a prefill keeps of the depth memory, bytes."""

    rows: int
    """Closed sources kept at most while the last block is open."""
    whole: float
    """All tokens on one device (Attention Residuals, section 4.2: N T d numbers)."""
    sharded: float
    """The tokens shared among the devices."""
    chunked: float
    """One chunk of them, shared."""
    carried: float
    """Everything that the method carries from site to site for one chunk, shared: partial sums and reads ahead too."""


def bank(shape: Shape, *, batch: int, tokens: int, size: int, devices: int = 1, chunk: int | None = None) -> Bank:
    """The depth memory of `batch` prompts of `tokens` tokens. A method without a bank of sources has none of it but what it carries."""
    body, method = shape.body, shape.body.residual
    rows = 0
    if isinstance(method, BankConfig):
        rows = len(method.block_ends(2 * body.layers))
        rows = rows if method.window is None else min(rows, method.window + 1)
    at_once = batch * min(chunk or tokens, tokens)
    one = rows * body.width * size
    return Bank(
        rows=rows,
        whole=one * batch * tokens,
        sharded=one * batch * tokens / devices,
        chunked=one * at_once / devices,
        carried=carried_numbers(body) * size * at_once / devices,
    )


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes a device holds to serve, everything shared evenly among the devices. What lives inside one sub-layer is not in it."""

    weights: float
    cache: float
    depth: float
    """What the residual method carries for one chunk of the prompts."""
    total: float
    fits: bool


def serving_memory(shape: Shape, device: Device, *, batch: int, context: int, size: int, chunk: int | None = None) -> ServingMemory:
    """`batch` sequences of `context` tokens, prefilled in chunks of at most `chunk` tokens each."""
    weights = (shape.parameters + residual_parameters(shape.body)) * size / device.number
    cache = batch * (context * shape.cache * size + shape.state * STATE) / device.number
    depth = bank(shape, batch=batch, tokens=context, size=size, devices=device.number, chunk=chunk).carried
    total = weights + cache + depth
    return ServingMemory(weights=weights, cache=cache, depth=depth, total=total, fits=total <= device.memory * 1e9)


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes a device needs to train, weights and optimiser shared evenly among the devices, activations of its own micro-batch."""

    weights: float
    activations: float
    total: float
    fits: bool


def training_memory(
    shape: Shape, device: Device, *, tokens: int, mixed: bool = True, per_parameter: int = 16, checkpointed: bool = False
) -> TrainingMemory:
    """`tokens` at once on a device; `per_parameter` bytes: weight, gradient and two moments in float32 are 16."""
    weights = (shape.parameters + residual_parameters(shape.body)) * per_parameter / device.number
    activations = tokens * training_activations(shape.body, checkpointed=checkpointed, mixed=mixed).total
    total = weights + activations
    return TrainingMemory(weights=weights, activations=activations, total=total, fits=total <= device.memory * 1e9)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A pipeline's traffic by one policy: tensors and bytes per micro-batch forward, and what they mean for the schedule."""

    keeps: Keeps
    tensors: int
    """In all: closed blocks, embeddings and partial sums."""
    blocks: int
    embeddings: int
    partials: int
    largest: int
    """Tensors of the largest transfer."""
    bytes: float
    seconds_of_largest: float
    """Of the largest transfer, to be hidden behind the computation of one chunk."""
    cache_bytes: float
    """Of the fullest stage, over all micro-batches in flight."""
    bubble: float


def staged(
    shape: Shape, device: Device, *, stages: int, virtual: int, microbatches: int, tokens: int, size: int, keeps: Keeps
) -> Stages:
    """A pipeline for a method with a bank of sources; `tokens` in a micro-batch.

    Raises:
        RequestError: a method without a bank, or a pipeline that does not fit.
    """
    method, sublayers = shape.body.residual, 2 * shape.body.layers
    if not isinstance(method, BankConfig):
        raise RequestError(f"the residual method {method.name!r} has no blocks to send; pipeline traffic is counted for banks of sources.")
    ends, cuts = method.block_ends(sublayers), chunk_ends(sublayers, stages * virtual)
    found = pipeline_traffic(ends, cuts, stages, keeps)
    run = schedule(ends, cuts, stages, microbatches, keeps)
    tensor = tokens * shape.body.width * size
    return Stages(
        keeps=keeps, tensors=found.total, blocks=found.blocks, embeddings=found.embeddings, partials=found.partials,
        largest=found.largest, bytes=found.total * tensor,
        seconds_of_largest=found.largest * tensor / (device.link * 1e9), cache_bytes=run.most_held * tensor, bubble=run.bubble,
    )  # fmt: skip
