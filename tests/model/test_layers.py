"""Sub-layers against loops over heads and tokens, and the properties that positions must have."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.model import Decoder, ModelConfig
from depthroute.model.attention import Attention
from depthroute.model.layers import MLP
from depthroute.model.rotary import Rotary
from depthroute.model.sight import whole_sequence
from depthroute.residual import RoleInputs
from depthroute.train import initialise


def shape(**fields: Any) -> ModelConfig:
    settings = {"vocabulary": 17, "width": 12, "layers": 2, "heads": 2, "mlp_width": 20, "context": 8, "init_std": 0.5}
    return ModelConfig(**settings | fields)


def filled(module: torch.nn.Module) -> Any:
    initialise(module, 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.3, 0.5, len(parameter)).roll(len(name)))  # no two norms of a sub-layer alike
    return module.double()


def literal_rotation(vector: Tensor, position: int, base: float) -> list[complex]:
    """The pairs (x_j, x_{j + E/2}) as complex numbers, turned by position * base^(-2j/E)."""
    half = len(vector) // 2
    pairs = [complex(vector[j].item(), vector[j + half].item()) for j in range(half)]
    return [pair * cmath.exp(1j * position * base ** (-j / half)) for j, pair in enumerate(pairs)]


def literal_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / (x.square().mean() + eps).sqrt()


SHAPES = [
    {}, {"heads": 6, "key_value_heads": 2}, {"qk_norm": True}, {"head_width": 10, "rope_base": 50.0}, {"attention_window": 2},
    {"biases": ("query", "key", "value", "output")}, {"attention_window": 3, "windowed_layers": (1,)},
]  # fmt: skip


@pytest.mark.parametrize("fields", SHAPES, ids=str)
@torch.no_grad()
def test_attention_is_a_loop_over_heads_and_tokens(fields: dict[str, Any]) -> None:
    config = shape(**fields)
    attention = filled(Attention(config))
    for_query, for_key, for_value = (torch.randn(1, 5, 12, dtype=torch.float64) for _ in range(3))
    width, group = config.resolved_head_width, config.heads // config.resolved_key_value_heads
    sight = whole_sequence(Rotary(width, 8, config.rope_base)(0, 5), 5, config.attention_window)
    found = attention(RoleInputs(for_query, for_key, for_value), sight)

    def project(x: Tensor, projection: torch.nn.Linear, t: int, head: int) -> Tensor:
        projected = projection.weight @ x[0, t] + (0 if projection.bias is None else projection.bias)
        return projected[head * width : (head + 1) * width]

    rows = []
    for t in range(5):
        heads = []
        for head in range(config.heads):
            query = project(for_query, attention.query, t, head)
            seen = range(max(0, t + 1 - config.attention_window) if config.has_window(0) else 0, t + 1)
            keys = [project(for_key, attention.key, u, head // group) for u in seen]
            if config.qk_norm:
                query = literal_norm(query, attention.query_norm.weight, config.norm_eps)
                keys = [literal_norm(key, attention.key_norm.weight, config.norm_eps) for key in keys]
            turned = literal_rotation(query, t, config.rope_base)
            scores = []
            for u, key in zip(seen, keys, strict=True):
                pairs = zip(turned, literal_rotation(key, u, config.rope_base), strict=True)
                scores.append(sum((a * b.conjugate()).real for a, b in pairs) / math.sqrt(width))
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            heads.append(sum(weights[i] * project(for_value, attention.value, u, head // group) for i, u in enumerate(seen)))
        rows.append(torch.cat(heads))
    expected = torch.stack(rows)[None]
    torch.testing.assert_close(found.activation, expected, rtol=1e-6, atol=1e-6)  # the rotary tables are float32
    bias = 0 if attention.output.bias is None else attention.output.bias
    torch.testing.assert_close(found.output, expected @ attention.output.weight.T + bias, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_mlp_is_swiglu() -> None:
    mlp = filled(MLP(shape()))
    x = torch.randn(1, 1, 12, dtype=torch.float64)
    gate, up = mlp.gate.weight @ x[0, 0], mlp.up.weight @ x[0, 0]
    activation = gate / (1 + (-gate).exp()) * up
    found = mlp(x)
    torch.testing.assert_close(found.activation[0, 0], activation)
    torch.testing.assert_close(found.output[0, 0], mlp.down.weight @ activation)


def test_grouped_queries_are_repeated_heads() -> None:
    grouped = filled(Decoder(shape(heads=6, key_value_heads=2)))
    repeated = filled(Decoder(shape(heads=6)))
    weights = grouped.state_dict()
    for name in list(weights):
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            weights[name] = weights[name].view(2, 2, 12).repeat_interleave(3, 0).flatten(0, 1)
    repeated.load_state_dict(weights)
    tokens = torch.randint(17, (2, 8))
    torch.testing.assert_close(grouped.logits(tokens), repeated.logits(tokens), rtol=1e-12, atol=1e-12)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(10, 64, 100.0)(0, 64)
    query, key = torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    queries, keys = rotary(query.expand(1, 1, 64, 10))[0, 0], rotary(key.expand(1, 1, 64, 10))[0, 0]
    scores = queries @ keys.T
    for distance in (0, 1, 7, 40):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert (scores.diagonal(-1)[0] - scores.diagonal(-7)[0]).abs() > 1e-2
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(64), rtol=1e-6, atol=1e-6)
    assert rotary(query.bfloat16().expand(1, 1, 64, 10)).dtype == torch.bfloat16
    assert not Rotary(10, 64, 100.0).state_dict()


def test_one_input_is_every_roles() -> None:
    attention, sight = filled(Attention(shape())), whole_sequence(Rotary(6, 8, 1e4)(0, 4), 4, None)
    x, y = torch.randn(2, 1, 4, 12, dtype=torch.float64)
    one = attention(x, sight).output
    assert torch.equal(attention(RoleInputs(x, x.clone(), x.clone()), sight).output, one)
    for roles in (RoleInputs(y, x, x), RoleInputs(x, y, x), RoleInputs(x, x, y)):
        assert (attention(roles, sight).output - one).abs().max() > 1e-2
