"""The colours of the report, in light and in dark, and how a Matplotlib SVG comes to follow them.

Figures are drawn with sentinel colours, one per name of the palette. Inlined in the page a sentinel becomes `var(--name)`; in a file of
its own it becomes the light colour followed by the variable, so that a viewer without CSS variables still shows the right thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape

# Name: (light, dark). The arms are the colours of Okabe and Ito (2008), darkened on paper and lightened on black until a thin line of
# each has a contrast of at least 3:1; the first arm, as a rule the plain baseline, is grey.
PALETTE = {
    "paper": ("#fcfcfa", "#141618"),
    "surface": ("#f4f4f0", "#1c1f22"),
    "ink": ("#1c1e21", "#e8e7e3"),
    "muted": ("#5a6066", "#a4a9ae"),
    "rule": ("#dcddd8", "#363a3e"),
    "accent": ("#0067a3", "#6bb8ea"),
    "heat": ("#0072b2", "#2a7fbd"),
    "on-heat": ("#ffffff", "#ffffff"),
    "arm-0": ("#6b7177", "#a9aeb3"),
    "arm-1": ("#c95700", "#f08b4c"),
    "arm-2": ("#0072b2", "#5fb3e8"),
    "arm-3": ("#008560", "#3cc79e"),
    "arm-4": ("#b0568c", "#e29cc4"),
    "arm-5": ("#a06f00", "#e6ae3a"),
    "arm-6": ("#2c88bd", "#a5d8f6"),
    "arm-7": ("#787100", "#eee256"),
    "arm-8": ("#1c1e21", "#ffffff"),
    "arm-9": ("#7d4f2d", "#cfa07e"),
}
ARM_COLORS = 10
PADDING = 12  # pixels of background around a figure that stands alone
SENTINELS = {name: f"#fe00{index:02x}" for index, name in enumerate(PALETTE)}

_LIGHT: ContextVar[bool] = ContextVar("light", default=False)
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_TAG = re.compile(r"<[^>]+>")
_REFERENCE = re.compile(r'url\(#([^)]+)\)|href="#([^"]+)"')
_IDENTIFIER = re.compile(r'\bid="([^"]*)"')


def color(name: str) -> str:
    """What stands for a colour of the palette while a figure is drawn: its sentinel, or inside `light_colors` the colour itself."""
    return PALETTE[name][0] if _LIGHT.get() else SENTINELS[name]


def arm_color(index: int) -> str:
    """The colour of an arm; an eleventh arm shares the first one's, and differs by its marker and its dashes."""
    return color(f"arm-{index % ARM_COLORS}")


@contextmanager
def light_colors() -> Iterator[None]:
    """Draw in the light palette itself, for a format whose colours cannot be exchanged afterwards."""
    token = _LIGHT.set(True)
    try:
        yield
    finally:
        _LIGHT.reset(token)


def css_variables() -> str:
    """The palette as CSS custom properties, dark ones under `prefers-color-scheme: dark`."""
    light = " ".join(f"--{name}: {value[0]};" for name, value in PALETTE.items())
    dark = " ".join(f"--{name}: {value[1]};" for name, value in PALETTE.items())
    return f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def tidy(svg: str, prefix: str) -> str:
    """Matplotlib's SVG without header, metadata, fonts and unused ids; the ids in use get `prefix`, coordinates two decimals."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Matplotlib's own style sheet has the selector *, which inside an HTML page would reach the whole page.
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    used = {first or second for first, second in _REFERENCE.findall(svg)}
    svg = _IDENTIFIER.sub(lambda m: f'id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    svg = _REFERENCE.sub(lambda m: f"url(#{prefix}-{m[1]})" if m[1] else f'href="#{prefix}-{m[2]}"', svg)
    svg = svg.replace("xlink:href", "href").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = _TAG.sub(lambda m: re.sub(r"\s+", " ", _NUMBER.sub(lambda n: f"{float(n[0]):.2f}", m[0])), svg)
    svg = svg.replace(' style=""', "").replace("<g >", "<g>")
    svg = re.sub(r"<defs>\s*</defs>", "", svg)
    return re.sub(r">\s+<", "><", svg).strip()


def inline(svg: str, description: str) -> str:
    """A tidied SVG for use inside the page, in the page's colours."""
    for name, sentinel in SENTINELS.items():
        svg = svg.replace(sentinel, f"var(--{name})")
    label = f'class="plot" role="img" aria-label="{escape(description)}"'
    return re.sub(r"<svg[^>]*>", lambda m: f"<svg {label} {_view_box(m[0])}>", svg, count=1)


def standalone(svg: str, description: str) -> str:
    """A tidied SVG as a file of its own, with its background, in light or dark as the reader's system asks for."""
    for name, sentinel in SENTINELS.items():
        svg = re.sub(rf"([a-z-]+): {sentinel}", rf"\1: {PALETTE[name][0]}; \1: var(--{name})", svg)
    inner = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    width, height = (f"{float(size) + 2 * PADDING:g}" for size in inner)
    style = css_variables() + STANDALONE_STYLE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" width="{width}" height="{height}" '
        f'viewBox="{-PADDING} {-PADDING} {width} {height}">'
        f"<title>{escape(description)}</title><style>{style}</style>"
        f'<rect x="{-PADDING}" y="{-PADDING}" width="{width}" height="{height}" style="fill: {PALETTE["paper"][0]}; fill: var(--paper)"/>'
    )
    return re.sub(r"<svg[^>]*>", lambda m: head, svg, count=1) + "\n"


STANDALONE_STYLE = (
    ".plot * { stroke-linejoin: round; stroke-linecap: butt } "
    ".plot text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif; "
    "font-variant-numeric: tabular-nums }"
)


def _view_box(tag: str) -> str:
    return re.search(r'viewBox="[^"]*"', tag)[0]  # type: ignore[index]
