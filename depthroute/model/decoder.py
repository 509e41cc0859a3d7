"""The decoder: an embedding, layers connected by a residual method, a final norm and a head.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from depthroute.common.errors import RequestError
from depthroute.model.config import ModelConfig
from depthroute.model.experts import Experts
from depthroute.model.layers import Layer
from depthroute.model.linear import Projection, TokenEmbedding
from depthroute.model.loss import LossSums, cross_entropy_sums, likeliest, token_nll
from depthroute.model.rotary import Rotary
from depthroute.model.sight import Sight, packed_documents, whole_sequence
from depthroute.model.sublayer import SubLayerOutput
from depthroute.ops import linear
from depthroute.residual import Memory, RMSNorm, Routing, Trace

Observer = Callable[[int, Memory], None]


class Decoder(nn.Module):
    """A decoder-only Transformer over any residual method. `residual.*` is exactly what the method adds.

    `recompute`: keep of a layer only what comes in for the backward pass, and run it again there (activation checkpointing). Set it on a
    model; it changes memory and time, nothing else.
    """

    recompute = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocabulary, config.width, config.init_std)
        rotated = config.resolved_head_width if config.rotates else 0  # tables without columns, where nobody reads them
        self.rotary = Rotary(rotated, config.context, config.rope_base, config.rope_precision, config.rope_scaling)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.residual = config.residual.build(config.body)
        for experts in self.experts.values():
            experts.traces = self.residual.looks_inside
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.head = None if config.tied_embeddings else Projection(config.width, config.vocabulary, config.init_std)

    def forward(self, tokens: Tensor, observe: Observer | None = None) -> Tensor:
        """Hidden states [B, T, D] after the final norm, from token ids [B, T] (int64): whole sequences without padding.

        `observe(site, memory)` is called before each read, the last one included; diagnostics use it.

        Raises:
            RequestError: more tokens than the context.
        """
        return self.connect(self.embedded(tokens), self.sight(tokens), observe=observe)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embedding [B, T, D] of token ids [B, T], in the memory's dtype."""
        embedding: Tensor = self.embedding(tokens)
        kind = embedding.device.type
        if self.config.memory_dtype == "compute" and torch.is_autocast_enabled(kind):
            return embedding.to(torch.get_autocast_dtype(kind))
        return embedding

    def connect(self, embedding: Tensor, sight: Sight, routing: Routing | None = None, observe: Observer | None = None) -> Tensor:
        """Hidden states [B, T, D] after the final norm, from the embedding [B, T, D] of tokens and what they see.

        `routing`: what connects the sub-layers in place of `residual`: its form for decoding.
        """
        routing = routing or self.residual
        memory = self.run(routing.open(embedding), range(len(self.layers)), sight, routing, observe)
        if observe is not None:
            observe(2 * len(self.layers), memory)
        return routing.close(memory, self.norm)

    def run(
        self, memory: Memory, layers: range, sight: Sight, routing: Routing | None = None, observe: Observer | None = None
    ) -> Memory:
        """The memory behind some layers, from the one before them."""
        for number in layers:
            if self.recompute and observe is None and torch.is_grad_enabled():
                memory = checkpoint(self._layer, memory, number, sight, routing, None, use_reentrant=False, preserve_rng_state=False)
            else:
                memory = self._layer(memory, number, sight, routing, observe)
        return memory

    def _layer(self, memory: Memory, number: int, sight: Sight, routing: Routing | None, observe: Observer | None) -> Memory:
        for site in (2 * number, 2 * number + 1):
            if observe is not None:
                observe(site, memory)
            memory = self.step(memory, site, sight, routing)
        return memory

    def sight(self, tokens: Tensor) -> Sight:
        """Of whole sequences of token ids [B, T] without padding. Raises RequestError beyond the context."""
        count, end, window = tokens.shape[-1], self.config.document_end, self.config.attention_window
        if count > self.config.context:
            raise RequestError(f"a sequence of {count} tokens is longer than model.context = {self.config.context}.")
        if end is None:
            return whole_sequence(self.rotary(0, count), count, window)
        return packed_documents(self.rotary, F.pad(tokens[:, :-1] == end, (1, 0), value=True), window)

    def step(self, memory: Memory, site: int, sight: Sight, routing: Routing | None = None) -> Memory:
        """One sub-layer: its read, itself, and what it writes."""
        routing = routing or self.residual
        layer = self.layers[site // 2]
        assert isinstance(layer, Layer)
        behind = layer.attention_output_norm if site % 2 == 0 else layer.mlp_output_norm
        if site % 2 == 0:
            inputs = routing.read(memory, site, layer.attention_norm)
            values = partial(routing.values, memory, site) if self.residual.has_values else None
            found: SubLayerOutput = layer.attention(inputs, sight, values)
        else:
            inputs = routing.read(memory, site, layer.mlp_norm)
            found = layer.mlp(inputs)
        output = found.output if behind is None else behind(found.output)
        return routing.write(memory, site, output, Trace(inputs, found.activation, found.kept))

    def logits(self, tokens: Tensor) -> Tensor:
        """[B, T, V] in at least float32, from token ids [B, T]."""
        return self.unembed(self(tokens))

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in at least float32, of hidden states [..., D] after the final norm."""
        logits = linear(hidden, self.head_weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    def loss(self, tokens: Tensor, targets: Tensor, z_loss: float = 0.0) -> LossSums:
        """Summed cross-entropy of `targets` [B, T] given `tokens` [B, T] (int64), with the z-loss coefficient of PaLM."""
        return cross_entropy_sums(self(tokens).flatten(0, -2), self.head_weight, targets.flatten(), z_loss)

    def token_nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of every target, [B, T] in nats, in at least float32."""
        return token_nll(self(tokens).flatten(0, -2), self.head_weight, targets.flatten()).view(targets.shape)

    def token_nll_and_hits(self, tokens: Tensor, targets: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
        """`token_nll` of every target, and whether the targets at `marked` [B, T] (bool) are the likeliest tokens: bool [marked ones]."""
        hidden = self(tokens).flatten(0, -2)
        chosen = marked.flatten()
        hits = likeliest(hidden[chosen], self.head_weight) == targets.flatten()[chosen]
        return token_nll(hidden, self.head_weight, targets.flatten()).view(targets.shape), hits

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding's where the two are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def experts(self) -> dict[int, Experts]:
        """The mixtures of experts by layer."""
        found = {number: layer.mlp for number, layer in enumerate(self.layers) if isinstance(layer, Layer)}
        return {number: mlp for number, mlp in found.items() if isinstance(mlp, Experts)}

    def cast_body(self, dtype: torch.dtype) -> Decoder:
        """Cast the weights in place, to run without gradients. What the residual method adds, the rotations, and what computes in float32
        whatever the rest does (routers, decays) stay in float32."""
        kept = {id(parameter) for module in self.modules() if getattr(module, "exact", False) for parameter in module.parameters()}
        kept |= {id(parameter) for parameter in self.residual.parameters()}
        for parameter in self.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.to(dtype)
        return self

    def parameter_counts(self) -> dict[str, int]:
        """`total`, `residual` (what the residual method adds) and `embedding` (with the head, where it is separate)."""
        head = 0 if self.head is None else self.head.weight.numel()
        return {
            "total": sum(parameter.numel() for parameter in self.parameters()),
            "residual": sum(parameter.numel() for parameter in self.residual.parameters()),
            "embedding": self.embedding.weight.numel() + head,
        }
