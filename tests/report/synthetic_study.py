"""Study folders made of formulas: everything docs/run-folder.md asks for, and no training."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from depthroute.common.config import fingerprint
from depthroute.common.files import write_bytes, write_json, write_text
from depthroute.study.ledger import ledger

LAYERS, BLOCK = 8, 4
STEPS, MILESTONES = 400, (50, 100, 150, 200, 250, 300, 350, 400)
VOCABULARY = 2048
ENTROPY = 6.3312
BODY = 1_083_456  # parameters without a residual method
EXTENSION: Mapping[str, Any] = {
    "written_at": "2025-06-02T09:30:00+00:00", "arms": [], "seeds": [], "comparisons": [], "claims": [], "complete_cells": 9,
    "previous_hash": "aa" * 32,
}  # fmt: skip
ARMS = {
    "prenorm": ("PreNorm", {"method": "prenorm"}, 0.0),
    "block": ("Block AttnRes", {"method": "attnres", "block": BLOCK, "roles": "shared"}, -0.081),
    "rd": ("RD-AttnRes", {"method": "attnres", "block": BLOCK, "roles": "decoupled"}, -0.098),
}


def write_study(
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    unfinished: Mapping[tuple[str, int], int] | None = None,
    arms: Mapping[str, tuple[str, dict[str, Any], float]] = ARMS,
    comparisons: Sequence[tuple[str, str]] | None = None,
    name: str = "Depth routing against its parent",
    routed: bool = True,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    claims: Sequence[Mapping[str, Any]] = (),
    extensions: Sequence[Mapping[str, Any]] = (),
    compute: Mapping[str, tuple[float, float]] | None = None,
    documents: int = 0,
    splits: Mapping[str, float] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Write a study.

    `unfinished` maps a cell to the step it stopped after (0: never started); `arms` gives label, residual and gain. `details` are further
    fields of an arm's entry in the plan (scale, factors, seeds, trunk, paper); claims need only text, kind, arm and parent. `compute` is
    FLOPs per token by arm, of the decoder and of its residual method. `documents`: how many documents.npz holds, none by default.
    `splits` are further evaluation splits, and how much of an arm's gain each shows. `sizes` are parameters of the body by arm.
    """
    unfinished, details, compute, splits, sizes = unfinished or {}, details or {}, compute or {}, splits or {}, sizes or {}
    if comparisons is None:
        comparisons = [("rd", "block"), ("block", "prenorm"), ("rd", "prenorm")]
    plain = {"scale": "", "factors": {}, "seeds": list(seeds), "trunk": None, "paper": None}
    plan: dict[str, Any] = {
        "format": 2,
        "name": name,
        "question": "Does routing over depth lower the loss of a small decoder on technical prose?",
        "arms": [
            {"name": arm, "label": label, **plain, **details.get(arm, {}), "config": _config(residual)}
            for arm, (label, residual, _) in arms.items()
        ],
        "comparisons": [list(pair) for pair in comparisons],
        "differs": [],
        "seeds": list(seeds),
        "endpoint": "validation",
        "claims": [{"margin": 0.0, "boundary": "", "paper": None, **claim} for claim in claims],
        "stopping": "Every planned cell is trained to its last step; no result decides when to stop.",
        "data_fingerprint": "5f" * 32,
        "extensions": [{**EXTENSION, **extension} for extension in extensions],
    }
    arm_seeds = {entry["name"]: entry["seeds"] for entry in plan["arms"]}
    write_json(folder / "plan.json", plan | {"written_at": "2025-06-01T09:30:00+00:00", "hash": fingerprint(plan)})
    losses = {}
    for arm, (_, residual, gain) in arms.items():
        for seed in arm_seeds[arm]:
            stopped = unfinished.get((arm, seed), STEPS)
            if stopped:
                found = _write_run(
                    folder / "runs" / arm / f"seed-{seed}", residual, gain, seed, stopped, routed, splits, sizes.get(arm, BODY)
                )
                if stopped == STEPS:
                    losses[arm, seed] = found
                    if documents:
                        _write_documents(folder / "runs" / arm / f"seed-{seed}", documents, gain, seed, found[STEPS])
    missing = [
        {"arm": arm, "seed": seed, "reason": f"stopped after step {step}; run the study again to go on." if step else "not started."}
        for (arm, seed), step in unfinished.items()
    ]
    statistics = [
        {"arm": arm, "parent": parent, "endpoint_step": STEPS, "milestones": _milestones(losses, arm, parent, seeds)}
        for arm, parent in comparisons
    ]
    costs = {arm: {"plain": plain, "residual": residual, "tokens": STEPS * 2048} for arm, (plain, residual) in compute.items()}
    found = ledger(plan, statistics, {cell: values[STEPS] for cell, values in losses.items()}, costs)
    write_json(
        folder / "statistics.json",
        {"comparisons": statistics, "claims": found, "compute": costs, "missing": missing, "unanalysed": []},
    )
    return folder


def _config(residual: Mapping[str, Any]) -> dict[str, Any]:
    model = {
        "vocabulary": VOCABULARY,
        "width": 96,
        "layers": LAYERS,
        "heads": 6,
        "mlp_width": 256,
        "context": 128,
        "tied_embeddings": True,
        "rope_base": 10_000.0,
        "qk_norm": False,
        "key_value_heads": None,
        "residual": dict(residual),
    }
    train = {
        "steps": STEPS,
        "sequences": 16,
        "learning_rate": 1e-3,
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
        "warmup_fraction": 0.02,
        "final_fraction": 0.1,
        "gradient_clip": 1.0,
        "seed": 0,
        "milestones": list(MILESTONES),
    }
    return {"model": model, "train": train, "data": "data/docstrings", "data_fingerprint": "5f" * 32}


def _loss(gain: float, seed: int, step: int) -> float:
    progress = step / STEPS
    lucky = 0.02 * math.sin(7.0 * seed + 1.0) + 0.006 * math.sin(3.0 * seed + 90.0 * gain)
    return 3.50 + 4.12 * math.exp(-7.0 * progress) + 0.25 * (1 - progress) + gain * (1 - math.exp(-6 * progress)) + lucky


def _write_run(
    folder: Path,
    residual: Mapping[str, Any],
    gain: float,
    seed: int,
    stopped: int,
    routed: bool,
    splits: Mapping[str, float],
    size: int,
) -> dict[int, float]:
    noise = random.Random(f"{gain} {seed}")
    write_json(folder / "config.json", {"format": 1, **_config(residual)})
    write_json(
        folder / "environment.json",
        {
            "started_at": "2025-06-01T09:30:05+00:00",
            "python": "3.11.9",
            "packages": {"torch": "2.13.0", "numpy": "2.3.1"},
            "platform": "Linux-6.1-x86_64",
            "processor": "Example CPU @ 2.40GHz",
            "processors": 2,
            "threads": 2,
            "instructions": "AVX512",
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "data": {
                "format": 1,
                "vocabulary": VOCABULARY,
                "unigram_entropy_nats": ENTROPY,
                "dtype": "uint16",
                "corpus": {"name": "docstrings", "content_hash": "ab" * 32, "contents": ["numpy 2.3.1", "torch 2.13.0"], "missing": []},
                "files": [{"name": "train-00000.bin", "bytes": 12_424_690, "sha256": "cd" * 32}],
                "splits": {
                    "train": {"documents": 3521, "tokens": 6_212_345, "bytes": 21_034_567},
                    "validation": {"documents": 181, "tokens": 310_221, "bytes": 1_052_113},
                },
            },
        },
    )
    metrics = [
        {
            "step": step,
            "tokens": step * 2048,
            "loss": _loss(gain, seed, step) + noise.gauss(0, 0.09),
            "learning_rate": 1e-3,
            "gradient_norm": (0.8 + gain) * (1 + 2 * math.exp(-step / 40)) + 0.02 * seed,
            "seconds": 0.05,
        }
        for step in range(1, stopped + 1)
    ]
    write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in metrics))
    losses = {step: _loss(gain, seed, step) + 0.04 for step in MILESTONES if step <= stopped}
    evaluations = [
        {
            "step": step,
            "tokens": step * 2048,
            "split": "validation",
            "nll": nll,
            "perplexity": math.exp(nll),
            "evaluated_tokens": 262_144,
            "seconds": 1.5,
        }
        for step, nll in losses.items()
    ]
    evaluations += [
        {**line, "split": split, "nll": _split_loss(line["step"], share * gain, seed), "accuracy": _accuracy(share * gain, seed)}
        for split, share in splits.items()
        for line in evaluations
    ]
    write_text(folder / "evaluations.jsonl", "".join(json.dumps(line) + "\n" for line in evaluations))
    if stopped < STEPS:
        return losses
    attention = residual["method"] == "attnres"
    decoupled = residual.get("roles") == "decoupled"
    added = 3 * 96 * (25 if decoupled else 17) if attention else 0
    speed = 41_000 * (1 - 0.06 * attention - 0.02 * decoupled) * (1 + 0.004 * seed)
    write_json(
        folder / "result.json",
        {
            "status": "complete",
            "step": STEPS,
            "tokens": STEPS * 2048,
            "nll": losses[STEPS],
            "perplexity": math.exp(losses[STEPS]),
            "parameters": {"total": size + added, "residual": added, "embedding": VOCABULARY * 96},
            "tokens_per_second": {"median": speed, "mean": speed * 0.98},
            "peak_memory_bytes": int(1.21e9 * (1 + 0.031 * attention)),
            "training_seconds": STEPS * 2048 / speed,
            "gradient_norm": {"mean": 0.8, "maximum": 3.1, "fraction_clipped": 0.12},
        },
    )
    if attention and routed:
        write_json(folder / "routing.json", _routing(residual, seed))
    return losses


def _split_loss(step: int, gain: float, seed: int) -> float:
    return 2.0 + math.exp(-step / 100) + gain + 0.004 * math.sin(5.0 * seed + 60 * gain)


def _accuracy(gain: float, seed: int) -> float:
    return 0.5 * math.exp(-gain) + 0.001 * seed


def _write_documents(folder: Path, documents: int, gain: float, seed: int, loss: float) -> None:
    """Documents of 40 to 49 tokens whose mean loss per token is the run's, each with a level that all runs share."""
    counts = [40 + i % 10 for i in range(documents)]
    rates = [0.5 * math.sin(i) + 0.3 * gain * math.sin(2.0 * i) + 0.01 * math.sin(3.0 * i + seed) for i in range(documents)]
    shift = loss - sum(r * c for r, c in zip(rates, counts, strict=True)) / sum(counts)
    buffer = io.BytesIO()
    np.savez(buffer, sums=np.array([(r + shift) * c for r, c in zip(rates, counts, strict=True)]), counts=np.array(counts, dtype=np.int64))
    write_bytes(folder / "documents.npz", buffer.getvalue())


def _routing(residual: Mapping[str, Any], seed: int) -> dict[str, Any]:
    sites, divergence = [], []
    for site in range(2 * LAYERS + 1):
        names = ["embedding", *(_source(residual["block"], i) for i in range(site // residual["block"]))]
        names += [f"{_source(residual['block'], site // residual['block'])} so far"] if site % residual["block"] else []
        kind = "output" if site == 2 * LAYERS else "attention" if site % 2 == 0 else "mlp"
        roles = ("query_key", "value") if residual["roles"] == "decoupled" and kind == "attention" else ("shared",)
        weights = {role: _weights(len(names), site + 5 * index, seed) for index, role in enumerate(roles)}
        sites.append(
            {
                "site": site,
                "kind": kind,
                "layer": None if kind == "output" else site // 2,
                "sources": names,
                "roles": {}
                if len(names) == 1
                else {
                    role: {"weights": w, "effective_sources": math.exp(-sum(x * math.log(x) for x in w)), "effective_sources_sd": 0.2}
                    for role, w in weights.items()
                },
            }
        )
        if len(roles) == 2 and len(names) > 1:
            divergence.append({"layer": site // 2, "nats": _jensen_shannon(*weights.values())})
    return {"tokens": 16_384, "sites": sites, "divergence": divergence}


def _source(block: int, index: int) -> str:
    return f"block {index + 1}" if block > 1 else f"{'mlp' if index % 2 else 'attention'} {index // 2}"


def _weights(count: int, site: int, seed: int) -> list[float]:
    scores = [2.2 * math.sin(1.3 * site + 2.1 * i + 0.15 * seed) + (1.4 if i == count - 1 else 0.0) for i in range(count)]
    total = sum(math.exp(s) for s in scores)
    return [math.exp(s) / total for s in scores]


def _jensen_shannon(left: Sequence[float], right: Sequence[float]) -> float:
    middle = [(a + b) / 2 for a, b in zip(left, right, strict=True)]
    return 0.5 * sum(p * math.log(p / m) for side in (left, right) for p, m in zip(side, middle, strict=True))


def _milestones(losses: Mapping[tuple[str, int], Mapping[int, float]], arm: str, parent: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    paired = [seed for seed in seeds if (arm, seed) in losses and (parent, seed) in losses]
    milestones = []
    for step in MILESTONES if paired else ():
        ours, theirs = ([losses[name, seed][step] for seed in paired] for name in (arm, parent))
        differences = [a - p for a, p in zip(ours, theirs, strict=True)]
        n, mean = len(differences), math.fsum(differences) / len(differences)
        sd = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1)) if n > 1 else None
        half = float(stats.t.ppf(0.975, n - 1)) * sd / math.sqrt(n) if sd is not None else None
        reductions = [-math.expm1(d) for d in differences]
        milestones.append(
            {
                "step": step,
                "tokens": step * 2048,
                "seeds": paired,
                "arm_nll": ours,
                "parent_nll": theirs,
                "differences": differences,
                "mean": mean,
                "sd": sd,
                "t_interval": None if half is None else [mean - half, mean + half],
                "bootstrap_interval": [min(differences), max(differences)],
                "sign_flip_p": 2 / 2**n if n > 1 else 1.0,
                "wins": sum(d < 0 for d in differences),
                "losses": sum(d > 0 for d in differences),
                "ties": sum(d == 0 for d in differences),
                "relative_perplexity_reduction": reductions,
                "mean_relative_perplexity_reduction": math.fsum(reductions) / n,
            }
        )
    return milestones
