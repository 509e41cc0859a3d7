"""Statistics against counting by hand, and duplicates that were put there."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import SPLITS, DocumentSplit, SplitFacts, TokenDataset
from depthroute.data import scan as scans
from depthroute.data import statistics as module
from depthroute.data.corpus import Document
from depthroute.data.progress import Progress
from depthroute.data.shards import DTYPES, IDS_DTYPE, INDEX_DTYPE
from depthroute.data.statistics import LengthBin, statistics_of
from tests.data.by_hand import TEST_SHARE, VALIDATION_SHARE, alter, alter_manifest, documents, seal, tokenizer, write


def varied(count: int, name: str) -> list[Document]:
    """Documents of 1 to `count` words."""
    return [documents(1, f"{name} {number}", words=number + 1)[0] for number in range(count)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path / "data", {"a.jsonl": varied(50, "a"), "b.jsonl": varied(20, "b")})
    return tmp_path / "data"


def test_against_plain_counting(directory: Path) -> None:
    data, found = TokenDataset.open(directory), statistics_of(directory)
    assert found.vocabulary == 300 and [one.split for one in found.splits] == list(SPLITS)
    for one in found.splits:
        tokens, boundaries = data.tokens(one.split).tolist(), data.boundaries(one.split).tolist()
        facts, counts = data.manifest.split(one.split), Counter(tokens)
        lengths = sorted(end - start for start, end in pairwise(boundaries))
        assert (one.all.documents, one.all.tokens, one.all.bytes) == (facts.documents, facts.tokens, facts.bytes)
        assert one.all.bytes_per_token == facts.bytes / len(tokens)
        entropy = -sum(count / len(tokens) * math.log(count / len(tokens)) for count in counts.values())
        assert one.all.entropy_nats == pytest.approx(entropy) and one.all.entropy_bits == pytest.approx(entropy / math.log(2))
        assert one.all.vocabulary_used == len(counts)
        frequent = sorted(counts, key=lambda token: (-counts[token], token))[:10]
        assert [(row.id, row.count) for row in one.all.frequent] == [(token, counts[token]) for token in frequent]
        measured = one.all.lengths
        assert measured is not None and measured.mean == pytest.approx(sum(lengths) / len(lengths)) and measured.max == lengths[-1]
        for share, quantile in ((0.1, measured.p10), (0.5, measured.median), (0.9, measured.p90), (0.99, measured.p99)):
            assert quantile == lengths[math.ceil(share * len(lengths)) - 1]
        bins = Counter(length.bit_length() - 1 for length in lengths)
        assert measured.histogram == tuple(
            LengthBin(low=2**power, high=2 ** (power + 1) - 1, documents=bins[power]) for power in range(min(bins), max(bins) + 1)
        )


def test_every_source_is_counted_by_itself(directory: Path, tmp_path: Path) -> None:
    both = statistics_of(directory)
    write(tmp_path / "b", {"b.jsonl": varied(20, "b")})
    alone = statistics_of(tmp_path / "b")
    for split, one in zip(both.splits, alone.splits, strict=True):
        assert [source.name for source in split.sources] == ["a.jsonl", "b.jsonl"] and one.sources == ()
        assert split.sources[1].all == one.all
        assert sum(source.all.documents for source in split.sources) == split.all.documents


def test_texts_and_ids_that_occur_again(tmp_path: Path) -> None:
    split = DocumentSplit(validation_share=VALIDATION_SHARE, test_share=TEST_SHARE, sample_one_in=1, salt="depthroute")
    given = documents(60)
    mine = {name: [one for one in given if split.split_of(one.id) == name] for name in SPLITS}
    texts = {one.id: one.text for one in given}
    texts[mine["train"][4].id] = texts[mine["train"][9].id] = mine["train"][2].text
    texts[mine["validation"][1].id] = texts[mine["validation"][0].id] = mine["train"][7].text
    texts[mine["test"][0].id] = mine["train"][7].text
    given = [Document(one.id, texts[one.id]) for one in given]
    write(tmp_path, {"a.jsonl": [*given, Document(mine["train"][0].id, "another text")]})
    found = statistics_of(tmp_path)
    assert [one.all.duplicates for one in found.splits] == [2, 1, 0]
    assert [one.in_train for one in found.splits] == [None, 2, 1]
    assert [one.duplicate_ids for one in found.splits] == [1, 0, 0] and found.ids_in_several_splits == 0


def test_a_duplicate_in_another_source_is_the_later_one(tmp_path: Path) -> None:
    first = documents(30, "a")
    write(tmp_path, {"a.jsonl": first, "b.jsonl": [Document(one.id, one.text) for one in first]})
    for split in statistics_of(tmp_path).splits:
        assert [source.all.duplicates for source in split.sources] == [0, split.all.documents // 2]
        assert split.duplicate_ids == split.all.duplicates == split.all.documents // 2


def test_an_id_in_two_splits_is_seen(directory: Path) -> None:
    train = TokenDataset.open(directory).directory / "train.ids.bin"
    value = np.frombuffer(train.read_bytes(), dtype=IDS_DTYPE)[3]
    alter(directory, "test.ids.bin", IDS_DTYPE, lambda ids: ids.__setitem__(0, value))
    seal(directory)
    assert statistics_of(directory).ids_in_several_splits == 1


def test_without_ids_and_with_an_empty_split(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": documents(3, "c")}, recorded=False)
    found = statistics_of(tmp_path)
    assert found.ids_in_several_splits is None and {one.duplicate_ids for one in found.splits} == {None}
    test = found.splits[2].all
    assert test.documents == test.tokens == test.vocabulary_used == 0 and test.frequent == ()
    assert (test.lengths, test.bytes_per_token, test.entropy_nats) == (None, None, None)


def test_frequent_ids_are_spelled(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": [Document(f"{number}", "流\n" * 20) for number in range(20)]})
    spelled = {row.id: row.spelling for row in statistics_of(tmp_path).splits[0].all.frequent}
    assert spelled[tokenizer().end] == "<eos>" and "␊" in spelled.values()


def test_the_size_of_the_pieces_changes_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []
    whole = statistics_of(directory, progress=seen.append)
    total = sum((directory / f"{split}.bin").stat().st_size for split in SPLITS)
    assert seen[-1].done == seen[-1].total == total
    monkeypatch.setattr(module, "CHUNK_TOKENS", 40)
    monkeypatch.setattr(scans, "CHUNK_ITEMS", 7)
    assert statistics_of(directory) == whole


def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    """50 million tokens, 100 MB, are verified and counted with a peak less than 50 MB above that of a few thousand."""
    code = (
        "import sys; from pathlib import Path; from depthroute.data import statistics, verify\n"
        "assert verify.verify(Path(sys.argv[1]), sample=0).ok; statistics.statistics_of(Path(sys.argv[1]))\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    peaks = []
    for length in (1_000, 1_000_000):
        manifest = write(tmp_path, {"a.jsonl": documents(60)}, recorded=False)
        tokens, facts = np.full((50, length), 60, dtype=DTYPES["uint16"]), SplitFacts(documents=50, tokens=50 * length, bytes=1)
        tokens[:, -1] = manifest.end
        (tmp_path / "train.bin").write_bytes(tokens.tobytes())
        (tmp_path / "train.index.bin").write_bytes((np.arange(51, dtype=INDEX_DTYPE) * length).tobytes())
        entropy = -sum(share * math.log(share) for share in (1 / length, 1 - 1 / length))
        splits, ratio = replace(manifest.splits, train=facts), 1 / facts.tokens
        replace(manifest, splits=splits, bytes_per_token=ratio, unigram_entropy_nats=entropy).write(tmp_path)
        seal(tmp_path)
        found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        peaks.append(int(found.stdout) / 1000)
    assert peaks[1] < peaks[0] + 50


def test_damage_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no manifest\.json"):
        statistics_of(tmp_path)
    alter(directory, "train.bin", DTYPES["uint16"], lambda tokens: tokens.__setitem__(3, 999))
    with pytest.raises(FailureError, match=r"train\.bin has the id 999, the vocabulary 300 entries; `depthroute data verify`"):
        statistics_of(directory)
    alter(directory, "train.index.bin", np.dtype("<i8"), lambda index: index.__setitem__(3, 0))
    with pytest.raises(FailureError, match=r"train\.index\.bin is not the index of the tokens of train: document 2 ends at 0"):
        statistics_of(directory)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"unigram_entropy_nats": 1.0}, r"manifest\.json has the unigram_entropy_nats 1\.0, and the training tokens [2-5]\."),
        ({"vocabulary": -1}, r"manifest\.json has a vocabulary of -1, the tokenizer 300 entries"),
    ],
)
def test_a_manifest_that_was_altered(directory: Path, change: dict[str, Any], says: str) -> None:
    alter_manifest(directory, lambda manifest: manifest.update(change))
    with pytest.raises(FailureError, match=says):
        statistics_of(directory)


@pytest.mark.parametrize("odd", [0, 1])
def test_files_of_another_dtype(tmp_path: Path, odd: int) -> None:
    """Whether or not their size is a whole number of the other one."""
    given = next(many for count in range(20, 30) if write(tmp_path, {"a.jsonl": (many := documents(count))}).splits.train.tokens % 2 == odd)
    write(tmp_path, {"a.jsonl": given})
    alter_manifest(tmp_path, lambda manifest: manifest.update(dtype="uint32"))
    says = r"train\.bin has \d+ bytes, no whole number of uint32" if odd else r"train\.index\.bin is not the index of the tokens of train"
    with pytest.raises(FailureError, match=says):
        statistics_of(tmp_path)


def test_sources_that_do_not_fit_the_index(directory: Path) -> None:
    alter_manifest(directory, lambda manifest: manifest["sources"][0]["splits"]["test"].update(documents=-3))
    with pytest.raises(FailureError, match=r"manifest\.json gives a\.jsonl -3 documents in test; it takes 0 or more"):
        statistics_of(directory)
    alter_manifest(directory, lambda manifest: manifest["sources"][0]["splits"]["test"].update(documents=300))
    with pytest.raises(FailureError, match=r"manifest\.json gives the sources \d+ documents in test, and the index has "):
        statistics_of(directory)
