"""Latent attention against a loop over tokens and heads, and through the latent vectors that a cache holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.model import ModelConfig
from depthroute.model import mla as mla_module
from depthroute.model.bodies import MLAConfig
from depthroute.model.mla import LatentAttention
from depthroute.model.rotary import Rotary
from depthroute.model.sight import Seen, Sight, attend, band, whole_sequence
from depthroute.residual import RoleInputs
from depthroute.train import initialise

WIDTH, HEADS, HEAD = 12, 2, 6
FORMS = {
    "kimi linear": MLAConfig(latent=30, shared_key=4),
    "kimi k3": MLAConfig(latent=30, shared_key=3, query_latent=9, output_gate=True),
    "narrow": MLAConfig(latent=5, shared_key=1),
}


def attention(mla: MLAConfig, own_values: bool = True) -> LatentAttention:
    """Large random values everywhere: no gain is neutral."""
    config = ModelConfig(
        vocabulary=17, width=WIDTH, layers=1, heads=HEADS, mlp_width=20, context=64, init_std=0.5, norm_eps=1e-3, mixers=("mla",), mla=mla
    )
    module = LatentAttention(config, 0, own_values)
    initialise(module, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module.double()


def sight(tokens: int) -> Sight:
    return whole_sequence(Rotary(HEAD, 64, 1e4)(0, tokens), tokens, None)


def inputs(tokens: int, rows: int = 2) -> RoleInputs:
    return RoleInputs(*torch.randn(3, rows, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("mla", FORMS.values(), ids=FORMS)
@torch.no_grad()
def test_it_is_a_loop_over_tokens_and_heads(mla: MLAConfig) -> None:
    """Of three different inputs: values have a latent vector of their own, queries and the gate read the query's."""
    module, roles = attention(mla), inputs(5, rows=1)
    x_q, x_k, x_v = (x[0] for x in roles)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / (x.square().mean() + 1e-3).sqrt()

    rows = []
    for t in range(5):
        narrow = x_q[t] if mla.query_latent is None else norm(module.query_latent.weight @ x_q[t], module.query_norm.weight)
        query, heads = module.query.weight @ narrow, []
        for h in range(HEADS):
            own, size = slice(h * HEAD, (h + 1) * HEAD), HEAD + mla.shared_key
            scores, values = [], []
            for u in range(t + 1):
                of_key, of_value = (norm(module.latent.weight @ x[u], module.latent_norm.weight) for x in (x_k, x_v))
                key = torch.cat((module.key.weight[own] @ of_key, module.shared_key.weight @ x_k[u]))
                scores.append(query[h * size : (h + 1) * size] @ key / math.sqrt(size))
                values.append(module.value.weight[own] @ of_value)
            head = torch.stack(scores).softmax(0) @ torch.stack(values)
            heads.append(head if not mla.output_gate else head / (1 + (-(module.output_gate.weight[own] @ x_q[t])).exp()))
        rows.append(torch.cat(heads))
    found, expected = module(roles, sight(5)), torch.stack(rows)
    torch.testing.assert_close(found.activation[0], expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.output[0], expected @ module.output.weight.T, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_one_input_is_every_roles() -> None:
    module, x = attention(FORMS["kimi k3"]), inputs(7).query
    torch.testing.assert_close(module(x, sight(7)).output, module(RoleInputs(x, x.clone(), x.clone()), sight(7)).output)


class Kept:
    """A `Store` of one layer."""

    def __init__(self) -> None:
        self.parts: tuple[list[Tensor], list[Tensor]] = ([], [])

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert layer == 0
        for part, new in zip(self.parts, (key, value), strict=True):
            part.append(new)
        return torch.cat(self.parts[0], 2), torch.cat(self.parts[1], 2)

    @property
    def numbers(self) -> int:
        """Of a token."""
        return sum(part[0].shape[1] * part[0].shape[3] for part in self.parts)


def passes(module: LatentAttention, roles: RoleInputs, lengths: list[int], values: Any = None) -> tuple[Tensor, Kept]:
    store, parts, start = Kept(), [], 0
    for length in lengths:
        here, seen = slice(start, start + length), Seen(band(length, start + length, None, torch.device("cpu")), causal=False)
        start += length
        given = None if values is None else lambda projected, here=here: values(projected, here)
        one = roles.query[:, here]
        shared = all(x is roles.query for x in roles)
        part = RoleInputs(one, one, one) if shared else RoleInputs(*(x[:, here] for x in roles))
        parts.append(module(part, sight(length)._replace(full=seen, store=store), given).output)
    return torch.cat(parts, 1), store


@pytest.mark.parametrize("roles", ["one input", "three inputs"])
@pytest.mark.parametrize("mla", FORMS.values(), ids=FORMS)
@torch.no_grad()
def test_passes_through_cached_latents_are_one_pass(mla: MLAConfig, roles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens, which attend to the latent vectors, and of many, which have keys and values made: both are taken here."""
    module, three = attention(mla), inputs(24)
    given = three if roles == "three inputs" else RoleInputs(three.query, three.query, three.query)
    expected = module(given, sight(24)).output
    widths: list[int] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Tensor:
        widths.append(key.shape[-1])
        return attend(query, key, value, seen)

    monkeypatch.setattr(mla_module, "attend", watched)
    for lengths in ([1] * 24, [16, 1, 7], [3, 21]):
        found, store = passes(module, given, lengths)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        assert store.numbers == mla.latent * (2 if roles == "three inputs" else 1) + mla.shared_key
    few, many = mla.latent + mla.shared_key, HEAD + mla.shared_key
    assert set(widths) == ({few} if mla.latent <= HEAD else {few, many})


@torch.no_grad()
def test_values_may_come_from_elsewhere() -> None:
    """A residual method sees a head's own queries and keys; its values take the place of the layer's, and are cached head by head."""
    roles, other = inputs(9), torch.randn(2, HEADS, 9, HEAD, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole, without = attention(FORMS["kimi k3"]), attention(FORMS["kimi k3"], own_values=False)
    assert without.value is None
    without.load_state_dict({name: x for name, x in whole.state_dict().items() if not name.startswith("value")})
    seen: list[Any] = []

    def values(projected: Any, here: slice = slice(None)) -> tuple[Tensor, str]:
        seen.append(projected)
        return other[:, :, here], "kept"

    found, bare = (module(roles, sight(9), values) for module in (whole, without))
    assert torch.equal(found.output, bare.output) and found.kept == "kept"
    assert (found.output - whole(roles, sight(9)).output).abs().max() > 1e-2
    latent = whole.latent_norm(whole.latent(roles.value))
    torch.testing.assert_close(seen[0].value.transpose(1, 2).flatten(2), whole.value(latent))
    assert seen[0].query.shape == seen[0].key.shape == (2, HEADS, 9, HEAD) and seen[1].value is None
    same, store = passes(without, roles, [4, 1, 4], values)
    torch.testing.assert_close(same, bare.output, rtol=1e-11, atol=1e-11)
    assert store.numbers == HEADS * (HEAD + 3 + HEAD)
