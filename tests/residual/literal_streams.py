"""Residual methods that carry one stream or n of them, as loops over the equations of their papers.

Every function takes a body, the embedding x [B, T, D] and the method's parameters by name, and returns the hidden state after the final
norm. Sites are sub-layers, 0..2L-1; even ones are attention.
"""

from __future__ import annotations

import math

import torch
from literal_body import EPS, Network, bare_sublayer, layer_of, r, sublayer
from torch import Tensor

Parameters = dict[str, Tensor]


def prenorm(net: Network, x: Tensor, p: Parameters) -> Tensor:
    """h = h + f(N h)."""
    for site in range(2 * net.layers):
        x = x + sublayer(net, site, x)
    return net.norms[-1](x)


def postnorm(net: Network, x: Tensor, p: Parameters, *, alpha: float = 1.0) -> Tensor:
    """h = N(alpha h + f(h)). The norm before the first sub-layer normalises the embedding; the final norm is the last N."""
    h = net.norms[0](x)
    for site in range(2 * net.layers):
        h = net.norms[site + 1](alpha * h + bare_sublayer(net, site, h))
    return h


def deepnorm(net: Network, x: Tensor, p: Parameters) -> Tensor:
    """PostNorm with alpha = (2L)^(1/4), the decoder-only value."""
    return postnorm(net, x, p, alpha=(2 * net.layers) ** 0.25)


def rezero(net: Network, x: Tensor, p: Parameters, *, prenorm: bool) -> Tensor:
    """h = h + a_l f(h), one scalar for both sub-layers of a layer; with `prenorm` h = h + a_l f(N h)."""
    h = x
    for site in range(2 * net.layers):
        y = sublayer(net, site, h) if prenorm else bare_sublayer(net, site, h)
        h = h + p[f"scales.{site // 2}"] * y
    return net.norms[-1](h)


def layerscale(net: Network, x: Tensor, p: Parameters) -> Tensor:
    """h = h + gamma_i f(N h), channel by channel."""
    h = x
    for site in range(2 * net.layers):
        h = h + p[f"gains.{site}"] * sublayer(net, site, h)
    return net.norms[-1](h)


def highway(net: Network, x: Tensor, p: Parameters, *, gate: str, coupled: bool) -> Tensor:
    """h = (1 - g) h + g f(N h), or h = c h + g f(N h); the gates see N h."""
    h = x
    for site in range(2 * net.layers):
        n = net.norms[site](h)
        f = bare_sublayer(net, site, n)
        g = highway_gate(n, p, f"gates.{site}", gate)
        c = 1 - g if coupled else highway_gate(n, p, f"carries.{site}", gate)
        h = c * h + g * f
    return net.norms[-1](h)


def highway_gate(n: Tensor, p: Parameters, name: str, gate: str) -> Tensor:
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    if gate == "full":
        return torch.sigmoid(n @ weight.T + bias)
    if gate == "diagonal":
        return torch.sigmoid(weight * n + bias)
    if gate == "scalar":
        return torch.sigmoid((weight * n).sum(-1, keepdim=True) + bias)
    raise AssertionError(gate)


def laurel(net: Network, x: Tensor, p: Parameters, *, rw: bool, rank: int | None, previous: int) -> Tensor:
    """x_{i+1} = alpha f(N x_i) + beta (x_i + x_i down up) + sum_j gamma_j x_{i-j}."""
    states = [x]
    for site in range(2 * net.layers):
        name = f"sites.{site}"
        alpha = beta = x.new_ones(())
        if rw:
            alpha, beta = 2 * p[f"{name}.weights"].softmax(0)
        h = states[-1]
        skip = h
        if rank is not None:
            assert p[f"{name}.down"].shape[1] == rank
            skip = skip + (h @ p[f"{name}.down"]) @ p[f"{name}.up"]
        new = alpha * sublayer(net, site, h) + beta * skip
        for j in range(min(previous, site + 1)):
            new = new + p[f"{name}.previous"][j] * states[site - j]
        states.append(new)
    return net.norms[-1](states[-1])


def skips(net: Network, x: Tensor, p: Parameters, *, embedding: bool, unet: bool) -> Tensor:
    """x = x + w pop() in the second half, then x = stream x + x0 r(embedding), then a PreNorm layer; the first floor(L/2) layers push."""
    h, normed, stack = x, r(x), []
    for layer in range(net.layers):
        if unet and layer >= math.ceil(net.layers / 2):
            h = h + p[f"unet.{layer}"] * stack.pop()
        if embedding:
            h = p[f"stream.{layer}"] * h + p[f"x0.{layer}"] * normed
        h = layer_of(net, layer, h)
        if unet and layer < net.layers // 2:
            stack.append(h)
    return net.norms[-1](h)


def hyper(net: Network, x: Tensor, p: Parameters, *, streams: int, dynamic: bool, tanh: bool = True) -> Tensor:
    """Hyper-Connections: h_in = A_m^T H, H = B (x) f(N h_in) + A_r^T H; the output is the sum of the streams."""
    n = streams
    H = [x for _ in range(n)]
    for site in range(2 * net.layers):
        name = f"sites.{site}"
        # One triple a stream: its weight in the read [.., 1], its row of the mix [.., n], its weight of the output [.., 1].
        maps = [hyper_maps(H[i], p, name, i, dynamic, tanh) for i in range(n)]
        h = sum(maps[i][0] * H[i] for i in range(n))
        y = sublayer(net, site, h)
        H = [maps[m][2] * y + sum(maps[i][1][..., m : m + 1] * H[i] for i in range(n)) for m in range(n)]
    return net.norms[-1](sum(H))


def hyper_maps(h: Tensor, p: Parameters, name: str, i: int, dynamic: bool, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    read, mix, write = p[f"{name}.read"][i], p[f"{name}.mix"][i], p[f"{name}.write"][i]
    if not dynamic:
        return read, mix, write
    squash = torch.tanh if tanh else lambda z: z
    normed = r(h)
    if f"{name}.norm_gain" in p:
        normed = normed * p[f"{name}.norm_gain"]
    s_alpha, s_beta = p[f"{name}.read_scale"], p[f"{name}.write_scale"]
    read = s_alpha * squash((normed * p[f"{name}.dynamic_read"]).sum(-1, keepdim=True)) + read
    mix = s_alpha * squash(normed @ p[f"{name}.dynamic_mix"]) + mix
    write = s_beta * squash((normed * p[f"{name}.dynamic_write"]).sum(-1, keepdim=True)) + write
    return read, mix, write


def mhc(net: Network, x: Tensor, p: Parameters, *, streams: int, iterations: int, numerics: str, eps: float = EPS) -> Tensor:
    """Manifold-constrained Hyper-Connections, Eqs. 5-9, or the released numerics; the head is "hyper" where p has one, else the mean."""
    n = streams
    H = [x for _ in range(n)]
    for site in range(2 * net.layers):
        projection, bias, scale = p[f"sites.{site}.projection"], p[f"sites.{site}.bias"], p[f"sites.{site}.scale"]
        z = r(torch.cat(H, dim=-1), eps) @ projection
        pre = torch.sigmoid(scale[0] * z[..., :n] + bias[:n])
        post = 2 * torch.sigmoid(scale[1] * z[..., n : 2 * n] + bias[n : 2 * n])
        logits = (scale[2] * z[..., 2 * n :] + bias[2 * n :]).unflatten(-1, (n, n))
        if numerics == "paper":
            res = sinkhorn_of_the_paper(logits, iterations)
        elif numerics == "released":
            pre = pre + eps
            res = sinkhorn_as_released(logits, iterations, eps).transpose(-1, -2)
        else:
            raise AssertionError(numerics)
        h = sum(pre[..., i, None] * H[i] for i in range(n))
        y = sublayer(net, site, h)
        H = [sum(res[..., i, j, None] * H[j] for j in range(n)) + post[..., i, None] * y for i in range(n)]
    if "head.projection" not in p:
        return net.norms[-1](sum(H) / n)
    weights = torch.sigmoid(p["head.scale"] * (r(torch.cat(H, dim=-1), eps) @ p["head.projection"]) + p["head.bias"]) + eps
    return net.norms[-1](sum(weights[..., i, None] * H[i] for i in range(n)))


def sinkhorn_of_the_paper(logits: Tensor, iterations: int) -> Tensor:
    matrix = logits.exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)  # columns
        matrix = matrix / matrix.sum(-1, keepdim=True)  # rows
    return matrix


def sinkhorn_as_released(logits: Tensor, iterations: int, eps: float) -> Tensor:
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix
