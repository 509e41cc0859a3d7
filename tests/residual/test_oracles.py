"""Our residual methods against public implementations by other hands, where such a one is right and can be installed.

Every oracle is optional: without its package its tests are skipped. Its parameters are written as functions of ours, so that one backward
pass gives both gradients of the same parameters. Sub-layers put out given tensors: an error at one site cannot hide behind another's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from depthroute.ops import depth_attention
from depthroute.residual import AttnResConfig, Residual, ResidualConfig, RoleInputs, hyper
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.mhc import MHCConfig
from depthroute.residual.norm import RMSNorm
from depthroute.residual.protocol import Body

BATCH, TOKENS, WIDTH, LAYERS = 2, 3, 6, 3
BODY = Body(width=WIDTH, layers=LAYERS, attention_activation=WIDTH, mlp_activation=WIDTH)


@pytest.fixture
def noise() -> Callable[..., Tensor]:
    """`noise(*shape)`: float64 leaves, the same at every run."""
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.fixture
def data(noise: Callable[..., Tensor]) -> list[Tensor]:
    """The embedding and what every sub-layer puts out, [B, T, D] each."""
    return [noise(BATCH, TOKENS, WIDTH) for _ in range(BODY.sublayers + 1)]


@pytest.fixture
def scattered(noise: Callable[..., Tensor]) -> Callable[[ResidualConfig], Residual]:
    """The method with random parameters: none is zero, none is like another."""

    def build(config: ResidualConfig) -> Residual:
        method = config.build(BODY).double()
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.copy_(0.5 * noise(*parameter.shape))
        return method

    return build


def drive(method: Residual, data: Sequence[Tensor], norm: nn.Module | None = None) -> tuple[list[Tensor], list[Any]]:
    """Every read, one tensor per role where roles differ, with `norm` behind it; and the memory before every read."""
    memory, reads, memories = method.open(data[0]), [], []
    for site, output in enumerate(data[1:]):
        inputs = method.read(memory, site, norm)
        reads += inputs if isinstance(inputs, RoleInputs) else [inputs]
        memories.append(memory)
        memory = method.write(memory, site, output)
    return [*reads, method.close(memory, norm)], [*memories, memory]


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """The same tensors, and the same gradients of a random sum of them, to 1e-12."""
    torch.testing.assert_close(list(ours), list(theirs), rtol=1e-12, atol=1e-12)
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(one.shape, dtype=torch.float64, generator=generator) for one in theirs]
    gradients = [torch.autograd.grad(found, leaves, weights, materialize_grads=True) for found in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@contextmanager
def in_float64() -> Iterator[None]:
    """Two of the packages compute in float32, by `.float()`, behind whose rounding a wrong eps could hide; here that is float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def hyper_parameters(site: hyper.Coefficients) -> dict[str, Tensor]:
    """Our parameters of a site as hyper-connections has them: its norm's gain is gamma + 1."""
    found = {"static_alpha": torch.cat((site.read[:, None], site.mix), 1), "static_beta": site.write}
    if site.config.dynamic:
        found |= {
            "dynamic_alpha_fn": torch.cat((site.dynamic_read[:, None], site.dynamic_mix), 1),
            "dynamic_alpha_scale": site.read_scale.squeeze(),
            "dynamic_beta_fn": site.dynamic_write,
            "dynamic_beta_scale": site.write_scale.squeeze(),
        }
    return found if site.norm_gain is None else found | {"norm.gamma": site.norm_gain - 1}


@pytest.fixture(scope="module")
def hyper_connections() -> ModuleType:
    return pytest.importorskip("hyper_connections", reason="hyper-connections is not installed")


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize(
    "settings",
    [{"dynamic": False}, {}, {"norm_gain": True}, {"norm_gain": True, "tanh": False}],
    ids=["static", "dynamic", "gain", "no tanh"],
)
def test_hyper_connections_are_those_of_the_package(
    hyper_connections: ModuleType, scattered: Callable[[ResidualConfig], Residual], data: list[Tensor], monkeypatch: pytest.MonkeyPatch,
    streams: int, settings: dict[str, bool],
) -> None:  # fmt: skip
    monkeypatch.setattr(hyper, "EPS", 0.0)  # theirs divides by the norm itself
    method = scattered(HyperConnectionsConfig(streams=streams, **settings))
    expand, reduce = hyper_connections.get_expand_reduce_stream_functions(streams)
    folded, expected, expected_streams = expand(data[0]), [], []
    for site, output in enumerate(data[1:]):
        theirs = hyper_connections.HyperConnections(streams, dim=WIDTH, layer_index=site, tanh=settings.get("tanh", True)).double()
        expected_streams.append(folded)
        inputs, write = functional_call(theirs, hyper_parameters(method.sites[str(site)]), (folded,))
        expected.append(inputs)
        folded = write(output)
    reads, memories = drive(method, data)
    unfolded = [one.unflatten(0, (BATCH, streams)).movedim(1, 2) for one in (*expected_streams, folded)]
    ours = [*reads, *(memory.streams for memory in memories)]
    assert_same(ours, [*expected, reduce(folded), *unfolded], [*data, *method.parameters()])


@pytest.mark.parametrize("streams", [2, 4])
def test_hyper_connections_start_where_the_package_does(hyper_connections: ModuleType, streams: int) -> None:
    method = HyperConnectionsConfig(streams=streams, norm_gain=True).build(BODY)
    for site in range(BODY.sublayers):
        theirs = dict(hyper_connections.HyperConnections(streams, dim=WIDTH, layer_index=site).named_parameters())
        torch.testing.assert_close(hyper_parameters(method.sites[str(site)]), theirs, rtol=0, atol=0, msg=f"site {site}")


@pytest.fixture(scope="module")
def modelling() -> Callable[[str], ModuleType]:
    """`modelling(name)`: a model's modelling file in transformers. Early ports of mHC there were wrong, hence the version."""
    pytest.importorskip("transformers", minversion="5.23", reason="transformers 5.23 or newer is not installed")
    return lambda name: importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def made_of(layer: type[nn.Module], **parts: Any) -> nn.Module:
    """A decoder layer that has these parts in place of those it would build."""
    found = layer.__new__(layer)
    nn.Module.__init__(found)
    for name, part in parts.items():
        setattr(found, name, part)
    return found


@pytest.mark.parametrize(("streams", "iterations", "eps"), [(4, 20, 1e-6), (2, 1, 1e-6), (3, 2, 0.1)])
def test_mhc_is_deepseeks(
    modelling: Callable[[str], ModuleType], scattered: Callable[[ResidualConfig], Residual], data: list[Tensor],
    streams: int, iterations: int, eps: float,
) -> None:  # fmt: skip
    deepseek = modelling("deepseek_v4")
    method = scattered(MHCConfig(streams=streams, iterations=iterations, eps=eps, numerics="released", head="hyper"))
    shape = SimpleNamespace(hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=eps, rms_norm_eps=eps, hidden_size=WIDTH)
    connection, head = deepseek.DeepseekV4HyperConnection(shape), deepseek.DeepseekV4HyperHead(shape)
    expected: list[Tensor] = []
    expected_streams: list[Tensor] = []

    def connect(site: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def go(streams: Tensor) -> tuple[Tensor, ...]:
            expected_streams.append(streams)
            ours = method.sites[str(site)]
            return functional_call(connection, {"fn": ours.projection.T, "base": ours.bias, "scale": ours.scale}, (streams,))

        return go

    def put_out(site: int, inputs: Tensor) -> Tensor:
        expected.append(inputs)
        return data[site + 1]

    with in_float64():
        held = data[0][:, :, None].expand(-1, -1, streams, -1).contiguous()
        for site in range(0, BODY.sublayers, 2):
            layer = made_of(
                deepseek.DeepseekV4DecoderLayer,
                attn_hc=connect(site), self_attn=lambda x, site=site: (put_out(site, x), None), input_layernorm=nn.Identity(),
                ffn_hc=connect(site + 1), mlp=lambda x, input_ids, site=site: put_out(site + 1, x), post_attention_layernorm=nn.Identity(),
            )  # fmt: skip
            held = layer(held)
        ours = {"hc_fn": method.head.projection.T, "hc_base": method.head.bias, "hc_scale": method.head.scale}
        expected.append(functional_call(head, ours, (held,)))
    reads, memories = drive(method, data)
    found = [*reads, *(memory.streams for memory in memories)]
    assert_same(found, [*expected, *expected_streams, held], [*data, *method.parameters()])


@pytest.mark.parametrize("layers_per_block", [1, 2, 3])
@pytest.mark.parametrize("roles", ["shared", "separate"])
def test_normed_scaled_attention_residuals_are_inklings(
    modelling: Callable[[str], ModuleType], scattered: Callable[[ResidualConfig], Residual], data: list[Tensor],
    roles: str, layers_per_block: int,
) -> None:  # fmt: skip
    """Its sliding layers have one query, its full layers one per role; its first read is the embedding as it is, not normalised."""
    inkling = modelling("inkling2")
    # Keys are the values, which are divided by their RMS already.
    config = AttnResConfig(layers_per_block=layers_per_block, values="normed", scaled=True, key_norm="none", key_gain=False, roles=roles)
    method = scattered(config)
    expected: list[Tensor] = []

    def read(site: int) -> Callable[..., tuple[Tensor, ...]]:
        ours = method.sites[str(site)]
        queries = torch.stack([query for query in (ours.query, ours.key_query, ours.value_query) if query is not None])
        theirs = inkling.Inkling2BlockAttentionResidual(SimpleNamespace(hidden_size=WIDTH), len(queries))
        return lambda *states: functional_call(theirs, {"query": queries.view_as(theirs.query)}, states)

    def put_out(site: int, *inputs: Tensor) -> Tensor:
        expected.extend(inputs)
        return data[site + 1]

    def attend(site: int) -> Callable[..., tuple[Tensor, None]]:
        names = ("hidden_states", "key_hidden_states", "value_hidden_states")
        return lambda **given: (put_out(site, *(given[name] for name in names if name in given)), None)

    kind = inkling.Inkling2SlidingDecoderLayer if roles == "shared" else inkling.Inkling2FullDecoderLayer
    norms = ("input_layernorm", "q_input_layernorm", "k_input_layernorm", "v_input_layernorm", "post_attention_layernorm")
    with in_float64():
        held, blocks = data[0], data[0].new_zeros(BATCH, TOKENS, 0, WIDTH)
        for site in range(0, BODY.sublayers, 2):
            first = site // 2 % layers_per_block == 0
            layer = made_of(
                kind, is_block_boundary=first, attention_input=read(site) if site else None, self_attn=attend(site),
                mlp_input=read(site + 1), mlp=lambda x, site=site: put_out(site + 1, x),
                post_attention_convolution=lambda x, **_: x, post_mlp_convolution=lambda x, **_: x, **dict.fromkeys(norms, nn.Identity()),
            )  # fmt: skip
            before, held = held, layer(held, blocks)
            if first:
                blocks = torch.cat((blocks, before[:, :, None]), 2)
        expected += read(BODY.sublayers)(blocks, held)
    reads, _ = drive(method, data)
    own = 3 if roles == "separate" else 1
    assert_same(reads[own:], expected[own:], [*data, *method.parameters()])


@pytest.fixture(scope="module")
def naive_attnres() -> Callable[..., Any]:
    """fla's definition in plain PyTorch, from its file: importing the package takes seconds, and Triton."""
    pytest.importorskip("einops", reason="einops is not installed")
    package = importlib.util.find_spec("fla")
    file = Path(package.submodule_search_locations[0], "ops", "attnres", "naive.py") if package else None
    if file is None or not file.is_file():
        pytest.skip("fla-core 0.6 or newer is not installed")
    spec = importlib.util.spec_from_file_location("naive_attnres", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(query: Tensor, sources: Sequence[Tensor], gain: Tensor, **options: Any) -> Any:
        with in_float64():
            return module.naive_attnres(query, sources, gain, **options)

    return call


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("sources", [1, 2, 5])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_depth_attention_is_flas(
    naive_attnres: Callable[..., Any], noise: Callable[..., Tensor], sources: int, eps: float, backend: Any
) -> None:
    query, gain, output_gain = noise(WIDTH), noise(WIDTH), noise(WIDTH)
    held = [noise(BATCH, TOKENS, WIDTH) for _ in range(sources)]
    options = {"key_gain": gain, "eps": eps, "backend": backend}
    read = depth_attention(held, query, return_weights=True, **options)
    normed = depth_attention(held, query, output_gain=output_gain, output_eps=eps, **options)
    expected = naive_attnres(query, held, gain, rms_eps=eps, return_weights=True)
    expected_normed = naive_attnres(query, held, gain, output_rms_weight=output_gain, rms_eps=eps)
    torch.testing.assert_close(read.weights, expected[1], rtol=1e-12, atol=1e-12)
    assert_same([read.output, normed], [expected[0], expected_normed], [query, gain, output_gain, *held])


@pytest.mark.parametrize("block", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_read_of_block_attention_residuals_is_flas(
    naive_attnres: Callable[..., Any], scattered: Callable[[ResidualConfig], Residual], noise: Callable[..., Tensor], data: list[Tensor],
    block: int, scaled: bool,
) -> None:  # fmt: skip
    """The embedding, the sums of closed blocks, and the open block's; with the norm before the sub-layer behind every read."""
    method = scattered(AttnResConfig(block=block, scaled=scaled, first_read=True))
    norm = RMSNorm(WIDTH, eps=1e-6, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(noise(WIDTH))
    expected = []
    for site in range(BODY.sublayers + 1):
        outputs = data[1 : site + 1]
        sums = [sum(outputs[start : start + block]) for start in range(0, site, block)]
        ours = method.sites[str(site)]
        settings = {"output_rms_weight": norm.weight, "scale": WIDTH**-0.5 if scaled else 1.0}
        expected.append(naive_attnres(ours.query, [data[0], *sums], ours.key_gain, **settings))
    reads, _ = drive(method, data, norm)
    assert_same(reads, expected, [*data, norm.weight, *method.parameters()])
