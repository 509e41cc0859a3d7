"""The members of the AttnRes family that have a name, and their rows in the table of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from depthroute.residual.attnres import AttnResConfig
from depthroute.residual.bank import without_blocks
from depthroute.residual.method import CASE_WIDTH, Degenerate, Method, scattered
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import ResidualConfig

ATTNRES = "Kimi Team 2026"


def family(base: AttnResConfig, **changes: Any) -> AttnResConfig:
    """Full-rank, shared-route AttnRes with the block size and norms of `base`, then `changes`."""
    return replace(base, **{"rank": None, "keys": "slice", "roles": "shared", **changes})


def _plain(config: ResidualConfig) -> Degenerate:
    return Degenerate(says="queries zero: PreNorm, output and gradients of the body", config=config, equals=PreNormConfig())


def _row(
    name: str, label: str, changes: dict[str, Any], equation: str, degenerate: tuple[Degenerate, ...], *, parameters: str = "2d a site",
    paper: str = ATTNRES, start: Callable[[AttnResConfig], AttnResConfig] = family, size: str = "block", **facts: str,
) -> Method:  # fmt: skip
    """A row with what most members have in common."""
    usual = {
        "reads": "the embedding, block sums and the open partial sum", "state": "(N+1)d, and up to (S-1)d read ahead",
        "cost": "2Kd",
    }  # fmt: skip
    return Method(
        name=name, label=label, configure=lambda base: start(base, **changes), size=size, equation=equation, dynamic=True,
        parameters=parameters, paper=paper, degenerate=degenerate, **{**usual, **facts},
    )  # fmt: skip


def _full(base: AttnResConfig, **changes: Any) -> AttnResConfig:
    return family(without_blocks(base), **changes)


def _ranked(base: AttnResConfig, **changes: Any) -> AttnResConfig:
    return family(base, rank=base.rank, key_gain=False, **changes)


_BLOCK = AttnResConfig(block=4)
_TWICE = "(N+1)d, and up to 1.5(S-1)d read ahead"
_EVERY = {"reads": "the embedding and every output", "state": "(2L+1)d"}

METHODS = (
    Method(
        name="full",
        label="Full AttnRes",
        configure=_full,
        equation="h = sum_i softmax_i(q . N(s_i)) s_i",
        dynamic=True,
        parameters="2d a site",
        cost="2Kd",
        paper=f"{ATTNRES}, Eqs. 1-4",
        degenerate=(_plain(AttnResConfig()),),
        **_EVERY,
    ),
    _row(
        "block", "Block AttnRes", {}, "h = sum_i softmax_i(q . N(s_i)) s_i over block sums and the open partial sum", (
            _plain(_BLOCK),
            Degenerate(says="blocks of one sub-layer: Full", config=AttnResConfig(block=1), adjust=scattered, equals=AttnResConfig(),
                       adjust_other=scattered),
        ), paper=f"{ATTNRES}, Eqs. 5-6",
    ),
    _row(
        "low-rank", "Low-Rank AttnRes", {},
        "h = sum_i softmax_i(q . N(k_i)) s_i, k_i the last r coordinates of s_i (key_norm=full, keys=projected: its variants)", (
            _plain(AttnResConfig(block=4, rank=4, key_gain=False)),
            Degenerate(says="r = d: AttnRes", config=AttnResConfig(rank=CASE_WIDTH), adjust=scattered, equals=AttnResConfig(),
                       adjust_other=scattered),
        ), start=_ranked, parameters="r a site, 2r with key_gain=true", cost="K(d + r)", paper="Su 2026, Eqs. 8-13, 25-27",
    ),
    _row(
        "rd", "RD-AttnRes", {"roles": "decoupled"}, "h^QK = sum_i softmax_i(q . N(s_i)) s_i, h^V the same with a query of its own", (
            _plain(AttnResConfig(block=4, roles="decoupled")),
            Degenerate(says="equal routes: Block", config=AttnResConfig(block=4, roles="decoupled"), adjust=scattered, equals=_BLOCK,
                       adjust_other=scattered),
        ), parameters="d a layer more than block", state=_TWICE, cost="3Kd", paper="RD-AttnRes, Eqs. 3-5",
    ),
    _row(
        "rd-tied", "RD, tied", {"roles": "tied"}, "h^QK = h^V, read by one route", (
            Degenerate(says="Block, bit for bit", config=AttnResConfig(block=4, roles="tied"), adjust=scattered, equals=_BLOCK,
                       adjust_other=scattered),
        ), paper="RD-AttnRes, C.3",
    ),
    _row(
        "rd-average", "RD, averaged", {"roles": "average"}, "h = (h^QK + h^V) / 2 for all roles, read by two routes", (
            Degenerate(says="equal routes: Block", config=AttnResConfig(block=4, roles="average"), adjust=scattered, equals=_BLOCK,
                       adjust_other=scattered),
        ), parameters="d a layer more than block", state=_TWICE, cost="3Kd", paper="RD-AttnRes, C.3",
    ),
    _row(
        "rd-frozen-value", "RD, frozen value", {"roles": "frozen_value"}, "h^QK by a route, h^V the mean of the sources", (
            _plain(AttnResConfig(block=4, roles="frozen_value")),
        ), state=_TWICE, cost="3Kd", paper="RD-AttnRes, C.3",
    ),
    _row(
        "mhar", "Multi-Head AttnRes", {"heads": 8},
        "h_g = sum_i softmax_i(q_g . N(s_i)_g) s_i,g for each of H groups of channels; the norm is over all", (
            _plain(AttnResConfig(heads=2)),
        ), start=_full, size="heads", paper="Luo et al. 2026, arXiv 2607.27230", **_EVERY,
    ),
    _row(
        "mhar-block", "Multi-Head Block AttnRes", {"heads": 8},
        "h_g = sum_i softmax_i(q_g . N(s_i)_g) s_i,g for each of H groups of channels, over block sums", (
            _plain(AttnResConfig(block=4, heads=2)),
        ),
        paper=f"{ATTNRES}, Table 4",
    ),
    _row(
        "sigmoid", "AttnRes, sigmoid", {"weighting": "sigmoid"}, "h = sum_i sigmoid(q . N(s_i)) s_i", (
            _plain(AttnResConfig(weighting="sigmoid")),
        ), start=_full, paper=f"{ATTNRES}, Table 4", **_EVERY,
    ),
    _row(
        "no-key-norm", "AttnRes, no key norm", {"key_norm": "none", "key_gain": False},
        "h = sum_i softmax_i(q . s_i) s_i", (
            _plain(AttnResConfig(key_norm="none", key_gain=False)),
        ), start=_full, parameters="d a site", paper=f"{ATTNRES}, Table 4", **_EVERY,
    ),
    _row(
        "window", "AttnRes, sliding window", {"window": 8},
        "h = sum_i softmax_i(q . N(s_i)) s_i over the embedding and the last W outputs", (
            Degenerate(says="W beyond the depth: Full", config=AttnResConfig(window=10**6), adjust=scattered, equals=AttnResConfig(),
                       adjust_other=scattered),
        ), start=_full, size="window", paper=f"{ATTNRES}, Table 4", reads="the embedding and the last W outputs", state="(W+1)d",
        notes="queries zero is not PreNorm: sources are forgotten",
    ),
    _row(
        "rms-block", "RMS-Block AttnRes", {"summary": "rms"}, "as block, with sum_j y_j / rms(y_j) for a closed block", (
            Degenerate(says="outputs of RMS one (a post-norm body): Block", config=AttnResConfig(block=4, summary="rms", eps=1e-30),
                       adjust=scattered, equals=AttnResConfig(block=4, eps=1e-30), adjust_other=scattered, body={"norms": "post"},
                       ignoring="output_norm"),
        ), paper="kimmichtank/rms-block-attnres, 2026", state="(N+2)d, and up to (S-1)d read ahead",
        notes="queries zero is not PreNorm",
    ),
    _row(
        "count-prior", "Block AttnRes, count prior", {"count_prior": 1.0, "learned_count_prior": True},
        "h = sum_i softmax_i(q . N(s_i) + b log n_i) s_i, n_i outputs in source i", (
            Degenerate(says="b = 0: Block", config=AttnResConfig(block=4, count_prior=0.0), adjust=scattered, equals=_BLOCK,
                       adjust_other=scattered),
        ), parameters="2d + 1 a site", paper="option of the Low-Rank AttnRes code",
        notes="queries zero is PreNorm only at b = 0",
    ),
    _row(
        "inkling", "Block AttnRes of inkling2",
        {"values": "normed", "roles": "separate", "scaled": True, "key_norm": "none", "key_gain": False},
        "h^c = sum_i softmax_i(q^c . r(s_i) / sqrt(d)) r(s_i) for c in q, k, v", (
            Degenerate(
                says="one query for all roles: the same with one route", adjust=scattered, adjust_other=scattered,
                config=AttnResConfig(block=4, values="normed", roles="separate", scaled=True, key_norm="none", key_gain=False),
                equals=AttnResConfig(block=4, values="normed", scaled=True, key_norm="none", key_gain=False),
            ),
        ), parameters="3d an attention, d an MLP", state="(N+1)d, and up to 2(S-1)d read ahead", cost="4Kd", paper="transformers, inkling2",
        notes="queries zero is not PreNorm: sources are normalised",
    ),
)  # fmt: skip
