"""Does routing over depth help to compose look-ups? Questions of 1 to K hops, in a shallow and in a deep body.

A look-up is two attentions at least: one that ties an entity to the fact it is in, and one that finds the fact. Each further hop needs the
result of the one before, so hops use up depth (C. Sanford, D. Hsu and M. Telgarsky, "Transformers, parallel computation, and logarithmic
depth", ICML 2024: depth in the order of log k is needed and enough for k hops). A residual method decides which earlier results a layer can
read. The endpoint is the loss of all answers; a perfect model has none. evaluations.jsonl has it by hops as well, as "1 hop", "2 hops", ...

Everything else in a document is known to be unpredictable or constant (`MultiHopConfig.floor`), so the validation loss is mostly noise that
no method can lower; that is why it is not the endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.data import MULTI_HOP, MultiHopConfig, PrepareConfig, read_manifest
from depthroute.data.manifest import MANIFEST
from depthroute.data.multi_hop import ANSWERS
from depthroute.model import ModelConfig
from depthroute.recipes.arms import boundary, run_in
from depthroute.recipes.base import Recipe
from depthroute.recipes.forms import Form
from depthroute.residual import AttnResConfig, ResidualConfig
from depthroute.study.plan import Arm, Claim, Study
from depthroute.train import RunConfig, TrainConfig

SEEDS = (1, 2, 3)
SHARES = tuple(eighth / 8 for eighth in range(1, 9))  # look-ups are learned suddenly, one number of hops after the other
BLOCKS = 4  # at both depths


@dataclass(frozen=True, kw_only=True)
class Size:
    """The corpus, the body at both depths and the training of one form of the study."""

    corpus: MultiHopConfig
    width: int
    heads: int
    layers: Mapping[str, int]
    train: TrainConfig


# For two cores. QK-norm, weights that start larger than usual and a short base of the positions are there to shorten the plateau before
# the first look-up is learned: the shallow PreNorm body answers 98 % of the one-hop questions by step 600.
SMALL = Size(
    corpus=MultiHopConfig(entities=6, hops=4, queries=12, statements=2, documents=70_000),
    width=48,
    heads=4,
    layers={"shallow": 4, "deep": 8},
    train=TrainConfig(
        steps=4_000, sequences=16, learning_rate=4e-3, betas=(0.9, 0.98), warmup_fraction=0.05, precision="float32", threads=1,
        evaluation_tokens=73_728,
    ),
)  # fmt: skip
# For one GPU. No paper has this task; the form is the same study with longer cycles, more hops and wider bodies.
LARGE = Size(
    corpus=MultiHopConfig(entities=16, hops=8, queries=32, statements=2, documents=2_750_000),
    width=256,
    heads=8,
    layers={"shallow": 6, "deep": 24},
    train=TrainConfig(
        steps=20_000, sequences=128, learning_rate=1e-3, betas=(0.9, 0.98), warmup_fraction=0.05, evaluation_tokens=1_000_000
    ),
)
SIZES: dict[Form, Size] = {"small": SMALL, "paper": LARGE}

# Arm, its specification and its label, in the order of training.
METHODS = (
    ("prenorm", "prenorm", "PreNorm"),
    ("block", "block", "Block AttnRes"),
    ("full", "full", "Full AttnRes"),
    ("rd", "rd", "RD-AttnRes"),
    ("mhc", "mhc", "mHC"),
)
# (arm, parent) at each depth; the headline is the first at the deep one.
PAIRS = (("block", "prenorm"), ("full", "prenorm"), ("rd", "block"), ("mhc", "prenorm"), ("block", "mhc"))
WORDS = {
    ("block", "prenorm"): "Block AttnRes answers with a lower loss than PreNorm",
    ("full", "prenorm"): "Full AttnRes answers with a lower loss than PreNorm",
    ("rd", "block"): "RD-AttnRes answers with a lower loss than Block AttnRes",
    ("block", "mhc"): "Block AttnRes answers with a lower loss than mHC",
}


def data(vocabulary: int) -> PrepareConfig:
    """What the study is trained on: the corpus of the form that has so many words.

    Raises:
        RequestError: no form has. The tokens are the corpus's own, so their number cannot be chosen.
    """
    made = {len(size.corpus.words): size.corpus for size in SIZES.values()}
    if vocabulary not in made:
        raise RequestError(
            f"model.vocabulary cannot be {vocabulary} in the multi-hop study: its corpora have {' and '.join(map(str, made))} words. Leave "
            f"it out, or make a corpus of your own with `depthroute data prepare {MULTI_HOP} --out DIR` and give it as the data."
        )
    return PrepareConfig.of(MULTI_HOP, multi_hop=made[vocabulary])


def multi_hop_study(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """PreNorm, three forms of AttnRes and mHC in a shallow and a deep body, on facts and questions of 1 to K hops.

    The context is a document, so that every window holds the facts of its questions.

    Args:
        data: folder of the token shards, made from the source "multi-hop"; where it is not there yet, the form's corpus is meant.
        form: "small" is for two cores; "paper" is the same study large, for a GPU.
        vocabulary: of the data's tokenizer; None is that of the form's corpus.
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: () is 1, 2, 3.
        settings: dotted changes applied to every arm. `model.layers` cannot be one: the two depths are the study. Nor can
            `model.context`: a shorter one would part questions from their facts.

    Raises:
        RequestError: the data is of another source, or a setting is not one.
    """
    reasons = {"model.layers": "the two depths are what the study compares", "model.context": "it is the length of a document"}
    for name in reasons.keys() & (settings or {}).keys():
        raise RequestError(f"{name} cannot be set here: {reasons[name]}; set another field.")
    seeds = seeds or SEEDS
    size = SIZES[form]
    size = replace(size, corpus=_corpus(data) or size.corpus)
    bodies = {scale: _body(size, layers) for scale, layers in size.layers.items()}

    def run(scale: str, specification: str) -> RunConfig:
        return run_in(bodies[scale], data, specification, vocabulary=vocabulary, end=end, settings=settings, shares=SHARES)

    arms = {
        f"{method}-{scale}": Arm(
            label=f"{label}, {scale}", config=run(scale, specification), scale=scale, factors={"method": method, "layers": layers}
        )
        for scale, layers in size.layers.items()
        for method, specification, label in METHODS
    }
    hops = size.corpus.hops
    stop = {scale: boundary(run(scale, "prenorm"), len(seeds), f"1 to {hops} hops on cycles of {size.corpus.entities}") for scale in bodies}
    depths = ("deep", "shallow")
    claims = [
        Claim(text=f"{words} in the {scale} body", kind="lower", arm=f"{arm}-{scale}", parent=f"{parent}-{scale}", boundary=stop[scale])
        for (arm, parent), words in WORDS.items()
        for scale in depths
    ]
    more_layers = Claim(
        text="The deep body answers with a lower loss than the shallow one, both with PreNorm", kind="lower", arm="prenorm-deep",
        parent="prenorm-shallow", boundary=stop["deep"],
    )  # fmt: skip
    return Study(
        name="Composition over depth",
        question=f"In one body, on the same documents in the same order: does routing over depth lower the loss of answers that take 1 to "
        f"{hops} look-ups, does it in a shallow and in a deep body, and does the gap grow with the hops?",
        base=run("deep", "prenorm"),
        arms=arms,
        comparisons=(*((f"{a}-{scale}", f"{b}-{scale}") for a, b in PAIRS for scale in depths), ("prenorm-deep", "prenorm-shallow")),
        seeds=seeds,
        differs=("model.layers",),
        endpoint=ANSWERS,
        claims=(*claims, more_layers),
    )


def _corpus(data: Path) -> MultiHopConfig | None:
    """What the data folder was made from, or None where it is not there yet."""
    if not (data / MANIFEST).exists():
        return None
    prepared = read_manifest(data).prepare
    if prepared.multi_hop is None:
        raise RequestError(
            f"{data} was made from {prepared.sources[0].path!r}, and this study asks for hops; make its data with "
            f"`depthroute data prepare {MULTI_HOP} --out DIR`, or leave the data out."
        )
    return prepared.multi_hop


def _body(size: Size, layers: int) -> Recipe:
    corpus = size.corpus

    def shape(residual: ResidualConfig) -> ModelConfig:
        return ModelConfig(
            vocabulary=len(corpus.words), width=size.width, layers=layers, heads=size.heads, mlp_width=2 * size.width,
            context=corpus.document_tokens, rope_base=100.0, qk_norm=True, init_std=size.width**-0.5, residual=residual,
        )  # fmt: skip

    return Recipe(
        description=f"multi-hop: {layers} layers x {size.width}, {BLOCKS} blocks",
        model=shape, train=size.train, attnres=AttnResConfig(num_blocks=BLOCKS), residual="block",
    )  # fmt: skip
