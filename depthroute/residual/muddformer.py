"""MUDDFormer: dynamic dense connections of four ways, query, key, value and residual (Xiao et al. 2025).

After layer i every way c has its own sum over the layers' outputs X_0 (the embedding), ..., X_i, with signed weights that the newest output
gives: A = GELU(r(X_i) W_1) W_2 + a. There is no softmax and there are no keys.

Shapes: C ways, S = i + 1 sources, K hidden units, ... leading dimensions, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.norm import normalised
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Inputs, Norm, Residual, ResidualConfig, RoleInputs, Trace
from depthroute.residual.stream import Filled, added, exact_linear, rms

EPS = 1e-6
WAYS = 4
POST_GAIN = 1e-3


@dataclass(frozen=True, kw_only=True)
class MUDDFormerConfig(ResidualConfig):
    """The connection of the paper's section 2; the last layer has the residual way alone, with four times the hidden units.

    `rounded`: K is C S rounded up to a multiple of 64 (and one 64 more where it is one already), as the authors' code does.
    `prepost`: PrePostDANorm (Eq. 10), for deep and narrow models: sources are normalised, and every way is X_i plus the normalised sum.
    `separate_norms`: key and value inputs have norms of their own from the second layer on, as in the authors' code.
    """

    name: ClassVar[str] = "muddformer"

    rounded: bool = True
    prepost: bool = False
    separate_norms: bool = False

    def module(self, body: Body) -> MUDDFormer:
        if self.separate_norms and body.norms not in ("pre", "sandwich"):
            raise RequestError(f"residual.separate_norms needs norms before attention; model.norms = {body.norms!r} has none there.")
        return MUDDFormer(self, body)


class Connection(nn.Module):
    """The weights of all ways after a layer: [..., D] to [..., C, S]."""

    no_decay = frozenset({"bias"})

    def __init__(self, config: MUDDFormerConfig, width: int, sources: int, last: bool) -> None:
        super().__init__()
        self.ways, self.sources = 1 if last else WAYS, sources
        hidden = WAYS * sources
        if config.rounded:
            hidden = (hidden // 64 + 1) * 64
        self.plain = not config.prepost
        self.hidden = nn.Parameter(torch.empty(width, hidden))
        self.output = nn.Parameter(torch.empty(hidden, self.ways * sources))
        self.bias = nn.Parameter(torch.empty(self.ways, sources))

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        """W_1 with variance 1/D, W_2 zero, and a takes the newest output alone (nothing with PrePostDANorm, whose stream has it)."""
        parameter.zero_()
        if name == "hidden":
            parameter.normal_(0.0, parameter.shape[0] ** -0.5, generator=generator)
        elif name == "bias" and self.plain:
            parameter[:, -1] = 1.0

    def forward(self, newest: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(rms(newest, EPS).to(self.hidden.dtype), self.hidden.T))  # the large product, in the dtype of the body's
        dynamic = exact_linear(hidden.to(self.bias.dtype), self.output)
        return dynamic.view(*newest.shape[:-1], self.ways, self.sources) + self.bias


class Ways(NamedTuple):
    """What each way has for the next sub-layer, and X_0, X_1, ... (normalised with PrePostDANorm)."""

    stream: Tensor
    roles: RoleInputs | None  # before an attention whose inputs differ
    outputs: tuple[Tensor, ...]


class MUDDFormer(Residual):
    """The residual way is the stream within a layer."""

    def __init__(self, config: MUDDFormerConfig, body: Body) -> None:
        super().__init__(body)
        layers, width = range(body.layers), body.width
        last = body.layers - 1
        self.layers = nn.ModuleDict({str(layer): Connection(config, width, layer + 2, layer == last) for layer in layers})
        self.pre_gains = Filled({j: (width,) for j in range(body.layers + 1)} if config.prepost else {}, 1.0)
        ways = {layer: 1 if layer == last else WAYS for layer in layers}
        self.post_gains = Filled({layer: (ways[layer], width) for layer in layers} if config.prepost else {}, POST_GAIN)
        later = range(1, body.layers) if config.separate_norms else ()
        self.key_gains = Filled({layer: (width,) for layer in later}, 1.0)
        self.value_gains = Filled({layer: (width,) for layer in later}, 1.0)

    def open(self, embedding: Tensor) -> Ways:
        return Ways(embedding, None, (self._source(embedding, 0),))

    def read(self, memory: Ways, site: int, norm: Norm | None = None) -> Inputs:
        if memory.roles is None:
            return normalised(memory.stream, norm)
        key = str(site // 2)
        if key not in self.key_gains:
            return normalised(memory.roles, norm)
        if norm is None:
            raise RequestError("muddformer with separate norms needs read(memory, site, norm) with the norm of the query's input.")
        eps = getattr(norm, "eps", None) or EPS
        return RoleInputs(
            norm(memory.roles.query), rms(memory.roles.key, eps) * self.key_gains[key], rms(memory.roles.value, eps) * self.value_gains[key]
        )

    def write(self, memory: Ways, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Ways:
        stream = added(memory.stream, output)
        if site % 2 == 0:
            return Ways(stream, None, memory.outputs)
        layer = site // 2
        outputs = (*memory.outputs, self._source(stream, layer + 1))
        connection = self.layers[str(layer)]
        assert isinstance(connection, Connection)
        weights = connection(stream)
        ways = [weighted_sum(outputs, weights[..., way, :].unbind(-1)) for way in range(connection.ways)]
        if self.post_gains:
            gains = self.post_gains[str(layer)]
            ways = [stream + (rms(way, EPS) * gain).to(stream.dtype) for way, gain in zip(ways, gains, strict=True)]
        *roles, residual = ways
        return Ways(residual, RoleInputs(*roles) if roles else None, outputs)

    def _source(self, output: Tensor, j: int) -> Tensor:
        return (rms(output, EPS) * self.pre_gains[str(j)]).to(output.dtype) if self.pre_gains else output


def _row(name: str, label: str, config: MUDDFormerConfig, equation: str, parameters: str) -> Method:
    return Method(
        name=name,
        label=label,
        configure=lambda base: config,
        equation=equation,
        reads="the outputs of all earlier layers, apart for q, k, v and the stream",
        dynamic=True,
        parameters=parameters,
        state="(L+4)d",
        cost="(dm + 4lm + 4ld)/2 for l sources and m hidden units, 4l or the next multiple of 64",
        paper="Xiao et al. 2025, section 2",
        degenerate=(Degenerate(says="initial values: PreNorm", config=config, equals=PreNormConfig()),),
    )


METHODS = (
    _row(
        "muddformer", "MUDDFormer", MUDDFormerConfig(),
        "after layer i, h^c = sum_j A^c_ij X_j for c in q, k, v, stream; A = GELU(r(X_i) W1) W2 + a", "sum over layers of dK + 4Ki + 4i",
    ),
    _row(
        "muddformer-prepost", "MUDDFormer, PrePostDANorm", MUDDFormerConfig(prepost=True),
        "after layer i, h^c = X_i + N_c(sum_j A^c_ij N_j(X_j)), the outer gains 1e-3 at first", "sum over layers of dK + 4Ki + 4i, and 5Ld",
    ),
)  # fmt: skip
