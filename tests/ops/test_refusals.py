"""Every refusal names the argument that does not fit and what it must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.ops import depth_attention


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    ("no sources", "at least one source; the list is empty", {"sources": []}),
    ("source shape", r"source 1 has shape \(2, 5\), source 0 has \(2, 4\)", {"sources": [zeros(2, 4), zeros(2, 5)]}),
    ("source without a width", r"source 0 has shape \(\)", {"sources": [zeros()]}),
    ("source dtype", "source 0 has dtype torch.int64", {"sources": [zeros(2, 4, dtype=torch.int64)]}),
    ("source device", "source 1 is on meta, source 0 on cpu", {"sources": [zeros(2, 4), zeros(2, 4, device="meta")]}),
    ("query dimensions", r"the query has shape \(1, 1, 4\); it must be \[R\] or \[M, R\]", {"query": zeros(1, 1, 4)}),
    ("no queries", r"the query has shape \(0, 4\)", {"query": zeros(0, 4)}),
    ("query dtype", "query has dtype torch.int64; it must be floating point", {"query": zeros(4, dtype=torch.int64)}),
    ("query device", "query is on meta, source 0 on cpu", {"query": zeros(4, device="meta")}),
    ("rank above the width", "the key rank 5 is not allowed; it must be 1 to the width, 4", {"query": zeros(5)}),
    ("rank zero", "the key rank 0 is not allowed", {"query": zeros(1, 0)}),
    ("rank zero with keys", "the key rank 0 is not allowed", {"query": zeros(1, 0), "keys": [zeros(2, 0)] * 2}),
    ("key count", "there are 1 keys for 2 sources", {"keys": [zeros(2, 4)]}),
    ("key shape", r"key 1 has shape \(2, 3\); it must be \(2, 4\)", {"keys": [zeros(2, 4), zeros(2, 3)]}),
    ("key dtype", "key 0 has dtype torch.bool", {"keys": [zeros(2, 4, dtype=torch.bool), zeros(2, 4)]}),
    ("key device", "key 1 is on meta", {"keys": [zeros(2, 4), zeros(2, 4, device="meta")]}),
    ("full norm of projected keys", "key_norm must be 'slice' with keys", {"keys": [zeros(2, 4)] * 2, "key_norm": "full"}),
    ("key norm", "unknown key_norm 'ful'; perhaps you meant 'full'", {"key_norm": "ful"}),
    ("gain shape", r"key_gain has shape \(3,\); it must be \[4\]", {"key_gain": zeros(3)}),
    ("bias shape", r"bias has shape \(3,\); it must be \(2,\)", {"bias": zeros(3)}),
    ("bias shape for many", r"bias has shape \(2, 3\); it must be \(2,\) or \(3, 2\)", {"query": zeros(3, 4), "bias": zeros(2, 3)}),
    ("bias device", "bias is on meta", {"bias": zeros(2, device="meta")}),
    ("eps", "eps = 0.0 is not allowed; it must be positive", {"eps": 0.0}),
    ("eps not a number", "eps = nan is not allowed", {"eps": float("nan")}),
    ("backend", "unknown backend 'nativ'; perhaps you meant 'native'", {"backend": "nativ"}),
]


@pytest.mark.parametrize(("match", "changes"), [refusal[1:] for refusal in REFUSALS], ids=[refusal[0] for refusal in REFUSALS])
def test_what_does_not_fit_is_named(match: str, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"sources": [zeros(2, 4), zeros(2, 4)], "query": zeros(4), **changes}
    with pytest.raises(RequestError, match=match):
        depth_attention(given.pop("sources"), given.pop("query"), **given)
