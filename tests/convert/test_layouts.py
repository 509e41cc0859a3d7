"""Public checkpoints with Attention Residuals, read into our decoder, against their forward passes written out from their documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from public_models import ids
from safetensors.torch import save_file
from stored_runs import loaded, stored
from torch import Tensor
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.common.files import write_json
from depthroute.convert.adopt import adopt_checkpoint, adopted_routing
from depthroute.convert.layouts import llama, recognise
from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, PreNormConfig

Tensors = dict[str, Tensor]
VOCABULARY, WIDTH, LAYERS, HEADS, GROUPS, MLP = 64, 32, 5, 4, 2, 48
HEAD = WIDTH // HEADS
EXACT = 1e-12


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps) ** -0.5 * gain


def rotated(x: Tensor, base: float) -> Tensor:
    """[B, T, H, E], each pair (j, j + E/2) turned by t base^(-2j/E), angles in float32 as the projects have them."""
    half = x.shape[-1] // 2
    frequency = 1.0 / base ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angle = torch.outer(torch.arange(x.shape[1]).float(), frequency)
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(x: Tensor, tensors: Tensors, name: str, *, base: float, window: int | None = None, eps: float = 1e-5) -> Tensor:
    """Softmax attention with grouped queries; position t sees t and the window - 1 before it."""
    rows, length, _ = x.shape
    query, key, value = (
        F.linear(x, tensors[f"{name}.{part}_proj.weight"], tensors.get(f"{name}.{part}_proj.bias")).view(rows, length, -1, HEAD)
        for part in "qkv"
    )
    if f"{name}.q_norm.weight" in tensors:
        query, key = rms(query, tensors[f"{name}.q_norm.weight"], eps), rms(key, tensors[f"{name}.k_norm.weight"], eps)
    query, key = rotated(query, base), rotated(key, base)
    mixed = torch.zeros_like(query)
    for head in range(HEADS):
        group = head // (HEADS // key.shape[2])
        for t in range(length):
            start = 0 if window is None else max(0, t - window + 1)
            scores = (query[:, t, None, head] * key[:, start : t + 1, group]).sum(-1) * HEAD**-0.5
            mixed[:, t, head] = (scores.softmax(-1)[..., None] * value[:, start : t + 1, group]).sum(1)
    return F.linear(mixed.flatten(2), tensors[f"{name}.o_proj.weight"])


def mlp(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    gate, up = (F.linear(x, tensors[f"{name}.{part}_proj.weight"]) for part in ("gate", "up"))
    return F.linear(gate * gate.sigmoid() * up, tensors[f"{name}.down_proj.weight"])


class Names:
    """Tensors of a synthetic checkpoint, float64, random so that none could be left out or exchanged unseen."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.generator = torch.Generator().manual_seed(3)

    def add(self, name: str, *shape: int, scale: float = 0.2, mean: float = 0.0) -> None:
        self.tensors[name] = mean + scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def gain(self, name: str, width: int = WIDTH) -> None:
        self.add(name, width, mean=1.0, scale=0.3)

    def layer(self, prefix: str, attention: str, groups: int = GROUPS) -> None:
        for part, rows in (("q", WIDTH), ("k", groups * HEAD), ("v", groups * HEAD), ("o", WIDTH)):
            self.add(f"{prefix}{attention}.{part}_proj.weight", rows, WIDTH)
        for part, rows, columns in (("gate", MLP, WIDTH), ("up", MLP, WIDTH), ("down", WIDTH, MLP)):
            self.add(f"{prefix}mlp.{part}_proj.weight", rows, columns)

    def site(self, name: str) -> None:
        self.add(f"{name}_proj.weight", 1, WIDTH, scale=0.7)
        self.gain(f"{name}_norm.weight")

    def write(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir()
        save_file(self.tensors, folder / "model.safetensors")
        write_json(folder / "config.json", config)


def fla_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["TransformerForCausalLM"], "model_type": "transformer", "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_heads": HEADS, "num_kv_heads": GROUPS, "intermediate_size": MLP, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
        "rope_theta": 500.0, "norm_eps": 1e-2, "hidden_act": "swish", "elementwise_affine": True, "fuse_norm": True, "fuse_swiglu": True,
        "fuse_cross_entropy": True, "fuse_linear_cross_entropy": False, "use_l2warp": False, "hidden_ratio": 4, "qk_norm": False,
        "qkv_bias": False, "window_size": None, "tie_word_embeddings": False, "attnres_block_size": None, **changes,
    }  # fmt: skip


def fla_tensors(config: dict[str, Any]) -> Names:
    names = Names()
    names.add("model.embeddings.weight", VOCABULARY, WIDTH)
    for number in range(LAYERS):
        prefix = f"model.layers.{number}."
        names.layer(prefix, "attn")
        names.gain(f"{prefix}attn_norm.weight")
        names.gain(f"{prefix}mlp_norm.weight")
        if config["qkv_bias"]:
            for part, rows in (("q", WIDTH), ("k", GROUPS * HEAD), ("v", GROUPS * HEAD)):
                names.add(f"{prefix}attn.{part}_proj.bias", rows)
        if config["qk_norm"]:
            names.gain(f"{prefix}attn.q_norm.weight", HEAD)
            names.gain(f"{prefix}attn.k_norm.weight", HEAD)
        if config["attnres_block_size"]:
            names.site(f"{prefix}attn_res")
            names.site(f"{prefix}mlp_res")
    if config["attnres_block_size"]:
        names.site("model.res")
    names.gain("model.norm.weight")
    if not config["tie_word_embeddings"]:
        names.add("lm_head.weight", VOCABULARY, WIDTH)
    return names


def fla_forward(tensors: Tensors, config: dict[str, Any], tokens: Tensor) -> Tensor:
    """One read (peers.md, 1.2): key norm with gain, softmax over the sources, the norm behind the mixture with the same epsilon. A
    sub-layer whose number is a multiple of the block size begins a block: what was summed until then becomes a source."""
    eps, block = config["norm_eps"], config["attnres_block_size"]

    def read(sources: list[Tensor], name: str, norm: str) -> Tensor:
        values = torch.stack(sources)
        scores = (rms(values, tensors[f"{name}_norm.weight"], eps) * tensors[f"{name}_proj.weight"][0]).sum(-1)
        return rms((scores.softmax(0)[..., None] * values).sum(0), tensors[f"{norm}.weight"], eps)

    states: list[Tensor] = []
    running: Tensor | None = tensors["model.embeddings.weight"][tokens]
    for sublayer in range(2 * LAYERS):
        prefix, kind = f"model.layers.{sublayer // 2}.", ("attn", "mlp")[sublayer % 2]
        assert running is not None
        if block is None:
            inputs = rms(running, tensors[f"{prefix}{kind}_norm.weight"], eps)
        elif sublayer == 0:
            inputs = rms(running, tensors[f"{prefix}attn_norm.weight"], eps)  # one source: the query is not used
        else:
            inputs = read([*states, running], f"{prefix}{kind}_res", f"{prefix}{kind}_norm")
        base, window = config["rope_theta"], config["window_size"]
        output = (
            attention(inputs, tensors, f"{prefix}attn", base=base, window=window)
            if kind == "attn" else mlp(inputs, tensors, f"{prefix}mlp")
        )  # fmt: skip
        if block is not None and sublayer % block == 0:
            states, running = [*states, running], output
        else:
            running = running + output
    assert running is not None
    hidden = rms(running, tensors["model.norm.weight"], eps) if block is None else read([*states, running], "model.res", "model.norm")
    return F.linear(hidden, tensors.get("lm_head.weight", tensors["model.embeddings.weight"]))


@pytest.mark.parametrize(
    "changes",
    [
        {"attnres_block_size": 1}, {"attnres_block_size": 2, "window_size": 3}, {"attnres_block_size": 4, "qkv_bias": True},
        {"attnres_block_size": 100, "tie_word_embeddings": True}, {"attnres_block_size": 4, "qk_norm": True, "norm_eps": 1e-5},
    ],
    ids=str,
)  # fmt: skip
def test_flash_linear_attention(changes: dict[str, Any], tmp_path: Path) -> None:
    config = fla_config(**changes)
    names = fla_tensors(config)
    names.write(tmp_path / "public", config)
    found = adopt_checkpoint(tmp_path / "public", tmp_path / "run")
    with torch.no_grad():
        expected = fla_forward(names.tensors, config, ids(2, 12))
        assert (loaded(tmp_path / "run").logits(ids(2, 12)) - expected).abs().max() < EXACT * expected.abs().max()
    assert found["layout"] == "flash-linear-attention" and "skipped" in found["float64"] and "skipped" in found["original"]
    assert found["unused"] == ["model.layers.0.attn_res_norm.weight", "model.layers.0.attn_res_proj.weight"]
    assert {*found["tensors"].values(), *found["unused"]} == names.tensors.keys()
    tensors = stored(tmp_path / "run")
    assert tensors["residual.sites.3.query"].dtype == torch.float64 and tensors["residual.sites.3.query"].shape == (WIDTH,)


def test_flash_linear_attention_without_routing_is_given_some(tmp_path: Path) -> None:
    config = fla_config(window_size=4)
    names = fla_tensors(config)
    names.write(tmp_path / "public", config)
    found = adopt_checkpoint(tmp_path / "public", tmp_path / "run", residual=adopted_routing("block:2"))
    with torch.no_grad():
        expected = fla_forward(names.tensors, config, ids(2, 12))
        assert (loaded(tmp_path / "run").logits(ids(2, 12)) - expected).abs().max() < EXACT * expected.abs().max()
    assert found["float64"]["logits_max_difference"] < EXACT * found["float64"]["logits_max"]


def test_the_width_of_an_mlp_that_is_not_given(tmp_path: Path) -> None:
    names = fla_tensors(fla_config())
    names.write(tmp_path / "public", fla_config(hidden_size=1024, intermediate_size=None, hidden_ratio=4))
    foreign, _ = recognise(tmp_path / "public")
    assert foreign.model.mlp_width == 2816 and foreign.model.residual == PreNormConfig()  # 2730 up to a multiple of 256


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attnres_block_size": 3}, "attnres_block_size = 3; it takes null"),
        ({"qk_norm": True}, "norms by head have an epsilon of 1e-05"),
        ({"hidden_act": "powlu"}, "hidden_act = 'powlu'"),
        ({"elementwise_affine": False}, "elementwise_affine = False"),
        ({"attn": {"layers": [1]}}, "attn = "),
        ({"model_type": "gla"}, "model_type = 'gla'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = .*; it takes null"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, "rope_parameters = .*; it takes null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; it takes null"),
    ],
)  # fmt: skip
def test_settings_of_flash_linear_attention_without_a_place(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    config = fla_config(**changes)
    fla_tensors(config).write(tmp_path / "public", config)
    with pytest.raises(RequestError, match=match):
        recognise(tmp_path / "public")


def kimi_config(**changes: Any) -> dict[str, Any]:
    text = {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
        "intermediate_size": MLP, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
        "attn_res_block_size": 2, "hidden_act": "silu", "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    return {"architectures": ["KimiForConditionalGeneration"], "text_config": text}


def kimi_tensors(prefix: str = "language_model.") -> Names:
    names = Names()
    names.add(f"{prefix}model.embed_tokens.weight", VOCABULARY, WIDTH)
    for number in range(LAYERS):
        layer = f"{prefix}model.layers.{number}."
        names.layer(layer, "self_attn")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            names.gain(f"{layer}{norm}.weight")
        names.site(f"{layer}self_attention_res")
        names.site(f"{layer}mlp_res")
    names.site(f"{prefix}model.output_attn_res")
    names.gain(f"{prefix}model.norm.weight")
    names.add(f"{prefix}lm_head.weight", VOCABULARY, WIDTH)
    return names


def kimi_forward(tensors: Tensors, config: dict[str, Any], tokens: Tensor, prefix: str) -> Tensor:
    """Attention Residuals of K3 (attention_residuals.md, 6.3): a bank of rows and a running prefix. Keys have no gain, the query has it."""
    text, block = config["text_config"], config["text_config"]["attn_res_block_size"]
    eps = text["rms_norm_eps"]

    def read(bank: list[Tensor], running: Tensor, name: str) -> Tensor:
        values = torch.stack([*bank, running])
        keys = values * (values.square().mean(-1, keepdim=True) + eps) ** -0.5
        scores = (keys * (tensors[f"{name}_norm.weight"] * tensors[f"{name}_proj.weight"][0])).sum(-1)
        return (scores.softmax(0)[..., None] * values).sum(0)

    bank: list[Tensor] = []
    running: Tensor | None = tensors[f"{prefix}model.embed_tokens.weight"][tokens]
    for number in range(LAYERS):
        layer = f"{prefix}model.layers.{number}."
        assert running is not None
        inputs = read(bank, running, f"{layer}self_attention_res") if bank else running
        if number % block == 0:
            bank, running = [*bank, running], None
        inputs = rms(inputs, tensors[f"{layer}input_layernorm.weight"], eps)
        output = attention(inputs, tensors, f"{layer}self_attn", base=text["rope_theta"])
        running = output if running is None else running + output
        inputs = read(bank, running, f"{layer}mlp_res")
        running = running + mlp(rms(inputs, tensors[f"{layer}post_attention_layernorm.weight"], eps), tensors, f"{layer}mlp")
    assert running is not None
    hidden = rms(read(bank, running, f"{prefix}model.output_attn_res"), tensors[f"{prefix}model.norm.weight"], eps)
    return F.linear(hidden, tensors[f"{prefix}lm_head.weight"])


@pytest.mark.parametrize("block", [1, 2, 3, 12])
@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_kimi_k3(block: int, prefix: str, tmp_path: Path) -> None:
    config, names = kimi_config(attn_res_block_size=block), kimi_tensors(prefix)
    names.write(tmp_path / "public", config)
    found = adopt_checkpoint(tmp_path / "public", tmp_path / "run")
    with torch.no_grad():
        expected = kimi_forward(names.tensors, config, ids(2, 12), prefix)
        assert (loaded(tmp_path / "run").logits(ids(2, 12)) - expected).abs().max() < EXACT * expected.abs().max()
    unused = [f"{prefix}model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")]
    assert found["layout"] == "Kimi K3" and found["unused"] == unused
    assert {*found["tensors"].values(), *unused} == names.tensors.keys()


KDA = ("self_attn.A_log", "self_attn.dt_bias", "self_attn.q_conv1d.weight", "self_attn.f_a_proj.weight", "self_attn.b_proj.weight")
MLA = ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight", "self_attn.q_a_proj.weight", "self_attn.q_b_proj.weight")
EXPERTS = ("block_sparse_moe.experts.0.w1.weight", "block_sparse_moe.gate.weight", "mlp.shared_experts.up_proj.weight")


def test_parts_of_kimi_k3_without_a_place_are_named(tmp_path: Path) -> None:
    names = kimi_tensors()
    for number, parts in ((0, KDA), (1, (*KDA, *EXPERTS)), (2, EXPERTS), (3, MLA)):
        for part in parts:
            names.add(f"language_model.model.layers.{number}.{part}", 4)
    names.add("vision_tower.patch_embed.weight", 4)
    names.write(tmp_path / "public", kimi_config(kv_lora_rank=512))
    with pytest.raises(RequestError) as caught:
        recognise(tmp_path / "public")
    message = str(caught.value)
    assert "Kimi Delta Attention (2 layers, 0 to 1: 'language_model.model.layers.0.self_attn.A_log')" in message
    assert "latent attention (MLA) (layer 3: " in message and "experts (2 layers, 1 to 2: " in message
    assert "other models (vision_tower)" in message and "depthroute geometry" in message


@pytest.mark.parametrize("part", [*KDA, *MLA, *EXPERTS])
def test_each_such_part_is_seen(part: str, tmp_path: Path) -> None:
    names = kimi_tensors()
    names.add(f"language_model.model.layers.1.{part}", 4)
    names.write(tmp_path / "public", kimi_config())
    with pytest.raises(RequestError, match="has parts that our decoder has no place for"):
        recognise(tmp_path / "public")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_theta": None}, "lacks 'rope_theta'"), ({"mla_use_nope": True}, "mla_use_nope = True"),
        ({"activation_situ_beta": 4.0}, "activation_situ_beta = 4.0; it takes null"), ({"num_experts": 896}, "num_experts = 896"),
        ({"attn_res_block_size": None}, "lacks 'attn_res_block_size'"), ({"some_switch": 1}, "some_switch = 1, of which"),
    ],
)  # fmt: skip
def test_settings_of_kimi_k3_without_a_place(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    kimi_tensors().write(tmp_path / "public", kimi_config(**changes))
    with pytest.raises(RequestError, match=match):
        recognise(tmp_path / "public")


@pytest.mark.parametrize(
    ("outer", "match"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True, and False inside; one of the two is wrong"),
        ({"vocab_size": VOCABULARY + 1}, "vocab_size = 65, and 64 inside"),
        ({"quantization_config": {"bits": 4}}, r"outside text_config, has quantization_config = \{'bits': 4\}"),
        ({"some_switch": 1}, "some_switch = 1, of which"), ({"text_config": [1]}, r"text_config = \[1\]; it takes an object"),
    ],
)  # fmt: skip
def test_what_kimi_k3_says_outside_the_text_configuration(outer: dict[str, Any], match: str, tmp_path: Path) -> None:
    kimi_tensors().write(tmp_path / "public", {**kimi_config(), **outer})
    with pytest.raises(RequestError, match=match):
        recognise(tmp_path / "public")


@pytest.mark.parametrize("inside", [{}, {"tie_word_embeddings": None}])
def test_tied_embeddings_of_kimi_k3_may_be_said_outside(inside: dict[str, Any], tmp_path: Path) -> None:
    names = kimi_tensors()
    del names.tensors["language_model.lm_head.weight"]
    config = kimi_config()
    del config["text_config"]["tie_word_embeddings"]
    config["text_config"] |= inside
    harmless = {"vision_config": {"depth": 2}, "media_placeholder_token_id": 7, "vocab_size": VOCABULARY, "dtype": "bfloat16"}
    names.write(tmp_path / "public", {**config, **harmless, "tie_word_embeddings": True})
    foreign, _ = recognise(tmp_path / "public")
    assert foreign.model.tied_embeddings
    adopt_checkpoint(tmp_path / "public", tmp_path / "run")


def test_the_route_queries_of_a_checkpoint_in_half_precision_are_float32(tmp_path: Path) -> None:
    names = fla_tensors(config := fla_config(attnres_block_size=2))
    names.tensors = {name: tensor.bfloat16() for name, tensor in names.tensors.items()}
    names.write(tmp_path / "public", config)
    adopt_checkpoint(tmp_path / "public", tmp_path / "run")
    tensors = stored(tmp_path / "run")
    theirs = names.tensors["model.layers.1.mlp_res_proj.weight"][0]
    assert torch.equal(tensors["residual.sites.3.query"], theirs.float())
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert all(kind == (torch.float32 if name.startswith("residual.") else torch.bfloat16) for name, kind in kinds.items())


@pytest.mark.parametrize("layout", ["flash-linear-attention", "Kimi K3"])
def test_routing_of_its_own_is_kept_and_must_be_whole(layout: str, tmp_path: Path) -> None:
    config = kimi_config() if layout == "Kimi K3" else fla_config(attnres_block_size=2)
    names = kimi_tensors() if layout == "Kimi K3" else fla_tensors(config)
    names.write(tmp_path / "public", config)
    with pytest.raises(RequestError, match=r"has routing of its own .*; leave --residual out"):
        adopt_checkpoint(tmp_path / "public", tmp_path / "run", residual=adopted_routing("block:2"))
    foreign, _ = recognise(tmp_path / "public")
    assert isinstance(foreign.model.residual, AttnResConfig) and not foreign.model.residual.sum_reads
    last = next(name for name in names.tensors if name.endswith(("model.res_proj.weight", "output_attn_res_proj.weight")))
    del names.tensors[last]
    extra = next(name for name in names.tensors if ".layers.2." in name and "mlp_res_proj" in name)
    names.tensors[extra] = names.tensors[extra].flatten()  # a vector is taken as well
    other = extra.replace("mlp_res_proj", "mlp_res_norm")
    names.tensors[other] = torch.ones(2, WIDTH, dtype=torch.float64)
    save_file(names.tensors, tmp_path / "public" / "model.safetensors")
    with pytest.raises(RequestError, match=rf"1 missing: '{last}'; 1 of another shape: '{other}' is \[2, 32\], not \[32\]"):
        adopt_checkpoint(tmp_path / "public", tmp_path / "run")
    assert not (tmp_path / "run").exists()


ROPE32 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
PUBLISHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "SmolLM2-135M": ("Llama", 134_515_008, {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000, "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
        "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "pretraining_tp": 1, "mlp_bias": False,
        "attention_bias": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "torch_dtype": "bfloat16",
    }),
    "Llama-3.2-1B": ("Llama", 1_235_814_400, {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": ROPE32,
        "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "pretraining_tp": 1, "mlp_bias": False, "attention_bias": False,
    }),
    "Mistral-7B-v0.1": ("Mistral", 7_241_732_096, {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "sliding_window": 4096,
        "tie_word_embeddings": False,
    }),
    "Qwen2.5-0.5B": ("Qwen2", 494_032_768, {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "sliding_window": 32768,
        "max_window_layers": 24, "use_sliding_window": False, "use_mrope": False, "tie_word_embeddings": True,
    }),
    "Qwen3-0.6B": ("Qwen3", 596_049_920, {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None,
        "rms_norm_eps": 1e-06, "sliding_window": None, "max_window_layers": 28, "use_sliding_window": False, "attention_bias": False,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    layout, parameters, config = PUBLISHED[name]
    common = {"hidden_act": "silu", "use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02}
    foreign = llama.read(f"{layout}ForCausalLM", {**common, **config}, ())
    with torch.device("meta"):
        assert Decoder(foreign.model).parameter_counts()["total"] == parameters
    assert foreign.model.has_window(0) == (name == "Mistral-7B-v0.1") and foreign.model.context == config["max_position_embeddings"]
    assert (foreign.model.rope_scaling is not None) == (name == "Llama-3.2-1B")
