"""The work of a preparation: the words of the sample, the tokenizer, the tokens. Nothing is held: files hold what comes between."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, sha256_of, write_json
from depthroute.data import groups
from depthroute.data.config import PrepareConfig
from depthroute.data.corpus import ContentHash, Corpus
from depthroute.data.groups import groups_of, names_of, stamps
from depthroute.data.journal import NOTHING, Done, Journal, Seen
from depthroute.data.manifest import (
    FORMAT,
    SOURCE,
    TOKENIZER,
    CorpusFacts,
    FileFacts,
    Manifest,
    Marker,
    Skipped,
    SourceFacts,
    SplitFacts,
    Splits,
    TokenizerFacts,
)
from depthroute.data.multi_hop import ANSWER_DISTANCE, MultiHopCorpus
from depthroute.data.progress import Progress
from depthroute.data.shards import ShardWriter, dtype_for, file_facts, read_array
from depthroute.data.split import HASH_RANGE, SPLITS
from depthroute.data.statistics import entropy_nats
from depthroute.data.tokenizer import TextTokenizer, load_tokenizer
from depthroute.data.work import DOCUMENT_ROW, work
from depthroute.data.workers import Job, Result, run_jobs

Report = Callable[[str], None]
ShowProgress = Callable[[Progress], None]
LISTED = 2**14
"""Documents that are entered at once."""
JOURNAL_SECONDS = 5.0
PROGRESS_SECONDS = 1.0


class Filling:
    """One call that fills a directory. It holds the lock of the directory."""

    def __init__(
        self,
        config: PrepareConfig,
        corpora: Sequence[Corpus],
        ready: TextTokenizer | None,
        directory: Path,
        workers: int,
        tell: Report,
        show: ShowProgress,
    ) -> None:
        self.config, self.corpora, self.ready, self.directory, self.tell, self.show = config, corpora, ready, directory, tell, show
        self.left_out: Counter[str] = Counter()
        self.groups = [
            group for number, corpus in enumerate(corpora) for group in groups_of(number, corpus.parts(self.left_out))
        ]
        self.stamps = to_json(stamps(corpora))
        self.total = sum(group.bytes for group in self.groups)
        # A worker takes a second to start: what is small is done here.
        self.processes = max(1, min(workers, len(self.groups), self.total // groups.GROUP_BYTES))
        self.names = names_of(config, corpora)
        self.name = " + ".join(self.names)

    def run(self) -> Manifest:
        ready = self.ready
        made = None if ready is None else [hashlib.sha256(ready.file).hexdigest(), ready.end, ready.begin]
        cut = hashlib.sha256(json.dumps(self.groups).encode("utf-8")).hexdigest()
        plan = {"config": to_json(self.config), "stamps": self.stamps, "tokenizer": made, "groups": cut}
        with Journal(self.directory, plan) as journal:
            write_json(self.directory / SOURCE, self.stamps)
            tokenizer, seen, markers = self._tokenizer(journal)
            return self._filled(journal, tokenizer, seen, markers)

    def _filled(self, journal: Journal, tokenizer: TextTokenizer, seen: Seen, markers: tuple[Marker, ...]) -> Manifest:
        self._refuse_changed()
        used = file_facts(self.directory / TOKENIZER)
        done, files, counts = self._shards(journal, tokenizer, used)
        documents: dict[str, int] = {name: facts["documents"] for name, facts in zip(SPLITS, done.splits, strict=True)}
        self._refuse_empty_splits(documents, done.lowest, done.skipped)
        self._refuse_changed()
        manifest = self._manifest(tokenizer, seen, markers, done, (used, *files), counts)
        manifest.write(self.directory)
        journal.remove()
        self.tell(f"{manifest.splits.train.tokens} training and {manifest.splits.validation.tokens} validation tokens")
        return manifest

    def _tokenizer(self, journal: Journal) -> tuple[TextTokenizer, Seen, tuple[Marker, ...]]:
        """The tokenizer, saved; what its first pass found, if there was one; and the markers of a corpus that brings its own."""
        path, corpus = self.directory / TOKENIZER, self.corpora[0]
        if self.ready is not None:
            self.ready.save(path)
            return self.ready, Seen(), ()
        if isinstance(corpus, MultiHopCorpus):
            tokenizer = corpus.tokenizer()
            tokenizer.save(path)
            return tokenizer, Seen(), tuple(Marker(name=n, ids=ids, distance=ANSWER_DISTANCE) for n, ids in corpus.markers().items())
        seen = journal.seen()
        if seen is None or not path.exists() or sha256_of(path) != seen.tokenizer:
            if seen is not None:
                self.tell(f"{path} is not the tokenizer that was trained; starting over")
                journal.start_over()
            config = self.config
            self.tell(f"training a tokenizer of {config.vocabulary} entries on one training document in {config.sample_one_in}")
            seen = self._words(journal)
            self._refuse_empty_splits(seen.documents, seen.lowest, seen.skipped)
            if seen.sampled_documents == 0:
                raise RequestError(
                    f"none of the {seen.documents['train']} training documents of {self.name} fell into the tokenizer's sample; set "
                    "sample_one_in to 1."
                )
            words, trained = sorted(map(str, journal.words.glob("*.words"))), journal.parts / TOKENIZER
            job = {
                "kind": "train", "words": words, "scratch": str(journal.parts), "vocabulary": config.vocabulary, "out": str(trained)
            }  # fmt: skip
            for _ in run_jobs([job], self._work, processes=1, threads=self.processes > 1):  # whose memory goes with its process
                seen.tokenizer = sha256_of(trained)
                trained.replace(path)
            journal.note_seen(seen)
        return load_tokenizer(path), seen, ()

    def _words(self, journal: Journal) -> Seen:
        """Count the words of the sample, group by group; those of an earlier call are there already."""
        outs = [journal.words / f"{number:06d}.json" for number in range(len(self.groups))]
        seen, missing = Seen(), [number for number, out in enumerate(outs) if not out.exists()]
        for out in outs:
            if out.exists():
                seen.add(read_json(out))
        # Into the folder of this call: a worker that outlived an earlier one must not write among these.
        jobs = (self._job("words", number, journal.parts / outs[number].stem) for number in missing)
        for number, result in self._followed("counting words", missing, run_jobs(jobs, self._work, processes=self.processes)):
            for suffix in (".words", ".json"):  # in this order: it counts when the last one is there
                (journal.parts / outs[number].name).with_suffix(suffix).replace(outs[number].with_suffix(suffix))
            seen.add(result)
        return seen

    def _shards(self, journal: Journal, tokenizer: TextTokenizer, used: FileFacts) -> tuple[Done, tuple[FileFacts, ...], np.ndarray]:
        """The shards, from where an earlier call came to; how often each token id is in the training split."""
        done = journal.done()
        self.tell(f"tokenizing with {tokenizer.vocabulary} entries" + (", going on from where it was" if done.groups else ""))
        extra = {
            "tokenizer": str(self.directory / TOKENIZER), "sha256": used.sha256, "end": None if self.ready is None else tokenizer.end,
            "begin": tokenizer.begin,
        }  # fmt: skip
        left = range(done.groups, len(self.groups))
        jobs = (self._job("tokens", number, journal.parts / f"{number:06d}", **extra) for number in left)
        with ExitStack() as stack:
            writers = [
                stack.enter_context(ShardWriter(self.directory, name, tokenizer.vocabulary, SplitFacts(**found), done.files))
                for name, found in zip(SPLITS, done.splits, strict=True)
            ]
            noted = time.monotonic()
            for number, result in self._followed("tokenizing", left, run_jobs(jobs, self._work, processes=self.processes)):
                _take(journal.parts / f"{number:06d}", self.groups[number].source, result, writers, done)
                if time.monotonic() - noted >= JOURNAL_SECONDS:
                    done.files = {facts.name: facts.sha256 for writer in writers for facts in writer.finish()}
                    journal.note_done(done)
                    noted = time.monotonic()
            return done, tuple(facts for writer in writers for facts in writer.finish()), writers[0].token_counts

    def _work(self, job: Job) -> Result:
        return work(job, self.corpora)

    def _job(self, kind: str, number: int, out: Path, **extra: Any) -> Job:
        group = self.groups[number]
        return {"kind": kind, "config": to_json(self.config), "source": group.source, "parts": group.parts, "out": str(out), **extra}

    def _followed(self, doing: str, numbers: Sequence[int], results: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The results of the groups of these numbers, and the progress that they are."""
        found = done = self.total - sum(self.groups[number].bytes for number in numbers)
        began = shown = time.monotonic()
        for number, result in zip(numbers, results, strict=True):
            yield number, result
            done += self.groups[number].bytes
            now = time.monotonic()
            if now - shown >= PROGRESS_SECONDS:
                self.show(Progress(doing=doing, done=done, total=self.total, found=found, seconds=now - began))
                shown = now

    def _refuse_changed(self) -> None:
        if to_json(stamps(self.corpora)) != self.stamps:
            raise FailureError(f"the corpus {self.name} changed while it was being read; prepare it again when nothing writes to it.")

    def _refuse_empty_splits(self, counts: Mapping[str, int], lowest: int, skipped: Counter[str]) -> None:
        config, documents, name = self.config, sum(counts.values()), self.name
        if documents == 0:
            left_out = "; ".join(f"{count} {reason}" for reason, count in sorted((self.left_out + skipped).items()) if count)
            raise RequestError(f"the corpus {name} has no documents ({left_out or 'its files are empty'}).")
        if not counts.get("validation"):
            needed = (lowest + 1) / HASH_RANGE
            if documents == 1 or needed + config.test_share >= 1:
                raise RequestError(
                    f"the corpus {name} has {documents} document{'s' * (documents > 1)}, too few to set one aside for validation; give "
                    "every document a row of a JSONL file or a text file of its own."
                )
            raise RequestError(
                f"none of the {documents} documents of {name} fell into validation at validation_share {config.validation_share}; "
                f"raise validation_share above {needed:.4f}."
            )
        if not counts.get("train"):
            raise RequestError(f"none of the {documents} documents of {name} fell into training; lower validation_share and test_share.")

    def _manifest(
        self,
        tokenizer: TextTokenizer,
        seen: Seen,
        markers: tuple[Marker, ...],
        done: Done,
        files: tuple[FileFacts, ...],
        counts: np.ndarray,
    ) -> Manifest:
        splits = _splits(done.splits)
        skipped = self.left_out + done.skipped
        return Manifest(
            format=FORMAT,
            corpus=CorpusFacts(
                name=self.name, content_hash=done.content,
                contents=tuple(what for corpus in self.corpora for what in corpus.contents),
                missing=tuple(what for corpus in self.corpora for what in corpus.missing),
            ),
            prepare=self.config,
            tokenizer=TokenizerFacts(
                sha256=files[0].sha256, training_documents=seen.sampled_documents, training_bytes=seen.sampled_bytes,
                words_left_out=seen.words_left_out,
            ),
            vocabulary=tokenizer.vocabulary,
            dtype=dtype_for(tokenizer.vocabulary),
            splits=splits,
            skipped=tuple(Skipped(reason=reason, count=count) for reason, count in sorted(skipped.items()) if count),
            unigram_entropy_nats=entropy_nats(counts),
            bytes_per_token=splits.train.bytes / splits.train.tokens,
            files=files,
            sources=tuple(
                SourceFacts(name=name, columns=self._columns(number), splits=_splits(done.sources.get(str(number), [{}] * 3)))
                for number, name in enumerate(self.names)
            ),
            markers=markers,
            end=tokenizer.end,
            begin=tokenizer.begin,
        )  # fmt: skip

    def _columns(self, source: int) -> tuple[str, ...]:
        parts = (part for group in self.groups if group.source == source for part in group.parts)
        found = {part.columns for part in parts if part.columns is not None}
        return tuple(sorted(text if key is None else f"{text}, id: {key}" for text, key in found))


def _take(out: Path, source: int, result: dict[str, Any], writers: Sequence[ShardWriter], done: Done) -> None:
    """Append what a worker has written to the shards, and remove it."""
    of_source = done.sources.setdefault(str(source), [asdict(NOTHING) for _ in SPLITS])
    content, listed = ContentHash(done.content), read_array(Path(f"{out}.documents.bin"), DOCUMENT_ROW)
    for first in range(0, len(listed), LISTED):
        documents = listed[first : first + LISTED]
        done.lowest = min(done.lowest, int(documents["id"].min()))
        for digest in documents["digest"]:
            content.add(digest.tobytes())
        for number, writer in enumerate(writers):
            chosen = documents[documents["split"] == number]
            added = {"documents": len(chosen), "tokens": int(chosen["tokens"].sum()), "bytes": int(chosen["bytes"].sum())}
            writer.add_documents(chosen["tokens"], chosen["id"], added["bytes"])
            for total in (of_source[number], done.splits[number]):
                for what, count in added.items():
                    total[what] += count
    done.content = content.hexdigest()
    for name, writer in zip(SPLITS, writers, strict=True):
        writer.add_tokens(Path(f"{out}.{name}.bin"))
        Path(f"{out}.{name}.bin").unlink()
    Path(f"{out}.documents.bin").unlink()
    done.skipped.update(result["skipped"])
    done.groups += 1


def _splits(found: Sequence[dict[str, int]]) -> Splits:
    return Splits(**{name: SplitFacts(**{**asdict(NOTHING), **facts}) for name, facts in zip(SPLITS, found, strict=True)})
