"""A whole training step of the first study's body: routed arms over PreNorm, interleaved in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.cli.options import changes
from depthroute.model import Decoder
from depthroute.recipes import recipe, run_of
from depthroute.train import initialise, resolve
from depthroute.train.devices import keep_freed_memory
from depthroute.train.loop import accumulate_gradients
from depthroute.train.optimiser import adamw

ARMS = {"prenorm": "PreNorm", "block": "Block AttnRes", "rd": "RD-AttnRes", "full": "Full AttnRes"}
TARGETS = {"block": 1.10, "rd": 1.10}


def step_of(recipe_name: str, arm: str, settings: dict[str, str]) -> Callable[[], None]:
    """One optimiser step on random tokens: forward, backward, clipping and AdamW, as the training loop does them."""
    config = resolve(run_of(recipe(recipe_name), Path(), residual=arm, settings=settings))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, threads=torch.get_num_threads()))
    model = Decoder(config.model)
    initialise(model, 0)
    optimiser = adamw(model, config.train)
    generator = torch.Generator().manual_seed(0)

    def run() -> None:
        shape = (config.train.sequences, config.model.context + 1)
        batch = torch.randint(0, config.model.vocabulary, shape, generator=generator)
        accumulate_gradients(model, batch, config)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clip or 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=25)
    options.add_argument("--recipe", default="small")
    options.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field, such as model.width=128")
    options.add_argument("--threads", type=int, help="CPU threads; default: what torch chooses")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    keep_freed_memory()
    seconds = interleaved({arm: step_of(given.recipe, arm, changes(given.set)) for arm in ARMS}, repeats=given.repeats)
    rows = []
    for arm, label in ARMS.items():
        if arm != "prenorm":
            lowest, median = ratios(seconds, arm, "prenorm")
            rows.append(Row(f"{label} over PreNorm, step time (median of pairs)", median, TARGETS.get(arm), unit="x"))
            rows.append(Row(f"{label} over PreNorm, step time (minima)", lowest, unit="x"))
    rows.append(Row("PreNorm, step time (context, not a result)", min(seconds["prenorm"]) * 1e3, unit=" ms"))
    finish(rows, given)


if __name__ == "__main__":
    main()
