"""What is no checkpoint of our decoder is refused before anything is written, by the field or the tensors that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from public_models import change_config, change_tensors, public_model
from safetensors.torch import load_file, save_file

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import write_json
from depthroute.convert.adopt import adopt_checkpoint, adopted_routing
from depthroute.convert.layouts import recognise


@pytest.fixture
def source(tmp_path: Path) -> Path:
    public_model("llama", tmp_path / "public")
    return tmp_path / "public"


def refused(source: Path, match: str, kind: type[Exception] = RequestError) -> None:
    with pytest.raises(kind, match=match):
        adopt_checkpoint(source, source.parent / "run", residual=adopted_routing("block:2"))
    assert {path.name for path in source.parent.iterdir()} <= {"public", "tokens"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; it takes 'silu' or 'swish'"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\}; it takes null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'. Allowed: default, linear, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section = "),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one object for all layers"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"num_local_experts": 8}, "num_local_experts = 8, of which this version does not know what it changes"),
        ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
        ({"activation": "geglu"}, "activation = 'geglu'; it takes 'swiglu'"),
        ({"qk_norm": True}, "qk_norm = True, of which"),
        ({"sliding_window": 4}, "sliding_window = 4, of which"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes'; it takes true or false"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0; it takes a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0; it takes a number above 0"),
        ({"architectures": ["LlamaForCausaLM"]}, "perhaps you meant 'LlamaForCausalLM'. Allowed: LlamaForCausalLM, Mistral"),
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture 'GPT2LMHeadModel'"),
        ({"architectures": None}, "architectures = None; it takes a list of one"),
        ({"num_attention_heads": 3}, "model.key_value_heads = 2 does not divide model.heads = 3"),
    ],
)  # fmt: skip
def test_settings_without_a_place(changes: dict[str, Any], match: str, source: Path) -> None:
    change_config(source, **changes)
    refused(source, match)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("qwen3, biases", {"layer_types": ["chunked_attention"] * 3}, "3 entries, each full_attention or sliding_attention"),
        ("qwen3, biases", {"layer_types": ["sliding_attention"] * 3}, "and use_sliding_window = False or no sliding_window; one"),
        ("qwen3, window in one layer", {"sliding_window": None}, "or no sliding_window; one of these"),
        ("qwen3, biases", {"max_window_layers": "all"}, "max_window_layers = 'all'"),
        ("qwen3, biases", {"mlp_bias": True}, "mlp_bias = True"),
        ("mistral, window 5", {"layer_types": ["sliding_attention"] * 3}, "layer_types = "),
        ("mistral, window 5", {"attention_bias": True}, "attention_bias = True"),
    ],
)  # fmt: skip
def test_settings_of_other_members(name: str, changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    public_model(name, tmp_path / "public")
    change_config(tmp_path / "public", **changes)
    refused(tmp_path / "public", match)


def test_a_checkpoint_of_which_something_is_missing_or_wrong(source: Path) -> None:
    change_tensors(source, **{
        "model.norm.weight": None, "model.layers.1.mlp.up_proj.weight": None, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(8), "lm_head.weight": torch.ones(65, 32),
    })  # fmt: skip
    refused(source, (
        r"2 missing: 'model.layers.1.mlp.up_proj.weight', 'model.norm.weight'; "
        r"1 without a place: 'model.layers.0.self_attn.q_norm.weight'; 1 of another shape: 'lm_head.weight' is \[65, 32\], not \[64, 32\]"
    ))  # fmt: skip


def test_long_lists_are_counted(source: Path) -> None:
    names = load_file(source / "model.safetensors").keys()
    change_tensors(source, **{name: None for name in names if ".layers." in name})
    refused(source, r"27 missing: .* and 22 more\. Nothing was written")


def test_old_buffers_are_left_out(source: Path) -> None:
    change_tensors(source, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    found = adopt_checkpoint(source, source.parent / "run", residual=adopted_routing("block:2"), original=False)
    assert found["unused"] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_a_head_beside_tied_embeddings(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    change_config(source, tie_word_embeddings=True)
    refused(source, "'lm_head.weight' that differs from the embedding")
    change_tensors(source, **{"lm_head.weight": tensors["model.embed_tokens.weight"]})
    found = adopt_checkpoint(source, source.parent / "run", residual=adopted_routing("block:2"), original=False)
    assert found["unused"] == ["lm_head.weight"]


def test_folders_that_hold_something_else(source: Path, tmp_path: Path, trained_run: Path) -> None:
    with pytest.raises(RequestError, match="is a run folder of depthroute already"):
        recognise(trained_run)
    with pytest.raises(RequestError, match=r"has no config\.json"):
        recognise(tmp_path)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused(source, r"holds pytorch_model.bin and no safetensors. Pickled weights can run code .* save_pretrained")
    (source / "pytorch_model.bin").unlink()
    refused(source, "holds no safetensors")


def test_files_that_are_damaged(source: Path) -> None:
    whole, names = (source / "model.safetensors").read_bytes(), sorted(load_file(source / "model.safetensors"))
    (source / "model.safetensors").write_bytes(whole[:-100])
    refused(source, "is truncated, or not safetensors", FailureError)
    (source / "model.safetensors").rename(source / "part.safetensors")
    write_json(source / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "part.safetensors")})
    refused(source, "is truncated, or not safetensors", FailureError)
    write_json(source / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "gone.safetensors")})
    refused(source, "gone.safetensors is missing", FailureError)
    save_file({"model.norm.weight": torch.ones(32)}, source / "gone.safetensors")
    refused(source, "gone.safetensors lacks 'model.embed_tokens.weight', which it has by the index", FailureError)


def test_a_shard_that_is_a_folder(source: Path) -> None:
    names = sorted(load_file(source / "model.safetensors"))
    (source / "model.safetensors").unlink()
    (source / "part.safetensors").mkdir()
    write_json(source / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "part.safetensors")})
    refused(source, r"part\.safetensors cannot be read as a file", FailureError)


def test_fields_that_are_known_to_change_nothing(source: Path) -> None:
    change_config(source, max_sequence_length=2048, activation="swiglu")
    assert recognise(source)[0].layout == "Llama"


def test_a_context_beyond_that_of_the_checkpoint(source: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.context = 65 is longer than .* max_position_embeddings = 64.* It takes 64 at most"):
        adopt_checkpoint(source, source.parent / "run", residual=adopted_routing("block:2"), settings={"model.context": "65"})
    adopt_checkpoint(
        source, source.parent / "run", residual=adopted_routing("block:2"), settings={"model.context": "64"}, original=False
    )


def test_values_that_are_not_finite(source: Path) -> None:
    change_tensors(source, **{"model.norm.weight": torch.full((32,), torch.nan)})
    refused(source, "'norm.weight' has a value that", FailureError)


def test_integers(source: Path) -> None:
    change_tensors(source, **{"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    refused(source, "'model.norm.weight' is stored as I8")


def test_routing_is_needed(source: Path) -> None:
    with pytest.raises(RequestError, match="this Llama checkpoint has no routing; say which to give it, such as --residual block:8"):
        adopt_checkpoint(source, source.parent / "run")
