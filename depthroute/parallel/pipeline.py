"""The schedule of a pipeline: micro-batches through the chunks of all stages, by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from depthroute.parallel.chunk import Chunk, Kept
from depthroute.parallel.cut import Cut, Passages
from depthroute.parallel.stage import ChunkStage, Wire
from depthroute.parallel.world import World


class Pipeline:
    """The stages of this process in the schedule of its layout.

    `stages`: those of this process. `wire`: bytes that it has sent to others. `kept`: what it holds of the depth memory between its chunks.
    """

    def __init__(
        self, chunks: Sequence[Chunk], cut: Cut, passages: Passages, world: World, kept: Kept, microbatches: int
    ) -> None:
        self.wire, self.kept = Wire(), kept
        tokens = torch.empty(cut.tokens, dtype=torch.long, device="meta")
        self.stages = [
            ChunkStage(
                chunk, cut, passages, tokens, stages=world.layout.pp, device=world.device, group=world.group("pp"), kept=kept,
                wire=self.wire,
            )
            for chunk in chunks
        ]  # fmt: skip
        self._first, self._last = chunks[0].first, chunks[-1].last
        self._count = 1
        kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
        stages = self.stages if world.layout.order == "interleaved" else self.stages[0]
        self._schedule = kinds[world.layout.order](stages, microbatches, loss_fn=self._loss, scale_grads=False)

    def step(self, tokens: Tensor, targets: Tensor, count: int) -> None:
        """Forward and backward of all micro-batches [R, T]; `count`: the tokens of the whole batch, by which losses are divided."""
        self._count = count
        self._schedule.step(*self._given(tokens), return_outputs=False, **self._wanted(targets))

    def evaluate(self, tokens: Tensor, targets: Tensor) -> None:
        """Forward of all micro-batches."""
        self._schedule.eval(*self._given(tokens), return_outputs=False, **self._wanted(targets))
        for stage in self.stages:
            stage.clear_runtime_states()

    def _given(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (tokens,) if self._first else ()

    def _wanted(self, targets: Tensor) -> dict[str, Tensor]:
        return {"target": targets} if self._last else {}

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The last chunk has the targets, and returns the sum over them."""
        return output / self._count
