"""Matrices times a few rows, without gradients.

BLAS libraries read the weights of such a product with one thread; `steps.c` reads them with all, and the product is as fast as that. It
serves on the CPU where nobody watches; everywhere else this is `F.linear`.

Shapes: ... leading dimensions (R rows in all), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops.steps import MATRICES, SUFFIXES, most_rows, product
from depthroute.ops.watched import watched


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [..., I] by [O, I] to [..., O]."""
    if torch.is_grad_enabled():  # training comes here for every matrix
        return torch.nn.functional.linear(x, weight, bias)
    return linears(x, (weight,), (bias,))[0]


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x W_k^T + b_k of one input [..., I] and several matrices [O_k, I]: [..., O_k] each. The weights are read once, all together."""
    if not _serves(x, weights, biases):
        return [torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    found = [x.new_empty(len(rows), len(weight)) for weight in weights]
    for start in range(0, len(weights), MATRICES):
        part = slice(start, start + MATRICES)
        product(rows, weights[part], biases[part], found[part])()
    return [one.view(*x.shape[:-1], -1) for one in found]


def _serves(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    parts = [*weights, *(bias for bias in biases if bias is not None)]
    if torch.is_grad_enabled() or watched((x, *parts)) or x.device.type != "cpu" or x.dtype not in SUFFIXES:
        return False
    inputs = x.shape[-1]
    if not 0 < x.numel() <= most_rows() * inputs or torch.is_autocast_enabled("cpu"):
        return False
    for weight, bias in zip(weights, biases, strict=True):
        if weight.ndim != 2 or weight.shape[1] != inputs or (bias is not None and bias.shape != weight.shape[:1]):
            return False  # the usual product says what is wrong
    return all(part.dtype == x.dtype and part.device == x.device and part.is_contiguous() for part in parts)
