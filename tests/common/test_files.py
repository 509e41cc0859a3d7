"""Files are there and whole, or not there."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import (
    cache_folder,
    explain_os_errors,
    new_folder,
    read_json,
    read_json_lines,
    refuse_filled,
    sha256_of,
    write_bytes,
    write_json,
    write_text,
)


def test_a_file_is_written_into_folders_that_are_made_for_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "value.json"
    write_json(path, {"a": [1, 0.1], "ü": None})
    assert read_json(path) == {"a": [1, 0.1], "ü": None}
    assert path.read_bytes().endswith(b"}\n") and "ü" in path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [child.name for child in path.parent.iterdir()] == ["value.json"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "value.txt"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(FailureError, match=r"the disk is full while writing .*value\.txt; free some space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["value.txt"]


def test_an_interruption_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "value.txt"
    write_text(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_the_new_file_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fsync", "replace"):
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, _name=name, _whole=whole: order.append(_name) or _whole(*given))
    write_bytes(tmp_path / "value", b"\x00\xff")
    assert order == ["fsync", "replace"] and (tmp_path / "value").read_bytes() == b"\x00\xff"


def test_a_new_folder_is_on_the_disk_with_all_it_holds_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def renamed(self: Path, target: Path) -> Path:
        order.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with new_folder(tmp_path / "parent" / "new") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"1")
    named = order.index("rename")
    assert {*order[:named]} == {"inner", "weights", folder.name} and order[named + 1 :] == ["parent"]
    assert [path.name for path in (tmp_path / "parent").iterdir()] == ["new"]


def test_a_new_folder_is_removed_where_its_making_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "new") as folder:
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    refuse_filled(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "file").touch()
    for taken in (tmp_path / "empty", tmp_path / "empty" / "file"):
        for way in (refuse_filled, lambda path: new_folder(path).__enter__()):
            with pytest.raises(RequestError, match="is there already and no empty folder; choose another one"):
                way(taken)


MAKER = """
import sys
from pathlib import Path
from depthroute.common.files import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_kill_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in (".out.new-longer-than-ours", ".out.new-12345678", ".out.backup12", ".out2.new-12345678"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.new-abcdefgh").touch()  # no folder
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path(maker.stdout.readline().strip()) for maker in makers if maker.stdout]
        makers[0].send_signal(signal.SIGKILL)
        makers[0].wait(30)
        assert all((folder / "half").exists() for folder in folders)
        with new_folder(out) as folder:
            assert folder not in folders
            left = {path.name for path in tmp_path.iterdir()} - {folder.name}
        kept = {".out.backup12", ".out2.new-12345678", ".out.new-abcdefgh", ".out.new-longer-than-ours"}
        assert left == {folders[1].name, *kept}
        assert (folders[1] / "half").exists() and not folders[0].exists()
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()


def test_the_hash_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file") == hashlib.sha256(b"abc").hexdigest()


def test_the_cache_folder_is_the_users_or_temporary_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "depthroute"
    for given in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == tmp_path / ".cache" / "depthroute"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() == Path(tempfile.gettempdir()) / f"depthroute-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "depthroute"


def test_no_permission_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(FailureError, match=r"no permission while writing .* choose a folder you can write to"):
        write_text(tmp_path / "locked" / "value", "x")


def test_other_errors_of_the_system_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="odd"), explain_os_errors(tmp_path, "reading"):
        raise OSError(errno.EIO, "odd")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_what_is_not_json_is_not_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "value.json", value)
    assert not (tmp_path / "value.json").exists()


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"missing\.json does not exist"):
        read_json(tmp_path / "missing.json")
    (tmp_path / "cut.json").write_text('{"a": 1')
    with pytest.raises(FailureError, match=r"cut\.json is not valid JSON .* cut short or changed by hand"):
        read_json(tmp_path / "cut.json")
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(FailureError, match=r"bytes\.json is not valid JSON"):
        read_json(tmp_path / "bytes.json")


@pytest.mark.parametrize("cut", [b'{"step": 3, "l', b"{", '{"name": "ü'.encode()[:-1]])
def test_a_last_line_that_a_crash_cut_short_is_left_out(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n\n{"step": 2}\n' + cut)
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]


def test_json_lines(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "missing.jsonl") == []
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": "\u2028"}\n{"a": 2}', encoding="utf-8")
    assert read_json_lines(path) == [{"a": "\u2028"}, {"a": 2}]  # whole without its newline; other line breaks are text
    path.write_bytes(b'{"a": 1}\n{"a": \xff}\n{"a": 3}\n')
    with pytest.raises(FailureError, match=r"lines\.jsonl line 2 is not valid JSON"):
        read_json_lines(path)
