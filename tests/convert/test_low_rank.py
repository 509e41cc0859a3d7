"""A converted run computes what its source does, with fewer key coordinates; what cannot be converted is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_runs import MakeRun, loaded, shape, stored
from torch import Tensor

from depthroute.cli.convert import Options
from depthroute.cli.main import main
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, write_json
from depthroute.convert import convert_low_rank, low_rank, streamed
from depthroute.convert.basis import query_basis
from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, PreNormConfig, RMSNorm
from depthroute.train import checkpoint, load_trained, recorded_config, recorded_result, train

EXACT = 1e-12
RD = {"roles": "decoupled", "block": 2}


def logits(model: Decoder, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(ids)


def source_weights(model: Decoder, ids: Tensor) -> dict[tuple[int, str], Tensor]:
    found: dict[tuple[int, str], Tensor] = {}

    def observe(site: int, memory: Any) -> None:
        found.update({(site, role): weights for role, weights in model.residual.source_weights(memory, site).items()})

    with torch.no_grad():
        model(ids, observe=observe)
    return found


def assert_same_function(run: Path, out: Path, ids: Tensor) -> None:
    before, after = loaded(run), loaded(out)
    expected = logits(before, ids)
    assert expected.abs().max() > 0.3  # or a small difference would mean nothing
    assert (logits(after, ids) - expected).abs().max() < EXACT
    weights = source_weights(after, ids)
    for key, of_site in source_weights(before, ids).items():
        assert (weights[key] - of_site).abs().max() < EXACT, key


def spread(*names: str) -> Callable[[Decoder], None]:
    """Gains of the norms behind sub-layers, each one number of its own."""

    def change(model: Decoder) -> None:
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith(names):
                parameter.fill_(0.5 + 0.1 * number)

    return change


KINDS: dict[str, dict[str, Any]] = {
    "full": {"residual": AttnResConfig()},
    "block": {},
    "rd": {"residual": AttnResConfig(**RD)},
    "separate": {"residual": AttnResConfig(roles="separate", block=3)},
    "tied roles": {"residual": AttnResConfig(roles="tied", block=2)},
    "average": {"residual": AttnResConfig(roles="average", block=2)},
    "frozen value": {"residual": AttnResConfig(roles="frozen_value", block=2)},
    "untied": {"tied_embeddings": False},
    "grouped queries, qk-norm": {"heads": 6, "key_value_heads": 2, "head_width": 4, "qk_norm": True, "residual": AttnResConfig(**RD)},
    "hybrid norms": {"norms": "hybrid"},
    "low-rank, full RMS": {"residual": AttnResConfig(block=2, rank=9, key_norm="full")},
    "the width by name": {"residual": AttnResConfig(block=2, rank=12)},
    "no key norm": {"residual": AttnResConfig(block=2, key_norm="none", rank=10)},
    "no key gain": {"residual": AttnResConfig(block=2, key_gain=False)},
    "scaled": {"residual": AttnResConfig(block=2, scaled=True)},
    "sigmoid, first read": {"residual": AttnResConfig(block=2, weighting="sigmoid", first_read=True)},
    "first read": {"residual": AttnResConfig(**RD, first_read=True)},
    "normed values": {"residual": AttnResConfig(block=2, values="normed")},
    "mean": {"residual": AttnResConfig(block=2, summary="mean")},
    "rms": {"residual": AttnResConfig(block=3, summary="rms")},
    "window": {"residual": AttnResConfig(window=2)},
    "count prior": {"residual": AttnResConfig(block=3, count_prior=0.7, learned_count_prior=True)},
    "biases, a window and sums": {
        "biases": ("query", "key", "value", "output", "gate", "up", "down"), "attention_window": 5,
        "residual": AttnResConfig(**RD, sum_reads=True),
    },
    "ends, no phases": {"residual": AttnResConfig(ends=(1, 4, 6), phases=False, eps=1e-3)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_converted_model_is_the_same_function(kind: str, make_run: MakeRun, tmp_path: Path, held_out: Tensor) -> None:
    run = make_run(shape(**KINDS[kind]))
    facts = convert_low_rank(run, tmp_path / "out", tokens=64)
    assert_same_function(run, tmp_path / "out", held_out)
    assert facts["float64"]["logits_max_difference"] < EXACT and facts["float64"]["weights_max_difference"] < EXACT
    model = load_trained(tmp_path / "out")[0].model
    assert isinstance(model.residual, AttnResConfig) and model.residual.rank == facts["rank"] and not model.residual.key_gain
    assert model.residual.key_norm == ("none" if kind == "no key norm" else "full")
    assert not model.tied_embeddings and facts["head_untied"] == (kind != "untied")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["full", "rd", "grouped queries, qk-norm"])
def test_whatever_the_weights(kind: str, seed: int, make_run: MakeRun, tmp_path: Path, held_out: Tensor) -> None:
    run = make_run(shape(**{**KINDS[kind], "width": 24}), seed=seed + 1)
    assert convert_low_rank(run, tmp_path / "out", tokens=64)["rank"] == {"full": 6, "rd": 8, "grouped queries, qk-norm": 8}[kind]
    assert_same_function(run, tmp_path / "out", held_out)


@pytest.mark.parametrize("rank", [3, 5, 12])
def test_the_default_rank_is_the_joint_rank_of_the_folded_queries(rank: int, make_run: MakeRun, tmp_path: Path, held_out: Tensor) -> None:
    """The gains differ by site: the span is low-dimensional only after they are folded in."""
    directions = torch.randn(3, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def three_directions(model: Decoder) -> None:
        generator = torch.Generator().manual_seed(6)
        for name, parameter in model.named_parameters():
            if name.endswith("query") and name.startswith("residual."):
                mixed = torch.randn(3, generator=generator, dtype=torch.float64) @ directions
                parameter.copy_(mixed / model.get_parameter(f"{name.rpartition('.')[0]}.key_gain"))

    run = make_run(shape(residual=AttnResConfig(**RD)), change=three_directions)
    with pytest.raises(RequestError, match=r"rank = 2 .* the 8 route queries have the joint rank 3; the smallest .* is 3, .* 12\."):
        convert_low_rank(run, tmp_path / "out", rank=2)
    with pytest.raises(RequestError, match="rank = 13"):
        convert_low_rank(run, tmp_path / "out", rank=13)
    assert not (tmp_path / "out").exists()
    facts = convert_low_rank(run, tmp_path / "out", rank=None if rank == 3 else rank, tokens=64)
    assert (facts["rank"], facts["joint_rank"], facts["queries"]) == (rank, 3, 8)
    assert_same_function(run, tmp_path / "out", held_out)
    queries = torch.stack([tensor for name, tensor in stored(tmp_path / "out").items() if name.endswith("query") and "sites" in name])
    assert queries.shape == (8, rank) and not queries[:, : rank - 3].any() and torch.linalg.matrix_rank(queries) == 3


def test_queries_that_are_zero_keep_every_weight_and_have_one_coordinate(make_run: MakeRun, tmp_path: Path, held_out: Tensor) -> None:
    def zero(model: Decoder) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("query") and name.startswith("residual."):
                parameter.zero_()

    run = make_run(shape(), change=zero)
    facts = convert_low_rank(run, tmp_path / "out", tokens=64)
    assert (facts["rank"], facts["joint_rank"], facts["rotated"]) == (1, 0, False)
    assert_same_function(run, tmp_path / "out", held_out)
    assert torch.equal(stored(run)["embedding.weight"], stored(tmp_path / "out")["embedding.weight"])


def test_a_first_query_that_reads_one_source_is_no_direction(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(shape(width=24, residual=AttnResConfig(**RD, first_read=True)))
    assert convert_low_rank(run, tmp_path / "out", tokens=64)["rank"] == 8
    run = make_run(shape(width=24, residual=AttnResConfig(**RD, first_read=True, weighting="sigmoid")), name="sigmoid")
    assert convert_low_rank(run, tmp_path / "out2", tokens=64)["rank"] == 10  # there the score of one source counts


def test_the_basis_is_orthogonal_and_has_the_span_last() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(9, 4, generator=generator, dtype=torch.float64) @ torch.randn(4, 30, generator=generator, dtype=torch.float64)
    basis = query_basis(queries * torch.logspace(-3, 3, 9, dtype=torch.float64)[:, None])
    assert basis.joint_rank == 4 and basis.rotation is not None
    assert (basis.rotation @ basis.rotation.T - torch.eye(30)).abs().max() < 1e-14
    assert basis.columns(queries)[:, :26].abs().max() < 1e-12 < basis.columns(queries)[:, 26:].abs().min()
    assert query_basis(torch.zeros(9, 30, dtype=torch.float64)).joint_rank == 0
    nearly = queries + 1e-7 * torch.randn(9, 30, generator=generator, dtype=torch.float64)
    assert query_basis(nearly).joint_rank == 9  # float32's rounding is not taken for zero


@pytest.mark.parametrize("tied", [True, False])
def test_converting_again_changes_nothing(tied: bool, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(shape(tied_embeddings=tied, residual=AttnResConfig(**RD)), dtype=torch.float32)
    first = convert_low_rank(run, tmp_path / "once", tokens=64)
    second = convert_low_rank(tmp_path / "once", tmp_path / "twice", tokens=64)
    assert second["rank"] == first["rank"] == 8 and first["rotated"] and not second["rotated"] and not second["head_untied"]
    once, twice = stored(tmp_path / "once"), stored(tmp_path / "twice")
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)
    assert read_json(tmp_path / "once" / "config.json") == read_json(tmp_path / "twice" / "config.json")
    assert second["float64"]["logits_max_difference"] == 0


def test_a_larger_rank_can_be_made_smaller_again(make_run: MakeRun, tmp_path: Path, held_out: Tensor) -> None:
    run = make_run(shape(residual=AttnResConfig(**RD)))
    convert_low_rank(run, tmp_path / "large", rank=11, tokens=64)
    assert convert_low_rank(tmp_path / "large", tmp_path / "small", tokens=64)["rank"] == 8
    assert_same_function(run, tmp_path / "small", held_out)


def test_the_tie_stays_where_the_final_gain_is_one_number(make_run: MakeRun, tmp_path: Path, held_out: Tensor) -> None:
    def scalar(model: Decoder) -> None:
        model.get_parameter("norm.weight").fill_(0.7)

    run = make_run(shape(), change=scalar)
    facts = convert_low_rank(run, tmp_path / "out", tokens=64)
    assert not facts["head_untied"] and "head.weight" not in stored(tmp_path / "out")
    assert_same_function(run, tmp_path / "out", held_out)
    convert_low_rank(make_run(shape(), name="other"), tmp_path / "other out", tokens=64)
    assert (stored(tmp_path / "other out")["norm.weight"] == 1).all() and "head.weight" in stored(tmp_path / "other out")


@pytest.mark.parametrize("norms", ["post", "sandwich"])
def test_norms_behind_sublayers_need_gains_of_one_number(norms: str, make_run: MakeRun, tmp_path: Path, held_out: Tensor) -> None:
    run = make_run(shape(norms=norms, layers=2), change=spread("output_norm.weight"))
    convert_low_rank(run, tmp_path / "out", tokens=64)
    assert_same_function(run, tmp_path / "out", held_out)

    def uneven(model: Decoder) -> None:
        model.get_parameter("layers.1.mlp_output_norm.weight")[3] = 1.1

    run = make_run(shape(norms=norms, layers=2), change=uneven, name="uneven")
    with pytest.raises(RequestError, match=f"model.norms = '{norms}': the gain 'layers.1.mlp_output_norm.weight' differs"):
        convert_low_rank(run, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("residual", "reason"),
    [
        (PreNormConfig(), "residual.method = 'prenorm'"),
        (AttnResConfig(block=2, heads=2), "residual.heads = 2: groups of channels"),
        (AttnResConfig(block=2, keys="projected", rank=4), "residual.keys = 'projected'"),
        (AttnResConfig(block=2, rank=4), "residual.key_norm = 'slice' with residual.rank = 4 of 12"),
    ],
)
def test_a_method_that_a_rotation_would_change_is_refused(residual: Any, reason: str, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(shape(residual=residual))
    with pytest.raises(RequestError, match=reason):
        convert_low_rank(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def edited(run: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint, its hash with them."""
    found = checkpoint.latest(run)
    assert found is not None
    tensors = load_file(found / checkpoint.MODEL)
    change(tensors)
    save_file(tensors, found / checkpoint.MODEL)
    state = read_json(found / checkpoint.STATE)
    content = (found / checkpoint.MODEL).read_bytes()
    state["files"][checkpoint.MODEL] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_json(found / checkpoint.STATE, state)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (lambda t: t.update({"layers.0.mlp.down.bias": torch.ones(12)}), FailureError, "the checkpoint has 'layers.0.mlp.down.bias'"),
        (lambda t: t.update(extra=torch.ones(12)), FailureError, "the checkpoint has 'extra'"),
        (lambda t: t.pop("layers.1.mlp.up.weight"), FailureError, "'layers.1.mlp.up.weight' is missing"),
        (lambda t: t.update({"norm.weight": torch.ones(5)}), FailureError, r"'norm.weight' is \[5\]"),
        (lambda t: t.update({"norm.weight": torch.ones(12, dtype=torch.int8)}), RequestError, "stored as I8"),
        (lambda t: t["layers.0.mlp.up.weight"].fill_(float("nan")), FailureError, "'layers.0.mlp.up.weight' has a value"),
    ],
)
def test_a_checkpoint_that_is_not_the_models_is_refused(
    change: Callable[[dict[str, Tensor]], None], kind: type[Exception], reason: str, make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(shape(), dtype=torch.float32)
    edited(run, change)
    with pytest.raises(kind, match=reason):
        convert_low_rank(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_folders_that_are_no_runs_or_not_empty_are_refused(make_run: MakeRun, tmp_path: Path, trained_run: Path) -> None:
    run = make_run(shape())
    with pytest.raises(RequestError, match="no empty folder"):
        convert_low_rank(run, run)
    with pytest.raises(RequestError, match="is not a run folder"):
        convert_low_rank(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(RequestError, match="at step 2 of 4"):
        convert_low_rank(run, tmp_path / "out", evaluate=True)
    with pytest.raises(RequestError, match=r"has 300 tokens and the model of .* 290"):
        convert_low_rank(make_run(shape(vocabulary=290), name="smaller"), tmp_path / "out")
    found = checkpoint.latest(run)
    assert found is not None
    with (found / checkpoint.MODEL).open("rb+") as file:
        file.truncate(1000)
    with pytest.raises(FailureError, match="truncated"):
        convert_low_rank(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_logits_that_differ_are_not_written(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(shape())
    real = low_rank.Rewrite._in_basis
    monkeypatch.setattr(low_rank.Rewrite, "_in_basis", lambda self, query: real(self, query) * (1 + 1e-8))
    with pytest.raises(FailureError, match=r"in float64 a logit differs by .*e-0[789], where .* Nothing was written"):
        convert_low_rank(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_embedding_and_head_pass_in_pieces(make_run: MakeRun, tmp_path: Path, held_out: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(shape())
    convert_low_rank(run, tmp_path / "whole", tokens=64)
    monkeypatch.setattr(streamed, "ELEMENTS", 7 * 12)
    monkeypatch.setattr(streamed, "TOGETHER", 32)
    rows: list[int] = []
    real = low_rank.Rewrite.rows
    monkeypatch.setattr(low_rank.Rewrite, "rows", lambda self, name, a, b: rows.append(b - a) or real(self, name, a, b))
    facts = convert_low_rank(run, tmp_path / "pieces", tokens=64)
    assert max(rows) == 7 and sum(rows) == 2 * 300
    assert facts["float64"]["logits_max_difference"] < EXACT
    whole, pieces = stored(tmp_path / "whole"), stored(tmp_path / "pieces")
    assert whole.keys() == pieces.keys() and all(torch.allclose(whole[n], pieces[n], rtol=0, atol=1e-14) for n in whole)


def test_the_weights_of_one_layer_at_a_time(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(shape())
    there: list[int] = []
    real = Decoder.step

    def step(self: Decoder, *given: Any) -> Any:
        there.append(sum(not layer.mlp.down.weight.is_meta for layer in self.layers))
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", step)
        patch.setattr(low_rank, "_cross_entropies", lambda *_: {})
        convert_low_rank(run, tmp_path / "out", tokens=64)
    assert there and set(there) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_changes_by_the_rounding_of_the_storage(dtype: torch.dtype, make_run: MakeRun, tmp_path: Path) -> None:
    """Weights of a usual size: the paper's 8.9e-5 in bf16 is of trained models, whose logits rounding moves less."""
    run = make_run(shape(init_std=0.05), dtype=dtype, precision="bf16" if dtype == torch.bfloat16 else "float32")
    facts = convert_low_rank(run, tmp_path / "out", tokens=1024)
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {dtype}
    losses = facts["cross_entropy"]
    assert losses["tokens"] == 1024 and losses["precision"] == ("bf16" if dtype == torch.bfloat16 else "float32")
    assert losses["difference"] == pytest.approx(losses["converted"] - losses["original"], abs=1e-12)
    assert abs(losses["difference"]) < (1e-6 if dtype == torch.float32 else 3e-4)
    assert abs(losses["difference"]) <= losses["largest_token_difference"] < (1e-4 if dtype == torch.float32 else 3e-2)
    assert losses["largest_token_difference"] > 0
    assert facts["float64"]["logits_max_difference"] < EXACT


def test_the_converted_run_trains_on_as_its_configuration_says(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run(shape(), dtype=torch.float32), tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    facts = convert_low_rank(run, out, tokens=64)
    assert facts["optimiser"] == "fresh" and facts["source"]["step"] == 2 and facts["source"]["run"] == str(run)
    assert read_json(out / "conversion.json") == facts and read_json(out / "environment.json") == {"processor": "the first"}
    config = recorded_config(out)
    assert config is not None
    write_json(out / "environment.json", {})
    before = stored(out)
    result = train(config, out, console=False)
    assert result["step"] == 4 and result["status"] == "complete" and result["parameters"]["residual"] == 6 * facts["rank"]
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    after = stored(out)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(before)  # every parameter is trained, the new head and the queries among them
    assert train(config, out, console=False) == result


def test_a_finished_run_is_evaluated_on_its_converted_weights(trained_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_low_rank(trained_run, out, tokens=64)
    assert recorded_result(out) is None and not (out / "evaluations.jsonl").read_text()
    found = checkpoint.latest(out)
    assert found is not None and found.name == "step-00000004" and load_file(found / checkpoint.OPTIMISER) == {}
    facts = convert_low_rank(trained_run, tmp_path / "evaluated", tokens=64, evaluate=True)
    result, expected = recorded_result(tmp_path / "evaluated"), recorded_result(trained_run)
    assert result is not None and expected is not None
    assert result["nll"] != expected["nll"] and result["nll"] == pytest.approx(expected["nll"], abs=1e-5)
    assert facts["cross_entropy"]["converted"] == pytest.approx(result["nll"], abs=1e-9)  # the same 64 tokens
    assert result["gradient_norm"] == expected["gradient_norm"] and result["training_seconds"] == expected["training_seconds"]


def test_a_converted_run_names_the_order_of_batches_that_it_was_trained_in(trained_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    found = checkpoint.latest(run)
    assert found is not None
    write_json(found / checkpoint.STATE, {**read_json(found / checkpoint.STATE), "order": "feistel-0"})
    convert_low_rank(run, tmp_path / "out", tokens=64, evaluate=True)
    assert read_json(tmp_path / "out" / "result.json")["order"] == "feistel-0"


def test_the_commands_on_a_converted_run(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Options(form="low-rank", run=trained_run, out=tmp_path).tokens == low_rank.TOKENS
    out = tmp_path / "deeper" / "out"
    assert main(["convert", "low-rank", str(trained_run), str(out), "--tokens", "64"]) == 0
    said = capsys.readouterr().out
    assert "rank 8; 8 route queries have the joint rank 8" in said and "no longer tied" in said and "nats (64 tokens)" in said
    assert main(["info", str(out), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)["residual"]
    assert "rank 8" in described and "key_norm full" in described and "roles decoupled" in described
    options = ["--prompt", "abcd efgh", "--tokens", "12", "--temperature", "0"]
    texts = []
    for folder in (trained_run, out):
        assert main(["sample", str(folder), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > len("abcd efgh\n")
    assert main(["convert", "low-rank", str(out), str(tmp_path / "again"), "--tokens", "64", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == read_json(tmp_path / "again" / "conversion.json") and again["rank"] == 8 and not again["rotated"]
    assert main(["convert", "low-rank", str(trained_run), str(out)]) == 2
    assert "no empty folder" in capsys.readouterr().err
    assert main(["convert", "low-rank", str(trained_run), str(tmp_path / "no"), "--rank", "7"]) == 2
    assert "the smallest rank that keeps every score is 8" in capsys.readouterr().err


def test_every_field_of_the_method_is_decided() -> None:
    """A field that is added later must be thought about: does a rotation of the stream leave the read as it is?"""
    kept = {"block", "layers_per_block", "num_blocks", "ends", "summary", "window", "eps", "weighting", "values", "count_prior",
            "learned_count_prior", "roles", "first_read", "sum_reads", "phases"}  # fmt: skip
    rewritten, refused = {"rank", "key_norm", "key_gain", "scaled"}, {"keys", "heads"}
    assert {field.name for field in dataclasses.fields(AttnResConfig)} == kept | rewritten | refused
    names = {type(module) for module in Decoder(shape()).modules() if list(module.parameters(recurse=False))}
    assert {kind.__name__ for kind in names} == {"TokenEmbedding", "Projection", "Site", RMSNorm.__name__}
