"""Which token comes next: filters of the logits, and draws that a seed repeats.

Shapes: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthroute.common.errors import FailureError, RequestError
from depthroute.train.initialise import parameter_generator

OUT = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    The filters work in the order of the fields, each on what the one before it has left, as in transformers: repetition penalty,
    temperature, top-k, top-p, min-p. At temperature 0 only the penalty has a say.

    Raises:
        RequestError: a value is not allowed.
    """

    repetition_penalty: float = 1.0
    """Logits of the tokens that occur in prompt or text so far are divided by it where they are positive and multiplied where they are
    negative (CTRL, Keskar et al., 2019, section 4.1). Below 1 it favours repetition."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens; tokens that are as likely as the k-th stay too. None: among all."""
    top_p: float | None = None
    """Draw from the nucleus: the smallest set of likeliest tokens whose mass reaches p, the token that crosses p included (Holtzman et al.,
    2020, section 3.1). None: from all."""
    min_p: float | None = None
    """Draw among the tokens that are at least min_p times as likely as the likeliest (Nguyen et al., 2024, section 3). None: among all."""
    seed: int = 0
    """Of the draws. The uniform numbers of row i of a request come from (seed, i) alone, one a token: see `Draws`."""

    def __post_init__(self) -> None:
        for name, allowed, takes in (
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0; 1 changes nothing"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k is None or (type(self.top_k) is int and self.top_k >= 1), "a whole number, 1 or more, or None"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "a number above 0 and up to 1, or None"),
            ("min_p", self.min_p is None or 0 < self.min_p <= 1, "a number above 0 and up to 1, or None"),
        ):
            if not allowed:
                raise RequestError(f"{name} = {getattr(self, name)} is not allowed; it takes {takes}.")

    def scores(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Filtered logits [B, V] in float64, -inf where a token is left out; their softmax is what is drawn from.

        Args:
            logits: [B, V], float32 or float64.
            seen: bool [B, V], the tokens that occur in prompt or text so far; only the repetition penalty needs it.
        """
        scores = logits.double()
        if seen is not None:
            penalised = torch.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
            scores = torch.where(seen, penalised, scores)
        if self.temperature == 0:
            return scores
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature  # the largest is zero: a tiny temperature cannot overflow
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], OUT)
        if self.top_p is not None and self.top_p < 1:
            scores = _nucleus(scores, self.top_p)
        if self.min_p is not None:
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(self.min_p), OUT)
        return scores


class Draws:
    """Draws the next token of every row of a batch.

    Row i of a request has a generator of its own on the CPU, seeded with the first 64 bits of BLAKE2b of `seed:i`, and takes one float64
    uniform number u from it for every token. The token is the first, in the order of ids, at which the cumulative probability exceeds u. So
    what a row draws does not depend on the other rows, on how many there are, or on whether they have ended.

    Args:
        prompts: of all rows of the batch.
        rows: the number of each in the request, where the batch is a part of it. None: the batch is the request.
        vocabulary: V.
        device: where the logits are.
    """

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], *, vocabulary: int, device: torch.device,
        rows: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._sampling = sampling
        numbers = range(len(prompts)) if rows is None else rows
        self._generators = [parameter_generator(sampling.seed, str(number)) for number in numbers]
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self._seen[row, torch.tensor(prompt, device=device)] = True

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens, int64 [B], and their log-probabilities [B] in nats under the model itself, before all filters.

        Raises:
            FailureError: a logit is not a number.
        """
        if bool(logits.isnan().any()):
            raise FailureError("the model's logits are not numbers: its weights give no probabilities. Take an earlier checkpoint.")
        scores = self._sampling.scores(logits, self._seen)
        if self._sampling.temperature == 0:
            tokens = scores.argmax(-1)
        else:
            uniform = [torch.rand((), dtype=torch.float64, generator=generator) for generator in self._generators]
            tokens = _inverse(scores.softmax(-1), torch.stack(uniform).to(scores.device))
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)

    def keep(self, rows: Sequence[int]) -> None:
        """The batch becomes these rows of it."""
        self._generators = [self._generators[row] for row in rows]
        if self._seen is not None:
            self._seen = self._seen[torch.tensor(rows, device=self._seen.device)]


def _nucleus(scores: Tensor, mass: float) -> Tensor:
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    return scores.masked_fill(torch.empty_like(likelier, dtype=torch.bool).scatter_(-1, order, likelier >= mass), OUT)


def _inverse(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """int64 [B]: where the cumulative sum of [B, V] first exceeds uniform [B] times the total, which rounding leaves a little off 1."""
    cumulative = probabilities.cumsum(-1)
    # u is at most 1 - 2^-53, so the rounded product is below the total, and the token found has a probability above zero.
    return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
