"""Parameters that several chunks use, a tied embedding above all: their gradients are added up over the stages that have one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from depthroute.model import Decoder
from depthroute.parallel.cut import Cut
from depthroute.parallel.world import World


class SharedParameters:
    """Each chunk that uses such a parameter has its own, all with the same values: they get the same gradient and take the same steps."""

    def __init__(self, cut: Cut, world: World, decoders: Sequence[tuple[int, Decoder]]) -> None:
        users, stages = cut.shared(), world.layout.pp
        self._own: dict[str, nn.Parameter] = {}
        self._elsewhere: set[str] = set()
        for number, decoder in decoders:
            for name, parameter in decoder.named_parameters():
                if name in users:
                    self._own[name] = parameter
                    if users[name][0] != number:
                        self._elsewhere.add(name)
        self._groups: dict[str, distributed.ProcessGroup] = {}
        lines = world.mesh.mesh.reshape(stages, -1).T.tolist()
        made: dict[tuple[int, ...], distributed.ProcessGroup | None] = {}
        for name, chunks in users.items():  # in the same order on every process: a group is made by all of them together
            holders = tuple(sorted({chunk % stages for chunk in chunks}))
            if holders not in made:
                made[holders] = _group([[line[stage] for stage in holders] for line in lines]) if len(holders) > 1 else None
            group = made[holders]
            if group is not None and name in self._own:
                self._groups[name] = group

    def is_first(self, name: str) -> bool:
        """Whether no earlier chunk has a parameter of this process."""
        return name not in self._elsewhere

    @torch.no_grad()
    def add_up(self) -> None:
        """Give every copy of a shared parameter the sum of the gradients of all."""
        for name, group in self._groups.items():
            distributed.all_reduce(_local_gradient(self._own[name]), group=group)


def _group(lines: Sequence[Sequence[int]]) -> distributed.ProcessGroup | None:
    """The group of this process among several of which no two have one in common."""
    mine = None
    for ranks in lines:
        group = distributed.new_group(list(ranks))
        if distributed.get_rank() in ranks:
            mine = group
    return mine


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """What is here of a gradient, as it is stored; zeros at first where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
