"""The multi-hop study: pairs that differ in their method alone, claims that are compared, data that fits, and a run of it end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.config import override
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json_lines
from depthroute.data import MultiHopConfig, PrepareConfig, TokenDataset, prepare
from depthroute.recipes.multi_hop import SIZES, data, multi_hop_study
from depthroute.study.plan import plan_of
from depthroute.train import RunConfig, train

FORMS: tuple[Any, ...] = ("small", "paper")


def config(study: Any, arm: str) -> RunConfig:
    found = study.config_of(arm)
    assert isinstance(found, RunConfig)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_pairs_differ_in_their_method_or_their_depth(form: Any) -> None:
    study = multi_hop_study(Path("nowhere"), form=form)
    for arm, parent in study.comparisons:
        ours, theirs = (config(study, name).model for name in (arm, parent))
        if arm == "prenorm-deep":
            assert replace(ours, layers=theirs.layers) == theirs and ours.layers > theirs.layers
        else:
            assert replace(ours, residual=theirs.residual) == theirs and ours.residual != theirs.residual
    assert study.comparisons[0] == ("block-deep", "prenorm-deep") and study.endpoint == "answers"
    assert {(claim.arm, claim.parent) for claim in study.claims} <= set(study.comparisons)
    plan_of(replace(study, base=replace(study.base, data_fingerprint="0" * 64)))  # refuses what a study may not be


@pytest.mark.parametrize("form", FORMS)
def test_the_context_is_a_document_and_no_document_is_seen_twice(form: Any) -> None:
    study, corpus = multi_hop_study(Path("nowhere"), form=form), SIZES[form].corpus
    made = data(study.base.model.vocabulary)
    assert made.multi_hop == corpus and made.sources[0].path == "multi-hop"
    trained = (1 - made.validation_share - made.test_share) * corpus.documents
    for arm in study.arms:
        run = config(study, arm)
        assert run.model.context == corpus.document_tokens and run.model.vocabulary == len(corpus.words)
        assert run.train.steps * run.train.sequences < trained
        assert run.train.evaluation_tokens is not None
        assert run.train.evaluation_tokens < made.validation_share * corpus.documents * corpus.document_tokens


def test_the_blocks_are_four_at_both_depths() -> None:
    study = multi_hop_study(Path("nowhere"))
    for scale in ("shallow", "deep"):
        model = config(study, f"block-{scale}").model
        assert len(model.residual.build(model.body).source_names(model.body.sublayers)) == 1 + 4


def test_data_of_another_source_or_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "some words {i}"}}\n' for i in range(40)))
    prepare(PrepareConfig.of(str(tmp_path / "text.jsonl"), vocabulary=300, sample_one_in=1, validation_share=0.3), tmp_path / "text")
    with pytest.raises(RequestError, match=r"was made from '.*text.jsonl', and this study asks for hops; make its data with"):
        multi_hop_study(tmp_path / "text")
    with pytest.raises(RequestError, match=r"model\.layers cannot be set here"):
        multi_hop_study(Path("nowhere"), settings={"model.layers": 2})
    with pytest.raises(RequestError, match=r"model\.context cannot be set here: it is the length of a document"):
        multi_hop_study(Path("nowhere"), settings={"model.context": 8})
    with pytest.raises(RequestError, match=r"model\.vocabulary cannot be 64 in the multi-hop study: its corpora have 15 and 29 words"):
        data(64)


def test_every_method_trains_on_data_of_the_users_own_and_is_scored_on_its_answers(tmp_path: Path) -> None:
    corpus = MultiHopConfig(entities=4, hops=2, queries=4, documents=200)
    prepare(PrepareConfig.of("multi-hop", multi_hop=corpus), tmp_path / "data")
    vocabulary = TokenDataset.open(tmp_path / "data").vocabulary
    settings = {"train.steps": 2, "train.sequences": 2, "train.milestones": (1,), "train.evaluation_tokens": 74, "model.width": 16}
    study = multi_hop_study(tmp_path / "data", vocabulary=vocabulary, settings=settings)
    with pytest.raises(RequestError, match="endpoint: unknown split '2 hop'; perhaps you meant '2 hops'"):
        plan_of(replace(study, endpoint="2 hop"))
    for arm in (*(name for name in study.arms if name.endswith("-shallow")), "block-deep"):
        run = override(config(study, arm), {"train.device": "cpu"})
        assert run.model.context == corpus.document_tokens == 37
        train(run, tmp_path / arm, console=False)
        lines = read_json_lines(tmp_path / arm / "evaluations.jsonl")
        assert [line["split"] for line in lines] == 2 * ["validation", "1 hop", "2 hops", "answers"]
        answers = [line for line in lines if line["split"] == study.endpoint][-1]
        assert answers["step"] == 2 and answers["evaluated_tokens"] == 2 * corpus.queries
