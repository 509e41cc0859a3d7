"""Delta Attention Residuals: a read over depth is added to the plain stream (Luo, Cai and Hu 2026, arXiv 2605.18855).

h = p + g sum_i softmax_i(q . N(delta_i)) delta_i, where p is the plain stream and the deltas are what was added to it: the embedding and
every sub-layer's output, or with blocks the embedding and c_k - c_{k-1}, what each closed block added. (Released code subtracts the last
source instead of c_{k-1}; from the third source on it holds something else.) Queries start at zero, as the authors' later code has it.

Shapes: ... leading dimensions, D width, S sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from depthroute.ops import DepthRead, depth_attention
from depthroute.residual.bank import Bank, BankConfig, SourceBank, with_blocks_of
from depthroute.residual.method import Degenerate, Method, scattered
from depthroute.residual.norm import normalised
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Inputs, Norm, Trace
from depthroute.residual.stream import added

INITIAL_GATES = {"sigmoid": -2.0, "alpha": 0.0}


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(BankConfig):
    """`gate`: g is one ("none"), a sigmoid that starts at 0.12 ("sigmoid"), or a number that starts at zero ("alpha"); one a site."""

    name: ClassVar[str] = "delta"

    gate: Literal["none", "sigmoid", "alpha"] = "none"

    def module(self, body: Body) -> Delta:
        return Delta(self, body)


class DeltaSite(nn.Module):
    """The parameters of one read: a route query and its key norm's gain where there are two deltas or more, and a gate."""

    def __init__(self, gate: str, width: int, reads: bool) -> None:
        super().__init__()
        self.kind = gate
        self.query = nn.Parameter(torch.zeros(width)) if reads else None
        self.key_gain = nn.Parameter(torch.ones(width)) if reads else None
        self.gate = nn.Parameter(torch.full((1,), INITIAL_GATES[gate])) if gate != "none" else None

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.fill_({"query": 0.0, "key_gain": 1.0}.get(name, INITIAL_GATES.get(self.kind, 0.0)))

    def forward(self, deltas: tuple[Tensor, ...], eps: float) -> Tensor:
        """What is added to the stream, [..., D]."""
        read = deltas[0]
        if self.query is not None:
            found = depth_attention(deltas, self.query, key_gain=self.key_gain, eps=eps)
            assert isinstance(found, Tensor)
            read = found
        if self.gate is None:
            return read
        return (read * (torch.sigmoid(self.gate) if self.kind == "sigmoid" else self.gate)).to(read.dtype)


class Delta(SourceBank):
    """While the embedding is the only delta it is added with weight one. The first site reads the embedding, the last the stream."""

    def __init__(self, config: DeltaConfig, body: Body) -> None:
        super().__init__(config, body)
        self.config = config
        self.sites = nn.ModuleDict(
            {str(site): DeltaSite(config.gate, body.width, reads=site >= self.ends[0]) for site in range(1, body.sublayers)}
        )

    def open(self, embedding: Tensor) -> Bank:
        return super().open(embedding)._replace(stream=embedding)

    def read(self, memory: Bank, site: int, norm: Norm | None = None) -> Inputs:
        assert memory.stream is not None
        if str(site) not in self.sites:
            return normalised(memory.stream, norm)
        return normalised(memory.stream + self.sites[str(site)](self.sources(memory), self.config.eps), norm)

    def write(self, memory: Bank, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Bank:
        assert memory.stream is not None
        return super().write(memory, site, output, trace)._replace(stream=added(memory.stream, output))

    def sources(self, memory: Bank) -> tuple[Tensor, ...]:
        """Deltas that are complete."""
        return self.within(memory.closed)

    def source_names(self, site: int) -> tuple[str, ...]:
        return () if str(site) not in self.sites else super().source_names(max(end for end in (0, *self.ends) if end <= site))

    def source_weights(self, memory: Bank, site: int) -> dict[str, Tensor]:
        parameters = dict(self.sites.items()).get(str(site))
        if not isinstance(parameters, DeltaSite) or parameters.query is None:
            return {}
        with torch.no_grad():
            read = depth_attention(
                self.sources(memory), parameters.query, key_gain=parameters.key_gain, eps=self.config.eps, return_weights=True
            )
        assert isinstance(read, DepthRead) and read.weights is not None
        return {"shared": read.weights}


def _row(name: str, label: str, config: DeltaConfig, equation: str, degenerate: tuple[Degenerate, ...], **facts: str) -> Method:
    return Method(
        name=name,
        label=label,
        configure=lambda base: with_blocks_of(base, config),
        size="block" if config.has_blocks else None,
        equation=equation,
        dynamic=True,
        cost="2Kd",
        paper="Luo et al. 2026, arXiv 2605.18855",
        degenerate=(
            *degenerate,
            Degenerate(
                says="gate 0: PreNorm", config=replace(config, gate="alpha"), adjust=scattered, equals=PreNormConfig()
            ),
        ),
        **facts,
    )


METHODS = (
    _row(
        "delta", "Delta AttnRes", DeltaConfig(), "h = p + sum_i softmax_i(q . N(y_i)) y_i, p the plain stream",
        (Degenerate(says="queries zero: PreNorm, output and gradients of the body", config=DeltaConfig(), equals=PreNormConfig()),),
        reads="the stream, the embedding and every output", parameters="2d a site", state="(2L+2)d",
    ),
    _row(
        "delta-block", "Delta Block AttnRes", DeltaConfig(layers_per_block=4),
        "h = p + sum_k softmax_k(q . N(b_k)) b_k, b_k what closed block k added to the stream p", (),
        reads="the stream, the embedding and closed block sums", parameters="2d a site behind the first block", state="(N+2)d",
        notes="queries zero is not PreNorm: the open block is not among the deltas",
    ),
)  # fmt: skip
