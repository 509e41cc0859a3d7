"""Every method in turn, and tiny decoders in float64: three layers of width 12, every parameter from its name, the method's scattered
on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig, attnres
from depthroute.residual.bank import BankConfig
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.denseformer import DenseFormerConfig
from depthroute.residual.depth_attention import DepthAttentionConfig
from depthroute.residual.dynamic import DynamicQueryConfig
from depthroute.residual.highway import HighwayConfig
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.laurel import LaurelConfig
from depthroute.residual.layerscale import LayerScaleConfig
from depthroute.residual.linear import LinearDepthConfig
from depthroute.residual.mhc import MHCConfig
from depthroute.residual.mrla import MRLAConfig
from depthroute.residual.muddformer import MUDDFormerConfig
from depthroute.residual.postnorm import PostNormConfig
from depthroute.residual.rezero import ReZeroConfig
from depthroute.residual.skips import SkipsConfig
from depthroute.residual.static import StaticMixConfig
from depthroute.residual.values import ValueResidualConfig
from depthroute.train import initialise
from depthroute.train.initialise import parameter_generator
from tests.bodies import BODIES

LAYERS, WIDTH, VOCABULARY = 3, 12, 17

Make = Callable[..., Decoder]

CONFIGS: dict[str, ResidualConfig] = {
    "prenorm": PreNormConfig(),
    "full": AttnResConfig(),
    "block": AttnResConfig(block=4),
    "per site": AttnResConfig(block=4, phases=False),
    "num_blocks": AttnResConfig(num_blocks=2, rank=5, key_gain=False),
    "full norm": AttnResConfig(block=2, rank=5, key_norm="full"),
    "projected": AttnResConfig(block=2, rank=5, keys="projected"),
    "projected full": AttnResConfig(rank=5, keys="projected", roles="decoupled"),
    "projected decoupled": AttnResConfig(block=3, rank=5, keys="projected", roles="decoupled"),
    **{roles: AttnResConfig(block=3, roles=roles) for roles in ("decoupled", "tied", "average", "frozen_value", "separate")},
    "heads": AttnResConfig(block=2, heads=3),
    "sigmoid": AttnResConfig(block=4, weighting="sigmoid"),
    "no key norm": AttnResConfig(key_norm="none"),
    "window": AttnResConfig(block=2, window=2),
    "rms blocks": AttnResConfig(block=2, summary="rms"),
    "mean blocks": AttnResConfig(block=2, summary="mean"),
    "count prior": AttnResConfig(ends=(1, 4, 6), count_prior=1.0, learned_count_prior=True),
    "normed": AttnResConfig(block=2, values="normed", scaled=True, roles="separate"),
    "static": StaticMixConfig(),
    "static raw": StaticMixConfig(raw=True, block=2),
    "dynamic query": DynamicQueryConfig(query_rank=3),
    "block query": DynamicQueryConfig(block=2, query_from="block", window=2),
    "linear": LinearDepthConfig(),
    "delta": DeltaConfig(),
    "delta block": DeltaConfig(block=2, gate="sigmoid"),
    "postnorm": PostNormConfig(),
    "deepnorm": PostNormConfig(deep=True),
    "rezero": ReZeroConfig(),
    "layerscale": LayerScaleConfig(),
    "highway": HighwayConfig(),
    "highway full": HighwayConfig(gate="full", coupled=False),
    "laurel": LaurelConfig(weights=True, rank=3, previous=2),
    "skips": SkipsConfig(unet=True),
    "denseformer": DenseFormerConfig(),
    "denseformer 2x3": DenseFormerConfig(dilation=2, period=3),
    "muddformer": MUDDFormerConfig(rounded=False),
    "muddformer prepost": MUDDFormerConfig(rounded=False, prepost=True, separate_norms=True),
    "mrla base": MRLAConfig(head_width=4),
    "mrla light": MRLAConfig(head_width=4, light=True),
    "hc static": HyperConnectionsConfig(streams=2, dynamic=False),
    "hc": HyperConnectionsConfig(streams=3, norm_gain=True),
    "mhc": MHCConfig(streams=3),
    "mhc released": MHCConfig(streams=2, numerics="released", head="mean"),
    "value residual": ValueResidualConfig(),
    "value residual learned": ValueResidualConfig(learned=True),
    "svformer": ValueResidualConfig(shared=True),
    "depth attention": DepthAttentionConfig(stride=1),
}


COMPILED = {*{config.name: name for name, config in reversed(CONFIGS.items())}.values(), "block", "decoupled", "projected decoupled"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A compiler takes seconds a method: one setting of each is compiled every time, and the others with the slow tests."""
    for item in items:
        if item.path.name == "test_compile.py" and isinstance(item, pytest.Function):
            name = item.callspec.id
            if name in CONFIGS and name not in COMPILED:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def read_ahead_in_small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase 1 from one closed source on, so that tiny networks have it."""
    monkeypatch.setattr(attnres, "READ_AHEAD_FROM", 1)


@pytest.fixture(scope="session")
def configs() -> dict[str, ResidualConfig]:
    return CONFIGS


ATTNRES = {name: config for name, config in CONFIGS.items() if isinstance(config, AttnResConfig)}
BANKS = {name: config for name, config in CONFIGS.items() if isinstance(config, BankConfig)}
# Methods that have the body's norms in front of every sub-layer and nowhere else.
BRANCHES = {
    name: config
    for name, config in CONFIGS.items()
    if not isinstance(config, PostNormConfig | ReZeroConfig) and not (isinstance(config, MUDDFormerConfig) and config.separate_norms)
}


@pytest.fixture(params=ATTNRES.values(), ids=ATTNRES)
def attnres_config(request: pytest.FixtureRequest) -> ResidualConfig:
    """Every member of the AttnRes family in turn."""
    return request.param


@pytest.fixture(params=BANKS.values(), ids=BANKS)
def bank_config(request: pytest.FixtureRequest) -> ResidualConfig:
    """Every method with a bank of sources in turn."""
    return request.param


@pytest.fixture(params=BRANCHES.values(), ids=BRANCHES)
def branch_config(request: pytest.FixtureRequest) -> ResidualConfig:
    """Every method that leaves the norms before the sub-layers where they are, in turn."""
    return request.param


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request: pytest.FixtureRequest) -> ResidualConfig:
    """Every method in turn."""
    return request.param


@pytest.fixture(params=BODIES.values(), ids=BODIES)
def body(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Fields of every body in turn: softmax attention and dense MLPs; those of Kimi Linear; those of Kimi K3."""
    return request.param


def scatter(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Random route queries, gains and projected keys, the same for the same name."""
    with torch.no_grad():
        for name, parameter in parameters:
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=parameter_generator(5, name))
            parameter.copy_(1 + 0.3 * noise if name.endswith(("key_gain", "norm.weight")) else noise)


@pytest.fixture(scope="session")
def decoder() -> Make:
    """`decoder(residual, scattered=True, **model fields)`; large initial values, and no two norms alike: nothing is negligible.

    `scattered`: random values for what the method owns, in place of its initial ones.
    """

    def make(residual: ResidualConfig, *, scattered: bool = True, dtype: torch.dtype = torch.float64, **fields: Any) -> Decoder:
        shape = {"vocabulary": VOCABULARY, "width": WIDTH, "layers": LAYERS, "heads": 2, "mlp_width": 20, "context": 8, "init_std": 0.4}
        model = Decoder(ModelConfig(**shape | fields, residual=residual))
        initialise(model, 0)
        scatter((name, gain) for name, gain in model.named_parameters() if name.endswith("norm.weight"))
        if scattered:
            scatter(model.residual.named_parameters())
        return model.to(dtype)

    return make


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    """[2, 9]: inputs and targets of two sequences."""
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def watch() -> Callable[[Decoder, Tensor], dict[int, Any]]:
    """The memory before every read."""

    def go(model: Decoder, tokens: Tensor) -> dict[int, Any]:
        seen: dict[int, Any] = {}
        model(tokens, observe=lambda site, memory: seen.update({site: memory}))
        return seen

    return go


@pytest.fixture(scope="session")
def run(tokens: Tensor) -> Callable[[Decoder], tuple[Tensor, dict[str, Tensor]]]:
    """Logits and the loss's gradient by parameter name."""

    def go(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        return model.logits(tokens[:, :-1]).detach(), gradients

    return go
