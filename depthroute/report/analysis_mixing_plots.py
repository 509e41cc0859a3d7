"""The depth-mixing matrix: what every read is made of, in terms of what the sub-layers wrote, with its row sums and singular values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.analysis_depth_plots import HUES, Line, depth_panel, finite, role_words, short
from depthroute.report.document import Block, Bullets, Details, FigureBlock, Panel, Paragraph
from depthroute.report.numbers import MINUS
from depthroute.report.routing_plots import CELL_HEIGHT, KINDS, LABELS, MIN_CELL, MIN_NUMBERED, NUMBERED_SOURCES, WHITE_FROM
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMS = 52
FEW = 4  # panels that are shown; more are folded away, so that they do not hide the rest
HEAD = 120.0  # pixels that a column's name may take, upright


def mixing_blocks(mixing: Mapping[str, Any]) -> list[Block]:
    """The matrices of every role and their spectra; the reason where the method has none."""
    if not mixing.get("roles"):
        return [Paragraph(f"This model has no depth-mixing matrix: {str(mixing['reason']).rstrip('.')}.")] if mixing.get("reason") else []
    roles = {role: of_role for role, of_role in mixing["roles"].items() if of_role.get("matrix")}
    if not roles:
        return []
    names = [_column(str(name)) for name in mixing.get("columns") or _columns(len(next(iter(roles.values()))["matrix"][0]))]
    panels = [_matrix_panel(role, of_role, names, single=len(roles) == 1) for role, of_role in roles.items()]
    caption = (
        "A row is a place where the depth memory is read, a column what is read there: the embedding and what every sub-layer wrote, "
        "whichever source it reaches the read in. Entries are means over tokens"
        + ("; colour goes with the square root of their size" if len(names) > NUMBERED_SOURCES else "")
        + (f"; entries below zero are drawn in {_NEGATIVE}" if any(_entries(of_role, negative=True) for of_role in roles.values()) else "")
        + ". At the right of a row, its sum."
    )
    words = [_words(role, of_role, single=len(roles) == 1) for role, of_role in roles.items()]
    general = [*_exact_sums(mixing), *_crossing(roles)]
    found: list[Block] = [Paragraph(" ".join([*words, *general]))] if len(words) == 1 else [Bullets(words), *map(Paragraph, general)]
    figure = FigureBlock("What every read is made of.", caption, panels)
    found.append(figure if len(panels) <= FEW else Details("The matrix of every role", [figure]))
    spectrum = _spectrum(roles)
    return [*found, spectrum] if spectrum is not None else found


def ranks(mixing: Mapping[str, Any]) -> dict[str, int]:
    """By role, the rank of what crosses a depth; the matrix's own where that is all there is."""
    found = {role: of_role.get("crossing_rank", of_role.get("rank")) for role, of_role in (mixing.get("roles") or {}).items()}
    return {role: rank for role, rank in found.items() if isinstance(rank, int)}


_NEGATIVE = "orange"


def _words(role: str, of_role: Mapping[str, Any], single: bool) -> str:
    rows = len(of_role["matrix"])
    subject = "The mean matrix" if single else f"The mean matrix of the {role_words(role)}"
    rank = of_role.get("rank")
    words = f"{subject} has numerical rank {rank} of {rows}." if isinstance(rank, int) else f"{subject} has {rows} rows."
    sums = [value for value in map(finite, of_role.get("row_sums") or []) if value is not None]
    if not sums:
        return words
    if max(abs(value - 1) for value in sums) < 1e-3:
        return f"{words} Its rows sum to one."
    return f"{words} Its row sums run from {short(min(sums))} to {short(max(sums))}."


def _exact_sums(mixing: Mapping[str, Any]) -> list[str]:
    """What sums to one by the method's equations, and how far from it the farthest is."""
    away = finite(mixing.get("deviation"))
    farthest = f": over all tokens, sites and roles the largest deviation is {short(away)}" if away is not None else ""
    if mixing.get("sums_to_one") == "rows":
        return [f"By the method's equations every row sums to one{farthest}."]
    if mixing.get("sums_to_one") == "weights":
        return [
            f"By the method's equations a read's weights over its sources sum to one{farthest}. A row need not: the sub-layers that a "
            "block sums share the block's weight, and count it once each."
        ]
    return []


def _crossing(roles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = {role: of_role["crossing_rank"] for role, of_role in roles.items() if isinstance(of_role.get("crossing_rank"), int)}
    if not found:
        return []
    named = [str(rank) if len(roles) == 1 else f"{rank} for the {role_words(role)}" for role, rank in found.items()]
    return [
        "A lower triangular matrix has full rank wherever the newest outputs have weight. What tells methods apart is the rank of what "
        "crosses a depth, the largest among the blocks of all reads from one site on of all that was written before it (one for a plain "
        f"stream): {numbers.listed(named)}."
    ]


def _spectrum(roles: Mapping[str, Mapping[str, Any]]) -> FigureBlock | None:
    lines = []
    for role, of_role in roles.items():
        values = [value for value in map(finite, of_role.get("singular_values") or []) if value is not None]
        # Rounding leaves singular values far below any rank's threshold; they would stretch the axis over nothing.
        kept = [(float(i), value) for i, value in enumerate(values, start=1) if value > 1e-9 * max(values)]
        lines.append(Line(role_words(role), kept))
    panel = depth_panel(
        "mixing-spectrum", "Singular values of the mean matrix", "largest first", lines, log=True, xlabel="number of the singular value"
    )
    caption = "A logarithmic axis; what is below a thousand-millionth of the largest is rounding, and is left out."
    return FigureBlock("The spectrum of the mixing matrix.", caption, [panel]) if panel else None


def _entries(of_role: Mapping[str, Any], negative: bool = False) -> list[float]:
    every = [value for row in of_role["matrix"] for value in map(finite, row) if value is not None]
    return [value for value in every if value < 0] if negative else every


def _matrix_panel(role: str, of_role: Mapping[str, Any], names: Sequence[str], single: bool) -> Panel:
    matrix: list[list[Any]] = of_role["matrix"]
    columns, rows = len(names), len(matrix)
    sums = [finite(value) for value in of_role.get("row_sums") or []]
    largest = max((abs(value) for value in _entries(of_role)), default=0.0) or 1.0
    numbered = columns <= NUMBERED_SOURCES
    room = (canvas.WIDTH - LABELS - SUMS) / columns
    cell = max(MIN_NUMBERED, min(80.0, room)) if numbered else max(MIN_CELL, room)
    longest = max(len(name) for name in names) * canvas.SMALL_SIZE * canvas.CHARACTER_WIDTH
    upright = longest > cell
    head = 22 + min(HEAD, longest) if upright else 22.0
    width = max(canvas.WIDTH, LABELS + cell * columns + SUMS)
    title = "Depth-mixing matrix" + ("" if single else f": {role_words(role)}")
    height = canvas.heading_height(title, width) + head + CELL_HEIGHT * rows + 6

    def paint(figure: Figure) -> None:
        from matplotlib.patches import Rectangle

        top = canvas.heading(figure, title, "weight of each output (columns) in each read (rows)") + head
        muted: dict[str, Any] = {"fontsize": canvas.SMALL_SIZE, "color": color("muted"), "ha": "right"}
        for column, name in enumerate(names):
            place: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor"} if upright else {"ha": "center"}
            x = LABELS + cell * (column + 0.5) + (4 if upright else 0)
            canvas.text(figure, x, top - 7, canvas.cut(name, HEAD, canvas.SMALL_SIZE), fontsize=canvas.SMALL_SIZE, **place)
        right = LABELS + cell * columns + SUMS - 4
        canvas.text(figure, right, top - 7, "sum", **muted)
        for row, entries in enumerate(matrix):
            y = top + CELL_HEIGHT * row
            canvas.text(figure, LABELS - 10, y + 15, _row(row, rows), **muted)
            if row < len(sums) and (total := sums[row]) is not None:
                canvas.text(figure, right, y + 15, _two(total), **muted)
            # Column i is what sub-layer i - 1 wrote: a read can hold no later one.
            for column, value in ((c, finite(v)) for c, v in enumerate(entries[: row + 1])):
                if value is None:
                    continue
                depth = min(1.0, abs(value) / max(1.0, largest)) ** (1 if numbered else 0.5)
                hue = color("heat") if value >= 0 else arm_color(HUES[1])
                corner = (LABELS + cell * column + 0.75, height - y - CELL_HEIGHT + 0.75)
                for style in (
                    {"facecolor": color("surface"), "edgecolor": color("rule"), "linewidth": 0.6},
                    {"facecolor": hue, "alpha": depth, "linewidth": 0},
                ):
                    figure.add_artist(Rectangle(corner, cell - 1.5, CELL_HEIGHT - 1.5, transform=None, **style))
                if numbered:
                    ink = color("on-heat" if depth >= WHITE_FROM and value > 0 else "ink")
                    x = LABELS + cell * (column + 0.5)
                    canvas.text(figure, x, y + 15, _two(value), fontsize=canvas.SMALL_SIZE, ha="center", color=ink)

    words = _words(role, of_role, single)
    return canvas.draw(f"mixing-{canvas.slug(role)}", f"Depth-mixing matrix as a heat map. {words}", paint, width=width, height=height)


def _two(value: float) -> str:
    return (f"{value:.2f}" if abs(value) < 100 else short(value)).replace("-", MINUS)


def _row(row: int, rows: int) -> str:
    return "output" if row == rows - 1 else f"{row // 2} {KINDS['attention' if row % 2 == 0 else 'mlp']}"


def _columns(count: int) -> list[str]:
    return ["embedding", *(f"{'attention' if i % 2 == 0 else 'mlp'} {i // 2}" for i in range(count - 1))]


def _column(name: str) -> str:
    kind, _, layer = name.partition(" ")
    return f"{layer} {KINDS[kind]}" if kind in KINDS and layer else name
