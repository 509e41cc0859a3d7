"""The shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from depthroute.common.errors import RequestError, choose
from depthroute.model.rotary import Precision, RopeScaling
from depthroute.residual import Body, PreNormConfig, ResidualConfig

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")  # a layer's weight matrices


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer with RMSNorm, RoPE and SwiGLU.

    `key_value_heads`: None is one per head. `head_width`: None is width / heads. `context`: the longest sequence. `biases`: the projections
    that have one ("query", "key", "value", "output", "gate", "up", "down").

    `attention_window`: how many tokens one attends to, itself among them (Mistral); None is all. `windowed_layers`: the layers, from 0,
    that have the window; None is all of them.

    `rope_scaling`: slower rotations for a longer context. `rope_precision`: that of the angles, see `Rotary`; "float32" for checkpoints
    from transformers.

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
    qk_norm: bool = False
    norms: Literal["pre", "post", "sandwich", "hybrid"] = "pre"
    tied_embeddings: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02
    memory_dtype: Literal["parameter", "compute"] = "parameter"
    residual: ResidualConfig = field(default_factory=PreNormConfig)

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "mlp_width", "context", "key_value_heads", "head_width", "attention_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"model.{name} = {value} is not allowed; it takes 1 or more.")
        if self.head_width is None and self.width % self.heads:
            raise RequestError(f"model.heads = {self.heads} does not divide model.width = {self.width}; set model.head_width.")
        if self.resolved_head_width % 2:
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
        self.residual.check(self.body)
        for name in self.residual.adaptation(self.body).initial_scale:
            if name not in PROJECTIONS:
                raise RequestError(f"the residual method {self.residual.name}: {choose('projection', name, PROJECTIONS)}")

    @property
    def resolved_head_width(self) -> int:
        return self.head_width if self.head_width is not None else self.width // self.heads

    @property
    def resolved_key_value_heads(self) -> int:
        return self.key_value_heads if self.key_value_heads is not None else self.heads

    def has_window(self, layer: int) -> bool:
        """Whether `layer` (from 0) attends to a window only."""
        return self.attention_window is not None and (self.windowed_layers is None or layer in self.windowed_layers)

    def initial_std(self, projection: str) -> float:
        """The initial standard deviation of a layer's weight matrix by name ("query", ..., "down")."""
        return self.init_std * self.residual.adaptation(self.body).initial_scale.get(projection, 1.0)

    @property
    def body(self) -> Body:
        """What the residual method may know."""
        return Body(
            width=self.width,
            layers=self.layers,
            attention_activation=self.heads * self.resolved_head_width,
            mlp_activation=self.mlp_width,
            norms=self.norms,
        )
