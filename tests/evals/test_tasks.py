"""Tasks of the harness are loaded and run without a network unless it is asked for, and what they lack is named."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import write_json
from depthroute.evals import EvalConfig, tasks
from depthroute.evals.presets import LOW_RANK


def test_data_that_are_not_here_are_named_and_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        write_json(tmp_path / f"{name}.yaml", {"task": name, "dataset_path": f"someone/{name}-data", "output_type": "multiple_choice"})
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("it reached for the network"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: pytest.fail("it reached for the network"))
    found = tasks.Tasks(tmp_path, known=False, download=False)
    with pytest.raises(RequestError) as caught:
        found.load(["first", "second"], also=())
    message = str(caught.value)
    assert message.startswith("the data of first (someone/first-data), second (someone/second-data) are not on this machine (")
    assert "with --download where there is a network" in message and "\n" not in message
    with pytest.raises(RequestError, match=r"unknown task 'secnd'; perhaps you meant 'second'\. The tasks of the harness"):
        found.load(["secnd"], also=("low-rank",))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import no_such_package\n\n\ndef score(doc, results):\n    return {}\n")
    (tmp_path / "needy.yaml").write_text("task: needy\ndataset_path: json\nprocess_results: !function needy.score\n")
    for download in (False, True):
        found = tasks.Tasks(tmp_path, known=False, download=download)
        with pytest.raises(RequestError, match=r"^the task needy needs the package no_such_package: pip install no_such_package$"):
            found.load(["needy"], also=())


def test_a_task_that_reaches_for_the_network_while_it_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reaching(**arguments: Any) -> Any:
        try:
            socket.create_connection(("example.org", 80))
        except OSError as error:
            raise LookupError("a resource is missing") from error

    found = tasks.Tasks(None, known=False, download=False)
    found._loaded["some"] = []
    monkeypatch.setattr("lm_eval.simple_evaluate", reaching)
    with pytest.raises(RequestError, match=r"the task some reaches for example\.org, and the network is off; run this with --download"):
        found.run(type("Model", (), {})(), "some", limit=None, fewshot=None, seed=0)
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **arguments: (_ for _ in ()).throw(LookupError("of its own")))
    with pytest.raises(LookupError, match="of its own"):
        found.run(type("Model", (), {})(), "some", limit=None, fewshot=None, seed=0)


def test_no_other_machine_is_reached_without_a_network() -> None:
    import urllib.request

    import evaluate.config
    import requests

    given = evaluate.config.HF_EVALUATE_OFFLINE
    resolve = socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as loose:
        address = server.getsockname()
        with tasks.network(False) as refused:
            assert evaluate.config.HF_EVALUATE_OFFLINE is True and os.environ["HF_EVALUATE_OFFLINE"] == "1"
            for reach in (
                lambda: socket.getaddrinfo("example.org", 80), lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
                lambda: loose.connect_ex(("192.0.2.1", 80)), lambda: requests.get("http://example.org", timeout=1),
                lambda: urllib.request.urlopen("http://example.org", timeout=1),
            ):  # fmt: skip
                with pytest.raises(OSError, match="is not this machine, and network access is off without --download"):
                    reach()
            assert set(refused) == {"example.org", "192.0.2.1"}
            socket.create_connection(address).close()
            socket.getaddrinfo("localhost", 80)
        assert given == evaluate.config.HF_EVALUATE_OFFLINE
    assert socket.getaddrinfo is resolve and not {"connect", "connect_ex"} & set(vars(socket.socket))


def test_data_that_cannot_be_fetched_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "first.yaml", {"task": "first", "dataset_path": "someone/first-data", "output_type": "multiple_choice"})
    found = tasks.Tasks(tmp_path, known=False, download=True)
    monkeypatch.setattr("datasets.load_dataset", lambda **arguments: (_ for _ in ()).throw(ConnectionError("no route\nto it")))
    with pytest.raises(FailureError, match=r"the data of first \(someone/first-data\) cannot be fetched: no route$"):
        found.load(["first"], also=())


def test_the_network_is_allowed_for_as_long_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    with tasks.network(True):
        assert not datasets.config.HF_HUB_OFFLINE and not huggingface_hub.constants.HF_HUB_OFFLINE
        assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "0"
        with tasks.network(False):
            assert datasets.config.HF_HUB_OFFLINE and huggingface_hub.constants.is_offline_mode()
        assert not datasets.config.HF_HUB_OFFLINE and not huggingface_hub.constants.is_offline_mode()
    assert datasets.config.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1" and "HF_DATASETS_OFFLINE" not in os.environ


def test_the_tasks_of_the_low_rank_paper_have_their_metrics_in_the_harness() -> None:
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = [root / name for name in ("arc", "super_glue/boolq", "commonsense_qa", "hellaswag", "openbookqa", "piqa", "siqa")]
    known = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False).task_index
    for task in LOW_RANK:
        found = known[task.name].cfg
        assert found is not None and found["output_type"] == "multiple_choice" and "num_fewshot" not in found
        assert task.metric in {metric["metric"] for metric in found["metric_list"]}
    assert sum(task.items for task in LOW_RANK) == 1172 + 2376 + 500 + 3270 + 1221 + 10_042 + 1838 + 1954
    assert {task.name for task in LOW_RANK if task.metric == "acc"} == {"boolq", "commonsense_qa", "social_iqa"}
    assert EvalConfig(tasks=("low-rank", "piqa")).names == tuple(task.name for task in LOW_RANK)
