"""What a report says about a stored study, and that it says it of every study that can be stored."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, write_json
from depthroute.report import write_report
from depthroute.report.findings import _seed_limit

WriteStudy = Callable[..., Path]
SECTIONS = ("verdict", "setup", "results", "curves", "routing", "cost", "limits", "reproduction")
ATTACK = '<script>alert(1)</script> & "R" | *x* $a_b$'


class Reader(HTMLParser):
    """The tags with their attributes, and the text that a reader sees, style sheets left out."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words)).replace("\u00a0", " ")

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(study: Path) -> Reader:
    return Reader(write_report(study).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, write_study: WriteStudy) -> Path:
    study = write_study(tmp_path_factory.mktemp("full"))
    write_report(study)
    return study


@pytest.fixture(scope="module")
def page(full: Path) -> Reader:
    return Reader((full / "report" / "index.html").read_text(encoding="utf-8"))


def test_every_section_and_every_figure_is_there(page: Reader) -> None:
    anchors = [attributes.get("id") for attributes in page.find("section")]
    assert anchors == list(SECTIONS)
    panels = {attributes["id"] for attributes in page.find("div") if (attributes.get("class") or "").startswith("panel")}
    assert panels == {
        "endpoints", "differences", "gap-2-1", "gap-1-0", "gap-2-0",
        "training-whole", "training-late", "validation-whole", "validation-late",
        "routing-1-shared", "routing-2-query-key", "routing-2-value", "routing-2-shared", "divergence", "gradient-norms",
    }  # fmt: skip


def test_figures_are_described_and_captioned(page: Reader) -> None:
    drawings = page.find("svg")
    assert len(drawings) == 15
    assert all(d["role"] == "img" and len(d["aria-label"] or "") > 40 for d in drawings)
    assert len(page.find("figcaption")) == len(page.find("figure"))


def test_the_verdict_is_what_the_statistics_say(full: Path, page: Reader) -> None:
    end = read_json(full / "statistics.json")["comparisons"][0]["milestones"][-1]
    low, high = end["t_interval"]
    assert high < 0, "the synthetic study is made so that the arm wins"
    assert f"RD-AttnRes is {-end['mean']:.4f} nats lower than that of Block AttnRes" in page.text
    assert f"95 % t interval of the difference \u2212{-low:.4f} to \u2212{-high:.4f}" in page.text
    assert "It is lower in 3 of 3 seeds. The interval excludes zero : here, RD-AttnRes is better than Block AttnRes." in page.text


@pytest.mark.parametrize(
    ("arm", "parent", "words"),
    [
        ("block", "rd", "The interval excludes zero : here, Block AttnRes is worse than RD-AttnRes."),
        ("rd", "twin", "The interval includes zero: this study cannot tell the two apart."),
    ],
)
def test_a_loss_and_a_draw_are_called_what_they_are(tmp_path: Path, write_study: WriteStudy, arm: str, parent: str, words: str) -> None:
    routed = {"method": "attnres", "block": 4, "roles": "decoupled"}
    arms = {
        "block": ("Block AttnRes", {"method": "attnres", "block": 4, "roles": "shared"}, -0.081),
        "rd": ("RD-AttnRes", routed, -0.098),
        "twin": ("Twin", routed | {"first_read": True}, -0.0981),
    }
    assert words in page_of(write_study(tmp_path, arms=arms, comparisons=[(arm, parent)])).text


def test_the_setting_is_told_from_the_manifest_and_the_configurations(page: Reader) -> None:
    for words in (
        "docstrings; train: 3,521 documents, 6,212,345 tokens, 21.0 MB",
        "2,048 entries; unigram entropy 6.3312 nats per token",
        "8 layers, width 96, 6 heads, MLP width 256, context 128, tied embeddings",
        "400 steps of 16 sequences of 128 tokens, 819,200 tokens",
        "AdamW, peak learning rate 0.001, betas 0.9 and 0.95", "Example CPU @ 2.40GHz, 2 threads, torch 2.13.0",
        "written 2025-06-01 09:30:00 UTC, before the first step", "verified",
    ):  # fmt: skip
        assert words in page.text


def test_limits_are_computed(page: Reader) -> None:
    assert "With 3 seeds the exact sign-flip test cannot go below p = 0.25, so that it can never reach 0.05 here." in page.text
    assert "Models of up to 1.09 million parameters, trained on 819,200 tokens (0.13 passes over the training split)" in page.text
    assert "Validation averages over 262,144 tokens" in page.text


def test_limits_of_comparisons_with_unlike_numbers_of_seeds() -> None:
    assert _seed_limit([1, 1]) == "One seed: no interval can be formed, and no statement about other seeds follows."
    mixed = _seed_limit([6, 3, 1, 1])
    assert "With one seed, as 2 of 4 comparisons have, no interval can be formed" in mixed
    assert "With 3 seeds, as 1 of 4 comparisons has, the exact sign-flip test cannot go below p = 0.25, so that it can never" in mixed
    assert "With 6 seeds, as 1 of 4 comparisons has, the exact sign-flip test cannot go below p = 0.0312." in mixed
    assert "The t interval of 3 seeds has 2\u00a0degrees of freedom" in mixed


def test_cost_is_relative_to_the_parent(full: Path, page: Reader) -> None:
    speeds = {
        arm: [read_json(full / "runs" / arm / f"seed-{seed}" / "result.json")["tokens_per_second"]["median"] for seed in range(3)]
        for arm in ("prenorm", "block")
    }
    change = 100 * (sum(speeds["block"]) / sum(speeds["prenorm"]) - 1)
    assert change < 0
    assert f"\u2212{-change:.1f} %" in page.text
    assert "1,088,352 4,896" in page.text


def test_relative_cost_is_the_median_of_the_ratios_within_a_seed(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, comparisons=[("block", "prenorm")])
    for seed, (arm, parent) in enumerate([(700.0, 1000.0), (90.0, 100.0), (6.0, 5.0)]):
        for name, speed in (("block", arm), ("prenorm", parent)):
            path = study / "runs" / name / f"seed-{seed}" / "result.json"
            write_json(path, read_json(path) | {"tokens_per_second": {"median": speed}})
    text = page_of(study).text
    assert "265 \u221210.0 % 1,190 MiB" in text, "the ratio of the means would be minus 28 %"
    assert "the ratio is taken within each seed that both have, and its median" in text


def test_the_runs_that_trained_side_by_side_are_counted_where_it_is_known(tmp_path: Path, write_study: WriteStudy) -> None:
    def text(**recorded: object) -> str:
        for path in study.glob("runs/*/*/environment.json"):
            write_json(path, environment | recorded)
        return page_of(study).text

    study = write_study(tmp_path, seeds=(0, 1))
    environment = read_json(study / "runs" / "rd" / "seed-0" / "environment.json")
    unknown = text()
    assert "side by side" not in unknown and "at a time" not in unknown and "Depth attention" not in unknown
    four = text(workers=4, depth_attention="the kernels need a compiler, and there is none")
    assert "torch 2.13.0, 4 runs side by side" in four
    assert "4 runs trained side by side; the last ones may have had the machine to themselves." in four
    assert "Depth attention the kernels need a compiler, and there is none" in four
    alone = text(workers=1)
    assert "torch 2.13.0, one run at a time" in alone and "side by side" not in alone


def test_the_arms_table_shows_what_differs_and_the_end_of_the_report_the_rest(tmp_path: Path, write_study: WriteStudy) -> None:
    routed = {"method": "attnres", "block": 4, "num_blocks": None, "rank": None, "keys": "slice", "roles": "shared"}
    arms = {
        "prenorm": ("PreNorm", {"method": "prenorm"}, 0.0),
        "plain": ("Plain", routed | {"gate": None}, -0.08),
        "gated": ("Gated", routed | {"gate": 0.5}, -0.09),
    }
    study = write_study(tmp_path, arms=arms, comparisons=[("plain", "prenorm"), ("gated", "plain")])
    text = page_of(study).text
    assert "PreNorm prenorm method prenorm Plain" in text
    assert "Plain plain method attnres, block 4, roles shared, gate none Gated" in text, "none is a value where another arm has one"
    assert "Gated gated method attnres, block 4, roles shared, gate 0.5" in text
    assert "model.residual.keys slice" in text and "model.residual.rank none" in text


def test_drawings_of_an_earlier_report_are_removed(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, seeds=(0,))
    folder = write_report(study).parent
    assert (folder / "divergence.svg").exists()
    (folder / "notes.txt").write_text("mine")
    for path in study.glob("runs/*/*/routing.json"):
        path.unlink()
    write_report(study)
    shown = set(re.findall(r"\]\(([^)]+\.svg)\)", (folder / "report.md").read_text(encoding="utf-8")))
    assert {path.name for path in folder.iterdir()} == shown | {"report.md", "index.html", "notes.txt"}
    assert shown and "divergence.svg" not in shown


def test_nothing_is_fetched_and_nothing_runs(full: Path, page: Reader) -> None:
    assert not page.find("script") and not page.find("img")
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,"))
    source = (full / "report" / "index.html").read_text(encoding="utf-8")
    assert "@import" not in source and "url(http" not in source and "fe00" not in source, "a sentinel colour was left in the page"


def test_ids_are_unique_and_references_lead_somewhere(full: Path, page: Reader) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    source = (full / "report" / "index.html").read_text(encoding="utf-8")
    references = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', source)
    assert references and {first or second for first, second in references} <= set(ids)


def test_markdown_says_the_same_and_shows_files_that_exist(full: Path, page: Reader) -> None:
    markdown = (full / "report" / "report.md").read_text(encoding="utf-8")
    prose = re.sub(r"!\[.*?\]\([^)]*\)", "", markdown)  # descriptions of figures are attributes in the page
    number = re.compile(r"[+\u2212]?\d[\d,]*\.\d+")
    drawn = re.sub(r"<svg.*?</svg>", "", (full / "report" / "index.html").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert number.findall(prose) == number.findall(Reader(drawn).text)
    for anchor, heading in (("setup", "What was run"), ("limits", "What this study cannot show")):
        assert anchor in SECTIONS and f"## {heading}" in markdown
    shown = re.findall(r"\]\(([^)]+\.svg)\)", markdown)
    assert len(shown) == 15
    for name in shown:
        drawing = (full / "report" / name).read_text(encoding="utf-8")
        assert drawing.startswith("<svg") and "fe00" not in drawing


def test_the_same_study_gives_the_same_bytes_in_another_process(full: Path) -> None:
    before = {path.name: path.read_bytes() for path in (full / "report").iterdir()}
    code = (
        "import sys, pathlib\n"
        "from depthroute.report import write_report\n"
        "write_report(pathlib.Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(full.resolve())], check=True, cwd=root, timeout=120)
    assert {path.name: path.read_bytes() for path in (full / "report").iterdir()} == before


def test_unfinished_runs_are_named_with_their_reason(tmp_path: Path, write_study: WriteStudy) -> None:
    text = page_of(write_study(tmp_path, unfinished={("rd", 2): 220, ("block", 1): 0})).text
    assert "2 of 9 runs are missing." in text
    assert "Block AttnRes 1 not started" in text
    assert "RD-AttnRes 2 stopped after step 220; run the study again to go on" in text
    assert "Only one seed is complete in both arms" in text
    assert "With one seed there is no standard deviation and no interval." in text
    assert "The band is one standard deviation to each side: with two seeds" in text and "With one seed there is no band." in text


def test_runs_that_the_statistics_do_not_know_are_named_too(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, unfinished={("rd", 2): 220})
    (study / "statistics.json").unlink()
    text = page_of(study).text
    assert "No verdict yet: no seed has finished both RD-AttnRes and Block AttnRes." in text
    assert "RD-AttnRes 2 stopped after step 220" in text
    assert "Loss curves." in text, "what is there is shown without statistics"


def test_a_finished_run_that_the_statistics_leave_out_enters_no_number(tmp_path: Path, write_study: WriteStudy) -> None:
    without = write_study(tmp_path / "without", unfinished={("rd", 2): 0})
    left_out = write_study(tmp_path / "left_out")
    assert (left_out / "runs" / "rd" / "seed-2" / "result.json").exists()
    write_json(left_out / "statistics.json", read_json(without / "statistics.json"))
    assert write_report(left_out).read_bytes() == write_report(without).read_bytes()


def test_a_study_in_which_nothing_ran_is_reported(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, unfinished={(arm, seed): 0 for arm in ("prenorm", "block", "rd") for seed in range(3)})
    text = page_of(study).text
    assert "No verdict yet" in text and "9 of 9 runs are missing." in text and "No pair is complete yet" in text
    assert "Speed comes from" not in text and "GPU" not in text


def test_one_seed_has_no_interval_and_says_so(tmp_path: Path, write_study: WriteStudy) -> None:
    text = page_of(write_study(tmp_path, seeds=(5,))).text
    assert "there is no interval: the difference may be the luck of the seed" in text
    assert "One seed: no interval can be formed" in text
    assert "With one seed there is no band." in text


def test_two_seeds_have_a_band_of_one_standard_deviation(tmp_path: Path, write_study: WriteStudy) -> None:
    text = page_of(write_study(tmp_path, seeds=(0, 1))).text
    assert "The band is one standard deviation to each side" in text and "1 degree of freedom" in text


def test_ten_arms_fit_and_the_eleventh_color_is_never_needed(tmp_path: Path, write_study: WriteStudy) -> None:
    routed = {"method": "attnres", "block": 4, "roles": "shared"}
    arms = {f"a{i}": (f"Arm number {i} with a long name", routed if i else {"method": "prenorm"}, -0.01 * i) for i in range(10)}
    reader = page_of(write_study(tmp_path, arms=arms, comparisons=[(f"a{i}", "a0") for i in range(1, 10)]))
    assert len({a["id"] for a in reader.find("div") if (a.get("id") or "").startswith("gap-")}) == 9
    assert "Besides the headline there are 8 comparisons: in 8 of them the interval lies below zero" in reader.text
    assert "Every pair, seed by seed" in reader.text


def test_arms_without_routing_are_left_out_of_the_heat_maps(tmp_path: Path, write_study: WriteStudy) -> None:
    reader = page_of(write_study(tmp_path, routed=False))
    assert "routing" not in [a.get("id") for a in reader.find("section")]


def test_sources_of_single_sublayers_are_columns_of_a_heat_map(tmp_path: Path, write_study: WriteStudy) -> None:
    arms = {
        "prenorm": ("PreNorm", {"method": "prenorm"}, 0.0),
        "full": ("Full AttnRes", {"method": "attnres", "block": 1, "roles": "shared"}, -0.02),
    }
    reader = page_of(write_study(tmp_path, arms=arms, comparisons=[("full", "prenorm")]))
    assert "3 attn" in reader.text and "3 MLP" in reader.text and "square root of the weight" in reader.text


def test_whatever_is_in_a_label_is_shown_and_never_run(tmp_path: Path, write_study: WriteStudy) -> None:
    block = {"method": "attnres", "block": 4, "roles": "shared"}
    arms = {
        "prenorm": ("_PreNorm", {"method": "prenorm"}, 0.0),
        "block": (ATTACK, block, -0.08),
        "two": ("Two", block | {"rank": 24}, -0.1),
    }
    study = write_study(tmp_path, arms=arms, comparisons=[("block", "prenorm"), ("two", "block")], name=f"Study {ATTACK}")
    reader = page_of(study)
    assert not reader.find("script")
    assert reader.text.count('<script>alert(1)</script> & "R" | *x* $a_b$') > 5
    markdown = (study / "report" / "report.md").read_text(encoding="utf-8")
    assert "<script" not in markdown
    for line in markdown.splitlines():
        if line.startswith("| Seed"):
            columns = line.count(" | ")
        elif line.startswith("| **&lt;script"):
            assert len(re.findall(r"(?<!\\)\|", line)) == columns + 2, "a bar in a label opened a column"
    drawings = [path.read_text(encoding="utf-8") for path in (study / "report").glob("*.svg")]
    assert not any("<script" in drawing for drawing in drawings)
    assert any('>&lt;script&gt;alert(1)&lt;/script&gt; &amp; "R" | *x* $a_b$</text>' in drawing for drawing in drawings), (
        "read as mathematics"
    )


def test_a_hyphenated_name_stays_on_one_line_in_the_title(tmp_path: Path, write_study: WriteStudy) -> None:
    source = write_report(write_study(tmp_path, seeds=(0,), name="RD-AttnRes <b>")).read_text(encoding="utf-8")
    assert '<h1><span class="name">RD-AttnRes</span> &lt;b&gt;</h1>' in source


def test_a_manifest_with_nothing_in_it_is_tolerated(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, seeds=(0, 1))
    for path in study.glob("runs/*/*/environment.json"):
        write_json(path, {})
    text = page_of(study).text
    assert "unigram" not in text and "2,048 entries" in text


def test_a_loss_that_is_not_finite_does_not_end_the_report(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, seeds=(0, 1))
    path = study / "runs" / "rd" / "seed-0" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["loss"] = math.nan
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "nan" not in page_of(study).text


def test_a_changed_plan_and_foreign_data_are_called_out(tmp_path: Path, write_study: WriteStudy) -> None:
    study = write_study(tmp_path, seeds=(0, 1))
    plan = read_json(study / "plan.json")
    write_json(study / "plan.json", plan | {"question": "Another one?"})
    run = study / "runs" / "rd" / "seed-1" / "config.json"
    write_json(run, read_json(run) | {"data_fingerprint": "00" * 32})
    left_out = {"arm": "rd", "seed": 1, "reason": "it holds another run."}
    write_json(study / "statistics.json", read_json(study / "statistics.json") | {"missing": [left_out]})
    text = page_of(study).text
    assert "The plan was changed after it was written" in text and "verified" not in text
    assert "Not the planned data: RD-AttnRes seed 1 ran on other data." in text


def test_a_folder_that_is_no_study_is_refused_in_one_sentence(tmp_path: Path, write_study: WriteStudy) -> None:
    with pytest.raises(RequestError, match=r"is not a study folder: it holds no plan\.json; give the folder"):
        write_report(tmp_path)
    write_json(tmp_path / "plan.json", {"name": "x", "arms": [], "seeds": []})
    with pytest.raises(RequestError, match="lacks the field 'comparisons'"):
        write_report(tmp_path)
    whole = {"name": "x", "arms": [], "seeds": [], "comparisons": [["a", "b"]], "endpoint": "validation", "claims": [], "extensions": []}
    write_json(tmp_path / "plan.json", whole | {"format": 1})
    with pytest.raises(RequestError, match="has format 1; this version of depthroute reads format 2"):
        write_report(tmp_path)
    write_json(tmp_path / "plan.json", whole | {"format": 2})
    with pytest.raises(RequestError, match="compares the arm 'a', which it does not define"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "linear warm-up over 2 % of the steps, cosine decay to 10 % of the peak"),
        (
            {"schedule": "wsd", "warmup_fraction": None, "warmup_steps": 30, "decay_fraction": 0.2, "route_rate": 8.0},
            "routes at 8 times the rate, betas 0.9 and 0.95, weight decay 0.1, gradients clipped at norm 1, linear warm-up over 30 steps, "
            "constant rate, then linear decay over the last 20 % of the steps, to 10 % of the peak",
        ),
        (
            {"optimiser": "muon", "matrix_rate": 2.0, "momentum": 0.9},
            "Muon for the matrices of the layers and AdamW for the rest, peak learning rate 0.001, matrices of the layers at 2 times the "
            "rate, Muon's momentum 0.9, betas 0.9 and 0.95, weight decay 0.1",
        ),
        ({"optimiser": "adamw", "matrix_rate": 1.0, "momentum": 0.95}, "AdamW, peak learning rate 0.001, betas 0.9 and 0.95"),
    ],
)
def test_the_schedule_is_told_as_it_was(full: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = tmp_path / "study"
    shutil.copytree(full, folder)
    plan = read_json(folder / "plan.json")
    for arm in plan["arms"]:
        arm["config"]["train"] |= change
    write_json(folder / "plan.json", plan)
    write_report(folder)
    assert words in (folder / "report" / "report.md").read_text(encoding="utf-8").replace("\u00a0", " ")
