"""A chunk as a stage of torch.distributed.pipelining, which names the micro-batch, counts bytes, and holds no buffer longer than needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.pipelining import PipelineStage

from depthroute.parallel.chunk import Chunk, Kept
from depthroute.parallel.cut import Cut, Passages

NOTHING = torch.empty(0)  # in place of a buffer that is not needed


@dataclass
class Wire:
    """Bytes that a process has sent to others, forward and backward."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward


class ChunkStage(PipelineStage):
    """What travels is known from the cut, so that no metadata is exchanged or inferred.

    torch allots the buffers that a stage receives in for all micro-batches at once and keeps them. Here each is made when it is to be
    filled, and let go when its micro-batch has been through backward.
    """

    def __init__(
        self, chunk: Chunk, cut: Cut, passages: Passages, tokens: Tensor, *, stages: int, device: torch.device,
        group: distributed.ProcessGroup, kept: Kept, wire: Wire,
    ) -> None:  # fmt: skip
        """`tokens`: like a micro-batch's, on the meta device. `stages`: processes of the pipeline."""
        number, last = chunk.number, cut.chunks - 1
        self._arriving = (tokens,) if number == 0 else _like(cut, passages.sent[number - 1])
        exact = torch.float64 if cut.hidden == torch.float64 else torch.float32  # of the sum over targets that the last chunk returns
        self._leaving = (torch.empty((), dtype=exact, device="meta"),) if number == last else _like(cut, passages.sent[number])
        super().__init__(chunk, number, cut.chunks, device, input_args=self._arriving, output_args=self._leaving, group=group)
        self._chunk, self._kept, self._wire = chunk, kept, wire
        self._ends = number + stages > last, number < stages  # whether it is the process's last chunk, and its first

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self._chunk.begin(fwd_chunk_id)
        try:
            found = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        except RuntimeError as error:  # torch's own wraps whatever a chunk raises
            raise error.__cause__ or error from None
        if not self.has_backward:
            _let_go(self.args_recv_info.get(fwd_chunk_id, ()))
            self.fwd_cache[fwd_chunk_id] = (() if self.is_last else self.fwd_cache[fwd_chunk_id][0], [])  # the inputs are not needed
            if self._ends[0]:
                self._kept.release(fwd_chunk_id)
        return found

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        found = super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
        if self.has_backward:
            _let_go(self.args_recv_info.get(bwd_chunk_id, ()))
            _let_go(self.grad_recv_info.get(bwd_chunk_id, ()))
            if self._ends[1]:
                self._kept.release(bwd_chunk_id)
        return found

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        self._allot(self.args_recv_info, fwd_chunk_id, self._arriving)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        if self.has_backward and not self.is_last:
            self._allot(self.grad_recv_info, bwd_chunk_id, self._leaving)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        sent = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])
        self._wire.forward += _bytes(sent)
        return sent

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        sent = super().get_bwd_send_ops(bwd_chunk_id)
        self._wire.backward += _bytes(sent)
        return sent

    def _prepare_forward_infra(self, *arguments: Any, **options: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*arguments, **options)

    def _prepare_backward_infra(self, *arguments: Any, **options: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*arguments, **options)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """What is allotted in the meantime is none."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device
            for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
                _let_go(infos)

    def _allot(self, buffers: Mapping[int, Sequence[Any]], microbatch: int, like: Sequence[Tensor]) -> None:
        """Make the buffers of a micro-batch."""
        for info, tensor in zip(buffers[microbatch], like, strict=True):
            if getattr(info, "buffer", None) is NOTHING:
                graph = tensor.requires_grad and buffers is self.args_recv_info and self.has_backward
                info.buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device, requires_grad=graph)


def _let_go(infos: Sequence[Any]) -> None:
    for info in infos:
        if getattr(info, "buffer", None) is not None:  # what is no tensor from another stage, and no gradient, has none
            info.buffer = NOTHING


def _bytes(sent: Sequence[distributed.P2POp]) -> int:
    return sum(op.tensor.numel() * op.tensor.element_size() for op in sent)


def _like(cut: Cut, numbers: Sequence[int]) -> tuple[Tensor, ...]:
    """Tensors without memory like sources of a cut."""
    sources = [cut.sources[number] for number in numbers]
    return tuple(torch.empty(s.shape, dtype=s.dtype, device="meta", requires_grad=s.differentiable) for s in sources)
