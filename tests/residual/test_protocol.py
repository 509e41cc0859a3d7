"""What every residual method promises: causality, gradients for all it owns, sources that add up, weights that are named, a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.model import Decoder
from depthroute.residual import METHODS, AttnResConfig, Body, PreNormConfig, ResidualConfig, RoleInputs

Make = Callable[..., Decoder]

Watch = Callable[[Decoder, Tensor], dict[int, Any]]
SITES = range(7)


def test_every_method_is_tested(configs: dict[str, ResidualConfig]) -> None:
    assert {config.name for config in configs.values()} == set(METHODS)


def test_no_position_sees_a_later_one(decoder: Make, tokens: Tensor, config: ResidualConfig) -> None:
    model = decoder(config)
    embedded = model.embedding(tokens[:1, :-1]).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda *_: embedded)
    hidden = model(tokens[:1, :-1])
    for t in range(hidden.shape[1]):
        (gradient,) = torch.autograd.grad((hidden[0, t] * torch.arange(1, 13)).sum(), embedded, retain_graph=True)
        assert torch.count_nonzero(gradient[0, t + 1 :]) == 0
        assert (gradient[0, : t + 1].abs().sum(-1) > 0).all()


def test_every_parameter_learns_within_two_steps(decoder: Make, tokens: Tensor, config: ResidualConfig) -> None:
    """After one backward pass none is without a gradient (distributed training waits for all), and route queries feel one although they
    start at zero. Gains and projected keys act through the queries, so theirs comes with the second."""
    model = decoder(config, scattered=False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (1, 2):
        optimiser.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        silent = [name for name, parameter in model.named_parameters() if parameter.grad is not None and not parameter.grad.any()]
        assert [name for name in silent if step == 2 or name.endswith("query")] == []
        optimiser.step()


def test_names_and_weights_fit_the_sources(decoder: Make, watch: Watch, tokens: Tensor, config: ResidualConfig) -> None:
    model = decoder(config)
    for site, memory in watch(model, tokens[:, :-1]).items():
        weights = model.residual.source_weights(memory, site)
        if isinstance(config, PreNormConfig) or site == 0:
            assert weights == {}
            continue
        separate = isinstance(config, AttnResConfig) and config.roles not in ("shared", "tied") and site in (2, 4)
        assert set(weights) == ({"query_key", "value"} if separate else {"shared"})
        for found in weights.values():
            assert found.shape == (len(model.residual.source_names(site)), 2, 8) and not found.requires_grad
            torch.testing.assert_close(found.sum(0), torch.ones(2, 8, dtype=torch.float64))
        inputs = model.residual.read(memory, site)
        by_role = {"shared": inputs.query, "query_key": inputs.query, "value": inputs.value} if isinstance(inputs, RoleInputs) else {}
        for role, read in by_role.items():
            if role in weights:
                mixed = torch.einsum("s...,s...d->...d", weights[role], torch.stack(memory.sources()))
                torch.testing.assert_close(read, mixed)


def test_sources_add_up_to_the_embedding_and_every_output_so_far(
    decoder: Make, watch: Watch, tokens: Tensor, config: ResidualConfig
) -> None:
    model, outputs = decoder(config), []
    model.embedding.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    for layer in model.layers:
        for sublayer in (layer.attention, layer.mlp):
            sublayer.register_forward_hook(lambda module, inputs, output: outputs.append(output.output))
    seen = watch(model, tokens[:, :-1])
    assert list(seen) == list(SITES)
    for site, memory in seen.items():
        total = memory if isinstance(memory, Tensor) else torch.stack(memory.sources()).sum(0)
        torch.testing.assert_close(total, torch.stack(outputs[: site + 1]).sum(0))


def test_source_names() -> None:
    body = Body(width=12, layers=3, attention_activation=12, mlp_activation=20)
    full, blocks = AttnResConfig().build(body), AttnResConfig(block=4).build(body)
    assert full.source_names(0) == ("embedding",)
    assert full.source_names(3) == ("embedding", "attention 0", "mlp 0", "attention 1")
    assert blocks.source_names(3) == ("embedding", "block 1 so far")
    assert blocks.source_names(4) == ("embedding", "block 1")
    assert blocks.source_names(5) == ("embedding", "block 1", "block 2 so far")
    assert blocks.source_names(6) == ("embedding", "block 1", "block 2")
    assert PreNormConfig().build(body).source_names(3) == ()


def test_a_frozen_value_route_is_uniform(decoder: Make, watch: Watch, tokens: Tensor) -> None:
    model = decoder(AttnResConfig(roles="frozen_value"))
    seen = watch(model, tokens[:, :-1])
    for site in (2, 4):
        weights = model.residual.source_weights(seen[site], site)
        assert torch.equal(weights["value"], torch.full_like(weights["value"], 1 / (site + 1)))
        assert weights["query_key"].std() > 0.05


def test_bf16_autocast_is_close_to_float32(decoder: Make, tokens: Tensor, config: ResidualConfig) -> None:
    model = decoder(config, dtype=torch.float32)
    expected = model(tokens[:, :-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(tokens[:, :-1])
        model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert ((found - expected).norm() / expected.norm()).item() < 8e-2  # queries of norm 3.5 route sharply


def test_weights_survive_a_file(decoder: Make, tokens: Tensor, config: ResidualConfig, tmp_path: Path) -> None:
    model, other = decoder(config), decoder(config, scattered=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other.logits(tokens[:, :-1]), model.logits(tokens[:, :-1]))


def test_the_method_adds_exactly_its_own_parameters(decoder: Make, config: ResidualConfig) -> None:
    plain, model = decoder(PreNormConfig()), decoder(config)
    added = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert all(name.startswith("residual.") for name in added)
    counts = model.parameter_counts()
    assert counts["residual"] == counts["total"] - plain.parameter_counts()["total"]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rank": 0}, "residual.rank = 0 is not allowed; it takes 1 or more, or none"),
        ({"keys": "projected"}, "residual.keys = 'projected' needs residual.rank"),
        ({"keys": "projected", "rank": 4, "key_norm": "full"}, "residual.key_norm = 'full' is for sliced keys"),
        ({"eps": 0.0}, "residual.eps = 0.0 is not allowed; it must be positive"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        AttnResConfig(**fields)


def test_settings_that_do_not_fit_the_body_are_refused(decoder: Make, tokens: Tensor) -> None:
    with pytest.raises(RequestError, match=r"residual.rank = 13 is larger than the width 12"):
        decoder(AttnResConfig(rank=13))
    with pytest.raises(RequestError, match="block = 7 is not allowed; it takes 1 to 6"):
        decoder(AttnResConfig(block=7))
    projected = decoder(AttnResConfig(rank=4, keys="projected")).residual
    x = torch.zeros(1, 12, dtype=torch.float64)
    with pytest.raises(RequestError, match=r"Trace\(activation=...\)"):
        projected.write(projected.open(x), 0, x)
