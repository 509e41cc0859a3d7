"""Data at the papers' scale: preparing a stand-in for FineWeb-Edu (rate, memory, kills), opening, reading, checking what was prepared.

Rates are ratios to what the same machine does at the same time: a preparation is stopped (SIGSTOP) every now and then, and the tokenizer
alone encodes a slice of the same text until it goes on. Only the seconds in which it ran count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fineweb import ROW_GROUP, SCHEMA, WordSource, default_source, groups_of, row_group, write_standin
from benchmarks.preparing import Raw, command, invented_words, prepared, training_memory
from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.data.loader import Loader
from depthroute.data.manifest import Manifest, read_manifest
from depthroute.data.shards import DTYPES, INDEX_DTYPE, file_facts, ids_file, index_file, token_file
from depthroute.data.word_counts import write_counts

TEN_BILLION_TOKENS = 45.4e9
"""Bytes of text in sample-10BT."""
SLICE = 60e6
"""Bytes of text that the tokenizer alone encodes at a time, in calls of a thousand documents."""
LONG_DOCUMENT, TO_KILL, TO_VERIFY, SMALL = 100e6, 100e6, 4e9, 20e6
"""Bytes: of one document, of the texts that are prepared under kills, of the shards that are checked, of the texts that these begin as.
The shards are a fifth of ten billion tokens: below a GB the documents that are decoded for a sample weigh more than the reading."""
MANY_WORDS = 1_500_000
KILLS = 10
LOADED, STEP_SEQUENCES, CONTEXT = 32, 4, 1_024
OPEN = """
import sys, time
from pathlib import Path
from depthroute.data import TokenDataset
from depthroute.data.loader import Loader
begun = time.perf_counter()
data = TokenDataset.open(Path(sys.argv[1]))
Loader(data, context=1024, sequences=32, seed=0).batch_at(0)
print(time.perf_counter() - begun)
"""


class Place:
    """A folder, the size of the large stand-in, and what several parts need, made once."""

    def __init__(self, folder: Path, gigabytes: float) -> None:
        self.folder, self.text_bytes = folder, gigabytes * 1e9

    @cached_property
    def source(self) -> WordSource:
        return default_source()

    @cached_property
    def small(self) -> Path:
        """A small prepared folder."""
        write_standin(self.folder / "small-text", text_bytes=SMALL, files=1, source=self.source)
        return prepared(self.folder / "small-text", self.folder / "small").out


def prepare_rows(place: Place) -> list[Row]:
    quarter_text, text = place.folder / "quarter-text", place.folder / "text"
    write_standin(quarter_text, text_bytes=place.text_bytes / 4, seed=1, source=place.source)
    write_standin(text, text_bytes=place.text_bytes, source=place.source)
    quarter = prepared(quarter_text, place.folder / "quarter")
    raw = Raw(text, min(SLICE, place.text_bytes / 8))

    def pause() -> None:
        own = place.folder / "whole" / "tokenizer.json"
        raw.encode(own if own.exists() else quarter.out / "tokenizer.json")

    whole = prepared(text, place.folder / "whole", every=max(5.0, place.text_bytes / 1e9 * 15), pause=pause)
    raw_rate, rate = raw.bytes / raw.seconds, whole.text_bytes / whole.seconds
    # What grows with the text, and what does not: most of the tokenizer's training.
    per_byte = (whole.seconds - quarter.seconds) / (whole.text_bytes - quarter.text_bytes)
    large = whole.seconds + (TEN_BILLION_TOKENS - whole.text_bytes) * per_byte
    size = f"{whole.text_bytes / 1e9:.2g} GB of text"
    return [
        Row(f"preparing {size} over its tokenizer alone, rate", rate / raw_rate, 0.85, at_most=False, unit="x"),
        Row("same, over the median of the slices (context)", rate / statistics.median(raw.rates), unit="x"),
        Row("rate of the preparation (context)", rate / 1e6, unit=" MB/s"),
        Row(f"rate of the tokenizer alone, {len(raw.rates)} slices (context)", raw_rate / 1e6, unit=" MB/s"),
        Row("share of the preparation until the tokenizer was trained (context)", whole.tokenizer_seconds / whole.seconds),
        Row("preparing 45.4 GB of text over its tokenizer alone, rate, extrapolated", TEN_BILLION_TOKENS / large / raw_rate, unit="x"),
        Row("preparing 45.4 GB of text, extrapolated", large / 3600, unit=" h"),
        Row(f"memory of all processes, preparing {size}, at its peak", whole.memory / 1e9, 1.5, unit=" GB"),
        Row("the same over that of a quarter of the text", whole.memory / quarter.memory, unit="x"),
    ]


def shape_rows(place: Place) -> list[Row]:
    """Memory where a file has one row group, and where a document is very long."""
    size = place.text_bytes / 4
    giant, long = place.folder / "giant-text", place.folder / "long-text"
    giant.mkdir()
    long.mkdir()
    with pq.ParquetWriter(giant / "000.parquet", SCHEMA, compression="snappy") as writer:
        table = pa.concat_tables(groups_of(place.source, seed=2, file=0, documents=round(size / 4_751)))
        writer.write_table(table, row_group_size=table.num_rows)
    generator, length = np.random.default_rng(3), min(LONG_DOCUMENT, place.text_bytes)
    table = row_group(place.source, generator, ROW_GROUP)
    document = place.source.texts(generator, np.array([length])).to_pylist()
    texts = pa.array([*table["text"].to_pylist()[:-1], *document])
    pq.write_table(table.set_column(0, "text", texts), long / "000.parquet", compression="snappy")
    runs = {
        f"one row group of {size / 1e9:.2g} GB of text": prepared(giant, place.folder / "giant"),
        f"a document of {length / 1e6:.3g} MB": prepared(long, place.folder / "long"),
    }
    trained = place.folder / "words"
    trained.mkdir()
    write_counts(trained / "many.words", sorted(invented_words(MANY_WORDS)))
    memory = {f"preparing {name}": run.memory for name, run in runs.items()}
    memory[f"training a tokenizer on {MANY_WORDS / 1e6:g} million words"] = training_memory(trained)
    return [Row(f"memory of all processes, {name}, at its peak", found / 1e9, 1.5, unit=" GB") for name, found in memory.items()]


def loader_rows(place: Place) -> list[Row]:
    """Against a step of shape S with 4 sequences: what the loop waits for them, and what 32 take to be made against 8 such steps."""
    from benchmarks.step import CASES, step_of
    from depthroute.cli.options import changes
    from depthroute.data import TokenDataset
    from depthroute.train.devices import keep_freed_memory

    keep_freed_memory()
    data = TokenDataset.open(sparse(place.small, place.folder / "loaded", 10**10))
    step = step_of("rd-s", "rd", changes(CASES["shape-s"].settings))
    step()
    waited, steps, made = [], [], []
    with Loader(data, context=CONTEXT, sequences=STEP_SEQUENCES, seed=0) as loader:
        batches = iter(loader)
        next(batches)
        for _ in range(5):
            begun = time.perf_counter()
            step()
            done = time.perf_counter()
            next(batches)
            waited.append(time.perf_counter() - done)
            steps.append(done - begun)
    large = Loader(data, context=CONTEXT, sequences=LOADED, seed=0)
    for number in range(50):
        begun = time.perf_counter()
        large.batch_at(number)
        made.append(time.perf_counter() - begun)
    a_step, a_batch = statistics.median(steps), statistics.median(made)
    return [
        Row("making a batch of 32 x 1024 over a step of shape S on it", a_batch / (a_step * LOADED / STEP_SEQUENCES), 0.01, unit="x"),
        Row("waiting for the loader over a step of shape S, 4 x 1024", statistics.median(waited) / a_step, 0.01, unit="x"),
        Row("making a batch of 32 x 1024 (context)", a_batch * 1e3, unit=" ms"),
        Row("a step of shape S, 4 x 1024 (context)", a_step, unit=" s"),
    ]


def open_rows(place: Place) -> list[Row]:
    folder = sparse(place.small, place.folder / "opened", 10**10)
    seconds = [float(subprocess.check_output([sys.executable, "-c", OPEN, str(folder)])) for _ in range(5)]
    return [Row("opening 10 billion tokens and making the first batch", statistics.median(seconds), 0.2, unit=" s")]


def verify_rows(place: Place) -> list[Row]:
    from depthroute.data.statistics import statistics_of
    from depthroute.data.verify import verify

    folder = repeated(place.small, place.folder / "verified", TO_VERIFY)
    files = [folder / facts.name for facts in read_manifest(folder).files]
    size = sum(path.stat().st_size for path in files)

    def hash_all() -> None:
        for path in files:
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")

    def prove() -> None:
        failures = verify(folder).failures
        assert not failures, failures

    seconds = interleaved({"hash": hash_all, "verify": prove, "stats": lambda: statistics_of(folder)}, repeats=5, warm_up=1)
    return [
        Row("verifying over hashing, rate (median of pairs)", 1 / ratios(seconds, "verify", "hash")[1], 0.8, at_most=False, unit="x"),
        Row(f"verifying {size / 1e6:.0f} MB of shards (context)", size / statistics.median(seconds["verify"]) / 1e6, unit=" MB/s"),
        Row("hashing (context)", size / statistics.median(seconds["hash"]) / 1e6, unit=" MB/s"),
        Row("statistics (context)", size / statistics.median(seconds["stats"]) / 1e6, unit=" MB/s"),
    ]


def kill_rows(place: Place) -> list[Row]:
    """Files that differ between one worker, two, and preparations that are killed again and again."""
    source = place.folder / "killed-text"
    write_standin(source, text_bytes=min(TO_KILL, place.text_bytes), files=3, source=place.source)
    begun = time.perf_counter()
    alone, *others = (_finished(source, place.folder / f"workers-{workers}", workers) for workers in (1, 2))
    seconds = (time.perf_counter() - begun) / 3
    kills = 0
    while kills < KILLS:
        others.append(place.folder / f"killed-{kills}")
        while kills < KILLS:
            with subprocess.Popen(command(source, others[-1]), start_new_session=True, stderr=subprocess.DEVNULL) as process:
                time.sleep(random.random() * seconds / 2)
                finished = process.poll() is not None
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if finished:
                break
            kills += 1
        _finished(source, others[-1], 2)
    expected = _contents(alone)
    differing = sum(len(dict(expected.items() ^ _contents(other).items())) for other in others)
    return [
        Row(f"files that differ after {kills} kills, or with other workers", differing, 0),
        Row("preparations that were compared (context)", 1 + len(others)),
    ]


def _finished(source: Path, out: Path, workers: int) -> Path:
    done = subprocess.run(command(source, out, "--workers", str(workers)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{out}: {done.stderr}")
    return out


def _contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def sparse(base: Path, folder: Path, tokens: int) -> Path:
    """A prepared folder with so many training tokens, all of them holes in its file, in documents of a mean length."""
    length = 1_035
    documents = tokens // length
    folder.mkdir()
    with (folder / token_file("train")).open("wb") as file:
        file.truncate(documents * length * 2)
    with (folder / ids_file("train")).open("wb") as file:
        file.truncate(documents * 8)
    (np.arange(documents + 1, dtype=INDEX_DTYPE) * length).tofile(folder / index_file("train"))
    return _described(base, folder, documents=documents, tokens=documents * length, hashes=False)


def repeated(base: Path, folder: Path, size: float) -> Path:
    """A prepared folder whose training documents are those of another one again and again, until its tokens have `size` bytes."""
    folder.mkdir()
    facts, dtype = read_manifest(base).splits.train, DTYPES[read_manifest(base).dtype]
    times = -(-int(size) // (facts.tokens * dtype.itemsize))
    for name in (token_file("train"), ids_file("train")):
        data = (base / name).read_bytes()
        with (folder / name).open("wb") as file:
            for _ in range(times):
                file.write(data)
    offsets = np.fromfile(base / index_file("train"), INDEX_DTYPE)
    starts = np.arange(times, dtype=INDEX_DTYPE)[:, None] * facts.tokens + offsets[:-1]
    np.append(starts, times * facts.tokens).astype(INDEX_DTYPE).tofile(folder / index_file("train"))
    return _described(base, folder, documents=times * facts.documents, tokens=times * facts.tokens, hashes=True)


def _described(base: Path, folder: Path, *, documents: int, tokens: int, hashes: bool) -> Path:
    """Take everything but the training split from another folder, and write a manifest."""
    old: Manifest = read_manifest(base)
    size = round(tokens * old.bytes_per_token)
    splits = dataclasses.replace(old.splits, train=dataclasses.replace(old.splits.train, documents=documents, tokens=tokens, bytes=size))
    files = []
    for known in old.files:
        path = folder / known.name
        if not path.exists():
            path.symlink_to(base / known.name)
        files.append(file_facts(path) if hashes else dataclasses.replace(known, bytes=path.stat().st_size))
    sources = tuple(dataclasses.replace(source, splits=splits) for source in old.sources)  # of which there is one
    found = dataclasses.replace(old, splits=splits, sources=sources, files=tuple(files), bytes_per_token=size / tokens)
    found.write(folder)
    return folder


PARTS = {
    "prepare": prepare_rows,
    "shapes": shape_rows,
    "loader": loader_rows,
    "open": open_rows,
    "verify": verify_rows,
    "kill": kill_rows,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=list(PARTS), action="append", help="only this part; may be given more than once")
    options.add_argument("--gigabytes", type=float, default=2.0, help="10^9 bytes of text that are prepared; other sizes are for a try")
    options.add_argument("--folder", type=Path, help="where the files are made, for a while; default: the system's temporary folder")
    given = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that preparations and files do not stay behind
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        place = Place(Path(folder), given.gigabytes)
        for name in given.part or PARTS:
            rows += PARTS[name](place)
    finish(rows, given)


if __name__ == "__main__":
    main()
