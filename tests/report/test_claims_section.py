"""The claims on the page: what is said of each, what is marked post hoc, and what stands beside a paper's number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.files import read_json, write_json
from depthroute.report.content import compose
from depthroute.report.document import Block, Details, Document, FigureBlock, Note, Paragraph, Section, Table
from depthroute.report.html_page import render_html
from depthroute.report.stored import StoredStudy, read_study
from depthroute.study.equivalence import equivalence

WriteStudy = Callable[..., Path]
Scenarios = dict[str, Callable[..., dict[str, Any]]]
LATE = " (post hoc)"


def flat(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        if isinstance(block, Details):
            yield from flat(block.blocks)
        else:
            yield block


def section(document: Document, anchor: str) -> Section:
    return next(found for found in document.sections if found.anchor == anchor)


def records(document: Document, anchor: str, head: str) -> list[dict[str, str]]:
    """The rows of the first table of a section whose first column has this name."""
    table = next(b for b in flat(section(document, anchor).blocks) if isinstance(b, Table) and b.columns[0] == head)
    return [dict(zip(table.columns, row, strict=True)) for _, rows, _ in table.groups for row in rows]


def words(blocks: Sequence[Block]) -> str:
    texts = [block.text for block in flat(blocks) if isinstance(block, Paragraph | Note)]
    parts = [part for text in texts for part in ([text] if isinstance(text, str) else text)]
    return "".join(part if isinstance(part, str) else part.text for part in parts).replace("\u00a0", " ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_study: WriteStudy, scenarios: Scenarios) -> Path:
    return write_study(tmp_path_factory.mktemp("controls") / "study", **scenarios["controls"]())


@pytest.fixture(scope="module")
def study(folder: Path) -> StoredStudy:
    return read_study(folder)


@pytest.fixture(scope="module")
def document(study: StoredStudy) -> Document:
    return compose(study)


def test_claims_come_right_after_the_lead_with_their_verdicts(document: Document) -> None:
    assert document.sections[0].anchor == "claims"
    table = records(document, "claims", "Claim")
    assert [(row["Claim"], row["Verdict"]) for row in table] == [
        ("RD-AttnRes has a lower loss than Block AttnRes", "supported"),
        ("Block AttnRes has a lower loss than RD-AttnRes", "contradicted"),
        ("Tied routes are Block AttnRes", "supported"),
        ("Averaging changes nothing", "supported"),
        ("RD changes nothing", "contradicted"),
        (f"The later idea lowers the loss{LATE}", "supported"),
    ]
    assert "Of 6 claims, 4 supported, 2 contradicted and 0 undecided." in words(section(document, "claims").blocks)
    assert table[0]["Boundary"] == "this corpus, one size, 400 steps"
    assert table[0]["Paper"].replace("\u00a0", " ") == "\u22120.0210 (\u22120.0300 to \u22120.0120); Role-Decoupled paper, Table 2"


def test_evidence_is_that_of_the_statistics(folder: Path, document: Document) -> None:
    end = read_json(folder / "statistics.json")["comparisons"][0]["milestones"][-1]
    row = records(document, "claims", "Claim")[0]
    assert f"{end['mean']:+.4f}".replace("-", "\u2212") in row["Evidence"]
    assert f"{end['t_interval'][1]:+.4f}".replace("-", "\u2212") in row["Evidence"]
    alone, adjusted = (float(word.strip("()")) for word in row["p (Holm)"].split())
    assert adjusted == pytest.approx(2 * alone, rel=0.01), "two planned claims of one size: Holm doubles the first"


def test_what_came_after_the_plan_is_marked_wherever_it_stands(document: Document) -> None:
    page = render_html(document)
    assert page.count(LATE.strip()) > 10
    for row in records(document, "results", "Comparison"):
        assert (row["Standing"] == "post hoc") == ("A later idea" in row["Comparison"])
        assert ("A later idea" in row["Comparison"]) == (LATE in row["Comparison"])
    standing = [row["Standing"] for row in records(document, "results", "Comparison")]
    assert standing == ["claim", "no claim", "claim", "claim", "claim", "post hoc", "post hoc"]
    tables = [b for s in document.sections for b in flat(s.blocks) if isinstance(b, Table)]
    cells = [cell for table in tables for _, rows, _ in table.groups for row in rows for cell in row if "A later idea" in cell]
    assert len(cells) > 8 and all(LATE in cell for cell in cells)
    figures = [b for s in document.sections for b in flat(s.blocks) if isinstance(b, FigureBlock)]
    drawn = [panel.description for figure in figures for panel in figure.panels if "A later idea" in panel.description]
    assert drawn and all(LATE in description for description in drawn)


def test_a_comparison_of_planned_arms_that_came_later_is_marked_too(tmp_path: Path, write_study: WriteStudy) -> None:
    study = read_study(write_study(tmp_path, extensions=[{"comparisons": [["rd", "prenorm"]], "seeds": [2]}]))
    assert [c.name for c in study.comparisons] == [
        "RD-AttnRes against Block AttnRes", "Block AttnRes against PreNorm", f"RD-AttnRes against PreNorm{LATE}",
    ]  # fmt: skip
    assert [study.seed_name(seed) for seed in study.seeds] == ["0", "1", f"2{LATE}"]


def test_the_limits_say_what_is_adjusted(document: Document, tmp_path: Path, write_study: WriteStudy) -> None:
    limits = str(section(document, "limits").blocks).replace("\\xa0", " ")
    assert "those of the 2 planned claims that a loss is lower over these and those of 1 later claim of that kind over all 3" in limits
    assert "(equivalent, identical) are decided one by one" in limits
    assert "1 arm, 2 comparisons and 1 claim came after the plan, when up to 9 runs had a result" in limits
    plain = compose(read_study(write_study(tmp_path, seeds=(0, 1))))
    assert "no correction for that is applied" in str(section(plain, "limits").blocks)
    assert "claims" not in [found.anchor for found in plain.sections]


def test_controls_show_margin_and_interval(study: StoredStudy, document: Document) -> None:
    figure = next(b for b in section(document, "claims").blocks if isinstance(b, FigureBlock))
    (panel,) = figure.panels
    assert panel.data is not None
    head, *rows = panel.data
    assert [(row[0], row[5], row[6]) for row in rows] == [("average", 0.02, "supported"), ("rd", 0.004, "contradicted")]
    for arm, parent, mean, low, high, margin, _ in rows:
        end = next(c.endpoint for c in study.comparisons if (c.arm.name, c.parent.name) == (arm, parent))
        assert end is not None
        expected = equivalence(end["differences"], margin)
        assert (mean, low, high) == pytest.approx((expected.mean, *expected.interval))
    assert head[0] == "arm" and f"RD-AttnRes against Block AttnRes: {rows[1][2]:+.4f}".replace("-0", "\u22120") in panel.description


def test_a_papers_numbers_stand_beside_ours_only_where_they_are_given(document: Document) -> None:
    losses = records(document, "papers", "Arm")
    assert [(row["Arm"], row["Paper"]) for row in losses] == [("Block AttnRes", "2.9510"), ("RD-AttnRes", "2.9300")]
    gaps = records(document, "papers", "Comparison")
    assert [(row["Comparison"], row["Paper"].replace("\u00a0", " ")) for row in gaps] == [
        ("RD-AttnRes against Block AttnRes", "\u22120.0210 (\u22120.0300 to \u22120.0120)"),
        ("Block AttnRes against RD-AttnRes", "+0.0210"),  # the claim names no number, both arms do
    ]


def test_claims_without_statistics_are_undecided(tmp_path: Path, write_study: WriteStudy, scenarios: Scenarios) -> None:
    folder = write_study(tmp_path, **scenarios["controls"]() | {"documents": 0, "splits": {}, "seeds": (0,)})
    (folder / "statistics.json").unlink()
    claims = read_study(folder).claims
    assert [claim["verdict"] for claim in claims] == ["undecided"] * 6 and [claim["post_hoc"] for claim in claims] == [False] * 5 + [True]


def test_the_text_of_a_claim_is_never_run(folder: Path, tmp_path: Path) -> None:
    attack = "<script>alert(1)</script> | & *x*"
    statistics = read_json(folder / "statistics.json")
    plan = read_json(folder / "plan.json")
    for name, value in (("plan.json", plan), ("statistics.json", statistics)):
        value["claims"] = [claim | {"text": attack, "boundary": attack} for claim in value["claims"][:1]]
        value["extensions"] = []
        write_json(tmp_path / name, value)
    page = render_html(compose(read_study(tmp_path)))
    assert "<script" not in page
    shown = page.count("&lt;script&gt;alert(1)&lt;/script&gt; | &amp; *x*")
    assert shown == 3, "claim and boundary in the table, and the claim in the lead"
