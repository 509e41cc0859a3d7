"""What sources are made of: the coefficients of mixing_rows.py for methods that read a bank (residual/bank.py).

Shapes as there; S sources.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from depthroute.analysis.mixing_rows import Composition, Row, Step, inverse_rms, mixed
from depthroute.residual import AttnRes, AttnResConfig, Bank, Memory
from depthroute.residual.bank import BankConfig, SourceBank
from depthroute.residual.delta import Delta, DeltaConfig, DeltaSite
from depthroute.residual.dynamic import DynamicQuery, DynamicQueryConfig
from depthroute.residual.static import StaticMix, StaticMixConfig
from depthroute.residual.stream import rms

Config = TypeVar("Config", bound=BankConfig)
Method = TypeVar("Method", bound=SourceBank)


class BankRead(Composition[Config, Method]):
    """A source that is a sum has its members in equal shares; a mean divides them, a norm scales them by a number a token."""

    closed: tuple[Tensor, ...]
    partial: Tensor | None
    summary: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether every source is one output as it was put out, so that the matrix holds the weights themselves."""
        return len(self.residual.ends) == self.residual.body.sublayers and self.config.summary != "rms"

    @property
    def sums_to_one(self) -> str | None:
        return "rows" if self.plain else "weights"

    def present(self, memory: Bank) -> Tensor:
        return memory.closed[0]

    def open(self, memory: Memory, embedding: Tensor | None) -> None:
        self.closed, self.partial, self.summary = (self.unit(0),), None, None

    def write(self, step: Step) -> None:
        bank, site = step.memory, step.site
        output, unit = step.output.to(bank.closed[0].dtype), self.unit(site + 1)
        self.partial = unit if self.partial is None else self.partial + unit
        value = output if bank.partial is None else bank.partial + output
        made_of = self.partial
        if self.config.summary == "rms":
            part = inverse_rms(output, self.config.eps)[..., None] * unit
            made_of = self.summary = part if self.summary is None else self.summary + part
            scaled = rms(output, self.config.eps)
            value = scaled if bank.summary is None else bank.summary + scaled
        if site + 1 not in self.residual.ends:
            return
        if self.config.summary == "mean":
            size = self.residual.size(site + 1)
            made_of, value = made_of / size, value / size
        self.closed = self.seen((*self.closed, self.kept(made_of, value)))
        self.partial = self.summary = None

    def kept(self, made_of: Tensor, value: Tensor) -> Tensor:
        """What becomes of a source [..., D] that is read."""
        return made_of

    def seen(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The embedding and the newest sources of the window."""
        return sources if self.config.window is None else (sources[0], *sources[1:][-self.config.window :])

    def sources(self, memory: Bank) -> tuple[Tensor, ...]:
        if self.partial is None or memory.partial is None:
            return self.closed
        return self.seen((*self.closed, self.kept(self.partial, memory.partial)))

    def softmax_row(self, sources: tuple[Tensor, ...], weights: Tensor) -> Row:
        """Of weights [S, ..., G] that sum to one over the sources."""
        row = mixed(sources, weights)
        return Row(row, row.sum(-1) if self.plain else weights.sum(0))

    def rows(self, memory: Bank, site: int) -> dict[str, Row]:
        sources = self.sources(memory)
        found = self.residual.source_weights(memory, site)
        weights = found["shared"] if found else self.closed[0].new_ones(1)
        return {"shared": self.softmax_row(sources, weights[..., None])}


class AttnResRead(BankRead[AttnResConfig, AttnRes]):
    @property
    def needs_embedding(self) -> bool:
        return self.config.values == "normed"

    @property
    def by_channel(self) -> bool:
        return self.config.heads > 1

    @property
    def plain(self) -> bool:
        return super().plain and self.config.values == "raw"

    @property
    def sums_to_one(self) -> str | None:
        return super().sums_to_one if self.config.weighting == "softmax" else None

    def open(self, memory: Memory, embedding: Tensor | None) -> None:
        super().open(memory, embedding)
        if embedding is not None:
            self.closed = (self.kept(self.unit(0), embedding),)

    def kept(self, made_of: Tensor, value: Tensor) -> Tensor:
        return made_of if self.config.values == "raw" else inverse_rms(value, self.config.eps)[..., None] * made_of

    def rows(self, memory: Bank, site: int) -> dict[str, Row]:
        sources = self.sources(memory)
        if len(sources) == 1:
            return {"shared": self.softmax_row(sources, self.unit(0).new_ones(1, 1))}
        by_role: dict[str, list[Tensor]] = {}
        for name, weights in self.residual.source_weights(memory, site).items():
            by_role.setdefault(name.partition(", head ")[0], []).append(weights)
        roles = {role: torch.stack(heads, dim=-1) for role, heads in by_role.items()}
        if self.config.roles == "average" and len(roles) > 1:  # two routes, and one read, the mean of theirs
            roles = {"shared": torch.stack(list(roles.values())).mean(0)}
        times = self.residual.times(memory)
        if self.config.weighting == "softmax":
            found = {role: self.softmax_row(sources, weights) for role, weights in roles.items()}
        else:
            found = {role: Row(mixed(sources, weights)) for role, weights in roles.items()}
        return {role: row._replace(weights=row.weights * times) for role, row in found.items()} if times > 1 else found


class DynamicQueryRead(BankRead[DynamicQueryConfig, DynamicQuery]):
    pass


class StaticMixRead(BankRead[StaticMixConfig, StaticMix]):
    @property
    def sums_to_one(self) -> str | None:
        return None if self.config.raw else super().sums_to_one

    def rows(self, memory: Bank, site: int) -> dict[str, Row]:
        """From the site's numbers, which are the same for all tokens."""
        sources = self.sources(memory)
        if site == 0:
            return {"shared": Row(sources[0], None if self.config.raw else sources[0].sum(-1))}
        logits = self.residual.logits[str(site)][:, None]
        return {"shared": Row(mixed(sources, logits)) if self.config.raw else self.softmax_row(sources, logits.softmax(0))}


class DeltaRead(BankRead[DeltaConfig, Delta]):
    """The plain stream, and a gated read of the closed deltas on top: the weights of that read sum to one, rows do not."""

    @property
    def sums_to_one(self) -> str | None:
        return "weights"

    def open(self, memory: Memory, embedding: Tensor | None) -> None:
        super().open(memory, embedding)
        self.stream = self.unit(0)

    def write(self, step: Step) -> None:
        super().write(step)
        self.stream = self.stream + self.unit(step.site + 1)

    def rows(self, memory: Bank, site: int) -> dict[str, Row]:
        parameters: Any = dict(self.residual.sites.items()).get(str(site))
        if parameters is None:
            return {"shared": Row(self.stream)}
        assert isinstance(parameters, DeltaSite)
        found, total = self.closed[0], None
        if parameters.query is not None:
            weights = self.residual.source_weights(memory, site)["shared"]
            found, total = mixed(self.closed, weights[..., None]), weights.sum(0)
        if parameters.gate is not None:
            found = found * (parameters.gate.sigmoid() if parameters.kind == "sigmoid" else parameters.gate)
        return {"shared": Row(self.stream + found, total)}
