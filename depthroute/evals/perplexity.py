"""Perplexity and bits per byte of held-out text, with intervals over documents."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from depthroute.data import Split, TextTokenizer
from depthroute.evals.subject import Subject
from depthroute.study.clusters import cluster_bootstrap
from depthroute.train import evaluate

DocumentItem = dict[str, Any]
PERPLEXITY = "perplexity"


def perplexity_items(subject: Subject, split: Split, *, limit_tokens: int | None, batch_tokens: int) -> list[DocumentItem]:
    """The loss of every evaluated document of a split, over the windows that training evaluates.

    An item has `task`, `doc_id` (the document's number in the held-out slice, in which those of several sources follow each other), `item`
    (a hash of its evaluated tokens), `nats` (summed over them), `tokens` (their number, the end of the document included) and `bytes`
    (UTF-8, of their text). The end of the slice may cut the last document.

    Args:
        limit_tokens: evaluate so many (`TokenDataset.held_out`). None: all there are.

    Raises:
        RequestError: the split has no token that follows another.
        FailureError: the loss is not finite.
    """
    dataset, context = subject.dataset, subject.config.model.context
    held_out, tokenizer = dataset.held_out(split, limit_tokens), dataset.tokenizer()
    tokens, edges = held_out.tokens, held_out.boundaries
    found = evaluate(
        subject.model, tokens, context=context, microbatch=max(1, batch_tokens // context), device=subject.device,
        precision=subject.precision, boundaries=edges,
    )  # fmt: skip
    assert found is not None and found.documents is not None
    losses = found.documents
    # The first token of a split is nobody's target, and a first document of one token is left out.
    first = int(np.searchsorted(edges, 1, side="right")) - 1
    starts = np.maximum(edges[first : first + len(losses.sums)], 1)
    items = []
    for number, (start, count, nats) in enumerate(zip(starts.tolist(), losses.counts.tolist(), losses.sums.tolist(), strict=True), first):
        ids = tokens[start : start + count]
        identity = hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()[:16]
        size = _text_bytes(tokenizer, ids.tolist())
        items.append({"task": PERPLEXITY, "doc_id": number, "item": identity, "nats": nats, "tokens": count, "bytes": size})
    return items


def perplexity_metrics(items: Sequence[DocumentItem]) -> dict[str, dict[str, Any]]:
    """`nll` (nats per token), `perplexity` and `bits_per_byte`, each with `value`, `error` and `interval` (95 %, cluster bootstrap over
    documents; `depthroute.study.clusters`); of fewer than two documents the last two are None."""
    nll = _mean([item["nats"] for item in items], [item["tokens"] for item in items])
    of_text = [item for item in items if item["bytes"]]  # all but a document of which only its end was evaluated
    bits = _mean([item["nats"] / math.log(2) for item in of_text], [item["bytes"] for item in of_text])
    mean, error, interval = nll["value"], nll["error"], nll["interval"]
    perplexity = {
        "value": None if mean is None else _exp(mean),
        "error": None if error is None else _exp(mean) * error,
        "interval": None if interval is None else tuple(map(_exp, interval)),
    }
    return {"nll": nll, "perplexity": perplexity, "bits_per_byte": bits}


def _mean(sums: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    if len(sums) < 2:
        return {"value": sums[0] / counts[0] if sums else None, "error": None, "interval": None}
    found = cluster_bootstrap(sums, counts)
    return {"value": found.mean, "error": found.error, "interval": found.interval}


def _text_bytes(tokenizer: TextTokenizer, ids: Sequence[int]) -> int:
    # A window may end, or begin, inside a character: what is left of it becomes U+FFFD and is not counted.
    return len(tokenizer.decode(ids).strip("\ufffd").encode("utf-8"))


def _exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))  # beyond 709 it overflows, and infinity is not JSON
