"""The page of one analysed model: that it says what the JSON says, of every JSON there can be, and holds in a real browser."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import write_json
from depthroute.report.analysis_depth_plots import role_words, short
from depthroute.report.analysis_gradient_plots import BUCKETS, thinned
from depthroute.report.analysis_page import write_analysis
from depthroute.report.analysis_text import colors, script_policy

CHROMIUM = shutil.which("chromium")
ATTACK = '</script><script>alert(1)</script> & "R" <img src=x onerror=alert(1)> $a_b$'
TOKENS = ["def", " read", "(", "memory", "):", "\n", "\t", "", "return", " sum"]
SECTIONS = ("routing", "text", "probes", "mixing", "magnitudes", "gradients", "feedback", "lens", "papers")
PARTS = ("routing", "mixing", "magnitudes", "gradient_norms", "feedback", "lens", "probes", "papers", "text")
browsers = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")


def place(site: int, layers: int) -> dict[str, Any]:
    last = site == 2 * layers
    return {"site": site, "kind": "output" if last else ("attention", "mlp")[site % 2], "layer": site // 2 - (1 if last else 0)}


def sources_of(site: int) -> list[str]:
    return ["embedding", *(f"{'attention' if i % 2 == 0 else 'mlp'} {i // 2}" for i in range(site))]


def roles_of(site: int, layers: int) -> list[str]:
    return ["query_key", "value"] if site % 2 == 0 and site < 2 * layers else ["shared"]


def softmax(scores: list[float]) -> list[float]:
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def analysis(layers: int = 3, words: str = "") -> dict[str, Any]:
    """A role-decoupled model's analysis.json with every section; `words` stands in every text that a file could bring along."""
    sites = range(2 * layers + 1)
    reads = [(site, role) for site in sites for role in roles_of(site, layers)]
    tokens = TOKENS + ([words] if words else [])

    def weights(site: int, role: str, token: int = 0) -> list[float]:
        return softmax([math.sin(3.0 * i + 2.0 * token + len(role)) for i in range(site + 1)])

    def effective(site: int, role: str) -> float:
        return math.exp(-sum(w * math.log(w) for w in weights(site, role)))

    probes = [
        {**place(site, layers), "role": role, "probe": "knock_out", "source": source, "sources": [source],
         "mean_weight": weights(site, role)[i], "delta": 0.01 * (i + 1) * (-1) ** i, "low": 0.01 * (i + 1) * (-1) ** i - 0.015,
         "high": 0.01 * (i + 1) * (-1) ** i + 0.015}
        for site, role in reads if site for i, source in enumerate(sources_of(site))
    ]  # fmt: skip
    idle = [{**probe, "delta": 0.0001, "low": -0.0002, "high": 0.0004, "source": probe["source"] + words} for probe in probes[:6]]
    whole = [
        {**place(site, layers), "role": role, "probe": probe, "source": None, "sources": sources_of(site), "mean_weight": None,
         "delta": 0.002 * site, "low": 0.001 * site, "high": None if site == 1 else 0.003 * site}
        for site, role in reads if site for probe in ("uniform", "frozen")
    ]  # fmt: skip
    matrix = [[w if i <= site else 0.0 for i, w in enumerate(weights(site, "shared") + [0.0] * (2 * layers - site))] for site in sites]
    signed = [[(-1) ** i * 1.5 * w for i, w in enumerate(row)] for row in matrix]
    found: dict[str, Any] = {
        "format": 1,
        "model": {"label": "RD-AttnRes" + words, "parameters": 1_234_567, "layers": layers, "width": 96, "residual": "rd-attnres" + words},
        "tokens": 65_536,
        "documents": 41,
        "nll": 3.4567,
        "routing": {
            "tokens": 65_536,
            "sites": [
                {**place(site, layers), "sources": sources_of(site), "roles": {
                    role: {"weights": weights(site, role), "effective_sources": effective(site, role), "effective_sources_sd": 0.4}
                    for role in roles_of(site, layers)
                }}
                for site in sites
            ],
            "divergence": [{"layer": layer, "nats": 0.2 / (layer + 1)} for layer in range(1, layers)],
        },
        "mixing": {
            "roles": {
                "query_key": {"matrix": matrix, "rank": layers, "crossing_rank": 2, "row_sums": [1.0] * (2 * layers + 1),
                              "singular_values": [2.0 * 0.5**i for i in range(2 * layers)] + [1e-17]},
                "value": {"matrix": signed, "rank": 2 * layers + 1, "crossing_rank": 2 * layers + 1,
                          "row_sums": [sum(row) for row in signed],
                          "singular_values": [3.0, 1.0]},
            },
            "columns": sources_of(2 * layers), "sums_to_one": "weights", "deviation": 2e-7,
        },
        "magnitudes": [
            {**place(site, layers), "output_rms": None if site == 2 * layers else 0.1 * 1.4**site, "read_rms": 1.0 + site,
             "output_gradient_rms": None if site == 2 * layers else 1e-6 / (site + 1)}
            for site in sites
        ],
        "gradient_norms": {"steps": 3000, "mean": 0.81, "variance": 0.0625, "above_clip": 0.273, "clip": 1.0,
                           "series": [0.5 + math.sin(step) ** 2 + (40.0 if step == 1500 else 0.0) for step in range(3000)]},
        "feedback": [
            {**place(site, layers), "role": role, "direct": 0.01, "routed": 0.0 if site == 0 else 0.001 * site, "ratio": 0.1 * site}
            for site, role in reads
        ],
        "lens": [{**place(site, layers), "nll": 8.0 - 0.7 * site, "agrees": site / (2 * layers)} for site in sites],
        "probes": {
            "tokens": 8192, "documents": 17, "nll": 3.5, "above": 0.1, "negligible": 0.001, "sites": probes + whole,
            "families": [
                {"family": "all", "probe": "uniform", "source": None, "mean_weight": None, "delta": 0.3, "low": 0.2, "high": 0.4},
                {"family": "value" + words, "probe": "knock_out", "source": "newest", "mean_weight": 0.25, "delta": 0.0, "low": -0.1,
                 "high": 0.1},
            ],
            "mass_without_effect": idle,
        },
        "papers": [{"measure": "divergence" + words, "ours": 0.2, "paper": "0.218 at 120M", "where": "section 4" + words}],
        "text": {
            "tokens": tokens,
            "sites": [
                {**place(site, layers), "role": role, "sources": [source + words for source in sources_of(site)],
                 "weights": [list(row) for row in zip(*(weights(site, role, token) for token in range(len(tokens))), strict=True)]}
                for site, role in reads
            ],
        },
    }  # fmt: skip
    return found


class Reader(HTMLParser):
    """The tags with their attributes, and the text that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words)).replace("\u00a0", " ")

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def written(folder: Path, data: Any) -> str:
    write_json(folder / "analysis.json", data)
    path = write_analysis(folder)
    assert path == folder / "index.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(written(tmp_path_factory.mktemp("full"), analysis()))


def test_every_section_and_every_figure_is_there(page: Reader) -> None:
    assert [attributes["id"] for attributes in page.find("section")] == ["verdict", "model", *SECTIONS, "limits"]
    panels = {attributes["id"] for attributes in page.find("div") if (attributes.get("class") or "").startswith("panel")}
    assert panels == {
        "effective-sources", "routing-2-query-key", "routing-2-value", "routing-2-shared", "divergence",
        "probe-weight-knock-out", "probe-uniform", "probe-frozen", "mixing-query-key", "mixing-value", "mixing-spectrum",
        "magnitudes", "gradients", "gradient-norms", "feedback", "feedback-ratio", "lens-nll", "lens-agrees",
    }  # fmt: skip
    assert all(drawing["role"] == "img" and len(drawing["aria-label"] or "") > 40 for drawing in page.find("svg"))
    assert len(page.find("figcaption")) == len(page.find("figure"))


@pytest.mark.parametrize(
    "words",
    [
        "3 layers, width 96, 1,234,567 parameters",
        "65,536 held-out tokens, 41 documents",
        "3.4567 nats per token",
        "Mean over 65,536 tokens .",
        "The mean matrix of the query-key role has numerical rank 3 of 7. Its rows sum to one.",
        "the largest deviation is 2e\u22127. A row need not",
        "(one for a plain stream): 2 for the query-key role and 7 for the value role.",
        "Over 3,000 steps the gradient's norm before clipping has mean 0.81 and variance 0.0625; "
        "27.3 % of the steps were clipped, at norm 1.",
        "on 8,192 held-out tokens of 17 documents and nothing else",
        "Mass without effect. 6 sources and groups have a mean weight of at least 0.1",
        "their intervals lie within 0.001 nats of zero. The 4 with the most weight: attention 0 at site 1, MLP of layer 0: weight 0.666, ",
        "change +0.0001 (\u22120.0002 to +0.0004)",
        "All reads read made uniform \u2013 +0.3000 +0.2000 to +0.4000 yes",
        "Reads of the value role current state taken out 0.250 0.0000 \u22120.1000 to +0.1000 no",
        "Context, not a comparison. The papers' numbers are of their models on their data",
        "divergence 0.2 0.218 at 120M section 4",
    ],
)
def test_the_page_says_what_the_analysis_says(page: Reader, words: str) -> None:
    assert re.sub(r" ([.:;,])", r"\1", words) in re.sub(r" ([.:;,])", r"\1", page.text)


def test_what_has_no_seeds_speaks_of_none(page: Reader) -> None:
    assert "One seed." not in page.text and "1 seed" not in page.text


@pytest.mark.parametrize("missing", PARTS)
def test_a_missing_section_leaves_out_its_part_and_nothing_else(tmp_path: Path, missing: str) -> None:
    data = analysis(layers=1)
    del data[missing]
    anchors = [attributes["id"] for attributes in Reader(written(tmp_path, data)).find("section")]
    anchor = "gradients" if missing == "gradient_norms" else missing
    assert anchors == ["verdict", "model", *(name for name in SECTIONS if name != anchor), "limits"]


def test_a_page_of_nearly_nothing_is_a_page(tmp_path: Path) -> None:
    reader = Reader(written(tmp_path, {"format": 1}))
    assert [attributes["id"] for attributes in reader.find("section")] == ["verdict", "limits"]
    assert not reader.find("script")
    assert "without routing weights over sources" in reader.text


def test_empty_sections_and_missing_numbers_are_no_error(tmp_path: Path) -> None:
    data = analysis(layers=1)
    data |= {"magnitudes": [], "feedback": [{**place(0, 1), "direct": 0.0, "routed": 0.0, "ratio": None}], "lens": [], "papers": []}
    data["mixing"] = {"reason": "its norms lie on the trunk."}
    data["probes"] = {"reason": "it has heads."}
    data["gradient_norms"] |= {"above_clip": None, "clip": None, "series": [0.0, 1.0, None, 2.0]}
    data["routing"]["divergence"] = []
    reader = Reader(written(tmp_path, data))
    assert "This model has no depth-mixing matrix: its norms lie on the trunk." in reader.text
    assert "This model was not probed: it has heads." in reader.text
    assert [a["id"] for a in reader.find("section") if a["id"] in SECTIONS] == ["routing", "text", "probes", "mixing", "gradients"]


def test_probes_without_intervals_and_without_idle_mass(tmp_path: Path) -> None:
    data = analysis(layers=1)
    data["probes"] |= {"mass_without_effect": [], "families": []}
    for probe in data["probes"]["sites"]:
        probe |= {"low": None, "high": None}
    reader = Reader(written(tmp_path, data))
    assert "None of the sources and groups that were taken out has a mean weight of at least 0.1 and no effect." in reader.text
    assert "Weight is not effect here" not in reader.text


@pytest.mark.parametrize(
    ("role", "words"),
    [("query_key", "query-key role"), ("key", "key role"), ("shared", "one read for all roles"), ("shared, head 3", "head 3"),
     ("value, head 1", "value role, head 1"), (None, "all roles")],
)  # fmt: skip
def test_roles_have_words(role: str | None, words: str) -> None:
    assert role_words(role) == words


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (0.0201, "0.0201"), (-1414.2, "\u22121,414"), (2e-7, "2e\u22127"), (3e6, "3e6")])
def test_numbers_are_short(value: float, shown: str) -> None:
    assert short(value) == shown


def test_many_heads_are_folded_away(tmp_path: Path) -> None:
    data = analysis(layers=1)
    for site in data["routing"]["sites"]:
        site["roles"] = {f"shared, head {head}": next(iter(site["roles"].values())) for head in range(5)}
    data["mixing"]["roles"] = {f"shared, head {head}": data["mixing"]["roles"]["value"] for head in range(5)}
    folded = [a for a in Reader(written(tmp_path, data)).find("details")]
    assert len(folded) == 3


def test_what_is_no_analysis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        write_analysis(tmp_path)
    for broken, found in (({"format": 2}, "2"), ([], "None")):
        write_json(tmp_path / "analysis.json", broken)
        with pytest.raises(RequestError, match=f"has format {found}; this version of depthroute reads format 1"):
            write_analysis(tmp_path)
    (tmp_path / "analysis.json").write_text('{"format": 1,', encoding="utf-8")
    with pytest.raises(FailureError, match="not valid JSON"):
        write_analysis(tmp_path)


def test_every_text_is_escaped(tmp_path: Path) -> None:
    page = written(tmp_path, analysis(words=ATTACK))
    reader = Reader(page)
    assert [attributes.get("type") for attributes in reader.find("script")] == ["application/json", None]
    assert not reader.find("img")
    assert reader.text.count(ATTACK) > 5
    data = json.loads(re.findall(r'<script type="application/json" id="token-reads">(.*?)</script>', page, re.DOTALL)[0])
    assert data["tokens"] == [*TOKENS, ATTACK]
    assert data["names"][0] == "embedding" + ATTACK


def test_the_same_analysis_gives_the_same_bytes(tmp_path: Path) -> None:
    assert written(tmp_path / "one", analysis(layers=1)) == written(tmp_path / "two", analysis(layers=1))


def test_the_policy_allows_the_page_s_own_script_alone(tmp_path: Path, page: Reader) -> None:
    policies = [a["content"] for a in page.find("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; {script_policy()}"]
    data = analysis(layers=1)
    del data["text"]
    assert "script" not in written(tmp_path, data)


def test_a_block_has_one_colour_closed_or_open(tmp_path: Path) -> None:
    data = analysis(layers=1)
    data["text"]["sites"] = [
        {**place(1, 1), "role": "shared", "sources": ["embedding", "block 1 so far"], "weights": [[0.25] * 10, [0.75] * 10]},
        {**place(2, 1), "role": "shared", "sources": ["embedding", "block 1"], "weights": [[0.5] * 10, [0.5] * 10]},
    ]
    stored = re.findall(r'id="token-reads">(.*?)</script>', written(tmp_path, data))[0]
    assert json.loads(stored)["names"] == ["embedding", "block 1"]
    assert [read["sources"] for read in json.loads(stored)["reads"]] == [[0, 1], [0, 1]]
    assert json.loads(stored)["reads"][0]["weights"][0][0] == 250


@pytest.mark.parametrize("count", [1, 2, 10, 11, 65])
def test_every_source_has_its_own_colour(count: int) -> None:
    assert len(set(colors(count))) == count


def test_thinning_a_series_keeps_its_spikes() -> None:
    series = [(float(i), 1.0 + (9.0 if i == 7777 else 0.0)) for i in range(20_000)]
    kept = thinned(series)
    assert len(kept) <= 2 * BUCKETS
    assert (7777.0, 10.0) in kept
    assert kept == sorted(kept)


def test_effects_far_apart_stay_apart_on_the_page(tmp_path: Path) -> None:
    data = analysis(layers=2)
    data["probes"]["sites"][0] |= {"delta": 9.0, "low": 8.0, "high": 10.0}
    page = written(tmp_path, data)
    assert ">10</text>" in page
    assert "linear near zero and logarithmic beyond" in page
    assert "logarithmic beyond" not in written(tmp_path, analysis(layers=2))


MEASURES = runpy.run_path(str(Path(__file__).with_name("test_page_in_chromium.py")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with runpy.run_path(str(Path(__file__).with_name("chromium.py")))["Browser"](CHROMIUM) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    models = {"shallow": analysis(), "deep": analysis(layers=9), "hostile": analysis(layers=2, words=ATTACK)}
    for name, data in models.items():
        written(folder / name, data)
    return {name: folder / name / "index.html" for name in models}


@browsers
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark"), (390, "light")])
@pytest.mark.parametrize("model", ["shallow", "deep", "hostile"])
def test_the_page_is_whole(browser: Any, pages: dict[str, Path], model: str, width: int, scheme: str) -> None:
    page = browser.open(pages[model].as_uri(), width=width, scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    found = page.evaluate(MEASURES["MEASURE"])
    assert page.events(*MEASURES["PROBLEMS"]) == []
    assert found["scroll"] <= found["client"] == width, "the page scrolls sideways"
    assert found["spill"] == []
    assert found["cut"] == [], "text of a figure runs out of its drawing"
    assert found["overlaps"] == [], "texts of a figure lie on each other"
    assert found["figures"] and all(w > 200 and h > 100 for w, h in found["figures"]), "a figure has no size"
    assert min(found["sizes"]) * 11.5 > 8.5, "text of a figure is too small to read"
    assert found["paper"] == MEASURES["PAPER"][scheme]
    requests = [event["params"]["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.querySelectorAll('.token').length") == len(TOKENS) + (model == "hostile")


def press(page: Any, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9}.get(key, 0))


def bars(page: Any) -> list[list[str]]:
    cells = "[...document.querySelectorAll('.bar')].map((bar) => [...bar.children].map((cell) => cell.textContent))"
    found: list[list[str]] = page.evaluate(cells)
    return found


@browsers
def test_the_token_view_works_without_a_mouse(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.open(pages["shallow"].as_uri(), width=1200)
    assert page.evaluate("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1, "one stop of the Tab key for all tokens"
    page.evaluate("document.getElementById('reads-site').focus()")
    for _ in range(20):
        press(page, "Tab")
        if page.evaluate("document.activeElement.classList.contains('token')"):
            break
    expected = analysis()["text"]["sites"][-1]
    for key, token in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", len(TOKENS) - 1), ("Home", 0)):
        press(page, key)
        assert page.evaluate("Number(document.activeElement.dataset.index)") == token
        assert [float(row[-1]) for row in bars(page)] == pytest.approx([row[token] for row in expected["weights"]], abs=6e-4)
    press(page, "ArrowDown")
    assert page.evaluate("Number(document.activeElement.dataset.index)") > 0, "the next line"


@browsers
def test_the_choice_of_site_and_role_is_the_one_that_is_drawn(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.open(pages["shallow"].as_uri(), width=390)
    page.evaluate("""(() => { const s = document.getElementById('reads-site'); s.value = 'site 2, attention of layer 1';
      s.dispatchEvent(new Event('change')); const r = document.getElementById('reads-role'); r.value = 'value role';
      r.dispatchEvent(new Event('change')); document.querySelectorAll('.token')[4].click(); })()""")
    (of_read,) = [s for s in analysis()["text"]["sites"] if s["site"] == 2 and s["role"] == "value"]
    assert [row[0] for row in bars(page)] == ["embedding", "attention 0", "mlp 0"]
    assert [float(row[-1]) for row in bars(page)] == pytest.approx([row[4] for row in of_read["weights"]], abs=6e-4)
    tops = [max(range(3), key=lambda i: of_read["weights"][i][token]) for token in range(len(TOKENS))]
    hues = page.evaluate("[...document.querySelectorAll('.token')].map((node) => node.style.getPropertyValue('--source'))")
    assert hues == [f"var(--arm-{top})" for top in tops]
    page.evaluate("document.querySelector('#reads-legend button').click()")
    first = min(tops)
    assert page.evaluate("document.querySelectorAll('.token.aside').length") == len(TOKENS) - tops.count(first)


@browsers
def test_hovering_shows_a_token_and_leaving_shows_the_chosen_one(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.open(pages["shallow"].as_uri(), width=1200)
    page.evaluate("document.getElementById('reads').scrollIntoView()")
    before = bars(page)
    box = "(() => { const b = document.querySelectorAll('.token')[3].getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    left, top, width, height = page.evaluate(box)
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=left + width / 2, y=top + height / 2)
    assert bars(page) != before
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert bars(page) == before


@browsers
def test_the_policy_stops_another_script(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    source = pages["shallow"].read_text(encoding="utf-8").replace("<main>", "<main><script>document.title = 'owned'</script>")
    (tmp_path / "page.html").write_text(source, encoding="utf-8")
    page = browser.open((tmp_path / "page.html").as_uri(), width=1200)
    assert page.evaluate("document.title") != "owned"
