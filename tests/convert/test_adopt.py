"""An adopted checkpoint is the function that it was, with routing that has a gradient; what cannot be that is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from public_models import SHAPES, change_config, exact, ids, logits, public_model
from safetensors.torch import load_file
from stored_runs import loaded, stored
from torch import Tensor, nn

from depthroute.cli.adopt import main as adopt_command
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json
from depthroute.convert import adopt as adopting
from depthroute.convert.adopt import adopt_checkpoint, adopted_routing
from depthroute.convert.layouts import llama
from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, ResidualConfig, parse_residual
from depthroute.train import load_trained, recorded_config

EXACT = 1e-12  # of the largest logit


def of_largest(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "public"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_original(name: str, source: Path, out: Path) -> None:
    model = exact(public_model(name, source))
    adopt_checkpoint(source, out, residual=adopted_routing("rd:2"), original=False)
    with torch.no_grad():
        assert of_largest(loaded(out).logits(ids()), logits(model, ids())) < EXACT


RESIDUALS = {
    "full": adopted_routing("full"),
    "block:2": adopted_routing("block:2"),
    "blocks of 4, two routes, keys of 8": adopted_routing("block:4", role_decoupled=True, rank=8),
    "keys of 8, full norm": adopted_routing("low-rank:2,rank=8,key_norm=full"),
    "projected keys": adopted_routing("low-rank:2,rank=8,keys=projected"),
    "heads, averaged roles": adopted_routing("block:2,heads=2,roles=average"),
    "a prior of zero": adopted_routing("block:2,count_prior=0,learned_count_prior=true"),
    "one block, phases off": adopted_routing("block:6,phases=false"),
    "prenorm": adopted_routing("prenorm"),
    "muddformer": adopted_routing("muddformer"),
    "denseformer": adopted_routing("denseformer"),
}


@pytest.mark.parametrize("residual", RESIDUALS.values(), ids=RESIDUALS)
def test_whatever_the_routing_is(residual: ResidualConfig | None, source: Path, out: Path) -> None:
    model = exact(public_model("llama tied, biases, llama3 rope", source))
    found = adopt_checkpoint(source, out, residual=residual, original=False)
    with torch.no_grad():
        assert of_largest(loaded(out).logits(ids()), logits(model, ids())) < EXACT
    if found["residual"]["method"] != "prenorm":
        assert found["float64"]["logits_max_difference"] < EXACT * found["float64"]["logits_max"]


def test_the_sum_of_the_sources_is_what_keeps_epsilon_in_its_place(source: Path, out: Path) -> None:
    model = exact(public_model("llama, linear rope, eps 0.1", source))
    adopt_checkpoint(source, out, residual=adopted_routing("full"), original=False)
    adopted = loaded(out)
    mean = Decoder(dataclasses.replace(adopted.config, residual=AttnResConfig())).double().eval()
    mean.load_state_dict(adopted.state_dict())
    with torch.no_grad():
        expected = logits(model, ids())
        assert of_largest(adopted.logits(ids()), expected) < EXACT
        assert of_largest(mean.logits(ids()), expected) > 1e-2


def body_gradients(model: nn.Module, values: Tensor, targets: Tensor) -> dict[str, Tensor]:
    torch.nn.functional.cross_entropy(values.flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("text", ["full", "rd:2"])
def test_gradients_of_the_body_are_those_of_the_original(text: str, source: Path, out: Path) -> None:
    model = exact(public_model("qwen3, window in one layer", source))
    names = adopt_checkpoint(source, out, residual=adopted_routing(text), original=False)["tensors"]
    adopted = loaded(out)
    targets = ids(3, 25)[:, 1:]
    theirs, ours = body_gradients(model, logits(model, ids()), targets), body_gradients(adopted, adopted.logits(ids()), targets)
    assert {names[name] for name in ours if not name.startswith("residual.")} == theirs.keys()
    for name, gradient in ours.items():
        if name.startswith("residual."):
            assert gradient.abs().max() > 1e-6 or name.endswith("key_gain")  # the queries learn from the first step
        else:
            assert of_largest(gradient, theirs[names[name]]) < EXACT, name


@pytest.mark.parametrize("text", ["full", "rd:2"])
@pytest.mark.parametrize("name", ["llama", "qwen3, biases", "mistral, window 5"])
def test_in_bf16_it_is_as_near_the_truth_as_the_original(name: str, text: str, source: Path, out: Path) -> None:
    model = public_model(name, source, dtype=torch.bfloat16)
    adopt_checkpoint(source, out, residual=adopted_routing(text), original=False)
    adopted, tokens = load_trained(out)[1].bfloat16().eval(), ids(8)
    with torch.no_grad():
        theirs, ours = logits(model, tokens).double(), adopted.logits(tokens).double()
        truth = logits(exact(model), tokens)  # of the same stored weights

    def error(found: Tensor) -> float:
        return ((found - truth).norm() / truth.norm()).item()

    assert 1e-3 < error(theirs) < 0.1
    assert error(ours) < 1.5 * error(theirs)


def test_the_folder_and_what_it_says(source: Path, out: Path) -> None:
    public_model("llama tied, biases, llama3 rope", source, dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    found = adopt_checkpoint(source, out, residual=adopted_routing("block:2"), settings={"train.steps": "7", "model.context": "32"})
    config = recorded_config(out)
    assert config is not None and config.train.steps == 7 and config.model.context == 32 and config.data == ""
    assert config.model.residual == AttnResConfig(block=2, sum_reads=True)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "checkpoints", "adoption.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    }  # fmt: skip
    assert read_json(out / "adoption.json") == found
    assert found["layout"] == "Llama" and found["source"]["config"]["vocab_size"] == 64
    assert "lm_head.weight" not in found["tensors"].values()
    assert found["tensors"]["layers.1.mlp.gate.bias"] == "model.layers.1.mlp.gate_proj.bias"
    tensors, theirs = stored(out), load_file(source / "model.safetensors")
    for ours, name in found["tensors"].items():
        assert tensors[ours].dtype == torch.bfloat16 and torch.equal(tensors[ours], theirs[name])
    routes = {name: tensor for name, tensor in tensors.items() if name.startswith("residual.")}
    assert len(routes) == 12 and all(tensor.dtype == torch.float32 for tensor in routes.values())
    original = found["original"]
    assert original["precision"] == "float32" and 0 < original["logits_max_difference"] < 1e-5 * original["logits_max"]
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]


def test_bf16_on_request(source: Path, out: Path) -> None:
    public_model("llama", source)
    found = adopt_checkpoint(source, out, residual=adopted_routing("block:2"), dtype="bf16")
    assert stored(out)["layers.0.mlp.up.weight"].dtype == torch.bfloat16
    assert found["original"]["logits_max_difference"] < 1e-5 * found["original"]["logits_max"]  # the original was rounded too


def test_a_transformers_without_the_class_is_left_out(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    public_model("qwen3, biases", source)
    monkeypatch.setattr(transformers, "Qwen3ForCausalLM", None)  # what getattr makes of a version that lacks it
    found = adopt_checkpoint(source, out, residual=adopted_routing("block:2"))
    assert found["original"] == {"skipped": f"transformers {transformers.__version__} has no Qwen3ForCausalLM"}


def test_shards_and_an_index(source: Path, out: Path) -> None:
    model = exact(public_model("llama", source, shard="20KB"))
    assert len(list(source.glob("*.safetensors"))) > 2
    adopt_checkpoint(source, out, residual=adopted_routing("block:2"), original=False)
    with torch.no_grad():
        assert of_largest(loaded(out).logits(ids()), logits(model, ids())) < EXACT


def test_fields_of_transformers_4(source: Path, out: Path) -> None:
    model = exact(public_model("llama tied, biases, llama3 rope", source))
    scaling = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    change_config(source, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling, torch_dtype="float32", num_beams=1)
    adopt_checkpoint(source, out, residual=adopted_routing("block:2"), original=False)
    with torch.no_grad():
        assert of_largest(loaded(out).logits(ids()), logits(model, ids())) < EXACT


def test_what_config_json_leaves_out_is_what_transformers_takes(source: Path, out: Path) -> None:
    public_model("qwen3, biases", source, rms_norm_eps=1e-6, head_dim=128, num_key_value_heads=32, num_attention_heads=32)
    config = read_json(source / "config.json")
    for name in ("rms_norm_eps", "head_dim", "num_key_value_heads", "rope_parameters", "hidden_act", "tie_word_embeddings",
                 "sliding_window", "layer_types", "max_window_layers", "use_sliding_window"):  # fmt: skip
        del config[name]
    (source / "config.json").write_text(json.dumps(config))
    found = adopt_checkpoint(source, out, residual=adopted_routing("block:2"))["original"]  # transformers reads the same file
    assert found["logits_max_difference"] < 1e-5 * found["logits_max"]


def test_windows_from_a_layer_on(source: Path, out: Path) -> None:
    model = exact(public_model("qwen2, window 5 from layer 1, tied", source))
    change_config(source, layer_types=None)  # transformers 5 writes both
    adopt_checkpoint(source, out, residual=adopted_routing("block:2"), original=False)
    with torch.no_grad():
        assert of_largest(loaded(out).logits(ids()), logits(model, ids())) < EXACT


def test_a_wrong_mapping_is_seen_before_the_folder_is_there(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public_model("llama", source)
    swapped = {**llama.PARTS, "mlp.gate": "mlp.up_proj", "mlp.up": "mlp.gate_proj"}
    monkeypatch.setattr(llama, "NAMING", dataclasses.replace(llama.NAMING, parts=swapped))
    with pytest.raises(FailureError, match=r"in float32 a logit differs by .* from that of LlamaForCausalLM"):
        adopt_checkpoint(source, out, residual=adopted_routing("block:2"))
    assert [path.name for path in out.parent.iterdir()] == ["public"]


def test_routing_that_is_not_the_plain_stream_is_seen_before_the_folder_is_there(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public_model("llama", source)
    monkeypatch.setattr(adopting, "_check_start", lambda residual: None)
    with pytest.raises(RequestError, match="in float64 a logit of the routed model differs"):
        adopt_checkpoint(source, out, residual=parse_residual("full"))
    assert [path.name for path in out.parent.iterdir()] == ["public"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("sigmoid", "residual.weighting = 'sigmoid'"), ("window:2", "residual.window = 2"), ("inkling:2", "residual.values = 'normed'"),
        ("rms-block:2", "residual.summary = 'rms'"), ("count-prior:2", "residual.count_prior = 1.0"), ("hc:2", "in float64 a logit"),
        ("value-residual", "in float64 a logit"), ("postnorm", "It takes full, block:N and their forms"),
        ("rezero", "does not start as the plain residual stream"), ("highway", "does not start as the plain residual stream"),
    ],
)  # fmt: skip
def test_methods_that_start_as_something_else(text: str, match: str, source: Path, out: Path) -> None:
    public_model("llama", source)
    with pytest.raises(RequestError, match=match):
        adopt_checkpoint(source, out, residual=adopted_routing(text))
    assert [path.name for path in out.parent.iterdir()] == ["public"]


@pytest.mark.parametrize(
    ("text", "options", "match"),
    [
        ("hc:2", {"rank": 8}, "--rank is for Attention Residuals"), ("rd:2", {"role_decoupled": True}, "has roles of its own"),
        ("low-rank:2,rank=4", {"rank": 8}, "has a rank of its own"), ("hc:2", {"role_decoupled": True}, "--role-decoupled is for"),
    ],
)  # fmt: skip
def test_nothing_is_given_twice(text: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        adopted_routing(text, **options)


def test_the_command(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public_model("llama", source)
    adopt_command([str(source), str(out), "--residual", "block:2", "--role-decoupled", "--rank", "8", "--set", "train.route_rate=30"])
    printed = capsys.readouterr().out
    assert "Llama, 30 tensors taken over" in printed and printed.count("logits against") == 2
    config = recorded_config(out)
    assert config is not None and config.train.route_rate == 30
    assert config.model.residual == AttnResConfig(block=2, roles="decoupled", rank=8, key_gain=False, sum_reads=True)
    with pytest.raises(RequestError, match="no empty folder"):
        adopt_command([str(source), str(out), "--residual", "block:2"])
    with pytest.raises(RequestError, match="give it too"):
        adopt_command([str(source), str(out), "--rank", "8"])
