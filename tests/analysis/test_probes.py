"""Causal probes against networks written out with changed reads, and intervals against numbers by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import Tensor

from depthroute.analysis.probes import probe
from depthroute.analysis.probes_interval import clustered, document_numbers
from depthroute.analysis.probes_read import Change, Frozen, KnockOut, Uniform, intervened
from depthroute.common.errors import FailureError, RequestError
from depthroute.data import evaluation_windows
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, Bank, Inputs, Norm, PreNormConfig, ResidualConfig, RoleInputs, Trace
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.dynamic import DynamicQueryConfig
from depthroute.residual.static import StaticMix, StaticMixConfig

VOCABULARY, CONTEXT = 13, 6
BOUNDARIES = np.array([0, 4, 10, 11, 23, 28, 37])  # of the tokens of `some_windows`
METHODS: dict[str, ResidualConfig] = {
    "full": AttnResConfig(),
    "block": AttnResConfig(block=2),
    "phases": AttnResConfig(ends=(1, 2, 6), roles="decoupled"),
    "decoupled": AttnResConfig(roles="decoupled"),
    "separate": AttnResConfig(block=2, roles="separate"),
    "average": AttnResConfig(roles="average"),
    "tied": AttnResConfig(roles="tied"),
    "frozen value": AttnResConfig(roles="frozen_value"),
    "sigmoid": AttnResConfig(weighting="sigmoid"),
    "projected": AttnResConfig(keys="projected", rank=4),
    "normed window": AttnResConfig(values="normed", window=2),
    "static": StaticMixConfig(),
    "dynamic": DynamicQueryConfig(),
    "dynamic block": DynamicQueryConfig(block=3, query_from="block"),
    "delta": DeltaConfig(),
    "delta sigmoid": DeltaConfig(gate="sigmoid", block=2),
    "delta alpha": DeltaConfig(gate="alpha"),
}


def model_with(residual: ResidualConfig, *, scattered: bool = True) -> Decoder:
    torch.manual_seed(0)
    shape = ModelConfig(
        vocabulary=VOCABULARY, width=8, layers=3, heads=2, mlp_width=12, context=CONTEXT, init_std=0.5, norm_eps=1e-30, residual=residual
    )
    model = Decoder(shape).double()
    if scattered:
        with torch.no_grad():
            for parameter in model.residual.parameters():
                parameter.normal_()
    return model


def some_windows(number: int = 6, together: int = 2) -> list[np.ndarray]:
    tokens = np.random.default_rng(1).integers(4, VOCABULARY, number * CONTEXT + 1)
    tokens[BOUNDARIES[1:-1] - 1] = 3
    return list(evaluation_windows(tokens, CONTEXT, sequences=together))


def losses(model: Decoder, windows: list[np.ndarray]) -> Tensor:
    """The NLL of every target, a row a window."""
    tokens = torch.from_numpy(np.concatenate(windows))
    return model.token_nll(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def reads_of(model: Decoder) -> dict[tuple[int, str], Tensor]:
    """The weights of the untouched model over all windows, by site and role."""
    found: dict[tuple[int, str], Tensor] = {}

    def observe(site: int, memory: Bank) -> None:
        found.update({(site, role): weights for role, weights in model.residual.source_weights(memory, site).items()})

    with torch.no_grad():
        model(torch.from_numpy(np.concatenate(some_windows()))[:, :-1], observe=observe)
    return found


def change_of(row: dict[str, Any], weights: Tensor, names: tuple[str, ...]) -> Change:
    if row["probe"] == "knock_out":
        return KnockOut(tuple(names.index(name) for name in row["sources"]))
    return Uniform() if row["probe"] == "uniform" else Frozen(tuple(weights.flatten(1).mean(1).tolist()))


# --- the network, written out -------------------------------------------------------------------------------------------------------


def literal_losses(model: Decoder, windows: list[np.ndarray], changed: Callable[[int, str, Tensor], Tensor]) -> Tensor:
    """The decoder step by step, with every read of several sources a sum over their stack with `changed(site, role, weights)`."""
    tokens = torch.from_numpy(np.concatenate(windows))
    residual: Any = model.residual
    memory, sight = residual.open(model.embedding(tokens[:, :-1])), model.sight(tokens[:, :-1])
    for site, (norm, sublayer) in enumerate(
        pair for layer in model.layers for pair in ((layer.attention_norm, layer.attention), (layer.mlp_norm, layer.mlp))
    ):
        inputs = literal_read(residual, memory, site, norm, changed)
        found = sublayer(inputs) if site % 2 else sublayer(inputs, sight, lambda projected: (projected.value, None))
        memory = residual.write(memory, site, found.output, Trace(inputs, found.activation, found.kept))
    hidden = literal_read(residual, memory, 2 * len(model.layers), model.norm, changed)
    assert isinstance(hidden, Tensor)
    logits = hidden @ model.head_weight.T
    return -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def literal_read(residual: Any, memory: Bank, site: int, norm: Norm, changed: Callable[[int, str, Tensor], Tensor]) -> Inputs:
    weights = residual.source_weights(memory, site)
    if not weights:
        return residual.read(memory, site, norm)
    stack = torch.stack(residual.sources(memory))
    mixed = [torch.einsum("sbt,sbtd->btd", changed(site, role, of_role), stack) for role, of_role in weights.items()]
    if isinstance(residual, StaticMix):
        return norm(mixed[0])
    if isinstance(residual.config, DeltaConfig):
        gate = residual.sites[str(site)].gate
        factor = {"none": lambda: 1.0, "sigmoid": lambda: torch.sigmoid(gate), "alpha": lambda: gate}[residual.config.gate]()
        return norm(memory.stream + factor * mixed[0])
    if getattr(residual.config, "roles", "shared") == "shared" or site % 2 or site == 6:
        return norm(mixed[0])
    if residual.config.roles == "average":
        return norm((mixed[0] + mixed[1]) / 2)
    query, key, value = {1: (0, 0, 0), 2: (0, 0, 1), 3: (0, 1, 2)}[len(mixed)]
    return RoleInputs(norm(mixed[query]), norm(mixed[key]), norm(mixed[value]))


@pytest.mark.parametrize("name", METHODS)
def test_a_knock_out_is_the_network_without_that_source(name: str) -> None:
    model, windows = model_with(METHODS[name]), some_windows()
    reads = reads_of(model)
    chosen = [key for key, weights in reads.items() if len(weights) > 2]
    for place, role in (chosen[0], chosen[-1], next(iter(reads))):

        def without(site: int, of: str, weights: Tensor, here: tuple[int, str] = (place, role)) -> Tensor:
            if (site, of) != here:
                return weights
            left = weights[1:] * (weights.sum(0) / weights[1:].sum(0))
            return torch.cat((torch.zeros_like(weights[:1]), left))

        with torch.no_grad(), intervened(model, {(place, role): KnockOut((0,))}):
            found = losses(model, windows)
        with torch.no_grad():
            expected = literal_losses(model, windows, without)
            untouched = losses(model, windows)
        assert found == pytest.approx(expected, abs=1e-11)
        assert (found - untouched).abs().max() > 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_a_probe_set_is_what_whole_forward_passes_say(name: str) -> None:
    """Branching off a shared prefix changes no number, and a row says what was done."""
    model, windows = model_with(METHODS[name]), some_windows()
    found = probe(model, windows, boundaries=BOUNDARIES, every_source=True)
    reads = reads_of(model)
    with torch.no_grad():
        untouched = losses(model, windows)
        assert found["nll"] == pytest.approx(untouched.mean().item(), abs=1e-12) and found["tokens"] == untouched.numel() == 36
        for row in found["sites"][:: max(1, len(found["sites"]) // 25)]:
            here = row["site"], row["role"]
            names = model.residual.source_names(row["site"])
            means = reads[here].mean((1, 2))
            with intervened(model, {here: change_of(row, reads[here], names)}):
                delta = (losses(model, windows) - untouched).mean().item()
            assert row["delta"] == pytest.approx(delta, abs=1e-11)
            assert row["low"] <= row["delta"] <= row["high"]
            if row["probe"] == "knock_out":
                assert row["mean_weight"] == pytest.approx(sum(means[names.index(source)].item() for source in row["sources"]), abs=1e-12)
            else:
                assert row["mean_weight"] is None and row["source"] is None and row["sources"] == list(names)
    assert {(row["site"], row["role"]) for row in found["sites"]} == set(reads)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_probe_runs_what_is_behind_its_site_and_no_probe_runs_twice() -> None:
    model, windows, steps = model_with(AttnResConfig()), some_windows(together=6), []
    step = model.step
    model.step = lambda memory, site, *sight: (steps.append(site), step(memory, site, *sight))[1]  # type: ignore[method-assign,func-returns-value]
    found = probe(model, windows, boundaries=BOUNDARIES, above=2.0)
    untouched = 2 * 6
    sites = 4 * 5 + 5 * (4 + 3 + 2 + 1)  # uniform, frozen and three groups, or two at the first site; the last has no step behind it
    families = (4 * 5 + 4) + (4 * 5 + 3) + 5 * 4  # all, mlp, attention; the first older source is at site 2 or 3; output is a site
    assert len(steps) == untouched + sites + families
    of_site = {(row["probe"], row["source"]): row["delta"] for row in found["sites"] if row["kind"] == "output"}
    assert {(row["probe"], row["source"]): row["delta"] for row in found["families"] if row["family"] == "output"} == of_site


# --- effects that are known ---------------------------------------------------------------------------------------------------------


def test_a_source_that_has_no_weight_has_no_effect_at_all() -> None:
    model = model_with(StaticMixConfig())
    with torch.no_grad():
        model.residual.logits["4"][2] = -1e5
    found = probe(model, some_windows(), boundaries=BOUNDARIES, every_source=True)
    row = next(row for row in found["sites"] if row["site"] == 4 and row["source"] == "mlp 0")
    assert (row["mean_weight"], row["delta"], row["low"], row["high"]) == (0, 0, 0, 0)
    assert row not in found["mass_without_effect"]  # it has no mass
    assert all(other["delta"] != 0 for other in found["sites"] if other["probe"] == "knock_out" and other is not row)


def test_mass_without_effect_is_found() -> None:
    """A source of zeros takes its share of the weights and changes nothing but the length of the read, which the norm takes out."""
    model = model_with(AttnResConfig(), scattered=False)
    with torch.no_grad():
        model.layers[0].attention.output.weight.zero_()
    found = probe(model, some_windows(), boundaries=BOUNDARIES, above=0.2)
    listed = [(row["site"], row["source"]) for row in found["mass_without_effect"]]
    assert listed == [(1, "newest"), (2, "older"), (3, "attention 0"), (4, "attention 0")]  # shares 1/2, 1/3, 1/4, 1/5
    for row in found["mass_without_effect"]:
        assert abs(row["delta"]) < 1e-12 and row["mean_weight"] == pytest.approx(1 / (row["site"] + 1))
        assert row in found["sites"]
    with_effect = [row for row in found["sites"] if row["probe"] == "knock_out" and (row["site"], row["source"]) not in listed]
    assert all(abs(row["delta"]) > 1e-6 for row in with_effect if "attention 0" not in row["sources"])
    assert probe(model, some_windows(), boundaries=BOUNDARIES, above=0.6)["mass_without_effect"] == []
    one_document = probe(model, some_windows(), boundaries=np.array([0, 37]), above=0.2)  # no interval, no verdict
    assert one_document["documents"] == 1 and one_document["mass_without_effect"] == []
    assert one_document["sites"][0]["low"] is one_document["sites"][0]["high"] is None


def test_a_knock_out_of_static_mixing_is_a_logit_far_down() -> None:
    model, windows = model_with(StaticMixConfig()), some_windows()
    with torch.no_grad():
        with intervened(model, {(5, "shared"): KnockOut((1, 3)), (6, "shared"): KnockOut((0,))}):
            found = losses(model, windows)
        model.residual.logits["5"][[1, 3]] = -1e5
        model.residual.logits["6"][0] = -1e5
        assert found == pytest.approx(losses(model, windows), abs=1e-12)


@pytest.mark.parametrize("name", ["full", "phases", "separate", "dynamic", "static", "delta"])
def test_uniform_reads_of_queries_that_are_zero_change_nothing(name: str) -> None:
    model = model_with(METHODS[name], scattered=False)
    found = probe(model, some_windows(), boundaries=BOUNDARIES)
    alike = [row for row in found["sites"] + found["families"] if row["probe"] in ("uniform", "frozen")]
    assert alike and all(abs(row["delta"]) < 1e-9 for row in alike)
    assert any(abs(row["delta"]) > 1e-4 for row in found["sites"] if row["probe"] == "knock_out")


def test_freezing_reads_that_depend_on_no_token_changes_nothing() -> None:
    found = probe(model_with(StaticMixConfig(block=2)), some_windows(), boundaries=BOUNDARIES)
    rows = found["sites"] + found["families"]
    assert all(abs(row["delta"]) < 1e-12 for row in rows if row["probe"] == "frozen")
    assert any(abs(row["delta"]) > 1e-4 for row in rows if row["probe"] == "uniform")
    dynamic = probe(model_with(DynamicQueryConfig()), some_windows(), boundaries=BOUNDARIES)
    assert any(abs(row["delta"]) > 1e-4 for row in dynamic["sites"] if row["probe"] == "frozen")


@torch.no_grad()
def test_a_change_of_one_role_leaves_the_other() -> None:
    model = model_with(AttnResConfig(roles="decoupled"))
    tokens = torch.from_numpy(some_windows()[0])[:, :-1]
    seen: dict[int, Bank] = {}
    model(tokens, observe=lambda site, memory: seen.update({site: memory}))
    memory, norm = seen[4], model.layers[2].attention_norm
    untouched = model.residual.read(memory, 4, norm)
    with intervened(model, {(4, "value"): KnockOut((4,))}):
        found = model.residual.read(memory, 4, norm)
        other = model.residual.read(seen[2], 2, model.layers[1].attention_norm)
    assert isinstance(untouched, RoleInputs) and isinstance(found, RoleInputs) and isinstance(other, RoleInputs)
    assert found.query == pytest.approx(untouched.query, abs=1e-12) and found.key is found.query
    assert (found.value - untouched.value).abs().max() > 0.01
    assert torch.equal(other.value, model.residual.read(seen[2], 2, model.layers[1].attention_norm).value)  # type: ignore[union-attr]
    tied = model_with(AttnResConfig(roles="tied"))
    with intervened(tied, {(4, "shared"): Uniform()}):
        one = tied.residual.read(memory, 4, norm)
    assert isinstance(one, RoleInputs) and one.query is one.key is one.value


# --- families -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["phases", "separate", "average", "sigmoid", "delta"])
@torch.no_grad()
def test_a_family_is_the_change_at_all_its_sites_at_once(name: str) -> None:
    model, windows = model_with(METHODS[name]), some_windows()
    found, reads = probe(model, windows, boundaries=BOUNDARIES), reads_of(model)
    untouched = losses(model, windows)
    kinds = {site: "output" if site == 6 else ("attention", "mlp")[site % 2] for site, _ in reads}
    roles = {role for _, role in reads} - {"shared"}
    assert {row["family"] for row in found["families"]} == {"all", *kinds.values(), *roles}
    for row in found["families"]:
        members = {(site, role): weights for (site, role), weights in reads.items() if row["family"] in ("all", kinds[site], role)}
        changes: dict[tuple[int, str], Change] = {}
        masses = []
        for key, weights in members.items():
            if row["probe"] != "knock_out":
                changes[key] = change_of(row, weights, ())
                continue
            places = {"embedding": [0], "newest": [len(weights) - 1], "older": list(range(1, len(weights) - 1))}[row["source"]]
            if places:
                changes[key] = KnockOut(tuple(places))
                masses.append(weights[places].sum(0).mean().item())
        with intervened(model, changes):
            assert row["delta"] == pytest.approx((losses(model, windows) - untouched).mean().item(), abs=1e-11)
        assert row["mean_weight"] == (pytest.approx(np.mean(masses), abs=1e-12) if masses else None)


def test_the_groups_of_a_read_are_all_its_sources_once() -> None:
    found = probe(model_with(AttnResConfig(roles="decoupled")), some_windows(), boundaries=BOUNDARIES)
    reads = {(row["site"], row["role"]) for row in found["sites"]}
    assert len(reads) == 6 + 2  # two sites have two roles
    for site, role in reads:
        here = [row for row in found["sites"] if (row["site"], row["role"]) == (site, role) and row["probe"] == "knock_out"]
        groups = [row for row in here if row["source"] in ("embedding", "newest", "older")]
        assert sorted(name for row in groups for name in row["sources"]) == sorted({name for row in groups for name in row["sources"]})
        assert sum(len(row["sources"]) for row in groups) == site + 1
        assert sum(row["mean_weight"] for row in groups) == pytest.approx(1)
    places = {row["site"]: (row["kind"], row["layer"]) for row in found["sites"]}
    assert places == {1: ("mlp", 0), 2: ("attention", 1), 3: ("mlp", 1), 4: ("attention", 2), 5: ("mlp", 2), 6: ("output", 2)}


def test_older_sources_are_knocked_out_one_by_one_where_they_have_mass_or_when_asked() -> None:
    model, windows = model_with(AttnResConfig()), some_windows()

    def single(**settings: Any) -> dict[tuple[int, str], float]:
        rows = [row for row in probe(model, windows, boundaries=BOUNDARIES, **settings)["sites"] if row["probe"] == "knock_out"]
        return {(row["site"], row["source"]): row["mean_weight"] for row in rows if row["source"] not in ("embedding", "newest", "older")}

    every = single(every_source=True)
    assert len(every) == sum(site - 1 for site in range(3, 7))  # one older source alone is the group
    some = single(above=0.15)
    assert some == {key: mass for key, mass in every.items() if mass >= 0.15} and 0 < len(some) < len(every)
    assert single(above=2.0) == {}


# --- documents and intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 2, 8])
def test_a_target_belongs_to_the_document_that_holds_it(together: int) -> None:
    windows = list(evaluation_windows(np.full(15, 9), 4, sequences=together))  # where documents end, their tokens do not say
    expected = [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    found = document_numbers(windows, np.array([0, 3, 7, 8, 15]))
    assert [part.shape for part in found] == [batch[:, 1:].shape for batch in windows]
    assert np.concatenate([part.ravel() for part in found]).tolist() == expected
    first = document_numbers(windows, np.array([0, 1, 3, 20]))  # a first document of one token has no target
    assert np.concatenate([part.ravel() for part in first]).tolist() == [0, 0, *[1] * 12]
    with pytest.raises(RequestError, match="the windows have 14 targets, and the documents end after 14 tokens"):
        document_numbers(windows, np.array([0, 14]))


def test_the_interval_by_hand() -> None:
    """Three documents of 2, 3 and 5 tokens with sums 1, 3 and 1: the mean is 1/2, the residuals are 0, 3/2 and -3/2."""
    effect = clustered(np.array([1.0, 3.0, 1.0]), np.array([2.0, 3.0, 5.0]))
    quantile = 0.95 * math.sqrt(2 / (1 - 0.95**2))  # t_{0.975, 2} = 4.303, which has a closed form
    half = quantile * math.sqrt(3 / 2 * (0 + 2.25 + 2.25)) / 10
    assert effect == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-12)
    values = np.array([0.3, -0.2, 0.9, 0.4])  # documents of the same length: the plain t interval of their means
    low, high = student.interval(0.95, 3, values.mean(), values.std(ddof=1) / 2)
    assert clustered(values * 7, np.full(4, 7.0)) == pytest.approx((values.mean(), low, high), rel=1e-12)
    assert clustered(np.array([3.0]), np.array([4.0])) == (0.75, None, None)
    with pytest.raises(FailureError, match="not finite"):
        clustered(np.array([1.0, np.nan]), np.array([1.0, 1.0]))


@torch.no_grad()
def test_the_interval_of_a_probe_is_that_of_its_differences_by_document() -> None:
    model, windows = model_with(AttnResConfig()), some_windows()
    row = next(row for row in probe(model, windows, boundaries=BOUNDARIES)["sites"] if row["site"] == 3 and row["probe"] == "uniform")
    untouched = losses(model, windows)
    with intervened(model, {(3, "shared"): Uniform()}):
        difference = (losses(model, windows) - untouched).flatten().numpy()
    ends = [0, *(BOUNDARIES[1:] - 1)]  # the first token is no target
    parts = [difference[start:end] for start, end in pairwise(ends)]
    assert len(parts) == 6
    mean = difference.mean()
    residuals = [part.sum() - mean * len(part) for part in parts]
    half = student.ppf(0.975, 5) * math.sqrt(6 / 5 * sum(r**2 for r in residuals)) / len(difference)
    assert (row["delta"], row["low"], row["high"]) == pytest.approx((mean, mean - half, mean + half), rel=1e-9)


def test_how_windows_are_batched_changes_nothing() -> None:
    model = model_with(AttnResConfig(block=2, roles="decoupled"))
    one, other = (probe(model, some_windows(together=together), boundaries=BOUNDARIES) for together in (1, 6))
    assert one["documents"] == other["documents"] == 6
    for a, b in zip(one["sites"] + one["families"], other["sites"] + other["families"], strict=True):
        assert (a["delta"], a["low"], a["high"]) == pytest.approx((b["delta"], b["low"], b["high"]), abs=1e-11)


# --- the change of weights, and the model afterwards --------------------------------------------------------------------------------


def test_what_changes_do_to_weights() -> None:
    weights = torch.tensor([[0.5, 1.0, 0.2], [0.3, 0.0, 0.2], [0.2, 0.0, 0.2]], dtype=torch.float64)  # a column a token
    out = KnockOut((0,))(weights)
    assert out[:, 0].tolist() == pytest.approx([0, 0.6, 0.4])
    assert out[:, 1].tolist() == [0, 0.5, 0.5]  # the others had nothing to share by
    assert out[:, 2].tolist() == pytest.approx([0, 0.3, 0.3])  # sigmoids keep their sum
    assert torch.equal(KnockOut((2,))(weights)[:, 1], weights[:, 1])
    assert KnockOut((0, 1, 2))(weights) is weights and KnockOut((0,))(weights[:1]).tolist() == weights[:1].tolist()
    assert Uniform()(weights)[:, 2].tolist() == pytest.approx([0.2] * 3) and Uniform()(weights)[:, 0].tolist() == pytest.approx([1 / 3] * 3)
    assert Frozen((0.1, 0.2, 0.7))(weights).T.tolist() == [[0.1, 0.2, 0.7]] * 3
    tiny = torch.tensor([1.0, 1e-45, 0.0])[:, None]  # a quotient of sums would overflow
    assert KnockOut((0,))(tiny).flatten().tolist() == [0, 1, 0]


def test_the_read_comes_back_whatever_happens() -> None:
    model = model_with(AttnResConfig())
    with pytest.raises(KeyError), intervened(model, {(3, "shared"): Uniform()}):
        raise KeyError
    assert "read" not in vars(model.residual)
    with intervened(model, {(3, "shared"): Uniform()}):
        outer = model.residual.read
        with intervened(model, {(4, "shared"): Uniform()}):
            assert model.residual.read is not outer
        assert model.residual.read is outer
    assert "read" not in vars(model.residual)
    model.train()
    with pytest.raises(ZeroDivisionError):
        probe(model, (1 / 0 for _ in range(1)), boundaries=BOUNDARIES)  # type: ignore[misc]
    with torch.no_grad():
        model.layers[2].mlp.down.weight.fill_(torch.nan)
    with pytest.raises(FailureError, match="loss of the untouched model is nan"):
        probe(model, some_windows(), boundaries=BOUNDARIES)
    assert model.training and "read" not in vars(model.residual)


@torch.no_grad()
def test_a_change_of_nothing_is_the_untouched_network_bit_for_bit() -> None:
    model, windows = model_with(AttnResConfig(block=2)), some_windows()
    with intervened(model, {(0, "shared"): KnockOut((0,)), (3, "shared"): KnockOut(())}):  # one source; no source
        found = losses(model, windows)
    assert torch.equal(found, losses(model, windows))


@pytest.mark.parametrize(
    ("residual", "says"),
    [
        (PreNormConfig(), "PreNorm has no weights over sources to change"),
        (AttnResConfig(heads=2), r"residual.heads = 2: reads can be probed .* \(heads = 1\)"),
        (StaticMixConfig(raw=True), "StaticMix has no weights over sources as it is configured"),
    ],
)
def test_methods_that_cannot_be_probed_are_refused(residual: ResidualConfig, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        probe(model_with(residual), some_windows(), boundaries=BOUNDARIES)


def test_a_read_that_is_not_the_mixture_is_refused() -> None:
    model = model_with(StaticMixConfig())
    own = model.residual.read
    model.residual.read = lambda memory, site, norm=None: own(memory, site, norm) * (1.01 if site == 4 else 1)  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="StaticMix reads something else at site 4 than its sources mixed by its weights"):
        probe(model, some_windows(), boundaries=BOUNDARIES)


def test_wrong_requests_are_refused() -> None:
    model = model_with(AttnResConfig(roles="decoupled"))
    with pytest.raises(RequestError, match="there is no site 7; the model has sites 0 to 6"), intervened(model, {(7, "shared"): Uniform()}):
        pass
    unknown = pytest.raises(RequestError, match="site 2: unknown role 'values'; perhaps you meant 'value'")
    with unknown, intervened(model, {(2, "values"): Uniform()}):
        losses(model, some_windows())
    with pytest.raises(RequestError, match="no windows"):
        probe(model, [], boundaries=BOUNDARIES)


@pytest.mark.parametrize("name", ["full", "phases", "static", "delta"])
def test_float32_and_bfloat16_find_the_effects_of_float64(name: str) -> None:
    model, windows = model_with(METHODS[name]), some_windows()
    exact = probe(model, windows, boundaries=BOUNDARIES)["families"]
    assert max(abs(row["delta"]) for row in exact) > 0.2
    model.float()
    for precision, tolerance in (("float32", 1e-5), ("bf16", 0.04)):
        found = probe(model, windows, boundaries=BOUNDARIES, precision=precision)["families"]  # type: ignore[arg-type]
        assert [row["delta"] for row in found] == pytest.approx([row["delta"] for row in exact], abs=tolerance)
