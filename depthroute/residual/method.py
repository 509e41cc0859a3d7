"""What a residual method says of itself: its name, its row in the table of methods, and the case in which it must be another method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from depthroute.residual.protocol import Residual, ResidualConfig

if TYPE_CHECKING:
    from depthroute.residual.attnres import AttnResConfig


CASE_WIDTH = 16  # of the bodies in which degenerate cases are tried


def unchanged(residual: Residual) -> None:
    """Initial values as they are."""


def scattered(residual: Residual) -> None:
    """Route queries that are not zero, the same for every role of a site and every method."""
    for path, module in residual.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("query"):
                steps = torch.arange(1, parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
                parameter.copy_(torch.sin(steps * (int(path.rpartition(".")[2]) + 1.7)).view(parameter.shape))


@dataclass(frozen=True, kw_only=True)
class Degenerate:
    """A case in which a method computes what another one does: the same output, and the same gradients of the body they share.

    `config` with its initial values, then `adjust` (without gradients), is `equals` with its initial values, then `adjust_other`. `body`:
    fields of the model that the case needs. `ignoring`: part of the name of body parameters whose gradients may differ.
    """

    says: str
    config: ResidualConfig
    equals: ResidualConfig
    adjust: Callable[[Residual], None] = unchanged
    adjust_other: Callable[[Residual], None] = unchanged
    body: Mapping[str, Any] = field(default_factory=dict)
    ignoring: str | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A residual method as people meet it.

    `name` is what they type, and `size` the field that `NAME:N` sets. `configure` makes its configuration, from a recipe's AttnRes settings
    (block size, norms) if it is of that family. The rest is its row in the table: i counts sources or sub-layers, d is the width, L the
    layers, K the sources of a read; `parameters` in total over the network, `cost` in multiply-adds per token and site, `state` in numbers
    per token. What it moves is counted, in `depthroute.cost.traffic`.
    """

    name: str
    label: str
    configure: Callable[[AttnResConfig], ResidualConfig]
    size: str | None = None
    equation: str
    reads: str
    dynamic: bool
    parameters: str
    state: str
    cost: str
    paper: str
    degenerate: tuple[Degenerate, ...] = ()
    notes: str = ""
