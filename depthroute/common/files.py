"""Files that are either there and whole, or not there: atomic writes, JSON, and JSON lines."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from depthroute.common.errors import FailureError, RequestError


def cache_folder() -> Path:
    """Where files that can be made again are kept: `depthroute` in XDG_CACHE_HOME or ~/.cache, in the temporary folder without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG base directory specification: a relative path is to be ignored.
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "depthroute"
    except RuntimeError:  # neither HOME nor an entry for the user, as in a container under a made-up id
        return Path(tempfile.gettempdir(), f"depthroute-{os.getuid()}")


@contextmanager
def explain_os_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn the operating system's refusals into one sentence that names the path and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FailureError(f"the disk is full while {doing} {path}; free some space and run the same command again.") from error
        if error.errno == errno.EFBIG:
            limit = "raise the limit (ulimit -f) or choose another disk"
            raise FailureError(f"{path} would be larger than a file may be here; {limit}.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise FailureError(f"no permission while {doing} {path}; choose a folder you can write to.") from error
        raise


def refuse_filled(path: Path) -> None:
    """Raise RequestError where `path` is there and no empty folder, so that `new_folder` could not become it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(f"{path} is there already and no empty folder; choose another one.")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that becomes it when the context ends well, then on the disk as a whole, and is removed otherwise.

    What kills left of earlier ones for the same `path` is removed first; a process that is alive holds a lock on its own.

    Raises:
        RequestError: `path` is there already and no empty folder.
        FailureError: the disk is full, or the folder cannot be written.
    """
    refuse_filled(path)
    with explain_os_errors(path, "writing"), ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = _locked_folder(path, stack)
        try:
            folder.chmod(0o755)  # mkdtemp makes private folders; these are meant to be read
            yield folder
            for file in folder.rglob("*"):
                sync(file)
            sync(folder)
            folder.rename(path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sync(path.parent)


def _locked_folder(path: Path, stack: ExitStack) -> Path:
    """A temporary folder beside `path`, locked until `stack` closes, after those without a living process are removed."""
    prefix = f".{path.name}.new-"
    with ExitStack() as brief:
        # Of the parent: nobody may take a folder for a left one between its making and its lock.
        if _try_lock(path.parent, brief, wait=True):
            for left in path.parent.glob(f"{glob.escape(prefix)}????????"):
                with ExitStack() as held:
                    if left.is_dir() and not left.is_symlink() and _try_lock(left, held):
                        shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
        _try_lock(folder, stack)
    return folder


def _try_lock(folder: Path, stack: ExitStack, *, wait: bool = False) -> bool:
    """Lock a folder until `stack` closes. False where another process holds it, or the file system locks no folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def sync(path: Path) -> None:
    """Hand a file, or what a folder lists, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def waiting_lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; where another process holds it, call `waiting` and wait. The system releases it however a process ends."""
    with explain_os_errors(path, "writing"):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` when the context ends well: a reader, or a crash at any moment, sees the old file or the new."""
    with explain_os_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # mkstemp makes private files; these are meant to be read
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, atomically (`replaced`)."""
    with replaced(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: they are not JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read one JSON file; a missing or broken one is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequestError(f"{path} does not exist.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FailureError(f"{path} is not valid JSON ({error}); it was cut short or changed by hand.") from error


def read_json_lines(path: Path) -> list[Any]:
    """Read a file of one JSON value a line. A last line cut short by a crash is left out; a broken one elsewhere is named."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")  # bytes: the cut may go through a character
    values = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise FailureError(f"{path} line {number} is not valid JSON ({error}).") from error
    return values
