"""The gated activation of an MLP, dense or of an expert.

Shapes: ... any leading dimensions, F width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal["swiglu", "situ"]
SITU_GATE, SITU_LINEAR = 4.0, 25.0  # beyond these the two halves of SiTU are flat (Kimi K3)


def gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """What the down projection reads: [..., F] and [..., F] to [..., F].

    "swiglu": silu(g) u (Shazeer 2020). "situ": b1 tanh(g / b1) sigmoid(g) b2 tanh(u / b2) with b1 = 4 and b2 = 25.
    """
    if kind == "swiglu":
        return F.silu(gate) * up
    bounded = SITU_GATE * torch.tanh(gate / SITU_GATE) * torch.sigmoid(gate)
    return bounded * (SITU_LINEAR * torch.tanh(up / SITU_LINEAR))
