"""The page in a real browser, at desktop and phone width, in light and in dark."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from depthroute.report import write_report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")

MEASURE = """(() => {
  const box = (node) => { const b = node.getBoundingClientRect(); return [b.width, b.height]; };
  const spill = [...document.querySelectorAll("main *")].filter((node) =>
    !node.closest(".scroll, .panel") && node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5);
  return {
    scroll: document.documentElement.scrollWidth,
    client: document.documentElement.clientWidth,
    figures: [...document.querySelectorAll("svg")].map(box),
    inks: [...document.querySelectorAll("svg text")].map((node) => getComputedStyle(node).fill),
    sizes: [...document.querySelectorAll("svg")].map((node) => node.getBoundingClientRect().width / node.viewBox.baseVal.width),
    paper: getComputedStyle(document.body).backgroundColor,
    spill: spill.map((node) => node.outerHTML.slice(0, 80)),
    cut: [...document.querySelectorAll("svg text")].filter((node) => {
      const inner = node.getBoundingClientRect(), outer = node.ownerSVGElement.getBoundingClientRect();
      return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.top < outer.top - 2 || inner.bottom > outer.bottom + 2;
    }).map((node) => node.textContent),
    overlaps: [...document.querySelectorAll("svg")].flatMap((svg) => {
      const boxes = [...svg.querySelectorAll("text")].map((node) => [node.getBoundingClientRect(), node.textContent]);
      return boxes.flatMap(([a, left], i) => boxes.slice(i + 1).filter(([b]) =>
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5
      ).map(([, right]) => `${left} / ${right}`));
    }),
  };
})()"""
PAPER = {"light": "rgb(252, 252, 250)", "dark": "rgb(20, 22, 24)"}
PROBLEMS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    opened = runpy.run_path(str(Path(__file__).with_name("chromium.py")))["Browser"](CHROMIUM)
    with opened:
        yield opened


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory, write_study: Callable[..., Path], scenarios: dict[str, Callable[..., dict[str, Any]]]
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("studies")
    name = "LR-AttnRes, a quarter of the width, slice normalised"
    arms = {
        f"a{i}": (
            f"{name} {i}" if i else "PreNorm",
            {"method": "attnres" if i else "prenorm", "block": i % 2 or 4, "roles": "decoupled"},
            -0.01 * i,
        )
        for i in range(6)
    }
    return {
        "three arms": write_report(write_study(folder / "three")),
        "six arms": write_report(write_study(folder / "six", arms=arms, comparisons=[(f"a{i}", "a0") for i in range(1, 6)], seeds=(0, 1))),
        "one seed": write_report(write_study(folder / "one", seeds=(0,), unfinished={("block", 0): 120})),
        **{kind: write_report(write_study(folder / kind, **scenarios[kind]())) for kind in ("controls", "sweep", "scales")},
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("study", ["three arms", "six arms", "one seed", "controls", "sweep", "scales"])
def test_the_page_is_whole(browser: Any, pages: dict[str, Path], study: str, width: int, scheme: str) -> None:
    page = browser.open(pages[study].as_uri(), width=width, scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    found = page.evaluate(MEASURE)
    assert page.events(*PROBLEMS) == []
    assert found["client"] == width
    assert found["scroll"] <= found["client"], "the page scrolls sideways"
    assert found["spill"] == []
    assert found["cut"] == [], "text of a figure runs out of its drawing"
    assert found["overlaps"] == [], "texts of a figure lie on each other"
    assert found["figures"] and all(w > 200 and h > 100 for w, h in found["figures"]), "a figure has no size"
    assert min(found["sizes"]) * 11.5 > 8.5, "text of a figure is too small to read"
    assert found["paper"] == PAPER[scheme]
    assert ("rgb(28, 30, 33)" if scheme == "light" else "rgb(232, 231, 227)") in found["inks"], "figures do not follow the scheme"
    requests = [event["params"]["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def test_the_checks_would_see_a_broken_page(browser: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<body><main><div style='width: 2000px'>wide</div><script>missing()</script></main></body>", encoding="utf-8")
    page = browser.open(broken.as_uri(), width=390)
    found = page.evaluate(MEASURE)
    assert found["scroll"] > found["client"] or found["spill"]
    assert page.events("Runtime.exceptionThrown")


def test_the_policy_stops_a_script_that_slipped_in(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    source = pages["one seed"].read_text(encoding="utf-8").replace("<main>", "<main><script>document.title = 'owned'</script>")
    (tmp_path / "page.html").write_text(source, encoding="utf-8")
    page = browser.open((tmp_path / "page.html").as_uri(), width=1280)
    assert page.evaluate("document.title") != "owned"
