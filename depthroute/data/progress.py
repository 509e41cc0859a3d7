"""How far a preparation has come, how fast it goes, and how long it will take."""

from __future__ import annotations

from dataclasses import dataclass

from depthroute.common.duration import duration


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A moment of one stage of the work, over the bytes of its input, those of compressed lines as they are unpacked."""

    doing: str
    """The stage: "counting words", "tokenizing"."""
    done: int
    total: int
    found: int
    """Of `done`, what an earlier call had done before it was interrupted."""
    seconds: float
    """Since this call began the stage."""

    @property
    def rate(self) -> float:
        """Bytes a second, of this call; 0 while nothing is done."""
        return (self.done - self.found) / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds that the rest of the stage takes at this rate; None while nothing is known of it."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def __str__(self) -> str:
        share = 100 * self.done / self.total if self.total else 100.0
        text = f"{self.doing}: {_size(self.done)} of {_size(self.total)} ({share:.0f} %)"
        if self.remaining is None:
            return text
        return f"{text}, {_size(self.rate)}/s, {duration(self.remaining)} left"


def _size(count: float) -> str:
    """Bytes in the decimal units of disks."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
