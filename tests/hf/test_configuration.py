"""The configuration holds ours whole, says the same under transformers' names, and refuses what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from depthroute.common.config import to_json
from depthroute.common.errors import RequestError
from depthroute.hf import DepthrouteConfig
from depthroute.model import ModelConfig
from depthroute.model.rotary import RopeScaling
from depthroute.residual import SPECIFICATIONS, AttnResConfig
from tests.bodies import BODIES


def test_every_field_comes_back_from_the_file(config: DepthrouteConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    found = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(found, DepthrouteConfig)
    assert found.decoder_config() == config.decoder_config()
    assert (found.pad_token_id, found.bos_token_id, found.eos_token_id) == (0, None, 3)


@pytest.mark.parametrize("method", SPECIFICATIONS)
def test_every_method_comes_back(method: str) -> None:
    residual = SPECIFICATIONS[method].configure(AttnResConfig(block=2))
    scaling = RopeScaling(kind="llama3", factor=4.0, original_context=8)
    model = ModelConfig(vocabulary=30, width=32, layers=6, heads=2, mlp_width=20, context=16, rope_scaling=scaling, residual=residual)
    assert DepthrouteConfig(to_json(model)).decoder_config() == model


def test_sizes_under_the_names_of_transformers(config: DepthrouteConfig) -> None:
    expected = {
        "vocab_size": 30, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 16, "tie_word_embeddings": False, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    written = config.to_dict()
    assert {name: written[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden_size": 13}, "hidden_size = 13 contradicts `model`, by which it is 12"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"width": 12}, "width = 12 is not a field here"),
    ],
)
def test_contradictions_are_refused_by_name(config: DepthrouteConfig, given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        DepthrouteConfig(config.model, **given)


def test_an_unknown_field_of_the_model_is_refused_by_name(config: DepthrouteConfig) -> None:
    with pytest.raises(RequestError, match="perhaps you meant 'width'"):
        DepthrouteConfig({**config.model, "widht": 12})
    with pytest.raises(RequestError, match=r"model\.residual\.method"):
        DepthrouteConfig({**config.model, "residual": {"method": "other"}})
    with pytest.raises(RequestError, match="needs `model`"):
        DepthrouteConfig()


def test_a_size_that_is_changed_later_is_noticed(config: DepthrouteConfig) -> None:
    changed = DepthrouteConfig(config.model)
    changed.num_hidden_layers = 2
    with pytest.raises(RequestError, match="num_hidden_layers = 2 contradicts"):
        changed.decoder_config()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (BODIES["kimi"], r"model.mixers = \['kda', 'mla'\]"), ({"experts": BODIES["k3"]["experts"]}, "model.experts.number = 5"),
        ({"activation": "situ"}, "model.activation = situ"),
    ],
    ids=["mixers", "experts", "activation"],
)  # fmt: skip
def test_bodies_that_transformers_does_not_serve_are_refused(fields: dict[str, Any], words: str) -> None:
    plain = DepthrouteConfig(ModelConfig(vocabulary=30, width=12, layers=4, heads=2, mlp_width=20, context=16))
    model = replace(plain.decoder_config(), **fields)
    for given in (model, to_json(model)):
        with pytest.raises(RequestError, match=words):
            DepthrouteConfig(given)
    plain.model = to_json(model)
    with pytest.raises(RequestError, match=f"{words}: .* depthroute's own commands"):
        plain.decoder_config()
