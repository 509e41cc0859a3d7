"""Every backend agrees with the literal loop of `literal`: outputs, weights, statistics and every gradient, in every form and dtype.

Truth is computed from the same rounded inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal import BACKENDS, Case, assert_close, cases, truth
from torch import Tensor
from torch.nn import functional as F

from depthroute.ops import DepthRead, depth_attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])


def grade(case: Case, backend: str, dtype: torch.dtype) -> None:
    expected = truth(case)
    found = case.read(backend)
    size = case.score_size() * case.value_size() * expected.amplified
    for output, wanted in zip(found, expected.outputs, strict=True):
        assert isinstance(output, Tensor) and output.dtype == dtype
        assert_close(output, wanted, dtype, size, "output")
    grade_gradients(found, case, expected.gradients, dtype, case.gradient_size() * expected.amplified)
    softmax = case.weighting == "softmax"
    with torch.no_grad():
        reads = case.read(backend, return_weights=True, return_statistics=softmax)
    for m, read in enumerate(reads):
        assert isinstance(read, DepthRead) and read.weights is not None
        assert read.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        weights = expected.weights[m, 0] if case.heads == 1 else expected.weights[m]
        assert_close(read.weights, weights, dtype, case.score_size(), "weights")
        if softmax:
            lse = expected.lse[m, 0] if case.heads == 1 else expected.lse[m].movedim(0, -1)
            assert read.lse.dtype == read.weights.dtype
            assert_close(read.lse, lse, dtype, case.score_size(), "log-sum-exp")


def grade_gradients(
    found: list[Tensor] | list[DepthRead], case: Case, expected: dict[str, Tensor], dtype: torch.dtype, size: float, more: Any = 0.0
) -> None:
    """Of the outputs with the case's upstream gradients, and of a loss `more`."""
    outputs = [one if isinstance(one, Tensor) else one.output for one in found]
    loss = torch.stack([(output * up).double().sum() for output, up in zip(outputs, case.upstream, strict=True)]).sum() + more
    wanted = case.named()
    for (name, tensor), got in zip(wanted.items(), torch.autograd.grad(loss, list(wanted.values())), strict=True):
        assert got.dtype == tensor.dtype
        assert_close(got, expected[name], dtype, size, f"gradient of {name}")


@DTYPES
@BACKENDS
@given(data=st.data())
def test_outputs_weights_statistics_and_every_gradient(backend: str, dtype: torch.dtype, data: st.DataObject) -> None:
    grade(data.draw(cases(dtype)), backend, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@BACKENDS
@given(data=st.data())
def test_weights_and_statistics_carry_gradients(backend: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    generator, softmax = torch.Generator().manual_seed(0), case.weighting == "softmax"
    lead, count, number = case.sources[0].shape[:-1], len(case.upstream), len(case.sources)
    of_weights = torch.randn(count, case.heads, number, *lead, dtype=torch.float64, generator=generator)
    of_lse = torch.randn(count, case.heads, *lead, dtype=torch.float64, generator=generator) if softmax else None
    expected = truth(case, of_weights, of_lse)
    reads = case.read(backend, return_weights=True, return_statistics=softmax)
    more = torch.zeros((), dtype=torch.float64)
    for m, read in enumerate(reads):
        assert isinstance(read, DepthRead) and read.weights is not None
        more = more + (read.weights * of_weights[m].view(read.weights.shape)).sum()
        if of_lse is not None:
            more = more + (read.lse.view(*lead, case.heads) * of_lse[m].movedim(0, -1)).sum()
    grade_gradients(reads, case, expected.gradients, dtype, 10 * case.gradient_size() * expected.amplified, more)


@BACKENDS
@given(seed=st.integers(0, 2**31), number=st.integers(1, 5), width=st.integers(1, 40), data=st.data())
def test_the_low_rank_papers_pseudo_code(backend: str, seed: int, number: int, width: int, data: st.DataObject) -> None:
    """`route` of Appendix H, as it is printed: parameter-free key norm, and torch's own default epsilon."""
    rank = data.draw(st.integers(1, width))
    torch.manual_seed(seed)
    sources = [torch.randn(2, 3, width, dtype=torch.float64) for _ in range(number)]
    q = torch.randn(rank, dtype=torch.float64)
    V = torch.stack(sources)
    K = F.rms_norm(V[..., -rank:], (rank,))
    weights = (K * q).sum(-1).softmax(dim=0)
    expected = (weights[..., None] * V).sum(dim=0)
    found = depth_attention(sources, q, eps=torch.finfo(torch.float64).eps, backend=backend)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
