"""The token view: a text whose tokens take the colour of the source that they read most, at a site and for a role of the reader's choice.

The page holds the weights in thousandths, in a block of JSON; analysis_script.py draws from it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from depthroute.report.analysis_depth_plots import finite, place_words, role_words
from depthroute.report.analysis_script import SCRIPT
from depthroute.report.routing_plots import OPEN
from depthroute.report.theme import ARM_COLORS

DATA = "token-reads"
LIGHTNESS = "var(--source-lightness)"


def token_view(text: Mapping[str, Any]) -> str | None:
    """The view's HTML with its data and its script; None where there is nothing to show."""
    tokens = [str(token) for token in text.get("tokens") or []]
    sites = [site for site in text.get("sites") or [] if site.get("sources") and site.get("weights")]
    if not tokens or not sites:
        return None
    names = list(dict.fromkeys(_name(source) for site in _by_depth(sites) for source in site["sources"]))
    reads = [
        {
            "site": place_words(site),
            "role": role_words(site.get("role")),
            "sources": [names.index(_name(source)) for source in site["sources"]],
            "weights": [[round(1000 * (finite(value) or 0.0)) for value in of_source] for of_source in site["weights"]],
        }
        for site in _by_depth(sites)
    ]
    data = {"tokens": tokens, "names": names, "colors": colors(len(names)), "reads": reads}
    return (
        f'<div class="wide reads" id="reads">\n'
        '<p class="choice"><label>Site <select id="reads-site"></select></label> '
        '<label>Role <select id="reads-role"></select></label></p>\n'
        '<div class="legend" id="reads-legend" role="group" aria-label="Show only the tokens that read one source most"></div>\n'
        '<div class="pair">\n'
        '<div class="tokens" id="reads-tokens" role="listbox" aria-label="Tokens of the text" aria-describedby="reads-help"></div>\n'
        '<div class="weights" id="reads-weights" role="region" tabindex="0" '
        'aria-label="Weights of the chosen token"></div>\n'
        "</div>\n"
        '<p class="help" id="reads-help">Point at a token, tap it, or use the arrow keys, Home and End: the bars are its weights.</p>\n'
        f"<noscript><p>A script inside the page draws this part. The text: {escape(''.join(tokens))}</p></noscript>\n"
        f'<script type="application/json" id="{DATA}">{_json(data)}</script>\n'
        f"<script>{SCRIPT}</script>\n</div>"
    )


def script_policy() -> str:
    """What the page's policy allows: this one script, by its hash."""
    return "script-src 'sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode("utf-8")).digest()).decode("ascii") + "'"


def colors(count: int) -> list[str]:
    """A colour for each source: the arms' colours while they last, and otherwise hues in the order of depth."""
    if count <= ARM_COLORS:
        return [f"var(--arm-{index})" for index in range(count)]
    return [f"hsl({250 - round(230 * index / (count - 1))} 70% {LIGHTNESS})" for index in range(count)]


def _by_depth(sites: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(sites, key=lambda site: site.get("site", 0))


def _name(source: object) -> str:
    """A block has one colour, whether it is closed or still open."""
    return str(source).removesuffix(OPEN)


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in, nor open another one."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
