"""What users get back, and what every backend is handed and returns.

A backend is a module with `refusal`, `forward` and `backward`; it never sees autograd.

Shapes: S sources, M queries, H heads, D width, R key rank, ... any leading dimensions (batch, tokens). A head is a group of D/H adjacent
channels with R/H adjacent key coordinates. W weights: S, and one more for a prior (1 for the sigmoid).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from depthroute.common.errors import RequestError


class DepthRead(NamedTuple):
    """One read with what was asked for beside the output. With one head the axis H is absent."""

    output: Tensor  # [..., D]
    weights: Tensor | None = None  # [H, S, ...]
    max: Tensor | None = None  # [..., H], the largest score
    sum: Tensor | None = None  # [..., H], of exp(score - max)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the scores. Far from zero it has lost what `max` and `sum` still hold apart.

        Raises:
            RequestError: the read was made without its statistics.
        """
        if self.max is None or self.sum is None:
            raise RequestError("this read has no statistics; make it with return_statistics=True.")
        return self.max + self.sum.log()


class Form(NamedTuple):
    """All that is not a tensor about a read."""

    heads: int
    key_norm: str  # "slice", "full" or "none"
    weighting: str  # "softmax" or "sigmoid"
    eps: float
    output_eps: float


class Operands(NamedTuple):
    """The tensors of a read. Sources, keys and prior outputs share one dtype and device; the rest is in the statistics dtype.

    `prior` is an earlier read of other sources by the same queries: M outputs [..., D] and, for the softmax, M maxima and M sums [..., H].
    Of a single head the axis H is absent, as in all that users see; backends always get it.
    """

    sources: Sequence[Tensor]  # S x [..., D]
    keys: Sequence[Tensor]  # S x [..., R], or none: the last R coordinates of each source
    queries: Tensor  # [M, R], key gain folded in
    bias: Tensor | None  # [M, S]
    output_gain: Tensor | None  # [D]; None: the mixture comes out as it is
    prior: Sequence[Tensor]

    @property
    def reads(self) -> int:
        """M: a query makes one."""
        return self.queries.shape[0]


class Found(NamedTuple):
    """What a read computes. `max` and `sum` describe the softmax's denominator, sum x exp(max); a sigmoid has neither.

    Of a single head they have no axis H.
    """

    outputs: Sequence[Tensor]  # M x [..., D]
    max: Sequence[Tensor]  # M x [..., H]; carries no gradient, and need not: see `sum`
    sum: Sequence[Tensor]  # M x [..., H]; its gradient is right for all that depends on max + log(sum) alone
    weights: Tensor  # [..., M, H, S], or W with the prior's last


class Saved(NamedTuple):
    """The scalars that a backward needs. Absent ones are empty."""

    max: Sequence[Tensor]  # M x [..., H], or none for a sigmoid
    sum: Sequence[Tensor]
    weights: Tensor  # [..., M, H, W]
    scores: Tensor  # [..., M, H, S], without the bias
    rstd: Tensor  # [..., S]; empty without a key norm
    output_rstd: Tensor  # [..., M]; empty without an output norm


class Upstream(NamedTuple):
    """The gradients that arrive."""

    outputs: Sequence[Tensor]  # M x [..., D]
    sums: Sequence[Tensor]  # M x [..., H], or none
    weights: Tensor | None  # [..., M, H, W]


class Gradients(NamedTuple):
    """The gradients that leave, beside those of the sources. Absent ones are empty."""

    keys: Sequence[Tensor]  # S x [..., R], or none
    prior: Sequence[Tensor]  # M outputs [..., D], and M sums [..., H] for the softmax
    queries: Tensor  # [M, R]
    bias: Tensor  # [M, S]
    output_gain: Tensor  # [D]


class Backend(Protocol):
    """What computes reads. `forward` and `backward` fill tensors that are handed in, so that shapes have one home."""

    def refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot serve sources of this dtype on this device, or None."""

    def forward(self, operands: Operands, form: Form, outputs: Sequence[Tensor], saved: Saved) -> None:
        """Fill the M outputs and the scalars."""

    def backward(
        self, operands: Operands, form: Form, saved: Saved, upstream: Upstream, into: Sequence[Tensor], add: Sequence[bool],
        found: Gradients,
    ) -> None:  # fmt: skip
        """Fill `found`, and write or add (`add`) the gradient of each source to `into`: in the rows' or in the statistics dtype.

        Where a tensor appears more than once in `into`, its gradients are added in order.
        """


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and normalisation statistics: float64 for float64 sources, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_results(operands: Operands, form: Form) -> tuple[list[Tensor], Saved]:
    """Outputs and scalars of a forward, to be filled."""
    sources, count = operands.sources, operands.reads
    first, number = sources[0], len(sources)
    lead, dtype = first.shape[:-1], operands.queries.dtype
    softmax = form.weighting == "softmax"

    def scalars(*shape: int, present: bool = True) -> Tensor:
        return operands.queries.new_empty((*lead, *shape) if present else (0,), dtype=dtype)

    def per_query() -> list[Tensor]:
        return [scalars(form.heads) for _ in range(count)] if softmax else []

    saved = Saved(
        max=per_query(),
        sum=per_query(),
        weights=scalars(count, form.heads, number + bool(operands.prior)),
        scores=scalars(count, form.heads, number),
        rstd=scalars(number, present=form.key_norm != "none"),
        output_rstd=scalars(count, present=operands.output_gain is not None),
    )
    return [first.new_empty(first.shape) for _ in range(count)], saved


def empty_gradients(operands: Operands, form: Form) -> Gradients:
    """Gradients of a backward, to be filled."""
    queries, gain, count = operands.queries, operands.output_gain, operands.reads
    of_prior = [*operands.prior[:count], *operands.prior[2 * count :]]
    return Gradients(
        keys=[key.new_empty(key.shape) for key in operands.keys],
        prior=[part.new_empty(part.shape) for part in of_prior],
        queries=queries.new_empty(queries.shape),
        bias=queries.new_empty(count, len(operands.sources)),
        output_gain=queries.new_empty(0 if gain is None else gain.shape[0]),
    )
