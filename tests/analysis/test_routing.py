"""Diagnostics of routing against values by hand and against whole-batch computation."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from depthroute.analysis import effective_sources, jensen_shannon, write_routing
from depthroute.analysis.routing import RoutingTotals
from depthroute.common.errors import RequestError
from depthroute.common.files import write_json
from depthroute.data import TokenDataset, evaluation_windows
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig
from depthroute.train import load_trained


def column(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)[:, None]


def test_effective_sources_by_hand() -> None:
    assert effective_sources(column(0.25, 0.25, 0.25, 0.25)).item() == pytest.approx(4)
    assert effective_sources(column(0, 1, 0)).item() == pytest.approx(1)
    assert effective_sources(column(0.5, 0.25, 0.25)).item() == pytest.approx(2**1.5)
    assert effective_sources(torch.full((3, 2, 5), 1 / 3)).shape == (2, 5)


def test_jensen_shannon_by_hand() -> None:
    assert jensen_shannon(column(1, 0), column(0, 1)).item() == pytest.approx(math.log(2))
    assert jensen_shannon(column(0.3, 0.7), column(0.3, 0.7)).item() == 0
    first, second, middle = (0.9, 0.1), (0.4, 0.6), (0.65, 0.35)
    by_hand = sum(p * math.log(p / m) / 2 for pair in (first, second) for p, m in zip(pair, middle, strict=True))
    assert jensen_shannon(column(*first), column(*second)).item() == pytest.approx(by_hand)
    assert jensen_shannon(column(*second), column(*first)).item() == pytest.approx(by_hand)


def model_with(residual: ResidualConfig) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(vocabulary=17, width=12, layers=3, heads=2, mlp_width=20, context=8, init_std=0.4, residual=residual))
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.normal_()
    return model


@torch.no_grad()
def test_totals_over_batches_are_those_of_all_tokens_at_once() -> None:
    model, tokens = model_with(AttnResConfig(block=2, roles="decoupled")), torch.randint(17, (6, 8))
    totals, seen = RoutingTotals(model), {}
    for part in (tokens[:1], tokens[1:4], tokens[4:]):
        model(part, observe=totals.observe)
    model(tokens, observe=lambda site, memory: seen.update({site: memory}))
    found = totals.summary()
    assert found is not None and found["tokens"] == 48
    assert [site["site"] for site in found["sites"]] == [1, 2, 3, 4, 5, 6]  # the first read has one source
    assert [site["kind"] for site in found["sites"]] == ["mlp", "attention", "mlp", "attention", "mlp", "output"]
    assert [site["layer"] for site in found["sites"]] == [0, 1, 1, 2, 2, 2]
    for site in found["sites"]:
        weights = model.residual.source_weights(seen[site["site"]], site["site"])
        assert set(site["roles"]) == set(weights) and len(site["sources"]) == len(next(iter(weights.values())))
        for role, facts in site["roles"].items():
            count = effective_sources(weights[role].double())
            assert facts["weights"] == pytest.approx(weights[role].double().mean((1, 2)).tolist(), abs=1e-6)
            assert facts["effective_sources"] == pytest.approx(count.mean().item(), abs=1e-6)
            assert facts["effective_sources_sd"] == pytest.approx(count.std(correction=0).item(), abs=1e-4)
    assert [entry["layer"] for entry in found["divergence"]] == [1, 2]
    for entry in found["divergence"]:
        weights = model.residual.source_weights(seen[2 * entry["layer"]], 2 * entry["layer"])
        nats = jensen_shannon(weights["query_key"].double(), weights["value"].double()).mean().item()
        assert entry["nats"] == pytest.approx(nats, abs=1e-6) and 0 < nats < math.log(2)


@torch.no_grad()
def test_methods_without_roles_or_without_weights() -> None:
    tokens = torch.randint(17, (2, 8))
    shared = RoutingTotals(model := model_with(AttnResConfig()))
    model(tokens, observe=shared.observe)
    found = shared.summary()
    assert found is not None and found["divergence"] == [] and all(set(site["roles"]) == {"shared"} for site in found["sites"])
    plain = RoutingTotals(model := model_with(PreNormConfig()))
    model(tokens, observe=plain.observe)
    assert plain.summary() is None


def test_routing_of_a_run_is_written_as_the_contract_says(trained_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    (run / "routing.json").unlink(missing_ok=True)
    write_routing(run, tokens=40)
    found = json.loads((run / "routing.json").read_text())
    assert set(found) == {"tokens", "sites", "divergence"} and found["tokens"] == 40  # two windows of 16, and a half
    assert set(found["sites"][0]) == {"site", "kind", "layer", "sources", "roles"}
    assert set(found["sites"][0]["roles"]["shared"]) == {"weights", "effective_sources", "effective_sources_sd"}
    config, model = load_trained(run)
    totals = RoutingTotals(model)
    with torch.no_grad():
        for windows in evaluation_windows(TokenDataset.open(Path(config.data)).tokens("validation")[:41], 16):
            model(torch.from_numpy(windows[:, :-1]), observe=totals.observe)
    assert totals.summary() == found
    shutil.move(run.parent / "run", moved := tmp_path / "moved")
    write_json(moved / "config.json", {**json.loads((moved / "config.json").read_text()), "data": "elsewhere"})
    with pytest.raises(RequestError, match="elsewhere"):
        write_routing(moved)
    write_routing(moved, data=Path(config.data), tokens=40)
    assert json.loads((moved / "routing.json").read_text()) == found
