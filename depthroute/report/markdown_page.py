"""The document as Markdown, with the figures as SVG files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from depthroute.report.document import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Facts,
    FigureBlock,
    KeyNumbers,
    Note,
    Panel,
    Paragraph,
    Strong,
    Table,
    Text,
    figures_of,
)
from depthroute.report.html_page import Numbering


def render_markdown(document: Document) -> str:
    """The whole report in GitHub's Markdown. What could be read as markup or HTML in the document's texts is escaped."""
    numbering = Numbering()
    parts = [f"# {_escape(document.title)}"]
    parts += [f"*{_escape(document.question)}*"] if document.question else []
    parts.append(_text(document.lead))
    parts += [part for block in document.lead_blocks for part in _block(block, numbering)]
    for section in document.sections:
        parts.append(f"## {_escape(section.heading)}")
        parts += [part for block in section.blocks for part in _block(block, numbering)]
    return "\n\n".join(parts) + "\n"


def figure_files(document: Document) -> dict[str, Panel]:
    """The names of the files that the Markdown shows, and the panel that belongs into each."""
    figures = [figure for section in document.sections for figure in figures_of(section.blocks)]
    return {_file(panel): panel for figure in figures for panel in figure.panels}


def _block(block: Block, numbering: Numbering) -> Iterator[str]:
    match block:
        case Paragraph(text):
            yield _text(text)
        case Note(text):
            yield f"> {_text(text)}"
        case Bullets(items):
            yield "\n".join(f"- {_text(item)}" for item in items)
        case KeyNumbers(items):
            yield "\n".join(f"- {_escape(label)}: **{_escape(value)}** ({_escape(remark)})" for label, value, remark in items)
        case Facts(items):
            yield "\n".join(f"- **{_escape(term)}**: {_text(text)}" for term, text in items)
        case Details(summary, blocks):
            yield f"<details><summary>{escape(summary)}</summary>"
            for inner in blocks:
                yield from _block(inner, numbering)
            yield "</details>"
        case FigureBlock(title, caption, panels):
            yield "\n".join(f"![{_escape(panel.description)}]({_file(panel)})" for panel in panels)
            yield f"**{numbering.figure()} {_escape(title)}** {_escape(caption)}"
        case Table():
            yield f"**{numbering.table()}** {_escape(block.caption)}"
            yield _table(block)


def _file(panel: Panel) -> str:
    return f"{panel.name}.svg"


def _table(table: Table) -> str:
    lines = [_row(table.columns), _row(["---" if index < table.text_columns else "---:" for index in range(len(table.columns))], raw=True)]
    for heading, rows, closing in table.groups:
        if heading:
            lines.append(_row([f"**{_escape(heading)}**", *[""] * (len(table.columns) - 1)], raw=True))
        lines += [_row(row) for row in rows]
        lines += [_row([f"**{_escape(cell)}**" if cell else "" for cell in row], raw=True) for row in closing]
    return "\n".join(lines)


def _row(cells: Sequence[str], raw: bool = False) -> str:
    return "| " + " | ".join(cell if raw else _escape(cell) for cell in cells) + " |"


def _text(text: Text) -> str:
    return "".join(_inline(part) for part in ([text] if isinstance(text, str) else text))


def _inline(part: str | Strong | Code) -> str:
    match part:
        case Strong(words):
            # A closing ** must follow a letter directly, or Markdown leaves it as it stands.
            return f"**{_escape(words.rstrip())}**" + words[len(words.rstrip()) :]
        case Code(words):
            return f"<code>{_escape(words)}</code>"
        case _:
            return _escape(part)


def _escape(words: str) -> str:
    words = escape(words, quote=False)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", words).replace("\n", " ")
