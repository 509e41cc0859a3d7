"""A run of layers of a decoder as a module of its own, and the memory that a process keeps for its later chunks.

A source that was sent to a process, or made there, is kept once a micro-batch. A later chunk of that process starts from it as a leaf of
its own graph, where the gradients of all these chunks add up. When the backward pass comes to the chunk where the source came in, the sum
is added to what that chunk has for it, and goes back once. So no graph reaches over a cut, and none is passed through twice. These sums are
in the dtype of the memory.

Shapes: B sequences of a micro-batch, T tokens that a process has of each, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from depthroute.model import Decoder, ModelConfig
from depthroute.ops import hold
from depthroute.parallel.cut import Cut, Passages

Finish = Callable[[Decoder, Tensor, int], Any]


class Kept:
    """What a process keeps of the depth memory, by micro-batch and number of the source, between its chunks."""

    def __init__(self) -> None:
        self._leaves: dict[int, dict[int, Tensor]] = {}
        self.most = 0  # sources at once

    def __len__(self) -> int:
        return sum(map(len, self._leaves.values()))

    def keep(self, microbatch: int, number: int, source: Tensor) -> None:
        self._leaves.setdefault(microbatch, {})[number] = source.detach().requires_grad_(source.requires_grad)
        self.most = max(self.most, len(self))

    def leaf(self, microbatch: int, number: int) -> Tensor:
        return self._leaves[microbatch][number]

    def give_back(self, microbatch: int, number: int) -> Tensor | None:
        """The summed gradient of all chunks that read a source, which is then released."""
        return self._leaves[microbatch].pop(number).grad

    def release(self, microbatch: int) -> None:
        self._leaves.pop(microbatch, None)


class _Joined(torch.autograd.Function):
    """The identity on the sources of a cut. Backward it adds what later chunks of this process have summed for those that it keeps."""

    @staticmethod
    def forward(ctx: Any, kept: Kept, microbatch: int, numbers: Sequence[int | None], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.kept, ctx.microbatch, ctx.numbers = kept, microbatch, numbers
        return tuple(source.detach() for source in sources)  # no views: FSDP2 warns of a module that returns one

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None, None, None]
        for number, gradient in zip(ctx.numbers, gradients, strict=True):  # zeros where this chunk uses none: the sender waits for one
            later = None if number is None else ctx.kept.give_back(ctx.microbatch, number)
            found.append(gradient if later is None else gradient + later)
        return tuple(found)


class Chunk(nn.Module):
    """Chunk `number` of a decoder: from token ids [B, T] or the sources of the cut before it, to those of the cut behind it.

    `decoder` holds the parameters of this chunk alone, under their names in the whole model. The last chunk returns what
    `finish(decoder, hidden, microbatch)` makes of the hidden states [B, T, D] after the final norm.

    `begin` names the micro-batch before each call. `sequences`: the token ids of the whole sequences of every micro-batch, [B, T] or more
    tokens where T is a share of them, for what a token sees. They are no argument: every process of a share has them, and none is sent.
    `precision`: of autocast, for the forward pass alone.
    """

    def __init__(
        self, decoder: Decoder, cut: Cut, passages: Passages, number: int, kept: Kept, precision: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.number, self.layers, self.precision = number, cut.layers[number], precision
        self.sequences: Sequence[Tensor] = ()
        self.first, self.last = number == 0, number == cut.chunks - 1
        self.finish: Finish | None = None
        self._kept = kept
        self._before = None if self.first else cut.memories[number - 1]
        self._behind = None if self.last else cut.memories[number]
        self._arriving = () if self.first else passages.sent[number - 1]
        self._leaving = () if self.last else passages.sent[number]
        self._keeps = passages.kept[number]
        self._made = frozenset(index for index, source in enumerate(cut.sources) if source.made == number)
        self._microbatch = 0

    def begin(self, microbatch: int) -> None:
        self._microbatch = microbatch

    def forward(self, *arrived: Tensor) -> Any:
        with torch.autocast(arrived[0].device.type, dtype=self.precision, enabled=self.precision is not None):
            return self._run(arrived)

    def _run(self, arrived: Sequence[Tensor]) -> Any:
        decoder, residual = self.decoder, self.decoder.residual
        if self._before is None:
            memory = residual.open(decoder.embedded(arrived[0]))
            sources: dict[int, Tensor] = {}
        else:
            sources = self._gathered(arrived)
            memory = residual.take_over(self._before.built(sources), 2 * self.layers.start)
        memory = decoder.run(memory, self.layers, decoder.sight(self.sequences[self._microbatch]))
        if self._behind is None:
            assert self.finish is not None
            return self.finish(decoder, residual.close(memory, decoder.norm), self._microbatch)
        leaves = pytree.tree_leaves(residual.hand_over(memory))
        found = {number: leaf for number, leaf in zip(self._behind.leaves, leaves, strict=True) if number is not None}
        return self._joined(self._leaving, [found[number].contiguous() for number in self._leaving], self._keeps & self._made)

    def _gathered(self, arrived: Sequence[Tensor]) -> dict[int, Tensor]:
        """The sources of the cut before: those that arrived, and those that were here."""
        assert self._before is not None
        joined = self._joined(self._arriving, arrived, self._keeps)
        here = dict(zip(self._arriving, joined, strict=True))
        all_here = {
            number: here[number] if number in here else self._kept.leaf(self._microbatch, number) for number in self._before.sources
        }
        return {number: hold(source) for number, source in all_here.items()}

    def _joined(self, numbers: Sequence[int], sources: Sequence[Tensor], keeps: frozenset[int]) -> tuple[Tensor, ...]:
        """The same sources, with those of `keeps` kept for later chunks of this process."""
        wanted = [number if number in keeps else None for number in numbers]
        for number, source in zip(wanted, sources, strict=True):
            if number is not None:
                self._kept.keep(self._microbatch, number, source)
        if not torch.is_grad_enabled():
            return tuple(sources)
        joined: tuple[Tensor, ...] = _Joined.apply(self._kept, self._microbatch, wanted, *sources)  # type: ignore[no-untyped-call]
        return joined


def chunk_decoder(config: ModelConfig, cut: Cut, number: int, dtype: torch.dtype) -> Decoder:
    """A decoder without memory (on the meta device) that has the parameters of a chunk alone, under their names in the whole model."""
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    own = cut.layers[number]
    for layer in range(config.layers):
        if layer not in own:
            decoder.layers[layer] = nn.Identity()
    for name, _ in list(decoder.named_parameters()):
        if name not in cut.parameters[number]:
            path, _, local = name.rpartition(".")
            decoder.get_submodule(path).register_parameter(local, None)
    decoder.residual.reads = range(2 * own.start, 2 * own.stop + (number == cut.chunks - 1))
    return decoder
