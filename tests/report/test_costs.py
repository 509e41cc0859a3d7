"""Cost beside quality: differences, what is not matched in size, and the learning rates that were tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from depthroute.common.files import read_json, write_json
from depthroute.report import write_report
from depthroute.report.content import compose
from depthroute.report.document import Bullets, Details, Paragraph, Section, Table
from depthroute.report.stored import read_study

WriteStudy = Callable[..., Path]


def cost_section(study: Path) -> Section:
    return next(section for section in compose(read_study(study)).sections if section.heading == "Cost beside quality")


def change(study: Path, arm: str, **changes: Any) -> None:
    for path in (study / "runs" / arm).glob("seed-*/result.json"):
        write_json(path, read_json(path) | changes)


def at_rate(study: Path, arm: str, rate: float) -> None:
    plan = read_json(study / "plan.json")
    for entry in plan["arms"]:
        if entry["name"] == arm:
            entry["config"]["train"]["learning_rate"] = rate
    write_json(study / "plan.json", plan)


def test_the_difference_stands_beside_the_cost(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, comparisons=[("block", "prenorm")])
    (_, rows, _), = cost_section(study).blocks[0].groups
    by_arm = {row[0]: row for row in rows}
    ends = read_json(study / "statistics.json")["comparisons"][0]["milestones"][-1]
    assert by_arm["Block AttnRes"][3] == f"{ends['mean']:+.4f}".replace("-", "\u2212")
    assert by_arm["PreNorm"][3] == by_arm["PreNorm"][1]
    added, of_all = by_arm["Block AttnRes"][5:7]
    assert (added, of_all) == ("4,896", f"+{100 * 4_896 / 1_093_248:.2f}\u00a0%")


def test_arms_of_another_size_are_named(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, comparisons=[("block", "prenorm"), ("rd", "prenorm")])
    assert not any(isinstance(block, Bullets) for block in cost_section(study).blocks)
    change(study, "rd", parameters={"total": 1_200_000, "residual": 111_648})
    change(study, "block", parameters={"total": 1_000_000, "residual": 0})
    _, words, bullets = cost_section(study).blocks
    assert isinstance(words, Paragraph) and isinstance(bullets, Bullets) and "Not matched in size" in str(words)
    text = str(bullets)
    assert "RD-AttnRes has 10.8\\xa0% more parameters than PreNorm" in text
    assert "Block AttnRes has" in text and "fewer parameters than PreNorm" in text


def test_the_same_arm_at_other_rates_is_a_row(tmp_path: Path, write_study: WriteStudy) -> None:
    """Arms that differ in the rate alone stand in one row, with the rate of the lowest loss."""
    same = {"method": "attnres", "block": 4, "roles": "shared"}
    arms = {
        "prenorm": ("PreNorm", {"method": "prenorm"}, 0.0),
        "block": ("Block AttnRes", same, -0.08),
        "block-half-rate": ("Block AttnRes, half rate", same, -0.12),
        "block-double-rate": ("Block AttnRes, double rate", same, 0.3),
    }
    pairs = [("block", "prenorm"), ("block-half-rate", "block"), ("block-double-rate", "block")]
    study = write_study(tmp_path, arms=arms, comparisons=pairs)
    assert not any(isinstance(block, Table) and "by learning rate" in str(block.caption) for block in cost_section(study).blocks)
    at_rate(study, "block-half-rate", 5e-4)
    at_rate(study, "block-double-rate", 2e-3)
    table = cost_section(study).blocks[-1]
    assert isinstance(table, Table) and table.columns == ["Arm", "0.0005", "0.001", "0.002", "lowest at"]
    ((_, rows, _),) = table.groups
    assert [row[0] for row in rows] == ["Block AttnRes"] and rows[0][-1] == "0.0005"
    lowest, shared, highest = (float(cell) for cell in rows[0][1:4])
    assert lowest < shared < highest


def test_what_would_hide_the_rest_is_folded_away_in_a_large_study(tmp_path: Path, write_study: WriteStudy) -> None:
    """Every figure is still there, and a file of its own for the Markdown."""
    arms = {"prenorm": ("PreNorm", {"method": "prenorm"}, 0.0)}
    arms |= {f"block-{n}": (f"Block {n}", {"method": "attnres", "block": 4, "roles": "shared"}, -0.01 * n) for n in range(1, 7)}
    study = write_study(tmp_path, arms=arms, comparisons=[(name, "prenorm") for name in arms if name != "prenorm"])
    folded = [block for section in compose(read_study(study)).sections for block in section.blocks if isinstance(block, Details)]
    assert {block.summary for block in folded} >= {"Every difference over training", "Every arm, site by site"}
    write_report(study)
    page, text = ((study / "report" / name).read_text(encoding="utf-8") for name in ("index.html", "report.md"))
    drawings = {path.name for path in (study / "report").glob("*.svg")}
    assert len(drawings) == page.count("<svg") and all(name in text for name in drawings)
    assert len(drawings) >= 6 + 6 + 2  # heat maps, gaps, endpoints
