"""What a self-contained modelling file has in place of the compiled kernels: the definition of depth attention, and torch's products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

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
