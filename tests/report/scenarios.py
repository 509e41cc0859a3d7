"""Studies of every shape that a report knows, as arguments of `write_study`: controls, sweeps, scales, and what came after the plan."""

from __future__ import annotations

import math
from typing import Any

BLOCK = {"method": "attnres", "block": 4, "roles": "shared"}
ROUTED = {"method": "attnres", "block": 4, "roles": "decoupled"}
PLAIN = {"method": "prenorm"}
PAPER = {"value": -0.021, "source": "Role-Decoupled paper, Table 2", "interval": [-0.03, -0.012], "unit": "nats per token"}


def controls() -> dict[str, Any]:
    """All kinds of paired claims with all verdicts, an arm, a comparison and a claim that came later, documents and further splits."""
    arms = {
        "prenorm": ("PreNorm", PLAIN, 0.0),
        "block": ("Block AttnRes", BLOCK, -0.081),
        "rd": ("RD-AttnRes", ROUTED, -0.105),
        "tied": ("Tied routes", ROUTED | {"tied": True}, -0.081),
        "average": ("Averaged routes", BLOCK | {"first_read": True}, -0.0815),
        "late": ("A later idea", BLOCK | {"gate": 0.5}, -0.084),
    }
    comparisons = [("rd", "block"), ("block", "prenorm"), ("tied", "block"), ("average", "block"), ("block", "rd"), ("late", "block"),
                   ("late", "prenorm")]  # fmt: skip
    claims = [
        {"text": "RD-AttnRes has a lower loss than Block AttnRes", "kind": "lower", "arm": "rd", "parent": "block", "paper": PAPER,
         "boundary": "this corpus, one size, 400 steps"},
        {"text": "Block AttnRes has a lower loss than RD-AttnRes", "kind": "lower", "arm": "block", "parent": "rd"},
        {"text": "Tied routes are Block AttnRes", "kind": "identical", "arm": "tied", "parent": "block"},
        {"text": "Averaging changes nothing", "kind": "equivalent", "arm": "average", "parent": "block", "margin": 0.02},
        {"text": "RD changes nothing", "kind": "equivalent", "arm": "rd", "parent": "block", "margin": 0.004},
        {"text": "The later idea lowers the loss", "kind": "lower", "arm": "late", "parent": "block"},
    ]  # fmt: skip
    return {
        "arms": arms,
        "comparisons": comparisons,
        "claims": claims,
        "seeds": (0, 1, 2, 3),
        "details": {
            "rd": {"paper": PAPER | {"value": 2.93, "interval": None}},
            "block": {"paper": PAPER | {"value": 2.951, "interval": None}},
        },
        "extensions": [{"arms": ["late"], "comparisons": [["late", "block"], ["late", "prenorm"]], "claims": [claims[-1]["text"]]}],
        "compute": {name: (6.0e6, 1.0e5 * index) for index, name in enumerate(arms)},
        "documents": 60,
        "splits": {"1 hop": 0.5, "2 hops": 1.5},
    }


def sweep(ranks: tuple[int, ...] = (12, 24, 48, 96), blocks: tuple[int, ...] = (2, 4, 8, 16)) -> dict[str, Any]:
    """Key ranks by numbers of blocks with a bowl's bottom at rank 24 and 8 blocks; a second kind of keys in part of the grid."""
    arms: dict[str, tuple[str, dict[str, Any], float]] = {"prenorm": ("PreNorm", PLAIN, 0.0)}
    details: dict[str, dict[str, Any]] = {"prenorm": {"seeds": [0]}}
    for keys in ("slice", "projected"):
        for rank in ranks if keys == "slice" else ranks[:2]:
            for number in blocks if keys == "slice" else blocks[:2]:
                name = f"{keys}-r{rank}-n{number}"
                gain = -0.06 + 0.004 * math.log2(rank / 24) ** 2 + 0.003 * math.log2(number / 8) ** 2 + 0.01 * (keys == "projected")
                arms[name] = (f"{keys.capitalize()} keys, rank {rank}, N = {number}", BLOCK | {"rank": rank, "num_blocks": number}, gain)
                repeated = keys == "slice" and rank == 24 and number in blocks[1:3]
                details[name] = {"factors": {"rank": rank, "blocks": number, "keys": keys}, "seeds": [0, 1, 2] if repeated else [0]}
    best = "slice-r24-n8"
    return {
        "arms": arms,
        "details": details,
        "comparisons": [(best, f"slice-r{ranks[-1]}-n8"), *((name, "prenorm") for name in arms if name != "prenorm")],
        "claims": [{"text": "Narrow keys do no worse", "kind": "lower", "arm": best, "parent": f"slice-r{ranks[-1]}-n8"}],
        "compute": {name: (6.0e6, 0.0 if name == "prenorm" else 400.0 * index) for index, name in enumerate(arms)},
        "routed": False,
    }


def scales(names: tuple[str, ...] = ("XS", "S", "M", "L")) -> dict[str, Any]:
    """Three methods at several scales, losses on power laws of compute; RD needs 0.8 of PreNorm's compute."""
    arms: dict[str, tuple[str, dict[str, Any], float]] = {}
    details: dict[str, dict[str, Any]] = {}
    compute: dict[str, tuple[float, float]] = {}
    sizes: dict[str, int] = {}
    for index, scale in enumerate(names):
        for method, residual, label, saved, added in (
            ("prenorm", PLAIN, "PreNorm", 1.0, 0.0), ("block", BLOCK, "Block AttnRes", 0.9, 0.02), ("rd", ROUTED, "RD-AttnRes", 0.8, 0.03),
        ):  # fmt: skip
            name, plain = f"{method}-{scale.lower()}", 1e6 * 3.0**index
            arms[name] = (f"{label}, {scale}", residual, 4.4 * (plain * (1 + added) / saved / 1e6) ** -0.05 - 4.4)
            details[name] = {"scale": scale, "factors": {"method": method}}
            compute[name], sizes[name] = (plain, plain * added), 400_000 * 3**index
    lower = [("rd", "block"), ("block", "prenorm"), ("rd", "prenorm")]
    return {
        "arms": arms,
        "details": details,
        "comparisons": [(f"{a}-{scale.lower()}", f"{b}-{scale.lower()}") for a, b in lower for scale in names],
        "claims": [
            {"text": "RD-AttnRes saves compute", "kind": "saves", "arm": "rd", "parent": "prenorm", "margin": 1.0,
             "paper": {"value": 1.25, "source": "Attention Residuals, section 5", "interval": None, "unit": "times the compute"}},
            {"text": "RD-AttnRes saves half the compute", "kind": "saves", "arm": "rd", "parent": "prenorm", "margin": 2.0},
        ],
        "compute": compute,
        "sizes": sizes,
        "routed": False,
    }  # fmt: skip


def crossed() -> dict[str, Any]:
    """Two methods in the four conditions of two factors: the rate moves the gap by -0.04, the steps do not."""
    arms: dict[str, tuple[str, dict[str, Any], float]] = {}
    details: dict[str, dict[str, Any]] = {}
    for rate in (1e-3, 3e-3):
        for steps in (150, 600):
            scale = f"{'h' if rate > 1e-3 else 'l'}{'h' if steps > 150 else 'l'}"
            for method, residual, label, gain in (("prenorm", PLAIN, "PreNorm", 0.0), ("block", BLOCK, "Block AttnRes", -0.1)):
                arms[f"{method}-{scale}"] = (f"{label}, {scale}", residual, gain - 0.04 * (rate > 1e-3 and method == "block"))
                factors = {"method": method, "learning_rate": rate, "steps": steps}
                details[f"{method}-{scale}"] = {"scale": scale, "factors": factors}
    pairs = [(f"block-{scale}", f"prenorm-{scale}") for scale in ("ll", "lh", "hl", "hh")]
    return {"arms": arms, "details": details, "comparisons": pairs, "routed": False}


def large(number: int = 33) -> dict[str, Any]:
    """A study of many routed arms against one parent."""
    arms = {"prenorm": ("PreNorm", PLAIN, 0.0)}
    arms |= {f"arm-{n}": (f"Variant {n}", ROUTED | {"rank": 4 + n}, -0.002 * n) for n in range(1, number)}
    return {"arms": arms, "comparisons": [(name, "prenorm") for name in arms if name != "prenorm"], "documents": 181,
            "compute": {name: (6.0e6, 1.0e4 * index) for index, name in enumerate(arms)}}  # fmt: skip
