"""One token a row as a program: all sub-layers of a decoder in one call of the compiled kernels.

It computes what `Decoder.connect` computes, with the roundings of the same tensors, for decoders and residual methods of which every part
has a step: plain projections, norms before sub-layers, a memory in one place. What has not is decoded by `connect` itself.

Shapes: R rows, D width, H heads, K key-value heads, E head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthroute.infer.cache import TextCache
from depthroute.model import Decoder
from depthroute.model.attention import Attention
from depthroute.model.layers import MLP, Layer
from depthroute.model.linear import Projection, TokenEmbedding, watched_module
from depthroute.model.sublayer import one_input
from depthroute.ops import steps
from depthroute.residual import InPlace, RMSNorm, RoleInputs


class DecodingProgram:
    """A step of decoding for the texts whose keys and values are in `cache`, as long as its buffers stay where they are.

    Whether a module is watched is asked once: hooks are set before the prompts are read.
    """

    @staticmethod
    def serves(model: Decoder, routing: InPlace, rows: int) -> bool:
        """Whether every part of it has a step."""
        weight = model.embedding.weight
        if rows > steps.most_rows() or weight.device.type != "cpu" or weight.dtype not in steps.SUFFIXES:
            return False
        if model.residual.has_values or model.rotary.cos.dtype != torch.float32:
            return False
        return _plain(model, weight.dtype) and all(_steps_of(layer, routing, 2 * number) for number, layer in enumerate(model.layers))

    def __init__(self, model: Decoder, routing: InPlace, cache: TextCache) -> None:
        self._model, self._cache, self._rows = model, cache, cache.rows
        rows = cache.rows
        config, like = model.config, model.embedding.weight
        self._width = config.resolved_head_width
        self._ids = torch.zeros(rows, dtype=torch.int64)
        self._cos, self._sin = (torch.empty(rows, self._width // 2) for _ in range(2))
        self._scores = torch.empty(rows * config.heads, cache.capacity)
        entry = routing.entry.view(rows, -1)
        self._logits = like.new_empty(rows, config.vocabulary)
        self._steps = [steps.look_up(like, self._ids, entry)]
        for site in range(2 * config.layers):
            layer = model.layers[site // 2]
            assert isinstance(layer, Layer)
            if site % 2 == 0:
                assert isinstance(layer.attention, Attention)
                self._attention(layer.attention, routing, site, layer.attention_norm)
            else:
                assert isinstance(layer.mlp, MLP)
                self._mlp(layer.mlp, routing, site, layer.mlp_norm)
        hidden = self._read(routing, 2 * config.layers, model.norm)[0]
        self._steps.append(steps.product(hidden, [model.head_weight], [None], [self._logits]))
        self._program = steps.Program(self._steps)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [R, V] float32 behind one more token a row, int64 [R]."""
        self._ids.copy_(tokens)
        cos, sin = self._cache.advance(self._model.rotary)
        self._cos.copy_(cos)
        self._sin.copy_(sin)
        self._program()
        return self._logits.to(torch.float32, copy=True)

    def _read(self, routing: InPlace, site: int, norm: nn.Module | None) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs [R, D] of query, key and value; the same view where they are the same."""
        found = routing.site_read(site, norm)
        self._steps.append(found.read.step)
        roles = found.inputs if isinstance(found.inputs, RoleInputs) else RoleInputs(found.inputs, found.inputs, found.inputs)
        views = {id(role): role.view(self._rows, -1) for role in roles}
        return views[id(roles.query)], views[id(roles.key)], views[id(roles.value)]

    def _attention(self, attention: Attention, routing: InPlace, site: int, norm: nn.Module | None) -> None:
        inputs, config = self._read(routing, site, norm), self._model.config
        widths = [one * self._width for one in (config.heads, config.resolved_key_value_heads, config.resolved_key_value_heads)]
        projected = torch.split(inputs[0].new_empty(self._rows, sum(widths)), widths, dim=1)
        value = attention.value
        assert value is not None
        projections: tuple[Projection, ...] = (attention.query, attention.key, value)
        for together in one_input(inputs):
            weights, biases = [one.weight for one in projections[together]], [one.bias for one in projections[together]]
            self._steps.append(steps.product(inputs[together.start], weights, biases, projected[together]))
        keys, values, slots, first = self._cache.place(attention.number)
        norms = (attention.query_norm, attention.key_norm)
        gains = None if norms[0] is None or norms[1] is None else (norms[0].weight, norms[1].weight)
        out = inputs[0].new_empty(self._rows, widths[0])
        self._steps.append(
            steps.attention(
                *projected, gains=gains, eps=config.norm_eps, cos=self._cos, sin=self._sin, keys=keys, values=values, slots=slots,
                first=first, scores=self._scores, out=out,
            )
        )  # fmt: skip
        self._write(routing, site, out, attention.output)

    def _mlp(self, mlp: MLP, routing: InPlace, site: int, norm: nn.Module | None) -> None:
        inputs = self._read(routing, site, norm)[0]
        activation = inputs.new_empty(self._rows, mlp.gate.weight.shape[0])
        weights, biases = (mlp.gate.weight, mlp.up.weight), (mlp.gate.bias, mlp.up.bias)
        self._steps.append(steps.product(inputs, weights, biases, [activation], "swiglu"))
        self._write(routing, site, activation, mlp.down)

    def _write(self, routing: InPlace, site: int, activation: Tensor, projection: Projection) -> None:
        row, adds = routing.target(site)
        into = [row.view(self._rows, -1)]
        self._steps.append(steps.product(activation, [projection.weight], [projection.bias], into, "add" if adds else "store"))
        behind = routing.behind(site)
        if behind is not None:
            self._steps.append(behind.step)


def _plain(model: Decoder, dtype: torch.dtype) -> bool:
    """Whether the body is of the modules that have steps, whole, of one dtype, and nobody looks into them."""
    for path, module in model.named_modules():
        if path.startswith("residual"):
            continue
        if watched_module(module):
            return False
        if list(module.parameters(recurse=False)) and type(module) not in (Projection, RMSNorm, TokenEmbedding):
            return False
        for parameter in module.parameters(recurse=False):
            if type(parameter) is not nn.Parameter or parameter.dtype != dtype or not parameter.is_contiguous():
                return False
    return True


def _steps_of(layer: nn.Module, routing: InPlace, site: int) -> bool:
    """Whether a layer is softmax attention and a dense SwiGLU with norms before them alone, which the reads hold."""
    if type(layer) is not Layer or type(layer.attention) is not Attention or type(layer.mlp) is not MLP:
        return False
    behind = layer.attention_output_norm is not None or layer.mlp_output_norm is not None
    own = layer.attention.value is not None and layer.attention.value_norm is None and layer.mlp.activation == "swiglu"
    reads = (routing.site_read(site, layer.attention_norm), routing.site_read(site + 1, layer.mlp_norm))
    return own and not behind and all(read.left is None for read in reads)
