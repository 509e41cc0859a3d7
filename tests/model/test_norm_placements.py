"""Bodies with their norms elsewhere, and depth attention in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig
from depthroute.residual.postnorm import PostNormConfig
from depthroute.train import initialise

BODY = ModelConfig(vocabulary=17, width=12, layers=3, heads=2, mlp_width=20, context=8, init_std=0.4, norm_eps=1e-30)
TOKENS = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(2))


def decoder(norms: str, residual: ResidualConfig | None = None) -> Decoder:
    model = Decoder(replace(BODY, norms=norms, residual=residual or PreNormConfig()))
    initialise(model, 0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and not name.startswith("residual."):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * gain


@pytest.mark.parametrize("norms", ["pre", "post", "sandwich", "hybrid"])
def test_each_placement_by_hand(norms: str) -> None:
    """A plain stream over a body whose norms are applied by hand."""
    model, gains = decoder(norms), {}
    gains.update(model.named_parameters())
    h = model.embedding(TOKENS[:, :-1])
    before = {"pre": "am", "post": "", "sandwich": "am", "hybrid": "m"}[norms]
    behind = norms in ("post", "sandwich")
    for number, layer in enumerate(model.layers):
        for kind, sublayer in (("attention", layer.attention), ("mlp", layer.mlp)):
            x = norm(h, gains[f"layers.{number}.{kind}_norm.weight"]) if kind[0] in before else h
            if kind == "attention":
                q, k, v = (F.linear(x, getattr(sublayer, one).weight).view(2, 8, 2, 6).transpose(1, 2) for one in ("query", "key", "value"))
                if norms == "hybrid":
                    q, k, v = (
                        norm(part, gains[f"layers.{number}.attention.{one}_norm.weight"])
                        for part, one in ((q, "query"), (k, "key"), (v, "value"))
                    )
                mixed = F.scaled_dot_product_attention(*map(model.rotary(0, 8), (q, k)), v, is_causal=True)
                y = F.linear(mixed.transpose(1, 2).flatten(2), sublayer.output.weight)
            else:
                y = sublayer(x).output
            h = h + (norm(y, gains[f"layers.{number}.{kind}_output_norm.weight"]) if behind else y)
    torch.testing.assert_close(model(TOKENS[:, :-1]), norm(h, gains["norm.weight"]), rtol=1e-11, atol=1e-11)
    assert all(parameter.grad is not None for parameter in learned(model))


def learned(model: Decoder) -> list[nn.Parameter]:
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).objective.backward()
    return list(model.parameters())


@pytest.mark.parametrize(("norms", "plain"), [("pre", True), ("sandwich", True), ("hybrid", True), ("post", False)])
@pytest.mark.parametrize("residual", [AttnResConfig(), AttnResConfig(block=2, roles="decoupled")], ids=["full", "rd"])
def test_zero_queries_are_the_plain_stream_where_what_reads_them_is_normalised(norms: str, plain: bool, residual: ResidualConfig) -> None:
    """The mean of the sources is the stream over their number: a norm before a sub-layer removes it, so do the norms of q, k and v."""
    routed, body = (decoder(norms, one)(TOKENS[:, :-1]) for one in (residual, PreNormConfig()))
    difference = (routed - body).abs().max().item()
    assert (difference < 1e-10) == plain and (plain or difference > 1e-2)


def test_postnorm_needs_the_norms_before_sub_layers() -> None:
    with pytest.raises(RequestError, match=r"model\.norms = 'post' has none there"):
        replace(BODY, norms="post", residual=PostNormConfig())
