"""The server of the live page and what it hands out, without a browser."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, read_json_lines, write_json, write_text
from depthroute.report import watch_feed
from depthroute.report.watch import WatchServer
from depthroute.report.watch_feed import POINTS, Feed

WriteStudy = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, write_study: WriteStudy) -> Path:
    return write_study(tmp_path_factory.mktemp("watched") / "s", seeds=(0, 1), unfinished={("block", 1): 240, ("rd", 1): 0})


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of its own for each test, looked at without a pause."""
    monkeypatch.setattr(watch_feed, "REFRESH_SECONDS", 0.0)
    return shutil.copytree(made, tmp_path / "s")


@contextmanager
def served(folder: Path) -> Iterator[WatchServer]:
    with WatchServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: WatchServer, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def had(answer: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(reading, start + len(points), first + len(values)) for reading, start, points, first, values in answer["curves"]]


def test_it_listens_on_the_loopback_address_alone(folder: Path) -> None:
    with WatchServer(folder) as server:
        assert server.server_address[0] == "127.0.0.1" and server.address == f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_it_only_reads(folder: Path, method: str) -> None:
    with served(folder) as server:
        status, headers, _ = ask(server, "/data", method)
        assert status == 405 and headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "192.168.0.1", "", "[::2]", "localhost:x"])
@pytest.mark.parametrize("path", ["/", "/data"])
def test_another_host_is_refused(folder: Path, host: str, path: str) -> None:
    with served(folder) as server:
        status, _, body = ask(server, path, host=host)
        assert status == 421 and b"Depth routing" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LOCALHOST", "[::1]:80", "[::1]"])
def test_every_name_of_this_machine_is_allowed(folder: Path, host: str) -> None:
    with served(folder) as server:
        assert ask(server, "/data", host=host)[0] == 200


def test_the_headers_forbid_what_the_page_does_not_need(folder: Path) -> None:
    with served(folder) as server:
        for path in ("/", "/data", "/watch.js", "/watch.css", "/nothing"):
            _, headers, _ = ask(server, path)
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and "Access-Control-Allow-Origin" not in headers


def test_what_is_not_there_is_not_found(folder: Path) -> None:
    with served(folder) as server:
        for path in ("/../plan.json", "/plan.json", "/%2e%2e/plan.json", "/runs"):
            assert ask(server, path)[0] == 404
        assert ask(server, "/data?have=1.2")[0] == ask(server, "/data?have=1.-2.3")[0] == ask(server, "/data?have=x")[0] == 400


def test_head_is_get_without_a_body(folder: Path) -> None:
    with served(folder) as server:
        status, headers, body = ask(server, "/watch.js", "HEAD")
        assert status == 200 and body == b"" and int(headers["Content-Length"]) == len(ask(server, "/watch.js")[2]) > 1000


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    here = Path(watch_feed.__file__).parent
    for name in ("watch.html", "watch.css", "watch.js"):
        text = (here / name).read_text().replace('"http://www.w3.org/2000/svg"', "")
        assert "http:" not in text and "https:" not in text and "//cdn" not in text
        assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=") if word in text]


def test_the_first_answer_describes_the_study(folder: Path) -> None:
    answer = Feed(folder).answer("", [])
    study = answer["study"]
    assert [arm["label"] for arm in study["arms"]] == ["PreNorm", "Block AttnRes", "RD-AttnRes"]
    assert [arm["color"] for arm in study["arms"]] == ["var(--arm-0)", "var(--arm-1)", "var(--arm-2)"]
    assert study["comparisons"][0] == {"arm": "rd", "parent": "block"} and study["seeds"] == [0, 1]
    states = {(cell["arm"], cell["seed"]): live["state"] for cell, live in zip(study["cells"], answer["live"]["cells"], strict=True)}
    assert states["prenorm", 0] == "complete" and states["block", 1] == "running" and states["rd", 1] == "waiting"


def test_a_point_is_the_mean_of_the_steps_before_it(folder: Path) -> None:
    losses = [line["loss"] for line in read_json_lines(folder / "runs/prenorm/seed-0/metrics.jsonl")]
    points = Feed(folder).answer("", [])["curves"][0][2]
    assert 100 < len(points) <= POINTS and points[-1][0] == len(losses) == 400
    for step, value in points:
        part = losses[max(0, step - 8) : step]  # a fiftieth of 400 steps
        assert value == pytest.approx(sum(part) / len(part), abs=1e-6)


def test_cells_of_one_length_share_their_steps(folder: Path) -> None:
    curves = [curve[2] for curve in Feed(folder).answer("", [])["curves"]]
    whole, part = [step for step, _ in curves[0]], [step for step, _ in curves[4]]
    assert part and len(part) < len(whole) and part == whole[: len(part)]


def test_only_what_is_new_is_sent(folder: Path) -> None:
    feed = Feed(folder)
    first = feed.answer("", [])
    again = feed.answer(first["plan"], had(first))
    assert again["study"] is None and not any(points or values for _, _, points, _, values in again["curves"])
    path = folder / "runs/block/seed-1/metrics.jsonl"
    with path.open("a") as file:
        for step in range(241, 260):
            file.write(json.dumps({"step": step, "loss": 2.0, "seconds": 0.1}) + "\n")
        file.write('{"step": 260, "loss": ')
    news = feed.answer(first["plan"], had(again))
    fresh = [point for curve in news["curves"] for point in curve[2]]
    assert [step for step, _ in fresh] == list(range(242, 260, 2)) and fresh[-1][1] == 2.0
    with path.open("a") as file:
        file.write('2.0, "seconds": 0.1}\n')
    assert [point[0] for curve in feed.answer(first["plan"], had(news))["curves"] for point in curve[2]] == [260]


@pytest.mark.parametrize("step", [100, 210])  # 210: no evaluation is lost
def test_a_run_that_was_cut_back_is_sent_anew(folder: Path, step: int) -> None:
    feed = Feed(folder)
    first = feed.answer("", [])
    for name in ("metrics", "evaluations"):
        path = folder / f"runs/block/seed-1/{name}.jsonl"
        kept = [line for line in read_json_lines(path) if line["step"] <= step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    changed = feed.answer(first["plan"], had(first))["curves"][4]
    assert changed[0] != first["curves"][4][0] and changed[1] == changed[3] == 0
    assert changed[2][-1][0] == step and changed[4][-1][0] == 50 * (step // 50)
    untouched = feed.answer(first["plan"], had(first))["curves"][0]
    assert untouched[2] == [] and untouched[0] == first["curves"][0][0]


def test_a_large_study_comes_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Feed(folder).answer("", [])
    monkeypatch.setattr(watch_feed, "READ_SECONDS", -1.0)  # never enough time
    feed = Feed(folder)
    piece = feed.answer("", [])
    assert piece["more"] and not any(curve[2] for curve in piece["curves"])
    monkeypatch.setattr(watch_feed, "READ_SECONDS", 10.0)
    rest = feed.answer(piece["plan"], had(piece))
    assert not rest["more"] and [curve[2] for curve in rest["curves"]] == [curve[2] for curve in whole["curves"]]


def test_a_long_run_is_a_few_hundred_points(folder: Path) -> None:
    plan = read_json(folder / "plan.json")
    curve = watch_feed._Curve(folder / "runs/long", 100_000)
    (folder / "runs/long").mkdir()
    with (folder / "runs/long/metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0 + 1 / step}) + "\n" for step in range(1, 20_001))
    curve.read(1e18)
    assert len(curve.points) == 20_000 // 334 and len(json.dumps(curve.points)) < 2000
    assert plan["format"] == 2


def test_a_plan_that_grew_is_described_again(folder: Path, tmp_path: Path, write_study: WriteStudy) -> None:
    feed = Feed(folder)
    first = feed.answer("", [])
    other = write_study(tmp_path / "other", seeds=(0, 1, 2), unfinished={("rd", 2): 0})
    write_json(folder / "plan.json", read_json(other / "plan.json"))
    answer = feed.answer(first["plan"], had(first))
    assert answer["study"]["seeds"] == [0, 1, 2] and len(answer["curves"]) == 9 and answer["plan"] != first["plan"]


def test_a_study_that_has_not_begun(tmp_path: Path, write_study: WriteStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_feed, "REFRESH_SECONDS", 0.0)
    done = write_study(tmp_path / "done", seeds=(0,))
    later = tmp_path / "later"
    later.mkdir()
    shutil.copy(done / "plan.json", later)
    feed = Feed(later)
    first = feed.answer("", [])
    assert {cell["state"] for cell in first["live"]["cells"]} == {"waiting"} and not first["live"]["running"]
    shutil.copytree(done / "runs", later / "runs")
    answer = feed.answer(first["plan"], had(first))
    assert all(curve[2] and curve[4] for curve in answer["curves"])


def test_a_plan_that_is_gone_is_said_and_not_fatal(folder: Path) -> None:
    with served(folder) as server:
        plan = (folder / "plan.json").read_text()
        (folder / "plan.json").unlink()
        status, _, body = ask(server, "/data")
        assert status == 503 and "holds no plan.json" in json.loads(body)["error"]
        (folder / "plan.json").write_text(plan)
        assert ask(server, "/data")[0] == 200


def test_nothing_is_written(folder: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}

    before = state()
    with served(folder) as server:
        ask(server)
        ask(server, "/data")
    assert state() == before


def test_a_folder_without_a_study_and_a_port_that_is_taken_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a study folder"):
        WatchServer(tmp_path)
    with pytest.raises(RequestError, match="65536"):
        WatchServer(folder, 65536)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(RequestError, match="is in use"):
        WatchServer(folder, other.getsockname()[1])


def test_the_command_serves_until_it_is_interrupted(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "depthroute", "watch", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        port = int(said.split("127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/")
        assert b"watch.js" in connection.getresponse().read()
        connection.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and errors == ""
    finally:
        process.kill()
        process.communicate()
