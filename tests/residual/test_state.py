"""What a method carries from sub-layer to sub-layer: the largest memory of a pass, counted, beside what its row in the table says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import SPECIFICATIONS, parse_residual

LAYERS, WIDTH = 8, 64
# In widths a token, for eight layers: four blocks of four sub-layers, four streams, a head as wide as the model. Scalars are left out.
STATES: dict[str, float] = {
    "prenorm": 1, "postnorm": 1, "deepnorm": 1, "rezero": 1, "layerscale": 1, "highway": 1, "laurel-rw": 1, "laurel-lr": 1,
    "laurel-pa": 3,  # k
    "x0": 2,
    "unet": 4,  # L/2: the stream is the last of them
    "denseformer": 9, "denseformer-4x5": 2,  # L + 1; one sum, of X_1 and X_5
    "muddformer": 12, "muddformer-prepost": 12,  # L + 4
    "mrla-base": 17, "mrla-light": 2,  # 2L + 1
    "hc-static": 4, "hc": 4, "mhc": 4, "mhc-released": 4,
    "full": 17, "sigmoid": 17, "no-key-norm": 17, "mhar": 17, "static": 17, "static-raw": 17, "dynamic-query": 17,  # 2L + 1
    "window:8": 9,  # W + 1
    "block:4": 5 + 3, "rd-tied:4": 5 + 3, "count-prior:4": 5 + 3, "mhar-block:4": 5 + 3,  # N + 1 and S - 1 read ahead, the last block open
    "low-rank:4,rank=16": 5 + 3,
    "rd:4": 5 + 4, "rd-average:4": 5 + 4, "rd-frozen-value:4": 5 + 4, "inkling:4": 5 + 5,  # more reads at the one attention of a block
    "rms-block:4": 6 + 3,  # and what the open block is to become
    "block-query:4": 5 + 4,  # its queries are as wide as the keys
    "linear-depth": 5,  # r + 1
    "delta": 18, "delta-block:4": 6,  # 2L + 2, N + 2
    "value-residual": 2, "value-residual-constant": 2, "value-residual-learned": 2, "svformer": 2,
    "depth-attention": 9,  # keys and values of the lower half
}  # fmt: skip


def test_every_method_is_counted() -> None:
    assert {name.partition(":")[0] for name in STATES} == set(SPECIFICATIONS)


@pytest.mark.parametrize("name", STATES)
def test_the_largest_memory(name: str) -> None:
    residual = parse_residual(name)
    config = ModelConfig(vocabulary=17, width=WIDTH, layers=LAYERS, heads=1, mlp_width=32, context=16, residual=residual)
    model, sizes = Decoder(config), []

    def observe(site: int, memory: object) -> None:
        storages = {}
        for leaf in pytree.tree_leaves(memory):
            if isinstance(leaf, Tensor) and leaf.numel() >= 16 * WIDTH:  # a row a token, not some numbers
                storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes() / leaf.element_size()
        sizes.append(sum(storages.values()) / (16 * WIDTH))

    with torch.no_grad():
        model(torch.randint(17, (1, 16)), observe=observe)
    assert max(sizes) == pytest.approx(STATES[name], abs=0.3)
