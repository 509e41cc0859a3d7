"""Every residual method by name, and the short specifications that people type: `block:8`, `rd:8,rank=64`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from depthroute.common.config import override
from depthroute.common.errors import RequestError, choose
from depthroute.residual.attnres import BLOCK_FIELDS, AttnResConfig
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import METHODS, ResidualConfig

METHODS.update({config.name: config for config in (PreNormConfig, AttnResConfig)})


def _attnres(base: AttnResConfig, **changes: Any) -> AttnResConfig:
    """Full-rank, shared-route AttnRes with the block size and norms of `base`, then `changes`."""
    return replace(base, **{"rank": None, "keys": "slice", "roles": "shared", **changes})


def _without_blocks(base: AttnResConfig) -> AttnResConfig:
    return replace(base, block=None, layers_per_block=None, num_blocks=None)


# What a user may type: the name, and how it starts from a recipe's own AttnRes configuration.
SPECIFICATIONS: dict[str, Callable[[AttnResConfig], ResidualConfig]] = {
    "prenorm": lambda base: PreNormConfig(),
    "full": lambda base: _attnres(_without_blocks(base)),
    "block": _attnres,
    "rd": lambda base: _attnres(base, roles="decoupled"),
    "rd-tied": lambda base: _attnres(base, roles="tied"),
    "rd-average": lambda base: _attnres(base, roles="average"),
    "rd-frozen-value": lambda base: _attnres(base, roles="frozen_value"),
    "low-rank": lambda base: _attnres(base, rank=base.rank),
}


def parse_residual(text: str, base: AttnResConfig | None = None) -> ResidualConfig:
    """A residual method from `NAME[:BLOCK][,FIELD=VALUE...]`, the block size in sub-layers: `block:8,rank=128,key_norm=full`.

    `base` is what the AttnRes names start from: a recipe's block size, key norm and rank. A size in `text` replaces it.

    Raises:
        RequestError: an unknown name or field (with the nearest right one), a size that is not a number or does not belong.
    """
    base = base or AttnResConfig()
    head, *settings = text.split(",")
    name, colon, size = head.partition(":")
    if name not in SPECIFICATIONS:
        raise RequestError(f"residual method {text}: {choose('residual method', name, SPECIFICATIONS)}")
    changes: dict[str, Any] = {}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise RequestError(f"residual method {text}: {setting!r} is not FIELD=VALUE.")
        if field in changes or (colon and field in BLOCK_FIELDS):
            raise RequestError(f"residual method {text}: {field} is given twice; give it once.")
        if name == "full" and field in BLOCK_FIELDS:
            raise RequestError(f"residual method {text}: 'full' has no blocks; write 'block,{setting}'.")
        changes[field] = value
    if colon:
        if name in ("prenorm", "full"):
            raise RequestError(f"residual method {text}: {name!r} takes no block size; write 'block:{size}' for blocks.")
        if not size.isdecimal():
            raise RequestError(f"residual method {text}: the block size {size!r} is not a whole number of sub-layers.")
        changes["block"] = int(size)
    if BLOCK_FIELDS & changes.keys():
        base = _without_blocks(base)
    if name == "low-rank" and base.rank is None and "rank" not in changes:
        raise RequestError(f"residual method {text}: low-rank keys need a rank: {text},rank=64.")
    config = SPECIFICATIONS[name](base)
    if name == "block" and isinstance(config, AttnResConfig) and not (BLOCK_FIELDS & changes.keys() or config.has_blocks):
        raise RequestError("residual method block needs a size: block:8 (sub-layers), block,layers_per_block=4 or block,num_blocks=8.")
    return override(config, changes)
