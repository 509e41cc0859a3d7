"""The whole analysis of a small trained run: what it writes, and that a wrong request is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthroute.analysis.analyse import analyse, beside_the_papers
from depthroute.cli.main import main
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, write_json
from depthroute.data import TokenDataset
from depthroute.train import recorded_config


@pytest.fixture(scope="module")
def analysed(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("analysis") / "made"
    analyse(trained_run, out, tokens=256, dear_tokens=64, probe_tokens=128)
    return out


def test_every_part_is_there(analysed: Path, trained_run: Path) -> None:
    found = read_json(analysed / "analysis.json")
    config = recorded_config(trained_run)
    assert config is not None and found["format"] == 1
    assert found["model"] == {
        "label": "attnres, block 2, roles decoupled", "parameters": found["model"]["parameters"], "layers": 3, "width": 12,
        "residual": "attnres, block 2, roles decoupled",
    }  # fmt: skip
    assert found["tokens"] == 256 and 1 <= found["documents"] <= 20 and 3 < found["nll"] < 7
    sites = [row["site"] for row in found["routing"]["sites"]]
    assert sites == list(range(1, 7)) and {row["layer"] for row in found["routing"]["divergence"]} == {1, 2}
    assert [row["site"] for row in found["magnitudes"]] == [row["site"] for row in found["lens"]] == list(range(7))
    assert all(row["output_gradient_rms"] > 0 for row in found["magnitudes"][:-1])
    assert {row["role"] for row in found["feedback"]} == {"shared", "query_key", "value"}
    assert len(found["mixing"]["roles"]["value"]["matrix"]) == 7 and len(found["mixing"]["columns"]) == 7
    assert found["gradient_norms"]["steps"] == 4 and 0 <= found["gradient_norms"]["above_clip"] <= 1
    assert found["probes"]["sites"] and found["probes"]["families"]
    assert len(found["text"]["tokens"]) == 16 and len(found["text"]["sites"]) == 8  # six sites, two of them by role
    for row in found["text"]["sites"]:
        np.testing.assert_allclose(np.sum(row["weights"], axis=0), 1, atol=2e-3)


def test_the_loss_is_that_of_the_run(analysed: Path, trained_run: Path) -> None:
    """The same windows in the same order as an evaluation, whose 64 tokens are the first of these."""
    found = read_json(analysed / "analysis.json")
    recorded = [json.loads(line) for line in (trained_run / "evaluations.jsonl").read_text().splitlines()][-1]
    assert found["nll"] == pytest.approx(recorded["nll"], abs=0.2)
    assert found["lens"][-1]["nll"] == pytest.approx(recorded["nll"], abs=1e-3)  # on the same 64 tokens


def test_arrays_need_no_pickle_and_hold_what_the_page_rounds(analysed: Path) -> None:
    found = read_json(analysed / "analysis.json")
    with np.load(analysed / "analysis.npz", allow_pickle=False) as arrays:
        assert {"mixing.value", "mixing.query_key", "text.2.value", "text.6.shared"} <= set(arrays.files)
        np.testing.assert_allclose(arrays["mixing.value"], found["mixing"]["roles"]["value"]["matrix"])
        row = next(row for row in found["text"]["sites"] if (row["site"], row["role"]) == (2, "value"))
        np.testing.assert_allclose(arrays["text.2.value"], row["weights"], atol=5.1e-5)


def test_more_text_at_a_time_changes_nothing(analysed: Path, trained_run: Path, tmp_path: Path) -> None:
    """The same run analysed again writes the same file."""
    again = analyse(trained_run, tmp_path / "again", tokens=256, dear_tokens=64, probe_tokens=128)
    first = read_json(analysed / "analysis.json")
    assert json.loads(json.dumps(again)) == first


def test_documents_end_where_the_slices_of_a_mixture_meet(trained_run: Path, tmp_path: Path) -> None:
    """The run's data as two sources of the same weight: 65 tokens are 33 of the first and 32 of the second."""
    run, folder = shutil.copytree(trained_run, tmp_path / "run"), shutil.copytree(trained_run.parent / "tokens", tmp_path / "mixed")
    data, manifest = TokenDataset.open(folder), read_json(folder / "manifest.json")
    parts: list[dict[str, Any]] = [{}, {}]
    for split, facts in manifest["splits"].items():
        boundaries = data.boundaries(split)
        documents = len(boundaries) // 2
        tokens = int(boundaries[documents])
        parts[0][split] = {"documents": documents, "tokens": tokens, "bytes": 1}
        parts[1][split] = {"documents": facts["documents"] - documents, "tokens": facts["tokens"] - tokens, "bytes": 1}
    manifest["sources"] = [{"name": name, "columns": ["text"], "splits": splits} for name, splits in zip("ab", parts, strict=True)]
    manifest["prepare"]["sources"] = [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]
    write_json(folder / "manifest.json", manifest)
    mixed = TokenDataset.open(folder)
    write_json(run / "config.json", {**read_json(run / "config.json"), "data_fingerprint": mixed.fingerprint})
    held_out = mixed.held_out(limit=64)
    assert 33 in held_out.boundaries and held_out.tokens[32] != data.end
    found = analyse(run, tmp_path / "out", data=folder, tokens=64, dear_tokens=32, probe_tokens=64)
    assert found["probes"]["tokens"] == 64 and found["probes"]["documents"] == found["documents"] == len(held_out.boundaries) - 1


def test_a_checkpoint_folder_and_a_text_of_ones_own(trained_run: Path, tmp_path: Path) -> None:
    (folder,) = (trained_run / "checkpoints").glob("step-*")
    found = analyse(folder, tmp_path / "out", tokens=64, dear_tokens=32, probe_tokens=0, text="abcd efgh")
    assert "probes" not in found and "".join(found["text"]["tokens"]).strip() == "abcd efgh"
    with pytest.raises(RequestError, match=r"the text has .* tokens; it takes 1 to 16, the context of the model"):
        analyse(trained_run, tmp_path / "never", text="abcd " * 60)
    assert not (tmp_path / "never").exists()


def test_a_plain_stream_has_what_it_has(tmp_path: Path, trained_run: Path) -> None:
    """A run of another method: no reads to look at, a matrix all the same."""
    small = ("train.steps=2", "model.width=12", "model.heads=2", "model.layers=2", "model.mlp_width=16", "model.context=16")
    settings = [word for setting in (*small, "train.evaluation_tokens=64") for word in ("--set", setting)]
    data = str(trained_run.parent / "tokens")
    assert main(["train", str(tmp_path / "prenorm"), "--data", data, "--recipe", "small", "--residual", "prenorm", *settings]) == 0
    found = analyse(tmp_path / "prenorm", tmp_path / "out", tokens=64, dear_tokens=32)
    assert "routing" not in found and "probes" not in found and "feedback" not in found and found["text"]["sites"] == []
    matrix = np.array(found["mixing"]["roles"]["shared"]["matrix"])
    np.testing.assert_allclose(matrix, np.tril(np.ones((5, 5))), atol=1e-12)


def test_papers_are_named_only_beside_what_was_measured() -> None:
    assert beside_the_papers({}) == []
    rows = beside_the_papers({
        "routing": {"divergence": [{"layer": 1, "nats": 0.2}, {"layer": 7, "nats": 0.05}]},
        "gradient_norms": {"above_clip": 0.25},
    })  # fmt: skip
    assert [row["ours"] for row in rows] == ["0.200", "0.050", "25.0%"]
    assert "0.218" in rows[0]["paper"] and "0.015" in rows[1]["paper"]


def test_the_command_writes_a_page(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page"
    options = ["--tokens", "64", "--dear-tokens", "32", "--probe-tokens", "32"]
    assert main(["analyse", str(trained_run), "--out", str(out), *options]) == 0
    assert f"analysis: {out / 'index.html'}" in capsys.readouterr().out and (out / "index.html").stat().st_size > 20_000
    assert main(["analyse", str(trained_run), "--tokens", "0"]) == 2
    assert "--tokens 0 is not allowed; it takes 1 or more" in capsys.readouterr().err
    assert main(["analyse", str(tmp_path)]) == 2
