"""What methods share whose memory is one stream, and parameters that all start at one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.residual.norm import normalised
from depthroute.residual.protocol import Inputs, Norm, Residual, Trace


class Stream(Residual):
    """The memory is one tensor [..., D], which every sub-layer reads through the norm before it."""

    def open(self, embedding: Tensor) -> Tensor:
        return embedding

    def read(self, memory: Tensor, site: int, norm: Norm | None = None) -> Inputs:
        return normalised(memory, norm)


class Beside(Residual):
    """The memory holds more beside the stream, which is its field `stream` [..., D] and which every sub-layer reads."""

    def read(self, memory: Any, site: int, norm: Norm | None = None) -> Inputs:
        return normalised(memory.stream, norm)


def added(stream: Tensor, output: Tensor) -> Tensor:
    """The plain sum, in the stream's dtype."""
    return stream + output.to(stream.dtype)


class Filled(nn.ParameterDict):
    """Parameters by layer or site, each filled with one value at first. A scalar has the shape [1], which sharding can take."""

    def __init__(self, shapes: Mapping[int, tuple[int, ...]], value: float) -> None:
        super().__init__({str(key): nn.Parameter(torch.full(shape, value)) for key, shape in shapes.items()})
        self.value = value
        self.no_decay = frozenset(map(str, shapes))

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.fill_(self.value)


def scalars(keys: Iterable[int], value: float) -> Filled:
    """One number by layer or site."""
    return Filled({key: (1,) for key in keys}, value)


def read_inputs(trace: Trace, method: str) -> Tensor:
    """What the sub-layer read, for a method that writes with it.

    Raises:
        RequestError: the trace does not hold it.
    """
    if not isinstance(trace.inputs, Tensor):
        raise RequestError(
            f"{method} needs read(memory, site, norm) with the norm, and write(..., Trace(inputs=...)): what the sub-layer read through it."
        )
    return trace.inputs


def rms(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square, without a gain, in at least float32."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight in at least float32, whatever autocast says: for the few numbers a token that steer a connection."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        return x.to(exact) @ weight.to(exact)
