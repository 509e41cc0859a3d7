"""What a self-contained modelling file has in place of definitions that its models do not need whole.

In place of the compiled kernels it has the definition of depth attention and torch's products; of attention, what one document needs; and
of parts that no exported model has, an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.ops.form import Form, Found, Operands
from depthroute.ops.reference import reference


def serving(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the backend that serves a read: there is one."""
    return "reference"


def read(operands: Operands, form: Form, backend: str) -> Found:
    """A read by the backend."""
    return reference(operands, form)


def hold(x: Tensor) -> Tensor:
    """`x` as a source of many reads. Autograd adds what they give to its gradient."""
    return x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    return F.linear(x, weight, bias)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x W_k^T + b_k of one input and several matrices."""
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


class Seen(NamedTuple):
    """Which tokens those of a pass attend to: `allowed`, bool [B or 1, 1, T, C]; None is all, or with `causal` itself and those before."""

    allowed: Tensor | None
    causal: bool


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Tensor:
    """softmax(query key' / sqrt(E)) value over what is seen: [B, H, T, E], from [B, H, T, E] and [B, K, C, E] twice; K divides H."""
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, seen.allowed, is_causal=seen.causal, enable_gqa=grouped)


class NotExported(nn.Module):
    """A part of models that only depthroute itself runs."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        raise RequestError("this file has softmax attention, dense SwiGLU and single documents alone; depthroute runs the other models.")
