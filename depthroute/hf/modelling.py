"""The decoder as a model of transformers: its caches, `generate`, `from_pretrained`, the Trainer, PEFT.

Shapes: B batch, T tokens of a pass, C tokens that they can see, D width, V vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthroute.common.errors import RequestError
from depthroute.hf.configuration import DepthrouteConfig
from depthroute.model.decoder import Decoder
from depthroute.model.sight import Seen, Sight
from depthroute.residual.protocol import Memory

ROUTE_QUERIES = re.compile(r"\bresidual\..*query$")  # names of parameters that stay float32 in half precision


class CacheStore:
    """A cache of transformers where the attention puts keys and values."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of this pass [B, K, T, E], and return all that the layer may see [B, K, C, E]."""
        keys, values = self.cache.update(key, value, layer)
        return keys, values

    def state(self, layer: int) -> tuple[Tensor, ...] | None:
        """None: no layer of these models has one."""
        return None

    def carry(self, layer: int, state: tuple[Tensor, ...]) -> None:
        """Nobody has one."""


class DepthrouteForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A `Decoder` under the interface of transformers.

    Attention is `scaled_dot_product_attention`, whatever implementation is named. Route queries stay float32 in a model loaded in bfloat16
    or float16. A residual method that looks at several tokens at once (`Residual.per_token`) generates without a cache.
    """

    config_class = DepthrouteConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["residual.*query$"]  # noqa: RUF012  # ROUTE_QUERIES, where `*` means `.*`
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012  # a tied model has no second matrix

    def __init__(self, config: DepthrouteConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.decoder_config())
        self.gradient_checkpointing = False
        if not self.decoder.residual.per_token:
            config.use_cache = self.generation_config.use_cache = False
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, T, V] in at least float32, and with `labels` the mean cross-entropy of the tokens that follow.

        Args:
            input_ids: [B, T] int64; or `inputs_embeds` [B, T, D] in their place.
            attention_mask: [B, C], 0 where a token is padding, on either side; or [B, 1, T, C], or one such by type of layer.
            position_ids: [B, T]. None: a row counts from its first token that is no padding.
            past_key_values, cache: a `Cache` under its older or its newer name.
            labels: [B, T] int64, those of the tokens themselves; -100 is left out. `num_items_in_batch` divides their sum, if it is given.
            logits_to_keep: how many of the last positions have logits, 0 for all; or which positions.

        Raises:
            RequestError: both or none of two arguments that exclude each other, or something that this model does not put out.
        """
        self._refuse(past_key_values, cache, kwargs)
        decoder = self.decoder
        if input_ids is not None and inputs_embeds is None:
            embedding = decoder.embedded(input_ids)
        elif inputs_embeds is not None and input_ids is None:
            embedding = inputs_embeds
        else:
            raise RequestError("give input_ids or inputs_embeds, one of the two.")
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        sight = self._sight(embedding, attention_mask, position_ids, cache)
        hidden = self._recomputing(embedding, sight) if self._recomputes else decoder.connect(embedding, sight)
        hidden = hidden[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        logits = decoder.unembed(hidden) if decoder.head is None else decoder.head(hidden)  # a module, which may have been replaced
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        found = CausalLMOutputWithPast(loss, logits, cache)
        return found if (self.config.return_dict if return_dict is None else return_dict) else found.to_tuple()

    def _refuse(self, older: Any, newer: Any, others: dict[str, Any]) -> None:
        if older is not None and newer is not None and older is not newer:
            raise RequestError("past_key_values and cache are two names of one thing; give one of them.")
        for name in ("output_attentions", "output_hidden_states"):
            if others.pop(name, None):
                raise RequestError(f"{name} = True: this model does not put them out; `depthroute analyse` shows what is inside a run.")

    def _cache(self, cache: Any, use_cache: bool | None) -> Any:
        """The cache of this pass: the given one, a new one where one is wanted, or None."""
        if cache is not None and self._recomputes:
            raise RequestError("a cache and gradient checkpointing exclude each other; leave the cache out, or call model.eval().")
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        if cache is None and (self._recomputes or not wanted):  # a cache that is given is used, whatever use_cache says
            return None
        if not self.decoder.residual.per_token:
            raise RequestError("this residual method looks at several tokens at once, so nothing can be cached; set use_cache=False.")
        return DynamicCache(config=self.config) if cache is None else cache

    def _sight(self, embedding: Tensor, mask: Tensor | dict[str, Tensor | None] | None, positions: Tensor | None, cache: Any) -> Sight:
        tokens = embedding.shape[1]
        windowed = self.decoder.config.attention_window is not None
        full: Any
        window: Any
        if isinstance(mask, dict):  # made ahead by `generate` for caches of fixed size
            full, window = mask.get("full_attention"), mask.get("sliding_attention")
        else:
            full = create_causal_mask(self.config, embedding, mask, cache, positions)
            window = create_sliding_window_causal_mask(self.config, embedding, mask, cache, positions) if windowed else full
        if positions is None and isinstance(mask, Tensor) and mask.ndim == 2:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
        if positions is None:
            seen = 0 if cache is None else int(cache.get_seq_length())
            rotation = self.decoder.rotary(seen, seen + tokens)
        else:
            rotation = self.decoder.rotary.at(positions)
        several = tokens > 1  # without a mask one token sees all that is cached
        return Sight(
            rotation,
            Seen(full, causal=full is None and several),
            Seen(window, causal=window is None and several),
            None if cache is None else CacheStore(cache),
        )

    @property
    def _recomputes(self) -> bool:
        return self.gradient_checkpointing and self.training

    def _recomputing(self, embedding: Tensor, sight: Sight) -> Tensor:
        """`Decoder.connect` with layers that run again in the backward pass: of their inside only the memory's tensors are kept."""
        decoder = self.decoder
        memory = decoder.residual.open(embedding)
        for number in range(len(decoder.layers)):
            memory = self._recomputed(memory, number, sight)
        return decoder.residual.close(memory, decoder.norm)

    def _recomputed(self, memory: Memory, number: int, sight: Sight) -> Memory:
        given, spec = pytree.tree_flatten(memory)
        behind = spec

        def run(*leaves: Any) -> tuple[Any, ...]:
            nonlocal behind
            inside = pytree.tree_unflatten(list(leaves), spec)
            for site in (2 * number, 2 * number + 1):
                inside = self.decoder.step(inside, site, sight)
            found, behind = pytree.tree_flatten(inside)
            return tuple(found)

        return pytree.tree_unflatten(list(self._gradient_checkpointing_func(run, *given)), behind)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.decoder.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None where it is the embedding."""
        return self.decoder.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.decoder.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; `config.model` follows."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.config.model = {**self.config.model, "vocabulary": self.config.vocab_size}
        self.decoder.config = replace(self.decoder.config, vocabulary=self.config.vocab_size)
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of what no checkpoint has brought, and the tables that none holds."""
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()
        fill = getattr(module, "initial_values", None)
        for name, parameter in module.named_parameters(recurse=False):
            if getattr(parameter, "_is_hf_initialized", False):
                continue
            if fill is not None:
                fill(name, parameter, None)
            elif isinstance(module, nn.RMSNorm):
                parameter.fill_(1.0)
            elif name == "bias":
                parameter.zero_()
            else:  # an embedding that transformers has made larger
                parameter.normal_(0.0, self.decoder.config.init_std)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the self-contained modelling file, so that the folder loads where depthroute is not installed."""
        from depthroute.hf.bundle import AUTO_MAP, write_modelling_file

        if kwargs.get("is_main_process", True):
            write_modelling_file(self.config.decoder_config(), Path(save_directory))
            self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)
