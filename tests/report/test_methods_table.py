"""The table of methods in the documentation is that of the registry, and every method has a measured step in it."""

from __future__ import annotations

from pathlib import Path

from depthroute.report.methods import COLUMNS, COSTS, details, markdown, row, show
from depthroute.residual import FAMILY, SPECIFICATIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def between(name: str) -> list[str]:
    return PAGE.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip().splitlines()


def test_the_documented_table_is_the_registry() -> None:
    assert between("methods") == markdown(SPECIFICATIONS.values(), COLUMNS).strip().splitlines()


def test_every_method_has_a_measured_step_within_the_limit() -> None:
    expected = markdown(SPECIFICATIONS.values(), COSTS).strip().splitlines()
    found = between("costs")
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start.rstrip("|").rstrip()), line
    ratios = [float(line.rstrip(" |").rpartition("| ")[2]) for line in found[2:]]
    assert len(ratios) == len(SPECIFICATIONS) and all(0.5 < ratio <= 3 for ratio in ratios)


def test_the_readme_names_every_method() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Methods")[1].split("## Commands")[0]
    assert f"{len(SPECIFICATIONS)} ways" in section
    for name in SPECIFICATIONS:
        assert f"`{name}" in section, name
    assert all(f"| {family} |" in section for family in set(FAMILY.values()))


def test_a_row_of_text_holds_every_column() -> None:
    text = show([SPECIFICATIONS["block"]], width=300)
    assert all(row(SPECIFICATIONS["block"])[name] in text for name in COLUMNS)
    assert max(map(len, show(SPECIFICATIONS.values(), width=120).splitlines())) <= 120


def test_details_are_those_of_the_configuration() -> None:
    text = details(SPECIFICATIONS["window"])
    assert "window = 8" in text and "`window`: how many sources a site sees" in text and "`heads`" in text
