"""Data parallelism of a chunk: copies (ddp) and shards (fsdp), over torch's fully_shard.

Gradients are summed over all processes that see other tokens, never averaged: a token's loss is divided once, by the count of the batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from depthroute.model.layers import Layer
from depthroute.parallel.chunk import Chunk
from depthroute.parallel.layout import Layout
from depthroute.parallel.world import World
from depthroute.residual import RMSNorm

SomeTensor = TypeVar("SomeTensor", bound=Tensor)


def shard(chunk: Chunk, world: World, precision: torch.dtype | None) -> None:
    """Let the processes of a world hold copies and shards of a chunk. Its parameters may be on the meta device.

    Sub-layers are gathered one by one, in the precision of autocast, which would round their matrices to it anyway; norms inside them, and
    what is `exact` (routers, decays), in their own. The norms before them and what the residual method has are used outside of them, and
    belong to the chunk as a whole with the embedding and the head. Gradients are summed in float32.
    """
    layout = world.layout
    if layout.shares * layout.tp == 1:
        return
    # FSDP2 warns of what a sub-layer fed its output projection: a view, which nobody changes in place
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view tensor", UserWarning)
    sub_layers = [part for layer in chunk.decoder.layers if isinstance(layer, Layer) for part in (layer.attention, layer.mlp)]
    mesh = _copies_and_shards(world.mesh, "ddp", "fsdp")
    groups: list[FSDPModule] = []
    if mesh is not None:
        rounded = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32 if precision else None, cast_forward_inputs=False)
        for part in sub_layers:
            unrounded = [inner for inner in part.modules() if isinstance(inner, RMSNorm) or getattr(inner, "exact", False)]
            groups += [fully_shard(inner, mesh=mesh) for inner in (unrounded if precision else ())]
            groups.append(fully_shard(part, mesh=mesh, mp_policy=rounded))
    elsewhere = {parameter for part in sub_layers for parameter in part.parameters()} if mesh is None else None
    tokens = _copies_and_shards(world.tokens, "copies", "shards")
    groups.append(fully_shard(chunk, mesh=tokens, ignored_params=elsewhere))
    for group in groups:
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)


def _copies_and_shards(mesh: DeviceMesh, copies: str, shards: str) -> DeviceMesh | None:
    """The mesh that fully_shard takes: of shards, or of copies and shards; None where both are 1."""
    if mesh[copies].size() == 1:
        return None if mesh[shards].size() == 1 else mesh[shards]
    return mesh[copies, shards]


def synchronise(chunk: nn.Module, layout: Layout, last: bool) -> None:
    """Before the forward pass of a micro-batch: shards are summed behind each, so that no process holds whole gradients, and copies behind
    the last one of a step."""
    if isinstance(chunk, FSDPModule):
        chunk.set_requires_gradient_sync(last or layout.fsdp * layout.tp > 1)
        chunk.set_requires_all_reduce(last)


def local(tensor: Tensor) -> tuple[Tensor, int]:
    """What this process has of a tensor that may be in shards, and in how many parts it is."""
    if not isinstance(tensor, DTensor):
        return tensor, 1
    parts = [size for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if not placement.is_replicate()]
    return tensor.to_local(), math.prod(parts)


@torch.no_grad()
def put(values: Tensor, into: Tensor) -> None:
    """Copy a whole tensor into one that may be in shards; every process has the same values, and none is sent."""
    if not isinstance(into, DTensor):
        into.copy_(values)
        return
    spread = distribute_tensor(values.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
    into.to_local().copy_(spread.to_local())


def by_mesh(tensors: Iterable[SomeTensor]) -> list[list[SomeTensor]]:
    """The tensors in groups of one mesh, those that are no DTensors by themselves: no kernel takes both, or two meshes, in one list."""
    groups: dict[DeviceMesh | None, list[SomeTensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())
