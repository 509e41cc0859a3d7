"""The tests that the Role-Decoupled paper names as next (section 6).

The paper asks for longer training (iv), and for other block sizes, data, scales and contexts (v). Other data is any study here with other
data. Other scales, the controls over seeds (ii) and crossed backends (iii) are in `recipes.role_decoupled`; strong baselines (i) are
`recipes.studies.baseline_study`. Names of arms are ratios to the paper's setting, so that both forms have the same.

`settings` that change the steps or the context change the setting that the ratios are taken of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.recipes.arms import boundary, run_in, run_of_arm
from depthroute.recipes.forms import Form
from depthroute.recipes.role_decoupled import BODIES, PAPER, PRINTED, SEEDS, SMALL_SEEDS
from depthroute.study.plan import Arm, Claim, Reference, Study
from depthroute.train import RunConfig

METHODS = {"block": "Block AttnRes", "rd": "RD-AttnRes"}

HORIZONS = (1, 2, 5)  # times the paper's 2.0B tokens; section 6 asks for 4B to 10B
DECAY = 0.2  # of a run's steps
BLOCKS = (4, 2, 8, 16)  # in all; the paper's four first. In the small form, 16 is one a sub-layer
RATES = (1, 8)  # of the routes, times the rate of the body
CONTEXTS = (1.0, 0.5, 2.0, 4.0)  # times the paper's


def rd_horizon(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """RD against Block at scale S over 1, 2 and 5 times the paper's tokens. The headline is the longest.

    A method is trained once at the peak learning rate, and every horizon decays from there over its last fifth ("wsd"): the longest run
    is the trunk of the others. So horizons differ in length and in nothing else, and cost one long run and two decays. The paper's
    cosine is another schedule; its effect is beside the claim and not a value to meet. Losses are also taken where decays begin.

    Args:
        settings: `train.steps` is the shortest horizon; its warm-up, in steps, is that of all.

    Raises:
        RequestError: settings name milestones or checkpoints to keep, which the horizons decide.
    """
    for name in ("train.milestones", "train.keep_checkpoints"):
        if name in (settings or {}):
            raise RequestError(f"{name} cannot be set here: the horizons decide it; set train.steps, the shortest of them, instead.")
    seeds = _seeds(form, seeds)
    made = BODIES[form]["S"]
    made = replace(made, train=replace(made.train, schedule="wsd", decay_fraction=DECAY))
    arms: dict[str, Arm] = {}
    for method, label in METHODS.items():
        plain = run_in(made, data, method, vocabulary=vocabulary, end=end, settings=settings)
        runs = _horizons(plain)
        for ratio, run in runs.items():
            tokens = run.train.steps * run.tokens_per_step
            longest = ratio == HORIZONS[-1]
            arms[f"{method}-{ratio}x"] = Arm(
                label=f"{label}, {tokens:,} tokens",
                config=run,
                factors={"method": method, "tokens": tokens},
                trunk=None if longest else f"{method}-{HORIZONS[-1]}x",
            )
    ratios = [f"{ratio}x" for ratio in reversed(HORIZONS)]
    words = {f"{ratio}x": f"after {ratio} times the tokens" if ratio > 1 else "after the shortest training" for ratio in HORIZONS}
    return _rd_against_block(
        "RD-AttnRes over a longer horizon",
        "With everything else the same: does the gap between RD-AttnRes and Block AttnRes last when training is longer?",
        arms, ratios, words, seeds, "1x",
    )  # fmt: skip


def rd_block_size(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """RD against Block at scale S with 2, 4, 8 and 16 blocks. The headline is four, which the paper has."""
    made = BODIES[form]["S"]
    arms: dict[str, Arm] = {}
    for blocks, (method, label) in product(BLOCKS, METHODS.items()):
        run = run_in(made, data, f"{method},num_blocks={blocks}", vocabulary=vocabulary, end=end, settings=settings)
        size = 2 * run.model.layers // blocks
        arms[f"{method}-n{blocks}"] = Arm(
            label=f"{label}, {blocks} blocks of {size} sub-layer{'s' if size > 1 else ''}",
            config=run,
            factors={"method": method, "blocks": blocks},
        )
    return _rd_against_block(
        "RD-AttnRes over block sizes",
        "In one body, on the same tokens in the same order: does the gap between RD-AttnRes and Block AttnRes depend on the block size?",
        arms, [f"n{blocks}" for blocks in BLOCKS], {f"n{blocks}": f"with {blocks} blocks" for blocks in BLOCKS}, _seeds(form, seeds), "n4",
    )  # fmt: skip


def rd_context(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """RD against Block at scale S with half, twice and four times the paper's context, and its own, which is the headline.

    Every context has as many tokens a step: half the context has twice the sequences. Only arms of one context see the same batches.

    Args:
        settings: `model.context` and `train.sequences` are those of ratio 1, and must be divisible by 4 in sequences and 2 in context.

    Raises:
        RequestError: they are not.
    """
    made = BODIES[form]["S"]
    arms: dict[str, Arm] = {}
    for ratio, (method, label) in product(CONTEXTS, METHODS.items()):
        run = _with_context(run_in(made, data, method, vocabulary=vocabulary, end=end, settings=settings), ratio)
        arms[f"{method}-{ratio:g}x"] = Arm(
            label=f"{label}, context {run.model.context:,}",
            config=run,
            scale=f"context-{run.model.context}",
            factors={"method": method, "context": run.model.context},
        )
    names = {f"{ratio:g}x": f"with {ratio:g} times the context" if ratio != 1 else "with the context of scale S" for ratio in CONTEXTS}
    return _rd_against_block(
        "RD-AttnRes over context lengths",
        "With as many tokens a step: does the gap between RD-AttnRes and Block AttnRes depend on the length of the context?",
        arms, list(names), names, _seeds(form, seeds), "1x",
    )  # fmt: skip


def rd_route_rate(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """RD against Block at both scales, with the routes at the body's learning rate and at eight times that (see `recipes.route_rate`)."""
    arms: dict[str, Arm] = {}
    seeds, words = _seeds(form, seeds), {}
    for (scale, made), rate, (method, label) in product(BODIES[form].items(), RATES, METHODS.items()):
        rated = {**(settings or {}), "train.route_rate": str(rate)}
        condition = f"{scale.lower()}-x{rate}"
        words[condition] = f"at {scale} with routes at {rate} times the rate" if rate > 1 else f"at {scale} with routes at the body's rate"
        arms[f"{method}-{condition}"] = Arm(
            label=f"{label}, routes x {rate}, {scale}",
            config=run_in(made, data, method, vocabulary=vocabulary, end=end, settings=rated),
            scale=scale,
            factors={"method": method, "route_rate": rate},
        )
    study = _rd_against_block(
        "RD-AttnRes and the rate of routes",
        "Does the gap between RD-AttnRes and Block AttnRes depend on how fast the routes learn, and what does the rate bring by itself?",
        arms, list(words), words, seeds, "s-x1",
    )  # fmt: skip
    faster = [(f"{m}-{s.lower()}-x{RATES[-1]}", f"{m}-{s.lower()}-x{RATES[0]}") for s in BODIES[form] for m in METHODS]
    claims = tuple(
        Claim(
            text=f"{RATES[-1]} times the route rate lowers the loss of {arms[arm].label.partition(',')[0]} at {arms[arm].scale}",
            kind="lower", arm=arm, parent=parent, boundary=boundary(run_of_arm(arms[arm]), len(seeds)),
        )
        for arm, parent in faster
    )  # fmt: skip
    comparisons = (*study.comparisons, *faster)
    return replace(study, comparisons=comparisons, claims=(*study.claims, *claims), differs=("train.route_rate",))


def _seeds(form: Form, seeds: tuple[int, ...]) -> tuple[int, ...]:
    return seeds or (SEEDS if form == "paper" else SMALL_SEEDS)


def _horizons(plain: RunConfig) -> dict[int, RunConfig]:
    """The runs of one method, evaluated before and after every decay that they share; the longest keeps what the others branch from."""
    warmup = plain.train.steps_of_warmup
    trains = {
        ratio: replace(plain.train, steps=ratio * plain.train.steps, warmup_fraction=None, warmup_steps=warmup, milestones=())
        for ratio in HORIZONS
    }
    decays_at = {ratio: max(1, train.steps - train.steps_of_decay) for ratio, train in trains.items()}
    runs = {}
    for ratio, train in trains.items():
        milestones = tuple(sorted({*(start for other, start in decays_at.items() if other <= ratio), train.steps}))
        kept = tuple(decays_at[other] for other in HORIZONS[:-1]) if ratio == HORIZONS[-1] else ()
        runs[ratio] = replace(plain, train=replace(train, milestones=milestones, keep_checkpoints=kept))
    return runs


def _with_context(run: RunConfig, ratio: float) -> RunConfig:
    """The run with `ratio` times the context and as many tokens a step and in a microbatch."""
    context, sequences = run.model.context * ratio, run.train.sequences / ratio
    if context % 1 or sequences % 1:
        raise RequestError(
            f"model.context = {run.model.context} and train.sequences = {run.train.sequences} cannot be had at {ratio:g} times the "
            "context; take an even context, and sequences that 4 divides."
        )
    microbatch = None if run.train.microbatch is None else max(1, int(run.train.microbatch / ratio))
    train = replace(run.train, sequences=int(sequences), microbatch=microbatch)
    return replace(run, model=replace(run.model, context=int(context)), train=train)


def _rd_against_block(
    name: str, question: str, arms: Mapping[str, Arm], conditions: list[str], words: Mapping[str, str], seeds: tuple[int, ...], own: str
) -> Study:
    """RD against Block in every condition, the first the headline; `own` is the condition that the paper has at scale S."""
    effect, interval = PRINTED["S"].effect
    paper = Reference(value=effect, source=f"{PAPER}, Appendix D, S after 2.0B tokens of a cosine schedule", interval=interval)
    runs = {condition: run_of_arm(arms[f"rd-{condition}"]) for condition in conditions}
    return Study(
        name=name,
        question=question,
        base=run_of_arm(arms[f"block-{own}"]),
        arms=arms,
        comparisons=tuple((f"rd-{condition}", f"block-{condition}") for condition in conditions),
        seeds=seeds,
        claims=tuple(
            Claim(
                text=f"RD-AttnRes has a lower loss than Block AttnRes {words[condition]}",
                kind="lower",
                arm=f"rd-{condition}",
                parent=f"block-{condition}",
                boundary=boundary(run, len(seeds)),
                paper=paper if condition == own else None,
            )
            for condition, run in runs.items()
        ),
    )
