"""A run of a tiny decoder with random weights, and data whose documents are sentences."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from depthroute.data import PrepareConfig, prepare
from depthroute.evals.subject import Subject, open_subject
from depthroute.residual import AttnResConfig

STORED = runpy.run_path(str(Path(__file__).parents[1] / "convert" / "stored_runs.py"))
CONTEXT = 64


def text(words: random.Random) -> str:
    """Two paragraphs of five to eight sentences with the endings of English ones."""
    names = ["river", "garden", "window", "letter", "market", "winter", "teacher", "bridge", "café", "forest", "island", "kitchen"]
    verbs = ["sees", "finds", "keeps", "leaves", "paints", "wants"]
    sentence = "The {} {} the old {} near the {}{}".format
    return "\n\n".join(
        " ".join(
            sentence(words.choice(names), words.choice(verbs), words.choice(names), words.choice(names), words.choice(".....!?"))
            for _ in range(words.randint(5, 8))
        )
        for _ in range(2)
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("evals"), random.Random(3)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text(words)}) + "\n" for _ in range(80)), encoding="utf-8")
    settings = PrepareConfig.of(str(folder / "text.jsonl"), vocabulary=340, sample_one_in=1, validation_share=0.25, test_share=0.1)
    prepare(settings, folder / "tokens")
    return folder / "tokens"


@pytest.fixture(scope="session")
def write_run(data: Path) -> Any:
    """Writes a run folder: `write_run(folder, seed=0, **fields of the model)`."""

    def write(folder: Path, *, seed: int = 0, **fields: Any) -> Path:
        model = STORED["shape"](**{"vocabulary": 340, "context": CONTEXT, "residual": AttnResConfig(block=2, roles="decoupled"), **fields})
        STORED["write_run"](folder, data, model, seed=seed)
        return folder

    return write


@pytest.fixture(scope="session")
def run(write_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = write_run(tmp_path_factory.mktemp("eval-runs") / "run")
    return folder


@pytest.fixture
def subject(run: Path) -> Subject:
    """In float64."""
    found = open_subject(run, device="cpu", precision="float32")
    found.model.double()
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the harness's report about this machine, which takes seconds and is not used."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
    yield
