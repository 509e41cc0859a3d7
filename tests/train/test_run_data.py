"""Whatever opens a run's data gets those that it was trained on, or others that mean the same by their ids."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, write_json
from depthroute.data import EOS, PrepareConfig, TokenDataset, prepare
from depthroute.train import RunConfig, recorded_config, train
from depthroute.train.run_data import run_data, run_tokenizer

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def run(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("named") / "run"
    train(config(steps=2), folder, console=False)
    return folder


@pytest.fixture
def shards(data: Path, tmp_path: Path) -> Callable[..., Path]:
    """Shards of half the documents: of a tokenizer of their own, or of the one given."""

    def make(name: str, **settings: Any) -> Path:
        text = (data.parent / "documents.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "half.jsonl").write_text("".join(text[::2]))
        own = {} if "tokenizer" in settings else {"vocabulary": 290, "sample_one_in": 1}
        prepare(PrepareConfig.of(str(tmp_path / "half.jsonl"), validation_share=0.3, **own, **settings), tmp_path / name)
        return tmp_path / name

    return make


def configuration(run: Path) -> RunConfig:
    config = recorded_config(run)
    assert config is not None
    return config


def test_the_named_data_are_those_of_the_training(run: Path, data: Path, shards: Callable[..., Path]) -> None:
    config = configuration(run)
    assert run_data(run, config).fingerprint == config.data_fingerprint
    other = shards("other")
    moved = dataclasses.replace(config, data=str(other))
    with pytest.raises(RequestError) as refusal:
        run_data(run, moved)
    assert config.data_fingerprint in str(refusal.value) and TokenDataset.open(other).fingerprint in str(refusal.value)


def test_given_data_need_the_tokenizer_that_the_run_records(run: Path, data: Path, shards: Callable[..., Path]) -> None:
    config = configuration(run)
    checkpoint = run / "checkpoints" / "step-00000002"
    same = shards("same", tokenizer=str(data / "tokenizer.json"), end_of_document="<eos>")
    for place in (run, checkpoint):
        assert run_data(place, config, same).fingerprint != config.data_fingerprint
        with pytest.raises(RequestError, match="were made with another tokenizer"):
            run_data(place, config, shards("other"))


def test_where_no_tokenizer_is_recorded_the_ids_must_fit(run: Path, shards: Callable[..., Path], tmp_path: Path) -> None:
    config = configuration(run)
    assert run_data(tmp_path, config, shards("other")).vocabulary == 290
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=280))
    with pytest.raises(RequestError, match=r"has 290 tokens and the model of .* 280"):
        run_data(tmp_path, small, shards("other"))


def test_the_tokenizer_of_an_adopted_checkpoint_counts_whole(run: Path, data: Path, shards: Callable[..., Path], tmp_path: Path) -> None:
    """Not only its vocabulary; but what it puts around a text, and where it cuts one, reaches no shards."""
    adopted, config = tmp_path / "adopted", configuration(run)
    adopted.mkdir()
    own = Tokenizer.from_file(str(data / "tokenizer.json"))
    own.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    own.enable_truncation(7)
    own.enable_padding()
    own.save(str(adopted / "tokenizer.json"))
    assert run_data(adopted, config, data).directory == data
    changed = read_json(data / "tokenizer.json")
    changed["model"]["merges"] = changed["model"]["merges"][::-1]
    write_json(adopted / "tokenizer.json", changed)
    assert Tokenizer.from_file(str(adopted / "tokenizer.json")).get_vocab() == own.get_vocab()
    with pytest.raises(RequestError, match=r"were made with another tokenizer than that of .*adopted.* Prepare them with"):
        run_data(adopted, config, data)


def test_training_refuses_shards_of_another_tokenizer(config: Config, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = config(steps=2)
    train(settings, folder, console=False)
    (folder / "result.json").unlink()
    own = Tokenizer.from_file(str(data / "tokenizer.json"))
    own.save(str(folder / "tokenizer.json"))
    own.add_tokens(["another"])
    train(settings, folder, console=False)
    (folder / "result.json").unlink()
    own.save(str(folder / "tokenizer.json"))
    with pytest.raises(RequestError, match="were made with another tokenizer"):
        train(settings, folder, console=False)


def test_a_run_that_names_no_data_says_what_to_give(run: Path, data: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(configuration(run), data="", data_fingerprint="")
    with pytest.raises(RequestError, match=r"names no data; give the token shards \(--data\)\.$"):
        run_data(tmp_path, config)
    shutil.copyfile(data / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(RequestError, match=r"names no data; .* depthroute data prepare TEXT --out SHARDS --tokenizer .*tokenizer\.json\.$"):
        run_data(tmp_path, config)


def test_an_adopted_checkpoint_without_data_has_its_own_tokenizer(run: Path, data: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(configuration(run), data="", data_fingerprint="")
    shutil.copyfile(data / "tokenizer.json", tmp_path / "tokenizer.json")
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<eos>", "bos_token": "<bos>", "add_bos_token": True})
    found = run_tokenizer(tmp_path, config)
    assert (found.end, found.begin) == (EOS, 2)
    assert found.encode("abc <bos>") == TokenDataset.open(data).tokenizer().encode("abc <bos>")
    assert run_tokenizer(tmp_path, config, data).begin is None  # the shards say what they have
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=280))
    with pytest.raises(RequestError, match=r"has 300 tokens and the model of .* 280"):
        run_tokenizer(tmp_path, small)
