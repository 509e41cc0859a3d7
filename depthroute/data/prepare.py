"""From documents to token shards: the directory, what it holds already, and who may fill it. `shard` does the work."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import explain_os_errors, read_json, waiting_lock, write_json
from depthroute.common.processors import usable_processors
from depthroute.data.config import PrepareConfig
from depthroute.data.corpus import ContentHash, Corpus, document_digest
from depthroute.data.fill import Filling, Report, ShowProgress
from depthroute.data.groups import stamps
from depthroute.data.journal import WORK
from depthroute.data.manifest import LOCK, MANIFEST, SOURCE, Manifest, read_manifest
from depthroute.data.shards import check_files
from depthroute.data.split import SPLITS
from depthroute.data.tokenizer import TextTokenizer, ready_tokenizer
from depthroute.data.work import open_corpus


def prepare(
    config: PrepareConfig,
    directory: Path,
    *,
    workers: int | None = None,
    report: Report | None = None,
    progress: ShowProgress | None = None,
) -> Manifest:
    """Fill `directory` with token shards, a tokenizer and a manifest, or return the manifest at once if it is already filled from the same
    configuration and sources. However a call ends, the next one goes on where it was, and the files come out the same, byte for byte. Two
    processes may call it at the same time: one works, the other waits.

    Args:
        workers: how many processes read and tokenize beside each other, of about 0.3 GB each; fewer where there is less to do. None: one
            for every processor that may be used.
        report: called with a line about what is being done, a few times in all.
        progress: called with how far the work has come, every few seconds.

    Raises:
        RequestError: the directory was prepared with another configuration or from other sources, or is not empty and not ours; there are
            no documents, or none for training, for the tokenizer or for validation; or a source or the tokenizer is refused (see
            `FileCorpus`, `HubCorpus`, `ready_tokenizer`).
        FailureError: a source or the directory's files are damaged, the disk is full, or a worker was killed.
    """
    tell: Report = report or (lambda line: None)
    if workers is not None and workers < 1:
        raise RequestError(f"workers cannot be {workers}; it takes 1 or more.")
    corpora = [open_corpus(source, config, report=tell) for source in config.sources]
    ready = None if config.tokenizer is None else ready_tokenizer(Path(config.tokenizer), config.end_of_document, config.begin_of_document)
    if directory.exists() and not directory.is_dir():
        raise RequestError(f"{directory} is a file; give the path of a directory.")
    with explain_os_errors(directory, "creating"):
        directory.mkdir(parents=True, exist_ok=True)
    if (directory / MANIFEST).exists():  # without the lock, so that a directory nobody may write to can be used
        return _existing(config, corpora, ready, directory, tell)
    _refuse_foreign(directory)  # and leave no lock in it
    with waiting_lock(directory / LOCK, lambda: tell(f"another process is preparing {directory}; waiting for it")):
        if (directory / MANIFEST).exists():
            return _existing(config, corpora, ready, directory, tell)
        _refuse_foreign(directory)
        filling = Filling(config, corpora, ready, directory, workers or usable_processors(), tell, progress or (lambda moment: None))
        return filling.run()


def _refuse_foreign(directory: Path) -> None:
    begun = any((directory / name).exists() for name in (MANIFEST, f"{WORK}/plan.json"))
    if not begun and any(not path.name.startswith(".") for path in directory.iterdir()):
        raise RequestError(f"{directory} is not empty and holds no prepared data; give an empty or a new directory.")


def _existing(config: PrepareConfig, corpora: list[Corpus], ready: TextTokenizer | None, directory: Path, tell: Report) -> Manifest:
    manifest = read_manifest(directory)
    before, now = (dict(_fields(to_json(settings))) for settings in (manifest.prepare, config))
    # The same documents may have moved, and so may a tokenizer: the hashes below decide about both, not their paths.
    moved = {name for name in now.keys() & before.keys() if name.startswith("sources[") and name.endswith("].path")}
    if ready is not None and manifest.prepare.tokenizer is not None:
        moved |= {"tokenizer", "end_of_document", "begin_of_document"}
        before_it = manifest.tokenizer.sha256, manifest.end, manifest.begin
        if (hashlib.sha256(ready.file).hexdigest(), ready.end, ready.begin) != before_it:
            raise RequestError(
                f"{directory} was prepared with another tokenizer ({manifest.prepare.tokenizer}, {manifest.tokenizer.sha256[:12]}, end "
                f"{manifest.end}{'' if manifest.begin is None else f', begin {manifest.begin}'}); give another directory, or delete this "
                "one."
            )
    for name in {**now, **before}:
        if name not in moved and before.get(name) != now.get(name):
            raise RequestError(
                f"{directory} was prepared with {name} {before.get(name)!r}, not {now.get(name)!r}; give another directory, or delete this "
                "one."
            )
    check_files(directory, manifest, hashes=False)
    shutil.rmtree(directory / WORK, ignore_errors=True)  # of a call that ended between its manifest and its end
    found = to_json(stamps(corpora))
    path = directory / SOURCE
    if not path.exists() or read_json(path) != found:
        tell("the source's files have changed since the data were prepared; comparing their content")
        content, counts = ContentHash(), []
        for corpus in corpora:
            counts.append(0)
            for part in corpus.parts(Counter()):
                for document in corpus.documents(part, Counter()):
                    content.add(document_digest(document))
                    counts[-1] += 1
        listed = [sum(getattr(source.splits, split).documents for split in SPLITS) for source in manifest.sources]
        if content.hexdigest() != manifest.corpus.content_hash or (listed and listed != counts):
            raise RequestError(
                f"{directory} was prepared from another corpus ({manifest.corpus.name}, content {manifest.corpus.content_hash[:12]}, now "
                f"{content.hexdigest()[:12]}); give another directory, or delete this one."
            )
        with suppress(FailureError):  # it only saves the next call the comparison
            write_json(path, found)
    return manifest


def _fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration in JSON by their dotted names."""
    entries: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        entries = [(f"{prefix}.{name}" if prefix else name, inner) for name, inner in value.items()]
    elif isinstance(value, list):
        entries = [(f"{prefix}[{number}]", inner) for number, inner in enumerate(value)]
    else:
        yield prefix, value
    for name, inner in entries:
        yield from _fields(inner, name)
