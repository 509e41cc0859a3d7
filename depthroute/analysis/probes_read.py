"""Reads with other weights: what an intervention does to the weights of a site, and how the read is made of them again.

Shapes: S sources, ... leading dimensions (batch, tokens), D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from depthroute.common.errors import RequestError, choose
from depthroute.model import Decoder
from depthroute.ops import weighted_sum
from depthroute.residual import AttnRes, Bank, Inputs, Memory, Norm, Residual, RoleInputs, normalised
from depthroute.residual.bank import SourceBank
from depthroute.residual.delta import Delta, DeltaSite


@dataclass(frozen=True)
class KnockOut:
    """The sources at these places, counted from the embedding, get no weight; the others share the sum as they shared theirs.

    Where the others had no weight at all they share evenly. A read with no other source is left as it is.
    """

    sources: tuple[int, ...]

    def __call__(self, weights: Tensor) -> Tensor:
        out = torch.zeros(weights.shape[0], dtype=torch.bool, device=weights.device)
        out[list(self.sources)] = True
        if bool(out.all()):
            return weights
        out = out.view(-1, *[1] * (weights.ndim - 1))
        kept = weights.masked_fill(out, 0.0)
        total, left = weights.sum(0), kept.sum(0)
        others = (~out).to(weights.dtype)
        shares = torch.where(left == 0, others / others.sum(), kept / left.where(left != 0, 1.0))
        return torch.where(left == total, kept, shares * total)  # as they are where nothing was lost, not once round a division


@dataclass(frozen=True)
class Uniform:
    """All sources get the same weight; their sum stays."""

    def __call__(self, weights: Tensor) -> Tensor:
        return weights.mean(0, keepdim=True).expand_as(weights)


@dataclass(frozen=True)
class Frozen:
    """The same weights [S] for every token."""

    weights: tuple[float, ...]

    def __call__(self, weights: Tensor) -> Tensor:
        return weights.new_tensor(self.weights).view(-1, *[1] * (weights.ndim - 1)).expand_as(weights)


Change = KnockOut | Uniform | Frozen
Changes = Mapping[tuple[int, str], Change]  # by site and role, as `source_weights` names it


@contextmanager
def intervened(model: Decoder, changes: Changes) -> Iterator[None]:
    """Within the context the sites and roles in `changes` are read with changed weights. The method's own read comes back in any case.

    A site with one source is read as ever. So is one whose weights a change leaves as they are: its effect is zero, not a rounding.

    Raises:
        RequestError: no such site, no such role there, or a method whose reads are not known to be weighted sums of sources.
    """
    residual = probed(model.residual)
    for site, _ in changes:
        if not 0 <= site <= residual.body.sublayers:
            raise RequestError(f"there is no site {site}; the model has sites 0 to {residual.body.sublayers}.")
    sites = {site for site, _ in changes}
    own, original = vars(residual).get("read"), residual.read

    def read(memory: Memory, site: int, norm: Norm | None = None) -> Inputs:
        inputs = _changed(residual, memory, site, changes) if site in sites else None
        return original(memory, site, norm) if inputs is None else normalised(inputs, norm)

    residual.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del residual.read
        else:
            residual.read = own  # type: ignore[method-assign]


def probed(residual: Residual) -> SourceBank:
    """The method, if it reads weighted sums of a bank's sources.

    Raises:
        RequestError: it does not, or mixes groups of channels apart.
    """
    if not isinstance(residual, SourceBank):
        method = type(residual).__name__
        raise RequestError(f"{method} has no weights over sources to change; AttnRes, static mixing, queries of the token and Delta have.")
    if isinstance(residual, AttnRes) and residual.config.heads > 1:
        raise RequestError(f"residual.heads = {residual.config.heads}: reads can be probed where all channels are mixed alike (heads = 1).")
    return residual


def check_read(residual: SourceBank, memory: Bank, site: int) -> None:
    """Is the site's read what its sources and weights make, but for rounding? What a probe changes would otherwise be something else.

    Raises:
        RequestError: it is not.
    """
    weights = residual.source_weights(memory, site)
    if not weights:
        return
    expected, found = residual.read(memory, site), _composed(residual, memory, site, weights)
    scale = max(source.norm().item() for source in residual.sources(memory))
    pairs = [(expected, found)] if isinstance(expected, Tensor) and isinstance(found, Tensor) else list(zip(expected, found, strict=True))
    for one, other in pairs:
        if (one - other).norm().item() > torch.finfo(one.dtype).eps ** 0.5 * scale:  # not so for NaN, which the loss will tell of
            raise RequestError(f"{type(residual).__name__} reads something else at site {site} than its sources mixed by its weights.")


def _changed(residual: SourceBank, memory: Bank, site: int, changes: Changes) -> Inputs | None:
    """What the site reads with changed weights, before its norm; None where nothing changes."""
    weights = residual.source_weights(memory, site)
    if not weights:
        return None
    for place, role in changes:
        if place == site and role not in weights:
            raise RequestError(f"site {site}: {choose('role', role, weights)}")
    weights = {role: of_role.to(torch.promote_types(of_role.dtype, torch.float32)) for role, of_role in weights.items()}
    changed = {role: changes[site, role](of_role) if (site, role) in changes else of_role for role, of_role in weights.items()}
    if all(torch.equal(changed[role], of_role) for role, of_role in weights.items()):
        return None
    return _composed(residual, memory, site, changed)


def _composed(residual: SourceBank, memory: Bank, site: int, weights: Mapping[str, Tensor]) -> Inputs:
    """What a site reads with these weights [S, ...] by role, before its norm."""
    sources = residual.sources(memory)
    mixed = {role: weighted_sum(sources, of_role) for role, of_role in weights.items()}
    if isinstance(residual, Delta):
        assert memory.stream is not None
        return memory.stream + _gated(residual, site, mixed["shared"])
    if isinstance(residual, AttnRes) and residual.config.sum_reads:
        mixed = {role: read * residual.times(memory) for role, read in mixed.items()}
    if isinstance(residual, AttnRes) and residual.config.roles == "average" and len(mixed) > 1:
        return (mixed["query_key"] + mixed["value"]) / 2
    if len(mixed) > 1:
        query = mixed["query"] if "query" in mixed else mixed["query_key"]
        return RoleInputs(query, mixed.get("key", query), mixed["value"])
    tied = isinstance(residual, AttnRes) and residual.config.roles == "tied" and site % 2 == 0 and site < residual.body.sublayers
    shared = mixed["shared"]
    return RoleInputs(shared, shared, shared) if tied else shared


def _gated(residual: Delta, site: int, read: Tensor) -> Tensor:
    parameters = residual.sites[str(site)]
    assert isinstance(parameters, DeltaSite)
    if parameters.gate is None:
        return read
    gate = torch.sigmoid(parameters.gate) if parameters.kind == "sigmoid" else parameters.gate
    return (read * gate).to(read.dtype)
