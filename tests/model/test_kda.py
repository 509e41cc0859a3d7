"""Kimi Delta Attention against a loop over tokens and heads, its documents, its passes, and where it starts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.model import ModelConfig
from depthroute.model.bodies import KDAConfig
from depthroute.model.kda import DeltaAttention
from depthroute.model.rotary import Rotary
from depthroute.model.sight import Sight, whole_sequence
from depthroute.residual import RoleInputs
from depthroute.train import initialise

TOKENS, WIDTH, HEADS, HEAD = 11, 12, 2, 6
GATES = {
    "kimi linear": KDAConfig(convolution=3),
    "kimi k3": KDAConfig(convolution=4, decay_floor=-5.0, output_gate="full"),
    "no convolution": KDAConfig(convolution=1),
}
BEGINS = torch.zeros(1, TOKENS, dtype=torch.bool)
BEGINS[0, [0, 1, 4, 9]] = True


def attention(kda: KDAConfig, own_values: bool = True) -> DeltaAttention:
    """Large random values everywhere: no gate, gain or bias is neutral."""
    config = ModelConfig(
        vocabulary=17, width=WIDTH, layers=1, heads=HEADS, mlp_width=20, context=64, init_std=0.5, norm_eps=1e-3, mixers=("kda",), kda=kda
    )
    module = DeltaAttention(config, 0, own_values)
    initialise(module, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module.double()


def sight(tokens: int, begins: Tensor | None = None, store: Any = None) -> Sight:
    return whole_sequence(Rotary(HEAD, 64, 1e4)(0, tokens), tokens, None)._replace(begins=begins, store=store)


def inputs(rows: int = 1, seed: int = 0) -> RoleInputs:
    return RoleInputs(*torch.randn(3, rows, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def literal(module: DeltaAttention, config: KDAConfig, roles: RoleInputs, begins: Tensor | None) -> Tensor:
    """What the output matrix is fed, [T, H*E], of one row."""
    x_q, x_k, x_v = (x[0] for x in roles)

    def sigmoid(x: Tensor) -> Tensor:
        return 1 / (1 + (-x).exp())

    def convolved(x: Tensor, matrix: Tensor, weight: Tensor, t: int, start: int) -> Tensor:
        total = sum(weight[:, -1 - back] * (matrix @ x[t - back]) for back in range(config.convolution) if t - back >= start)
        return total * sigmoid(total)

    rows, start, states = [], 0, [torch.zeros(HEAD, HEAD, dtype=torch.float64) for _ in range(HEADS)]
    for t in range(len(x_q)):
        if begins is not None and begins[0, t]:
            start, states = t, [torch.zeros_like(state) for state in states]
        query = convolved(x_q, module.query.weight, module.query_convolution.weight, t, start)
        key = convolved(x_k, module.key.weight, module.key_convolution.weight, t, start)
        value = convolved(x_v, module.value.weight, module.value_convolution.weight, t, start)
        z = module.decay_up.weight @ (module.decay_down.weight @ x_k[t]) + module.decay.bias
        beta = sigmoid(module.strength.weight @ x_k[t])
        if config.output_gate == "low_rank":
            gate = module.gate.weight @ (module.gate_down.weight @ x_q[t]) + module.gate.bias
        else:
            gate = module.gate.weight @ x_q[t]
        heads = []
        for h in range(HEADS):
            own = slice(h * HEAD, (h + 1) * HEAD)
            q, k = (x[own] / (x[own].square().sum() + 1e-6).sqrt() for x in (query, key))
            rate = module.decay.log_rate[h].exp()
            decay = -rate * (1 + z[own].exp()).log() if config.decay_floor is None else config.decay_floor * sigmoid(rate * z[own])
            state = decay.exp()[:, None] * states[h]
            state = state + beta[h] * torch.outer(k, value[own] - state.T @ k)
            states[h] = state
            read = state.T @ q / math.sqrt(HEAD)
            heads.append(module.output_norm.weight * read / (read.square().mean() + 1e-3).sqrt() * sigmoid(gate[own]))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("begins", [None, BEGINS], ids=["one document", "documents"])
@pytest.mark.parametrize("config", GATES.values(), ids=GATES)
@torch.no_grad()
def test_it_is_a_loop_over_tokens_and_heads(config: KDAConfig, begins: Tensor | None) -> None:
    """Of three different inputs: the decay and strength are those of the key's, the gate that of the query's."""
    module, roles = attention(config), inputs()
    found = module(roles, sight(TOKENS, begins))
    expected = literal(module, config, roles, begins)
    torch.testing.assert_close(found.activation[0], expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.output[0], expected @ module.output.weight.T, rtol=1e-11, atol=1e-11)
    few = module(RoleInputs(*(x[:, :3] for x in roles)), sight(3, None if begins is None else begins[:, :3]))
    torch.testing.assert_close(few.activation[0], expected[:3], rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_one_input_is_every_roles() -> None:
    module, x = attention(GATES["kimi linear"]), inputs().query
    assert torch.equal(module(x, sight(TOKENS)).output, module(RoleInputs(x, x.clone(), x.clone()), sight(TOKENS)).output)


@pytest.mark.parametrize("config", GATES.values(), ids=GATES)
@torch.no_grad()
def test_a_document_moves_no_output_of_another(config: KDAConfig) -> None:
    """Bit for bit, whatever it holds; of others in the batch too."""
    module, roles, others = attention(config), inputs(rows=2), inputs(rows=2, seed=1)
    begins = BEGINS.repeat(2, 1)
    expected = module(roles, sight(TOKENS, begins)).output
    for first, last in ((1, 4), (4, 9), (9, TOKENS)):
        mixed = [x.clone() for x in roles]
        for x, other in zip(mixed, others, strict=True):
            x[0, first:last] = 1e3 * other[0, first:last]
        found = module(RoleInputs(*mixed), sight(TOKENS, begins)).output
        changed = (found != expected).any(-1)
        assert changed[0, first:last].all()
        assert changed.sum() == last - first


class Carried:
    """A `Store` of one layer's state."""

    kept: tuple[Tensor, ...] | None = None

    def state(self, layer: int) -> tuple[Tensor, ...] | None:
        assert layer == 0
        return self.kept

    def carry(self, layer: int, state: tuple[Tensor, ...]) -> None:
        assert layer == 0
        self.kept = state


@pytest.mark.parametrize("begins", [None, BEGINS], ids=["one document", "documents"])
@pytest.mark.parametrize("config", GATES.values(), ids=GATES)
@torch.no_grad()
def test_passes_that_carry_a_state_are_one_pass(config: KDAConfig, begins: Tensor | None) -> None:
    module, roles = attention(config), inputs()
    expected = module(roles, sight(TOKENS, begins)).output
    for lengths in ([1] * TOKENS, [5, 6], [2, 1, 7, 1]):
        store, parts, start = Carried(), [], 0
        for length in lengths:
            here = slice(start, start + length)
            part = RoleInputs(*(x[:, here] for x in roles))
            parts.append(module(part, sight(length, None if begins is None else begins[:, here], store)).output)
            start += length
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-11, atol=1e-11)
        assert store.kept is not None
        sizes = [tuple(x.shape) for x in store.kept]
        assert sizes == [(1, HEADS, HEAD, HEAD)] + [(1, config.convolution - 1, WIDTH)] * 3


@torch.no_grad()
def test_values_may_come_from_elsewhere() -> None:
    """A residual method sees what is projected, and its values take the place of the layer's, which need not make any."""
    roles, other = inputs(), torch.randn(1, HEADS, TOKENS, HEAD, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole, without = attention(GATES["kimi linear"]), attention(GATES["kimi linear"], own_values=False)
    assert without.value is None and without.value_convolution is None
    without.load_state_dict({name: x for name, x in whole.state_dict().items() if not name.startswith("value")})
    seen: list[Any] = []

    def values(projected: Any) -> tuple[Tensor, str]:
        seen.append(projected)
        return other, "kept"

    found, bare = (module(roles, sight(TOKENS), values) for module in (whole, without))
    assert torch.equal(found.output, bare.output) and found.kept == "kept"
    assert seen[1].value is None and torch.equal(seen[0].key, seen[1].key)
    torch.testing.assert_close(seen[0].key.norm(dim=-1), torch.ones(1, HEADS, TOKENS, dtype=torch.float64), rtol=1e-3, atol=1e-3)
    store, same = Carried(), None
    for t in range(TOKENS):  # token by token, without values of its own
        part = RoleInputs(*(x[:, t : t + 1] for x in roles))
        same = without(part, sight(1, None, store), lambda projected, t=t: (other[:, :, t : t + 1], None)).output
    torch.testing.assert_close(same, bare.output[:, -1:], rtol=1e-11, atol=1e-11)


def test_where_it_starts() -> None:
    def fresh(kda: KDAConfig) -> dict[str, Tensor]:
        config = ModelConfig(vocabulary=17, width=64, layers=1, heads=64, head_width=32, mlp_width=20, context=8, mixers=("kda",), kda=kda)
        module = DeltaAttention(config, 0, True)
        initialise(module, 3)
        again = DeltaAttention(config, 0, True)
        initialise(again, 3)
        assert all(torch.equal(x, y) for x, y in zip(module.state_dict().values(), again.state_dict().values(), strict=True))
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    linear, bounded = fresh(KDAConfig()), fresh(KDAConfig(decay_floor=-5.0, output_gate="full"))
    rates = linear["decay.log_rate"].exp()
    assert 1 <= rates.min() < 2.5 and 14.5 < rates.max() <= 16 and rates.mean().item() == pytest.approx(8.5, abs=2)  # uniform
    steps = torch.nn.functional.softplus(linear["decay.bias"]).log()
    assert math.log(1e-3) - 1e-3 < steps.min() < math.log(1.1e-3) and math.log(9e-2) < steps.max() < math.log(1e-1) + 1e-3
    assert steps.mean().item() == pytest.approx(math.log(1e-2), abs=0.1)  # uniform in the logarithm
    assert not bounded["decay.log_rate"].any()
    torch.testing.assert_close(bounded["decay.bias"], linear["decay.bias"])
    for name, parameter in linear.items():
        if name.endswith("convolution.weight"):
            assert parameter.abs().max() <= 0.5 and parameter.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.05), name
        elif parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
    assert not linear["gate.bias"].any() and "gate.bias" not in bounded and "gate_down.weight" not in bounded
