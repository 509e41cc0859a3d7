"""Peak memory of training shape S (rd-s) in bf16 for some steps: Block and RD AttnRes over PreNorm, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.rows import Row, finish, parser

ARMS = {"prenorm": "PreNorm", "block": "Block AttnRes", "rd": "RD-AttnRes"}
TARGETS = {"block": 1.03, "rd": 1.03}


def train_once(arm: str, steps: int, sequences: int) -> None:
    """In the child: train on random tokens and print the peak resident set in bytes."""
    import dataclasses

    import torch

    from depthroute.model import Decoder
    from depthroute.recipes import recipe, run_of
    from depthroute.train import initialise, resolve
    from depthroute.train.devices import keep_freed_memory, peak_memory_bytes
    from depthroute.train.on_one import accumulate_gradients
    from depthroute.train.optimiser import build_optimiser

    config = resolve(run_of(recipe("rd-s"), Path(), residual=arm, settings={"train.precision": "bf16"}))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, sequences=sequences, microbatch=sequences))
    keep_freed_memory()
    model = Decoder(config.model)
    initialise(model, 0)
    optimiser = build_optimiser(model, config.train)
    random = np.random.default_rng(0)
    for _ in range(steps):
        batch = torch.from_numpy(random.integers(0, config.model.vocabulary, (sequences, config.model.context + 1)))
        accumulate_gradients(model, batch, config)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    print(json.dumps({"bytes": peak_memory_bytes("cpu")}))


def measure(arm: str, steps: int, sequences: int) -> int:
    command = [sys.executable, "-m", "benchmarks.memory", "--child", arm, "--steps", str(steps), "--sequences", str(sequences)]
    with tempfile.TemporaryFile("w+") as output:
        subprocess.run(command, check=True, stdout=output)
        output.seek(0)
        return int(json.loads(output.read())["bytes"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--sequences", type=int, default=4, help="sequences of 1,024 tokens in a batch")
    options.add_argument("--arm", action="append", metavar="RESIDUAL", help="instead of Block and RD, such as block,phases=false")
    options.add_argument("--child", metavar="RESIDUAL", help="measure one arm in this process and print it")
    given = options.parse_args()
    if given.child:
        train_once(given.child, given.steps, given.sequences)
        return
    arms = ["prenorm", *(given.arm or TARGETS)]
    peak = {arm: measure(arm, given.steps, given.sequences) for arm in arms}
    rows = [Row("PreNorm, peak memory", peak["prenorm"] / 2**30, unit=" GiB")]
    for arm in arms[1:]:
        rows.append(Row(f"{ARMS.get(arm, arm)} over PreNorm, peak memory", peak[arm] / peak["prenorm"], TARGETS.get(arm), unit="x"))
    finish(rows, given)


if __name__ == "__main__":
    main()
