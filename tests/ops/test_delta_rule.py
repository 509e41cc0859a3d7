"""The delta rule in chunks against its definition token by token, and the definition against fla's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from depthroute.ops import delta_chunks, delta_rule, delta_rule_by_token

BATCH, HEADS, KEYS, VALUES = 2, 2, 6, 5
NAMES = ("query", "key", "value", "log_decay", "strength", "state")


def noise(tokens: int, *, strong: bool = False, seed: int = 0) -> list[Tensor]:
    """In the order of NAMES, float64 with gradients; `strong`: decays that leave nothing between ones that leave nearly all."""
    generator = torch.Generator().manual_seed(seed)

    def normal(first: int, *shape: int) -> Tensor:  # heads beside each other, as projections leave them
        return torch.randn(BATCH, first, HEADS, *shape, generator=generator, dtype=torch.float64).transpose(1, 2)

    key = F.normalize(normal(tokens, KEYS), dim=-1)
    log_decay = -F.softplus(normal(tokens, KEYS) - 2)
    if strong:
        log_decay = torch.full_like(log_decay, -0.01)
        log_decay[:, :, tokens // 2] = -100
        log_decay[:, :, ::7, ::2] = -1e4
    made = [normal(tokens, KEYS), key, normal(tokens, VALUES), log_decay, normal(tokens).sigmoid(), normal(KEYS, VALUES)]
    return [one.requires_grad_() for one in made]


def starts(tokens: int, where: Sequence[int] | None) -> Tensor | None:
    """Documents begin there in the first sequence; the second one is whole."""
    if where is None:
        return None
    begins = torch.zeros(BATCH, tokens, dtype=torch.bool)
    begins[0, [token for token in where if token < tokens]] = True
    return begins


def everything(
    rule: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], begins: Tensor | None, stateful: bool = True
) -> list[Tensor]:
    """Output, last state, and the gradients of a random function of both."""
    *parts, state = inputs
    found = rule(*parts, state=state if stateful else None, begins=begins)
    generator = torch.Generator().manual_seed(9)
    into = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in found]
    return [*found, *torch.autograd.grad(found, inputs if stateful else parts, into)]


def same(found: Sequence[Tensor], expected: Sequence[Tensor], error: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for name, one, other in zip(("output", "last state", *NAMES), found, expected, strict=False):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one - other).abs().max() <= error * other.abs().max(), name


@pytest.mark.parametrize("where", [None, [], [0], [0, 1, 2], [63], [64], [5, 6, 7, 62, 63, 65, 128, 150]], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 5, 64, 65, 200])
def test_chunks_are_the_definition(tokens: int, where: Sequence[int] | None) -> None:
    begins = starts(tokens, where)
    for strong in (False, True):
        inputs = noise(tokens, strong=strong)
        for stateful in (True, False):
            expected = everything(delta_rule_by_token, inputs, begins, stateful)
            same(everything(delta_rule, inputs, begins, stateful), expected)
            if where == []:  # nobody begins
                same(everything(delta_rule, inputs, None, stateful), expected)


def test_pairs_of_a_block_at_once_are_those_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With decays as strong as that serves, in float32: as near to float64 as the definition is."""
    inputs = noise(64)
    with torch.no_grad():
        inputs[3].copy_(torch.where(torch.rand(inputs[3].shape, generator=torch.Generator().manual_seed(4)) < 0.5, -7.0, -0.01))
    expected = everything(delta_rule_by_token, inputs, None)
    weakest = inputs[3].detach().view(BATCH, HEADS, 4, 16, KEYS).sum(3).min()
    for limit in (weakest - 1, weakest + 1):  # at once; by halves
        monkeypatch.setattr(delta_chunks, "WEAKEST", limit)
        same(everything(delta_rule, inputs, None), expected)
        assert (delta_chunks._whole_blocks(inputs[3].detach().flatten(0, 1)[None]) == delta_chunks.BLOCK) == (limit < weakest)
        narrow = [one.detach().float().requires_grad_() for one in inputs]
        for found, exact in zip(everything32(narrow), expected, strict=True):
            assert (found - exact).abs().max() <= 3e-6 * exact.abs().max()


def everything32(inputs: Sequence[Tensor]) -> list[Tensor]:
    """`everything` of float32 inputs, with what goes into its gradients rounded."""
    found = delta_rule(*inputs[:5], state=inputs[5])
    generator = torch.Generator().manual_seed(9)
    into = [torch.randn(one.shape, generator=generator, dtype=torch.float64).float() for one in found]
    return [*found, *torch.autograd.grad(found, inputs, into)]


def test_portions_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head at a time, and a chunk at a time."""
    inputs, begins = noise(200), starts(200, [3, 64, 100])
    whole = everything(delta_rule, inputs, begins)
    for portion in (BATCH * KEYS * 200, BATCH * KEYS * 130, 1):
        monkeypatch.setattr(delta_chunks, "PORTION", portion)
        same(everything(delta_rule, inputs, begins), whole)


@pytest.mark.parametrize("first", [1, 64, 100, 199])
def test_two_passes_are_one(first: int) -> None:
    *parts, state = noise(200)
    begins = starts(200, [20, 120])

    def two(*parts: Tensor, state: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        one, between = delta_rule(*(part[:, :, :first] for part in parts), state=state, begins=begins[:, :first])
        other, last = delta_rule(*(part[:, :, first:] for part in parts), state=between, begins=begins[:, first:])
        return torch.cat((one, other), 2), last

    same(everything(two, [*parts, state], begins), everything(delta_rule, [*parts, state], begins))


@pytest.mark.parametrize("rule", [delta_rule, delta_rule_by_token])
def test_nothing_passes_between_documents(rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Bit for bit: three documents, of which the middle one, within the chunks of the others, is exchanged."""
    middle = slice(40, 90)
    begins = torch.zeros(BATCH, 150, dtype=torch.bool)
    begins[:, [40, 90]] = True
    inputs, others = noise(150), noise(150, seed=1)
    exchanged = [one.detach().clone() for one in inputs]
    for one, other in zip(exchanged[:5], others, strict=False):
        one[:, :, middle] = other.detach()[:, :, middle]
    exchanged = [one.requires_grad_() for one in exchanged]
    (found, last, *gradients), (expected, expected_last, *expected_gradients) = (everything(rule, x, begins) for x in (inputs, exchanged))
    assert torch.equal(last, expected_last) and torch.equal(gradients[-1], expected_gradients[-1])
    for one, other in zip((found, *gradients[:5]), (expected, *expected_gradients[:5]), strict=True):
        assert torch.equal(one[:, :, :40], other[:, :, :40]) and torch.equal(one[:, :, 90:], other[:, :, 90:])
        assert not torch.equal(one[:, :, middle], other[:, :, middle])
    *parts, state = inputs
    read, _ = rule(*parts, state=state, begins=begins)
    for part, gradient in zip(inputs, torch.autograd.grad(read[:, :, middle].sum(), inputs), strict=True):
        outside = gradient if part is state else torch.cat((gradient[:, :, :40], gradient[:, :, 90:]), 2)
        assert outside.count_nonzero() == 0 and (part is state or gradient.count_nonzero() > 0)


@pytest.mark.parametrize("which", [0, 1])
def test_either_result_alone_has_gradients(which: int) -> None:
    *parts, state = inputs = noise(70)
    both = (rule(*parts, state=state)[which].sum() for rule in (delta_rule, delta_rule_by_token))
    found, expected = (torch.autograd.grad(one, inputs, materialize_grads=True) for one in both)
    assert all((one - other).abs().max() < 1e-12 for one, other in zip(found, expected, strict=True))


def test_no_token_sees_a_later_one() -> None:
    inputs = noise(100)
    *parts, state = inputs
    read, _ = delta_rule(*parts, state=state)
    for token in (0, 31, 63, 64, 98):
        for gradient in torch.autograd.grad(read[:, :, token].sum(), parts, retain_graph=True):
            assert gradient[:, :, token + 1 :].count_nonzero() == 0


def test_equal_keys_that_are_never_forgotten() -> None:
    """The worst case of the inverse in a chunk: powers of its matrix grow like binomial coefficients."""
    *parts, state = noise(128)
    parts[1] = F.normalize(torch.ones_like(parts[1]), dim=-1).requires_grad_()
    parts[3] = torch.zeros_like(parts[3]).requires_grad_()
    parts[4] = torch.ones_like(parts[4]).requires_grad_()
    same(everything(delta_rule, [*parts, state], None), everything(delta_rule_by_token, [*parts, state], None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, 100])
def test_lower_dtypes_are_computed_in_float32(tokens: int, dtype: torch.dtype) -> None:
    *parts, state = (one.detach().to(dtype) for one in noise(tokens))
    expected, expected_last = delta_rule_by_token(*(part.double() for part in parts), state=state.double())
    with torch.autocast("cpu", torch.bfloat16):
        read, last = delta_rule(*parts, state=state)
    assert read.dtype == dtype and last.dtype == torch.float32
    assert (last - expected_last).abs().max() < 1e-5 * expected_last.abs().max()
    assert (read - expected).abs().max() < (1e-5 if dtype == torch.float32 else 5e-3) * expected.abs().max()


def test_the_definition_is_flas() -> None:
    pytest.importorskip("einops", reason="einops is not installed")
    package = importlib.util.find_spec("fla")  # its file alone: importing the package takes seconds, and Triton
    file = Path(package.submodule_search_locations[0], "ops", "kda", "naive.py") if package else None
    if file is None or not file.is_file():
        pytest.skip("fla-core 0.6 or newer is not installed")
    spec = importlib.util.spec_from_file_location("naive_kda", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    *parts, state = (one.detach().float() for one in noise(70))  # it computes in float32
    expected, last = module.naive_recurrent_kda(
        *(part.transpose(1, 2) for part in parts), scale=1.0, initial_state=state, output_final_state=True
    )
    for rule in (delta_rule, delta_rule_by_token):
        same(rule(*parts, state=state), (expected.transpose(1, 2), last), 1e-5)


def test_shapes_without_numbers() -> None:
    with FakeTensorMode() as mode:
        *parts, state = (mode.from_tensor(one.detach()).requires_grad_() for one in noise(70))
        read, last = delta_rule(*parts, state=state, begins=torch.zeros(BATCH, 70, dtype=torch.bool))
        (read.sum() + last.sum()).backward()
        assert read.shape == (BATCH, HEADS, 70, VALUES) and last.shape == (BATCH, HEADS, KEYS, VALUES)
        assert all(part.grad.shape == part.shape for part in parts)


@pytest.mark.parametrize("tokens", [1, 70])
def test_it_compiles_whole(tokens: int) -> None:
    inputs, begins = noise(tokens), starts(tokens, [0, 20])
    compiled: Any = torch.compile(delta_rule, fullgraph=True, backend="aot_eager", dynamic=False)
    same(everything(compiled, inputs, begins), everything(delta_rule, inputs, begins))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_it_compiles_to_the_same() -> None:
    inputs, begins = noise(70), starts(70, [0, 20])
    compiled: Any = torch.compile(delta_rule, fullgraph=True, dynamic=False)
    same(everything(compiled, inputs, begins), everything(delta_rule, inputs, begins))
