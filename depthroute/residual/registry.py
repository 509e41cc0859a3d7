"""Every residual method by name, and the short specifications that people type: `block:8`, `rd:8,rank=64`, `hc:2`."""

from __future__ import annotations

import re
from typing import Any

from depthroute.common.config import override
from depthroute.common.errors import RequestError, choose
from depthroute.residual import (
    attnres_methods,
    delta,
    denseformer,
    depth_attention,
    dynamic,
    highway,
    hyper,
    laurel,
    layerscale,
    linear,
    mhc,
    mrla,
    muddformer,
    postnorm,
    prenorm,
    rezero,
    skips,
    static,
    values,
)  # fmt: skip
from depthroute.residual.attnres import AttnResConfig
from depthroute.residual.bank import BLOCK_FIELDS, BankConfig, without_blocks
from depthroute.residual.method import Method
from depthroute.residual.protocol import METHODS, ResidualConfig

# A line a file. The families are the order of the table, and a baseline study checks the learning rate once in each.
FAMILIES = {
    "one stream": (
        prenorm,
        postnorm,
        rezero,
        layerscale,
        highway,
        laurel,
        skips,
    ),
    "histories of layers": (
        denseformer,
        muddformer,
        mrla,
    ),
    "several streams": (
        hyper,
        mhc,
    ),
    "attention over depth": (
        attnres_methods,
        static,
        dynamic,
        linear,
        delta,
    ),
    "inside attention": (
        values,
        depth_attention,
    ),
}

SPECIFICATIONS: dict[str, Method] = {}  # what a user may type
FAMILY: dict[str, str] = {}  # of a method, by name


def register(method: Method, family: str = "others") -> None:
    """Make a method known: to specifications, to configurations read from JSON, and to the table.

    Raises:
        RequestError: the name is taken.
    """
    config = type(method.configure(AttnResConfig()))
    if method.name in SPECIFICATIONS or METHODS.get(config.name, config) is not config:
        raise RequestError(f"the residual method {method.name!r} is there already; choose another name.")
    SPECIFICATIONS[method.name] = method
    METHODS[config.name] = config
    FAMILY[method.name] = family


for _family, _files in FAMILIES.items():
    for _file in _files:
        for _method in _file.METHODS:
            register(_method, _family)


def parse_residual(text: str, base: AttnResConfig | None = None) -> ResidualConfig:
    """A residual method from `NAME[:SIZE][,FIELD=VALUE...]`: `block:8,rank=128,key_norm=full`, `hc:2`.

    SIZE is the field that the method names, sub-layers a block for those with blocks. `base` is what the AttnRes names start from: a
    recipe's block size, key norm and rank. A size in `text` replaces it.

    Raises:
        RequestError: an unknown name or field (with the nearest right one), a size that is not a number or does not belong.
    """
    base = base or AttnResConfig()
    head, *settings = re.split(r",(?![^\[]*\])", text)  # not within a list
    name, colon, size = head.partition(":")
    if name not in SPECIFICATIONS:
        raise RequestError(f"residual method {text}: {choose('residual method', name, SPECIFICATIONS)}")
    method = SPECIFICATIONS[name]
    changes: dict[str, Any] = {}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise RequestError(f"residual method {text}: {setting!r} is not FIELD=VALUE.")
        if colon and method.size == "block" and field in BLOCK_FIELDS:
            raise RequestError(f"residual method {text}: the blocks are given twice, as {name}:{size} and as {field}; give them once.")
        if field in changes or (colon and field == method.size):
            raise RequestError(f"residual method {text}: {field} is given twice; give it once.")
        changes[field] = value
    if colon:
        if method.size is None:
            raise RequestError(f"residual method {text}: {name!r} takes no size{_instead(name, size)}.")
        if not size.isdecimal():
            what = "a whole number of sub-layers" if method.size == "block" else f"a whole number, its {method.size}"
            raise RequestError(f"residual method {text}: the size {size!r} is not {what}.")
        changes[method.size] = int(size)
    if BLOCK_FIELDS & changes.keys():
        base = without_blocks(base)
    if name == "low-rank" and base.rank is None and "rank" not in changes:
        raise RequestError(f"residual method {text}: low-rank keys need a rank: {text},rank=64.")
    config = method.configure(base)
    if isinstance(config, BankConfig) and BLOCK_FIELDS & changes.keys():
        if method.size is None:
            raise RequestError(f"residual method {text}: {name!r} has no blocks{_instead(name, '8')}.")
        config = without_blocks(config)
    if name == "block" and isinstance(config, AttnResConfig) and not (BLOCK_FIELDS & changes.keys() or config.has_blocks):
        raise RequestError("residual method block needs a size: block:8 (sub-layers), block,layers_per_block=4 or block,num_blocks=8.")
    return override(config, changes)


def _instead(name: str, size: str) -> str:
    """The method of that kind that has blocks."""
    other = {"prenorm": "block", "full": "block", "delta": "delta-block"}.get(name)
    return f"; write '{other}:{size}' for blocks" if other else ""
