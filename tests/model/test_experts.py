"""A mixture of experts against a loop over tokens, its balance, and what a training run asks of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from depthroute.model.experts import Experts
from depthroute.model.gated import gated
from depthroute.model.sublayer import SubLayerOutput
from depthroute.train import initialise

D, WIDTH, X, K, TOKENS = 10, 6, 7, 3, 9
FORMS: dict[str, dict[str, Any]] = {
    "shared": {}, "alone": {"shared": 0}, "two shared, situ": {"shared": 2, "activation": "situ"}, "latent": {"latent": 4},
    "latent, situ, alone": {"latent": 4, "activation": "situ", "shared": 0}, "all chosen": {"chosen": X}, "one chosen": {"chosen": 1},
}  # fmt: skip


class Dense(nn.Module):
    """What the mixture asks of the MLP that all tokens go through."""

    def __init__(self, width: int, kind: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((D, width), (D, width), (width, D)))
        self.kind = kind

    def forward(self, inputs: Tensor) -> SubLayerOutput:
        activation = gated(self.gate(inputs), self.up(inputs), self.kind)
        return SubLayerOutput(self.down(activation), activation)


def mixture(std: float = 0.7, **fields: Any) -> Experts:
    activation = fields.pop("activation", "swiglu")
    settings = {"number": X, "chosen": K, "width": WIDTH, "shared": 1, "scaling": 2.446, "balance_rate": 0.01, "latent": None} | fields
    experts = SimpleNamespace(**settings)
    config: Any = SimpleNamespace(width=D, experts=experts, activation=activation, initial_std=lambda _: std, init_std=std, norm_eps=1e-6)
    module = Experts(config, Dense(experts.shared * experts.width, activation) if experts.shared else None)
    initialise(module, 0)
    with torch.no_grad():
        module.router.bias.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
        if module.latent_norm is not None:
            module.latent_norm.weight.add_(torch.linspace(-0.3, 0.5, module.latent_norm.weight.numel()))
    return module.double()


def inputs(*leading: int) -> Tensor:
    shape = leading or (1, TOKENS)
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()


def literal_gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if kind == "swiglu":
        return gate / (1 + (-gate).exp()) * up
    return 4 * (gate / 4).tanh() / (1 + (-gate).exp()) * 25 * (up / 25).tanh()


def literal_token(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and activation of one token [D], expert after expert."""
    scores = [1 / (1 + (-(row @ x)).exp()) for row in module.router.weight]
    ranked = sorted(range(X), key=lambda e: -(scores[e] + module.router.bias[e]).item())
    chosen = ranked[: module.chosen]
    total = torch.stack([scores[e] for e in chosen]).sum()
    fed = x if module.latent_down is None else module.latent_down.weight @ x
    routed, traced = torch.zeros_like(fed), torch.zeros(WIDTH, dtype=x.dtype)
    for e in chosen:
        share = scores[e] / total * 2.446
        hidden = literal_gated(module.gate.weight[e] @ fed, module.up.weight[e] @ fed, module.kind)
        routed, traced = routed + share * (module.down.weight[e] @ hidden), traced + share * hidden
    if module.latent_up is not None:
        routed = module.latent_up.weight @ (module.latent_norm.weight * routed / (routed.square().mean() + 1e-6).sqrt())
    if module.shared is None:
        return routed, traced
    hidden = literal_gated(module.shared.gate.weight @ x, module.shared.up.weight @ x, module.kind)
    return module.shared.down.weight @ hidden + routed, torch.cat((hidden, traced))


def trained(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("traces", [False, True], ids=("output", "traces"))
@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)
def test_a_mixture_is_a_loop_over_tokens_and_experts(fields: dict[str, Any], traces: bool) -> None:
    module, x = mixture(**fields), inputs(2, TOKENS)
    module.traces = traces
    found = module(x)
    pairs = [literal_token(module, token) for token in x.flatten(0, 1)]
    right = [torch.stack(parts).view(2, TOKENS, -1) for parts in zip(*pairs, strict=True)]
    assert (found.activation is not None) == traces
    results = [(found.output, right[0]), *([(found.activation, right[1])] if traces else [])]
    for one, other in results:
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    upstream = [torch.randn_like(other) for _, other in results]
    ours = torch.autograd.grad([one for one, _ in results], [x, *trained(module)], upstream)
    theirs = torch.autograd.grad([other for _, other in results], [x, *trained(module)], upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    module, x = mixture(chosen=2), inputs().detach()[0]
    module.router.bias.data.zero_()
    before = module.router(x)[0]
    module.router.bias[3] = 2.0  # more than any score
    chosen, shares = module.router(x)
    assert (chosen[:, 0] == 3).all() and not (before[:, 0] == 3).all()
    scores = torch.sigmoid(x @ module.router.weight.T).gather(1, chosen)
    torch.testing.assert_close(shares, 2.446 * scores / scores.sum(1, keepdim=True), rtol=1e-12, atol=1e-12)


def test_experts_without_tokens_have_gradients_of_zero_and_the_bias_has_none() -> None:
    module, x = mixture(), inputs()
    module.router.bias.data[:3] = 9.0
    module(x).output.sum().backward()
    assert all(parameter.grad is not None for parameter in trained(module)) and module.router.bias.grad is None
    for matrices in (module.gate, module.up, module.down):
        assert matrices.weight.grad is not None
        assert matrices.weight.grad[:3].any() and not matrices.weight.grad[3:].any()


def test_the_load_counts_the_tokens_of_training_passes() -> None:
    module, x = mixture(), inputs(2, TOKENS)
    module(x)
    module(x)
    chosen = module.router(x.flatten(0, 1))[0]
    assert torch.equal(module.load, 2 * torch.stack([(chosen == expert).sum() for expert in range(X)]).double())
    module.eval()(x)
    with torch.no_grad():
        module.train()(x)
    assert module.load.sum() == 2 * 2 * TOKENS * K
    assert "load" not in module.state_dict()
    module.reset_buffers()
    assert not module.load.any()


def test_balancing_evens_out_the_load() -> None:
    module = mixture(std=1.0)
    module.router.bias.data.zero_()
    x, spreads = torch.randn(400, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.5, []
    for _ in range(60):
        module.load.zero_()
        module(x)
        move = module.moves(module.load)
        mean = 400 * K / X
        assert move.tolist() == [0.01 * ((load < mean) - (load > mean)) for load in module.load.tolist()]
        module.router.bias.data += move
        spreads.append((module.load.max() / module.load.mean()).item())
    assert spreads[0] > 1.15 and max(spreads[-5:]) < 1.06, spreads


def test_it_is_the_same_bits_every_time_and_a_token_does_not_see_the_others() -> None:
    module, x = mixture(), inputs()
    outputs = [module(x).output for _ in range(2)]
    gradients = [torch.autograd.grad(output.square().sum(), [x, *trained(module)]) for output in outputs]
    assert torch.equal(*outputs) and all(map(torch.equal, *gradients))
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(module(x[:, order]).output, outputs[0][:, order], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module(x[:, :1]).output, outputs[0][:, :1], rtol=1e-12, atol=1e-12)


def test_half_precision_is_that_of_linear_layers_and_the_router_is_exact() -> None:
    module, x = mixture().float(), inputs().detach().float()
    exact = module.router(x[0])
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x)
        assert all(map(torch.equal, module.router(x[0]), exact))
    assert found.output.dtype == torch.bfloat16
    torch.testing.assert_close(found.output.float(), module(x).output, rtol=0.1, atol=0.3)
    found.output.float().sum().backward()
    assert {parameter.grad.dtype for parameter in trained(module) if parameter.grad is not None} == {torch.float32}
    for part in (module.gate, module.up, module.down, module.shared):
        assert part is not None
        part.bfloat16()
    assert module(x.bfloat16()).output.dtype == torch.bfloat16 and module.router.weight.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
@pytest.mark.parametrize("traces", [False, True], ids=("output", "traces"))
def test_it_is_one_graph_with_the_same_gradients_and_load(traces: bool) -> None:
    torch._dynamo.reset()
    module, x = mixture(latent=4), inputs()
    module.traces = traces

    def loss(x: Tensor) -> Tensor:
        found = module(x)
        return found.output.square().sum() + (0 if found.activation is None else found.activation.square().sum())

    right = torch.autograd.grad(loss(x), [x, *trained(module)])
    load = module.load.clone()
    module.reset_buffers()
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(x), [x, *trained(module)])
    torch._dynamo.reset()
    assert torch.equal(module.load, load)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_it_runs_without_data_and_is_recomputed() -> None:
    module, x = mixture(), inputs()
    right = torch.autograd.grad(module(x).output.sum(), [x, *trained(module)])
    output = checkpoint(lambda x: module(x).output, x, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(output.sum(), [x, *trained(module)]), right))
    with FakeTensorMode(allow_non_fake_inputs=False):
        fake = mixture_without_values()
        fed = torch.empty(2, TOKENS, D, requires_grad=True)
        found = fake(fed).output
        found.sum().backward()
        assert found.shape == fed.shape and fed.grad is not None and all(p.grad is not None for p in trained(fake))


def mixture_without_values() -> Experts:
    settings = {"number": X, "chosen": K, "width": WIDTH, "scaling": 1.0, "balance_rate": 0.01, "latent": 4}
    config: Any = SimpleNamespace(
        width=D, experts=SimpleNamespace(**settings), activation="swiglu", initial_std=lambda _: 0.1, init_std=0.1, norm_eps=1e-6
    )
    return Experts(config, Dense(WIDTH, "swiglu"))


def test_it_starts_as_its_configuration_says() -> None:
    module = mixture(std=0.3)
    for part in (module.gate, module.up, module.down, module.router):
        assert part.weight.std().item() == pytest.approx(0.3, rel=0.2)
    assert module.gate.weight.shape == module.up.weight.shape == (X, WIDTH, D) and module.down.weight.shape == (X, D, WIDTH)
    initialise(module, 0)
    assert not module.router.bias.any() and not module.router.bias.requires_grad
