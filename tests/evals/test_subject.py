"""The subject of an evaluation is a run with its own data, or with data of its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, write_json
from depthroute.data import PrepareConfig, prepare
from depthroute.evals.subject import open_subject


def test_data_that_changed_under_their_name_are_refused(write_run: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    config = read_json(run / "config.json")
    fingerprint = open_subject(run, device="cpu").dataset.fingerprint
    write_json(run / "config.json", {**config, "data_fingerprint": "0" * 64})
    with pytest.raises(RequestError, match=rf"has the fingerprint {fingerprint}, and .* names {'0' * 64}"):
        open_subject(run, device="cpu")
    assert open_subject(run, data=Path(config["data"]), device="cpu").dataset.fingerprint == fingerprint
    write_json(run / "config.json", {**config, "data": "", "data_fingerprint": ""})
    with pytest.raises(RequestError, match="names no data; give the token shards"):
        open_subject(run, device="cpu")


def test_data_of_another_tokenizer_are_refused(write_run: Any, data: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_json(run / "environment.json", {"data": read_json(data / "manifest.json")})
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"word {number} " * 9}) + "\n" for number in range(40)))
    settings = PrepareConfig.of(str(tmp_path / "text.jsonl"), vocabulary=270, sample_one_in=1, validation_share=0.3)
    prepare(settings, tmp_path / "other")
    assert open_subject(run, data=data, device="cpu").dataset.directory == data
    with pytest.raises(RequestError, match="were made with another tokenizer"):
        open_subject(run, data=tmp_path / "other", device="cpu")
