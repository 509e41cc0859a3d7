"""What an evaluation measures beside the mean: the loss by document, and of the targets behind markers."""

from __future__ import annotations

import dataclasses
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from depthroute.common.errors import FailureError
from depthroute.common.files import read_json, read_json_lines, write_json
from depthroute.data import EOS, Marker, TokenDataset, read_manifest
from depthroute.model import Decoder
from depthroute.model.loss import CHUNK_ELEMENTS, likeliest
from depthroute.study.clusters import cluster_bootstrap
from depthroute.train import RunConfig, evaluate, initialise, load_trained, loop, train

Config = Callable[..., RunConfig]

# Ids of letters and merges that the tiny corpus has; the second slice holds the first, and nothing follows <pad>.
MARKERS = (
    Marker(name="after one", ids=(70,)),
    Marker(name="after some", ids=(69, 70, 71, 3)),
    Marker(name="two behind", ids=(69, 70, 71), distance=2),
    Marker(name="after none", ids=(0,)),
    Marker(name="too far behind", ids=(69, 70, 71), distance=17),
)


@pytest.fixture
def marked(data: Path, tmp_path: Path) -> Path:
    """The data folder with markers."""
    folder = tmp_path / "marked"
    folder.mkdir()
    for path in data.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = read_json(folder / "manifest.json")
    manifest["markers"] = [{"name": marker.name, "ids": list(marker.ids), "distance": marker.distance} for marker in MARKERS]
    write_json(folder / "manifest.json", manifest)
    return folder


def model_of(config: RunConfig) -> Decoder:
    model = Decoder(config.model)
    initialise(model, 0)
    with torch.no_grad():  # as initialised, all losses are nearly equal, and a sum over other targets would pass for the right one
        model.embedding.weight *= 30
    return model


def measured(model: Decoder, data: TokenDataset, limit: int | None = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {"context": 16, "microbatch": 7, "device": "cpu", "precision": "float32"}
    held_out = data.held_out(limit=limit)
    return evaluate(model, held_out.tokens, boundaries=held_out.boundaries, **settings | changes)


def literal(model: Decoder, tokens: np.ndarray, limit: int | None) -> list[tuple[int, float, bool]]:
    """(position of the target in the split, loss, whether it is the likeliest token) of every target, a window at a time."""
    found = []
    targets = len(tokens) - 1 if limit is None else limit
    windows = (tokens[start : min(start + 16, targets) + 1].astype(np.int64) for start in range(0, targets, 16))
    for number, window in enumerate(windows):
        with torch.no_grad():
            rows = model.logits(torch.from_numpy(window[None, :-1]))[0].double().log_softmax(-1)
        for offset, (row, target) in enumerate(zip(rows, window[1:].tolist(), strict=True)):
            found.append((number * 16 + offset + 1, -row[target].item(), int(row.argmax()) == target))
    return found


@pytest.mark.parametrize("limit", [None, 200, 16, 9, 1])
@pytest.mark.parametrize("microbatch", [1, 7])
def test_exactly_as_many_targets_as_asked_for_are_measured(data: Path, config: Config, limit: int | None, microbatch: int) -> None:
    dataset, model = TokenDataset.open(data), model_of(config())
    tokens = dataset.tokens("validation")
    found = measured(model, dataset, limit, microbatch=microbatch)
    line = found.splits["validation"]
    expected = [nll for _, nll, _ in literal(model, tokens, limit)]
    assert line["evaluated_tokens"] == len(expected) == (limit or len(tokens) - 1) and (len(tokens) - 1) % 16
    assert line["nll"] == pytest.approx(math.fsum(expected) / len(expected), rel=1e-5)
    assert found.documents.counts.sum() == len(expected)


def test_a_run_evaluates_what_every_source_holds_out(tmp_path: Path, config: Config, data: Path) -> None:
    """The same shards as of two sources, of which the second has nine tenths of the weight."""
    folder = shutil.copytree(data, tmp_path / "mixed")
    manifest, edges = read_json(folder / "manifest.json"), {}
    parts: list[dict[str, Any]] = [{}, {}]
    for split, facts in manifest["splits"].items():
        boundaries = TokenDataset.open(data).boundaries(split)
        documents = len(boundaries) // 2
        edges[split] = int(boundaries[documents])
        parts[0][split] = {"documents": documents, "tokens": edges[split], "bytes": 1}
        parts[1][split] = {"documents": facts["documents"] - documents, "tokens": facts["tokens"] - edges[split], "bytes": 1}
    manifest["sources"] = [{"name": name, "columns": ["text"], "splits": splits} for name, splits in zip("ab", parts, strict=True)]
    manifest["prepare"]["sources"] = [{"path": "a", "weight": 1}, {"path": "b", "weight": 9}]
    write_json(folder / "manifest.json", manifest)
    result = train(dataclasses.replace(config(steps=2, evaluation_tokens=69), data=str(folder)), tmp_path / "run", console=False)
    line = read_json_lines(tmp_path / "run" / "evaluations.jsonl")[-1]
    assert line["evaluated_tokens"] == 69 and line["nll"] == result["nll"]
    tokens, edge = TokenDataset.open(data).tokens("validation"), edges["validation"]
    model = load_trained(tmp_path / "run")[1].eval()
    slices = np.concatenate([tokens[:7], tokens[edge : edge + 63]])  # of 70 tokens
    assert result["nll"] == pytest.approx(math.fsum(nll for _, nll, _ in literal(model, slices, None)) / 69, rel=1e-5)


@pytest.mark.parametrize("limit", [None, 200, 16])
@pytest.mark.parametrize("microbatch", [1, 7])
def test_the_loss_is_summed_by_the_document_that_holds_the_target(data: Path, config: Config, limit: int | None, microbatch: int) -> None:
    dataset, model = TokenDataset.open(data), model_of(config())
    tokens = dataset.tokens("validation")
    expected: dict[int, list[float]] = {}
    ends = np.flatnonzero(tokens == EOS)
    for position, nll, _ in literal(model, tokens, limit):
        expected.setdefault(int((ends < position).sum()), []).append(nll)  # the documents that ended before this target
    found = measured(model, dataset, limit, microbatch=microbatch)
    sums, counts = found.documents.sums, found.documents.counts
    assert (sums.dtype, counts.dtype) == (np.float64, np.int64)
    assert list(expected) == list(range(len(sums))) and (limit is not None or len(sums) > 10)
    assert counts.tolist() == [len(losses) for losses in expected.values()]
    assert sums == pytest.approx([math.fsum(losses) for losses in expected.values()], rel=1e-5)
    line = found.splits["validation"]
    assert counts.sum() == line["evaluated_tokens"] and sums.sum() / counts.sum() == pytest.approx(line["nll"], rel=1e-13)


def test_documents_of_one_token_and_documents_that_begin_where_a_batch_does(config: Config) -> None:
    """The first token of a split is no target: a first document that is no more than that is left out. The second batch begins at 33."""
    lengths = [1, 1, 5, 1, 25, 1, 1, 14]
    boundaries = np.cumsum([0, *lengths])
    tokens = np.arange(boundaries[-1]) % 290 + 4
    model = model_of(config())
    found = evaluate(model, tokens, context=16, microbatch=2, device="cpu", precision="float32", boundaries=boundaries)
    assert found is not None and found.documents is not None
    assert found.documents.counts.tolist() == lengths[1:]
    losses = np.array([0.0, *(nll for _, nll, _ in literal(model, tokens, None))])
    assert found.documents.sums == pytest.approx(np.add.reduceat(losses, boundaries[1:-1]), rel=1e-5)


def test_boundaries_and_markers_do_not_change_the_loss(data: Path, config: Config) -> None:
    dataset, model = TokenDataset.open(data), model_of(config())
    with_all = measured(model, dataset, markers=MARKERS)
    plain = evaluate(model, dataset.tokens("validation"), context=16, microbatch=7, device="cpu", precision="float32")
    assert plain is not None and plain.documents is None and list(plain.splits) == ["validation"]
    assert plain.splits["validation"]["nll"] == with_all.splits["validation"]["nll"]


@pytest.mark.parametrize("microbatch", [1, 7])
def test_slices_are_the_targets_behind_their_markers(data: Path, config: Config, microbatch: int) -> None:
    dataset, model = TokenDataset.open(data), model_of(config())
    tokens = dataset.tokens("validation")
    found = measured(model, dataset, markers=MARKERS, microbatch=microbatch).splits
    assert list(found) == ["validation", "after one", "after some", "two behind"]  # a slice without a target has no line
    for marker in MARKERS[:3]:
        rows = [
            (nll, hit) for position, nll, hit in literal(model, tokens, None)
            if (position - 1) % 16 >= marker.distance - 1 and tokens[position - marker.distance] in marker.ids
        ]
        line = found[marker.name]
        assert set(line) == {*found["validation"], "accuracy"}
        assert line["evaluated_tokens"] == len(rows) > 20
        assert line["nll"] == pytest.approx(math.fsum(nll for nll, _ in rows) / len(rows), rel=1e-5)
        assert line["accuracy"] == sum(hit for _, hit in rows) / len(rows)
    assert found["after some"]["evaluated_tokens"] > found["after one"]["evaluated_tokens"]


def test_accuracy_counts_what_the_model_finds_likeliest(data: Path, config: Config) -> None:
    """A head that always names one token is right exactly where that token is the target."""
    dataset, model = TokenDataset.open(data), model_of(config(model={"tied_embeddings": False}))
    tokens = dataset.tokens("validation")
    behind = [int(tokens[i + 1]) for i in range(len(tokens) - 1) if tokens[i] in MARKERS[1].ids]
    favourite = max(set(behind), key=behind.count)

    def name_it(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden),), favourite)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthroute.model.decoder.likeliest", name_it)
        line = measured(model, dataset, markers=MARKERS).splits["after some"]
    chosen = np.isin(tokens[:-1], MARKERS[1].ids)  # the marker of a window's first target is in that window too
    assert line["accuracy"] == (tokens[1:][chosen] == favourite).mean() > 0


def test_the_likeliest_tokens_need_no_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1_000, 8, generator=generator), torch.randn(50, 8, generator=generator)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 50)
    assert torch.equal(likeliest(hidden, weight), (hidden @ weight.T).argmax(-1))
    assert likeliest(hidden[:0], weight).shape == (0,)


def test_a_run_writes_documents_once_and_a_line_a_slice(tmp_path: Path, config: Config, marked: Path) -> None:
    settings = dataclasses.replace(config(milestones=(4,), evaluation_tokens=None), data=str(marked))
    result = train(settings, tmp_path / "run", console=False)
    lines = read_json_lines(tmp_path / "run" / "evaluations.jsonl")
    names = ["validation", "after one", "after some", "two behind"]
    assert [(line["step"], line["split"]) for line in lines] == [(step, name) for step in (4, 12) for name in names]
    assert list(lines[0]) == ["step", "tokens", "split", "nll", "perplexity", "evaluated_tokens", "seconds"]
    assert list(lines[1]) == [*lines[0], "accuracy"]
    assert result["nll"] == lines[4]["nll"] != lines[7]["nll"], "the result is the validation's"
    documents = np.load(tmp_path / "run" / "documents.npz", allow_pickle=False)
    assert documents["sums"].sum() / documents["counts"].sum() == pytest.approx(result["nll"], rel=1e-13)
    assert cluster_bootstrap(documents["sums"], documents["counts"]).mean == pytest.approx(result["nll"], rel=1e-12)

    plain = train(config(milestones=(4,), evaluation_tokens=None), tmp_path / "plain", console=False)
    assert plain["nll"] == result["nll"]
    assert (tmp_path / "plain" / "documents.npz").read_bytes() == (tmp_path / "run" / "documents.npz").read_bytes()


def test_slices_and_documents_survive_interruptions(
    tmp_path: Path, config: Config, marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(config(milestones=(4, 8), checkpoint_every=0), data=str(marked))
    train(settings, tmp_path / "whole", console=False)
    real, calls = evaluate, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(*arguments, **options)
        signal.raise_signal(signal.SIGINT)  # after the measurement of step 4, and during that of step 8 and 12
        return found if calls == 1 else None

    for _ in range(3):
        monkeypatch.setattr(loop, "evaluate", interrupted if calls < 3 else real)
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "run", console=False)
    monkeypatch.setattr(loop, "evaluate", real)
    train(settings, tmp_path / "run", console=False)
    ours, theirs = (
        [{name: value for name, value in line.items() if name != "seconds"} for line in read_json_lines(run / "evaluations.jsonl")]
        for run in (tmp_path / "run", tmp_path / "whole")
    )
    assert ours == theirs and len(ours) == 12
    assert (tmp_path / "run" / "documents.npz").read_bytes() == (tmp_path / "whole" / "documents.npz").read_bytes()


def test_markers_are_part_of_what_identifies_the_data(marked: Path, data: Path) -> None:
    plain, with_markers = read_manifest(data), read_manifest(marked)
    assert with_markers.markers == MARKERS and plain.markers == ()
    assert plain.fingerprint != with_markers.fingerprint
    written = read_json(marked / "manifest.json")
    del written["markers"]  # as a folder of before markers has it
    write_json(marked / "manifest.json", written)
    assert read_manifest(marked) == plain and read_manifest(marked).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ({"name": "validation", "ids": [5]}, "a marker cannot be called 'validation'"),
        ({"name": "", "ids": [5]}, "a marker cannot be called ''"),
        ({"name": "a", "ids": []}, r"the marker 'a' cannot have the ids \[\]"),
        ({"name": "a", "ids": [-1]}, r"the marker 'a' cannot have the ids \[-1\]"),
        ({"name": "a", "ids": [5], "distance": 0}, "the marker 'a' cannot have the distance 0"),
        ({"name": "a", "ids": [300]}, "the marker 'a' cannot have the id 300; ids are below the vocabulary of 300"),
        ({"name": "after one", "ids": [5]}, "the marker 'after one' is there twice"),
    ],
)
def test_wrong_markers_are_refused(marked: Path, marker: dict[str, Any], message: str) -> None:
    manifest = read_json(marked / "manifest.json")
    manifest["markers"].append(marker)
    write_json(marked / "manifest.json", manifest)
    with pytest.raises(FailureError, match=message):
        read_manifest(marked)
