"""Which layers have what, and the settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.model.attention import Attention
from depthroute.model.bodies import ExpertsConfig, KDAConfig, MLAConfig
from depthroute.model.experts import Experts
from depthroute.model.kda import DeltaAttention
from depthroute.model.layers import MLP
from depthroute.model.mla import LatentAttention

KDA, MLA, EXPERTS = KDAConfig(), MLAConfig(latent=8, shared_key=4), ExpertsConfig(number=4, chosen=2, width=6)


def shape(**fields: Any) -> ModelConfig:
    settings = {"vocabulary": 17, "width": 12, "layers": 3, "heads": 2, "mlp_width": 20, "context": 8}
    return ModelConfig(**settings | fields)


def test_mixers_repeat_and_the_last_may_be_another() -> None:
    config = shape(layers=27, mixers=("kda", "kda", "kda", "mla"), last_mixer="mla", kda=KDA, mla=MLA, experts=EXPERTS)
    full = [4, 8, 12, 16, 20, 24, 27]  # those of Kimi-Linear-48B, from 1
    assert [config.mixer(layer) for layer in range(27)] == ["mla" if layer + 1 in full else "kda" for layer in range(27)]
    assert [config.has_experts(layer) for layer in range(27)] == [False] + [True] * 26
    assert (config.mlp_activation(0), config.mlp_activation(1)) == (20, 12)
    assert (config.body.activation(0), config.body.activation(1), config.body.activation(3)) == (12, 20, 12)
    model = Decoder(shape(layers=5, mixers=("kda", "mla", "softmax"), attention_window=3, kda=KDA, mla=MLA, experts=EXPERTS))
    kinds = [type(layer.attention) for layer in model.layers]
    assert kinds == [DeltaAttention, LatentAttention, Attention, DeltaAttention, LatentAttention]
    assert [type(layer.mlp) for layer in model.layers] == [MLP, *[Experts] * 4] and list(model.experts) == [1, 2, 3, 4]
    assert [model.config.has_window(layer) for layer in range(5)] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        (KDAConfig, {"convolution": 0}, "model.kda.convolution = 0 is not allowed; it takes 1 or more"),
        (KDAConfig, {"decay_floor": 0.0}, "model.kda.decay_floor = 0.0 is not allowed; it is the logarithm of a decay, below 0"),
        (KDAConfig, {"decay_floor": float("-inf")}, "model.kda.decay_floor = -inf is not allowed"),
        (KDAConfig, {"decay_floor": float("nan")}, "model.kda.decay_floor = nan is not allowed"),
        (KDAConfig, {"output_gate": "wide"}, "model.kda.output_gate: .*'wide'"),
        (MLAConfig, {"latent": 0}, "model.mla.latent = 0 is not allowed"),
        (MLAConfig, {"shared_key": 0}, "model.mla.shared_key = 0 is not allowed"),
        (MLAConfig, {"query_latent": 0}, "model.mla.query_latent = 0 is not allowed"),
        (ExpertsConfig, {"number": 0, "chosen": 1, "width": 6}, "model.experts.number = 0 is not allowed"),
        (ExpertsConfig, {"number": 4, "chosen": 0, "width": 6}, "model.experts.chosen = 0 is not allowed"),
        (ExpertsConfig, {"number": 4, "chosen": 5, "width": 6}, "model.experts.chosen = 5 is more than the 4 experts"),
        (ExpertsConfig, {"number": 4, "chosen": 2, "width": 0}, "model.experts.width = 0 is not allowed"),
        (ExpertsConfig, {"number": 4, "chosen": 2, "width": 6, "latent": 0}, "model.experts.latent = 0 is not allowed"),
        (ExpertsConfig, {"number": 4, "chosen": 2, "width": 6, "shared": -1}, "model.experts.shared = -1 is not allowed; it takes 0"),
        (ExpertsConfig, {"number": 4, "chosen": 2, "width": 6, "dense_layers": -1}, "model.experts.dense_layers = -1 is not allowed"),
        (ExpertsConfig, {"number": 4, "chosen": 2, "width": 6, "balance_rate": float("nan")}, "experts.balance_rate = nan is not allowed"),
        (ExpertsConfig, {"number": 4, "chosen": 2, "width": 6, "scaling": 0.0}, "model.experts.scaling = 0.0 is not allowed"),
        (shape, {"mixers": ()}, "model.mixers is empty; it takes one or more of softmax, kda, mla"),
        (shape, {"mixers": ("kdaa",)}, "model.mixers: .*'kdaa'"),
        (shape, {"last_mixer": "latent"}, "model.mixers: .*'latent'"),
        (shape, {"mixers": ("kda",)}, "model.kda = None does not go with model.mixers = .*: a layer is 'kda', which needs its settings"),
        (shape, {"last_mixer": "mla"}, "model.mla = None does not go with .*: a layer is 'mla', which needs its settings"),
        (shape, {"kda": KDA}, "model.kda = KDAConfig.* no layer is 'kda'"),
        (shape, {"mla": MLA, "mixers": ("softmax", "softmax", "softmax", "mla")}, "no layer is 'mla'"),
        (shape, {"mixers": ("kda",), "kda": KDA, "key_value_heads": 1}, "model.key_value_heads = 1: layers that are not"),
        (shape, {"mixers": ("mla",), "mla": MLA, "norms": "hybrid"}, "model.norms = 'hybrid' is of softmax attention"),
        (shape, {"mixers": ("kda",), "kda": KDA, "attention_window": 3}, "model.attention_window and model.qk_norm are of softmax"),
        (shape, {"last_mixer": "mla", "mla": MLA, "attention_window": 3, "windowed_layers": (0, 2)}, "has 2, whose mixer is 'mla'"),
        (shape, {"mixers": ("kda",), "kda": KDA, "qk_norm": True}, "model.attention_window and model.qk_norm are of softmax"),
        (shape, {"mixers": ("kda",), "kda": KDA, "biases": ("up",)}, "model.biases = .'up'. are of softmax attention and dense MLPs"),
        (shape, {"experts": EXPERTS, "biases": ("up",)}, "model.biases = .'up'. are of softmax attention and dense MLPs"),
        (shape, {"activation": "relu"}, "model.activation: .*'relu'"),
        (shape, {"document_end": 17}, "model.document_end = 17 is not a token; model.vocabulary = 17"),
        (shape, {"document_end": -1}, "model.document_end = -1 is not a token"),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_wrong_settings_are_refused(kind: Any, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        kind(**fields)
