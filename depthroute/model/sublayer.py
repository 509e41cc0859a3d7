"""What a sub-layer takes and puts out.

Shapes: B batch, T tokens, D width, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from depthroute.residual import Inputs, Kept, Projected, RoleInputs

Values = Callable[[Projected], tuple[Tensor, Kept]]  # `Residual.values` at a site


class SubLayerOutput(NamedTuple):
    output: Tensor  # [B, T, D]
    activation: Tensor | None  # what the output projection was fed: [B, T, H*E], or an MLP's; None where nobody asked for it
    kept: Kept = None  # what the hook on the values asked to keep


def by_role(inputs: Inputs) -> RoleInputs:
    """The input of every role; one input is that of all."""
    return inputs if isinstance(inputs, RoleInputs) else RoleInputs(inputs, inputs, inputs)


def one_input(roles: Sequence[Tensor]) -> list[slice]:
    """Runs of neighbouring roles that read the same object."""
    begins = [role for role in range(len(roles)) if role == 0 or roles[role] is not roles[role - 1]]
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(roles)], strict=True)]


def by_head(x: Tensor, head_width: int) -> Tensor:
    """[B, T, H*E] to [B, H, T, E], of as many heads as are there: a process may have a part of them."""
    return x.view(*x.shape[:-1], -1, head_width).transpose(1, 2)
