"""Counts the multiplications of a residual method as it runs: the oracle of the formulas for its arithmetic.

Products of matrices and element-wise products of tokens' tensors count. Norms do not, nor do the few numbers that steer a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from touched import TOKENS, fresh

from depthroute.model import ModelConfig
from depthroute.residual import Projected, Trace, attnres, bank, delta, dynamic, linear, mrla, muddformer, skips

FEW = 32  # per token: fewer numbers are coefficients


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0
        self.paused = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        found = function(*arguments, **(keywords or {}))
        name = function.__name__.partition(".")[0]
        if self.paused:
            return found
        if name in ("mm", "bmm"):
            self.count += found.numel() * arguments[0].shape[-1] / TOKENS
        elif name in ("mul", "addcmul") and TOKENS in found.shape and found.numel() >= FEW * TOKENS:
            self.count += found.numel() / TOKENS
        elif name in ("addmm", "baddbmm", "lerp", "convolution"):
            raise AssertionError(f"{name} is not counted")
        return found

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        yield
        self.paused = False

    def uncounted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any) -> Tensor:
            with self.pause():
                return function(*arguments)

        return run

    def depth_attention(self, sources: Any, query: Tensor, **options: Any) -> Any:
        """A read counts by its definition, whatever computes it."""
        queries = query if query.ndim == 2 else query[None]
        if len(sources) > 1 or options.get("prior") is not None:
            self.count += len(queries) * len(sources) * (queries.shape[-1] + sources[0].shape[-1])
        with self.pause():
            return attention(sources, query, **options)


attention = attnres.depth_attention


def multiplied(config: ModelConfig) -> float:
    """Multiplications per token over a network of random sub-layers."""
    torch.manual_seed(0)
    residual = config.residual.build(config.body).double().requires_grad_(False)
    projecting = config.residual.adaptation(config.body).value_layers
    shared, head = config.resolved_key_value_heads, config.resolved_head_width
    products = Products()
    with ExitStack() as patches:
        for module in (attnres, delta):
            patches.enter_context(patch.object(module, "depth_attention", products.depth_attention))
        for module in (attnres, dynamic, linear, mrla, muddformer, skips, bank):
            patches.enter_context(patch.object(module, "rms", products.uncounted(module.rms)))
        patches.enter_context(products)
        memory = residual.open(fresh(config.width))
        for site in range(2 * config.layers):
            inputs, kept = residual.read(memory, site, torch.clone), None
            if site % 2 == 0:
                own = fresh(shared, head=head) if projecting is None or site // 2 < projecting else None
                _, kept = residual.values(memory, site, Projected(fresh(config.heads, head=head), fresh(shared, head=head), own))
            memory = residual.write(memory, site, fresh(config.width), Trace(inputs, fresh(config.body.activation(site)), kept))
        residual.close(memory, torch.clone)
    return products.count
