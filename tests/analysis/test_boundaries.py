"""Block boundaries from a pilot."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from depthroute.analysis.boundaries import ends_of, output_similarity
from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, block_ends
from depthroute.train import initialise


def test_blocks_end_where_outputs_are_least_alike() -> None:
    assert ends_of([0.9, 0.1, 0.8, 0.2, 0.7], 3) == (2, 4, 6)
    assert ends_of([0.9, 0.1, 0.8, 0.2, 0.7], 1) == (6,)
    assert ends_of([0.9, 0.1, 0.8, 0.2, 0.7], 6) == (1, 2, 3, 4, 5, 6)
    assert ends_of([0.5, 0.5, 0.5], 2) == (1, 4)  # the earliest of equals
    assert ends_of([-0.5, 0.0, -0.9], 2) == (3, 4)
    for ends in (ends_of([0.3, 0.1, 0.2], blocks) for blocks in range(1, 5)):
        assert block_ends(4, ends=ends) == ends


@pytest.mark.parametrize("blocks", [0, 7])
def test_as_many_blocks_as_there_is_room_for(blocks: int) -> None:
    with pytest.raises(RequestError, match=f"blocks = {blocks} is not allowed; it takes 1 to 6"):
        ends_of([0.0] * 5, blocks)


def test_similarity_is_the_mean_cosine_of_consecutive_outputs() -> None:
    model = Decoder(
        ModelConfig(vocabulary=17, width=12, layers=3, heads=2, mlp_width=20, context=8, init_std=0.4, residual=AttnResConfig(block=2))
    )
    initialise(model, 0)
    tokens = torch.randint(17, (5, 8), generator=torch.Generator().manual_seed(0))
    outputs: list[torch.Tensor] = []
    handles = [
        sublayer.register_forward_hook(lambda module, inputs, found: outputs.append(found.output))
        for layer in model.layers
        for sublayer in (layer.attention, layer.mlp)
    ]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    expected = [F.cosine_similarity(one, other, dim=-1).mean().item() for one, other in pairwise(outputs)]
    found = output_similarity(model, [tokens[:2], tokens[2:3], tokens[3:]])
    assert found == pytest.approx(expected, abs=1e-6) and len(found) == 5
    assert model.training and not any(layer.attention._forward_hooks for layer in model.layers)
    with pytest.raises(RequestError, match="no tokens"):
        output_similarity(model, [])
