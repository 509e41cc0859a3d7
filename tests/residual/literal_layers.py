"""Residual methods that combine whole layers' outputs, or the values inside attention, as loops over the equations of their papers.

Every function takes a body, the embedding x [B, T, D] and the method's parameters by name, and returns the hidden state after the final
norm. Layers count from 0.
"""

from __future__ import annotations

import torch
from literal_body import Network, Values, layer_of, r, sublayer
from torch import Tensor
from torch.nn import functional as F

Parameters = dict[str, Tensor]


def denseformer(net: Network, x: Tensor, p: Parameters, *, dilation: int, period: int) -> Tensor:
    """Y_i = sum over j = i mod dilation of alpha_ij X_j where period divides i, else X_i; X_i = B_i(Y_{i-1}), X_0 the embedding."""
    X, Y = [x], x
    for i in range(1, net.layers + 1):
        X.append(layer_of(net, i - 1, Y))
        Y = X[i]
        if i % period == 0:
            sources = [j for j in range(i + 1) if j % dilation == i % dilation]
            alpha = p[f"weights.{i - 1}"]
            assert alpha.shape == (len(sources),)
            Y = sum(alpha[n] * X[j] for n, j in enumerate(sources))
    return net.norms[-1](Y)


def muddformer(net: Network, x: Tensor, p: Parameters, *, prepost: bool, separate_norms: bool, ways: int = 4) -> Tensor:
    """MUDDFormer with the ways q, k, v and residual; with `prepost` its Eq. 10 on every way."""
    assert ways == 4
    X = [x]
    x_q = x_k = x_v = x_r = x
    for layer in range(net.layers):
        norm = net.norms[2 * layer]
        keys, values = norm(x_k), norm(x_v)
        if separate_norms and layer >= 1:
            keys, values = p[f"key_gains.{layer}"] * r(x_k), p[f"value_gains.{layer}"] * r(x_v)
        a = net.attention[layer](norm(x_q), keys, values) + x_r
        X.append(a + sublayer(net, 2 * layer + 1, a))
        last = layer == net.layers - 1
        mixtures = mudd_mixtures(X, p, layer, 1 if last else ways, prepost)
        if last:
            return net.norms[-1](mixtures[0])
        x_q, x_k, x_v, x_r = mixtures
    raise AssertionError("no layers")


def mudd_mixtures(X: list[Tensor], p: Parameters, layer: int, ways: int, prepost: bool) -> list[Tensor]:
    """sum_j A_j X_j for each way, A = GELU(r(X_i) hidden) output + bias."""
    hidden, output, bias = (p[f"layers.{layer}.{name}"] for name in ("hidden", "output", "bias"))
    A = (F.gelu(r(X[-1]) @ hidden) @ output).unflatten(-1, (ways, len(X))) + bias
    mixtures = []
    for c in range(ways):
        mixture = torch.zeros_like(X[0])
        for j in range(len(X)):
            source = p[f"pre_gains.{j}"] * r(X[j]) if prepost else X[j]
            mixture = mixture + A[..., c, j, None] * source
        mixtures.append(X[-1] + p[f"post_gains.{layer}"][c] * r(mixture) if prepost else mixture)
    return mixtures


def mrla(net: Network, x: Tensor, p: Parameters, *, light: bool, stage: int | None, heads_width: int) -> Tensor:
    """MRLA a token at a time: after a layer x = x + o, o reading the layers of the stage by heads of `heads_width` channels."""
    width = x.shape[-1]
    heads = [slice(start, start + heads_width) for start in range(0, width, heads_width)]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    o = torch.zeros_like(x)
    h = x
    for layer in range(net.layers):
        first = layer == 0 or (stage is not None and layer % stage == 0)
        if first:
            keys, values = [], []
        h = layer_of(net, layer, h)
        y = r(h)
        anything = torch.ones(1, dtype=x.dtype)  # a score that stands alone decides nothing, and has no parameters
        q = channel_convolution(y, p.get(f"layers.{layer}.query", anything))
        keys.append(channel_convolution(y, p.get(f"layers.{layer}.key", anything)))
        values.append(p[f"layers.{layer}.value"] * y)
        if light:
            now = torch.cat([torch.sigmoid(score(q, keys[-1], g)) * values[-1][..., g] for g in heads], dim=-1)
            o = now if first else now + p[f"layers.{layer}.decay"] * o
        else:
            parts = []
            for g in heads:
                weights = torch.stack([score(q, key, g) for key in keys]).softmax(0)
                parts.append(sum(weights[s] * values[s][..., g] for s in range(len(values))))
            o = torch.cat(parts, dim=-1)
        h = h + o
    return net.norms[-1](h)


def score(q: Tensor, k: Tensor, head: slice) -> Tensor:
    return (q[..., head] * k[..., head]).sum(-1, keepdim=True) / (head.stop - head.start) ** 0.5


def channel_convolution(y: Tensor, weight: Tensor) -> Tensor:
    """A one-channel cross-correlation along the width, zero outside, as wide as its input."""
    reach, width = len(weight) // 2, y.shape[-1]
    padded = F.pad(y, (reach, reach))
    return sum(weight[tap] * padded[..., tap : tap + width] for tap in range(len(weight)))


def with_values(net: Network, x: Tensor, values: list[Values]) -> Tensor:
    """PreNorm with a hook on every layer's projected values."""
    h = x
    for layer in range(net.layers):
        n = net.norms[2 * layer](h)
        h = h + net.attention[layer](n, n, n, values=values[layer])
        h = h + sublayer(net, 2 * layer + 1, h)
    return net.norms[-1](h)


def value_residual(net: Network, x: Tensor, p: Parameters, *, first: float = 0.5, own: float = 0.5, from_layer: int = 1) -> Tensor:
    """ResFormer: V'_n = first V_1 + own V_n in layers from `from_layer` on."""
    assert from_layer >= 1
    kept: list[Tensor] = []

    def of_layer(layer: int) -> Values:
        def hook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer == 0:
                kept.append(v)
            if layer < from_layer:
                return v
            a, b = p.get(f"weights.{layer}", (first, own))
            return a * kept[0] + b * v

        return hook

    return with_values(net, x, [of_layer(layer) for layer in range(net.layers)])


def svformer(net: Network, x: Tensor, p: Parameters) -> Tensor:
    """V'_n = V_1; later layers have no value projection."""
    kept: list[Tensor] = []

    def hook(q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        if not kept:
            assert v is not None
            kept.append(v)
        return kept[0]

    return with_values(net, x, [hook] * net.layers)


def depth_attention(net: Network, x: Tensor, p: Parameters, *, stride: int, window: int = 0) -> Tensor:
    """Depth-Attention: a token's value is a softmax over {l, l-s, l-2s, ..} and the `window` layers before l; earlier values are mixed."""
    keys: list[Tensor] = []
    mixed: list[Tensor] = []

    def of_layer(layer: int) -> Values:
        chosen = {j for j in range(layer) if (layer - j) % stride == 0 or layer - j <= window}

        def hook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            sources = [(keys[j], mixed[j]) for j in sorted(chosen)] + [(k, v)]
            groups, size = k.shape[1], q.shape[1] // k.shape[1]
            by_group = []
            for g in range(groups):
                query = sum(q[:, g * size + i] for i in range(size)) / size
                scores = [(query * key[:, g]).sum(-1, keepdim=True) / q.shape[-1] ** 0.5 for key, _ in sources]
                weights = torch.stack(scores).softmax(0)
                by_group.append(sum(weights[j] * value[:, g] for j, (_, value) in enumerate(sources)))
            keys.append(k)
            mixed.append(torch.stack(by_group, dim=1))
            return mixed[-1]

        return hook

    return with_values(net, x, [of_layer(layer) for layer in range(net.layers)])
