"""The shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from depthroute.common.errors import RequestError, choose
from depthroute.model.bodies import ExpertsConfig, KDAConfig, MixerName, MLAConfig, at_least_one
from depthroute.model.rotary import Precision, RopeScaling
from depthroute.residual import Body, PreNormConfig, ResidualConfig

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")  # a layer's weight matrices


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer: RMSNorm, RoPE and SwiGLU, or the bodies of Kimi Linear and Kimi K3.

    `mixers`: what mixes the tokens in the first layers, repeated over all of them: "softmax" attention, "kda" or "mla". `last_mixer`: that
    of the last layer, if it is another one. Kimi Linear is ("kda", "kda", "kda", "mla") with a last "mla". `kda`, `mla`: their settings,
    given where layers have them. `experts`: mixtures of experts in place of the MLPs; None is dense MLPs of `mlp_width` in every layer.
    `activation`: of all MLPs and experts, "swiglu" or Kimi K3's bounded "situ".

    `key_value_heads`: None is one per head. `head_width`: None is width / heads. `context`: the longest sequence. `biases`: the projections
    that have one ("query", "key", "value", "output", "gate", "up", "down").

    `attention_window`: how many tokens one attends to, itself among them (Mistral); None is all. `windowed_layers`: the layers, from 0,
    that have the window; None is all of them.

    `rope_scaling`: slower rotations for a longer context. `rope_precision`: that of the angles, see `Rotary`; "float32" for checkpoints
    from transformers.

    `document_end`: the token id behind every document. A token then sees its own document alone, as far as the sequence has it, positions
    count from its first token, and states begin there. None: documents that share a sequence see each other.

    `norms`: "pre" has one before every sub-layer; "post" one behind it, before its output is written, and none before (Swin V2, OLMo 2);
    "sandwich" both (Peri-LN); "hybrid" is HybridNorm: an attention normalises queries, keys and values by head in place of its input, an
    MLP is as in "pre". A final norm is always there.

    `memory_dtype`: what the residual method carries from sub-layer to sub-layer. "parameter" is the parameters' dtype (float32 in
    training), "compute" the dtype that sub-layers put out (bfloat16 under autocast). All arms of a comparison use the same one.

    Raises:
        RequestError: a size that is not positive or does not divide, or a residual method that does not fit.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    context: int
    key_value_heads: int | None = None
    head_width: int | None = None
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_precision: Precision = "float64"
    biases: tuple[str, ...] = ()
    attention_window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    mixers: tuple[MixerName, ...] = ("softmax",)
    last_mixer: MixerName | None = None
    kda: KDAConfig | None = None
    mla: MLAConfig | None = None
    experts: ExpertsConfig | None = None
    activation: Literal["swiglu", "situ"] = "swiglu"
    document_end: int | None = None
    qk_norm: bool = False
    norms: Literal["pre", "post", "sandwich", "hybrid"] = "pre"
    tied_embeddings: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02
    memory_dtype: Literal["parameter", "compute"] = "parameter"
    residual: ResidualConfig = field(default_factory=PreNormConfig)

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "layers", "heads", "mlp_width", "context", "key_value_heads", "head_width", "attention_window")
        at_least_one("model", self, *sizes)
        self._check_mixers()
        if self.head_width is None and self.width % self.heads:
            raise RequestError(f"model.heads = {self.heads} does not divide model.width = {self.width}; set model.head_width.")
        if self.rotates and self.resolved_head_width % 2:
            raise RequestError(f"the head width {self.resolved_head_width} is odd; rotary positions need an even one.")
        if self.heads % self.resolved_key_value_heads:
            raise RequestError(f"model.key_value_heads = {self.key_value_heads} does not divide model.heads = {self.heads}.")
        for name in ("norm_eps", "init_std", "rope_base"):
            if not getattr(self, name) > 0:
                raise RequestError(f"model.{name} = {getattr(self, name)} is not allowed; it must be positive.")
        for name in self.biases:
            if name not in PROJECTIONS:
                raise RequestError(f"model.biases: {choose('projection', name, PROJECTIONS)}")
        if self.windowed_layers is not None and self.attention_window is None:
            raise RequestError("model.windowed_layers needs model.attention_window, how many tokens these layers attend to.")
        for number in self.windowed_layers or ():
            if not 0 <= number < self.layers:
                raise RequestError(f"model.windowed_layers has {number}; the layers are 0 to {self.layers - 1}.")
        if self.document_end is not None and not 0 <= self.document_end < self.vocabulary:
            raise RequestError(f"model.document_end = {self.document_end} is not a token; model.vocabulary = {self.vocabulary}.")
        self.residual.check(self.body)
        for name in self.residual.adaptation(self.body).initial_scale:
            if name not in PROJECTIONS:
                raise RequestError(f"the residual method {self.residual.name}: {choose('projection', name, PROJECTIONS)}")

    def _check_mixers(self) -> None:
        names = get_args(MixerName)
        for name in (*self.mixers, *([] if self.last_mixer is None else [self.last_mixer])):
            if name not in names:
                raise RequestError(f"model.mixers: {choose('mixer', name, names)}")
        if not self.mixers:
            raise RequestError(f"model.mixers is empty; it takes one or more of {', '.join(names)}, which are repeated over the layers.")
        for layer in self.windowed_layers or ():
            if self.mixer(layer) != "softmax":
                raise RequestError(f"model.windowed_layers has {layer}, whose mixer is {self.mixer(layer)!r}; only 'softmax' has a window.")
        used = {self.mixer(layer) for layer in range(self.layers)}
        for name in ("kda", "mla"):
            if (name in used) != (getattr(self, name) is not None):
                there = f"a layer is {name!r}, which needs its settings" if name in used else f"no layer is {name!r}"
                raise RequestError(f"model.{name} = {getattr(self, name)} does not go with model.mixers = {list(self.mixers)}: {there}.")
        if used != {"softmax"}:
            if self.resolved_key_value_heads != self.heads:
                raise RequestError(f"model.key_value_heads = {self.key_value_heads}: layers that are not 'softmax' have as many as heads.")
            if self.norms == "hybrid":
                raise RequestError("model.norms = 'hybrid' is of softmax attention; 'kda' and 'mla' have norms of their own inside.")
            if "softmax" not in used and (self.attention_window is not None or self.qk_norm):
                raise RequestError("model.attention_window and model.qk_norm are of softmax attention, which no layer has.")
        if self.biases and (used != {"softmax"} or self.experts is not None):
            raise RequestError(f"model.biases = {list(self.biases)} are of softmax attention and dense MLPs, in every layer.")
        if self.experts is not None and self.experts.dense_layers >= self.layers:
            raise RequestError(
                f"model.experts.dense_layers = {self.experts.dense_layers} leaves none of the {self.layers} layers to experts; leave "
                "model.experts out, or lower it."
            )
        if self.activation not in ("swiglu", "situ"):
            raise RequestError(f"model.activation: {choose('value', str(self.activation), ('swiglu', 'situ'))}")

    def mixer(self, layer: int) -> MixerName:
        """What mixes the tokens in `layer` (from 0)."""
        if layer == self.layers - 1 and self.last_mixer is not None:
            return self.last_mixer
        return self.mixers[layer % len(self.mixers)]

    @property
    def rotates(self) -> bool:
        """Whether any layer has rotary positions."""
        return any(self.mixer(layer) == "softmax" for layer in range(self.layers))

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` (from 0) has a mixture of experts in place of its MLP."""
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def resolved_head_width(self) -> int:
        return self.head_width if self.head_width is not None else self.width // self.heads

    @property
    def resolved_key_value_heads(self) -> int:
        return self.key_value_heads if self.key_value_heads is not None else self.heads

    def has_window(self, layer: int) -> bool:
        """Whether `layer` (from 0) attends to a window only."""
        if self.attention_window is None or self.mixer(layer) != "softmax":
            return False
        return self.windowed_layers is None or layer in self.windowed_layers

    def initial_std(self, projection: str) -> float:
        """The initial standard deviation of a layer's weight matrix by name ("query", ..., "down")."""
        return self.init_std * self.residual.adaptation(self.body).initial_scale.get(projection, 1.0)

    def mlp_activation(self, layer: int) -> int:
        """The width of what the MLP of `layer` feeds its output matrix: of experts, the shared ones' and one routed one's."""
        if not self.has_experts(layer):
            return self.mlp_width
        assert self.experts is not None
        return (self.experts.shared + 1) * self.experts.width

    @property
    def body(self) -> Body:
        """What the residual method may know."""
        return Body(
            width=self.width,
            layers=self.layers,
            attention_activation=self.heads * self.resolved_head_width,
            mlp_activation=tuple(self.mlp_activation(layer) for layer in range(self.layers)) if self.experts else self.mlp_width,
            norms=self.norms,
        )
