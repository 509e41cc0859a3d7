"""What is one job of a preparation: consecutive parts of one source, of about as many bytes each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from depthroute.data.config import PrepareConfig
from depthroute.data.corpus import Corpus, Part

GROUP_BYTES = 2**24
"""Of input in a job: some seconds of work, which is what a kill costs, and little to hold."""


class Group(NamedTuple):
    """Parts of one source that are one job."""

    source: int
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def groups_of(source: int, parts: Iterable[Part]) -> Iterator[Group]:
    group: list[Part] = []
    size = 0
    for part in parts:
        group.append(part)
        size += part.bytes
        if size >= GROUP_BYTES:
            yield Group(source, tuple(group))
            group, size = [], 0
    if group:
        yield Group(source, tuple(group))


def stamps(corpora: Sequence[Corpus]) -> Any:
    """A JSON value found without reading the documents; as long as it is the same, so are they."""
    found = [corpus.stamp() for corpus in corpora]
    return found[0] if len(found) == 1 else found


def names_of(config: PrepareConfig, corpora: Sequence[Corpus]) -> list[str]:
    """Of the corpora; of those that share one, the paths that were asked for."""
    names = [corpus.name for corpus in corpora]
    return [source.path if names.count(name) > 1 else name for source, name in zip(config.sources, names, strict=True)]
