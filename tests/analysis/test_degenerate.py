"""Methods become other methods where they say so, and the check can tell when they do not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.analysis.degenerate import TOLERANCE, verify
from depthroute.residual import SPECIFICATIONS, AttnResConfig, Degenerate, Method, PreNormConfig
from depthroute.residual.values import ValueResidualConfig

OTHERS = {name: method for name, method in SPECIFICATIONS.items() if name != "prenorm"}  # it is what most of them become


@pytest.mark.parametrize("method", OTHERS.values(), ids=OTHERS)
def test_every_method_has_a_degenerate_case_that_holds(method: Method) -> None:
    found = verify(method)
    assert found and all(case.config != case.equals or case.adjust is not case.adjust_other for case in method.degenerate)
    for verified in found:
        assert verified.holds, f"{verified.case.says}: {verified.logits}, {verified.gradients}"


@pytest.mark.parametrize(
    "case",
    [
        Degenerate(says="the mean of two values is not one of them", config=ValueResidualConfig(), equals=PreNormConfig()),
        Degenerate(says="a window forgets", config=AttnResConfig(window=2), equals=PreNormConfig()),
        Degenerate(says="blocks of normalised outputs", config=AttnResConfig(block=4, summary="rms"), equals=PreNormConfig()),
        Degenerate(says="a count prior at zero queries", config=AttnResConfig(block=4, count_prior=1.0), equals=PreNormConfig()),
        Degenerate(says="normalised values", config=AttnResConfig(values="normed"), equals=PreNormConfig()),
    ],
    ids=lambda case: case.says,
)
def test_what_is_not_the_plain_stream_is_told_apart(case: Degenerate) -> None:
    (found,) = verify(replace(SPECIFICATIONS["prenorm"], degenerate=(case,)))
    assert not found.holds and found.logits > 1e-3


def broken(residual: torch.nn.Module) -> None:
    """A number in the output, and none in the gradients behind it."""
    original = residual.write

    def write(memory: Any, site: int, output: Tensor, *rest: Any) -> Any:
        return original(memory, site, output + 0 * (output - output.detach()).sqrt(), *rest)

    residual.write = write


def test_what_is_not_a_number_does_not_hold() -> None:
    case = Degenerate(says="no gradients", config=PreNormConfig(), equals=PreNormConfig(), adjust=broken)
    (found,) = verify(replace(SPECIFICATIONS["prenorm"], degenerate=(case,)))
    assert found.logits < TOLERANCE and math.isnan(found.gradients) and not found.holds


def test_gradients_count_as_much_as_outputs() -> None:
    """The same output with an output projection that is not trained alike."""

    def scaled(residual: torch.nn.Module) -> None:
        original = residual.write

        def write(memory: Any, site: int, output: Tensor, *rest: Any) -> Any:
            return original(memory, site, output.detach() + 0.5 * (output - output.detach()), *rest)

        residual.write = write

    case = Degenerate(says="half of every gradient", config=PreNormConfig(), equals=PreNormConfig(), adjust=scaled)
    (found,) = verify(replace(SPECIFICATIONS["prenorm"], degenerate=(case,)))
    assert found.logits < TOLERANCE < found.gradients and not found.holds
