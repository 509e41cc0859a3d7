"""The figures that a plan's factors, scales and splits ask for: their numbers are those of the study."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from depthroute.common.files import read_json
from depthroute.report import noise, trajectories
from depthroute.report.cost_plots import bought, cost_figure, fronts
from depthroute.report.document import Block, Details, FigureBlock, Panel, Paragraph, Table
from depthroute.report.effect_view import _common, _mixed, crossings, effect_blocks
from depthroute.report.featured import PANELS, featured_arms, featured_cells, featured_comparisons
from depthroute.report.gradient_plots import gradient_figure
from depthroute.report.outcome_plots import endpoints_figure, simultaneous_band
from depthroute.report.scale_view import groups, scale_blocks
from depthroute.report.scaling_plots import methods, scaling_blocks, without_scale
from depthroute.report.split_plots import split_blocks, split_gap
from depthroute.report.stored import CURVES, StoredStudy, mentioned, read_study
from depthroute.report.sweep_plots import grids, sweep_blocks
from depthroute.report.theme import ARM_COLORS, arm_color
from depthroute.report.watch_feed import _described
from depthroute.study.clusters import cluster_bootstrap
from depthroute.study.grid import Cell, Run, best_cells
from depthroute.study.scales import across_scales

WriteStudy = Callable[..., Path]
Scenarios = dict[str, Callable[..., dict[str, Any]]]
SCENARIOS = ("controls", "sweep", "scales", "crossed")


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory, write_study: WriteStudy, scenarios: Scenarios) -> dict[str, StoredStudy]:
    folder = tmp_path_factory.mktemp("studies")
    return {name: read_study(write_study(folder / name, **scenarios[name]())) for name in SCENARIOS}


def flat(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        if isinstance(block, Details):
            yield from flat(block.blocks)
        else:
            yield block


def panels(blocks: Sequence[Block]) -> dict[str, Panel]:
    return {panel.name: panel for block in flat(blocks) if isinstance(block, FigureBlock) for panel in block.panels}


def records(panel: Panel) -> list[dict[str, Any]]:
    assert panel.data is not None
    head, *rows = panel.data
    return [dict(zip(head, row, strict=True)) for row in rows]


def rows(blocks: Sequence[Block], number: int = 0) -> list[list[str]]:
    table = [block for block in flat(blocks) if isinstance(block, Table)][number]
    return [list(row) for _, body, closing in table.groups for row in (*body, *closing)]


def test_a_sweep_is_one_heat_map_for_each_setting_of_the_rest(studies: dict[str, StoredStudy]) -> None:
    study = studies["sweep"]
    first, second = grids(study)
    assert (first.title, second.title) == ("keys: slice", "keys: projected")
    assert (first.axes, first.levels) == (("rank", "blocks"), ([12, 24, 48, 96], [2, 4, 8, 16])) and len(second.arms) == 4
    assert grids(studies["scales"]) == [] and sweep_blocks(studies["controls"]) == []
    drawn = records(panels(sweep_blocks(study))["sweep-0"])
    for row in drawn:
        losses = [cell.nll for cell in study.complete(first.arms[row["rank"], row["blocks"]])]
        assert row["mean_nll"] == pytest.approx(sum(losses) / len(losses)) and row["seeds"] == len(losses)
    assert [(row["rank"], row["blocks"]) for row in drawn if row["best"]] == [(24, 8)]
    runs = [
        Run(cell=Cell(rank=rank, blocks=blocks), seed=cell.seed, loss=float(cell.nll or 0))
        for (rank, blocks), arm in first.arms.items() for cell in study.complete(arm)
    ]  # fmt: skip
    expected = {(c.cell.rank, c.cell.blocks) for c in best_cells(runs).cells if c.contender}
    assert 1 < len(expected) < 16 and {(row["rank"], row["blocks"]) for row in drawn if row["contender"]} == expected


def test_the_surface_of_a_sweep_is_told_where_it_can_be_fitted(studies: dict[str, StoredStudy]) -> None:
    notes = [block.text for block in sweep_blocks(studies["sweep"]) if isinstance(block, Paragraph)]
    assert len(notes) == 1, "four cells of projected keys hold no quadratic"
    assert notes[0].startswith("keys: slice. A quadratic in the logarithms of rank and blocks is lowest inside the grid, at rank 24")
    assert "lack of fit, p" in notes[0]


def test_methods_over_two_factors_are_an_architecture_map(tmp_path: Path, write_study: WriteStudy) -> None:
    arms, details = {}, {}
    for method in ("prenorm", "rd"):
        for layers in (4, 8):
            for width in ("narrow", "wide", "wider"):
                name = f"{method}-{layers}-{width}"
                arms[name] = (name, {"method": "prenorm"}, -0.01 * layers - 0.02 * (method == "rd") - 0.001 * len(width))
                details[name] = {"factors": {"method": method, "width": width, "layers": layers}}
    pairs = [(f"rd-{layers}-{width}", f"prenorm-{layers}-{width}") for layers in (4, 8) for width in ("narrow", "wide", "wider")]
    study = read_study(write_study(tmp_path, arms=arms, details=details, comparisons=pairs, seeds=(0, 1)))
    assert [(grid.title, grid.axes, grid.levels) for grid in grids(study)] == [
        (method, ("width", "layers"), (["narrow", "wide", "wider"], [4, 8])) for method in ("prenorm", "rd")
    ]  # fmt: skip
    drawn = panels(sweep_blocks(study))
    assert [[(r["width"], r["layers"]) for r in records(panel) if r["best"]] for panel in drawn.values()] == [[("narrow", 8)]] * 2
    assert not [block for block in sweep_blocks(study) if isinstance(block, Paragraph)], "names of levels have no logarithm"


def test_added_flops_compare_with_the_end_of_the_chain_of_parents(studies: dict[str, StoredStudy]) -> None:
    study = studies["controls"]
    found = {b.arm.name: b for b in bought(study)}
    assert set(found) == {"block", "rd", "tied", "average", "late"} and all(b.root.name == "prenorm" for b in found.values())
    assert found["rd"].added == pytest.approx(2e5 / 6e6)
    losses = {arm.name: [cell.nll or 0.0 for cell in study.complete(arm)] for arm in study.arms}
    differences = [a - p for a, p in zip(losses["rd"], losses["prenorm"], strict=True)]
    assert found["rd"].difference == pytest.approx(sum(differences) / 4)
    low, high = stats.t.interval(0.95, 3, loc=sum(differences) / 4, scale=stats.sem(differences))
    assert found["rd"].interval == pytest.approx((low, high))
    assert [b.arm.name for line in fronts(list(found.values())) for b in line] == ["block", "rd"]
    figure = cost_figure(study)
    assert figure is not None
    assert {r["arm"]: r["added_flops_fraction"] for r in records(figure.panels[0])}["late"] == pytest.approx(5e5 / 6e6)


def test_scaling_curves_are_the_fitted_laws(studies: dict[str, StoredStudy]) -> None:
    study = studies["scales"]
    found = methods(study)
    assert [method.label for method in found] == ["PreNorm", "Block AttnRes", "RD-AttnRes"]
    data = records(panels(scaling_blocks(study))["scaling"])
    losses = [row for row in data if row["method"] == "rd" and row["quantity"] == "loss"]
    assert len(losses) == 12 and losses[0]["flops"] == pytest.approx(1e6 * 1.03 * 400 * 2048)
    x, y = ([math.log(row[key]) for row in losses] for key in ("flops", "value"))
    slope = stats.linregress(x, y).slope
    table = rows(scaling_blocks(study))
    assert float(table[2][2]) == pytest.approx(-slope, abs=1e-4)
    for row in (row for row in data if row["method"] == "rd" and row["quantity"] == "law"):
        assert math.log(row["value"]) == pytest.approx(stats.linregress(x, y).intercept + slope * math.log(row["flops"]))
    advantages = rows(scaling_blocks(study), 1)
    statement = next(claim for claim in study.claims if claim["kind"] == "saves")
    assert advantages[1][0] == "RD-AttnRes" and float(advantages[1][1]) == pytest.approx(statement["evidence"]["factor"], abs=1e-3)
    assert [claim["verdict"] for claim in study.claims] == ["supported", "contradicted"]
    assert scaling_blocks(studies["controls"]) == []


def test_the_view_over_scales_is_that_of_the_statistics(studies: dict[str, StoredStudy]) -> None:
    study = studies["scales"]
    found = groups(study)
    assert [group.name for group in found] == [
        "RD-AttnRes against Block AttnRes", "Block AttnRes against PreNorm", "RD-AttnRes against PreNorm",
    ]  # fmt: skip
    ends = {c.arm.scale: c.endpoint for c in study.comparisons if (c.arm.name[:2], c.parent.name[:2]) == ("rd", "bl")}
    expected = across_scales({scale: end["differences"] for scale, end in ends.items() if end is not None}, None)
    table = rows(scale_blocks(study, 4))
    assert [row[0] for row in table[:8]] == [
        "XS", "S", "M", "L", "Mean of scales", "Per doubling of parameters", "Another scale (prediction)", "Same gap at all, p",
    ]  # fmt: skip
    assert table[4][3] == f"{expected.mean.value:+.4f}".replace("-", "\u2212")
    assert expected.equal_gaps is not None and float(table[7][3]) == pytest.approx(expected.equal_gaps.p, rel=0.01)
    drawn = records(panels(scale_blocks(study, 4))["scales-0"])
    means = [row["nats"] for row in drawn if row["quantity"] == "mean"]
    assert means == pytest.approx([*(gap.mean for gap in expected.scales), expected.mean.value])
    assert scale_blocks(studies["controls"], 4) == []


@pytest.mark.parametrize(
    ("label", "scale", "expected"),
    [("RD, S", "S", "RD"), ("RD (S)", "S", "RD"), ("RD at S", "S", "RD"), ("BOSS", "S", "BOSS"), ("RD", "", "RD")],
)
def test_a_label_loses_its_scale(label: str, scale: str, expected: str) -> None:
    assert without_scale(label, scale) == expected


def test_gaps_and_accuracies_by_split(studies: dict[str, StoredStudy]) -> None:
    study = studies["controls"]
    blocks = split_blocks(study, 10)
    data = records(panels(blocks)["splits-2-1"])
    for split in ("validation", "1 hop", "2 hops"):
        ends = {
            name: [next(e["nll"] for e in reversed(cell.evaluations) if e["split"] == split) for cell in study.complete(study.arms[name])]
            for name in (1, 2)
        }
        differences = [a - p for a, p in zip(ends[2], ends[1], strict=True)]
        assert [row["nats"] for row in data if row["split"] == split and row["quantity"] == "difference"] == differences
        low, high = stats.t.interval(0.95, 3, loc=sum(differences) / 4, scale=stats.sem(differences))
        bounds = [row["nats"] for row in data if row["split"] == split and row["quantity"] in ("t_low", "t_high")]
        assert bounds == pytest.approx([low, high])
    accuracy = rows(blocks, 1)
    right = [100 * (0.5 * math.exp(0.105 * 0.5) + 0.001 * seed) for seed in range(4)]
    assert accuracy[2][:2] == ["RD-AttnRes", f"{statistics.mean(right):.2f}\u00a0({statistics.stdev(right):.2f})\u00a0%"]
    assert split_blocks(studies["sweep"], 4) == [] and split_gap(study, study.comparisons[0], "3 hops") is None


def test_seeds_and_documents_are_two_errors(studies: dict[str, StoredStudy]) -> None:
    study = studies["controls"]
    first = study.comparisons[0]
    found = dict(zip([c.name for c, _ in noise.noises(study)], [n for _, n in noise.noises(study)], strict=True))
    assert len(found) == 7 and first.endpoint is not None
    one = found[first.name]
    assert one.mean == pytest.approx(first.endpoint["mean"]) and one.documents == 60
    assert one.seed_error == pytest.approx(first.endpoint["sd"] / 2)
    kept = {arm: [found for seed in range(4) if (found := study.cells[arm, seed].documents())] for arm in ("rd", "block")}
    counts = kept["rd"][0][1]
    sums = [[a - p for a, p in zip(ours[0], theirs[0], strict=True)] for ours, theirs in zip(kept["rd"], kept["block"], strict=True)]
    assert one.document_error == pytest.approx(cluster_bootstrap([sum(column) / 4 for column in zip(*sums, strict=True)], counts).error)
    assert noise.blocks(studies["sweep"], 4) == []
    table = rows(noise.blocks(study, 10))
    assert table[0][3:5] == [f"{one.seed_error:.4f}", f"{one.document_error:.4f}"]


def test_broken_documents_are_one_sentence(tmp_path: Path, write_study: WriteStudy) -> None:
    from depthroute.common.errors import FailureError

    folder = write_study(tmp_path, seeds=(0, 1), documents=5)
    (folder / "runs" / "rd" / "seed-0" / "documents.npz").write_bytes(b"not an archive")
    with pytest.raises(FailureError, match=r"documents\.npz is broken .*; evaluate the run again"):
        noise.noises(read_study(folder))


def test_whether_a_gap_closes(studies: dict[str, StoredStudy]) -> None:
    study = studies["controls"]
    path = trajectories.followed(study.comparisons[0])
    assert path is not None and path.trend is not None and len(path.points) == 8
    table = rows(trajectories.blocks(study, 10))
    assert table[0][1] == "widens" and table[2][1] == "none", "two equal arms have no gap that could close"
    low, high = simultaneous_band(study.comparisons[0])
    end = study.comparisons[0].endpoint
    assert end is not None
    half = float(stats.t.ppf(1 - 0.05 / 16, 3)) * end["sd"] / 2
    assert (low[-1], high[-1]) == ((400, pytest.approx(end["mean"] - half)), (400, pytest.approx(end["mean"] + half)))


def test_gradient_norms_are_means_over_seeds(studies: dict[str, StoredStudy]) -> None:
    study = studies["controls"]
    figure = gradient_figure(study)
    assert figure is not None and "Gradients above 1 (dashed)" in figure.caption
    last = [row for row in records(figure.panels[0]) if row["arm"] == "rd"][-1]
    norms = [[line["gradient_norm"] for line in cell.metrics[-8:]] for cell in study.complete(study.arms[2])]
    assert last["step"] == 400 and last["gradient_norm"] == pytest.approx(sum(map(sum, norms)) / 32)


def test_a_large_study_features_what_decides(tmp_path: Path, write_study: WriteStudy, scenarios: Scenarios) -> None:
    given = scenarios["large"](20) | {"documents": 0, "seeds": (0,), "routed": False}
    last = {"text": "The last one is better", "kind": "lower", "arm": "arm-19", "parent": "prenorm"}
    study = read_study(write_study(tmp_path, **given, claims=[last]))
    arms = [arm.name for arm in featured_arms(study)]
    assert len(arms) == CURVES and {"prenorm", "arm-1", "arm-19"} <= set(arms)
    assert len({arm_color(arm.index) for arm in featured_arms(study)}) == CURVES, "what is drawn together shares no colour"
    assert sorted(arm.index for arm in study.arms) == list(range(20))
    compared = [c.arm.name for c in featured_comparisons(study)]
    assert len(compared) == PANELS and compared[0] == "arm-1" and compared[-1] == "arm-19"


def test_no_arm_is_drawn_without_the_one_it_is_compared_with() -> None:
    names = [f"{arm}-{scale}" for scale in "sm" for arm in ("prenorm", "block", "rd", "tied")]
    pairs = [("rd-s", "block-s"), ("tied-s", "block-s"), ("rd-m", "block-m"), ("block-s", "prenorm-s")]
    plan = {"claims": [], "comparisons": pairs, "arms": [{"name": name} for name in names]}
    assert mentioned(plan, 4) == ["rd-s", "block-s", "tied-s", "prenorm-s"]  # rd-m would be alone
    assert mentioned(plan, 5) == ["rd-s", "block-s", "tied-s", "rd-m", "block-m"]
    assert set(mentioned(plan, 8)) == set(names)


def test_the_live_page_has_the_report_s_colours_in_a_large_study(tmp_path: Path, write_study: WriteStudy, scenarios: Scenarios) -> None:
    given = scenarios["large"](20) | {"documents": 0, "seeds": (0,), "routed": False}
    last = {"text": "The last one is better", "kind": "lower", "arm": "arm-19", "parent": "prenorm"}
    study = read_study(write_study(tmp_path, **given, claims=[last]))
    live = {arm["name"]: arm["color"] for arm in _described(study.plan)["arms"]}
    assert live == {arm.name: f"var(--arm-{arm.index % ARM_COLORS})" for arm in study.arms}
    by_place = {arm["name"]: f"var(--arm-{place % ARM_COLORS})" for place, arm in enumerate(study.plan["arms"])}
    assert live != by_place, "an arm's place in the plan is not its colour"


def test_lines_of_endpoints_stay_within_a_scale(studies: dict[str, StoredStudy]) -> None:
    figure = endpoints_figure(studies["scales"])
    assert figure is not None and "joins the same seed across the arms of one scale" in figure.caption
    plain = endpoints_figure(studies["controls"])
    assert plain is not None and "joins the same seed across arms," in plain.caption


def test_a_fraction_of_a_design_says_so(studies: dict[str, StoredStudy]) -> None:
    (crossing,) = crossings(studies["crossed"])
    assert crossing.combinations == 4 and "Every combination of levels was run" in _mixed([crossing])
    assert "2 of the 4 combinations" in _mixed([dataclasses.replace(crossing, combinations=2)])


def test_compute_of_the_statistics_reaches_the_arms(studies: dict[str, StoredStudy]) -> None:
    study = studies["controls"]
    assert [(arm.plain, arm.residual) for arm in study.arms[:2]] == [(6e6, 0.0), (6e6, 1e5)]
    assert read_json(study.cells["rd", 0].folder / "config.json")["model"]["layers"] == 8  # type: ignore[operator]


def test_a_crossed_study_says_what_each_factor_does_to_the_gap(studies: dict[str, StoredStudy]) -> None:
    study = studies["crossed"]
    assert _common(["RD, routes x 1", "RD, routes x 8"]) == "RD" and _common(["LR, r = d/4"] * 2) == "LR, r = d/4"
    (crossing,) = crossings(study)
    assert crossing.name == "Block AttnRes against PreNorm"
    gaps = {c.arm.scale: statistics.mean(c.endpoint["differences"]) for c in study.comparisons if c.endpoint}
    expected = {
        "learning_rate": (gaps["hl"] + gaps["hh"] - gaps["ll"] - gaps["lh"]) / 2,
        "steps": (gaps["lh"] + gaps["hh"] - gaps["ll"] - gaps["hl"]) / 2,
    }
    drawn = records(panels(effect_blocks(study))["effects-0"])
    assert [line["factor"] for line in drawn] == list(expected)
    for line in drawn:
        assert line["effect"] == pytest.approx(expected[line["factor"]])
        assert line["t_low"] < line["effect"] < line["t_high"]
    assert drawn[0]["effect"] == pytest.approx(-0.04, abs=0.01) and abs(drawn[1]["effect"]) < 0.01
    assert rows(effect_blocks(study))[0][:2] == ["learning_rate", "0.001 to 0.003"]
    # Conditions are no sizes: nothing is fitted over them, and a study of sizes has no factors to tell apart.
    assert methods(study) == [] and effect_blocks(studies["scales"]) == [] and effect_blocks(studies["sweep"]) == []


def test_curves_of_arms_with_fewer_seeds_are_means_over_the_seeds_that_all_have(write_study: WriteStudy, tmp_path: Path) -> None:
    """An arm that has the lucky seeds only would stand below the others."""
    folder = write_study(tmp_path, seeds=(0, 1, 2), details={"rd": {"seeds": [1, 2]}})
    study = read_study(folder)
    cells, words = featured_cells(study)
    assert words == "the 2 seeds that all of them have" and {cell.seed for _, done in cells for cell in done} == {1, 2}
    figure = gradient_figure(study)
    assert figure is not None and words in figure.caption
    whole, words = featured_cells(read_study(write_study(tmp_path / "whole", seeds=(0, 1, 2))))
    assert words == "the complete seeds" and all(len(done) == 3 for _, done in whole)
    begun = read_study(write_study(tmp_path / "begun", seeds=(0, 1), unfinished={("rd", 0): 0, ("block", 1): 0}))
    assert featured_cells(begun)[1] == "the complete seeds"
