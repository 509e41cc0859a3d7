"""Multi-head latent attention without positions (DeepSeek-V2, 2024, Section 2.1; Kimi Linear, 2025): keys and values of a latent vector.

    c = norm(W_c x), r = W_r x;  head h: k = [W_k,h c; r], v = W_v,h c, q = W_q,h x or W_q,h norm(W_d x)
    y = W_o [ sigmoid(W_g x) * ] softmax(q k' / sqrt(E + R)) v

Shapes: B batch, T tokens of a pass, C tokens that they can see, D width, H heads, E head width, L latent, R shared key.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthroute.model.config import ModelConfig
from depthroute.model.linear import Projection
from depthroute.model.sight import Sight, attend
from depthroute.model.sublayer import SubLayerOutput, Values, by_head, by_role
from depthroute.residual import Inputs, Kept, Projected, RMSNorm


class LatentAttention(nn.Module):
    """Causal softmax attention whose cache holds L + R numbers a token.

    Where a residual method reads keys and values from different inputs, each has a latent vector of its own, by the same matrix, and a
    cache holds both. One that replaces values has them cached head by head: they are then no product of a latent vector.
    """

    def __init__(self, config: ModelConfig, number: int, own_values: bool) -> None:
        """`number`: the layer's, from 0. `own_values`: whether it makes values."""
        super().__init__()
        assert config.mla is not None
        mla, inner = config.mla, config.heads * config.resolved_head_width
        self.number, self.heads, self.head_width = number, config.heads, config.resolved_head_width
        self.latent_width, self.shared_width = mla.latent, mla.shared_key
        queries = config.heads * (self.head_width + mla.shared_key)

        def projection(name: str, inputs: int, outputs: int) -> Projection:
            return Projection(inputs, outputs, config.initial_std(name))

        self.query_latent = None if mla.query_latent is None else projection("query", config.width, mla.query_latent)
        self.query_norm = None if mla.query_latent is None else RMSNorm(mla.query_latent, eps=config.norm_eps)
        self.query = projection("query", mla.query_latent or config.width, queries)
        self.latent = projection("key", config.width, mla.latent)
        self.latent_norm = RMSNorm(mla.latent, eps=config.norm_eps)
        self.shared_key = projection("key", config.width, mla.shared_key)
        self.key = projection("key", mla.latent, inner)
        self.value = projection("value", mla.latent, inner) if own_values else None
        self.output_gate = projection("query", config.width, inner) if mla.output_gate else None
        self.output = projection("output", inner, config.width)

    def forward(self, inputs: Inputs, sight: Sight, values: Values | None = None) -> SubLayerOutput:
        roles = by_role(inputs)
        query = by_head(self._query(roles.query), self.head_width + self.shared_width)
        latent = self.latent_norm(self.latent(roles.key))
        latent_of_values = latent if roles.value is roles.key or self.value is None else self.latent_norm(self.latent(roles.value))
        shared = self.shared_key(roles.key)
        kept: Kept = None
        if values is None and sight.store is not None:
            mixed = self._through_latents(query, latent, latent_of_values, shared, sight)
        else:
            key = by_head(self.key(latent), self.head_width)
            value = None if self.value is None else by_head(self.value(latent_of_values), self.head_width)
            if values is not None:
                value, kept = values(Projected(query[..., : self.head_width], key, value))
            assert value is not None
            key, value = self._whole(key, shared), value.to(query.dtype)
            if sight.store is not None:
                key, value = sight.store.append(self.number, key, value)
            mixed = attend(query, key, value, sight.full)
        activation = mixed.transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            activation = activation * torch.sigmoid(self.output_gate(roles.query))
        return SubLayerOutput(self.output(activation), activation, kept)

    def _query(self, inputs: Tensor) -> Tensor:
        if self.query_latent is None or self.query_norm is None:
            found: Tensor = self.query(inputs)
            return found
        narrow: Tensor = self.query(self.query_norm(self.query_latent(inputs)))
        return narrow

    def _whole(self, key: Tensor, shared: Tensor) -> Tensor:
        """[B, H, C, E + R]: every head's own key [B, H, C, E] and the shared one [B, C, R]."""
        return torch.cat((key, shared[:, None].expand(-1, key.shape[1], -1, -1)), dim=-1)

    def _through_latents(self, query: Tensor, latent: Tensor, latent_of_values: Tensor, shared: Tensor, sight: Sight) -> Tensor:
        """Attention [B, H, T, E] to latent vectors that are cached.

        A few tokens attend to the latent vectors themselves, with the matrices of keys and values applied to queries and mixtures; many
        have the keys and values made for all that they see, which is then the smaller product.
        """
        assert sight.store is not None and self.value is not None
        one = latent_of_values is latent
        beside = latent_of_values[:, None, :, :0] if one else latent_of_values[:, None]
        keys, others = sight.store.append(self.number, torch.cat((latent, shared), dim=-1)[:, None], beside)
        latents, shared_keys = torch.split(keys, [self.latent_width, self.shared_width], dim=-1)
        of_values = latents if one else others
        if query.shape[2] * (self.latent_width - self.head_width) > self.latent_width * self.head_width:
            key = self._whole(by_head(self.key(latents[:, 0]), self.head_width), shared_keys[:, 0])
            return attend(query, key, by_head(self.value(of_values[:, 0]), self.head_width), sight.full)
        matrices = (matrix.weight.view(self.heads, self.head_width, -1) for matrix in (self.key, self.value))
        key_matrix, value_matrix = (matrix.to(query.dtype) for matrix in matrices)
        own, common = torch.split(query, [self.head_width, self.shared_width], dim=-1)
        scale = ((self.latent_width + self.shared_width) / (self.head_width + self.shared_width)) ** 0.5  # `attend` divides by the other
        absorbed = torch.cat((own @ key_matrix, common), dim=-1) * scale  # [B, H, T, L + R]
        if query.shape[2] == 1:  # all heads attend to the same vectors, as so many tokens of one head
            mixed = attend(absorbed.transpose(1, 2), keys, of_values, sight.full._replace(causal=False)).transpose(1, 2)
        else:
            keys, of_values = (x.expand(-1, self.heads, -1, -1) for x in (keys, of_values))
            mixed = attend(absorbed, keys, of_values, sight.full)
        return mixed @ value_matrix.transpose(1, 2)
