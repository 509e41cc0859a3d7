"""A preparation as a program of its own: its seconds, its memory, and the tokenizer alone beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from depthroute.data.manifest import read_manifest

SETTINGS = ("--vocabulary", "32768", "--sample-one-in", "20", "--validation-share", "0.005", "--test-share", "0.005")
"""Those of the Role-Decoupled paper."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A preparation: seconds in which it ran, the same until the tokenizer was there, and the most memory of its processes together."""

    text_bytes: int
    seconds: float
    tokenizer_seconds: float
    memory: int
    out: Path


def command(source: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "depthroute", "data", "prepare", str(source), "--out", str(out), *SETTINGS, *options]


def prepared(source: Path, out: Path, *, every: float | None = None, pause: Callable[[], None] = lambda: None) -> Run:
    """Prepare `source`. After every so many seconds all its processes stand still while `pause` is called.

    Memory is looked at five times a second: of all processes the proportional share of pages (PSS), so that shared ones count once.
    """
    stood_still = had_stood_still = tokenizer_at = 0.0
    with subprocess.Popen(command(source, out), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        begun = time.perf_counter()
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.extend(line.decode() for line in process.stdout or ()))
        reader.start()
        memory, next_pause = 0, begun + (every or float("inf"))
        try:
            while process.poll() is None:
                memory = max(memory, sum(map(_memory, tree(process.pid))))
                if not tokenizer_at and any(line.startswith("tokenizing with") for line in printed):
                    tokenizer_at, had_stood_still = time.perf_counter(), stood_still
                if time.perf_counter() >= next_pause:
                    os.killpg(process.pid, signal.SIGSTOP)
                    stopped = time.perf_counter()
                    pause()
                    stood_still += time.perf_counter() - stopped
                    os.killpg(process.pid, signal.SIGCONT)
                    next_pause = time.perf_counter() + (every or 0)
                time.sleep(0.2)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # it would stand still, or go on alone
            raise
        seconds = time.perf_counter() - begun - stood_still
        reader.join()
    if process.returncode:
        raise RuntimeError("".join(printed))
    text_bytes = sum(facts.bytes for facts in vars(read_manifest(out).splits).values())
    return Run(text_bytes=text_bytes, seconds=seconds, tokenizer_seconds=tokenizer_at - begun - had_stood_still, memory=memory, out=out)


def invented_words(number: int) -> Iterator[tuple[str, int]]:
    """Different words and how often each was counted, by Zipf's law: more than a sample of 2.3 GB of web pages has."""
    generator, letters = np.random.default_rng(4), np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    seen: set[str] = set()
    while len(seen) < number:
        word = "\u0120" + "".join(letters[np.minimum(generator.exponential(6.0, size=generator.integers(3, 13)).astype(int), 25)])
        if word not in seen:
            seen.add(word)
            yield word, number // len(seen) + 1


def training_memory(words: Path) -> int:
    """The most memory, in bytes, of the process that trains a tokenizer from the counts in a folder, as a preparation does."""
    job = {"kind": "train", "words": [str(path) for path in words.glob("*.words")], "scratch": str(words), "vocabulary": 32768}
    code = f"from depthroute.data.work import work; work({job | {'out': str(words / 'tokenizer.json')}!r})"
    memory = 0
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while process.poll() is None:
            memory = max(memory, _memory(process.pid))
            time.sleep(0.2)
    if process.returncode:
        raise RuntimeError(f"training ended with {process.returncode}")
    return memory


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    found = [root]
    for process in found:
        with suppress(OSError):
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def _memory(process: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


class Raw:
    """The tokenizer of `tokenizers` alone: texts in memory, on all cores."""

    def __init__(self, texts: Path, size: float) -> None:
        self.rates: list[float] = []
        self.bytes, self.seconds, self._size, self._groups = 0, 0.0, size, self._read(texts)

    def encode(self, file: Path) -> None:
        """The next slice of the texts."""
        from tokenizers import Tokenizer

        batches: list[list[str]] = []
        size = 0
        while size < self._size:
            batches.append(next(self._groups))
            size += sum(len(text.encode("utf-8")) for text in batches[-1])
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.encode_batch(batches[0])  # fills its cache
        begun = time.perf_counter()
        for texts in batches:
            tokenizer.encode_batch(texts)
        seconds = time.perf_counter() - begun
        self.bytes, self.seconds = self.bytes + size, self.seconds + seconds
        self.rates.append(size / seconds)

    @staticmethod
    def _read(texts: Path) -> Iterator[list[str]]:
        for path in cycle(sorted(texts.iterdir())):
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=["text"])["text"].to_pylist()
