"""The chunked cross-entropy against torch's own on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.model import loss as losses

TOKENS, WIDTH, VOCABULARY = 23, 6, 11


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


@pytest.fixture(params=[1, 3, 7, 23, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(losses, "CHUNK_ROWS", request.param)
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 0)
    return request.param


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_sums_and_gradients_for_any_chunk(chunk: int, z_loss: float) -> None:
    hidden, weight, targets = problem()
    logits = hidden @ weight.T
    nll = F.cross_entropy(logits, targets, reduction="sum")
    z = logits.logsumexp(-1).square().sum()
    found = losses.cross_entropy_sums(hidden, weight, targets, z_loss)
    torch.testing.assert_close(found.nll, nll.detach())
    torch.testing.assert_close(found.z, z.detach())
    torch.testing.assert_close(found.objective.detach(), (nll + z_loss * z).detach())
    assert found.tokens == TOKENS and not found.nll.requires_grad and not found.z.requires_grad
    expected = torch.autograd.grad((nll + z_loss * z) / 5, (hidden, weight))
    for got, wanted in zip(torch.autograd.grad(found.objective / 5, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_token_nll(chunk: int) -> None:
    hidden, weight, targets = problem()
    found = losses.token_nll(hidden, weight, targets)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.T, targets, reduction="none").detach())
    assert not found.requires_grad


def test_chunks_are_of_the_size_that_the_constants_say(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, _, targets = problem()
    monkeypatch.setattr(losses, "CHUNK_ROWS", 2)
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 4 * VOCABULARY)
    assert [len(part) for part in losses._chunks(hidden, targets, VOCABULARY)[0]] == [4, 4, 4, 4, 4, 3]
    assert [len(part) for part in losses._chunks(hidden, targets, 10**6)[0]] == [2] * 11 + [1]


def test_z_loss_by_finite_differences() -> None:
    hidden, weight, targets = problem()
    assert torch.autograd.gradcheck(lambda h, w: losses.cross_entropy_sums(h, w, targets, 0.3).objective, (hidden, weight))


def test_a_second_derivative_is_refused_not_wrong() -> None:
    hidden, weight, targets = problem()
    objective = losses.cross_entropy_sums(hidden, weight, targets, 0.0).objective
    with pytest.raises(RequestError, match="cannot be differentiated twice"):
        torch.autograd.grad(objective, hidden, create_graph=True)


def test_bfloat16_products_but_float32_sums_under_autocast() -> None:
    hidden, weight, targets = problem(torch.float32)
    exact = losses.cross_entropy_sums(hidden, weight, targets, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses.cross_entropy_sums(hidden, weight, targets, 0.1)
    assert found.objective.dtype == found.nll.dtype == torch.float32
    assert not torch.equal(found.nll, exact.nll)
    torch.testing.assert_close(found.nll, exact.nll, rtol=1e-2, atol=0)
    wanted = torch.autograd.grad(exact.objective, (hidden, weight))
    for got, gradient in zip(torch.autograd.grad(found.objective, (hidden, weight)), wanted, strict=True):
        assert got.dtype == torch.float32 and ((got - gradient).norm() / gradient.norm()).item() < 2e-2


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_head_or_input_gets_no_gradient(frozen: int) -> None:
    tensors = list(problem()[:2])
    tensors[frozen].requires_grad_(False)
    losses.cross_entropy_sums(*tensors, problem()[2], 0.1).objective.backward()
    assert tensors[frozen].grad is None and tensors[1 - frozen].grad is not None
    losses.cross_entropy_sums(tensors[0].detach(), tensors[1].detach(), problem()[2], 0.1)  # nothing to differentiate
