"""Where the depth is cut into chunks, and what of the depth memory passes from one chunk to the next.

The decoder is run once without memory or arithmetic (on fake tensors) and looked at between its chunks. A tensor of the memory that is the
same object at two cuts is one source: what holds it need not be sent it again. So every residual method travels as it is, and its
histories are cached, with nothing known of any method. The same run shows which parameters each chunk uses.

Shapes: B sequences of a micro-batch, T tokens that a process has of each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.model.layer_work import attended, layer_products, state_products
from depthroute.ops import hold
from depthroute.parallel.layout import Keeps
from depthroute.residual import Memory


class Source(NamedTuple):
    """A tensor that passes a cut: contiguous, of one micro-batch. `made`: the chunk that made it; `opened`: as it was opened there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    made: int
    opened: bool

    @property
    def bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class Memories(NamedTuple):
    """The memory at a cut: how it is built, and the number of the source at each of its leaves; None where it has nothing."""

    structure: Any
    leaves: tuple[int | None, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        """Each once."""
        return tuple(dict.fromkeys(leaf for leaf in self.leaves if leaf is not None))

    def built(self, sources: Mapping[int, Tensor]) -> Memory:
        """The memory from its sources by number."""
        return pytree.tree_unflatten([None if leaf is None else sources[leaf] for leaf in self.leaves], self.structure)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A decoder in chunks. Chunk c of C is run by process c mod P of a pipeline.

    `tokens`: [B, T] of a micro-batch. `memories`: at the C - 1 cuts. `parameters`: the names of those that each chunk uses; a parameter
    that no gradient comes to is that of its layer's chunk, or outside of layers the first chunk's. `hidden`: the dtype of the final hidden
    states.
    """

    tokens: tuple[int, int]
    layers: tuple[range, ...]
    sources: tuple[Source, ...]
    memories: tuple[Memories, ...]
    parameters: tuple[frozenset[str], ...]
    hidden: torch.dtype

    @property
    def chunks(self) -> int:
        return len(self.layers)

    def shared(self) -> dict[str, tuple[int, ...]]:
        """The chunks of every parameter that more than one uses."""
        users: dict[str, tuple[int, ...]] = {}
        for chunk, names in enumerate(self.parameters):
            for name in sorted(names):
                users[name] = (*users.get(name, ()), chunk)
        return {name: chunks for name, chunks in users.items() if len(chunks) > 1}


@dataclass(frozen=True)
class Passages:
    """What travels, by number of source. `sent`: of every cut. `kept`: what a chunk that has run leaves to later ones of its process."""

    sent: tuple[tuple[int, ...], ...]
    kept: tuple[frozenset[int], ...]


def layers_of_chunks(config: ModelConfig, chunks: int) -> tuple[range, ...]:
    """The layers of every chunk, so that the longest takes as short as it can by `products`, with the head in the last one.

    Of equally good cuts it is the one with most layers in the last chunk, and the others as even as they can be.

    Raises:
        RequestError: more chunks than layers.
    """
    layers = config.layers
    if chunks > layers:
        raise RequestError(
            f"{chunks} chunks (pipeline stages x virtual stages) need as many layers, and model.layers = {layers}; use fewer stages."
        )
    if chunks == 1:
        return (range(layers),)
    sums = [0, *accumulate(products(config, layer) for layer in range(layers))]
    head = config.vocabulary * config.width

    def earliest(longest: int) -> list[int]:
        """The first layer of every chunk where the later ones take as much as they can. Those before the first chunk are left over."""
        found, stop, room = [0] * chunks, layers, longest - head
        for chunk in reversed(range(chunks)):
            found[chunk] = stop = max(bisect_left(sums, sums[stop] - room), chunk)  # a layer at least for each before
            room = longest
        return found

    runs = {sums[stop] - sums[start] + head * (stop == layers) for stop in range(1, layers + 1) for start in range(stop)}
    least = max(sums[layers] - sums[layers - 1] + head, *(sums[layer + 1] - sums[layer] for layer in range(layers)))
    possible = sorted(run for run in runs if run >= least)
    longest = possible[bisect_left(possible, True, key=lambda run: earliest(run)[0] == 0)]
    bounds = earliest(longest)
    starts, last = [0], bounds[-1]
    for chunk in range(1, chunks - 1):
        even = bisect_right(sums, sums[last] * chunk // (chunks - 1)) - 1
        latest = min(bisect_right(sums, sums[starts[-1]] + longest) - 1, last - (chunks - 1 - chunk))
        starts.append(min(max(even, bounds[chunk], starts[-1] + 1), latest))
    starts.append(last)
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], layers], strict=True))


def products(config: ModelConfig, layer: int) -> int:
    """Multiplications of a token in a layer: with the weights that it meets, and with what it sees of other tokens, half of the context on
    average."""
    return layer_products(config, layer) + attended(config, layer) * config.context // 2 + state_products(config, layer, chunked=True)


def cut(
    config: ModelConfig, layers: Sequence[range], *, rows: int, tokens: int, kind: str, dtype: torch.dtype, precision: torch.dtype | None
) -> Cut:
    """See what passes between chunks of `layers`.

    Args:
        rows, tokens: B and T.
        kind: the type of the device that it is to run on, "cpu" or "cuda".
        dtype: that of the parameters.
        precision: that of autocast; None is none.
    """
    if len(layers) == 1:  # nothing passes
        with torch.device("meta"):
            every = frozenset(name for name, _ in Decoder(config).named_parameters())
        return Cut(tokens=(rows, tokens), layers=tuple(layers), sources=(), memories=(), parameters=(every,), hidden=dtype)
    found: dict[int, int] = {}  # number of the source by identity
    alive: list[Any] = []  # identities hold as long as their objects live
    sources: list[Source] = []
    memories: list[Memories] = []
    users: list[set[str]] = []
    autocast = torch.autocast(kind, dtype=precision, enabled=precision is not None)
    with FakeTensorMode(), torch.enable_grad(), torch.device(kind), autocast, _parameters_in(dtype):
        decoder = Decoder(replace(config, document_end=None))  # what passes is the same whatever a token sees
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        residual, sight = decoder.residual, decoder.sight(ids)
        names = {id(parameter): name for name, parameter in decoder.named_parameters()}
        memory: Memory = residual.open(decoder.embedded(ids))
        opened = {id(leaf) for leaf in pytree.tree_leaves(memory)}
        alive.append(memory)
        for chunk, own in enumerate(layers):
            last = chunk == len(layers) - 1
            residual.reads = range(2 * own.start, 2 * own.stop + last)
            if chunk:
                memory = residual.take_over(memory, 2 * own.start)
            memory = decoder.run(memory, own, sight)
            if last:
                outputs = [residual.close(memory, decoder.norm)]
                users.append(_used(outputs, names) | {names[id(decoder.head_weight)]})
                break
            leaves, structure = pytree.tree_flatten(residual.hand_over(memory))
            tensors = [leaf for leaf in leaves if leaf is not None]
            for leaf in tensors:
                if id(leaf) not in found:
                    found[id(leaf)] = len(sources)
                    made = Source(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, chunk, chunk == 0 and id(leaf) in opened)
                    sources.append(made)
            memories.append(Memories(structure, tuple(None if leaf is None else found[id(leaf)] for leaf in leaves)))
            users.append(_used(tensors, names))
            # as they arrive: leaves of a graph of their own, each once
            arrived = {found[id(leaf)]: hold(leaf.detach().requires_grad_(leaf.requires_grad)) for leaf in tensors}
            found |= {id(leaf): number for number, leaf in arrived.items()}
            alive += [leaves, arrived]
            memory = memories[-1].built(arrived)
    chunk_of = {layer: chunk for chunk, own in enumerate(layers) for layer in own}
    for name in set(names.values()).difference(*users):  # what no gradient comes to, as a router's bias
        owner, *rest = name.split(".")
        users[chunk_of[int(rest[0])] if owner == "layers" else 0].add(name)
    return Cut(
        tokens=(rows, tokens), layers=tuple(layers), sources=tuple(sources), memories=tuple(memories),
        parameters=tuple(map(frozenset, users)), hidden=outputs[0].dtype,
    )  # fmt: skip


def passages(cut: Cut, stages: int, keeps: Keeps) -> Passages:
    """What travels between chunks where each of `stages` processes keeps of a micro-batch what `keeps` says."""
    held: list[set[int]] = [set() for _ in range(stages)]
    sent: list[tuple[int, ...]] = []
    available: list[set[int]] = []  # of every chunk: what its process could leave to its later chunks
    for chunk in range(cut.chunks):
        stage = chunk % stages
        if chunk:
            sent.append(tuple(number for number in cut.memories[chunk - 1].sources if number not in held[stage]))
            if keeps != "none":
                held[stage] |= set(sent[-1])
        if chunk < cut.chunks - 1:
            mine = (number for number in cut.memories[chunk].sources if cut.sources[number].made == chunk)
            held[stage] |= {number for number in mine if keeps == "all" or (keeps == "received" and cut.sources[number].opened)}
        available.append(set(held[stage]))
    kept = []
    for chunk in range(cut.chunks):
        later = range(chunk + stages, cut.chunks, stages)
        wanted = {number for other in later for number in cut.memories[other - 1].sources if number not in sent[other - 1]}
        kept.append(frozenset(wanted & available[chunk]))
    return Passages(tuple(sent), tuple(kept))


@contextmanager
def _parameters_in(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made with parameters of this dtype: fake ones cannot be cast afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _used(outputs: Iterable[Tensor], names: dict[int, str]) -> set[str]:
    """The names of the parameters that `outputs` depend on."""
    found = {names[id(output)] for output in outputs if id(output) in names}
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        found |= {names[id(node.variable)]} if id(getattr(node, "variable", None)) in names else set()
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return found
