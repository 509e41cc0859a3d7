"""A decoder on the processes of a world, for a training loop that need not know how it is laid out.

Every process calls the same methods in the same order. What they return is of the whole batch, and the same on every process.

Shapes: R sequences of the batch that this process's share has, T tokens of context.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.model.layers import Layer
from depthroute.model.loss import cross_entropy_sums, likeliest, token_nll
from depthroute.parallel.chunk import Chunk, Finish, Kept, chunk_decoder
from depthroute.parallel.cut import cut, layers_of_chunks, passages
from depthroute.parallel.pipeline import Pipeline
from depthroute.parallel.sharding import by_mesh, local, shard, synchronise
from depthroute.parallel.shared import SharedParameters
from depthroute.parallel.tensor import check_tensor, shard_layer
from depthroute.parallel.world import World

DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters


class Network:
    """The part of a decoder that this process holds, and what it does with the others.

    Attributes:
        parts: The decoders of this process's chunks, with the parameters that are here, under their names in the whole model.
        named: Those parameters by name, in shards where they are sharded.
        owned: Those of them that no earlier stage has too: over all stages each comes once.
    """

    def __init__(
        self,
        config: ModelConfig,
        world: World,
        *,
        sequences: int,
        microbatch: int,
        precision: torch.dtype | None,
        fill: Callable[[nn.Module], None],
        recompute: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`sequences`: of a batch. `microbatch`: sequences in one forward pass, at most. `precision`: of autocast, None is none. `fill`
        gives a module its initial values, by the names of its parameters. `dtype`: of the parameters.

        Raises:
            RequestError: the layout does not fit the model or the batch.
        """
        layout = world.layout
        check_tensor(config, layout.tp)
        self.config, self.world = config, world
        self.rows = layout.rows(sequences)
        microbatches = layout.microbatches(sequences, microbatch) if layout.pp > 1 else 0
        self.microbatch = self.rows // microbatches if microbatches else min(microbatch, self.rows)
        plan = cut(
            config, layers_of_chunks(config, layout.chunks), rows=self.microbatch, tokens=config.context // layout.tp,
            kind=world.device.type, dtype=dtype, precision=precision,
        )  # fmt: skip
        for name, users in plan.shared().items():
            if len({user % layout.pp for user in users}) < len(users):
                raise RequestError(
                    f"the parameter {name} is used in several stages of one process, with --parallel {layout.describe()} and the residual "
                    f"method {config.residual.describe()}; leave virtual out."
                )
        travels, kept = passages(plan, layout.pp, layout.keeps), Kept()
        numbers = range(world.place("pp"), layout.chunks, layout.pp)
        self._chunks = [
            self._sharded(Chunk(chunk_decoder(config, plan, number, dtype), plan, travels, number, kept, precision))
            for number in numbers
        ]
        for chunk in self._chunks:
            chunk.decoder.recompute = recompute
            fill(chunk.decoder)
        self.parts = [chunk.decoder for chunk in self._chunks]
        self.named = [(name, parameter) for part in self.parts for name, parameter in part.named_parameters()]
        self._shared = SharedParameters(plan, world, [(chunk.number, chunk.decoder) for chunk in self._chunks])
        self.owned = [(name, parameter) for name, parameter in self.named if self._shared.is_first(name)]
        self._targets: Sequence[Tensor] = ()
        self._marked: Sequence[Tensor] = ()
        self._measured: list[tuple[Tensor, Tensor]] = []
        self._nll = torch.zeros((), dtype=torch.float64, device=world.device)
        self._z_loss = 0.0
        self.pipeline = Pipeline(self._chunks, plan, travels, world, kept, microbatches) if microbatches else None
        self._copies = None
        if layout.ddp == layout.processes > 1:
            # buffers are the same everywhere; the option that says so got another name
            name = "forward_sync_buffers" if "forward_sync_buffers" in DDP_OPTIONS else "broadcast_buffers"
            quiet: dict[str, Any] = {name: False}
            self._copies = DistributedDataParallel(self._chunks[0], gradient_as_bucket_view=True, **quiet)

    def _sharded(self, chunk: Chunk) -> Chunk:
        """A chunk without memory in the form that this process holds it in, with memory and without values."""
        world = self.world
        if world.layout.tp > 1:
            for layer in chunk.decoder.layers:
                if isinstance(layer, Layer):
                    shard_layer(layer, world.mesh["tp"])
        if world.layout.ddp < world.layout.processes:
            shard(chunk, world, chunk.precision)
        chunk.to_empty(device=world.device)
        for module in chunk.modules():
            if module._buffers:
                reset = getattr(module, "reset_buffers", None)
                if reset is None:
                    raise RequestError(
                        f"{type(module).__name__} has the buffer {next(iter(module._buffers))!r} and no reset_buffers(): a model on "
                        "several processes is made without memory first. Give it that method, which fills the buffers in place."
                    )
                reset()
        return chunk

    def accumulate(self, batch: Tensor, z_loss: float) -> Tensor:
        """Add the gradient of the mean loss of the whole batch; returns the sum of its token losses (float64).

        `batch`: this share's sequences, [R, T + 1] int64, the same on all processes of the share.
        """
        if batch.shape != (self.rows, self.config.context + 1):
            raise RequestError(
                f"a batch of {list(batch.shape)} was given, and this share of the batch is {[self.rows, self.config.context + 1]}: "
                "sequences by tokens of context and one."
            )
        self._nll.zero_()
        self._z_loss = z_loss
        inputs, targets = self._share(batch[:, :-1]), self._share(batch[:, 1:])
        count = batch.shape[0] * (batch.shape[1] - 1) * self.world.layout.shares
        self._prepare(self._train, batch[:, :-1], targets, self.microbatch)
        if self.pipeline is not None:
            self.pipeline.step(inputs, targets, count)
        else:
            self._accumulate_alone(torch.split(inputs, self.microbatch), count)
        self._shared.add_up()
        distributed.all_reduce(self._nll)  # every token was seen once, in a pipeline by its last stage
        return self._nll.clone()

    def _prepare(self, finish: Finish, whole: Tensor, targets: Tensor, microbatch: int) -> None:
        """Tell the chunks what they need beside what they are called with: `whole`, the sequences of this share with all their tokens."""
        self._targets = torch.split(targets, microbatch)
        for chunk in self._chunks:
            chunk.finish, chunk.sequences = finish, torch.split(whole, microbatch)

    def _accumulate_alone(self, inputs: Sequence[Tensor], count: int) -> None:
        chunk, copies, layout = self._chunks[0], self._copies, self.world.layout
        for number, some in enumerate(inputs):
            last = number == len(inputs) - 1
            chunk.begin(number)
            if copies is None:
                synchronise(chunk, layout, last)
                torch.autograd.backward(chunk(some) / count)
                continue
            with nullcontext() if last else copies.no_sync():
                # DDP averages over the copies, and the loss is a sum over all of them
                torch.autograd.backward(copies(some) * (layout.ddp / count))

    def _train(self, decoder: Decoder, hidden: Tensor, microbatch: int) -> Tensor:
        targets = self._targets[microbatch]
        sums = cross_entropy_sums(hidden.flatten(0, -2), decoder.head_weight, targets.flatten(), self._z_loss)
        self._nll += sums.nll
        return sums.objective

    def _share(self, tokens: Tensor) -> Tensor:
        """What this process has of the tokens of its sequences."""
        place, parts = self.world.place("tp"), self.world.layout.tp
        return tokens.chunk(parts, dim=1)[place].contiguous()

    def gradient_norm(self) -> float:
        """Of all gradients of the model."""
        own: dict[int, list[Tensor]] = {}
        for _, parameter in self.owned:
            if parameter.grad is not None:
                here, parts = local(parameter.grad)
                own.setdefault(parts, []).append(here)
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for parts, tensors in own.items():  # a part lies on as many processes of a stage as are left when each part has one
            squares += get_total_norm(tensors).double().square() * (parts * self.world.layout.pp / self.world.layout.processes)
        distributed.all_reduce(squares)
        return math.sqrt(squares.item())

    def clip(self, limit: float, norm: float) -> None:
        """Scale the gradients to a norm of `limit`, as torch's clipping does."""
        for group in by_mesh([parameter for _, parameter in self.named]):
            exact = torch.float64 if group[0].dtype == torch.float64 else torch.float32
            clip_grads_with_norm_(group, limit, torch.tensor(norm, dtype=exact, device=self.world.device))

    @property
    def evaluation_rows(self) -> int:
        """Sequences that `token_nll` takes at most, in a pipeline; elsewhere as many as fit."""
        return (self.rows if self.pipeline is not None else self.microbatch) * self.world.layout.shares

    def token_nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As `Decoder.token_nll`: nats of every target, [B, T] with T at most the context; every process gives and gets the same.

        Raises:
            RequestError: T is above the context, or there are more sequences than `evaluation_rows` in a pipeline.
        """
        return self._measure(tokens, targets, torch.zeros_like(targets, dtype=torch.bool))[0]

    def token_nll_and_hits(self, tokens: Tensor, targets: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.token_nll_and_hits`."""
        losses, hits = self._measure(tokens, targets, marked)
        return losses, hits[marked]

    @torch.no_grad()
    def _measure(self, tokens: Tensor, targets: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
        layout = self.world.layout
        sequences, length = tokens.shape
        if length > self.config.context or (self.pipeline is not None and sequences > self.evaluation_rows):
            raise RequestError(
                f"{sequences} sequences of {length} tokens were given; they have {self.config.context} tokens at most"
                + (f", and a pipeline takes {self.evaluation_rows} at once." if self.pipeline is not None else ".")
            )
        # what passes between processes has the size of a context; what is put behind the tokens changes nothing before it
        tokens, targets, marked = (functional.pad(given, (0, self.config.context - length)) for given in (tokens, targets, marked))
        rows = self.rows if self.pipeline is not None else -(-sequences // layout.shares)
        mine = self._rows(rows, sequences)
        inputs, wanted, where = (self._share(given[mine]) for given in (tokens, targets, marked))
        self._measured = []
        together = self.microbatch if self.pipeline is not None else rows
        self._prepare(self._evaluate, tokens[mine], wanted, together)
        self._marked = torch.split(where, together)
        if self.pipeline is not None:
            self.pipeline.evaluate(inputs, wanted)
        else:
            self._chunks[0].begin(0)
            self._chunks[0](inputs)
        for chunk in self._chunks:
            if isinstance(chunk, FSDPModule):
                chunk.reshard()
        losses, hits = self._gathered(wanted, sequences)
        return losses[:, :length], hits[:, :length]

    def _evaluate(self, decoder: Decoder, hidden: Tensor, microbatch: int) -> Tensor:
        targets, marked = self._targets[microbatch], self._marked[microbatch]
        flat = hidden.flatten(0, -2)
        losses = token_nll(flat, decoder.head_weight, targets.flatten()).view(targets.shape)
        hits = torch.zeros_like(marked)
        if marked.any():
            hits[marked] = likeliest(flat[marked.flatten()], decoder.head_weight) == targets[marked]
        self._measured.append((losses, hits))
        return losses.sum()

    def _rows(self, rows: int, sequences: int) -> Tensor:
        """Which sequences this share measures: its own, and the last one again where there are too few."""
        first = self.world.share * rows
        return torch.arange(first, first + rows).clamp(max=sequences - 1)

    def _gathered(self, like: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Losses and hits [B, T] of all shares, from what the last stages have measured of theirs."""
        world, layout = self.world, self.world.layout
        exact = torch.float64 if any(parameter.dtype == torch.float64 for _, parameter in self.named) else torch.float32
        found = torch.zeros(2, *like.shape, dtype=exact, device=world.device)
        if self._measured:
            for row, kind in enumerate(zip(*self._measured, strict=True)):
                found[row] = torch.cat(kind).to(exact)
        everyone = [torch.empty_like(found) for _ in range(layout.processes)]
        distributed.all_gather(everyone, found)
        # the last stage's, by share and place in the sequence
        last = world.mesh.mesh.reshape(layout.pp, layout.shares, layout.tp)[-1].tolist()
        parts = [torch.cat([everyone[rank] for rank in share], dim=2) for share in last]
        losses, hits = torch.cat(parts, dim=1)[:, :sequences]
        return losses, hits.bool()

    def train(self, mode: bool = True) -> Network:
        for chunk in self._chunks:
            chunk.train(mode)
        return self

    @property
    def training(self) -> bool:
        return self._chunks[0].training
