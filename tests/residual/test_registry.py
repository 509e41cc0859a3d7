"""The short specifications that people type."""

from __future__ import annotations

import pytest

from depthroute.common.errors import RequestError
from depthroute.residual import AttnResConfig, PreNormConfig, parse_residual
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.depth_attention import DepthAttentionConfig
from depthroute.residual.highway import HighwayConfig
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.static import StaticMixConfig

BASE = AttnResConfig(layers_per_block=4, rank=32, key_norm="full", key_gain=False, first_read=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prenorm", PreNormConfig()),
        ("full", AttnResConfig()),
        ("block:8", AttnResConfig(block=8)),
        ("block,num_blocks=4", AttnResConfig(num_blocks=4)),
        ("block:8,phases=false", AttnResConfig(block=8, phases=False)),
        ("rd", AttnResConfig(roles="decoupled")),
        ("rd:8,rank=64", AttnResConfig(block=8, roles="decoupled", rank=64)),
        ("rd-tied:2", AttnResConfig(block=2, roles="tied")),
        ("rd-average", AttnResConfig(roles="average")),
        ("rd-frozen-value,key_gain=false", AttnResConfig(roles="frozen_value", key_gain=False)),
        ("low-rank:8,rank=16,key_norm=full", AttnResConfig(block=8, rank=16, key_norm="full", key_gain=False)),
        ("low-rank,rank=16,keys=projected,key_gain=true", AttnResConfig(rank=16, keys="projected")),
        ("block,ends=[2,6,16],heads=4", AttnResConfig(ends=(2, 6, 16), heads=4)),
        ("mhar", AttnResConfig(heads=8)),
        ("mhar:4,block=2", AttnResConfig(heads=4, block=2)),
        ("window:4", AttnResConfig(window=4)),
        ("mhar-block:4", AttnResConfig(heads=8, block=4)),
        ("hc:2,dynamic=false", HyperConnectionsConfig(streams=2, dynamic=False)),
        ("delta-block:6", DeltaConfig(block=6)),
        ("delta-block", DeltaConfig(layers_per_block=4)),
        ("static:4", StaticMixConfig(block=4)),
        ("depth-attention:3", DepthAttentionConfig(stride=3)),
        ("highway,gate=scalar", HighwayConfig(gate="scalar")),
    ],
)
def test_without_a_base(text: str, expected: object) -> None:
    assert parse_residual(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", AttnResConfig(key_norm="full", key_gain=False, first_read=True)),
        ("block", AttnResConfig(layers_per_block=4, key_norm="full", key_gain=False, first_read=True)),
        ("block:2", AttnResConfig(block=2, key_norm="full", key_gain=False, first_read=True)),
        ("rd,num_blocks=3", AttnResConfig(num_blocks=3, roles="decoupled", key_norm="full", key_gain=False, first_read=True)),
        ("low-rank", BASE),
        ("low-rank,rank=8", AttnResConfig(layers_per_block=4, rank=8, key_norm="full", key_gain=False, first_read=True)),
    ],
)
def test_a_base_gives_blocks_and_norms_and_its_rank_to_low_rank_alone(text: str, expected: object) -> None:
    assert parse_residual(text, BASE) == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("blok:8", "unknown residual method 'blok'; perhaps you meant 'block'"),
        ("block", "needs a size: block:8"),
        ("block:eight", "the size 'eight' is not a whole number of sub-layers"),
        ("block:8,rnk=4", "unknown field 'rnk'; perhaps you meant 'rank'"),
        ("block:8,rank", "'rank' is not FIELD=VALUE"),
        ("block:8,rank=many", "rank cannot be 'many'; it takes a whole number or none"),
        ("block:8,key_norm=ful", "key_norm: unknown value 'ful'; perhaps you meant 'full'"),
        ("prenorm:4", "'prenorm' takes no size; write 'block:4' for blocks"),
        ("prenorm,rank=4", "unknown field 'rank'; there is none"),
        ("full:4", "'full' takes no size; write 'block:4' for blocks"),
        ("hc:two", "the size 'two' is not a whole number, its streams"),
        ("hc:2,streams=4", "streams is given twice"),
        ("rezero:2", "'rezero' takes no size"),
        ("delta,block=4", "'delta' has no blocks; write 'delta-block:8' for blocks"),
        ("full,num_blocks=2", "'full' has no blocks; write 'block:8' for blocks"),
        ("low-rank", "low-rank keys need a rank: low-rank,rank=64"),
        ("low-rank:8,rank=0", "residual.rank = 0 is not allowed"),
    ],
)
def test_mistakes_are_explained(text: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        parse_residual(text)


def test_a_field_given_twice_is_refused() -> None:
    for text, field in (("block:4,block=2", "block"), ("block:4,num_blocks=2", "num_blocks")):
        with pytest.raises(RequestError, match=f"the blocks are given twice, as block:4 and as {field}"):
            parse_residual(text)
    for text, field in (("rd:4,rank=8,rank=16", "rank"), ("hc:4,streams=2", "streams"), ("block,block=2,block=4", "block")):
        with pytest.raises(RequestError, match=f"{field} is given twice"):
            parse_residual(text)
