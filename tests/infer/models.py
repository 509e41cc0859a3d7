"""Tiny decoders with weights that are not near zero, so that nothing could be forgotten unseen."""

from __future__ import annotations

from typing import Any

import torch

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import SPECIFICATIONS, parse_residual

SIZES = {
    "block": "block:3", "low-rank": "low-rank:3,rank=8", "denseformer-4x5": "denseformer-4x5,period=2", "laurel-lr": "laurel-lr,rank=8",
}  # fmt: skip
METHODS = tuple(SIZES.get(name, name) for name in SPECIFICATIONS)


def decoder(residual: str = "prenorm", dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> Decoder:
    shape: dict[str, Any] = {
        "vocabulary": 40, "width": 16, "layers": 4, "heads": 4, "key_value_heads": 2, "mlp_width": 24, "context": 24,
    } | fields  # fmt: skip
    model = Decoder(ModelConfig(**shape, residual=parse_residual(residual)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.startswith("residual."):
                parameter.add_(noise * (0.3 if parameter.ndim == 1 else 0.1))
            elif parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return (model.double() if dtype == torch.float64 else model.cast_body(dtype)).eval()
