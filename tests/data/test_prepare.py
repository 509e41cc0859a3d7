from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from depthroute.common.errors import RequestError
from depthroute.data import (
    EOS,
    SPLITS,
    Document,
    DocumentSplit,
    MultiHopConfig,
    PrepareConfig,
    Source,
    TokenDataset,
    prepare,
    read_manifest,
)
from depthroute.data.shares import shares
from depthroute.data.text_tokenizer import BATCH_CHARACTERS
from depthroute.data.work import BATCH_DOCUMENTS, Placed, _batches
from tests.data.preparation import Writer, config, documents_of


def test_the_shards_hold_the_documents(write_jsonl: Writer, tmp_path: Path) -> None:
    """Every document is in its split, in corpus order, ends with EOS and comes back as text; counts and entropy are those of the files."""
    source = write_jsonl(300)
    settings = config(source)
    manifest = prepare(settings, tmp_path / "data")
    dataset = TokenDataset.open(tmp_path / "data", verify=True)
    assert dataset.manifest == manifest
    tokenizer = dataset.tokenizer()
    split = DocumentSplit(validation_share=0.1, test_share=0.05, sample_one_in=4, salt="depthroute")
    documents = documents_of(source)
    for name in SPLITS:
        expected = [document.text for document in documents if split.split_of(document.id) == name]
        tokens, boundaries = dataset.tokens(name), dataset.boundaries(name)
        assert tokens.dtype == np.uint16 and len(boundaries) == len(expected) + 1 > 2
        assert (boundaries[0], boundaries[-1]) == (0, len(tokens))
        found = [tokens[start:end] for start, end in itertools.pairwise(boundaries)]
        assert all(part[-1] == EOS for part in found)
        assert [tokenizer.decode(part.tolist()) for part in found] == expected
        facts = manifest.split(name)
        assert (facts.documents, facts.tokens) == (len(expected), len(tokens))
        assert facts.bytes == sum(len(text.encode()) for text in expected)
    _, counts = np.unique(dataset.tokens("train"), return_counts=True)
    shares = counts / counts.sum()
    assert manifest.unigram_entropy_nats == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-12)
    assert manifest.bytes_per_token == manifest.splits.train.bytes / manifest.splits.train.tokens
    sampled = [document.text for document in documents if split.trains_tokenizer(document.id)]
    assert manifest.tokenizer.training_documents == len(sampled)
    assert manifest.tokenizer.training_bytes == sum(len(text.encode()) for text in sampled)


def test_special_tokens_in_documents_never_end_one(tmp_path: Path) -> None:
    source = tmp_path / "d.jsonl"
    rows = [{"id": str(i), "text": f"<eos> text {i} <pad><eos>"} for i in range(200)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepare(config(source), tmp_path / "data")
    tokens = TokenDataset.open(tmp_path / "data").tokens("train")
    manifest = read_manifest(tmp_path / "data")
    assert int((tokens == EOS).sum()) == manifest.splits.train.documents
    assert int((tokens < EOS).sum()) == 0


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A tokenizer.json from elsewhere, of bytes, with two special tokens behind them."""
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    made.save(str(tmp_path / "theirs.json"), pretty=False)
    return tmp_path / "theirs.json"


def with_tokenizer(source: Path, tokenizer: Path, **changes: Any) -> PrepareConfig:
    return PrepareConfig.of(str(source), id_column="id", validation_share=0.1, tokenizer=str(tokenizer), **changes)


def test_a_ready_tokenizer_makes_the_tokens_and_ends_the_documents(write_jsonl: Writer, ready: Path, tmp_path: Path) -> None:
    source = write_jsonl(100)
    with source.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "special", "text": "<|end_of_text|> is text here"}) + "\n")
    lines: list[str] = []
    manifest = prepare(with_tokenizer(source, ready), tmp_path / "data", report=lines.append)
    assert manifest.end == 257 and manifest.vocabulary == 258 and manifest.tokenizer.training_documents == 0
    assert not any("training a tokenizer" in line for line in lines)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == ready.read_bytes()
    assert manifest.tokenizer.sha256 == hashlib.sha256(ready.read_bytes()).hexdigest()
    dataset = TokenDataset.open(tmp_path / "data", verify=True)
    assert dataset.end == dataset.tokenizer().end == 257
    texts = []
    for name in SPLITS:
        tokens, boundaries = dataset.tokens(name), dataset.boundaries(name)
        assert np.flatnonzero(tokens == 257).tolist() == (boundaries[1:] - 1).tolist()
        texts += [dataset.tokenizer().decode(tokens[start:end].tolist()) for start, end in itertools.pairwise(boundaries)]
    assert sorted(texts) == sorted(document.text for document in documents_of(source))


def test_a_token_in_front_of_the_documents(write_jsonl: Writer, ready: Path, tmp_path: Path) -> None:
    """It is a token of its document, counted and inside the boundaries, and has no text; without it nothing changes."""
    source = write_jsonl(100)
    with source.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "special", "text": "<|begin_of_text|> is text here"}) + "\n")
    plain = prepare(with_tokenizer(source, ready), tmp_path / "plain")
    manifest = prepare(with_tokenizer(source, ready, begin_of_document="<|begin_of_text|>"), tmp_path / "data")
    assert (plain.begin, manifest.begin) == (None, 256) and manifest.fingerprint != plain.fingerprint
    dataset, without = (TokenDataset.open(tmp_path / name, verify=True) for name in ("data", "plain"))
    assert (dataset.begin, dataset.tokenizer().begin, without.begin, without.tokenizer().begin) == (256, 256, None, None)
    for name in SPLITS:
        tokens, boundaries = dataset.tokens(name), dataset.boundaries(name)
        assert np.flatnonzero(tokens == 256).tolist() == boundaries[:-1].tolist()
        assert tokens[tokens != 256].tolist() == without.tokens(name).tolist()
        assert manifest.split(name).tokens == len(tokens) == plain.split(name).tokens + plain.split(name).documents
        for (start, end), (first, last) in zip(itertools.pairwise(boundaries), itertools.pairwise(without.boundaries(name)), strict=True):
            text = without.tokenizer().decode(without.tokens(name)[first:last].tolist())
            assert dataset.tokenizer().decode(tokens[start:end].tolist()) == text
    again = with_tokenizer(source, ready, begin_of_document="<|begin_of_text|>")
    assert prepare(again, tmp_path / "data") == manifest
    for settings, folder in ((again, "plain"), (with_tokenizer(source, ready), "data")):
        with pytest.raises(RequestError, match="was prepared with another tokenizer"):
            prepare(settings, tmp_path / folder)


def test_a_manifest_from_before_there_was_a_token_in_front_reads_as_it_did(write_jsonl: Writer, ready: Path, tmp_path: Path) -> None:
    manifest = prepare(with_tokenizer(write_jsonl(100), ready), tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    del value["begin"], value["prepare"]["begin_of_document"]
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_manifest(tmp_path / "data") == manifest
    assert read_manifest(tmp_path / "data").fingerprint == manifest.fingerprint


@pytest.mark.parametrize(
    ("begin", "match"),
    [("<s>", "has no token '<s>'"), ("<|end_of_text|>", "ends documents too"), ("a", "turns the text 'a' .* that begins documents")],
)
def test_a_token_in_front_that_cannot_be(begin: str, match: str, write_jsonl: Writer, ready: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=match):
        prepare(with_tokenizer(write_jsonl(100), ready, begin_of_document=begin, end_of_document="<|end_of_text|>"), tmp_path / "data")


def test_a_ready_tokenizer_is_told_by_its_content(write_jsonl: Writer, ready: Path, tmp_path: Path) -> None:
    source = write_jsonl(100)
    manifest = prepare(with_tokenizer(source, ready), tmp_path / "data")
    moved = ready.rename(tmp_path / "moved.json")
    assert prepare(with_tokenizer(source, moved, end_of_document="<|end_of_text|>"), tmp_path / "data") == manifest
    with pytest.raises(RequestError, match=r"was prepared with another tokenizer \(.*theirs.json, [0-9a-f]{12}, end 257\)"):
        prepare(with_tokenizer(source, moved, end_of_document="<|begin_of_text|>"), tmp_path / "data")
    moved.write_text(moved.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(RequestError, match="was prepared with another tokenizer"):
        prepare(with_tokenizer(source, moved), tmp_path / "data")
    with pytest.raises(RequestError, match=r"was prepared with tokenizer '.*', not None"):
        prepare(PrepareConfig.of(str(source), id_column="id", validation_share=0.1), tmp_path / "data")
    prepare(config(source), tmp_path / "ours")
    with pytest.raises(RequestError, match=r"was prepared with (vocabulary|tokenizer) "):
        prepare(with_tokenizer(source, moved), tmp_path / "ours")


def test_a_ready_tokenizer_is_refused_before_any_work(write_jsonl: Writer, ready: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no token '</s>'"):
        prepare(with_tokenizer(write_jsonl(100), ready, end_of_document="</s>"), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_manifest_from_before_ready_tokenizers_reads_as_it_did(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(100)
    manifest = prepare(config(source), tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    assert value.pop("end") == EOS
    assert value["prepare"].pop("tokenizer") is None and value["prepare"].pop("end_of_document") is None
    path.write_text(json.dumps(value), encoding="utf-8")
    assert prepare(config(source), tmp_path / "data") == read_manifest(tmp_path / "data") == manifest
    files = sorted([entry["name"], entry["bytes"], entry["sha256"]] for entry in value["files"] if ".ids." not in entry["name"])
    identity = json.dumps({"dtype": "uint16", "files": files, "format": 1}, separators=(",", ":"))
    assert manifest.fingerprint == hashlib.sha256(identity.encode()).hexdigest()


def test_the_fingerprint_is_that_of_the_tokens(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(300)
    manifest = prepare(config(source), tmp_path / "one")
    assert prepare(config(source, salt="other"), tmp_path / "two").fingerprint != manifest.fingerprint
    assert prepare(config(source, vocabulary=301), tmp_path / "three").fingerprint != manifest.fingerprint
    described_otherwise = dataclasses.replace(manifest, prepare=config(Path("elsewhere")))
    assert described_otherwise.fingerprint == manifest.fingerprint


def test_a_large_vocabulary_is_stored_in_32_bits(write_jsonl: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for vocabulary, expected in ((65_536, "uint16"), (65_537, "uint32")):
        source = write_jsonl(100, f"{vocabulary}.jsonl")
        # The vocabulary of a small corpus is small; only what decides the type is large here.
        monkeypatch.setattr("depthroute.data.tokenizer.TextTokenizer.vocabulary", property(lambda _: vocabulary))  # noqa: B023
        manifest = prepare(config(source), tmp_path / expected)
        dataset = TokenDataset.open(tmp_path / expected)
        assert manifest.dtype == dataset.tokens("train").dtype.name == expected
        assert dataset.tokens("train").max() < 300 and len(dataset.tokens("train")) == manifest.splits.train.tokens


def test_an_empty_test_split_is_an_empty_array(write_jsonl: Writer, tmp_path: Path) -> None:
    prepare(config(write_jsonl(100), test_share=0.0), tmp_path / "data")
    dataset = TokenDataset.open(tmp_path / "data")
    assert dataset.tokens("test").shape == (0,) and dataset.boundaries("test").tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ("", {}, r"the corpus d\.jsonl has no documents .its files are empty"),
        ('{"id": "a", "text": null}\n', {}, r"the corpus d\.jsonl has no documents .1 rows whose text is null"),
        ('{"id": "a", "text": "only one"}\n', {}, "has 1 document, too few to set one aside for validation"),
        (3, {"validation_share": 0.0001}, r"none of the 3 documents of d\.jsonl fell into validation at validation_share 0\.0001; raise"),
        (3, {"validation_share": 0.9999, "test_share": 0.0}, "none of the 3 documents of .* fell into training; lower validation_share"),
        (5, {"validation_share": 0.5, "sample_one_in": 10**9}, "fell into the tokenizer's sample; set sample_one_in to 1"),
    ],
)
def test_a_corpus_that_is_too_small_is_refused(rows: str | int, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = tmp_path / "d.jsonl"
    written = rows if isinstance(rows, str) else "".join(f'{{"id": "{i}", "text": "t {i}"}}\n' for i in range(rows))
    source.write_text(written, encoding="utf-8")
    with pytest.raises(RequestError, match=message):
        prepare(config(source, **changes), tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_the_share_that_the_refusal_names_is_enough(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(6)
    with pytest.raises(RequestError) as caught:
        prepare(config(source, validation_share=0.0001, sample_one_in=1), tmp_path / "data")
    share = float(str(caught.value).rsplit(" ", 1)[1].rstrip("."))
    manifest = prepare(config(source, validation_share=share + 0.0001, sample_one_in=1), tmp_path / "data")
    assert manifest.splits.validation.documents == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 259}, "vocabulary cannot be 259; it takes 260"),
        ({"sample_one_in": 0}, "sample_one_in cannot be 0"),
        ({"validation_share": 0.0}, "validation_share cannot be 0.0"),
        ({"validation_share": 1.0}, "validation_share cannot be 1.0"),
        ({"test_share": -0.1}, "test_share cannot be -0.1"),
        ({"validation_share": 0.6, "test_share": 0.4}, "leave nothing to train on"),
        ({"validation_share": math.nan}, "validation_share cannot be nan"),
        ({"salt": ""}, "salt cannot be ''"),
        ({"salt": "a\0b"}, "salt cannot be"),
        ({"sources": ()}, "sources cannot be empty"),
        ({"sources": (Source(path="a"), Source(path="./b/../a"))}, "the source a is there twice"),
        (
            {"sources": (Source(path="a", weight=9999.0), Source(path="b", weight=1.0))},
            "the weight of b is 0.0001 of all, which is none of 1,000 windows; raise it, or leave the source out",
        ),
        ({"sources": (Source(path="a", weight=0.5), Source(path="b"))}, "1 of 2 sources have a weight; give all of them one, or none"),
        ({"sources": (Source(path="multi-hop"), Source(path="b")), "multi_hop": MultiHopConfig()}, "cannot be mixed with others"),
        ({"sources": (Source(path="multi-hop"),)}, "needs a MultiHopConfig"),
        ({"tokenizer": "t.json", "vocabulary": 300}, r"vocabulary cannot be 300 with the ready tokenizer t\.json; leave it out"),
        ({"tokenizer": "t.json", "sample_one_in": 2}, "sample_one_in cannot be 2 with the ready tokenizer"),
        ({"end_of_document": "</s>"}, "end_of_document cannot be '</s>' with a tokenizer that is trained"),
        (
            {"sources": (Source(path="multi-hop"),), "multi_hop": MultiHopConfig(), "tokenizer": "t.json"},
            "tokenizer cannot be 't.json' with the source",
        ),
    ],
)
def test_wrong_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PrepareConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "path of a source cannot be empty"),
        ({"path": "docstrings", "id_column": "id"}, "text_column and id_column belong to files"),
        ({"path": "a", "text_column": ""}, "text_column of a source cannot be empty"),
        ({"path": "a", "weight": 0.0}, "the weight of a cannot be 0.0; it takes a number above 0"),
        ({"path": "a", "weight": math.inf}, "the weight of a cannot be inf"),
    ],
)
def test_wrong_sources_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Source(**changes)


@pytest.mark.parametrize("given", [(9.0, 7.0), (0.9, 0.7), (9e307, 7e307)])
def test_weights_are_what_was_written_whatever_they_add_up_to(given: tuple[float, float]) -> None:
    """As floats, 0.9 and 0.7 of 1.6 are no sixteenths."""
    weights = PrepareConfig(sources=(Source(path="a", weight=given[0]), Source(path="b", weight=given[1]))).weights
    assert weights == (Fraction(9, 16), Fraction(7, 16))
    assert shares(1000, weights) == [563, 437]  # 562.5 and 437.5: of equal remainders the first


def test_batches_hold_a_bounded_amount_of_text() -> None:
    taken = 0

    def documents(length: int) -> Any:
        nonlocal taken
        for i in range(10 * BATCH_DOCUMENTS):
            taken += 1
            yield Placed("file", Document(str(i), "x" * length))

    assert len(next(_batches(documents(10)))) == taken == BATCH_DOCUMENTS
    taken = 0
    assert len(next(_batches(documents(BATCH_CHARACTERS // 3)))) == taken == 3 + 1
