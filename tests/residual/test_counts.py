"""What each method adds to shapes S and M of the Role-Decoupled paper, worked out by hand from the methods' equations."""

from __future__ import annotations

import pytest
import torch

from depthroute.model import Decoder
from depthroute.recipes import recipe
from depthroute.residual import SPECIFICATIONS

# Specification: (added in S: 16 layers x 576, added in M: 24 layers x 832), against the body without a residual method.
ADDED = {
    "prenorm": (0, 0),
    "postnorm": (0, 0),
    "deepnorm": (0, 0),
    "rezero,prenorm=true": (16, 24),
    "layerscale": (18_432, 39_936),
    "highway,gate=full": (10_635_264, 33_266_688),
    "highway": (36_864, 79_872),
    "highway,gate=scalar": (32 * 577, 48 * 833),
    "highway,coupled=false": (73_728, 159_744),
    "laurel-rw": (64, 96),
    "laurel-lr,rank=4": (147_456, 319_488),
    "laurel-lr": (1_179_648, 2_555_904),
    "laurel-pa": (3 * 32 - 3, 3 * 48 - 3),  # the first two sub-layers have one and two states behind them
    "x0": (32, 48),
    "unet": (8, 12),
    "denseformer": (152, 324),
    "denseformer-4x5": (9, 15),
    "muddformer": (704_941, 1_937_477),
    "muddformer,rounded=false": (375_841, 1_160_377),
    "muddformer-prepost": (704_941 + (17 + 15 * 4 + 1) * 576, 1_937_477 + (25 + 23 * 4 + 1) * 832),
    "mrla-base": (16 * (576 + 2 * 5) - 5, 24 * (832 + 2 * 5) - 5),  # the first layer has nothing to choose from, and no query
    "mrla-light": (16 * (2 * 576 + 2 * 5) - 576, 24 * (2 * 832 + 2 * 5) - 832),  # nor anything to decay
    "hc-static": (768, 1_152),
    "hc": (111_424, 240_864),
    "hc,norm_gain=true": (129_856, 280_800),
    "mhc": (1_779_557, 3_848_469),
    "mhc-released": (1_779_557, 3_848_469),
    "full": (38_016, 81_536),
    "full,key_gain=false": (19_008, 40_768),
    "block": (38_016, 81_536),
    "mhar": (38_016, 81_536),
    "sigmoid": (38_016, 81_536),
    "window": (38_016, 81_536),
    "no-key-norm": (19_008, 40_768),
    "count-prior": (38_016 + 31, 81_536 + 47),  # none at the first two sites, where sources count the same
    "rd": (38_016 + 9_216, 81_536 + 19_968),
    "rd-average": (38_016 + 9_216, 81_536 + 19_968),
    "rd-tied": (38_016, 81_536),
    "rd-frozen-value": (38_016, 81_536),
    "mhar-block": (38_016, 81_536),
    "rms-block": (38_016, 81_536),
    "low-rank,rank={quarter},first_read=false": (4_608, 9_984),
    "low-rank,rank={quarter},first_read=false,key_gain=true": (9_216, 19_968),
    "inkling": (33 * 576 + 2 * 16 * 576, 49 * 832 + 2 * 24 * 832),
    "static": (sum(range(2, 34)), sum(range(2, 50))),
    "static-raw": (sum(range(2, 34)), sum(range(2, 50))),
    "block-query": (10_616_832, 33_226_752),
    "dynamic-query": (10_616_832, 33_226_752),
    "dynamic-query,query_rank=64": (32 * 2 * 64 * 576, 48 * 2 * 64 * 832),
    "linear-depth": (32 * 4, 48 * 4),
    "delta": (36_864 - 2 * 576, 79_872 - 2 * 832),  # the paper's own count holds the first site, which has nothing to read
    "delta-block": (36_864 - 8 * 2 * 576, 79_872 - 8 * 2 * 832),  # nor have the other sites of the first block
    "value-residual": (0, 0),
    "value-residual-constant": (0, 0),
    "value-residual-learned": (30, 46),
    "svformer": (-4_976_640, -15_921_152),
    "depth-attention": (0, 0),
}
BODY = {
    "rd-s": 32_768 * 576 + 16 * (4 * 576**2 + 3 * 576 * 2_880) + 33 * 576,
    "rd-m": 32_768 * 832 + 24 * (4 * 832**2 + 3 * 832 * 4_160) + 49 * 832,
}


def test_every_method_is_counted() -> None:
    assert {specification.partition(",")[0] for specification in ADDED} == set(SPECIFICATIONS)


@pytest.mark.parametrize("specification", ADDED)
def test_added_parameters_of_shapes_s_and_m(specification: str) -> None:
    for name, added, quarter in (("rd-s", ADDED[specification][0], 144), ("rd-m", ADDED[specification][1], 208)):
        with torch.device("meta"):
            counts = Decoder(recipe(name).resolve(specification.format(quarter=quarter))).parameter_counts()
        assert counts["total"] - BODY[name] == added, name
        assert counts["residual"] == (0 if specification == "svformer" else added)
