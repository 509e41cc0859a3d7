"""How the report prints numbers: fixed decimals, a true minus sign, no-break spaces before units."""

from __future__ import annotations

import math
from collections.abc import Sequence

NO_BREAK = "\u00a0"
MINUS = "\u2212"
NONE = "\u2013"


def nats(value: float | None) -> str:
    """A loss in nats with four decimals, or a dash when there is none."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.4f}".replace("-", MINUS)


def difference(value: float | None) -> str:
    """A difference of losses in nats, always with its sign; exactly zero has none."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:+.4f}"
    return "0.0000" if float(text) == 0 else text.replace("-", MINUS)


def interval(bounds: Sequence[float] | None) -> str:
    """A pair of signed bounds in nats: minus 0.0301 to minus 0.0124."""
    return NONE if bounds is None else f"{difference(bounds[0])} to {difference(bounds[1])}".replace(" ", NO_BREAK)


def percent(fraction: float | None, decimals: int = 2) -> str:
    """A signed relative change in percent."""
    if fraction is None or not math.isfinite(fraction):
        return NONE
    text = f"{100 * fraction:+.{decimals}f}"
    text = f"{0:.{decimals}f}" if float(text) == 0 else text.replace("-", MINUS)
    return f"{text}{NO_BREAK}%"


def probability(value: float | None) -> str:
    """A p value with three significant digits."""
    return NONE if value is None else f"{value:.3g}"


def count(value: float | None) -> str:
    """A whole number with thousands separated by commas."""
    return NONE if value is None else f"{round(value):,}".replace("-", MINUS)


def scaled(value: float | None, unit: str = "") -> str:
    """A large count in words a reader can hold: `4.10 million`, `22.4 thousand`."""
    if value is None:
        return NONE
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(value) >= size:
            return _with_unit(f"{value / size:.3g}{NO_BREAK}{word}", unit)
    return _with_unit(count(value), unit)


def mebibytes(value: float | None) -> str:
    """Bytes as MiB."""
    return NONE if value is None else f"{value / 2**20:,.0f}{NO_BREAK}MiB"


def megabytes(value: float | None) -> str:
    """Bytes as MB (powers of ten), for sizes of text."""
    return NONE if value is None else f"{value / 1e6:,.1f}{NO_BREAK}MB"


def duration(seconds: float | None) -> str:
    """Seconds as `48 s`, `3 min 12 s` or `2 h 5 min`."""
    if seconds is None:
        return NONE
    if seconds < 10:
        return f"{seconds:.1f}{NO_BREAK}s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours}{NO_BREAK}h {minutes}{NO_BREAK}min".replace(" ", NO_BREAK)
    return f"{minutes}{NO_BREAK}min {rest}{NO_BREAK}s".replace(" ", NO_BREAK) if minutes else f"{rest}{NO_BREAK}s"


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean, or nothing of nothing."""
    return math.fsum(values) / len(values) if values else None


def plural(number: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number:,}{NO_BREAK}{noun if number == 1 else noun + 's'}"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


def _with_unit(text: str, unit: str) -> str:
    return f"{text}{NO_BREAK}{unit}" if unit else text
