"""The sub-layers of the decoder beside attention, with no knowledge of how they are connected.

A sub-layer takes inputs that have passed the norm before it: the residual method applies it as it reads.

Shapes: B batch, T tokens, D width, F MLP width.
"""

from __future__ import annotations

from torch import Tensor, nn

from depthroute.model.attention import Attention
from depthroute.model.bodies import MixerName
from depthroute.model.config import ModelConfig
from depthroute.model.experts import Experts
from depthroute.model.gated import gated
from depthroute.model.kda import DeltaAttention
from depthroute.model.linear import Projection, project
from depthroute.model.mla import LatentAttention
from depthroute.model.sublayer import SubLayerOutput
from depthroute.residual import RMSNorm

Mixer = Attention | DeltaAttention | LatentAttention
MIXERS: dict[MixerName, type[Mixer]] = {"softmax": Attention, "kda": DeltaAttention, "mla": LatentAttention}


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020), or another gated activation."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """`width`: that of the activation; None is the model's."""
        super().__init__()
        self.activation = config.activation
        inner = config.mlp_width if width is None else width

        def projection(name: str, inputs: int, outputs: int) -> Projection:
            return Projection(inputs, outputs, config.initial_std(name), name in config.biases)

        self.gate = projection("gate", config.width, inner)
        self.up = projection("up", config.width, inner)
        self.down = projection("down", inner, config.width)

    def forward(self, inputs: Tensor) -> SubLayerOutput:
        gate, up = project((self.gate, self.up), inputs)
        activation = gated(gate, up, self.activation)
        return SubLayerOutput(self.down(activation), activation)


class Layer(nn.Module):
    """One sub-layer that mixes tokens and one MLP, dense or of experts, each with the norms before and behind it that the model has.

    The norms are beside the sub-layers, not in them: they run where the residual method reads, so what gathers or recomputes a sub-layer by
    itself must not own them.
    """

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        adaptation = config.residual.adaptation(config.body)
        before = adaptation.input_norms and config.norms != "post"
        behind = config.norms in ("post", "sandwich")

        def norm(there: bool) -> RMSNorm | None:
            return RMSNorm(config.width, eps=config.norm_eps) if there else None

        self.attention_norm = norm(before and config.norms != "hybrid")
        own_values = adaptation.value_layers is None or number < adaptation.value_layers
        self.attention: Mixer = MIXERS[config.mixer(number)](config, number, own_values)
        self.attention_output_norm = norm(behind)
        self.mlp_norm = norm(before)
        self.mlp: MLP | Experts = _experts(config) if config.has_experts(number) else MLP(config)
        self.mlp_output_norm = norm(behind)


def _experts(config: ModelConfig) -> Experts:
    assert config.experts is not None
    width = config.experts.shared * config.experts.width
    return Experts(config, MLP(config, width) if width else None)
