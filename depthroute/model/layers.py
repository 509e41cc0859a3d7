"""The sub-layers of the decoder beside attention, with no knowledge of how they are connected.

A sub-layer takes inputs that have passed the norm before it: the residual method applies it as it reads.

Shapes: B batch, T tokens, D width, F MLP width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.model.attention import Attention, SubLayerOutput
from depthroute.model.config import ModelConfig
from depthroute.model.linear import Projection, project
from depthroute.residual import RMSNorm


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

        def projection(name: str, inputs: int, outputs: int) -> Projection:
            return Projection(inputs, outputs, config.initial_std(name), name in config.biases)

        self.gate = projection("gate", config.width, config.mlp_width)
        self.up = projection("up", config.width, config.mlp_width)
        self.down = projection("down", config.mlp_width, config.width)

    def forward(self, inputs: Tensor) -> SubLayerOutput:
        gate, up = project((self.gate, self.up), inputs)
        activation = F.silu(gate) * up
        return SubLayerOutput(self.down(activation), activation)


class Layer(nn.Module):
    """One attention and one MLP sub-layer, each with the norms before and behind it that the model has.

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
        self.attention = Attention(config, number, adaptation.value_layers is None or number < adaptation.value_layers)
        self.attention_output_norm = norm(behind)
        self.mlp_norm = norm(before)
        self.mlp = MLP(config)
        self.mlp_output_norm = norm(behind)
