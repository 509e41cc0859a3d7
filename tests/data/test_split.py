from __future__ import annotations

import subprocess

import pytest

from depthroute.data import DocumentSplit, document_hash
from depthroute.data.split import threshold

IDS = [f"document {i}" for i in range(20_000)]


def split(**changes: object) -> DocumentSplit:
    settings: dict[str, object] = {"validation_share": 0.005, "test_share": 0.005, "sample_one_in": 20, "salt": "depthroute"} | changes
    return DocumentSplit(**settings)  # type: ignore[arg-type]


def test_the_hash_is_the_documented_bytes() -> None:
    """The value that `printf 'depthroute/split\\0json.decoder' | b2sum -l 64` prints."""
    assert document_hash("depthroute/split", "json.decoder") == 0x6B4A5FB18FDED9CE


def test_b2sum_agrees_on_an_id_that_is_not_ascii() -> None:
    printed = subprocess.run(["b2sum", "-l", "64"], input="salt/split\0Größe ∑".encode(), capture_output=True, check=True).stdout
    assert document_hash("salt/split", "Größe ∑") == int(printed.split()[0], 16)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.5, 2**63), (0.005, 2**64 * 5 // 1000), (0.1, 2**64 // 10), (1e-20, 0)])
def test_thresholds_are_those_of_the_decimal_not_of_the_float(share: float, expected: int) -> None:
    assert threshold(share) == expected


def test_the_shares_are_met() -> None:
    found = [split(validation_share=0.05, test_share=0.02).split_of(name) for name in IDS]
    assert found.count("validation") / len(IDS) == pytest.approx(0.05, abs=0.006)
    assert found.count("test") / len(IDS) == pytest.approx(0.02, abs=0.004)


def test_the_tokenizer_sees_one_training_document_in_so_many_and_no_other() -> None:
    parted = split(validation_share=0.3, test_share=0.3, sample_one_in=10)
    sampled = [name for name in IDS if parted.trains_tokenizer(name)]
    training = [name for name in IDS if parted.split_of(name) == "train"]
    assert set(sampled) <= set(training)
    assert len(sampled) / len(training) == pytest.approx(0.1, abs=0.012)


def test_a_larger_share_keeps_the_documents_of_the_smaller_one() -> None:
    small, large = split(validation_share=0.01, test_share=0.01), split(validation_share=0.1, test_share=0.2)
    for name in IDS:
        if small.split_of(name) != "train":
            assert large.split_of(name) == small.split_of(name)


def test_another_salt_gives_another_split() -> None:
    one, other = split(validation_share=0.5), split(validation_share=0.5, salt="other")
    agreeing = sum(one.split_of(name) == other.split_of(name) for name in IDS) / len(IDS)
    assert agreeing == pytest.approx(0.5, abs=0.02)


def test_the_decisions_are_the_documented_formula() -> None:
    parted = split(validation_share=0.3, test_share=0.2, sample_one_in=3, salt="s")
    for name in IDS[:500]:
        value = document_hash("s/split", name)
        expected = "validation" if value < 2**64 * 3 // 10 else "test" if value >= 2**64 - 2**64 // 5 else "train"
        assert parted.split_of(name) == expected
        assert parted.trains_tokenizer(name) == (expected == "train" and document_hash("s/tokenizer", name) % 3 == 0)
