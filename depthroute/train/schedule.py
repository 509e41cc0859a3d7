"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate_multiplier(step: int, *, steps: int, warmup_fraction: float, final_fraction: float) -> float:
    """What the peak learning rate is multiplied by at `step`, counted from 0: linear warm-up, then half a cosine.

    With W = round(warmup_fraction * steps), step s < W has (s + 1) / W: the first step already learns, and step W - 1 is at the peak.
    From there a cosine falls to `final_fraction`, which the last step reaches exactly. This is the schedule of the Role-Decoupled
    paper (2 % warm-up, 10 % at the end); the paper does not say whether its warm-up starts at 0 or at 1/W.
    """
    warmup = round(warmup_fraction * steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step + 1 - warmup) / (steps - warmup)
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))
