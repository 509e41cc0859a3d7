"""The Transformer of flash-linear-attention, plain or with Attention Residuals (`attnres_block_size`, sub-layers a block).

Its read is ours: softmax over q . N(s_i) with the key norm's gain, the norm before the sub-layer in the same pass and with the same
epsilon. The read before the first attention has weights there that are never used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.convert.foreign import Fields, Foreign, Naming
from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig

ARCHITECTURE = "TransformerForCausalLM"
NAMING = Naming(
    embedding="model.embeddings", norm="model.norm", head="lm_head", layer="model.layers.{}.",
    parts={
        "attention.query": "attn.q_proj", "attention.key": "attn.k_proj", "attention.value": "attn.v_proj",
        "attention.output": "attn.o_proj", "attention.query_norm": "attn.q_norm", "attention.key_norm": "attn.k_norm",
        "attention_norm": "attn_norm", "mlp_norm": "mlp_norm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    sites=("attn_res", "mlp_res", "model.res"),
)  # fmt: skip
UNUSED = r"model\.layers\.0\.attn_res_(proj|norm)\.weight"
QK_EPS = 1e-5  # of its norms by head, whatever norm_eps is
# Of kernels and losses.
FUSED = ("fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")


def read(architecture: str, config: Mapping[str, Any], names: Collection[str]) -> Foreign:
    """The decoder of a configuration of that Transformer; RequestError where it has a setting that our decoder has no place for."""
    fields = Fields(config, f"config.json of the {architecture} (flash-linear-attention)")
    fields.only("model_type", "transformer")
    width, layers = fields.whole("hidden_size", 2_048), fields.whole("num_hidden_layers", 24)
    eps, context = fields.number("norm_eps", 1e-6), fields.whole("max_position_embeddings", 2_048)
    for name in ("rope_scaling", "rope_parameters", "partial_rotary_factor"):
        fields.only(name)  # its own code does not look at them: what they mean to a model trained by it is not what they say
    fields.only("hidden_act", "swish")
    fields.only("elementwise_affine", True)
    fields.ignore(*FUSED)
    qk_norm = fields.flag("qk_norm")
    if qk_norm and eps != QK_EPS:
        raise RequestError(
            f"{fields.where} has qk_norm = True and norm_eps = {eps}: its norms by head have an epsilon of {QK_EPS} whatever norm_eps is, "
            "and our decoder has one epsilon for all norms."
        )
    ratio = fields.number("hidden_ratio", 4)
    model = ModelConfig(
        vocabulary=fields.whole("vocab_size", 32_000), width=width, layers=layers, heads=fields.whole("num_heads", 32),
        key_value_heads=fields.maybe_whole("num_kv_heads"), context=context, rope_precision="float32",
        rope_base=fields.number("rope_theta", 10_000.0),
        mlp_width=fields.maybe_whole("intermediate_size") or 256 * -(-int(width * ratio * 2 / 3) // 256),
        biases=("query", "key", "value") if fields.flag("qkv_bias") else (), attention_window=fields.maybe_whole("window_size"),
        qk_norm=qk_norm, tied_embeddings=fields.flag("tie_word_embeddings"), norm_eps=eps, residual=_residual(fields, layers, eps),
    )  # fmt: skip
    fields.finish()
    return Foreign(layout="flash-linear-attention", model=model, naming=NAMING, unused=UNUSED)


def _residual(fields: Fields, layers: int, eps: float) -> ResidualConfig:
    block = fields.maybe_whole("attnres_block_size")
    if block is None:
        return PreNormConfig()
    if block > 1 and block % 2:
        raise fields.refused("attnres_block_size", block, "null (no routing), 1 (every output a source), or an even number of sub-layers")
    return AttnResConfig(block=None if block == 1 else min(block, 2 * layers), eps=eps)
