"""Every residual method by name, and the short specifications that people type: `block:8`, `rd:8,rank=64`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from depthroute.common.config import override
from depthroute.common.errors import RequestError, choose
from depthroute.residual.attnres import AttnResConfig
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import ResidualConfig

METHODS: dict[str, type[ResidualConfig]] = {config.name: config for config in (PreNormConfig, AttnResConfig)}

# name -> (what a user may type, whether `:SIZE` in sub-layers may follow)
SPECIFICATIONS: dict[str, tuple[Callable[[], ResidualConfig], bool]] = {
    "prenorm": (PreNormConfig, False),
    "full": (AttnResConfig, False),
    "block": (AttnResConfig, True),
    "rd": (lambda: AttnResConfig(roles="decoupled"), True),
    "rd-tied": (lambda: AttnResConfig(roles="tied"), True),
    "rd-average": (lambda: AttnResConfig(roles="average"), True),
    "rd-frozen-value": (lambda: AttnResConfig(roles="frozen_value"), True),
}


def parse_residual(text: str) -> ResidualConfig:
    """A residual method from `NAME[:BLOCK][,FIELD=VALUE...]`, the block size in sub-layers: `block:8,rank=128,key_norm=full`.

    Raises:
        RequestError: an unknown name or field (with the nearest right one), a size that is not a number or does not belong.
    """
    head, *settings = text.split(",")
    name, _, size = head.partition(":")
    if name not in SPECIFICATIONS:
        raise RequestError(f"--residual {text}: {choose('residual method', name, SPECIFICATIONS)}")
    make, takes_size = SPECIFICATIONS[name]
    config = make()
    changes: dict[str, Any] = {}
    if size:
        if not takes_size:
            raise RequestError(f"--residual {text}: {name!r} takes no block size; write 'block:{size}' for blocks.")
        if not size.isdecimal():
            raise RequestError(f"--residual {text}: the block size {size!r} is not a whole number of sub-layers.")
        changes["block"] = int(size)
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise RequestError(f"--residual {text}: {setting!r} is not FIELD=VALUE.")
        changes[field] = value
    if name == "block" and not {"block", "layers_per_block", "num_blocks"} & changes.keys():
        raise RequestError("--residual block needs a size: block:8 (sub-layers), block,layers_per_block=4 or block,num_blocks=8.")
    return override(config, changes)
