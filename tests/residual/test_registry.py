"""The short specifications that people type."""

from __future__ import annotations

import pytest

from depthroute.common.errors import RequestError
from depthroute.residual import AttnResConfig, PreNormConfig, parse_residual

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
        ("low-rank:8,rank=16,key_norm=full", AttnResConfig(block=8, rank=16, key_norm="full")),
        ("low-rank,rank=16,keys=projected", AttnResConfig(rank=16, keys="projected")),
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
        ("block:eight", "the block size 'eight' is not a whole number"),
        ("block:8,rnk=4", "unknown field 'rnk'; perhaps you meant 'rank'"),
        ("block:8,rank", "'rank' is not FIELD=VALUE"),
        ("block:8,rank=many", "rank cannot be 'many'; it takes a whole number or none"),
        ("block:8,key_norm=ful", "key_norm: unknown value 'ful'; perhaps you meant 'full'"),
        ("prenorm:4", "'prenorm' takes no block size"),
        ("prenorm,rank=4", "unknown field 'rank'; there is none"),
        ("full:4", "'full' takes no block size"),
        ("low-rank", "low-rank keys need a rank: low-rank,rank=64"),
        ("low-rank:8,rank=0", "residual.rank = 0 is not allowed"),
    ],
)
def test_mistakes_are_explained(text: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        parse_residual(text)


def test_a_field_given_twice_is_refused() -> None:
    for text, field in (("block:4,block=2", "block"), ("rd:4,rank=8,rank=16", "rank"), ("block:4,num_blocks=2", "num_blocks")):
        with pytest.raises(RequestError, match=f"{field} is given twice"):
            parse_residual(text)
