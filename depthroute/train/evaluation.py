"""Validation loss over fixed windows: of all targets, by document, and of the targets behind a marker."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from depthroute.common.errors import FailureError
from depthroute.common.files import write_bytes
from depthroute.data import Marker, evaluation_windows
from depthroute.model import ModelConfig
from depthroute.train.config import Device, Precision
from depthroute.train.devices import autocast

DOCUMENTS = "documents.npz"


@dataclass(frozen=True, kw_only=True)
class DocumentLosses:
    """The loss of an evaluation by document, in document order; documents without an evaluated target are left out.

    A target belongs to the document that holds it, an EOS to the one that it ends. `sums` float64 [documents] are nats summed over the
    evaluated targets of a document, `counts` int64 [documents] how many those are.
    """

    sums: np.ndarray
    counts: np.ndarray

    def write(self, run: Path) -> None:
        """Write `documents.npz` into a run folder. The same losses give the same bytes."""
        data = io.BytesIO()
        np.savez(data, sums=self.sums, counts=self.counts)
        write_bytes(run / DOCUMENTS, data.getvalue())


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation measured.

    Attributes:
        splits: The fields of a line of evaluations.jsonl by the line's `split`: "validation" with `nll` (nats per token), `perplexity`,
            `evaluated_tokens` and `seconds` (of the whole evaluation), and then every marker with an evaluated target, which has
            `accuracy`, the share of its targets that the model finds likeliest, as well.
        documents: The loss by document; None where no boundaries were given.
    """

    splits: dict[str, dict[str, Any]]
    documents: DocumentLosses | None


class Measured(Protocol):
    """A decoder, or one on several processes."""

    config: ModelConfig

    @property
    def training(self) -> bool: ...
    def train(self, mode: bool = True) -> Any: ...
    def token_nll(self, tokens: Tensor, targets: Tensor) -> Tensor: ...
    def token_nll_and_hits(self, tokens: Tensor, targets: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]: ...


def evaluate(
    model: Measured,
    tokens: np.ndarray,
    *,
    context: int,
    microbatch: int,
    device: Device,
    precision: Precision,
    boundaries: np.ndarray | None = None,
    markers: Sequence[Marker] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Mean negative log-likelihood (nats per token) of the fixed windows of `tokens`, of which every arm sees the same ones.

    The forward pass has the precision of the training; the loss of a token is float32 and their sum float64, so its value does not
    depend on how the windows are batched beyond the rounding of the forward pass. `microbatch` bounds the memory. Returns None when
    `stop` asked for an end before the last window.

    Args:
        tokens: [targets + 1], those of a `HeldOut`: the first is an input alone.
        boundaries: int64 [documents + 1], those of the same `HeldOut`; with them the loss is also summed by document.
        markers: slices of the targets to be reported by themselves, with accuracy (`Manifest.markers`).

    Raises:
        RequestError: there is no target.
        FailureError: the loss is not finite.
    """
    started = time.perf_counter()
    total, count = 0.0, 0
    documents = None if boundaries is None else _Documents(boundaries)
    slices = _Slices(markers, model.config.vocabulary) if markers else None
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for windows in evaluation_windows(tokens, context, sequences=microbatch):
                if stop():
                    return None
                batch = torch.from_numpy(windows).to(device)
                inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
                with autocast(device, precision):
                    if slices is None:
                        losses = model.token_nll(inputs, targets)
                    else:
                        members = slices.of(windows)
                        losses, right = model.token_nll_and_hits(inputs, targets, torch.from_numpy(members.any(0)).to(device))
                        slices.add(members, _exact(losses), right.cpu().numpy())
                total += losses.sum(dtype=torch.float64).item()
                count += losses.numel()
                if documents is not None:
                    documents.add(_exact(losses).ravel())
    finally:
        model.train(was_training)
    nll = total / count
    if not math.isfinite(nll):
        raise FailureError(
            f"the validation loss is {nll}: the weights of this model give no probabilities any more. Train again with a lower "
            "train.learning_rate, in a new folder."
        )
    seconds = time.perf_counter() - started
    splits = {"validation": _line(nll, count, seconds)}
    if slices is not None:
        splits |= {name: {**_line(mean, size, seconds), "accuracy": accuracy} for name, mean, size, accuracy in slices.found()}
    return Evaluation(splits=splits, documents=None if documents is None else documents.found())


def _line(nll: float, count: int, seconds: float) -> dict[str, Any]:
    # math.exp overflows above 709, and infinity is not JSON
    return {"nll": nll, "perplexity": math.exp(min(nll, 700.0)), "evaluated_tokens": count, "seconds": seconds}


def _exact(losses: Tensor) -> np.ndarray:
    """In float64, so that sums of many keep their digits."""
    return losses.cpu().numpy().astype(np.float64)


class _Documents:
    """Sums the losses of targets that come in their order: the windows follow each other without a gap, from the second token on."""

    def __init__(self, boundaries: np.ndarray) -> None:
        self._boundaries = np.asarray(boundaries)
        self._sums = np.zeros(len(boundaries) - 1)
        self._counts = np.zeros(len(boundaries) - 1, dtype=np.int64)
        self._next = 1  # the position among the tokens of the next target; the first token is never one

    def add(self, losses: np.ndarray) -> None:
        """The losses [targets] of the next targets."""
        start, end = self._next, self._next + len(losses)
        first = int(np.searchsorted(self._boundaries, start, side="right")) - 1
        last = int(np.searchsorted(self._boundaries, end, side="left"))
        edges = np.clip(self._boundaries[first : last + 1], start, end) - start
        self._sums[first:last] += np.add.reduceat(losses, edges[:-1])
        self._counts[first:last] += np.diff(edges)
        self._next = end

    def found(self) -> DocumentLosses:
        evaluated = self._counts > 0
        return DocumentLosses(sums=self._sums[evaluated], counts=self._counts[evaluated])


class _Slices:
    """Sums loss and hits of the targets behind each marker."""

    def __init__(self, markers: Sequence[Marker], vocabulary: int) -> None:
        self._names = [marker.name for marker in markers]
        self._distances = [marker.distance for marker in markers]
        self._tables = np.zeros((len(markers), vocabulary), dtype=bool)
        for table, marker in zip(self._tables, markers, strict=True):
            table[list(marker.ids)] = True
        self._sums, self._hits = np.zeros(len(markers)), np.zeros(len(markers), dtype=np.int64)
        self._counts = np.zeros(len(markers), dtype=np.int64)

    def of(self, windows: np.ndarray) -> np.ndarray:
        """bool [markers, B, T]: which targets of windows [B, T + 1] lie behind each marker."""
        found = np.zeros((len(self._tables), len(windows), windows.shape[1] - 1), dtype=bool)
        for slice_, table, distance in zip(found, self._tables, self._distances, strict=True):
            slice_[:, distance - 1 :] = table[windows[:, : max(0, windows.shape[1] - distance)]]
        return found

    def add(self, members: np.ndarray, losses: np.ndarray, right: np.ndarray) -> None:
        """What `of` said, the losses [B, T], and of the targets in any slice, in order, whether they were the likeliest tokens."""
        anywhere = members.any(0)
        members, losses = members[:, anywhere], losses[anywhere]
        for number, mine in enumerate(members):
            self._sums[number] += losses[mine].sum()
            self._hits[number] += right[mine].sum()
            self._counts[number] += mine.sum()

    def found(self) -> list[tuple[str, float, int, float]]:
        """Name, mean loss, number of targets and accuracy of every marker that had a target."""
        rows = zip(self._names, self._sums.tolist(), self._counts.tolist(), self._hits.tolist(), strict=True)
        return [(name, total / count, count, hits / count) for name, total, count, hits in rows if count]
