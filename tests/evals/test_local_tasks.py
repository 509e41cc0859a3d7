"""Tasks from held-out text: always the same items, each of which has an answer that the text itself gives."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, read_json_lines
from depthroute.data import MultiHopConfig, PrepareConfig, TokenDataset, prepare
from depthroute.evals import local_tasks
from depthroute.evals.local_tasks import MAKERS, LocalTask, LocalTasks, follow_move, texts
from depthroute.evals.tasks import Tasks

CONTEXT = 64
NEEDLE_CONTEXT = 160


def written(folder: Path, data: Path, **settings: Any) -> tuple[list[LocalTask], dict[str, list[dict[str, Any]]]]:
    made = LocalTasks(**{"dataset": TokenDataset.open(data), "context": NEEDLE_CONTEXT, "items": 30, **settings})
    found = made.write(folder)
    return found, {task.name: read_json_lines(folder / f"{task.name}.jsonl") for task in found}


@pytest.fixture(scope="module")
def items(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    tasks, found = written(tmp_path_factory.mktemp("tasks"), data)
    assert [task.items for task in tasks] == [len(found[task.name]) for task in tasks]
    assert [task.reason for task in tasks] == [
        None, None, "prompts of 40 tokens have no room for the needle, a line of text and the question.",
    ]  # fmt: skip
    assert list(found) == list(MAKERS)
    return found


@pytest.fixture(scope="module")
def documents(data: Path) -> list[str]:
    dataset = TokenDataset.open(data)
    return list(texts(dataset, "validation", dataset.tokenizer()))


def test_items_follow_from_the_arguments_alone(data: Path, tmp_path: Path, items: dict[str, list[dict[str, Any]]]) -> None:
    assert written(tmp_path / "a", data)[1] == items
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    assert written(tmp_path / "b", moved)[1] == items, "where the data lie is no part of it"
    for number, change in enumerate(({"seed": 1}, {"split": "test"}, {"context": NEEDLE_CONTEXT - 1})):
        other = written(tmp_path / str(number), data, **change)[1]
        assert all(other[name] != items[name] for name in items), change


def test_the_last_word_is_that_of_the_text(data: Path, items: dict[str, list[dict[str, Any]]], documents: list[str]) -> None:
    tokenizer = TokenDataset.open(data).tokenizer()
    for item in items["local_last_word"]:
        whole = item["context"] + item["target"]
        place = documents[item["document"]].index(whole)
        assert documents[item["document"]][place + len(whole)] in ".!?"
        assert place == 0 or documents[item["document"]][place - 1].isspace(), "it begins with a whole word"
        assert len(tokenizer.encode(item["context"])) + len(tokenizer.encode(item["target"])) <= NEEDLE_CONTEXT
        assert item["target"][0] == " " and item["target"][1:].isalpha() and not item["context"][-1].isspace()
    assert len({item["document"] for item in items["local_last_word"][: len(documents)]}) == len(documents), "each document in its turn"


def test_the_first_order_is_that_of_the_text(data: Path, items: dict[str, list[dict[str, Any]]], documents: list[str]) -> None:
    tokenizer = TokenDataset.open(data).tokenizer()
    places = set()
    for item in items["local_sentence_order"]:
        flat = " ".join(documents[item["document"]].split())
        inside = [f"{item['context']} {choice}" in flat for choice in item["choices"]]
        assert inside.count(True) == 1 and inside[item["answer"]]
        assert len(set(item["choices"])) == 4 and len({len(choice) for choice in item["choices"]}) == 1
        assert all(len(tokenizer.encode(f"{item['context']} {choice}")) <= NEEDLE_CONTEXT for choice in item["choices"])
        places.add(item["answer"])
    assert places == {0, 1, 2, 3}


def test_the_needle_lies_where_its_cell_says(data: Path, items: dict[str, list[dict[str, Any]]], documents: list[str]) -> None:
    tokenizer = TokenDataset.open(data).tokenizer()
    cells: dict[str, int] = {}
    for item in items["local_needle"]:
        *lines, question = item["context"].split("\n")
        value = item["choices"][item["answer"]]
        (place,) = (number for number, line in enumerate(lines) if line == f"{question} {value}.")
        filler = [line for number, line in enumerate(lines) if number != place]
        length, depth = (part.split()[1] for part in item["cell"].split(", "))
        assert place == round(float(depth) * len(filler)) and filler
        assert item["context"].count(value) == 1 and not any(other in item["context"] for other in set(item["choices"]) - {value})
        assert all(any(line in " ".join(text.split()) for text in documents) for line in filler), "real text"
        sizes = [len(tokenizer.encode(f"{item['context']} {choice}")) for choice in item["choices"]]
        assert int(length) // 2 < max(sizes) <= int(length) <= NEEDLE_CONTEXT
        cells[item["cell"]] = cells.get(item["cell"], 0) + 1
    assert len(cells) >= 10 and len(set(cells.values())) == 1


def test_what_has_no_room_is_left_out_with_the_reason(tmp_path: Path, data: Path, trained_run: Path) -> None:
    tasks, _ = written(tmp_path / "short", data, context=5)
    assert [task.items for task in tasks] == [0, 0, 0]
    assert [task.reason for task in tasks] == [
        "no sentence of the text ends with a word and fits into the context.",
        "no paragraph of the text has four sentences that fit into the context together.",
        "the context has no room for the needle, a line of text and the question.",
    ]
    assert [path.name for path in (tmp_path / "short").iterdir()] == [".lock"]
    without_sentences, _ = written(tmp_path / "words", trained_run.parent / "tokens", context=200)
    assert [bool(task.items) for task in without_sentences] == [False, False, True]


def test_a_corpus_that_cannot_spell_the_needle(tmp_path: Path) -> None:
    prepare(PrepareConfig.of("multi-hop", multi_hop=MultiHopConfig(documents=40), validation_share=0.3), tmp_path / "hops")
    tasks, _ = written(tmp_path / "tasks", tmp_path / "hops")
    assert tasks[-1].reason == "the tokenizer of this corpus cannot spell its line."


def test_wrong_arguments_are_refused(data: Path) -> None:
    dataset = TokenDataset.open(data)
    for change in ({"items": 0}, {"context": 0}, {"seed": -1}):
        with pytest.raises(RequestError, match=f"{next(iter(change))} = .* is not allowed"):
            LocalTasks(dataset=dataset, **{"context": 9, **change})


def test_the_harness_reads_the_files_alone(data: Path, tmp_path: Path) -> None:
    _, found = written(tmp_path, data, context=CONTEXT * 2)
    tasks = Tasks(tmp_path, known=False, download=False)
    tasks.load(list(found), also=())
    for name, made in found.items():
        (task,) = tasks._loaded[name]
        assert [json.loads(json.dumps(doc)) for doc in task.eval_docs] == made
        task.build_all_requests(limit=3)
        texts = [instance.args for instance in task.instances]
        item = made[0]
        if name == "local_last_word":
            assert texts[0] == (item["context"], item["target"])
        else:
            assert texts[:4] == [(item["context"], f" {choice}") for choice in item["choices"]]
    assert read_json(tmp_path / "local_needle.yaml")["metadata"]["context"] == CONTEXT * 2


def test_only_what_is_asked_for_is_written(data: Path, tmp_path: Path) -> None:
    dataset, (words, orders, needle) = TokenDataset.open(data), MAKERS
    LocalTasks(dataset=dataset, context=NEEDLE_CONTEXT, items=6).write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (made,) = LocalTasks(dataset=dataset, context=NEEDLE_CONTEXT, items=4, seed=1).write(tmp_path, [words])
    changed = {name for name, content in before.items() if (tmp_path / name).read_bytes() != content}
    assert made.name == words and changed == {f"{words}.jsonl", f"{words}.yaml"}
    LocalTasks(dataset=dataset, context=5, items=4).write(tmp_path, [needle])
    left = {path.name for path in tmp_path.iterdir()}
    kept = {f"{name}.{ending}" for name in (words, orders) for ending in ("jsonl", "yaml")}
    assert left == {".lock", *kept}, "a task with no room is gone"


def test_files_are_written_by_one_process_at_a_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def seen(path: Path, text: str) -> None:
        with (tmp_path / ".lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(path)

    monkeypatch.setattr(local_tasks, "write_text", seen)
    LocalTasks(dataset=TokenDataset.open(data), context=NEEDLE_CONTEXT, items=2).write(tmp_path)
    assert len(held) == 3


def test_moved_files_name_the_data_beside_them(data: Path, tmp_path: Path) -> None:
    LocalTasks(dataset=TokenDataset.open(data), context=NEEDLE_CONTEXT, items=2).write(tmp_path / "old")
    before = read_json(tmp_path / "old" / "local_needle.yaml")
    (tmp_path / "old").rename(tmp_path / "new")
    follow_move(tmp_path / "new")
    after = read_json(tmp_path / "new" / "local_needle.yaml")
    assert Path(after["dataset_kwargs"]["data_files"]["validation"]).exists() and "/old/" not in json.dumps(after)
    assert {**after, "dataset_kwargs": None} == {**before, "dataset_kwargs": None}
    written_at = (tmp_path / "new" / "local_needle.yaml").stat().st_mtime_ns
    follow_move(tmp_path / "new")
    assert (tmp_path / "new" / "local_needle.yaml").stat().st_mtime_ns == written_at
    follow_move(tmp_path / "nowhere")


def test_few_items_of_the_needle_are_spread_over_its_cells(data: Path, tmp_path: Path, items: dict[str, list[dict[str, Any]]]) -> None:
    few = written(tmp_path, data, items=5)[1]["local_needle"]
    assert len(few) == len({item["cell"] for item in few}) == 5
    first = [item["cell"] for item in items["local_needle"][:10]]
    assert len(set(first)) == 10, "and so are the first ones of many"
