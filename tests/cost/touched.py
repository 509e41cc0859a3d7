"""Counts what a residual method touches as it runs: the oracle of the traffic formulas.

Between two sub-layers lies one pass. Every tensor of the memory (and the sub-layer's output) that an operation of the pass touches is read
once; every tensor that the pass leaves behind, or hands to the next sub-layer, and that was not there before is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from depthroute.model import ModelConfig
from depthroute.residual import Projected, Trace

TOKENS = 11  # no other size in these models, so that a tensor without it is no token's

# Operations that take a tensor without looking at its numbers.
BLIND = (
    "view", "expand", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze", "split", "unbind", "detach", "alias", "t.", "new_",
    "empty_like", "zeros_like", "ones_like",
)  # fmt: skip


class Touches(TorchDispatchMode):
    """Storages that operations other than views take."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.paused = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.__name__
        if not self.paused and not name.startswith(BLIND):
            self.storages |= {storage(tensor) for tensor in tree_leaves((arguments, keywords)) if isinstance(tensor, Tensor)}
        return function(*arguments, **(keywords or {}))

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        yield
        self.paused = False


def counted(config: ModelConfig) -> tuple[float, float]:
    """(read, written) per token over a network of random sub-layers."""
    torch.manual_seed(0)
    residual = config.residual.build(config.body).double()
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    residual.requires_grad_(False)
    projecting = config.residual.adaptation(config.body).value_layers
    read = written = 0.0
    touches = Touches()

    def a_pass(given: Any, run: Callable[[Any, list[Tensor]], Any]) -> Any:
        """`run(given, handed)` puts what the next sub-layer reads into `handed` and returns what the method keeps."""
        nonlocal read, written
        copies: dict[int, Tensor] = {}
        given = tree_map_only(Tensor, lambda tensor: copies.setdefault(id(tensor), tensor.clone()), given)  # nothing shares a storage
        handed: list[Tensor] = []
        touches.storages.clear()
        with touches:
            kept = run(given, handed)
        before = {storage(tensor): tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor)}
        read += sum(numbers(tensor) for key, tensor in before.items() if key in touches.storages)
        after = {(storage(t), t.storage_offset()): t for t in (*handed, *tree_leaves(kept)) if isinstance(t, Tensor)}
        written += sum(numbers(tensor) for (key, _), tensor in after.items() if key not in before)
        return kept

    inputs: Any = None

    def read_site(memory: Any, site: int, handed: list[Tensor]) -> None:
        nonlocal inputs

        def norm(x: Tensor) -> Tensor:
            handed.append(x)
            with touches.pause():  # the norm is the body's
                return x.clone()

        one_source = site == 0 and config.residual.name == "attnres"  # which is handed on
        with touches.pause() if one_source else nullcontext():
            inputs = residual.read(memory, site, norm)
        if one_source:
            handed.clear()

    def opening(embedding: Tensor, handed: list[Tensor]) -> Any:
        memory = residual.open(embedding)
        read_site(memory, 0, handed)
        return memory

    memory = a_pass(fresh(config.width), opening)
    for site in range(2 * config.layers):
        kept = None
        if site % 2 == 0:
            shared, head = config.resolved_key_value_heads, config.resolved_head_width
            own = projecting is None or site // 2 < projecting
            projected = (fresh(config.heads, head=head), fresh(shared, head=head), fresh(shared, head=head) if own else None)

            def values(given: Any, handed: list[Tensor], site: int = site) -> Any:
                mixed, kept = residual.values(given[0], site, Projected(*given[1]))
                handed.append(mixed)
                return kept

            kept = a_pass((memory, projected), values)
        activation = fresh(config.body.activation(site))

        def following(given: Any, handed: list[Tensor], site: int = site, activation: Tensor = activation) -> Any:
            memory, output, inputs, kept = given
            memory = residual.write(memory, site, output, Trace(inputs, activation, kept))
            read_site(memory, site + 1, handed)
            return memory

        memory = a_pass((memory, fresh(config.width), inputs, kept), following)
    return read, written


def fresh(*sizes: int, head: int | None = None) -> Tensor:
    """Random [1, T, size], or [1, heads, T, head]."""
    shape = (1, TOKENS, *sizes) if head is None else (1, *sizes, TOKENS, head)
    return torch.randn(shape, dtype=torch.float64)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def numbers(tensor: Tensor) -> float:
    return tensor.numel() / TOKENS if TOKENS in tensor.shape else 0.0
