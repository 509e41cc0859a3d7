"""Rotary position embedding (RoFormer, Eq. 34) on the two halves of a head, the pairing of Llama.

Shapes: B batch, H heads, T tokens, E head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError, choose

Precision = Literal["float64", "float32"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slower rotations, for contexts longer than those a model was first trained with.

    `kind`: "linear" divides all frequencies by `factor` (Chen et al. 2023). "llama3" divides those whose wave is longer than
    `original_context` / `low_frequency`, leaves those whose wave is shorter than `original_context` / `high_frequency`, and goes from one
    to the other in between, linearly in the number of waves that fit into the original context (Llama 3.1).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    original_context: int | None = None
    low_frequency: float = 1.0
    high_frequency: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise RequestError(f"model.rope_scaling.kind: {choose('value', str(self.kind), ('linear', 'llama3'))}")
        if not self.factor >= 1:
            raise RequestError(f"model.rope_scaling.factor = {self.factor} is not allowed; it takes 1 or more.")
        if (self.kind == "llama3") != (self.original_context is not None):
            raise RequestError(
                f"model.rope_scaling.original_context = {self.original_context} does not go with kind {self.kind!r}; 'llama3' needs it."
            )
        if not 0 < self.low_frequency < self.high_frequency:
            raise RequestError("model.rope_scaling needs 0 < low_frequency < high_frequency.")

    def scaled(self, frequency: Tensor) -> Tensor:
        """The frequencies (radians a position) in place of `frequency`."""
        if self.kind == "linear":
            return frequency / self.factor
        assert self.original_context is not None
        wave = 2 * math.pi / frequency
        slow = torch.where(wave > self.original_context / self.low_frequency, frequency / self.factor, frequency)
        share = (self.original_context / wave - self.low_frequency) / (self.high_frequency - self.low_frequency)
        between = (1 - share) * slow / self.factor + share * slow
        inside = ~(wave < self.original_context / self.high_frequency) & ~(wave > self.original_context / self.low_frequency)
        return torch.where(inside, between, slow)


class Rotation(NamedTuple):
    """Cosines and sines of the tokens of a pass, [T, E/2], or [B, 1, T, E/2] where rows of the batch differ."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[B, H, T, E] rotated, in the wider of its dtype and the tables'; the result has that of `x`."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = self
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Rotary(nn.Module):
    """The rotations of positions.

    The tables are float32 buffers of `context` rows, not saved; casting the model casts them too. `precision` is that of the angles:
    "float64" has their cosines right to the last bit of a float32; "float32" rounds frequencies and angles as transformers does, which
    checkpoints from there were trained with.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, head_width: int, context: int, base: float, precision: Precision = "float64", scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.head_width, self.context, self.base = head_width, context, base
        self.exact = torch.float64 if precision == "float64" else torch.float32
        self.scaling = scaling
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(context, head_width // 2, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the tables, in place: for a module that was made without memory."""
        if not self.cos.is_meta:
            for table, values in zip((self.cos, self.sin), self._tables(torch.arange(self.context)), strict=True):
                table.copy_(values)

    def forward(self, start: int, stop: int) -> Rotation:
        """Of the positions `start` to `stop` - 1, for all rows of a batch. Beyond the tables they are computed."""
        if stop <= len(self.cos):
            return Rotation(self.cos[start:stop], self.sin[start:stop])
        cos, sin = self._tables(torch.arange(start, stop))
        return Rotation(cos.to(self.cos), sin.to(self.sin))

    def at(self, positions: Tensor, stop: int | None = None) -> Rotation:
        """Of `positions` [B, T] (int64). `stop`: what all of them are below; None has a look, which a compiler cannot."""
        if (int(positions.max()) + 1 if stop is None else stop) <= len(self.cos):
            return Rotation(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))
        cos, sin = self._tables(positions.cpu())
        return Rotation(cos.to(self.cos).unsqueeze(1), sin.to(self.sin).unsqueeze(1))

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., E/2], float32, on the CPU."""
        frequency = 1.0 / self.base ** (torch.arange(0, self.head_width, 2).to(self.exact) / self.head_width)
        if self.scaling is not None:
            frequency = self.scaling.scaled(frequency)
        angle = positions[..., None].to(self.exact) * frequency
        return angle.cos().float(), angle.sin().float()
