"""Next-token cross-entropy over a large vocabulary, a chunk of tokens at a time, in float32.

Shapes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from depthroute.common.errors import RequestError

# Logits a chunk, in elements: on a CPU what stays in the second-level cache (measured twice as fast as the whole batch at once), on a GPU
# what fills it. Never fewer than CHUNK_ROWS tokens, or the matrix products starve.
CHUNK_ELEMENTS = {"cpu": 1 << 19}
CHUNK_ELEMENTS_ELSEWHERE = 1 << 26
CHUNK_ROWS = 256


class LossSums(NamedTuple):
    """Sums over tokens, so that accumulated and distributed batches divide once by the global count.

    `objective` = `nll` + z_loss * `z` is what is differentiated; `nll` (nats) and `z` (squared log-normaliser) are for the record.
    """

    objective: Tensor
    nll: Tensor
    z: Tensor
    tokens: int


def cross_entropy_sums(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> LossSums:
    """Cross-entropy of the head `weight` [V, D] on `hidden` [N, D] against `targets` [N] (int64), without the logits [N, V].

    The gradient is computed with the loss, chunk by chunk, so the logits exist once and for one chunk only. Matrix products run in
    the autocast dtype if autocast is on; softmax, losses and the gradient's sum over chunks in float32 (float64 for float64 input).
    """
    objective, nll, z = _ChunkedCrossEntropy.apply(hidden, weight, targets, z_loss)  # type: ignore[no-untyped-call]  # torch's own
    return LossSums(objective, nll, z, targets.numel())


def token_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood of every token in nats, [N] in float32 (float64 for float64 input). Not differentiable."""
    with torch.no_grad():
        chunks = zip(*_chunks(hidden, targets, weight.shape[0]), strict=True)
        return torch.cat([F.cross_entropy(_logits(h, weight), t, reduction="none") for h, t in chunks])


def likeliest(hidden: Tensor, weight: Tensor) -> Tensor:
    """The token with the largest logit at each of `hidden` [N, D], int64 [N]; the lowest id of equal ones on a CPU."""
    with torch.no_grad():
        chunks, _ = _chunks(hidden, hidden[:, 0], weight.shape[0])
        return torch.cat([_logits(h, weight).argmax(-1) for h in chunks])


def _chunks(hidden: Tensor, targets: Tensor, vocabulary: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    size = max(CHUNK_ROWS, CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS_ELSEWHERE) // vocabulary)
    return torch.split(hidden, size), torch.split(targets, size)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return logits if logits.dtype == torch.float64 else logits.float()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        nll, z = hidden.new_zeros((), dtype=exact), hidden.new_zeros((), dtype=exact)
        wants = any(ctx.needs_input_grad[:2])
        dhidden = torch.empty_like(hidden) if wants else None
        dweight = torch.zeros_like(weight, dtype=exact) if wants else None
        start = 0
        for h, t in zip(*_chunks(hidden, targets, weight.shape[0]), strict=True):
            logits = _logits(h, weight)
            log_probabilities = logits.log_softmax(-1)
            lse = logits[:, 0] - log_probabilities[:, 0]
            chosen = t[:, None]
            nll -= log_probabilities.gather(-1, chosen).sum()
            z += lse.square().sum()
            if dhidden is not None and dweight is not None:
                # d objective / d logits = softmax * (1 + 2 z_loss lse) - one-hot
                probabilities = log_probabilities.exp_()
                if z_loss:
                    probabilities.mul_(1 + 2 * z_loss * lse[:, None])
                probabilities.scatter_add_(-1, chosen, probabilities.new_full(chosen.shape, -1.0))
                dhidden[start : start + len(t)] = probabilities @ weight
                dweight += probabilities.T @ h
            start += len(t)
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll, z)
        return nll + z_loss * z, nll, z

    @staticmethod
    def backward(ctx: Any, objective: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: the gradient was computed with the loss, and has no graph of its own
            raise RequestError("the chunked cross-entropy cannot be differentiated twice; use the logits.")
        dhidden, dweight = ctx.saved_tensors
        return objective.to(dhidden.dtype) * dhidden, (objective * dweight).to(ctx.weight_dtype), None, None
