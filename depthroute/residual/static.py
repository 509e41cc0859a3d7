"""Input-independent mixing: the weights over sources are numbers of the site (Attention Residuals, Table 4; no queries, no keys).

The paper does not say whether they pass a softmax. Both are here; both start from the mean or the sum of the sources, which is PreNorm.

Shapes: S sources, ... leading dimensions, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.bank import Bank, BankConfig, SourceBank
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.norm import normalised
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import Body, Inputs, Norm
from depthroute.residual.stream import Filled


@dataclass(frozen=True, kw_only=True)
class StaticMixConfig(BankConfig):
    """h = sum_i softmax_i(b) s_i with learned b [S] a site, zero at first; or with `raw` h = sum_i b_i s_i, one at first."""

    name: ClassVar[str] = "static"

    raw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps != BankConfig.eps and self.summary != "rms":
            raise RequestError("residual.eps is for residual.summary = 'rms' here; static mixing has no norms of its own.")

    def module(self, body: Body) -> StaticMix:
        return StaticMix(self, body)


class StaticMix(SourceBank):
    """A site's numbers are as many as its sources. The first site reads the embedding."""

    def __init__(self, config: StaticMixConfig, body: Body) -> None:
        super().__init__(config, body)
        self.raw = config.raw
        self.logits = Filled({site: (len(self.counts(site)),) for site in range(1, body.sublayers + 1)}, 1.0 if config.raw else 0.0)

    def read(self, memory: Bank, site: int, norm: Norm | None = None) -> Inputs:
        sources = self.sources(memory)
        if site == 0:
            return normalised(sources[0], norm)
        return normalised(weighted_sum(sources, self._weights(site)), norm)

    def source_names(self, site: int) -> tuple[str, ...]:
        return () if self.raw else super().source_names(site)

    def source_weights(self, memory: Bank, site: int) -> dict[str, Tensor]:
        if site == 0 or self.raw:
            return {}
        weights, rows = self._weights(site).detach(), memory.closed[0].shape[:-1]
        return {"shared": weights.view(-1, *[1] * len(rows)).expand(-1, *rows)}

    def _weights(self, site: int) -> Tensor:
        logits = self.logits[str(site)]
        return logits if self.raw else torch.softmax(logits, dim=0)


def _row(name: str, label: str, raw: bool, equation: str) -> Method:
    config = StaticMixConfig(raw=raw)
    return Method(
        name=name,
        label=label,
        configure=lambda base: config,
        size="block",
        equation=equation,
        reads="the embedding and every output",
        dynamic=False,
        parameters="about 2L^2",
        state="(2L+1)d",
        cost="Kd",
        paper="Kimi Team 2026, Table 4",
        degenerate=(Degenerate(says="initial values: PreNorm", config=config, equals=PreNormConfig()),),
    )


METHODS = (
    _row("static", "Static mixing", False, "h = sum_i softmax_i(b) s_i, b a parameter of the site"),
    _row("static-raw", "Static mixing, raw", True, "h = sum_i b_i s_i"),
)
