"""Key rank crossed with the learning rate of the routes: do narrow keys choose worse, or only learn more slowly?

In short runs narrow keys gave up most of what depth routing gains, against the Low-Rank paper, whose runs are a hundred times as long. Adam
moves every coordinate of a query by about the learning rate whatever the size of its gradient, and keys have unit RMS. So a step moves a
score by about rate x rank: a query of d/8 coordinates turns an eighth as fast. If that is all, a route rate of d/r makes ranks equal, and
losses are constant along rate x rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthroute.recipes.arms import boundary, run_in
from depthroute.recipes.forms import Form
from depthroute.recipes.low_rank import BODIES, with_adamw
from depthroute.study.plan import Arm, Claim, Study

SEEDS = (1, 2, 3)
PARTS = (1, 2, 8, 32)  # rank d, d/2, d/8, d/32, and the route rates that would make up for them
MARGIN = 0.03  # nats per token: a fifth of what Block gained over PreNorm in the runs that gave rise to the study


def route_rate_study(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """Four ranks by four route rates, in blocks of 6 sub-layers, keys without a gain; PreNorm and Block AttnRes as its paper has it beside.

    Args:
        data: folder of the token shards.
        form: "paper" is the Low-Rank paper's 0.5B model on 10B tokens, with AdamW; "small" the same grid on 12 layers x 64 for two cores.
        vocabulary: of the data's tokenizer; None is 100,277 ("paper") or 2,048 ("small").
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: () is 1, 2, 3.
        settings: dotted changes applied to every arm.

    Raises:
        RequestError: a setting that is not one.
    """
    seeds = seeds or SEEDS
    made = with_adamw(BODIES[form])
    base = run_in(made, data, "prenorm", vocabulary=vocabulary, end=end, settings=settings)
    width, blocks = base.model.width, 2 * base.model.layers // 6
    block = run_in(made, data, f"block,num_blocks={blocks},key_gain=true", vocabulary=vocabulary, end=end, settings=settings)
    arms = {"prenorm": Arm(label="PreNorm", config=base), "block": Arm(label="Block AttnRes", config=block)}
    for part in PARTS:
        for rate in PARTS:
            rank = max(1, width // part)
            rated = {**(settings or {}), "train.route_rate": str(rate)}
            specification = f"low-rank,num_blocks={blocks},rank={rank}"
            arms[f"d{part}-x{rate}"] = Arm(
                label=f"rank {rank}, routes x {rate}",
                config=run_in(made, data, specification, vocabulary=vocabulary, end=end, settings=rated),
                factors={"rank": rank, "route_rate": rate},
            )
    stop = boundary(base, len(seeds), "AdamW")
    claims = (
        Claim(text="At the body's rate, full-width keys have a lower loss than keys of d/8", kind="lower", arm="d1-x1", parent="d8-x1",
              boundary=stop),
        Claim(text="Eight times the route rate lowers the loss of keys of d/8", kind="lower", arm="d8-x8", parent="d8-x1", boundary=stop),
        Claim(text="32 times the route rate lowers the loss of keys of d/32", kind="lower", arm="d32-x32", parent="d32-x1", boundary=stop),
        Claim(text="Keys of d/8 at eight times the route rate are as good as full-width keys", kind="equivalent", arm="d8-x8",
              parent="d1-x1", margin=MARGIN, boundary=stop),
        Claim(text="Keys of d/32 at 32 times the route rate are as good as full-width keys", kind="equivalent", arm="d32-x32",
              parent="d1-x1", margin=MARGIN, boundary=stop),
    )  # fmt: skip
    return Study(
        name="Key rank and the rate of routes",
        question="Do narrow keys route worse, or do their queries only turn more slowly at the same learning rate?",
        base=base,
        arms=arms,
        comparisons=(
            *((claim.arm, claim.parent) for claim in claims), ("block", "prenorm"), ("d1-x1", "prenorm"), ("d8-x1", "prenorm"),
            ("d8-x8", "prenorm"), ("d1-x1", "block"), ("d1-x2", "d1-x1"), ("d1-x8", "d1-x1"),
        ),
        seeds=seeds,
        differs=("train.route_rate",),
        claims=claims,
    )  # fmt: skip
