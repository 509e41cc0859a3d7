"""Validation loss over fixed windows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from depthroute.common.errors import FailureError
from depthroute.data import evaluation_windows
from depthroute.model import Decoder
from depthroute.train.config import Device, Precision
from depthroute.train.devices import autocast


def evaluate(
    model: Decoder,
    tokens: np.ndarray,
    *,
    context: int,
    limit_tokens: int | None,
    microbatch: int,
    device: Device,
    precision: Precision,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Mean negative log-likelihood (nats per token) of the fixed windows of `tokens`, of which every arm sees the same ones.

    The forward pass has the precision of the training; the loss of a token is float32 and their sum float64, so its value does not
    depend on how the windows are batched beyond the rounding of the forward pass. `microbatch` bounds the memory. Returns None when
    `stop` asked for an end before the last window.

    Raises:
        RequestError: the tokens do not fill one window.
        FailureError: the loss is not finite.
    """
    started = time.perf_counter()
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for windows in evaluation_windows(tokens, context, limit_tokens, sequences=microbatch):
                if stop():
                    return None
                batch = torch.from_numpy(windows).to(device)
                with autocast(device, precision):
                    losses = model.token_nll(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
                total += losses.sum(dtype=torch.float64).item()
                count += losses.numel()
    finally:
        model.train(was_training)
    nll = total / count
    if not math.isfinite(nll):
        raise FailureError(
            f"the validation loss is {nll}: the weights of this model give no probabilities any more. Train again with a lower "
            "train.learning_rate, in a new folder."
        )
    return {
        "nll": nll,
        "perplexity": math.exp(min(nll, 700.0)),  # math.exp overflows above 709, and infinity is not JSON
        "evaluated_tokens": count,
        "seconds": time.perf_counter() - started,
    }
