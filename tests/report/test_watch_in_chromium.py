"""The live page in a real browser: it draws every arm, follows a study, stays on this machine, and puts labels in as text."""

from __future__ import annotations

import json
import runpy
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from depthroute.report import watch_feed
from depthroute.report.watch import WatchServer

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
WriteStudy = Callable[..., Path]
PROBLEMS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")
COLORS = {"light": ("rgb(28, 30, 33)", "rgb(252, 252, 250)"), "dark": ("rgb(232, 231, 227)", "rgb(20, 22, 24)")}
EVIL = '<img src=x onerror="window.stolen=1"><script>window.stolen=1</script>'
ARMS = {
    "prenorm": ("PreNorm", {"method": "prenorm"}, 0.0),
    "block": (EVIL, {"method": "attnres", "block": 4, "roles": "shared"}, -0.08),
    "rd": ("RD-AttnRes", {"method": "attnres", "block": 4, "roles": "decoupled"}, -0.1),
}
# a line of a chart in the colour of an arm, in pixels drawn
DRAWN = """(figure) => [...document.querySelectorAll(`#${figure} .board .mean`)].map((path) =>
  [path.style.stroke, path.getTotalLength()])"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    opened = runpy.run_path(str(Path(__file__).with_name("chromium.py")))["Browser"](CHROMIUM)
    with opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path, write_study: WriteStudy, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch_feed, "REFRESH_SECONDS", 0.0)
    study = write_study(tmp_path / "s", arms=ARMS, seeds=(0, 1), unfinished={("block", 1): 240, ("rd", 1): 0}, name=f"Study {EVIL}")
    (study / "statistics.json").unlink()
    output = study / "runs/rd/seed-1.output.txt"
    output.write_text(f"{EVIL} failed\n")
    return study


@contextmanager
def watched(browser: Any, folder: Path, **settings: Any) -> Iterator[Any]:
    with WatchServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            page = browser.open(server.address, **{"width": 1200, **settings})
            until(page, "document.querySelectorAll('#cells tbody tr').length > 0")
            yield page
        finally:
            server.shutdown()
            thread.join()


def until(page: Any, expression: str, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := page.evaluate(expression)):
        assert time.monotonic() < deadline, f"never true: {expression}"
        time.sleep(0.05)
    return found


def problems(page: Any) -> list[Any]:
    return [event["params"] for event in page.events(*PROBLEMS)]


def text(page: Any, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_every_arm_and_pair_is_drawn_and_nothing_spills(browser: Any, folder: Path, width: int, scheme: str) -> None:
    with watched(browser, folder, width=width, scheme=scheme) as page:
        losses, differences = (page.evaluate(f"({DRAWN})('{figure}')") for figure in ("losses", "differences"))
        assert [color for color, _ in losses] == ["var(--arm-0)", "var(--arm-1)", "var(--arm-2)"]
        assert len(differences) == 3 and all(length > 100 for _, length in (*losses, *differences))
        assert page.evaluate("document.querySelectorAll('#losses .board g:last-of-type path').length") >= 3 * 4  # validations
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        assert (ink, paper) == COLORS[scheme]
        assert problems(page) == []


def test_the_page_follows_a_running_study_by_itself(browser: Any, folder: Path) -> None:
    with watched(browser, folder) as page:
        row = "#cells tbody tr:nth-child(5)"
        assert "running" in text(page, row) and "240/400" in text(page, row)
        before = dict(enumerate(length for _, length in page.evaluate(f"({DRAWN})('losses')")))
        page.evaluate("document.getElementById('seed').value = '1'; document.getElementById('seed').dispatchEvent(new Event('change'))")
        drawn = page.evaluate(f"({DRAWN})('losses')")
        assert len(drawn) == 2 and drawn[1][1] < before[1]  # of seed 1 only two arms have begun
        run = folder / "runs/block/seed-1"
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step, "tokens": step, "loss": 3.4, "seconds": 0.05}) + "\n" for step in range(241, 361))
        until(page, f"document.querySelector('{row}').innerText.includes('360/400')")
        assert page.evaluate(f"({DRAWN})('losses')")[1][1] > drawn[1][1] + 50
        (run / "result.json").write_text(json.dumps({"nll": 3.4, "tokens_per_second": {"median": 1000.0}, "peak_memory_bytes": 1 << 30}))
        until(page, f"document.querySelector('{row}').innerText.includes('complete')")
        assert problems(page) == []


def test_nothing_leaves_the_loopback_address(browser: Any, folder: Path) -> None:
    with watched(browser, folder) as page:
        until(page, "document.getElementById('when').textContent.includes('read at')")
        asked = [event["params"]["request"]["url"] for event in page.events("Network.requestWillBeSent")]
        assert len(asked) >= 4 and all(address.startswith(("http://127.0.0.1:", "data:,")) for address in asked)
        assert {address.split("?")[0].rsplit("/", 1)[1] for address in asked if address.startswith("http")} == {
            "", "watch.css", "watch.js", "data",
        }


def test_texts_of_a_study_stay_text(browser: Any, folder: Path) -> None:
    with watched(browser, folder) as page:
        assert EVIL in text(page, "h1") and EVIL in text(page, "#losses .legend")
        assert EVIL in text(page, "#cells tbody") and f"{EVIL} failed" in text(page, "#cells tbody")
        page.evaluate("document.querySelector('#losses .board').focus()")
        page.evaluate("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'End', bubbles: true }))")
        assert EVIL in text(page, "#losses .readout")
        assert page.evaluate("window.stolen === undefined && document.querySelectorAll('main img, main script').length === 0")
        assert problems(page) == []


def test_values_are_read_out_by_keyboard_and_by_pointer(browser: Any, folder: Path) -> None:
    key = "document.querySelector('#losses .board').dispatchEvent(new KeyboardEvent('keydown', { key: '%s' }))"
    with watched(browser, folder) as page:
        page.evaluate(key % "End")
        assert page.evaluate("document.querySelector('#losses .board').getAttribute('aria-valuenow')") == "400"
        last = [line for line in map(json.loads, (folder / "runs/rd/seed-0/evaluations.jsonl").read_text().splitlines())][-1]
        assert f"{last['nll']:.4f}" in text(page, "#losses .readout")
        assert f"validation {last['nll']:.4f}" in page.evaluate("document.querySelector('#losses .board').getAttribute('aria-valuetext')")
        page.evaluate(key % "ArrowLeft")
        assert text(page, "#losses .readout").startswith("Step 398")
        page.evaluate(key % "Escape")
        assert page.evaluate("document.querySelector('#losses .readout').hidden")
        page.evaluate("""(() => { const board = document.querySelector('#differences .board'), box = board.getBoundingClientRect();
          board.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + box.width / 2, clientY: box.top + 50 })); })()""")
        assert "RD-AttnRes \u2212 PreNorm" in text(page, "#differences .readout")


def test_the_legend_shows_only_what_is_chosen(browser: Any, folder: Path) -> None:
    with watched(browser, folder) as page:
        page.evaluate("document.querySelectorAll('#losses .legend button')[2].click()")
        assert [color for color, _ in page.evaluate(f"({DRAWN})('losses')")] == ["var(--arm-2)"]
        assert page.evaluate("document.querySelectorAll('#losses .legend button')[2].getAttribute('aria-pressed')") == "true"
        page.evaluate("document.querySelectorAll('#losses .legend button')[2].click()")
        assert len(page.evaluate(f"({DRAWN})('losses')")) == 3


def test_a_study_that_has_not_begun_and_a_server_that_ends(browser: Any, folder: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    shutil.copy(folder / "plan.json", later)
    with watched(browser, later) as page:
        assert text(page, "#when").startswith("Nothing runs now") and "0 of 6" in text(page, "#numbers")
        assert "No cell has made enough steps yet." in page.evaluate("document.querySelector('#losses svg text').textContent")
        shutil.copytree(folder / "runs", later / "runs")
        until(page, "document.querySelectorAll('#losses .board .mean').length === 3")
        assert problems(page) == []
    until(page, "!document.getElementById('trouble').hidden")
    assert "cannot be reached" in text(page, "#trouble") and text(page, "#when") == "Not live"
    assert len(page.evaluate(f"({DRAWN})('losses')")) == 3


def test_a_difference_is_the_mean_of_the_pairs(browser: Any, folder: Path) -> None:
    def nll(arm: str, seed: int) -> float:
        lines = (folder / f"runs/{arm}/seed-{seed}/evaluations.jsonl").read_text().splitlines()
        return next(line["nll"] for line in map(json.loads, lines) if line["step"] == 200)

    wanted = sum(nll("block", seed) - nll("prenorm", seed) for seed in (0, 1)) / 2
    with watched(browser, folder) as page:
        page.evaluate("document.querySelectorAll('#differences .legend button')[1].click()")  # block against prenorm
        values = page.evaluate("""(() => { const board = document.querySelector('#differences .board');
          const press = (key) => board.dispatchEvent(new KeyboardEvent('keydown', { key }));
          press('End'); for (let i = 0; i < 400 && board.getAttribute('aria-valuenow') !== '200'; i += 1) press('ArrowLeft');
          return board.getAttribute('aria-valuetext'); })()""")
        assert values.startswith("step 200:") and values.endswith(f"validation {wanted:+.4f}".replace("-", "\u2212"))
