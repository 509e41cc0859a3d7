from __future__ import annotations

import hashlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.data import Document, hub, rows
from depthroute.data.hub import HubCorpus, HubName

ROWS = [{"text": f"text {i}", "id": i, "body": {"text": f"inner {i}"}} for i in range(200)]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, with its cache in `tmp_path` and without the network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("datasets")
    # Where something has imported it before, it has read the environment already.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    return library


def read(spec: str, skipped: Counter[str] | None = None, **options: Any) -> list[Document]:
    """All documents. Each part is read by a corpus of its own, as in worker processes."""
    skipped = Counter() if skipped is None else skipped
    parts = HubCorpus(spec, **options).parts(skipped)
    return [document for part in parts for document in HubCorpus(spec, **options).documents(part, skipped)]


def refusal(spec: str, kind: type[DepthrouteError], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        read(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def repository(folder: Path) -> Path:
    """A folder as it is on the hub, with two configurations of the same two splits."""
    for config in ("small", "large"):
        for split in ("train", "test"):
            path = folder / config / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist([{"text": f"{config} {split}", "id": "1"}]), path)
    lines = [f"- config_name: {config}\n  data_files:\n{splits(config)}" for config in ("small", "large")]
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(lines) + "---\n", encoding="utf-8")
    return folder


def splits(config: str) -> str:
    return "".join(f"  - split: {split}\n    path: {config}/{split}.parquet\n" for split in ("train", "test"))


def test_a_saved_data_set_is_read(datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    spec = f"hf:{tmp_path / 'saved'}"
    expected = [Document(str(row["id"]), str(row["text"])) for row in ROWS]
    assert read(spec, id_column="id") == expected
    assert read(spec)[0] == Document(hashlib.sha256(b"text 0").hexdigest(), "text 0")
    assert read(spec, text_column="body.text", id_column="id")[7] == Document("7", "inner 7")
    monkeypatch.setattr(hub, "FEWEST_ROWS", 70)
    monkeypatch.setattr(rows, "PART_BYTES", 1)
    parts = HubCorpus(spec).parts(Counter())
    assert [(part.start, part.end) for part in parts] == [(0, 70), (70, 140), (140, 200)]
    assert read(spec, id_column="id") == expected


def test_chosen_rows_of_a_saved_data_set_keep_their_order(datasets: Any, tmp_path: Path) -> None:
    found = datasets.Dataset.from_list(ROWS).select([5, 3, 150])
    found.save_to_disk(tmp_path / "saved")
    assert [document.text for document in read(f"hf:{tmp_path / 'saved'}")] == ["text 5", "text 3", "text 150"]


def test_a_split_of_a_saved_data_set_is_chosen(datasets: Any, tmp_path: Path) -> None:
    whole = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "other")}
    datasets.DatasetDict(whole).save_to_disk(tmp_path / "saved")
    spec = f"hf:{tmp_path / 'saved'}"
    assert [document.text for document in read(spec)] == ["train"]
    assert [document.text for document in read(f"{spec},split=other")] == ["other"]
    assert "unknown split 'othr'; perhaps you meant 'other'" in refusal(f"{spec},split=othr", RequestError)
    assert "leave config and revision out" in refusal(f"{spec},config=c", RequestError)
    assert "one data set without splits; leave split out" in refusal(f"{spec}/train,split=other", RequestError)


def test_a_folder_as_on_the_hub_is_read(datasets: Any, tmp_path: Path) -> None:
    spec = f"hf:{repository(tmp_path / 'repository')}"
    assert read(f"{spec},config=small", id_column="id") == [Document("1", "small train")]
    assert [document.text for document in read(f"{spec},config=large,split=test")] == ["large test"]
    corpus = HubCorpus(f"{spec},config=large,split=test")
    assert (corpus.name, corpus.contents) == ("repository", ("config large", "split test"))
    assert corpus.stamp() == HubCorpus(f"{spec},config=large,split=test").stamp()
    assert corpus.stamp() != HubCorpus(f"{spec},config=small,split=test").stamp()
    assert "['small', 'large']" in refusal(spec, RequestError)
    assert "'middle' not found" in refusal(f"{spec},config=middle", RequestError)
    assert 'Unknown split "dev"' in refusal(f"{spec},config=small,split=dev", RequestError)


def test_columns_and_rows_are_refused_as_those_of_files(datasets: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"body": "a", "n": 1.5}, {"body": None, "n": 1.5}]).save_to_disk(tmp_path / "saved")
    spec = f"hf:{tmp_path / 'saved'}"
    assert "saved: text_column: unknown column 'text'. Allowed: body, n." in refusal(spec, RequestError)
    assert "column 'n' must hold text, not double" in refusal(spec, RequestError, text_column="n")
    skipped: Counter[str] = Counter()
    assert [document.text for document in read(spec, skipped, text_column="body")] == ["a"]
    assert skipped == {"rows whose text is null": 1}
    damaged = pa.array([b"one", b"caf\xe9", b"two"]).view(pa.string())
    datasets.Dataset(pa.table({"text": damaged})).save_to_disk(tmp_path / "damaged", num_shards=3)
    assert "damaged row 2 is not valid UTF-8" in refusal(f"hf:{tmp_path / 'damaged'}", FailureError)
    skipped.clear()
    assert [document.text for document in read(f"hf:{tmp_path / 'damaged'}", skipped, bad_rows="skip")] == ["one", "two"]
    assert skipped == {"rows that are not UTF-8": 1}


def test_what_is_not_there_is_refused(datasets: Any, tmp_path: Path) -> None:
    assert "does not exist" in refusal(f"hf:{tmp_path / 'nothing'}", RequestError)
    (tmp_path / "empty").mkdir()
    assert "cannot be read" in refusal(f"hf:{tmp_path / 'empty'}", RequestError)
    assert "could not be read" in refusal("hf:nobody/nothing", FailureError)  # there is no network
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.parquet").write_bytes(b"PAR1 and nothing else")
    assert "could not be read" in refusal(f"hf:{broken}", FailureError)


def test_the_notation_is_read_or_refused() -> None:
    assert HubName.parse("hf:a/b") == HubName(name="a/b")
    every = HubName(name="a/b", config="c", split="train[:10%]", revision="main")
    assert HubName.parse("hf:a/b,config=c,split=train[:10%],revision=main") == every
    for spec, message in (
        ("hf:", "names no data set; it takes hf:NAME"),
        ("hf:,split=a", "names no data set"),
        ("hf:a,spilt=b", "unknown setting 'spilt'; perhaps you meant 'split'. Allowed: config, revision, split."),
        ("hf:a,split", "must give split once, and a value for it"),
        ("hf:a,split=", "must give split once"),
        ("hf:a,split=b,split=c", "must give split once"),
    ):
        with pytest.raises(RequestError, match=r"^the source 'hf:") as caught:
            HubCorpus(spec)
        assert message in str(caught.value)


def test_the_library_is_asked_for_only_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    corpus = HubCorpus("hf:some/name,split=test")
    assert (corpus.name, corpus.contents, corpus.missing) == ("some/name", ("split test",), ())
    with pytest.raises(RequestError, match=r"not installed: pip install 'depthroute\[datasets\]'"):
        corpus.parts(Counter())
