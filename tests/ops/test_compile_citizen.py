"""Depth attention inside `torch.compile`: a whole model is one graph with the losses and gradients it has without, whatever changes.

The tracing half of the compiler (`aot_eager`) is tried by default; it is where graphs break and mutations are sorted out. Inductor takes
minutes. The operators themselves pass `torch.library.opcheck`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from literal import NATIVE
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from depthroute.model import Decoder, ModelConfig
from depthroute.ops import compiled, depth_attention, hold, registry
from depthroute.ops.form import Form, Operands, empty_gradients
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig
from depthroute.train import initialise
from tests.bodies import K3, KIMI

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
CONFIGS: dict[str, ResidualConfig] = {
    "prenorm": PreNormConfig(),
    "full": AttnResConfig(),
    "block": AttnResConfig(block=2),
    "role-decoupled": AttnResConfig(block=3, roles="decoupled"),
    "low-rank projected": AttnResConfig(block=2, rank=5, keys="projected", phases=False),
}
RD = CONFIGS["role-decoupled"]
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def serve(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Make this backend what the model takes."""
    if backend == "auto":
        return
    if backend != "reference" and (reason := registry.BACKENDS[backend].refusal(torch.device("cpu"), torch.float64)) is not None:
        pytest.skip(reason)
    monkeypatch.setitem(registry.AUTOMATIC, "cpu", () if backend == "reference" else (backend,))


def decoder(config: ResidualConfig, dtype: torch.dtype = torch.float64, **fields: Any) -> Decoder:
    shape = {"vocabulary": 17, "width": 12, "layers": 2, "heads": 2, "mlp_width": 20, "context": 16, "init_std": 0.4} | fields
    model = Decoder(ModelConfig(**shape, residual=config))
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(17, (batch, length + 1), generator=torch.Generator().manual_seed(length))


def loss(model: Decoder, tokens: Tensor) -> Tensor:
    return model.loss(tokens[:, :-1], tokens[:, 1:]).objective


def step(model: Decoder, function: Callable[[Decoder, Tensor], Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """The loss and every gradient."""
    model.zero_grad()
    found = function(model, tokens)
    found.backward()
    return {"loss": found.detach()} | {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


class Counted:
    """One of torch's compilers, and how many graphs it was given."""

    def __init__(self, name: str) -> None:
        self.compile, self.graphs = torch._dynamo.lookup_backend(name), 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.compile(graph, inputs)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("compiler", "backend"),
    [
        ("aot_eager", "auto"),
        *(pytest.param("aot_eager", backend, marks=SLOW) for backend in ("reference", "compiled")),
        *(pytest.param("inductor", backend, marks=SLOW) for backend in ("reference", "native", "compiled")),
    ],
)
def test_a_whole_decoder_is_one_graph(monkeypatch: pytest.MonkeyPatch, config: ResidualConfig, compiler: str, backend: str) -> None:
    serve(monkeypatch, backend)
    model, counted = decoder(config), Counted(compiler)
    found = step(model, torch.compile(loss, fullgraph=True, backend=counted), tokens(2, 8))
    assert counted.graphs == 1
    agree(found, step(model, loss, tokens(2, 8)))


BODIES: dict[str, dict[str, Any]] = {
    "kimi": KIMI, "k3": K3, "documents": {"document_end": 3, "attention_window": 4}, "kimi with documents": KIMI | {"document_end": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("compiler", "body"),
    [
        ("aot_eager", "kimi"),
        *(pytest.param("aot_eager", body, marks=SLOW) for body in ("k3", "documents", "kimi with documents")),
        pytest.param("inductor", "kimi with documents", marks=SLOW),
    ],
)
def test_every_body_is_one_graph(compiler: str, body: str) -> None:
    """Delta rules, latent attention, experts and what documents see: forward and backward."""
    model, counted = decoder(RD, **BODIES[body]), Counted(compiler)
    found = step(model, torch.compile(loss, fullgraph=True, backend=counted), tokens(2, 5))
    assert counted.graphs == 1
    agree(found, step(model, loss, tokens(2, 5)), 1e-9)


@pytest.mark.parametrize("layers", [1, 4])
def test_one_graph_however_many_sources(layers: int) -> None:
    model, counted = decoder(AttnResConfig(), layers=layers), Counted("eager")
    found = torch.compile(loss, fullgraph=True, backend=counted)(model, tokens(2, 8))
    assert counted.graphs == 1
    torch.testing.assert_close(found, loss(model, tokens(2, 8)))


@pytest.mark.parametrize("config", [pytest.param(CONFIGS["full"], marks=SLOW), CONFIGS["role-decoupled"]], ids=["full", "role-decoupled"])
@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=SLOW)])
def test_other_batches_and_lengths_take_no_other_graph(monkeypatch: pytest.MonkeyPatch, config: ResidualConfig, backend: str) -> None:
    """Beyond the one for any size, which torch makes when a size first changes."""
    serve(monkeypatch, backend)
    model, counted = decoder(config), Counted("aot_eager")
    function = torch.compile(loss, fullgraph=True, backend=counted)
    for batch, length in ((2, 8), (3, 7), (4, 11), (2, 5), (7, 16)):
        with torch._dynamo.config.patch(error_on_recompile=counted.graphs == 2):
            found = step(model, function, tokens(batch, length))
        agree(found, step(model, loss, tokens(batch, length)))
    assert counted.graphs == 2


def test_activation_checkpointing_inside() -> None:
    model = decoder(RD)

    def checkpointed(model: Decoder, tokens: Tensor) -> Tensor:
        found: Tensor = checkpoint(loss, model, tokens, use_reentrant=False)
        return found

    found = step(model, torch.compile(checkpointed, fullgraph=True, backend="aot_eager"), tokens(2, 8))
    agree(found, step(model, loss, tokens(2, 8)))


def test_activation_checkpointing_and_saved_tensor_hooks_around() -> None:
    model, packed = decoder(RD), list[Tensor]()
    function = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = step(model, loss, tokens(2, 8))

    def hooked(model: Decoder, tokens: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor.clone(), lambda tensor: tensor):
            return function(model, tokens)

    agree(step(model, hooked, tokens(2, 8)), expected)
    assert packed
    agree(step(model, lambda *given: checkpoint(function, *given, use_reentrant=False), tokens(2, 8)), expected)


@pytest.mark.parametrize("memory_dtype", ["parameter", "compute"])
def test_autocast_inside_and_around(memory_dtype: str) -> None:
    model = decoder(RD, torch.float32, memory_dtype=memory_dtype)

    def inside(model: Decoder, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, tokens)

    expected = step(model, inside, tokens(2, 8))
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for name, function in (("inside", torch.compile(inside, fullgraph=True, backend="aot_eager")), ("around", None)):
        around = torch.compile(loss, fullgraph=True, backend="aot_eager")

        def outside(model: Decoder, tokens: Tensor, function: Any = around) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found: Tensor = function(model, tokens)
            return found

        found = step(model, function or outside, tokens(2, 8))
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-2, atol=1e-2, msg=name)
        agree(found, expected, 3e-2 * scale)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own, of any such input
def test_a_held_source_may_come_from_outside() -> None:
    """Outside, reads share a buffer; the graph hands autograd what it found for the source, and both arrive."""
    generator = torch.Generator().manual_seed(0)
    x, y, query = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((5, 8), (5, 8), (8,)))

    def read(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        found = depth_attention([x, y], query)
        assert isinstance(found, Tensor)
        return found.square().sum()

    function, held = torch.compile(read, fullgraph=True, backend="aot_eager"), hold(x)
    expected = torch.autograd.grad(read(x, y, query) + read(x, y, 2 * query), (x, y, query))
    found = torch.autograd.grad(read(held, y, query) + function(held, y, 2 * query), (x, y, query))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"heads": 2, "projected": True, "bias": True, "gain": True, "prior": True},
    "sigmoid": {"key_norm": "none", "weighting": "sigmoid", "prior": True},
    "one source": {"number": 1, "key_norm": "full"},
}


def arguments(
    backend: str, number: int = 3, heads: int = 1, key_norm: str = "slice", weighting: str = "softmax", projected: bool = False,
    bias: bool = False, gain: bool = False, prior: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Of the forward operator: two queries, 2 x 3 tokens, width 8 and rank 6, in float64."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    earlier = [rand(2, 3, 8) for _ in range(2)] if prior else []
    if prior and weighting == "softmax":
        earlier += [rand(2, 3, heads).detach() for _ in range(2)]
        earlier += [(1 + rand(2, 3, heads).detach().square()).requires_grad_() for _ in range(2)]
    return (
        [rand(2, 3, 8) for _ in range(number)], [rand(2, 3, 6) for _ in range(number)] if projected else [], rand(2, 6),
        rand(2, number) if bias else None, rand(8) if gain else None, earlier, heads, key_norm, weighting, 1e-6, 1e-6, backend,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("backend", [NATIVE, "compiled"])
def test_the_operators_keep_the_rules_of_torch(monkeypatch: pytest.MonkeyPatch, backend: str, form: dict[str, Any]) -> None:
    """Their schemas tell what they mutate, their shapes are right without data, and their gradients survive the tracing of AOTAutograd."""
    monkeypatch.setattr(compiled, "_compiled", lambda graph, form, kind: graph)  # as plain torch code
    given = arguments(backend, **form)
    torch.library.opcheck(torch.ops.depthroute.depth_read.default, given)
    operands, rest = Operands(*given[:6]), given[6:]
    with torch.no_grad():
        outputs, scalars = (lambda found: (found[:2], found[2:]))(torch.ops.depthroute.depth_read(*given))
    empty = empty_gradients(operands, Form(*rest[:5]))
    into = [torch.randn_like(source).detach() for source in operands.sources]
    found = [torch.zeros_like(one).detach() for one in (*empty.keys, *empty.prior, *empty[2:])]
    sums = [torch.randn_like(one) for one in scalars[2:4]] if rest[2] == "softmax" else []
    upstream = [torch.randn_like(output) for output in outputs]
    detached = [[one.detach() for one in x] if isinstance(x, list) else None if x is None else x.detach() for x in operands]
    given = (into, found, [s % 2 == 0 for s in range(len(into))], *detached, scalars, upstream, sums, torch.randn_like(scalars[-4]), *rest)
    torch.library.opcheck(torch.ops.depthroute.depth_read_backward.default, given)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_cuda_graphs_of_a_whole_decoder(config: ResidualConfig) -> None:
    model = decoder(config, torch.float32).cuda()
    function = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for length in (8, 8, 8, 12, 12, 12):
        given = tokens(4, length).cuda()
        expected = step(model, loss, given)
        torch.compiler.cudagraph_mark_step_begin()
        agree(step(model, function, given), expected, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "compiled"])
def test_a_captured_cuda_graph_replays_with_other_numbers(backend: Any) -> None:
    if (reason := registry.BACKENDS[backend].refusal(torch.device("cuda"), torch.bfloat16)) is not None:
        pytest.skip(reason)
    sources = [torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    query = torch.randn(128, device="cuda", requires_grad=True)
    upstream = torch.randn_like(sources[0])

    def both() -> list[Tensor]:
        output = depth_attention(sources, query, backend=backend)
        assert isinstance(output, Tensor)
        return [output.detach(), *torch.autograd.grad(output, (*sources, query), upstream)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        for tensor in (*sources, query, upstream):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    for got, wanted in zip(captured, both(), strict=True):
        assert torch.equal(got, wanted)
