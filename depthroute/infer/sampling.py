"""Text from a trained model, a token at a time.

Every token runs the whole context again: right for a look at what a model has learned, slow for long texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from depthroute.common.errors import RequestError
from depthroute.model import Decoder


def sample_tokens(
    model: Decoder, prompt: Sequence[int], *, count: int, end: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Iterator[int]:
    """Yield up to `count` token ids that continue `prompt`, stopping before the id `end`.

    Args:
        prompt: at least one token id; the last `context` of prompt and continuation are what the model sees.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens only. None: among all.
        seed: of the draws; the same seed gives the same text.

    Raises:
        RequestError: an empty prompt, or a value that is not allowed.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token.")
    if not temperature >= 0:
        raise RequestError(f"temperature = {temperature} is not allowed; it takes 0 or more.")
    if top_k is not None and top_k < 1:
        raise RequestError(f"top_k = {top_k} is not allowed; it takes 1 or more.")
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    for _ in range(count):
        with torch.no_grad():
            logits = model.logits(torch.tensor([ids[-model.config.context :]], device=model.head_weight.device))[0, -1].cpu()
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            if top_k is not None and top_k < len(logits):
                logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
            scaled = (logits - logits.max()) / temperature  # the largest is zero: a tiny temperature cannot overflow
            chosen = int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))
        if chosen == end:
            return
        ids.append(chosen)
        yield chosen
