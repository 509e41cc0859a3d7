"""Reads that are made again and again of tensors that stay where they are, as in decoding: what a call costs is paid once.

Shapes: S sources, M queries, D width, R key rank, ... any leading dimensions (batch, tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops import native
from depthroute.ops.arguments import KeyNorm, Weighting, check
from depthroute.ops.attention import operands_of, resolved_key_norm
from depthroute.ops.form import DepthRead, Form, empty_results
from depthroute.ops.registry import serving


class PreparedRead:
    """M reads of the same sources. A call fills `reads`, always the same tensors, from what the sources and the prior hold by then.

    `step`: the same, for a program.
    """

    def __init__(
        self, sources: Sequence[Tensor], queries: Tensor, *, heads: int = 1, key_norm: KeyNorm = "slice", bias: Tensor | None = None,
        weighting: Weighting = "softmax", output_gain: Tensor | None = None, prior: Sequence[DepthRead] = (), eps: float = 1e-6,
        output_eps: float = 1e-6, into: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """The arguments of `depth_attention`, with keys that are slices of contiguous sources of one dtype and queries [M, R] with their
        gain folded in. `into`: M tensors [..., D] for the outputs; None makes them.

        Raises:
            RequestError: an argument that does not fit.
        """
        statistics = weighting == "softmax"
        dtype = check(sources, queries, None, heads, key_norm, None, bias, weighting, output_gain, prior, eps, output_eps, statistics)
        with torch.no_grad():
            operands = operands_of(sources, queries, None, None, bias, output_gain, prior, dtype, weighting)
            form = Form(heads, resolved_key_norm(key_norm, queries, sources[0]), weighting, eps, output_eps)
            made, saved = empty_results(operands, form)
            outputs = made if into is None else into
            scalars = [part.unsqueeze(-1) if heads == 1 else part for part in operands.prior[len(prior) :]]
            operands = operands._replace(prior=[*operands.prior[: len(prior)], *scalars])
            self.step = native.step(operands, form, outputs, saved)
        found = [[part.squeeze(-1) if heads == 1 else part for part in parts] for parts in (saved.max, saved.sum)]
        self.reads = tuple(
            DepthRead(output, None, found[0][m], found[1][m]) if statistics else DepthRead(output) for m, output in enumerate(outputs)
        )

    def __call__(self) -> None:
        self.step()


def can_prepare(sources: Tensor) -> bool:
    """Whether reads of sources like these can be prepared: by the compiled kernel of the CPU."""
    return sources.device.type == "cpu" and serving("auto", sources.device, sources.dtype) == "native"
