"""Causal probes: what the loss says when a read is changed, beside the weight that it had. The largest weight is not the largest effect
(arXiv 2606.13168).

Three changes of a read's weights (probes_read.py): *knock_out* of sources, the others renormalised; *uniform*, all sources alike; *frozen*,
the mean weights over tokens in place of every token's own. The effect is the change of the NLL, in nats per token, against the untouched
model on the same windows; positive is worse. Its 95 % interval takes documents as independent (probes_interval.py). Intervals are not
adjusted for how many probes there are.

Sources come in three groups: the *embedding*; the *newest*, which is the current state (the open partial sum, or the last closed source
where none is open); and the *older* ones between. With Delta the newest is the last complete delta; the plain stream is not a source.

A probe leaves all before its first site as it is. So a batch runs once untouched, and every probe branches off the memory at that site.

Shapes: B windows, T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from depthroute.analysis.probes_interval import Effect, clustered, document_numbers
from depthroute.analysis.probes_read import Changes, Frozen, KnockOut, Uniform, check_read, intervened, probed
from depthroute.analysis.routing import RoutingTotals
from depthroute.common.errors import FailureError, RequestError
from depthroute.model import Decoder
from depthroute.model.loss import token_nll
from depthroute.residual import Memory
from depthroute.train.config import Device, Precision
from depthroute.train.devices import autocast

ABOVE = 0.1  # mean weight from which on an older source is knocked out by itself, and its mass counts as one
NEGLIGIBLE = 1e-3  # nats per token: an interval within these bounds says that there is no effect to speak of


class Read(NamedTuple):
    """One role's read at one site: its sources by name and their mean weights in the untouched model."""

    site: int
    kind: str
    layer: int
    role: str
    names: tuple[str, ...]
    means: tuple[float, ...]

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The places of the sources of each group that has some."""
        newest = len(self.names) - 1
        older = tuple(range(1, newest))
        return {"embedding": (0,), "newest": (newest,), **({"older": older} if older else {})}

    def mass(self, sources: Iterable[int]) -> float:
        return math.fsum(self.means[source] for source in sources)


class Probe(NamedTuple):
    """What is changed, and what its row says beside the effect."""

    facts: dict[str, Any]
    changes: Changes


def probe(
    model: Decoder,
    windows: Iterable[np.ndarray],
    *,
    boundaries: np.ndarray,
    every_source: bool = False,
    above: float = ABOVE,
    negligible: float = NEGLIGIBLE,
    precision: Precision = "float32",
) -> dict[str, Any]:
    """Change the reads of a routed model one by one and by family, and measure what that does to the loss.

    Args:
        model: AttnRes in any form with one head, static mixing, queries of the token, or Delta; on its device. It is left as it was.
        windows: token ids int64 [B, T + 1] each, as `evaluation_windows` yields them of a `HeldOut`, B of them at a time through the
            model.
        boundaries: int64 [documents + 1], those of the same `HeldOut`.
        every_source: knock out every older source by itself, not only those with a mean weight of `above` or more.
        above: that weight; mass without effect is listed from it on.
        negligible: nats per token; an interval within -negligible and negligible is no effect.
        precision: "bf16" is under autocast. A changed read is a sum of its own and not the fused one, so its effect carries the rounding
            of one read: nothing to see in float32, but in a bf16 memory it may be more than a small effect.

    Returns:
        What JSON can hold. `tokens`, `documents`, `nll` (untouched), `above`, `negligible`.
        `sites`: rows of `site`, `kind`, `layer`, `role`, `probe`, `source` (a group or a name; None for all), `sources` (their names),
        `mean_weight` (of these sources together; None for all), `delta`, `low`, `high`. One role is changed at a time.
        `families`: rows of `family` ("all", a kind of site, or a role, at all their sites at once), `probe`, `source` (a group or None),
        `mean_weight` (of the group, mean over the reads that have it), `delta`, `low`, `high`.
        `mass_without_effect`: those rows of `sites` that have a mean weight of `above` or more and an interval within the negligible.

    Raises:
        RequestError: no windows, more than the boundaries hold, or a method that has no weights over sources.
        FailureError: a loss is not finite.
    """
    residual = probed(model.residual)
    batches = [batch for batch in windows if batch.size]
    if not batches:
        raise RequestError("no windows were given; an effect is a mean over tokens.")
    documents = document_numbers(batches, boundaries)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(cast(Device, _device(model).type), precision):
            reads = _reads(model, batches)
            if not reads:
                raise RequestError(f"{type(residual).__name__} has no weights over sources as it is configured; nothing can be changed.")
            of_sites = [found for read in reads for found in _site_probes(read, every_source, above)]
            of_families = list(_family_probes(reads))
            effects, nll = _measure(model, batches, documents, [*of_sites, *of_families])
    finally:
        model.train(training)
    rows = [{**found.facts, **effect._asdict()} for found, effect in zip([*of_sites, *of_families], effects, strict=True)]
    sites, families = rows[: len(of_sites)], rows[len(of_sites) :]
    return {
        "tokens": sum(part.size for part in documents),
        "documents": int(documents[-1].max()) + 1,
        "nll": nll,
        "above": above,
        "negligible": negligible,
        "sites": sites,
        "families": families,
        "mass_without_effect": [row for row in sites if _without_effect(row, above, negligible)],
    }


def _reads(model: Decoder, batches: Sequence[np.ndarray]) -> list[Read]:
    """Every read that has a choice, with its mean weights over all windows."""
    totals, residual = RoutingTotals(model), probed(model.residual)

    def observe(site: int, memory: Memory) -> None:
        if site not in checked:
            check_read(residual, memory, site)
            checked.add(site)
        totals.observe(site, memory)

    checked: set[int] = set()
    for batch in batches:
        model(_tokens(model, batch)[:, :-1], observe=observe)
    summary = totals.summary() or {"sites": []}
    return [
        Read(place["site"], place["kind"], place["layer"], role, tuple(place["sources"]), tuple(facts["weights"]))
        for place in summary["sites"]
        for role, facts in place["roles"].items()
    ]


def _site_probes(read: Read, every_source: bool, above: float) -> Iterator[Probe]:
    """The probes of one read. A source that is a group by itself is not knocked out twice."""
    place = {"site": read.site, "kind": read.kind, "layer": read.layer, "role": read.role}
    here = read.site, read.role
    everything = {"source": None, "sources": list(read.names), "mean_weight": None}
    yield Probe({**place, "probe": "uniform", **everything}, {here: Uniform()})
    yield Probe({**place, "probe": "frozen", **everything}, {here: Frozen(read.means)})
    out = dict(read.groups)
    older = out.get("older", ())
    if len(older) > 1:
        out |= {read.names[source]: (source,) for source in older if every_source or read.means[source] >= above}
    for name, sources in out.items():
        facts = {"source": name, "sources": [read.names[source] for source in sources], "mean_weight": read.mass(sources)}
        yield Probe({**place, "probe": "knock_out", **facts}, {here: KnockOut(sources)})


def _family_probes(reads: Sequence[Read]) -> Iterator[Probe]:
    """The probes of families: the same change at all their reads at once."""
    families = {"all": list(reads)}
    for read in reads:
        for name in (read.kind, read.role):
            if name != "shared":
                families.setdefault(name, []).append(read)
    for name, members in families.items():
        everything = {"source": None, "mean_weight": None}
        yield Probe({"family": name, "probe": "uniform", **everything}, {(read.site, read.role): Uniform() for read in members})
        yield Probe({"family": name, "probe": "frozen", **everything}, {(read.site, read.role): Frozen(read.means) for read in members})
        for group in ("embedding", "newest", "older"):
            having = [read for read in members if group in read.groups]
            if having:
                mass = math.fsum(read.mass(read.groups[group]) for read in having) / len(having)
                changes = {(read.site, read.role): KnockOut(read.groups[group]) for read in having}
                yield Probe({"family": name, "probe": "knock_out", "source": group, "mean_weight": mass}, changes)


def _measure(
    model: Decoder, batches: Sequence[np.ndarray], documents: Sequence[np.ndarray], probes: Sequence[Probe]
) -> tuple[list[Effect], float]:
    """The effect of every probe, and the untouched NLL. Families of one read are probes of that read: what is equal runs once."""
    keys = [frozenset(found.changes.items()) for found in probes]
    count = int(documents[-1].max()) + 1
    sums = {key: np.zeros(count) for key in keys}
    tokens, total = np.zeros(count), 0.0
    for batch, numbers in zip(batches, documents, strict=True):
        inputs, flat, memories = _tokens(model, batch), numbers.ravel(), list[Memory]()
        untouched = _losses(model, model(inputs[:, :-1], observe=lambda site, memory, seen=memories: seen.append(memory)), inputs)
        tokens += np.bincount(flat, minlength=count)
        total += untouched.sum().item()
        for key, of_documents in sums.items():
            difference = _losses(model, _branch(model, memories, dict(key), inputs[:, :-1]), inputs) - untouched
            of_documents += np.bincount(flat, weights=difference.cpu().numpy(), minlength=count)
    nll = total / float(tokens.sum())
    if not math.isfinite(nll):
        raise FailureError(f"the loss of the untouched model is {nll}; it gives no probabilities that a probe could change.")
    return [clustered(sums[key], tokens) for key in keys], nll


def _branch(model: Decoder, memories: Sequence[Memory], changes: Changes, tokens: Tensor) -> Tensor:
    """Hidden states [B, T, D] of the changed model of `tokens` [B, T], from the memories before every site of the untouched one."""
    sublayers = len(memories) - 1
    first = min(site for site, _ in changes)
    memory, sight = memories[first], model.sight(tokens)
    with intervened(model, changes):
        for site in range(first, sublayers):
            memory = model.step(memory, site, sight)
        return model.residual.close(memory, model.norm)


def _losses(model: Decoder, hidden: Tensor, windows: Tensor) -> Tensor:
    """The NLL of every target in nats, float64 [B T]."""
    return token_nll(hidden.flatten(0, -2), model.head_weight, windows[:, 1:].flatten()).double()


def _without_effect(row: dict[str, Any], above: float, negligible: float) -> bool:
    mass, low, high = row["mean_weight"], row["low"], row["high"]
    return mass is not None and mass >= above and low is not None and -negligible <= low and high <= negligible


def _tokens(model: Decoder, batch: np.ndarray) -> Tensor:
    return torch.from_numpy(batch).to(_device(model))


def _device(model: Decoder) -> torch.device:
    return model.embedding.weight.device
