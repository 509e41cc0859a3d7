"""A memory in one place reads what the method itself reads."""

from __future__ import annotations

import pytest
import torch

from depthroute.ops import kernel_unavailable
from depthroute.residual import Inputs, RoleInputs
from depthroute.residual.in_place import InPlace
from tests.infer.models import decoder

pytestmark = pytest.mark.skipif(kernel_unavailable() is not None, reason="there is no C compiler")

RESIDUALS = (
    "prenorm", "full", "block:3", "block:2,phases=false", "rd:3", "rd:2,rank=4,key_norm=full", "rd-tied:2", "rd-frozen-value:2",
    "block:2,roles=separate", "block:2,weighting=sigmoid", "block:2,heads=4", "block:3,sum_reads=true", "rd:3,sum_reads=true",
    "block:2,count_prior=0.5,learned_count_prior=true", "full,window=3", "rd:2,first_read=true", "block:2,scaled=true,key_gain=false",
    "block,ends=[1,4,8]", "block,num_blocks=3",
)  # fmt: skip


def roles(inputs: Inputs) -> RoleInputs:
    return inputs if isinstance(inputs, RoleInputs) else RoleInputs(inputs, inputs, inputs)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("residual", RESIDUALS)
@torch.no_grad()
def test_every_read_is_the_methods_own(residual: str, normed: bool) -> None:
    """Twice, so that nothing of the first pass is left in the second."""
    model = decoder(residual)
    generator = torch.Generator().manual_seed(3)
    routing = model.residual.decoding(torch.empty(2, 3, 16, dtype=torch.float64))
    assert isinstance(routing, InPlace)
    size = routing.bytes
    for _ in range(2):
        embedding = torch.randn(2, 3, 16, dtype=torch.float64, generator=generator)
        memory, mine = model.residual.open(embedding), routing.open(embedding)
        for site in range(9):
            layer = model.layers[min(site // 2, 3)]
            norm = (model.norm if site == 8 else layer.mlp_norm if site % 2 else layer.attention_norm) if normed else None
            expected, found = roles(model.residual.read(memory, site, norm)), roles(routing.read(mine, site, norm))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
            assert [one is found.query for one in found] == [one is expected.query for one in expected]
            if site < 8:
                output = torch.randn(2, 3, 16, dtype=torch.float64, generator=generator)
                memory, mine = model.residual.write(memory, site, output), routing.write(mine, site, output)
    assert routing.bytes == size


OTHERS = ("rd-average:2", "block:2,values=normed", "block:2,summary=mean", "block:2,keys=projected,rank=4", "hc:2")


@pytest.mark.parametrize("residual", OTHERS)
def test_what_changes_its_sources_keeps_its_own_memory(residual: str) -> None:
    model = decoder(residual)
    assert model.residual.decoding(torch.empty(1, 1, 16, dtype=torch.float64)) is model.residual
