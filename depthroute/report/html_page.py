"""The document as one HTML page: style sheet and figures inside, nothing fetched, no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

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
    Paragraph,
    Section,
    Strong,
    Table,
    Text,
)
from depthroute.report.theme import css_variables, inline

# The policy forbids what the page does not need, so that a label can never load or run anything.
BROAD = 460  # a panel of more pixels takes a row of its own, and scrolls on a narrow screen
LONG = 60  # characters from which a column of text gets more room
MANY = 9  # a table of more columns is set closer, so that it fits on a screen
SHORT = 6  # a first column of no longer words needs no least width
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_html(document: Document) -> str:
    """The whole page. Every text of the document is escaped."""
    style = css_variables() + (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    numbering = Numbering()
    body = [
        "<header>",
        f'<p class="kicker">{escape(document.kicker)}</p>',
        f"<h1>{_unbroken(document.title)}</h1>",
        f'<p class="question">{escape(document.question)}</p>' if document.question else "",
        "</header>",
        '<section id="verdict" aria-label="Verdict">',
        f'<p class="lead">{_text(document.lead)}</p>',
        *(_block(block, numbering) for block in document.lead_blocks),
        "</section>",
        *(line for section in document.sections for line in _section(section, numbering)),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(document.title)}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            *(line for line in body if line),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


class Numbering:
    """Running numbers of figures and tables."""

    def __init__(self) -> None:
        self.figures = 0
        self.tables = 0

    def figure(self) -> str:
        self.figures += 1
        return f"Figure\u00a0{self.figures}."

    def table(self) -> str:
        self.tables += 1
        return f"Table\u00a0{self.tables}."


def _section(section: Section, numbering: Numbering) -> Iterator[str]:
    yield f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-heading">'
    yield f'<h2 id="{section.anchor}-heading">{escape(section.heading)}</h2>'
    yield from (_block(block, numbering) for block in section.blocks)
    yield "</section>"


def _block(block: Block, numbering: Numbering) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{_text(text)}</p>"
        case Note(text):
            return f'<p class="note" role="note">{_text(text)}</p>'
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in items) + "</ul>"
        case KeyNumbers(items):
            cells = (
                f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd><dd class="remark">{escape(remark)}</dd></div>'
                for label, value, remark in items
            )
            return '<dl class="key-numbers">' + "".join(cells) + "</dl>"
        case Facts(items):
            return '<dl class="facts">' + "".join(f"<div><dt>{escape(t)}</dt><dd>{_text(text)}</dd></div>" for t, text in items) + "</dl>"
        case Details(summary, blocks):
            return f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(_block(b, numbering) for b in blocks) + "\n</details>"
        case FigureBlock():
            return _figure(block, numbering)
        case Table():
            return _table(block, numbering)


def _figure(figure: FigureBlock, numbering: Numbering) -> str:
    number = numbering.figure()
    panels = "\n".join(
        f'<div class="panel{" broad" if panel.width > BROAD else ""}" id="{escape(panel.name)}" style="--natural: {panel.width}px">'
        f"{inline(panel.svg, panel.description)}</div>"
        for panel in figure.panels
    )
    # With an odd number of panels the caption takes the place that is left in the grid.
    shape = "odd" if len(figure.panels) % 2 else "even"
    return (
        f'<figure class="wide panels {shape}">\n{panels}\n'
        f"<figcaption><b>{number} {escape(figure.title)}</b> {escape(figure.caption)}</figcaption>\n</figure>"
    )


def _table(table: Table, numbering: Numbering) -> str:
    number = numbering.table()
    kinds = ["text" if index < table.text_columns else "number" for index in range(len(table.columns))]
    first = [row[0] for _, rows, closing in table.groups for row in (*rows, *closing)]
    every = [row for _, rows, closing in table.groups for row in (*rows, *closing)]
    for index in range(1, table.text_columns):
        kinds[index] += " long" if any(len(row[index]) > LONG for row in every) else ""
    kinds[0] += " short" if all(len(cell) <= SHORT for cell in first) else ""
    many = ' class="many"' if len(table.columns) > MANY else ""
    head = "".join(f'<th scope="col" class="{kind}">{escape(column)}</th>' for column, kind in zip(table.columns, kinds, strict=True))
    groups = []
    for heading, rows, closing in table.groups:
        lines = [f'<tr class="group"><th scope="rowgroup" colspan="{len(kinds)}">{escape(heading)}</th></tr>'] if heading else []
        for css, part in (("", rows), (' class="closing"', closing)):
            for row in part:
                cells = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row[1:], kinds[1:], strict=True))
                lines.append(f'<tr{css}><th scope="row" class="{kinds[0]}">{escape(row[0])}</th>{cells}</tr>')
        groups.append("<tbody>" + "".join(lines) + "</tbody>")
    return (
        f'<figure class="wide table">\n<figcaption><b>{number}</b> {escape(table.caption)}</figcaption>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{number}"><table{many}><thead><tr>{head}</tr></thead>'
        + "".join(groups)
        + "</table></div>\n</figure>"
    )


def _unbroken(title: str) -> str:
    """A heading whose hyphenated names stay on one line: `RD-AttnRes`."""
    words = (f'<span class="name">{escape(word)}</span>' if "-" in word and len(word) < 20 else escape(word) for word in title.split(" "))
    return " ".join(words)


def _text(text: Text) -> str:
    parts = [text] if isinstance(text, str) else text
    return "".join(_inline(part) for part in parts)


def _inline(part: str | Strong | Code) -> str:
    match part:
        case Strong(words):
            return f"<strong>{escape(words)}</strong>"
        case Code(words):
            return f"<code>{escape(words)}</code>"
        case _:
            return escape(part)
