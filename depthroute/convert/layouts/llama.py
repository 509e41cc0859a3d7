"""The Llama family in transformers: Llama, Mistral, Qwen2, Qwen3. RMSNorm before every sub-layer, RoPE on halves of heads, SwiGLU.

Defaults are those of the configuration classes of transformers, for a config.json may leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.convert.foreign import Fields, Foreign, Naming
from depthroute.convert.layouts.rope import rotary
from depthroute.model import ModelConfig

PARTS = {
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj", "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip
NAMING = Naming(embedding="model.embed_tokens", norm="model.norm", head="lm_head", layer="model.layers.{}.", parts=PARTS)


@dataclass(frozen=True, kw_only=True)
class _Member:
    """Where a member of the family differs: defaults, and which fields it has."""

    layout: str
    context: int
    key_value_heads: int | None = None
    head_width: int | None = None
    qk_norm: bool = False
    always_biased: tuple[str, ...] = ()
    attention_bias: bool = True
    mlp_bias: bool = False
    qwen_windows: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": _Member(layout="Llama", context=2_048, mlp_bias=True),
    "MistralForCausalLM": _Member(layout="Mistral", context=131_072, key_value_heads=8, attention_bias=False),
    "Qwen2ForCausalLM": _Member(
        layout="Qwen2", context=32_768, key_value_heads=32, always_biased=("query", "key", "value"), attention_bias=False, qwen_windows=True
    ),
    "Qwen3ForCausalLM": _Member(layout="Qwen3", context=32_768, key_value_heads=32, head_width=128, qk_norm=True, qwen_windows=True),
}
MISTRAL_WINDOW = QWEN_WINDOW = 4_096
QWEN_FULL_LAYERS = 28


def read(architecture: str, config: Mapping[str, Any], names: Collection[str]) -> Foreign:
    """The decoder of a configuration of this family; RequestError where it has a setting that our decoder has no place for."""
    member = ARCHITECTURES[architecture]
    fields = Fields(config, f"config.json of the {architecture}")
    heads, layers = fields.whole("num_attention_heads"), fields.whole("num_hidden_layers")
    head_width = fields.maybe_whole("head_dim") or member.head_width
    key_value_heads = fields.maybe_whole("num_key_value_heads") if fields.given("num_key_value_heads") else member.key_value_heads
    context = fields.whole("max_position_embeddings", member.context)
    base, scaling = rotary(fields, context=context)
    fields.only("hidden_act", "silu", "swish")
    biases = list(member.always_biased)
    if member.attention_bias and fields.flag("attention_bias"):
        biases += ["query", "key", "value", "output"]
    if member.mlp_bias and fields.flag("mlp_bias"):
        biases += ["gate", "up", "down"]
    fields.only("attention_bias", bool(member.always_biased), False)  # where the class does not have it
    fields.only("mlp_bias", False)
    window, windowed = _windows(fields, member, layers)
    model = ModelConfig(
        vocabulary=fields.whole("vocab_size"), width=fields.whole("hidden_size"), layers=layers, heads=heads,
        mlp_width=fields.whole("intermediate_size"), context=context, key_value_heads=key_value_heads, head_width=head_width,
        rope_base=base, rope_scaling=scaling, rope_precision="float32", biases=tuple(biases), attention_window=window,
        windowed_layers=windowed,
        qk_norm=member.qk_norm, tied_embeddings=fields.flag("tie_word_embeddings"), norm_eps=fields.number("rms_norm_eps", 1e-6),
    )  # fmt: skip
    fields.finish()
    return Foreign(layout=member.layout, model=model, naming=NAMING, architecture=architecture)


def _windows(fields: Fields, member: _Member, layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """`attention_window` and `windowed_layers`. A window of transformers counts the token itself, as ours does."""
    if not member.qwen_windows:
        if member.layout != "Mistral":
            return None, None
        return (fields.maybe_whole("sliding_window") if fields.given("sliding_window") else MISTRAL_WINDOW), None
    window = fields.maybe_whole("sliding_window") if fields.given("sliding_window") else QWEN_WINDOW
    used = fields.flag("use_sliding_window") and window is not None
    first, kinds = fields.take("max_window_layers"), fields.take("layer_types")
    if first is not None and type(first) is not int:
        raise fields.refused("max_window_layers", first, "a whole number")
    if kinds is None:
        first = QWEN_FULL_LAYERS if first is None else first
        kinds = ["sliding_attention" if used and number >= first else "full_attention" for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {"full_attention", "sliding_attention"}:
        raise fields.refused("layer_types", kinds, f"{layers} entries, each full_attention or sliding_attention")
    windowed = tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
    if windowed and not used:
        raise RequestError(
            f"{fields.where} has layers with sliding_attention, and use_sliding_window = False or no sliding_window; one of these is wrong."
        )
    return (window, None if len(windowed) == layers else windowed) if windowed else (None, None)
