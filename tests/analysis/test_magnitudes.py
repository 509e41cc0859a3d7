"""Magnitudes by depth, the logit lens and routing feedback, against whole-batch computation and autograd; looking on leaves no trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from depthroute.analysis.feedback import routing_feedback, score_gradient
from depthroute.analysis.magnitudes import MagnitudeTotals, logit_lens, output_gradients
from depthroute.analysis.watch import watching
from depthroute.model import Decoder, ModelConfig
from depthroute.ops import depth_attention
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig, parse_residual
from depthroute.train import initialise

BATCHES = list(torch.randint(17, (5, 9), generator=torch.Generator().manual_seed(1)).split([2, 1, 2]))


def model_with(residual: ResidualConfig) -> Decoder:
    model = Decoder(
        ModelConfig(vocabulary=17, width=12, layers=3, heads=2, mlp_width=20, context=8, init_std=0.4, residual=residual)
    )  # fmt: skip
    initialise(model, 0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model.double()


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("residual", ["prenorm", "block:2", "rd:2", "hc:2", "postnorm"])
def test_magnitudes_are_those_of_all_tokens_at_once(residual: str) -> None:
    model, outputs, reads = model_with(parse_residual(residual)), [], []
    totals = MagnitudeTotals(model)
    with torch.no_grad():
        for batch in BATCHES:
            with watching(model.residual, on_write=totals.on_write):
                model(batch[:, :-1], observe=totals.observe)
        whole = torch.cat(BATCHES)
        with watching(model.residual, on_write=lambda site, output: outputs.append(output)):
            model(whole[:, :-1], observe=lambda site, memory: reads.append(memory))
    rows = totals.summary()
    assert [row["site"] for row in rows] == list(range(7)) and rows[-1]["kind"] == "output" and rows[-1]["output_rms"] is None
    if residual == "postnorm":
        assert all(row["read_rms"] is None for row in rows)
        return
    for site, output in enumerate(outputs):
        assert rows[site]["output_rms"] == pytest.approx(rms(output), rel=1e-6)
    for site, memory in enumerate(reads):
        with torch.no_grad():
            found = model.residual.read(memory, site)
        distinct = [found] if isinstance(found, Tensor) else list({id(one): one for one in found}.values())
        mean = sum(one.square().mean().item() for one in distinct) / len(distinct)
        assert rows[site]["read_rms"] == pytest.approx(mean**0.5, rel=1e-6)


def test_output_gradients_are_autograds() -> None:
    model, kept = model_with(AttnResConfig(block=2)), []
    found = output_gradients(model, BATCHES)
    whole = torch.cat(BATCHES)

    def keep(site: int, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    with watching(model.residual, on_write=keep):
        model.loss(whole[:, :-1], whole[:, 1:]).objective.backward()
    assert found == pytest.approx([rms(output.grad) for output in kept], rel=1e-6)
    assert all(parameter.grad is None for parameter in model_with(PreNormConfig()).parameters())


def test_the_lens_ends_with_the_models_own_loss() -> None:
    model = model_with(AttnResConfig(roles="decoupled", block=2))
    rows, whole = logit_lens(model, BATCHES), torch.cat(BATCHES)
    with torch.no_grad():
        own = model.token_nll(whole[:, :-1], whole[:, 1:]).mean().item()
        logits = F.linear(model.norm(model.embedding(whole[:, :-1])), model.head_weight)
        first = F.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten())
    assert rows[-1]["nll"] == pytest.approx(own, rel=1e-6) and rows[-1]["agrees"] == 1.0
    assert rows[0]["nll"] == pytest.approx(first.item(), rel=1e-6)
    assert all(0 <= row["agrees"] <= 1 for row in rows) and rows[0]["agrees"] < 1


@pytest.mark.parametrize(("rank", "key_norm"), [(12, "slice"), (5, "slice"), (5, "full"), (5, "none")])
def test_score_gradients_are_autograds(rank: int, key_norm: str) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(4, 12, dtype=torch.float64, generator=generator).requires_grad_()
    query = torch.randn(rank, dtype=torch.float64, generator=generator)
    key = source[..., -rank:]
    over = {"slice": key, "full": source, "none": None}[key_norm]
    normed = key if over is None else key / (over.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    (expected,) = torch.autograd.grad((normed * query).sum(), source)
    torch.testing.assert_close(score_gradient(source.detach(), query, key_norm, 1e-3), expected, rtol=1e-12, atol=1e-12)


def test_both_parts_are_the_gradient_of_a_read() -> None:
    """Low-Rank AttnRes, Eq. 15: for sources taken as independent inputs."""
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(3, 12, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(4)]
    query, g = (torch.randn(size, dtype=torch.float64, generator=generator) for size in ((12,), (3, 12)))
    read = depth_attention(sources, query, return_weights=True)
    gradients = torch.autograd.grad(read.output, sources, g)
    for source, weight, gradient in zip(sources, read.weights, gradients, strict=True):
        direct = weight[..., None] * g
        pull = (g * (source - read.output)).sum(-1)
        routed = (weight * pull)[..., None] * score_gradient(source, query, "slice", 1e-6)
        torch.testing.assert_close(direct + routed, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("residual", ["full", "block:2", "rd:2", "block:2,roles=separate", "full,rank=5,key_norm=full"])
def test_feedback_of_every_site_and_role(residual: str) -> None:
    config = parse_residual(residual)
    model = model_with(config)
    rows = routing_feedback(model, BATCHES)
    assert rows is not None
    roles = {"decoupled": {"query_key", "value"}, "separate": {"query", "key", "value"}}.get(config.roles, {"shared"})
    by_site = {(row["site"], row["role"]): row for row in rows}
    assert set(by_site) == {(site, role) for site in range(1, 7) for role in (roles if site in (2, 4) else {"shared"})}
    assert all(row["direct"] > 0 and row["routed"] > 0 and row["ratio"] == pytest.approx(row["routed"] / row["direct"]) for row in rows)
    with torch.no_grad():
        for name, parameter in model.residual.named_parameters():
            if name.endswith("query"):
                parameter.zero_()
    assert all(row["routed"] == 0 < row["direct"] for row in routing_feedback(model, BATCHES) or ())  # no scores, no feedback


@pytest.mark.parametrize("residual", ["prenorm", "full,heads=3", "sigmoid", "full,rank=4,keys=projected"])
def test_methods_without_such_a_read_have_no_feedback(residual: str) -> None:
    assert routing_feedback(model_with(parse_residual(residual)), BATCHES) is None


def test_looking_on_leaves_no_trace() -> None:
    model = model_with(AttnResConfig(block=2))
    expected = model(BATCHES[0][:, :-1])
    with pytest.raises(ZeroDivisionError), watching(model.residual, on_write=lambda site, output: 1 / 0):
        model(BATCHES[0][:, :-1])
    assert "write" not in vars(model.residual) and "read" not in vars(model.residual)
    assert torch.equal(model(BATCHES[0][:, :-1]), expected)
    doubled: Callable[[int, Tensor], Tensor] = lambda site, output: 2 * output  # noqa: E731
    with watching(model.residual, on_write=doubled):
        assert not torch.allclose(model(BATCHES[0][:, :-1]), expected)
