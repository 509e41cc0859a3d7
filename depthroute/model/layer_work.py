"""What one layer of a body computes and keeps, by its token mixer and its MLP: multiply-adds per token, and numbers that later tokens need.

What counts is what Low-Rank Attention Residuals, Appendix F, counts of a Transformer: products of a token with weights, and of tokens with
each other. Norms, softmaxes, activations, gates' products with what they gate, rotations and the decay of a state are left out. Of routed
experts the chosen ones count. The body is taken as it is without a residual method; one that does without some value projections saves
them.

Shapes: D width, H heads, K key-value heads, E head width, I = H E; W tokens of a convolution, L latent, R shared key, Q latent of queries.
"""

from __future__ import annotations

from depthroute.model.config import ModelConfig
from depthroute.ops.delta_chunks import LONGEST


def body_products(model: ModelConfig) -> int:
    """Multiply-adds per token of the weights of all layers."""
    return sum(layer_products(model, layer) for layer in range(model.layers))


def layer_products(model: ModelConfig, layer: int) -> int:
    """Multiply-adds per token of a layer's weights: matrices, and the convolutions of KDA."""
    return mixer_products(model, layer) + mlp_products(model, layer)


def mixer_products(model: ModelConfig, layer: int) -> int:
    """Of what mixes the tokens, as a whole sequence goes through it.

    Softmax attention: 2 D I + 2 D K E. KDA: 4 D I and 3 W I, strengths D H, decays D E + E I, and an output gate of E (D + I) or D I. MLA:
    D (L + R) + 2 L I + D I, queries D H (E + R) or through their latent vector D Q + Q H (E + R), and a gate D I.
    """
    width, heads, head = model.width, model.heads, model.resolved_head_width
    inner, mixer = heads * head, model.mixer(layer)
    if mixer == "softmax":
        return 2 * width * inner + 2 * width * model.resolved_key_value_heads * head
    if mixer == "kda":
        assert model.kda is not None
        low_rank = head * (width + inner)
        gate = low_rank if model.kda.output_gate == "low_rank" else width * inner
        return 4 * width * inner + 3 * model.kda.convolution * inner + width * heads + low_rank + gate
    assert model.mla is not None
    mla, queries = model.mla, heads * (head + model.mla.shared_key)
    query = width * queries if mla.query_latent is None else mla.query_latent * (width + queries)
    return query + width * (mla.latent + mla.shared_key) + 2 * mla.latent * inner + width * inner * (1 + mla.output_gate)


def mlp_products(model: ModelConfig, layer: int) -> int:
    """Of the MLP, dense or of experts: the chosen ones, the shared ones, the router, and the matrices around latent experts."""
    if not model.has_experts(layer):
        return 3 * model.width * model.mlp_width
    assert model.experts is not None
    experts = model.experts
    latent = 0 if experts.latent is None else 2 * model.width * experts.latent
    return experts.chosen * expert_parameters(model) + latent + model.width * (3 * experts.shared * experts.width + experts.number)


def expert_parameters(model: ModelConfig) -> int:
    """Of one routed expert: three matrices, on the width of the model or the experts' latent one. 0 without experts."""
    if model.experts is None:
        return 0
    return 3 * (model.experts.latent or model.width) * model.experts.width


def routed_parameters(model: ModelConfig) -> int:
    """Of all routed experts of all layers."""
    number = 0 if model.experts is None else model.experts.number
    return number * expert_parameters(model) * sum(map(model.has_experts, range(model.layers)))


def attended(model: ModelConfig, layer: int, cached: bool = False) -> int:
    """Multiply-adds of one token with one earlier one: scores and mixing.

    Softmax attention: 2 I. MLA: H (E + R) + I with keys and values made of the latent vectors, or H (L + R) + H L where a token attends to
    `cached` ones as they are, with the matrices of keys and values applied to its queries and mixtures. KDA has none.
    """
    head, mixer = model.resolved_head_width, model.mixer(layer)
    if mixer == "kda":
        return 0
    if mixer == "softmax":
        return 2 * model.heads * head
    assert model.mla is not None
    return model.heads * (2 * (model.mla.latent if cached else head) + model.mla.shared_key)


def state_products(model: ModelConfig, layer: int, chunked: bool) -> int:
    """Multiply-adds per token of a layer's state with keys, queries and values; 0 where it has none.

    KDA token by token: 3 H E^2, for what the state has under a key, the correction of it, and what a query reads. In chunks of C tokens
    (`LONGEST`), with the chunk's own pairs under a causal mask: H (3 E^2 + 2 C E), where the four products of pairs (of keys, of queries
    with keys, of the corrections' equations and of what is read) take C E / 2 each. The inverse of the C x C triangle of the corrections,
    C^2 / 6 a token and head by substitution, is left out.
    """
    if model.mixer(layer) != "kda":
        return 0
    head = model.resolved_head_width
    return model.heads * (3 * head * head + (2 * LONGEST * head if chunked else 0))


def cached(model: ModelConfig, layer: int, whole: bool = False, apart: bool = False) -> int:
    """Numbers that a token leaves for later ones: keys and values 2 K E, in MLA the latent vector and the shared key L + R, in KDA none.

    `whole`: keys and values are cached head by head, since the residual method makes the values. `apart`: it reads keys and values from
    different inputs, each with a latent vector of its own.
    """
    head, mixer = model.resolved_head_width, model.mixer(layer)
    if mixer == "kda":
        return 0
    if mixer == "softmax":
        return 2 * model.resolved_key_value_heads * head
    assert model.mla is not None
    if whole:
        return model.heads * (2 * head + model.mla.shared_key)
    return (2 if apart else 1) * model.mla.latent + model.mla.shared_key


def state(model: ModelConfig, layer: int) -> int:
    """Numbers that a sequence carries whatever its length: in KDA a state H E^2, and what three convolutions saw last, 3 (W - 1) I."""
    if model.mixer(layer) != "kda":
        return 0
    assert model.kda is not None
    inner = model.heads * model.resolved_head_width
    return inner * model.resolved_head_width + 3 * (model.kda.convolution - 1) * inner
