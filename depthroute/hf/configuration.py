"""The configuration of a decoder as transformers keeps it: our own in one field, and the names that transformers looks for."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from depthroute.common.config import from_json, to_json
from depthroute.common.errors import RequestError
from depthroute.model.config import ModelConfig


class DepthrouteConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """`model` is a `ModelConfig` as JSON, complete, with the residual method under `residual`. All sizes that transformers knows by names
    of its own (`vocab_size`, `hidden_size`, `layer_types`, ...) follow from it.

    Raises:
        RequestError: a field that the model does not have, a value under one of transformers' names that contradicts `model`, or a body
            that is not for transformers (`refuse_bodies`).
    """

    model_type = "depthroute"
    keys_to_ignore_at_inference = ("cache", "past_key_values")
    has_no_defaults_at_init = True  # for transformers before 5.18, which else compares with a configuration made of nothing

    def __init__(
        self,
        model: ModelConfig | dict[str, Any] | None = None,
        *,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        if model is None:
            raise RequestError("a DepthrouteConfig needs `model`: a ModelConfig, or what it is as JSON.")
        config = model if isinstance(model, ModelConfig) else from_json(ModelConfig, model, "model")
        refuse_bodies(config)
        # A model of transformers reads one document a row: nothing packs them there. Of one document the logits are the same.
        config = dataclasses.replace(config, document_end=None)
        for field in dataclasses.fields(ModelConfig):
            if field.name in kwargs:
                raise RequestError(f"{field.name} = {kwargs[field.name]!r} is not a field here; it belongs into `model`.")
        sizes = sizes_of(config)
        _compare(sizes, kwargs)
        self.model = to_json(config)
        for name, value in sizes.items():
            setattr(self, name, value)
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self.use_cache = use_cache
        super().__init__(**{name: value for name, value in kwargs.items() if name not in sizes})

    def decoder_config(self) -> ModelConfig:
        """The configuration of the decoder.

        Raises:
            RequestError: a size was changed under transformers' name, and `model` says something else, or as at the beginning.
        """
        config = from_json(ModelConfig, self.model, "model")
        refuse_bodies(config)
        _compare(sizes_of(config), vars(self))
        return config


def refuse_bodies(config: ModelConfig) -> None:
    """Refuse what transformers' caches and masks do not serve. Raises RequestError by the field."""
    wrong = {
        "mixers": sorted({config.mixer(layer) for layer in range(config.layers)} - {"softmax"}),
        "experts.number": None if config.experts is None else config.experts.number,
        "activation": None if config.activation == "swiglu" else config.activation,
    }
    for name, value in wrong.items():
        if value:
            raise RequestError(
                f"model.{name} = {value}: a model of transformers has softmax attention and dense SwiGLU alone; depthroute's own commands "
                "(sample, eval, analyse) run this one."
            )


def sizes_of(config: ModelConfig) -> dict[str, Any]:
    """What transformers, its caches and its masks look up, by its own names."""
    kinds = ["sliding_attention" if config.has_window(layer) else "full_attention" for layer in range(config.layers)]
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.resolved_key_value_heads,
        "head_dim": config.resolved_head_width,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied_embeddings,
        "sliding_window": config.attention_window,
        "layer_types": kinds,
    }


def _compare(sizes: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in sizes.items():
        if name in given and given[name] != value:
            raise RequestError(f"{name} = {given[name]!r} contradicts `model`, by which it is {value!r}; change `model`.")
