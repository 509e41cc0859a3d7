"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from depthroute.train.config import TrainConfig


def learning_rate(step: int, settings: TrainConfig) -> float:
    """The learning rate of `step`, counted from 0: a linear warm-up, the peak, and a decay over the last D steps.

    With W steps of warm-up, step s < W has (s + 1) / W of the peak: the first step already learns, and step W - 1 is at the peak. The
    decay begins with step S = steps - D, and p = (s + 1 - S) / D of it is behind step s; with F = `final_fraction` the share of the peak is

        cosine:  F + (1 - F) (1 + cos(pi p)) / 2, from S = W on. The schedule of the Role-Decoupled paper (2 % warm-up, F = 10 %), which
                 does not say whether its warm-up starts at 0 or at 1/W.
        wsd:     F + (1 - F) (1 - p). Warm-up, stable, decay is the form of Hu et al. (2024, MiniCPM), whose decay is exponential. This
                 one is the linear cooldown of Haegele et al. (2024), who find 1 - sqrt(p) slightly better; the line has nothing to choose.

    Both reach F with the last step. Nothing before step S of "wsd" depends on `steps`, if the warm-up is given in steps.
    """
    warmup, decay = settings.steps_of_warmup, settings.steps_of_decay
    start = settings.steps - decay
    if step < warmup:
        share = (step + 1) / warmup
    elif step < start:
        share = 1.0
    else:
        progress = (step + 1 - start) / decay
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0 - progress
        share = settings.final_fraction + (1.0 - settings.final_fraction) * left
    return settings.learning_rate * share
