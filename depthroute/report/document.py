"""What a report is made of, before it is HTML or Markdown: one tree that both are written from, so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Strong:
    """Text that carries the sentence."""

    text: str


@dataclass(frozen=True)
class Code:
    """A name or value as a machine knows it: a field, a hash."""

    text: str


Inline = str | Strong | Code
Text = str | Sequence[Inline]


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of running text."""

    text: Text


@dataclass(frozen=True)
class Bullets:
    """A list of short, separate statements."""

    items: Sequence[Text]


@dataclass(frozen=True)
class Note:
    """A statement the reader must not miss: an unfinished cell, an interval that cannot exist."""

    text: Text


@dataclass(frozen=True)
class KeyNumbers:
    """The few numbers a reader looks for first: (label, value, remark)."""

    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Facts:
    """Terms and what they are in this study."""

    items: Sequence[tuple[str, Text]]


@dataclass(frozen=True)
class Table:
    """Rows in groups. `text_columns` counts the leading columns that hold words; the others hold numbers and align right.

    A group is (heading or None, rows, closing rows); closing rows are set apart as what the rows above add up to.
    """

    caption: str
    columns: Sequence[str]
    groups: Sequence[tuple[str | None, Sequence[Sequence[str]], Sequence[Sequence[str]]]]
    text_columns: int = 1


@dataclass(frozen=True)
class Panel:
    """One drawing, `width` x `height` CSS pixels. `svg` has sentinel colours (theme.py); `description` says in words what it shows.

    `paint` draws it again on a Matplotlib figure, for another format. `data` is what it shows, one value a row under a head, where the
    study's files do not hold it in that form.
    """

    name: str
    svg: str
    description: str
    width: int
    height: int = field(compare=False)
    paint: Callable[[Any], None] = field(compare=False, repr=False)
    data: Sequence[Sequence[Any]] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class FigureBlock:
    """Panels that share one number and one caption; `title` is what to see, `caption` how to read it."""

    title: str
    caption: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Details:
    """Blocks that stay folded until asked for."""

    summary: str
    blocks: Sequence[Block]


Block = Paragraph | Bullets | Note | KeyNumbers | Facts | Table | FigureBlock | Details


def figures_of(blocks: Sequence[Block]) -> Iterator[FigureBlock]:
    """Every figure in reading order, folded ones among them."""
    for block in blocks:
        if isinstance(block, FigureBlock):
            yield block
        elif isinstance(block, Details):
            yield from figures_of(block.blocks)


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it; `anchor` is the HTML id."""

    anchor: str
    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """The whole report. `kicker` is the line above the title, `lead` the verdict in one paragraph."""

    title: str
    kicker: str
    question: str
    lead: Text
    lead_blocks: Sequence[Block]
    sections: Sequence[Section]
