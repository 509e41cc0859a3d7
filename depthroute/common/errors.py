"""The two kinds of refusal: a wrong request, and a failure while doing a right one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class DepthrouteError(Exception):
    """Anything this library refuses or fails at, with a message written for the person reading it.

    `everywhere`: all processes of a run raise it, and the first one says it for all.
    """

    exit_code = 1

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class RequestError(DepthrouteError, ValueError):
    """What was asked for cannot be done as asked. The command line exits with 2."""

    exit_code = 2


class FailureError(DepthrouteError, RuntimeError):
    """A right request failed on the way (a full disk, a truncated file). The command line exits with 1."""

    exit_code = 1


def choose(what: str, given: str, allowed: Iterable[str]) -> str:
    """One sentence that refuses `given` as a `what`, names the nearest right word and lists what is allowed."""
    names = sorted(allowed)
    if not names:
        return f"unknown {what} {given!r}; there is none."
    close = get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; perhaps you meant {close[0]!r}" if close else ""
    return f"unknown {what} {given!r}{hint}. Allowed: {', '.join(names)}."
