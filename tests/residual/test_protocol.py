"""What every residual method promises: causality, gradients for all it owns, sources that add up, weights that are named, a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.model import Decoder
from depthroute.residual import METHODS, AttnResConfig, Body, PreNormConfig, Projected, ResidualConfig, RoleInputs, Trace
from depthroute.residual.bank import BankConfig
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.dynamic import DynamicQueryConfig
from depthroute.residual.highway import HighwayConfig
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.mhc import MHCConfig
from depthroute.residual.static import StaticMixConfig

Make = Callable[..., Decoder]

Watch = Callable[[Decoder, Tensor], dict[int, Any]]
SITES = range(7)


def test_every_method_is_tested(configs: dict[str, ResidualConfig]) -> None:
    assert {config.name for config in configs.values()} == set(METHODS)


def test_no_position_sees_a_later_one(decoder: Make, tokens: Tensor, config: ResidualConfig, body: dict[str, Any]) -> None:
    model = decoder(config, **body)
    embedded = model.embedding(tokens[:1, :-1]).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda *_: embedded)
    hidden = model(tokens[:1, :-1])
    for t in range(hidden.shape[1]):
        (gradient,) = torch.autograd.grad((hidden[0, t] * torch.arange(1, 13)).sum(), embedded, retain_graph=True)
        assert torch.count_nonzero(gradient[0, t + 1 :]) == 0
        assert (gradient[0, : t + 1].abs().sum(-1) > 0).all()


def test_every_parameter_learns_within_two_steps(decoder: Make, tokens: Tensor, config: ResidualConfig, body: dict[str, Any]) -> None:
    """After one backward pass none is without a gradient (distributed training waits for all), and route queries feel one although they
    start at zero. Gains and projected keys act through the queries, so theirs comes with the second. A router's bias is no optimiser's."""
    model = decoder(config, scattered=False, **body)
    learning = {name: parameter for name, parameter in model.named_parameters() if not name.endswith("router.bias")}
    assert all(parameter.requires_grad for parameter in learning.values())
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (1, 2):
        optimiser.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
        assert [name for name, parameter in learning.items() if parameter.grad is None] == []
        silent = [name for name, parameter in learning.items() if parameter.grad is not None and not parameter.grad.any()]
        assert [name for name in silent if step == 2 or (isinstance(config, AttnResConfig) and name.endswith("query"))] == []
        optimiser.step()


def test_names_and_weights_fit_the_sources(decoder: Make, watch: Watch, tokens: Tensor, bank_config: BankConfig) -> None:
    """Weights are named by role, add up to one, and mixing the sources with them is what the site reads."""
    model, roles = decoder(bank_config), getattr(bank_config, "roles", "shared")
    heads, residual = getattr(bank_config, "heads", 1), model.residual
    for site, memory in watch(model, tokens[:, :-1]).items():
        weights, sources = residual.source_weights(memory, site), residual.sources(memory)
        if site == 0 or (isinstance(bank_config, DeltaConfig) and len(sources) == 1) or bank_config == StaticMixConfig(raw=True, block=2):
            assert weights == {}
            continue
        if isinstance(bank_config, DeltaConfig) and site == 6:
            assert weights == {} and residual.source_names(site) == ()
            continue
        apart = {"separate": ("query", "key", "value"), "shared": ("shared",), "tied": ("shared",)}.get(roles, ("query_key", "value"))
        expected = apart if site in (2, 4) else ("shared",)
        assert list(weights) == [f"{role}, head {head}" if heads > 1 else role for role in expected for head in range(heads)]
        assert len(residual.source_names(site)) == len(sources)
        for found in weights.values():
            assert found.shape == (len(sources), 2, 8) and not found.requires_grad
            if getattr(bank_config, "weighting", "softmax") == "softmax":
                torch.testing.assert_close(found.sum(0), torch.ones(2, 8, dtype=torch.float64))
        inputs = residual.read(memory, site)
        read = inputs if isinstance(inputs, Tensor) else torch.stack(inputs)
        if roles == "average":
            continue
        by_role = dict(zip(("query", "key", "value"), read, strict=True)) if isinstance(inputs, RoleInputs) else {}
        for number, role in enumerate(expected):
            of_role = list(weights.values())[number * heads : (number + 1) * heads]
            parts = [torch.stack(sources).chunk(heads, dim=-1)[head] * one[..., None] for head, one in enumerate(of_role)]
            mixed = torch.cat(parts, dim=-1).sum(0)
            if isinstance(bank_config, DeltaConfig):
                gate = residual.sites[str(site)].gate
                mixed = memory.stream + mixed * (1 if gate is None else torch.sigmoid(gate))
            found = by_role[{"query_key": "query", "shared": "query"}.get(role, role)] if by_role else inputs
            torch.testing.assert_close(found, mixed)


def test_sources_add_up_to_the_embedding_and_every_output_so_far(
    decoder: Make, watch: Watch, tokens: Tensor, bank_config: BankConfig
) -> None:
    if bank_config.summary != "sum" or bank_config.window is not None or getattr(bank_config, "values", "raw") == "normed":
        pytest.skip("its sources are changed or forgotten")
    model, outputs = decoder(bank_config), []
    model.embedding.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    for layer in model.layers:
        for sublayer in (layer.attention, layer.mlp):
            sublayer.register_forward_hook(lambda module, inputs, output: outputs.append(output.output))
    seen = watch(model, tokens[:, :-1])
    assert list(seen) == list(SITES)
    for site, memory in seen.items():
        torch.testing.assert_close(torch.stack(memory.sources()).sum(0), torch.stack(outputs[: site + 1]).sum(0))


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


@pytest.mark.parametrize("memory_dtype", ["parameter", "compute"])
def test_bf16_autocast_is_close_to_float32(
    decoder: Make, tokens: Tensor, config: ResidualConfig, body: dict[str, Any], memory_dtype: str
) -> None:
    if "experts" in body:  # each to all of them: what bfloat16 rounds off would choose between near ones
        body = body | {"experts": replace(body["experts"], chosen=body["experts"].number)}
    model = decoder(config, dtype=torch.float32, memory_dtype=memory_dtype, **body)
    # A random matrix makes queries of norm 12, or gates as steep, which would route by what bfloat16 rounds off.
    if isinstance(config, DynamicQueryConfig | HighwayConfig):
        for parameter in model.residual.parameters():
            parameter.data *= 0.1
    expected = model(tokens[:, :-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(tokens[:, :-1])
        model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in learning)
    off = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Queries of norm 3.5 route sharply. A delta rule's read may be next to nothing, and its norm makes it large again: a token may be lost.
    assert (off.median() if body else off.square().mean().sqrt()).item() < 8e-2


def test_scores_and_coefficients_are_float32_whatever_the_memory_is(decoder: Make, watch: Watch, tokens: Tensor) -> None:
    for config in (DynamicQueryConfig(block=2, query_from="block"), HyperConnectionsConfig(), MHCConfig()):
        model = decoder(config, dtype=torch.float32, memory_dtype="compute")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = watch(model, tokens[:, :-1])
        for site, memory in list(seen.items())[1:6]:
            if isinstance(config, DynamicQueryConfig):
                for prepared in memory.ahead:
                    assert prepared.query.dtype == prepared.scores.dtype == torch.float32
                assert model.residual._weights(memory, site).dtype == torch.float32
                assert memory.closed[0].dtype == torch.bfloat16
            else:
                assert memory.coefficients.dtype == torch.float32 and memory.streams.dtype == torch.bfloat16


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 1), (2, 3, 4)], ids=str)
def test_leading_dimensions_are_as_many_as_there_are(config: ResidualConfig, leading: tuple[int, ...]) -> None:
    """A token alone, tokens without a batch, or more dimensions: the rows are those of a flat batch, one by one."""
    residual = config.build(Body(width=12, layers=3, attention_activation=12, mlp_activation=20)).double()
    scatter_all(residual)
    generator = torch.Generator().manual_seed(0)
    embedding, *outputs = torch.randn(7, *leading, 12, dtype=torch.float64, generator=generator)
    activations = [torch.randn(*leading, 12 if site % 2 == 0 else 20, dtype=torch.float64, generator=generator) for site in range(6)]

    def run(flat: bool) -> list[Tensor]:
        def shaped(x: Tensor) -> Tensor:
            return x.reshape(-1, x.shape[-1]) if flat else x

        memory, reads = residual.open(shaped(embedding)), []
        for site, (output, activation) in enumerate(zip(outputs, activations, strict=True)):
            inputs = residual.read(memory, site, double)
            reads += [inputs] if isinstance(inputs, Tensor) else list(inputs)
            kept = None
            if site % 2 == 0:  # one token, one head of every row: what an attention projects
                by_head = Projected(*(shaped(x).reshape(1, 1, -1, 12) for x in (output, activation, output - activation)))
                _, kept = residual.values(memory, site, by_head)
            memory = residual.write(memory, site, shaped(output), Trace(inputs, shaped(activation), kept))
        return [read.reshape(-1, 12) for read in (*reads, residual.close(memory, double))]

    for found, expected in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def double(x: Tensor) -> Tensor:
    """A norm of sorts."""
    return 2 * x


def scatter_all(residual: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))


def test_weights_survive_a_file(decoder: Make, tokens: Tensor, config: ResidualConfig, body: dict[str, Any], tmp_path: Path) -> None:
    model, other = decoder(config, **body), decoder(config, scattered=False, **body)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other.logits(tokens[:, :-1]), model.logits(tokens[:, :-1]))


def test_the_method_adds_exactly_its_own_parameters(decoder: Make, config: ResidualConfig, body: dict[str, Any]) -> None:
    plain, model = decoder(PreNormConfig(), **body), decoder(config, **body)
    before, after = ({name: parameter.numel() for name, parameter in one.named_parameters()} for one in (plain, model))
    assert all(name.startswith("residual.") for name in after.keys() - before.keys())
    gone, adaptation = before.keys() - after.keys(), config.adaptation(model.config.body)
    expected = [] if adaptation.input_norms else [f"layers.{n}.{kind}_norm.weight" for n in range(3) for kind in ("attention", "mlp")]
    if adaptation.value_layers is not None:
        of_values = ("attention.value.weight", "attention.value_convolution.weight")
        expected += [name for name in before if name.endswith(of_values) and int(name.split(".")[1]) >= adaptation.value_layers]
        assert len(expected) >= 3 - adaptation.value_layers
    assert gone == set(expected)
    counts = model.parameter_counts()
    assert counts["residual"] == counts["total"] - sum(size for name, size in before.items() if name not in gone)


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
