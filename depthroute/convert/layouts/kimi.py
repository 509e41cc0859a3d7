"""Kimi K3's names: Block Attention Residuals whose blocks are counted in layers (`attn_res_block_size`).

A read takes the rows of the bank and the running sum, scores them without a gain on the keys and with one on the query (the product is the
same), and has its norm behind it. K3 itself has Kimi Delta Attention, latent attention and experts, for which our decoder has no place: of
such a checkpoint every part of that kind is named. One with softmax attention (q, k, v, o), rotary positions and dense MLPs under these
names is read wholly.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.convert.foreign import HARMLESS, Fields, Foreign, Naming, numbers
from depthroute.convert.layouts.llama import PARTS
from depthroute.convert.layouts.rope import rotary
from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig

RECOGNISED = re.compile(r"(language_model\.)?model\.layers\.\d+\.self_attention_res_proj\.weight")
_LAYER = r"\.layers\.(\d+)\."
WITHOUT_PLACE = {
    "Kimi Delta Attention": _LAYER + r"(?:self_attn|linear_attn)\.(?:A_log|dt_bias|[qkv]_conv1d?|[fg]_[ab]_proj|b_proj|g_proj|o_norm)\b",
    "latent attention (MLA)": _LAYER + r"self_attn\.(?:kv_a_\w+|kv_b_proj|q_a_\w+|q_b_proj)",
    "experts": _LAYER + r"(?:block_sparse_moe|mlp)\.(?:experts|shared_experts|gate\.|latent|routed)",
}
# Fields that only say how the parts above are made.
PARTS_WITHOUT_PLACE = (
    "kv_lora_rank", "linear_attn_config", "moe_intermediate_size", "n_routed_experts", "num_experts", "q_lora_rank",
    "routed_expert_hidden_size",
)  # fmt: skip
# Beside text_config: of images, whose tensors are refused where they are there.
OF_OTHER_MODELS = (
    "ignore_index", "image_token_id", "image_token_index", "media_placeholder_token_id", "mm_projector_type",
    "use_unified_vision_chunk", "video_placeholder", "vision_config",
)  # fmt: skip
EPS = 1e-5


def read(config: Mapping[str, Any], names: Collection[str]) -> Foreign:
    """The decoder of a checkpoint with Kimi K3's names; RequestError where it has a part or a setting that our decoder has no place for."""
    _refuse_parts(names)
    prefix = "language_model." if any(name.startswith("language_model.") for name in names) else ""
    fields = Fields(_text_config(config), "config.json with Kimi K3's names")
    eps, context = fields.number("rms_norm_eps", EPS), fields.whole("max_position_embeddings", fields.maybe_whole("model_max_length"))
    base, scaling = rotary(fields, context=context, theta=None)
    fields.only("hidden_act", "silu")
    fields.only("mla_use_nope", False)
    for name in ("activation_situ_beta", "activation_situ_linear_beta", *PARTS_WITHOUT_PLACE):
        fields.only(name)
    layers = fields.whole("num_hidden_layers")
    model = ModelConfig(
        vocabulary=fields.whole("vocab_size"), width=fields.whole("hidden_size"), layers=layers,
        heads=fields.whole("num_attention_heads"), key_value_heads=fields.maybe_whole("num_key_value_heads"),
        head_width=fields.maybe_whole("head_dim"), mlp_width=fields.whole("intermediate_size"), context=context, rope_base=base,
        rope_scaling=scaling, rope_precision="float32", tied_embeddings=fields.flag("tie_word_embeddings"), norm_eps=eps,
        residual=AttnResConfig(layers_per_block=min(fields.whole("attn_res_block_size"), layers), eps=eps),
    )  # fmt: skip
    fields.finish()
    naming = Naming(
        embedding=f"{prefix}model.embed_tokens", norm=f"{prefix}model.norm", head=f"{prefix}lm_head", layer=f"{prefix}model.layers.{{}}.",
        parts=PARTS, sites=("self_attention_res", "mlp_res", f"{prefix}model.output_attn_res"),
    )  # fmt: skip
    return Foreign(
        layout="Kimi K3", model=model, naming=naming,
        unused=re.escape(f"{prefix}model.layers.0.self_attention_res_") + r"(proj|norm)\.weight",
    )  # fmt: skip


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model, with what the outer object says of it too."""
    outer = Fields(config, "config.json with Kimi K3's names, outside text_config,")
    text = outer.take("text_config")
    if text is None:
        return dict(config)
    if not isinstance(text, dict):
        raise outer.refused("text_config", text, "an object")
    for name, value in config.items():
        if text.get(name) is not None and name not in HARMLESS:
            outer.ignore(name)
            if value is not None and value != text[name]:
                raise RequestError(f"{outer.where} has {name} = {value!r}, and {text[name]!r} inside; one of the two is wrong.")
    tied = outer.take("tie_word_embeddings")
    outer.ignore(*OF_OTHER_MODELS)
    outer.finish()
    return text if tied is None else {**text, "tie_word_embeddings": tied}


def _refuse_parts(names: Collection[str]) -> None:
    found = []
    for part, pattern in WITHOUT_PLACE.items():
        if layers := numbers(names, pattern):
            several = f"{len(layers)} layers, {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
            example = next(name for name in names if re.search(pattern, name))
            found.append(f"{part} ({several}: {example!r})")
    other = sorted({name.split(".")[0] for name in names} - {"language_model", "model", "lm_head"})
    if other:
        found.append(f"other models ({', '.join(other)})")
    if found:
        raise RequestError(
            f"this checkpoint with Kimi K3's names has parts that our decoder has no place for: {'; '.join(found)}. What its route queries "
            "span can be read without them: depthroute geometry."
        )
