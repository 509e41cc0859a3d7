"""A whole training step: routed arms over PreNorm, interleaved in one process.

Three bodies: the first study's, one of width 256, and shape S.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.cli.options import changes
from depthroute.model import Decoder
from depthroute.recipes import recipe, run_of
from depthroute.train import initialise, resolve
from depthroute.train.devices import keep_freed_memory
from depthroute.train.on_one import accumulate_gradients
from depthroute.train.optimiser import build_optimiser

ARMS = {"prenorm": "PreNorm", "block": "Block AttnRes", "rd": "RD-AttnRes", "full": "Full AttnRes"}


class Case(NamedTuple):
    """A body and a batch. `targets`: how much longer than PreNorm's an arm's step may take; None is context."""

    title: str
    recipe: str
    settings: tuple[str, ...]
    targets: dict[str, float | None]
    repeats: int


CASES = {
    "small": Case("first study", "small", (), {"block": 1.10, "rd": 1.10, "full": None}, 25),
    "width-256": Case(
        "width 256, 8 layers, 4 x 256 tokens, float32",
        "small",
        ("model.width=256", "model.heads=4", "model.mlp_width=704", "model.context=256", "train.sequences=4"),
        {"block": 1.04, "rd": 1.06, "full": 1.10},
        25,
    ),
    "shape-s": Case(
        "shape S, 4 x 1024 tokens, bf16 autocast",
        "rd-s",
        ("train.sequences=4", "train.microbatch=4", "train.precision=bf16"),
        {"block": 1.03, "rd": 1.04},
        5,
    ),
}


def step_of(recipe_name: str, arm: str, settings: dict[str, str]) -> Callable[[], None]:
    """One optimiser step on random tokens: forward, backward, clipping and AdamW, as the training loop does them."""
    config = resolve(run_of(recipe(recipe_name), Path(), residual=arm, settings=settings))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, threads=torch.get_num_threads()))
    model = Decoder(config.model)
    initialise(model, 0)
    optimiser = build_optimiser(model, config.train)
    generator = torch.Generator().manual_seed(0)

    def run() -> None:
        shape = (config.train.sequences, config.model.context + 1)
        batch = torch.randint(0, config.model.vocabulary, shape, generator=generator)
        accumulate_gradients(model, batch, config)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clip or 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return run


def measure(case: Case, arms: list[str], settings: list[str], repeats: int | None) -> list[Row]:
    runs = {arm: step_of(case.recipe, arm, changes([*case.settings, *settings])) for arm in arms}
    seconds = interleaved(runs, repeats=repeats or case.repeats)
    rows = []
    for arm in arms[1:]:
        lowest, median = ratios(seconds, arm, "prenorm")
        target = None if settings else case.targets.get(arm)
        rows.append(Row(f"{case.title}: {ARMS.get(arm, arm)} over PreNorm (median of pairs)", median, target, unit="x"))
        rows.append(Row(f"{case.title}: {ARMS.get(arm, arm)} over PreNorm (minima)", lowest, unit="x"))
    rows.append(Row(f"{case.title}: PreNorm (context, not a result)", min(seconds["prenorm"]) * 1e3, unit=" ms"))
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--case", choices=list(CASES), action="append", help="only this body; may be given more than once")
    options.add_argument("--arm", action="append", metavar="RESIDUAL", help="instead of the case's arms, such as block,phases=false")
    options.add_argument("--repeats", type=int)
    options.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field; targets are then not checked")
    options.add_argument("--threads", type=int, help="CPU threads; default: what torch chooses")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    keep_freed_memory()
    rows = []
    for name in given.case or CASES:
        arms = ["prenorm", *(given.arm or CASES[name].targets)]
        rows += measure(CASES[name], arms, given.set, given.repeats)
    finish(rows, given)


if __name__ == "__main__":
    main()
