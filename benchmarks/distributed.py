"""Training on several processes of this machine (CPU, gloo, a thread each): copies, the pipeline's cache, and the bytes on the wire.

Every candidate takes whole optimiser steps. All of them are in the same processes and take turns there; a step takes as long as it does on
the slowest process. The routed arms have eight blocks, as in the Attention Residuals paper.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.cli.options import changes
from depthroute.cost.pipeline import cached_formula, chunk_ends, naive_formula, pipeline_traffic
from depthroute.model import ModelConfig
from depthroute.parallel.layout import Keeps, parse_layout
from depthroute.parallel.network import Network
from depthroute.parallel.world import meshes
from depthroute.recipes import recipe, run_of
from depthroute.residual import AttnResConfig
from depthroute.train import RunConfig, initialise, resolve
from depthroute.train.devices import keep_freed_memory
from depthroute.train.on_many import OnMany
from depthroute.train.on_one import OnOne

ARMS = {"prenorm": "PreNorm", "block": "Block AttnRes", "rd": "RD-AttnRes", "full": "Full AttnRes"}
BODY = ("model.width=768", "model.heads=12", "model.mlp_width=2048", "model.context=512", "model.layers=8", "train.precision=float32")
SUBLAYERS, WIDTH, CONTEXT, FLOAT = 32, 16, 8, 4  # of the model whose bytes are counted
# Narrow, so that what is sent weighs more beside what is computed.
NARROW = ("model.width=128", "model.heads=2", "model.mlp_width=352", "model.context=1024", "model.layers=8", "train.precision=float32")
KEEPS: dict[Keeps, str] = {"none": "sending all (naive)", "received": "keeping what was received", "all": "keeping all"}
SUITE_MINUTES = 8.0


def run_config(arm: str, sequences: int, body: tuple[str, ...] = BODY) -> RunConfig:
    settings = changes([*body, f"train.sequences={sequences}", "train.microbatch=1", "train.threads=1"])
    return resolve(run_of(recipe("small"), Path(), residual=f"{arm}:2" if arm in ("block", "rd") else arm, settings=settings))


def step_of(workers: OnOne | OnMany, config: RunConfig) -> Callable[[], None]:
    """A whole step on random tokens, as the training loop takes it; it ends when every process is there."""
    rows = config.train.sequences if isinstance(workers, OnOne) else workers.network.rows
    shape = (rows, config.model.context + 1)
    batch = torch.randint(0, config.model.vocabulary, shape, generator=torch.Generator().manual_seed(distributed.get_rank()))

    def run() -> None:
        workers.accumulate(batch)
        norm = workers.gradient_norm()
        if norm > 1.0:
            workers.clip(1.0, norm)
        workers.optimiser.step()
        workers.optimiser.zero_grad()
        distributed.barrier()

    return run


def copies(repeats: int) -> dict[str, list[float]]:
    """Seconds of a step: each arm on two processes as copies of one model, and as two models that know nothing of each other."""
    candidates = {}
    for arm in ("prenorm", "block", "rd"):
        together, apart = run_config(arm, 4), run_config(arm, 2)
        candidates[f"{arm} together"] = step_of(OnMany(together, meshes(parse_layout("ddp:2"), torch.device("cpu"))), together)
        candidates[f"{arm} apart"] = step_of(OnOne(apart), apart)
    return interleaved(candidates, repeats=repeats)


def pipeline(repeats: int, body: tuple[str, ...], arms: tuple[tuple[str, str], ...]) -> dict[str, list[float]]:
    """Seconds of a step of interleaved 1F1B on two processes with two stages each, of arms and what they keep."""
    candidates = {}
    for arm, keeps in arms:
        config = run_config(arm, 4, body)
        world = meshes(parse_layout(f"pp:2,virtual=2,keeps={keeps}"), torch.device("cpu"))
        candidates[f"{arm} {keeps}"] = step_of(OnMany(config, world), config)
    return interleaved(candidates, repeats=repeats)


def wire() -> dict[tuple[int, int, str], int]:
    """Bytes that this process sends in a step with one micro-batch a stage, by virtual stages, size of the blocks, and what is kept."""
    stages = distributed.get_world_size()
    found = {}
    for virtual, size, keeps in ((v, size, keeps) for v in (1, 2) for size in sizes(stages * v) for keeps in KEEPS):
        layout = f"pp:{stages},keeps={keeps}" + (f",virtual={virtual}" if virtual > 1 else "")
        network = Network(
            tiny(size), meshes(parse_layout(layout), torch.device("cpu")), sequences=stages, microbatch=1, precision=None,
            fill=lambda module: initialise(module, 0),
        )  # fmt: skip
        network.accumulate(torch.zeros(stages, CONTEXT + 1, dtype=torch.long), 0.0)
        assert network.pipeline is not None
        found[virtual, size, keeps] = network.pipeline.wire.total
    return found


def sizes(chunks: int) -> tuple[int, int]:
    """Of blocks: one that every chunk holds a whole number of, and one that goes over the cuts."""
    return SUBLAYERS // chunks, 3


def tiny(block: int) -> ModelConfig:
    shape = {"vocabulary": 64, "width": WIDTH, "layers": SUBLAYERS // 2, "heads": 2, "mlp_width": 32, "context": CONTEXT}
    return ModelConfig(**shape, residual=AttnResConfig(block=block))


def on_processes(number: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function of this file returns on every one of a group of processes with one thread each."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    results = context.SimpleQueue()
    processes = [
        context.Process(target=run_there, args=(rank, number, port, results, function, arguments)) for rank in range(number)
    ]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    failed = [value for value in found.values() if isinstance(value, BaseException)]
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(number)]


def run_there(rank: int, number: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(number)}
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        distributed.init_process_group("gloo")
        results.put((rank, function(*arguments)))
        distributed.destroy_process_group()
    except BaseException as error:
        results.put((rank, error))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def slowest(everyone: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of all processes, step by step."""
    return {name: [max(times) for times in zip(*(found[name] for found in everyone), strict=True)] for name in everyone[0]}


def rows_of_copies(repeats: int) -> list[Row]:
    seconds = slowest(on_processes(2, copies, repeats))
    rows, shares = [], {}
    for arm in ("prenorm", "block", "rd"):
        label = ARMS[arm]
        lowest, median = ratios(seconds, f"{arm} apart", f"{arm} together")
        shares[arm] = median
        target = None if arm == "prenorm" else 0.9
        rows.append(Row(f"DDP on 2 processes: {label}, part of the ideal (median of pairs)", median, target, at_most=False))
        rows.append(Row(f"DDP on 2 processes: {label}, part of the ideal (minima)", lowest))
    for arm in ("block", "rd"):
        rows.append(Row(f"DDP on 2 processes: {ARMS[arm]}'s part over PreNorm's", shares[arm] / shares["prenorm"]))
    return rows


def rows_of_pipeline(repeats: int) -> list[Row]:
    arms = (("prenorm", "all"), ("block", "all"), ("rd", "all"))
    seconds = slowest(on_processes(2, pipeline, repeats, BODY, arms))
    rows = []
    for arm in ("block", "rd"):
        lowest, median = ratios(seconds, f"{arm} all", "prenorm all")
        rows.append(Row(f"pipeline, P = 2, V = 2: {ARMS[arm]} over PreNorm (median of pairs)", median, 1.05, unit="x"))
        rows.append(Row(f"pipeline, P = 2, V = 2: {ARMS[arm]} over PreNorm (minima)", lowest, unit="x"))
    return rows


def rows_of_transport(repeats: int) -> list[Row]:
    rows = []
    for arm in ("block", "full"):
        seconds = slowest(on_processes(2, pipeline, 6 * repeats, NARROW, ((arm, "none"), (arm, "all"))))
        lowest, median = ratios(seconds, f"{arm} all", f"{arm} none")
        rows.append(Row(f"pipeline, P = 2, V = 2: {ARMS[arm]}, cached over naive (median of pairs)", median, 1.0, unit="x"))
        rows.append(Row(f"pipeline, P = 2, V = 2: {ARMS[arm]}, cached over naive (minima)", lowest, unit="x"))
    return rows


def rows_of_wire() -> list[Row]:
    """How far the counted bytes of a step are from the formulas, in tensors [width] a token and direction."""
    rows = []
    for stages in (2, 4):
        everyone = on_processes(stages, wire)
        for virtual, size, keeps in everyone[0]:
            tokens = stages * CONTEXT  # of a step
            sent = sum(found[virtual, size, keeps] for found in everyone) / (2 * tokens * WIDTH * FLOAT)
            expected, words = formula(stages, virtual, size, keeps)
            row = f"wire, P = {stages}, V = {virtual}, blocks of {size}, {KEEPS[keeps]}: tensors a token beyond {words} = {expected:g}"
            rows.append(Row(row, abs(sent - expected), 0.0))
    return rows


def formula(stages: int, virtual: int, size: int, keeps: Keeps) -> tuple[float, str]:
    """What the papers' formulas say, and its words. They count blocks: for those that go over cuts it is the count event by event."""
    chunks = stages * virtual
    per_chunk = Fraction(SUBLAYERS // size, chunks)
    if size * chunks * per_chunk != SUBLAYERS or per_chunk.denominator != 1:
        traffic = pipeline_traffic(tiny(size).residual.block_ends(SUBLAYERS), chunk_ends(SUBLAYERS, chunks), stages, keeps)
        return traffic.total, "the count by events"
    if keeps == "none":
        return naive_formula(stages, virtual, per_chunk) + chunks - 1, "Eq. 7 and the embedding"
    cached = cached_formula(stages, virtual, per_chunk) + stages - 1
    if keeps == "received":
        return cached, "Eq. 8 and the embedding"
    return cached - float((virtual - 1) * stages * per_chunk), "Eq. 8 without what the receiver made, and the embedding"


def rows_of_suite() -> list[Row]:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "2", "-m", "not slow and not gpu", "tests/parallel"], check=False)
    minutes = (time.perf_counter() - started) / 60
    return [
        Row("tests of several processes that failed", float(done.returncode != 0), 0.0),
        Row("tests of several processes, on two cores", minutes, SUITE_MINUTES, unit=" min"),
    ]


TIMED = {"copies": rows_of_copies, "pipeline": rows_of_pipeline, "transport": rows_of_transport}
PARTS = {**TIMED, "wire": rows_of_wire, "suite": rows_of_suite}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=list(PARTS), action="append", help="only this part; may be given more than once")
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    rows: list[Row] = []
    for name in given.part or PARTS:
        rows += TIMED[name](given.repeats) if name in TIMED else PARTS[name]()
    finish(rows, given)


if __name__ == "__main__":
    main()
