"""What a preparation has done so far, kept in the folder `.work` of its directory, so that a later call goes on from there.

    plan.json      what is being prepared, from what; another plan starts over
    seen.json      what the first pass found, when it is complete
    words/         the words of a group of parts, one file each, while the first pass goes on
    journal.json   how much of the shards counts, and what was found beside them; what they hold behind it was not finished
    parts-.../     what the workers of one call write
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from depthroute.common.config import to_json
from depthroute.common.files import explain_os_errors, read_json, write_json
from depthroute.data.manifest import SplitFacts
from depthroute.data.split import HASH_RANGE, SPLITS

WORK = ".work"
NOTHING = SplitFacts(documents=0, tokens=0, bytes=0)


@dataclass(kw_only=True)
class Seen:
    """What the first pass, which trains the tokenizer, found."""

    documents: Counter[str] = field(default_factory=Counter)
    """By split."""
    skipped: Counter[str] = field(default_factory=Counter)
    lowest: int = HASH_RANGE
    """The lowest hash that decides a split."""
    sampled_documents: int = 0
    sampled_bytes: int = 0
    words_left_out: int = 0
    tokenizer: str = ""
    """The SHA-256 of the tokenizer that was trained from it."""

    def add(self, found: dict[str, Any]) -> None:
        self.documents.update(found["documents"])
        self.skipped.update(found["skipped"])
        self.lowest = min(self.lowest, found["lowest"])
        self.sampled_documents += found["sampled_documents"]
        self.sampled_bytes += found["sampled_bytes"]
        self.words_left_out += found["words_left_out"]


@dataclass(kw_only=True)
class Done:
    """How far the shards are, and what is known of their documents beside them."""

    groups: int = 0
    """Groups of parts whose documents are in the shards."""
    content: str = "00" * 32
    """The content hash of their documents."""
    lowest: int = HASH_RANGE
    skipped: Counter[str] = field(default_factory=Counter)
    splits: list[dict[str, int]] = field(default_factory=lambda: [asdict(NOTHING) for _ in SPLITS])
    """Of all sources, as the fields of `SplitFacts`, in the order of `SPLITS`."""
    sources: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    """The same of each source, by its number."""
    files: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of the shards as far as they count, by name."""


class Journal:
    """The folder of a plan, a context. What an earlier call left of the same plan is kept, all else is removed. `parts` is a folder for
    this call alone, which goes with it: a worker that outlives an earlier call has nowhere to write.

    Raises:
        FailureError: the folder cannot be written, or the disk is full.
    """

    def __init__(self, directory: Path, plan: Any) -> None:
        self.folder = directory / WORK
        path = self.folder / "plan.json"
        if self.folder.exists() and not (path.exists() and read_json(path) == plan):
            self._clear()
        with explain_os_errors(self.folder, "writing"):
            self.words.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("parts-*"):
                shutil.rmtree(left, ignore_errors=True)
            self.parts = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"parts-{os.getpid()}-"))
        write_json(path, plan)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)

    def _clear(self) -> None:
        """Remove all but the plan, by which a directory is known as begun, until the next one takes its place."""
        with explain_os_errors(self.folder, "writing"):
            # The journal first: nothing counts that it does not name.
            for path in sorted(self.folder.iterdir(), key=lambda path: path.name != "journal.json"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != "plan.json":
                    path.unlink()

    def start_over(self) -> None:
        """Forget what was found and done."""
        for name in ("seen.json", "journal.json"):
            (self.folder / name).unlink(missing_ok=True)
        with explain_os_errors(self.folder, "writing"):
            self.words.mkdir(exist_ok=True)

    @property
    def words(self) -> Path:
        return self.folder / "words"

    def seen(self) -> Seen | None:
        """What a first pass that was completed found."""
        path = self.folder / "seen.json"
        if not path.exists():
            return None
        value = read_json(path)
        found = Seen(tokenizer=value["tokenizer"])
        found.add(value)
        return found

    def note_seen(self, seen: Seen) -> None:
        write_json(self.folder / "seen.json", to_json(seen))
        shutil.rmtree(self.words, ignore_errors=True)

    def done(self) -> Done:
        path = self.folder / "journal.json"
        if not path.exists():
            return Done()
        value = read_json(path)
        return Done(**{**value, "skipped": Counter(value["skipped"])})

    def note_done(self, done: Done) -> None:
        write_json(self.folder / "journal.json", to_json(done))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
