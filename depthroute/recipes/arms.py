"""What the studies of papers share when they make their arms: runs of one body, milestones as shares, and where a claim stops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.recipes.base import Recipe, run_of
from depthroute.study.plan import Arm
from depthroute.train import RunConfig, TrainConfig

# When the Role-Decoupled paper evaluates (C.2): after 0.25, 0.5, 1 and 2 of 2 billion tokens.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


def run_in(
    made: Recipe,
    data: Path,
    residual: str,
    *,
    vocabulary: int | None = None,
    end: int | None = None,
    settings: Mapping[str, Any] | None = None,
    shares: Iterable[float] = SHARES,
) -> RunConfig:
    """The run of a recipe's body with a residual method, evaluated at `shares` of its steps unless `settings` name milestones.

    Shares, because `settings` may change the steps: a study that is shortened keeps its structure.

    Args:
        residual: a specification, `block` or `rd,layers_per_block=2`; the recipe says what it starts from.
        vocabulary: that of the data's tokenizer; None is the recipe's.
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        settings: dotted changes, applied after everything else.

    Raises:
        RequestError: a specification or a setting that is not one, or `model.residual` among the settings: it would be put in the place
            of every arm's own.
    """
    settings = settings or {}
    if "model.residual" in settings:
        raise RequestError("model.residual cannot be set for a whole study, whose arms differ in it; set one of its fields.")
    open_end = dataclasses.replace(made, train=dataclasses.replace(made.train, milestones=()))
    run = run_of(open_end, data, vocabulary=vocabulary, end=end, residual=residual, settings=settings)
    if "train.milestones" in settings:
        return run
    return dataclasses.replace(run, train=dataclasses.replace(run.train, milestones=milestones_at(run.train.steps, shares)))


def milestones_at(steps: int, shares: Iterable[float] = SHARES) -> tuple[int, ...]:
    """Shares of a run's steps as steps, rising and different from each other."""
    return tuple(sorted({max(1, round(share * steps)) for share in shares}))


def boundary(run: RunConfig, seeds: int, *more: str) -> str:
    """Where a claim stops: the corpus, the body, the tokens and the seeds that it was tried with, then `more`."""
    model, tokens = run.model, run.train.steps * run.tokens_per_step
    words = f"one corpus, {model.layers} layers x {model.width}, context {model.context:,}, {tokens:,} tokens"
    return ", ".join((words, f"{seeds} seed{'s' if seeds != 1 else ''}", *more))


def optimiser_words(train: TrainConfig) -> str:
    """What trains the matrices, for a boundary."""
    if not train.uses_muon:
        return "AdamW on every matrix"
    rates = [group.rate for group in train.groups if group.optimiser == "muon"] or [train.matrix_rate]
    return f"Muon on matrices at {train.learning_rate * rates[0]:g}, AdamW elsewhere at {train.learning_rate:g}"


def run_of_arm(arm: Arm) -> RunConfig:
    """The configuration of an arm that has it whole."""
    assert isinstance(arm.config, RunConfig)
    return arm.config
