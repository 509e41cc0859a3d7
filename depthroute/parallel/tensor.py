"""Tensor and sequence parallelism: P processes share the heads of every attention, the columns of every MLP, and the tokens of all else.

A process holds T/P neighbouring tokens of everything outside the sub-layers: of the embedding, of every source of the depth memory, of the
final hidden states. Reads, norms, writes and the head work on these and know nothing of it. A sub-layer gathers what it reads from all
processes, works with its own heads or columns on all T tokens, and the sum of what the processes put out is scattered over the tokens again
(Korthikanti et al. 2022, "Reducing activation recomputation in large Transformer models"). What is traded is one tensor [B, T, D] before
and one behind each sub-layer, and not the depth memory, of which there are many.

Shapes: B batch, T tokens, D width, H heads, E head width, P processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.model import ModelConfig
from depthroute.model.layers import Layer
from depthroute.model.sublayer import SubLayerOutput
from depthroute.residual import Inputs, RMSNorm, RoleInputs

TOKENS = 1  # the dimension of [B, T, D] that is shared outside of sub-layers


def check_tensor(config: ModelConfig, processes: int) -> None:
    """Refuse a model that `processes` cannot share; nothing is allocated.

    Raises:
        RequestError: heads, MLP columns or the context do not divide, sub-layers are no softmax attention or dense MLP, or the residual
            method looks inside sub-layers or across tokens.
    """
    sizes = {"heads": config.heads, "key_value_heads": config.resolved_key_value_heads}
    for name, value in (sizes | {"mlp_width": config.mlp_width, "context": config.context}).items():
        if value % processes:
            raise RequestError(f"model.{name} = {value} cannot be shared by {processes} processes; it takes a multiple of {processes}.")
    if processes == 1:
        return
    for layer in range(config.layers):
        if config.mixer(layer) != "softmax":
            raise RequestError(
                f"layer {layer} of model.mixers is {config.mixer(layer)!r}, and tensor parallelism shares 'softmax' attention alone; "
                "leave tp out and use fsdp or pp."
            )
        if config.has_experts(layer):
            raise RequestError(
                f"layer {layer} has model.experts, and tensor parallelism shares dense MLPs alone; leave tp out and use fsdp or pp."
            )
    with torch.device("meta"):
        residual = config.residual.module(config.body)
    if residual.looks_inside or not residual.per_token:
        does = "looks inside sub-layers" if residual.looks_inside else "looks at several tokens at once"
        raise RequestError(
            f"the residual method {config.residual.describe()} {does}, and tensor parallelism gives each of {processes} processes a part "
            "of them; train it in parallel in another way."
        )


def shard_layer(layer: Layer, mesh: DeviceMesh) -> None:
    """Let the processes of `mesh` (one dimension, P in all) share the two sub-layers, in place.

    From then on the sub-layers take and return [B, T/P, D], this process's tokens, and an attention the `Sight` of all T. Their parameters
    are DTensors over `mesh`, whose gradients are complete after a backward pass. Nothing is sent, and no values are needed: weights may be
    on the meta device. Weights that are there must be the same on all processes. What a sub-layer feeds its output projection
    (`SubLayerOutput.activation`) is that of its own heads or columns.

    Parameters outside, norms before and behind the sub-layers among them, see the tokens of one process: the sum of their gradients over
    `mesh` is the caller's work.
    """
    columns = {"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel()}
    _share(layer.attention, mesh, columns, "output")
    for name in ("query_norm", "key_norm", "value_norm"):
        norm = getattr(layer.attention, name)
        if norm is not None:
            setattr(layer.attention, name, HeadNorm(norm, mesh))
    _share(layer.mlp, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel()}, "down")


def _share(sublayer: nn.Module, mesh: DeviceMesh, columns: dict[str, ColwiseParallel], rows: str) -> None:
    plan: dict[str, ParallelStyle] = {name: style for name, style in columns.items() if getattr(sublayer, name) is not None}
    # the output stays a sum over processes: what scatters it waits for it, so that no asynchronous tensor gets into a memory
    plan[rows] = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    parallelize_module(sublayer, mesh, plan, src_data_rank=None)

    def gather(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_gathered(arguments[0], mesh), *arguments[1:])

    def scatter(module: nn.Module, arguments: tuple[Any, ...], found: SubLayerOutput) -> SubLayerOutput:
        assert isinstance(found.output, DTensor)
        own = found.output.redistribute(placements=[Shard(TOKENS)]).to_local()
        return found._replace(output=own.clone())  # it is a view, of which FSDP2 warns: a write into one would escape its hooks

    sublayer.register_forward_pre_hook(gather)
    sublayer.register_forward_hook(scatter)


def _gathered(inputs: Inputs, mesh: DeviceMesh) -> Inputs:
    """[B, T, D] from every process's [B, T/P, D]. Roles that share a read still do: it is gathered once, and its gradient is scattered
    once."""

    def whole(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Shard(TOKENS)], run_check=False).redistribute(placements=[Replicate()])

    if isinstance(inputs, Tensor):
        return whole(inputs)
    query = whole(inputs.query)
    key = query if _one_read(inputs.key, inputs.query) else whole(inputs.key)
    if _one_read(inputs.value, inputs.query):
        return RoleInputs(query, key, query)
    return RoleInputs(query, key, key if _one_read(inputs.value, inputs.key) else whole(inputs.value))


def _one_read(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same object, or were until FSDP2 handed it on as one per role: the same memory, from one autograd node."""
    if one is other or torch.compiler.is_compiling():
        return one is other
    return one.grad_fn is not None and one.grad_fn is other.grad_fn and one.data_ptr() == other.data_ptr()


class HeadNorm(RMSNorm):
    """The norm of a process's own heads [B, H/P, T, E]. The gain is that of all heads, and its gradient the sum over them."""

    def __init__(self, norm: RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__(norm.normalized_shape, eps=norm.eps, device="meta")
        gain = distribute_tensor(norm.weight, mesh, [Replicate()], src_data_rank=None)
        self.weight = nn.Parameter(gain, requires_grad=norm.weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight
        assert isinstance(gain, DTensor)
        # the redistribution does nothing to the gain; backward it is what adds up the gradient's parts
        own = gain.redistribute(placements=gain.placements).to_local(grad_placements=[Partial()])
        return F.rms_norm(x.to(own.dtype), tuple(self.normalized_shape), own, self.eps)
