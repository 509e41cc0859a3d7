"""The default corpus as token shards, prepared once for all studies of a user and linked into the folder of each.

A prepared folder in the cache is named after the content of the corpus and the configuration. A study's own folder gets hard links to its
files, or copies where it lies on another disk, so that it holds its data and can be moved. The links share their content: nothing in this
library writes into an existing shard, and the files are made read-only against accidents.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError
from depthroute.common.files import cache_folder, explain_os_errors, waiting_lock
from depthroute.data.config import DOCSTRINGS, PrepareConfig, Source
from depthroute.data.corpus import docstring_corpus
from depthroute.data.fill import Report
from depthroute.data.manifest import MANIFEST, SOURCE, Manifest, read_manifest
from depthroute.data.prepare import prepare
from depthroute.data.shards import check_files

READ_ONLY = 0o444


def prepare_shared(config: PrepareConfig, directory: Path, *, cache: Path | None = None, report: Report | None = None) -> Manifest:
    """`prepare`, which works only once for the default corpus in one configuration, whatever the number of directories.

    Other sources, and directories that hold something already, go to `prepare` as they are. So does everything where the cache cannot be
    written.

    Args:
        cache: where prepared corpora are kept. None: `data` in the user's cache folder.

    Raises:
        RequestError, FailureError: what `prepare` raises.
    """
    tell: Report = report or (lambda line: None)
    if config.sources == (Source(path=DOCSTRINGS),) and not _holds_something(directory):
        try:
            shared = _shared(config, cache or cache_folder() / "data", tell)
        except (OSError, FailureError) as error:
            tell(f"the cache of prepared data is not used: {error}")
        else:
            _link(shared, directory)
    return prepare(config, directory, report=report)


def _holds_something(directory: Path) -> bool:
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def _shared(config: PrepareConfig, cache: Path, tell: Report) -> Path:
    """The prepared folder in the cache, whole and verified by its hashes; made where it is not there or damaged."""
    corpus = docstring_corpus(report=tell)
    identity = {"corpus": corpus.content_hash, "prepare": to_json(config)}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode("utf-8")).hexdigest()[:24]
    target = cache / name
    with explain_os_errors(cache, "creating"):
        cache.mkdir(parents=True, exist_ok=True)
    with waiting_lock(cache / f".{name}.lock", lambda: tell("another process is preparing the same data; waiting for it")):
        if _is_whole(target, tell):
            return target
        if target.exists():
            shutil.rmtree(target)
        # A folder of its own that gets its name when it is whole: a disk without working locks then costs time and nothing else.
        made = Path(tempfile.mkdtemp(dir=cache, prefix=f".{name}."))
        try:
            prepare(config, made, report=tell)
            for path in made.iterdir():
                path.chmod(READ_ONLY)
            made.chmod(0o755)  # mkdtemp makes private folders
            with suppress(OSError):  # another process was faster
                made.rename(target)
            if not target.exists():
                raise FailureError(f"{target} could not be made.")
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target


def _is_whole(folder: Path, tell: Report) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    try:
        check_files(folder, read_manifest(folder), hashes=True)
    except FailureError as error:
        tell(f"the cache of prepared data is damaged and is made again: {error}")
        return False
    return True


def _link(shared: Path, directory: Path) -> None:
    """Fill `directory`, which does not exist or is empty, with the files of a prepared folder, all at once."""
    with explain_os_errors(directory, "creating"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
        try:
            made.chmod(0o755)
            names = [SOURCE, MANIFEST, *(facts.name for facts in read_manifest(shared).files)]
            for name in names:
                _link_file(shared / name, made / name)
            with suppress(OSError):  # another process filled it first, and `prepare` looks at what it holds
                made.rename(directory)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _link_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another device, or a file system or owner without hard links
        shutil.copy2(source, target)
