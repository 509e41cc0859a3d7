"""Refusals that name the nearest right word."""

from __future__ import annotations

import pytest

from depthroute.common.errors import DepthrouteError, FailureError, RequestError, choose


def test_the_nearest_word_and_all_that_is_allowed() -> None:
    assert choose("arm", "blok", ["rd", "block"]) == "unknown arm 'blok'; perhaps you meant 'block'. Allowed: block, rd."
    assert choose("arm", "zzzz", ["rd", "block"]) == "unknown arm 'zzzz'. Allowed: block, rd."
    assert choose("field", "x", []) == "unknown field 'x'; there is none."


@pytest.mark.parametrize(("kind", "builtin", "code"), [(RequestError, ValueError, 2), (FailureError, RuntimeError, 1)])
def test_a_wrong_request_and_a_failure_exit_differently(kind: type[DepthrouteError], builtin: type[Exception], code: int) -> None:
    assert issubclass(kind, DepthrouteError) and issubclass(kind, builtin) and kind.exit_code == code
