"""The whole network against loops written from the papers over the decoder's own sub-layers."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, RoleInputs

Make = Callable[..., Decoder]


def route(sources: list[Tensor], q: Tensor, r: int) -> Tensor:
    """Low-Rank AttnRes, Appendix H."""
    V = torch.stack(sources)
    K = F.rms_norm(V[..., -r:], (r,), eps=1e-6)
    weights = (K * q).sum(-1).softmax(dim=0)
    return (weights[..., None] * V).sum(dim=0)


def lr_attnres(model: Decoder, x: Tensor, r: int, N: int | None) -> Tensor:
    """Low-Rank AttnRes, Appendix H; the norms are the sub-layers' own. The query of read t is that of site t."""
    sublayers = []
    for layer in model.layers:
        sublayers.append(lambda h, layer=layer: layer.attention(layer.attention_norm(h), model.sight(h[..., 0])).output)
        sublayers.append(lambda h, layer=layer: layer.mlp(layer.mlp_norm(h)).output)
    queries = [model.residual.sites[str(t)].query for t in range(1, len(sublayers) + 1)]
    M = len(sublayers)
    N = M if N is None else min(N, M)
    ends = {ceil(M * j / N) for j in range(1, N + 1)}
    blocks, partial, h = [x], None, x
    for t, (f, q) in enumerate(zip(sublayers, queries, strict=True), start=1):
        y = f(h)
        partial = y if partial is None else partial + y
        if t in ends:
            blocks.append(partial)
            partial = None
        sources = blocks + ([] if partial is None else [partial])
        h = route(sources, q, r)
    return model.norm(h)


@pytest.mark.parametrize("rank", [12, 5, 1])
@pytest.mark.parametrize("blocks", [None, 1, 2, 3, 4, 5, 6, 9])
def test_low_rank_attnres_is_appendix_h(decoder: Make, tokens: Tensor, rank: int, blocks: int | None) -> None:
    model = decoder(AttnResConfig(num_blocks=blocks, rank=rank, key_gain=False))
    expected = lr_attnres(model, model.embedding(tokens[:, :-1]), rank, blocks)
    torch.testing.assert_close(model(tokens[:, :-1]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("roles", ["shared", "decoupled", "average", "frozen_value"])
@pytest.mark.parametrize("keys", ["slice", "full", "projected"])
def test_roles_and_keys_are_the_papers_equations(decoder: Make, tokens: Tensor, block: int, roles: str, keys: str) -> None:
    """Role-Decoupled AttnRes, Eqs. 1-5 and Appendix C; Low-Rank AttnRes, Eqs. 13 and 25-27."""
    rank = 5
    settings = {"keys": "projected"} if keys == "projected" else {"key_norm": keys}
    model = decoder(AttnResConfig(block=block, rank=rank, roles=roles, **settings))
    residual = model.residual

    def mixture(sources: list[Tensor], source_keys: list[Tensor], gain: Tensor, query: Tensor) -> Tensor:
        V, K = torch.stack(sources), torch.stack(source_keys)
        normalised_by = V if keys == "full" else K
        K = K * (normalised_by.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain
        return ((K @ query).softmax(0)[..., None] * V).sum(0)

    def key_of(source: Tensor, projection: torch.nn.Linear | None, activation: Tensor) -> Tensor:
        return source[..., -rank:] if projection is None else activation @ projection.weight.T

    x = model.embedding(tokens[:, :-1])
    outputs, output_keys = [], []  # of every sub-layer so far
    for site in range(7):
        whole = (site // block) * block  # sub-layers in closed blocks
        groups = [range(start, start + block) for start in range(0, whole, block)] + ([range(whole, site)] if site > whole else [])
        sources = [x] + [torch.stack([outputs[i] for i in group]).sum(0) for group in groups]
        first_key = x[..., -rank:] if residual.embedding_key is None else x @ residual.embedding_key.weight.T
        source_keys = [first_key] + [torch.stack([output_keys[i] for i in group]).sum(0) for group in groups]
        if site == 0:
            inputs = RoleInputs(x, x, x)
        else:
            parameters = residual.sites[str(site)]
            matching = mixture(sources, source_keys, parameters.key_gain, parameters.query)
            content = matching
            if site % 2 == 0 and site < 6 and roles != "shared":
                query = torch.zeros(rank, dtype=torch.float64) if roles == "frozen_value" else parameters.value_query
                content = mixture(sources, source_keys, parameters.key_gain, query)
            if roles == "average" and site % 2 == 0 and site < 6:
                matching = content = (matching + content) / 2
            inputs = RoleInputs(matching, matching, content)
        if site == 6:
            break
        layer = model.layers[site // 2]
        if site % 2 == 0:
            output, activation, _ = layer.attention(RoleInputs(*(layer.attention_norm(x) for x in inputs)), model.sight(inputs[0][..., 0]))
        else:
            output, activation, _ = layer.mlp(layer.mlp_norm(inputs.query))
        outputs.append(output)
        projection = residual.key_projections[str(site)] if keys == "projected" else None
        output_keys.append(key_of(output, projection, activation))
    torch.testing.assert_close(model(tokens[:, :-1]), model.norm(inputs.query), rtol=1e-12, atol=1e-12)
