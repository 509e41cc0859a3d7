"""The methods that formulas are tried on: every name of the registry, and settings that lead elsewhere in their code."""

from __future__ import annotations

from depthroute.residual import SPECIFICATIONS, AttnResConfig, ResidualConfig, parse_residual

TYPICAL = AttnResConfig(block=4, rank=6)
NARROW = {"laurel-lr": "laurel-lr,rank=4", "mrla-base": "mrla-base,head_width=4", "mrla-light": "mrla-light,head_width=4"}
EVERY = [NARROW.get(name, name) for name in SPECIFICATIONS]
MORE = [
    "block:1", "block:3", "block:5", "block:8,phases=false", "block,ends=[1,2,5,6,11,12]", "block:2,first_read=true", "block:4,window=2",
    "block:3,window=4", "low-rank:3,rank=4,keys=projected", "full,rank=4,keys=projected", "rd:3", "rd,window=3", "rd-average:6",
    "inkling:3,heads=2", "rms-block:1", "rms-block:3", "block:3,summary=mean", "full,summary=mean", "sigmoid:3", "sigmoid,block=3",
    "static:3", "static:3,window=2", "dynamic-query:4", "block-query:3", "block-query:1", "block-query:4,window=3", "block-query:12",
    "delta,window=2", "delta-block:3", "delta-block:6,gate=alpha", "denseformer,dilation=2", "denseformer,dilation=2,period=3", "hc:2",
    "hc-static:3", "mhc:2,head=mean", "laurel-pa,previous=5,weights=true", "mrla-base,stage=2", "mrla-base,stage=5", "mrla-light,stage=3",
    "unet,embedding=true", "value-residual,start=3", "depth-attention:1", "depth-attention:2,window=2", "depth-attention:9",
    "linear-depth,rank=2", "muddformer,rounded=false",
]  # fmt: skip


def parsed(text: str) -> ResidualConfig:
    return parse_residual(text, TYPICAL)
