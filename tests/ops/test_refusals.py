"""Every refusal names the argument that does not fit and what it must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.ops import DepthRead, depth_attention


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


def earlier(*output: int, statistics: tuple[int, ...] = (2,), **parts: Any) -> DepthRead:
    """An earlier read that fits two tokens of width 4."""
    fitting = DepthRead(zeros(*(output or (2, 4))), None, zeros(*statistics), torch.ones(statistics))
    return fitting._replace(**parts)


TWO, KEYS = zeros(2, 4), [zeros(2, 4), zeros(2, 4)]
SIGMOID: dict[str, Any] = {"weighting": "sigmoid"}

REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    ("no sources", "at least one source; the list is empty", {"sources": []}),
    ("no stacked sources", "at least one source; the list is empty", {"sources": zeros(0, 2, 4)}),
    ("one source for a list", r"stacked sources have shape \(4,\); they must be \[S, \.\.\., D\]", {"sources": zeros(4)}),
    ("source shape", r"source 1 has shape \(2, 5\), source 0 has \(2, 4\)", {"sources": [TWO, zeros(2, 5)]}),
    ("source rank", r"source 1 has shape \(2, 1, 4\), source 0 has \(2, 4\)", {"sources": [TWO, zeros(2, 1, 4)]}),
    ("source without a width", r"source 0 has shape \(\)", {"sources": [zeros()]}),
    ("source of width zero", r"source 0 has shape \(2, 0\).*D at least 1", {"sources": [zeros(2, 0)]}),
    ("source dtype", "source 0 has dtype torch.int64", {"sources": [zeros(2, 4, dtype=torch.int64)]}),
    ("complex source", "source 1 has dtype torch.complex64", {"sources": [TWO, zeros(2, 4, dtype=torch.complex64)]}),
    ("source device", "source 1 is on meta, source 0 on cpu", {"sources": [TWO, zeros(2, 4, device="meta")]}),
    ("query dimensions", r"the query has shape \(1, 1, 4\); it must be \[R\] or \[M, R\]", {"query": zeros(1, 1, 4)}),
    ("query without dimensions", r"the query has shape \(\); it must be \[R\] or \[M, R\]", {"query": zeros()}),
    ("no queries", r"the query has shape \(0, 4\)", {"query": zeros(0, 4)}),
    ("query dtype", "query has dtype torch.int64; it must be floating point", {"query": zeros(4, dtype=torch.int64)}),
    ("query device", "query is on meta, source 0 on cpu", {"query": zeros(4, device="meta")}),
    ("rank above the width", "the key rank 5 is not allowed; it must be 1 to the width, 4", {"query": zeros(5)}),
    ("rank zero", "the key rank 0 is not allowed", {"query": zeros(1, 0)}),
    ("rank zero with keys", "the key rank 0 is not allowed", {"query": zeros(1, 0), "keys": [zeros(2, 0)] * 2}),
    ("heads and the width", "heads = 3 is not allowed; it must divide the width, 4, and the key rank, 3", {"query": zeros(3), "heads": 3}),
    ("heads and the rank", "heads = 2 is not allowed; it must divide the width, 4, and the key rank, 3", {"query": zeros(3), "heads": 2}),
    ("no heads", "heads = 0 is not allowed", {"heads": 0}),
    ("negative heads", "heads = -2 is not allowed", {"heads": -2}),
    ("key count", "there are 1 keys for 2 sources", {"keys": [TWO]}),
    ("key count, stacked", "there are 3 keys for 2 sources", {"keys": zeros(3, 2, 4)}),
    ("one key for a list", r"stacked keys have shape \(4,\); they must be \[S, \.\.\., R\]", {"keys": zeros(4)}),
    ("key shape", r"key 1 has shape \(2, 3\); it must be \(2, 4\)", {"keys": [TWO, zeros(2, 3)]}),
    ("key dtype", "key 0 has dtype torch.bool", {"keys": [zeros(2, 4, dtype=torch.bool), TWO]}),
    ("key device", "key 1 is on meta", {"keys": [TWO, zeros(2, 4, device="meta")]}),
    ("full norm of projected keys", "key_norm = 'full' is for sliced keys; .* 'slice'.* or 'none'", {"keys": KEYS, "key_norm": "full"}),
    ("key norm", "unknown key_norm 'ful'; perhaps you meant 'full'", {"key_norm": "ful"}),
    ("weighting", "unknown weighting 'sigmod'; perhaps you meant 'sigmoid'", {"weighting": "sigmod"}),
    ("statistics of a sigmoid", "return_statistics is for the softmax", SIGMOID | {"return_statistics": True}),
    ("gain shape", r"key_gain has shape \(3,\); it must be \[4\]", {"key_gain": zeros(3)}),
    ("gain shape of projected keys", r"key_gain has shape \(4,\); it must be \[3\]", {"query": zeros(3), "key_gain": zeros(4)}),
    ("gain dtype", "key_gain has dtype torch.int32", {"key_gain": zeros(4, dtype=torch.int32)}),
    ("gain device", "key_gain is on meta", {"key_gain": zeros(4, device="meta")}),
    ("output gain shape", r"output_gain has shape \(3,\); it must be \[4\]", {"query": zeros(3), "output_gain": zeros(3)}),
    ("output gain dtype", "output_gain has dtype torch.int64", {"output_gain": zeros(4, dtype=torch.int64)}),
    ("output gain device", "output_gain is on meta", {"output_gain": zeros(4, device="meta")}),
    ("bias shape", r"bias has shape \(3,\); it must be \(2,\)", {"bias": zeros(3)}),
    ("bias of one query", r"bias has shape \(1, 2\); it must be \(2,\)\.", {"bias": zeros(1, 2)}),
    ("bias shape for many", r"bias has shape \(2, 3\); it must be \(2,\) or \(3, 2\)", {"query": zeros(3, 4), "bias": zeros(2, 3)}),
    ("bias dtype", "bias has dtype torch.bool", {"bias": zeros(2, dtype=torch.bool)}),
    ("bias device", "bias is on meta", {"bias": zeros(2, device="meta")}),
    ("one prior for two queries", "there are 1 prior reads for 2 queries", {"query": zeros(2, 4), "prior": earlier()}),
    ("two priors for one query", "there are 2 prior reads for 1 queries", {"prior": [earlier(), earlier()]}),
    ("prior output shape", r"prior output 0 has shape \(2, 5\), source 0 has \(2, 4\)", {"prior": earlier(2, 5)}),
    ("prior without statistics", "prior 0 has no max; make it with return_statistics=True", {"prior": DepthRead(TWO)}),
    ("prior without a sum", "prior 0 has no sum", {"prior": earlier(sum=None)}),
    ("prior statistics shape", r"prior max 0 has shape \(3,\); it must be \(2,\)", {"prior": earlier(statistics=(3,))}),
    ("prior of other heads", r"prior max 0 has shape \(2,\); it must be \(2, 2\)", {"prior": earlier(), "heads": 2}),
    ("prior sum shape", r"prior sum 0 has shape \(2, 1\); it must be \(2,\)", {"prior": earlier(sum=zeros(2, 1))}),
    ("prior dtype", "prior output 0 has dtype torch.int64", {"prior": earlier(output=zeros(2, 4, dtype=torch.int64))}),
    ("prior sum dtype", "prior sum 0 has dtype torch.int64", {"prior": earlier(sum=zeros(2, dtype=torch.int64))}),
    ("prior device", "prior max 0 is on meta", {"prior": earlier(max=zeros(2, device="meta"))}),
    ("prior output of a sigmoid", r"prior output 0 has shape \(3, 4\)", SIGMOID | {"prior": DepthRead(zeros(3, 4))}),
    ("eps", "eps = 0.0 is not allowed; it must be positive", {"eps": 0.0}),
    ("eps not a number", "eps = nan is not allowed", {"eps": float("nan")}),
    ("output eps", "output_eps = -1.0 is not allowed; it must be positive", {"output_eps": -1.0}),
    ("backend", "unknown backend 'nativ'; perhaps you meant 'native'", {"backend": "nativ"}),
]


@pytest.mark.parametrize(("match", "changes"), [refusal[1:] for refusal in REFUSALS], ids=[refusal[0] for refusal in REFUSALS])
def test_what_does_not_fit_is_named(match: str, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"sources": [zeros(2, 4), zeros(2, 4)], "query": zeros(4), **changes}
    with pytest.raises(RequestError, match=match):
        depth_attention(given.pop("sources"), given.pop("query"), **given)


def test_what_the_table_changes_fits_before() -> None:
    depth_attention([zeros(2, 4), zeros(2, 4)], zeros(4), prior=earlier())
    depth_attention([zeros(2, 4), zeros(2, 4)], zeros(4), prior=earlier(statistics=(2, 2)), heads=2)
    depth_attention([zeros(2, 4), zeros(2, 4)], zeros(4), prior=DepthRead(zeros(2, 4)), weighting="sigmoid")


def test_the_log_sum_exp_of_a_read_without_statistics() -> None:
    found = depth_attention([zeros(2, 4), zeros(2, 4)], zeros(4), return_weights=True)
    assert isinstance(found, DepthRead)
    with pytest.raises(RequestError, match="no statistics; make it with return_statistics=True"):
        _ = found.lse
