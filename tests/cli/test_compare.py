"""`depthroute compare`: the same facts in words and as JSON."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from depthroute.cli.main import main
from depthroute.common.files import read_json, write_json
from depthroute.study.compare import compare

write_study = runpy.run_path(str(Path(__file__).parents[1] / "report" / "synthetic_study.py"))["write_study"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compare", *arguments]) == 0
    text = capsys.readouterr()
    assert text.err == ""
    return text.out


def test_json_is_what_the_library_finds(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, str(trained_run), str(trained_run), "--json")) == compare(trained_run, trained_run)


def test_a_run_and_itself(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, str(trained_run), str(trained_run))
    assert "configuration: the same" in text and "the same at all 4 common steps" in text and "last steps" not in text
    assert text.splitlines()[-1].startswith("  end: ") and text.splitlines()[-1].endswith(" | 0")


def test_two_runs_that_part(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained_run, other)
    config = read_json(other / "config.json")
    rate = config["train"]["learning_rate"]
    config["train"]["learning_rate"] = 0.5
    write_json(other / "config.json", config)
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    before = lines[2]["loss"]
    lines[2]["loss"] = 9.5
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    result = read_json(other / "result.json")
    write_json(other / "result.json", {**result, "step": 3, "tokens": 5, "nll": result["nll"] + 0.5})
    text = said(capsys, str(trained_run), str(other))
    assert f"  train.learning_rate: {rate} | 0.5\n" in text
    assert f"  first differs at step 3: {before!r} | 9.5\n" in text and "  last steps: 4 | 3\n" in text
    assert f"{result['nll']:.4f} | {result['nll'] + 0.5:.4f} | +0.5  (steps 4 | 3)  (tokens {result['tokens']} | 5)" in text
    (other / "result.json").unlink()
    (other / "metrics.jsonl").unlink()
    (other / "evaluations.jsonl").unlink()
    text = said(capsys, str(trained_run), str(other))
    assert "no step in common" in text and "no evaluation in common" in text and "end: not both runs are complete" in text


def test_two_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_study(tmp_path / "a", seeds=(0, 1, 2))
    b = write_study(tmp_path / "b", seeds=(1, 2, 3), unfinished={("rd", 2): 100}, name="Another name")
    text = said(capsys, str(a), str(b))
    assert "  name: 'Depth routing against its parent' | 'Another name'\n" in text and "configuration of common arms: the same" in text
    block, rd = (text.split(f"  {arm}, step 400\n")[1] for arm in ("block", "rd"))
    assert block.splitlines()[0].startswith("    seed 1: ") and block.splitlines()[0].endswith(" | 0")
    assert "    mean 0, 95 % t interval 0 to 0" in block.split("  rd, step")[0]
    assert rd.count("    seed ") == 2 and "seed 2 left out in b: stopped after step 100" in rd and "mean" not in rd.split("\n\n")[0]


def test_what_a_comparison_found_in_each_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_study(tmp_path / "a", seeds=(0, 1))
    b = write_study(tmp_path / "b", seeds=(0,), unfinished={("rd", 0): 100}, comparisons=[("rd", "block"), ("block", "prenorm")])
    paragraphs = said(capsys, str(a), str(b)).split("\n\n")
    assert [paragraph.splitlines()[0].split(" at ")[0] for paragraph in paragraphs[-2:]] == ["rd minus block", "block minus prenorm"]
    ends = {c["arm"]: c["milestones"][-1] for c in read_json(a / "statistics.json")["comparisons"][:2]}
    shown = [f"seed {seed} {value:+.3g}" for seed, value in zip((0, 1), ends["rd"]["differences"], strict=True)]
    assert paragraphs[-2].splitlines()[1].startswith(f"  a: {shown[0]}, {shown[1]}; mean {ends['rd']['mean']:+.3g}, 95 % t interval ")
    assert paragraphs[-2].splitlines()[2] == "  b: no complete pair"
    assert paragraphs[-1].splitlines()[2] == f"  b: seed 0 {ends['block']['differences'][0]:+.3g}"


def test_studies_without_anything_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_study(tmp_path / "a", seeds=(0,))
    arms = {name: (name, {"method": "prenorm"}, 0.0) for name in ("one", "two")}
    b = write_study(tmp_path / "b", seeds=(0,), arms=arms, comparisons=[("one", "two")])
    assert "no arm in common" in said(capsys, str(a), str(b))
    assert "no seed in common" in said(capsys, str(a), str(write_study(tmp_path / "c", seeds=(5,))))


def test_a_wrong_request_is_one_sentence(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(trained_run), str(tmp_path)]) == 2
    text = capsys.readouterr()
    assert text.out == "" and text.err.count("\n") == 1 and "neither a run folder" in text.err
