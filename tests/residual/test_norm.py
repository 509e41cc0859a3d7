"""The norm before a sub-layer: handed to the read and applied once, in the same pass where the method can, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, Inputs, ResidualConfig, RMSNorm, RoleInputs, attnres, normalised

Make = Callable[..., Decoder]
Run = Callable[[Decoder], tuple[Tensor, dict[str, Tensor]]]
Watch = Callable[[Decoder, Tensor], dict[int, Any]]

WIDTH, TOKENS = 12, 8


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The output gain that each read is handed, None where there is none, as the model runs. Reads ahead are left out: they have none."""
    gains: list[Any] = []
    original: Any = attnres.depth_attention

    def spy(*arguments: Any, **options: Any) -> Any:
        if "return_statistics" not in options:
            gains.append(options.get("output_gain"))
        return original(*arguments, **options)

    monkeypatch.setattr(attnres, "depth_attention", spy)
    return gains


def test_roles_that_share_a_read_share_its_norm() -> None:
    calls: list[Tensor] = []

    def norm(x: Tensor) -> Tensor:
        calls.append(x)
        return 2 * x

    x, y, z = torch.randn(3, 4)
    assert normalised(x, None) is x and normalised(roles := RoleInputs(x, x, y), None) is roles
    for given, distinct in ((x, 1), ((x, x, x), 1), ((x, x, y), 2), ((x, y, x), 2), ((y, x, x), 2), ((x, y, z), 3)):
        calls.clear()
        found = normalised(given if isinstance(given, Tensor) else RoleInputs(*given), norm)
        assert len(calls) == distinct
        inputs = pytree.tree_leaves(given)
        for i, (one, normed) in enumerate(zip(inputs, pytree.tree_leaves(found), strict=True)):
            assert torch.equal(normed, 2 * one)
            assert all((normed is other) == (one is inputs[j]) for j, other in enumerate(pytree.tree_leaves(found)) if j != i)


def test_every_read_is_handed_the_norm_of_its_sub_layer(decoder: Make, tokens: Tensor, config: ResidualConfig) -> None:
    model, seen = decoder(config), []
    original = model.residual.read

    def read(memory: Any, site: int, norm: Any = None) -> Inputs:
        seen.append((site, norm))
        return original(memory, site, norm)

    model.residual.read = read  # type: ignore[method-assign]
    model(tokens[:, :-1])
    norms = [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm)]
    assert [site for site, _ in seen] == list(range(7))
    assert all(norm is expected for (_, norm), expected in zip(seen, [*norms, model.norm], strict=True))


def test_the_norm_in_the_read_is_the_norm_after_it(decoder: Make, run: Run, branch_config: ResidualConfig) -> None:
    """Logits and every gradient, those of the norms' gains among them. The epsilon is the norm's own, and large enough to count."""
    logits, gradients = run(decoder(branch_config, norm_eps=0.1))
    model = decoder(branch_config, norm_eps=0.1)
    read = model.residual.read
    model.residual.read = lambda memory, site, norm=None: normalised(read(memory, site), norm)  # type: ignore[method-assign]
    separate, expected = run(model)
    torch.testing.assert_close(logits, separate, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == expected.keys() and sum(name.endswith("norm.weight") for name in expected) == 7
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12 * scale, msg=name)
    assert (logits - run(decoder(branch_config, norm_eps=1e-6))[0]).abs().max() > 1e-3


def test_the_norm_is_applied_in_the_read_wherever_it_can_be(
    decoder: Make, tokens: Tensor, attnres_config: AttnResConfig, handed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, after = decoder(attnres_config), []
    names = [f"layers.{layer}.{kind}_norm" for layer in range(3) for kind in ("attention", "mlp")] + ["norm"]
    gains = {name: model.get_parameter(f"{name}.weight") for name in names}
    original = F.rms_norm

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
        after.extend(name for name, gain in gains.items() if gain is weight)
        return original(x, shape, weight, eps)

    monkeypatch.setattr(F, "rms_norm", rms_norm)
    model(tokens[:, :-1])
    # the norm of a mean of two mixtures
    averaged = [name for name in names if "attention" in name] if attnres_config.roles == "average" else []
    assert after == averaged
    assert all(gain is (None if name in averaged else gains[name]) for name, gain in zip(names, handed, strict=True))


class OneMore(nn.RMSNorm):
    """A norm with an arithmetic of its own under a well-known name: its gain is one plus the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), 1 + self.weight, self.eps)


def others() -> dict[str, Callable[[Tensor], Tensor]]:
    """Norms that no read can apply."""
    torch.manual_seed(0)
    modules = {
        "layer norm": nn.LayerNorm(WIDTH, eps=0.1),
        "no gain": nn.RMSNorm(WIDTH, eps=0.1, elementwise_affine=False),
        "no epsilon": nn.RMSNorm(WIDTH),
        "two axes": nn.RMSNorm((TOKENS, WIDTH), eps=0.1),
        "half the width": nn.RMSNorm(WIDTH // 2, eps=0.1),
        "own arithmetic": OneMore(WIDTH, eps=0.1),
    }
    for module in modules.values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, 1.0)
    found: dict[str, Callable[[Tensor], Tensor]] = {name: module.double() for name, module in modules.items()}
    half = found["half the width"]
    return found | {"half the width": lambda x: half(x.unflatten(-1, (2, -1))).flatten(-2), "lambda": lambda x: x.tanh()}


@pytest.mark.parametrize("name", others())
@pytest.mark.parametrize("roles", ["shared", "decoupled", "average"])
def test_any_other_norm_is_applied_after_the_read(
    decoder: Make, watch: Watch, tokens: Tensor, handed: list[Any], name: str, roles: Any
) -> None:
    model, norm = decoder(AttnResConfig(block=3, roles=roles)), others()[name]
    seen = watch(model, tokens[:, :-1])
    handed.clear()
    for site, memory in seen.items():
        close = site == len(seen) - 1
        read = model.residual.close(memory) if close else model.residual.read(memory, site)
        found = model.residual.close(memory, norm) if close else model.residual.read(memory, site, norm)
        for one, plain in zip(pytree.tree_leaves(found), pytree.tree_leaves(read), strict=True):
            torch.testing.assert_close(one, norm(plain), rtol=1e-12, atol=1e-12)
    assert handed and not any(gain is not None for gain in handed)


def test_an_rms_norm_of_any_class_is_applied_in_the_read(decoder: Make, watch: Watch, tokens: Tensor, handed: list[Any]) -> None:
    model = decoder(AttnResConfig(block=3))
    seen = watch(model, tokens[:, :-1])
    for norm in (nn.RMSNorm(WIDTH, eps=0.1).double(), RMSNorm(WIDTH, eps=0.1).double()):
        nn.init.normal_(norm.weight)
        handed.clear()
        found = model.residual.read(seen[5], 5, norm)
        assert handed[0] is norm.weight
        torch.testing.assert_close(found, norm(model.residual.read(seen[5], 5)), rtol=1e-12, atol=1e-12)


def test_hooks_on_a_norm_run(decoder: Make, run: Run, tokens: Tensor, branch_config: ResidualConfig) -> None:
    """A norm that somebody watches is applied by itself, with the same result."""
    logits, gradients = run(decoder(branch_config))
    model, ran = decoder(branch_config), []
    norms = [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm)] + [model.norm]
    for site, norm in enumerate(norms):
        register = norm.register_forward_pre_hook if site % 2 else norm.register_forward_hook
        register(lambda *_, site=site: ran.append(site))
    found, watched = run(model)
    assert sorted(set(ran)) == list(range(7))
    torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(watched[name], gradient, rtol=1e-12, atol=1e-12 * gradient.abs().max().item(), msg=name)


def test_the_norm_works_in_the_dtype_of_its_gain() -> None:
    norm = RMSNorm(WIDTH, eps=1e-6)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, WIDTH).bfloat16()
    assert norm(x).dtype == torch.float32
    wide = x.float()
    torch.testing.assert_close(norm(x), norm.weight * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_a_bf16_read_is_rounded_once_with_its_norm(decoder: Make, watch: Watch, tokens: Tensor) -> None:
    model, exact = (decoder(AttnResConfig(), dtype=kind) for kind in (torch.float32, torch.float64))
    for site, memory in watch(model, tokens[:, :-1]).items():
        rounded = pytree.tree_map_only(Tensor, lambda x: x.detach().bfloat16(), memory)
        found = model.residual.read(rounded, site, model.norm)
        truth = exact.norm(exact.residual.read(pytree.tree_map_only(Tensor, Tensor.double, rounded), site))
        torch.testing.assert_close(found.double(), truth, rtol=1.01 * 2**-8, atol=1e-5)
        assert found.dtype == torch.bfloat16
