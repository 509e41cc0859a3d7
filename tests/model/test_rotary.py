"""Rotations: what they are where they are exact, and what transformers makes of them where they are to match it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.model import ModelConfig
from depthroute.model.rotary import RopeScaling, Rotary

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: list[tuple[dict[str, Any], RopeScaling | None]] = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 4.0}, RopeScaling(kind="linear", factor=4.0)),
    (LLAMA3, RopeScaling(kind="llama3", factor=8.0, original_context=64)),
]


def transformers_tables(width: int, positions: torch.Tensor, base: float, scaling: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * width, num_attention_heads=2, max_position_embeddings=512, rope_parameters={"rope_theta": base, **scaling}
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0, :, : width // 2], sin[0, :, : width // 2]


@pytest.mark.parametrize(("theirs", "ours"), SCALINGS, ids=lambda value: str(value)[:30])
def test_rounded_as_transformers_does_they_are_its_own_to_the_bit(theirs: dict[str, Any], ours: RopeScaling | None) -> None:
    positions = torch.arange(512)
    cos, sin = transformers_tables(16, positions, 500_000.0, theirs)
    rotary = Rotary(16, 300, 500_000.0, "float32", ours)
    found = rotary(0, 300)
    assert torch.equal(found.cos, cos[:300]) and torch.equal(found.sin, sin[:300])
    assert torch.equal(rotary(290, 512).cos, cos[290:])  # beyond the tables
    far = rotary.at(torch.tensor([[3, 500], [0, 7]]))
    assert torch.equal(far.sin[:, 0], sin[torch.tensor([[3, 500], [0, 7]])])


@pytest.mark.parametrize("scaling", [scaling for _, scaling in SCALINGS], ids=str)
def test_exact_angles_are_right_to_the_last_bit(scaling: RopeScaling | None) -> None:
    """Against double the digits, angle by angle; transformers' own are off by some 1e-5 at a few hundred positions."""
    rotary = Rotary(8, 400, 10_000.0, scaling=scaling)
    for position in (0, 1, 77, 399):
        for pair in range(4):
            frequency = 10_000.0 ** (-2 * pair / 8)
            if scaling is not None and scaling.kind == "linear":
                frequency /= scaling.factor
            elif scaling is not None:
                waves = 64 * frequency / (2 * math.pi)  # that fit into the original context
                share = min(max((waves - 1) / 3, 0), 1)
                frequency = (1 - share) * frequency / 8 + share * frequency
            found = rotary(position, position + 1)
            assert found.cos[0, pair].item() == pytest.approx(math.cos(position * frequency), abs=6e-8)
            assert found.sin[0, pair].item() == pytest.approx(math.sin(position * frequency), abs=6e-8)


def test_a_module_made_without_memory_gets_its_tables_back() -> None:
    with torch.device("meta"):
        rotary = Rotary(8, 10, 100.0)
    rotary = rotary.to_empty(device="cpu")
    rotary.reset_buffers()
    assert torch.equal(rotary.cos, Rotary(8, 10, 100.0).cos)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "yarn", "factor": 2.0}, "unknown value 'yarn'"),
        ({"kind": "linear", "factor": 0.5}, "rope_scaling.factor = 0.5 is not allowed"),
        ({"kind": "llama3", "factor": 2.0}, "original_context = None does not go with kind 'llama3'"),
        ({"kind": "linear", "factor": 2.0, "original_context": 8}, "does not go with kind 'linear'"),
        ({"kind": "llama3", "factor": 2.0, "original_context": 8, "low_frequency": 4.0}, "0 < low_frequency < high_frequency"),
    ],
)
def test_scalings_that_are_none(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        RopeScaling(**fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"biases": ("queries",)}, "model.biases: unknown projection 'queries'; perhaps you meant 'query'"),
        ({"attention_window": 0}, "model.attention_window = 0 is not allowed"),
        ({"windowed_layers": (0,)}, "model.windowed_layers needs model.attention_window"),
        ({"attention_window": 4, "windowed_layers": (2,)}, "model.windowed_layers has 2; the layers are 0 to 1"),
    ],
)
def test_bodies_that_are_none(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        ModelConfig(vocabulary=10, width=8, layers=2, heads=2, mlp_width=8, context=8, **fields)
