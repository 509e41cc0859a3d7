"""The synthetic corpus: its answers are right, its floor is what a perfect predictor reaches, and it is made like every other corpus."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import EOS, UNK, ContentHash, MultiHopConfig, MultiHopCorpus, PrepareConfig, Source, TokenDataset, prepare
from depthroute.data.corpus import document_digest
from tests.data.preparation import read

SMALL = MultiHopConfig(entities=7, hops=4, queries=9, documents=150)


def settings(config: MultiHopConfig = SMALL, **changes: Any) -> PrepareConfig:
    given: dict[str, Any] = {"sources": (Source(path="multi-hop"),), "multi_hop": config, "validation_share": 0.2}
    return PrepareConfig(**given | changes)


def texts(config: MultiHopConfig) -> list[str]:
    return [document.text for document in read(MultiHopCorpus(config=config))]


def triples(text: str) -> list[tuple[str, str, str]]:
    words = text.split(" ")
    return list(zip(words[::3], words[1::3], words[2::3], strict=True))


def hops(word: str) -> int:
    return int(word.removesuffix("s").removesuffix("hop"))


@pytest.mark.parametrize(
    "config", [SMALL, MultiHopConfig(entities=3, hops=2, queries=6, statements=1, documents=40), MultiHopConfig(documents=30, seed=5)]
)
def test_every_answer_is_found_by_following_the_facts(config: MultiHopConfig) -> None:
    for text in texts(config):
        lines = triples(text)
        stated, asked = lines[: config.statements * config.entities], lines[config.statements * config.entities :]
        assert {word for word, _, _ in stated} == {"fact"} and len(asked) == config.queries
        statements = [stated[i : i + config.entities] for i in range(0, len(stated), config.entities)]
        facts = {entity: image for _, entity, image in statements[0]}
        assert all(sorted(statement) == sorted(statements[0]) for statement in statements)
        assert set(facts) == set(facts.values()) == {f"e{i}" for i in range(config.entities)}
        for word, entity, answer in asked:
            place = entity
            for _ in range(hops(word)):
                place = facts[place]
            assert place == answer != entity
            assert 1 <= hops(word) <= config.hops
        assert len({(word, entity) for word, entity, _ in asked}) == len(asked), "no question twice"


def test_cycles_orders_and_questions_are_drawn_evenly() -> None:
    """Over 1,200 documents: both cycles of three, all orders, and all numbers of hops, within five standard deviations."""
    config = MultiHopConfig(entities=3, hops=2, queries=2, statements=2, documents=1_200)
    found = [triples(text) for text in texts(config)]

    def even(values: list[Any], kinds: int) -> None:
        counts = Counter(values)
        expected = len(values) / kinds
        assert len(counts) == kinds
        assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in counts.values()), counts

    even([tuple(sorted(lines[:3])) for lines in found], 2)
    even([tuple(entity for _, entity, _ in lines[:3]) for lines in found], 6)
    even([tuple(entity for _, entity, _ in lines[:3] + lines[3:6]) for lines in found], 36)  # the second order owes nothing to the first
    even([line[:2] for lines in found for line in lines[6:]], 6)


def perfect_nll(config: MultiHopConfig, text: str) -> list[float]:
    """The loss of each token of a document, EOS included, by a predictor that knows how documents are made and keeps count."""
    losses: list[float] = []
    image: dict[str, str] = {}
    left = {number + 1: config.entities for number in range(config.hops)}  # questions of so many hops that are not asked yet
    for number, (word, entity, value) in enumerate(triples(text)):
        if number < config.statements * config.entities:
            place = number % config.entities
            losses += [0.0, math.log(config.entities - place)]  # "fact", and an entity that this statement has not had
            if number >= config.entities:
                assert image[entity] == value
                losses.append(0.0)
            else:
                end = entity
                while end in (backwards := {b: a for a, b in image.items()}):  # the start of the path that ends in `entity`
                    end = backwards[end]
                last = place == config.entities - 1
                admissible = {f"e{i}" for i in range(config.entities)} - set(image.values()) - (set() if last else {end})
                assert value in admissible  # each has as many cycles left to it
                losses.append(math.log(len(admissible)))
                image[entity] = value
        else:
            losses += [math.log(sum(left.values()) / left[hops(word)]), math.log(left[hops(word)]), 0.0]
            left[hops(word)] -= 1
    return [*losses, 0.0]


@pytest.mark.parametrize(
    "config", [SMALL, dataclasses.replace(SMALL, statements=1), MultiHopConfig(entities=4, hops=3, queries=12, documents=20)]
)
def test_a_perfect_predictor_reaches_the_floor_and_no_less(config: MultiHopConfig) -> None:
    """In every single document: all have the same probability."""
    for text in texts(config)[:40]:
        losses = perfect_nll(config, text)
        assert len(losses) == config.document_tokens
        assert math.fsum(losses) == pytest.approx(config.document_entropy, rel=1e-12)
        assert math.fsum(losses) / len(losses) == pytest.approx(config.floor, rel=1e-12)


def test_the_entropy_counts_the_documents_there_are() -> None:
    """Three entities, one statement, one question of one hop: 2 cycles x 6 orders x 3 questions, all of them found."""
    config = MultiHopConfig(entities=3, hops=1, queries=1, statements=1, documents=600)
    assert len(set(texts(config))) == 36
    assert config.document_entropy == pytest.approx(math.log(36), rel=1e-12)


def test_a_document_depends_on_the_seed_and_its_number_alone() -> None:
    more = dataclasses.replace(SMALL, documents=300)
    assert texts(more)[:150] == texts(SMALL) == texts(SMALL)
    assert not set(texts(dataclasses.replace(SMALL, seed=1))) & set(texts(SMALL))
    content = ContentHash()
    for document in read(MultiHopCorpus(config=SMALL)):
        content.add(document_digest(document))
    # Another hash says that the same configuration would make other data than it did.
    assert content.hexdigest() == "94f5e68b0f291bc9e1142e1c69af40242ef99ece1228ec90f0c3a10ec4da8d1e"


def test_the_shards_hold_the_documents_and_the_markers_their_answers(tmp_path: Path) -> None:
    manifest = prepare(settings(), tmp_path / "data")
    data = TokenDataset.open(tmp_path / "data", verify=True)
    assert data.manifest == manifest and data.vocabulary == len(SMALL.words) == 4 + 1 + 4 + 7
    assert manifest.prepare.multi_hop == SMALL and manifest.corpus.name == "multi-hop"
    assert manifest.tokenizer.training_documents == 0
    tokenizer, tokens, boundaries = data.tokenizer(), data.tokens("validation"), data.boundaries("validation")
    assert set(np.diff(boundaries)) == {SMALL.document_tokens} and len(boundaries) - 1 == manifest.splits.validation.documents > 10
    known = set(texts(SMALL))
    markers = {marker.name: marker for marker in manifest.markers}
    assert list(markers) == ["1 hop", "2 hops", "3 hops", "4 hops", "answers"]
    for start, end in itertools.pairwise(boundaries):
        ids = tokens[start:end].tolist()
        text = tokenizer.decode(ids)
        assert text in known and tokenizer.encode(text) == ids[:-1] and ids[-1] == EOS and UNK not in ids
        for name, marker in markers.items():
            found = [tokenizer.decode([ids[i + marker.distance]]) for i in range(len(ids) - 2) if ids[i] in marker.ids]
            asked = [line for line in triples(text) if line[0] != "fact"]
            expected = [answer for word, _, answer in asked if name == "answers" or hops(word) == int(name.split(" ")[0])]
            assert found == expected
    assert EOS not in tokenizer.encode("<eos>"), "the text of a special token is text"


def test_a_second_call_finds_the_data_and_other_settings_are_refused(tmp_path: Path) -> None:
    manifest = prepare(settings(), tmp_path / "data")
    assert prepare(settings(), tmp_path / "data", report=lambda line: pytest.fail(line)) == manifest
    assert prepare(settings(), tmp_path / "again").fingerprint == manifest.fingerprint
    for changes, message in ((("hops", 3), "multi_hop.hops 4, not 3"), (("seed", 2), "multi_hop.seed 0, not 2")):
        with pytest.raises(RequestError, match=f"was prepared with {message}; give another directory"):
            prepare(settings(dataclasses.replace(SMALL, **dict([changes]))), tmp_path / "data")
    with pytest.raises(RequestError, match="was prepared with"):
        prepare(PrepareConfig(), tmp_path / "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entities": 2}, "multi_hop.entities cannot be 2; it takes a whole number of at least 3"),
        ({"hops": 0}, "multi_hop.hops cannot be 0"),
        ({"hops": 7}, "multi_hop.hops cannot be 7 with 7 entities: so many steps lead back to the start; it takes 6 or fewer"),
        ({"queries": 0}, "multi_hop.queries cannot be 0"),
        ({"queries": 29}, "multi_hop.queries cannot be 29: 7 entities and 4 hops make 28 different questions"),
        ({"statements": 0}, "multi_hop.statements cannot be 0"),
        ({"documents": 1}, "multi_hop.documents cannot be 1"),
        ({"seed": -1}, "multi_hop.seed cannot be -1"),
        ({"seed": 1.5}, "multi_hop.seed cannot be 1.5; it takes a whole number"),
    ],
)
def test_wrong_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": (Source(path="docstrings"),)}, "the sources docstrings and multi_hop .* do not go together"),
        ({"multi_hop": None}, "the sources multi-hop and multi_hop None do not go together: the source 'multi-hop' needs a MultiHopConfig"),
        ({"vocabulary": 512}, "vocabulary cannot be 512 with the source 'multi-hop'"),
        ({"sample_one_in": 1}, "sample_one_in cannot be 1 with the source 'multi-hop'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        settings(**changes)


def test_too_few_documents_for_a_split_are_refused_as_for_any_corpus(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="none of the 2 documents of multi-hop fell into"):
        prepare(settings(dataclasses.replace(SMALL, documents=2), validation_share=0.0001), tmp_path / "data")
    with pytest.raises(FailureError, match="is missing, the manifest names it"):
        prepare(settings(), tmp_path / "other")
        (tmp_path / "other" / "train.bin").unlink()
        prepare(settings(), tmp_path / "other")
