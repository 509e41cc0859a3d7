"""What the causal probes say, in sentences and tables: families of reads, and weight that has no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from depthroute.report import numbers
from depthroute.report.analysis_depth_plots import finite, place_words, role_words
from depthroute.report.analysis_probe_plots import excludes_zero, probe_words, reads_figure, scatter_figure
from depthroute.report.document import Block, Bullets, Details, Inline, Note, Paragraph, Strong, Table

NAMED = 4  # sources with weight and no effect that are named in the sentence; the table holds all


def probe_blocks(probes: Mapping[str, Any]) -> list[Block]:
    """The figures, the sentence on weight without effect, and the tables."""
    sites: Sequence[Mapping[str, Any]] = probes.get("sites") or []
    figures = [figure for figure in (scatter_figure(sites), reads_figure(sites)) if figure is not None]
    families = probes.get("families") or []
    idle = probes.get("mass_without_effect")
    if not figures and not families and not idle:
        return [Paragraph(f"This model was not probed: {str(probes['reason']).rstrip('.')}.")] if probes.get("reason") else []
    found: list[Block] = [Paragraph(_method(probes))]
    found += _idle_note(probes) if idle is not None else []
    found += figures
    found += [_families(families)] if families else []
    return [*found, Details("Every source with weight and without effect", [_idle_table(idle)])] if idle and len(idle) > NAMED else found


def idle_count(probes: Mapping[str, Any]) -> int:
    """How many sources have weight without effect."""
    return len(probes.get("mass_without_effect") or [])


def weight(value: Any) -> str:
    """A mean weight with three decimals, or a dash."""
    number = finite(value)
    return numbers.NONE if number is None else f"{number:.3f}".replace("-", numbers.MINUS)


def _method(probes: Mapping[str, Any]) -> str:
    tokens, documents = finite(probes.get("tokens")), finite(probes.get("documents"))
    on = f" on {numbers.count(tokens)} held-out tokens" if tokens is not None else ""
    on += f" of {numbers.count(documents)} documents" if on and documents is not None else ""
    base = finite(probes.get("nll"))
    untouched = f" The untouched model has {numbers.nats(base)} nats per token there." if base is not None else ""
    return (
        f"A weight says what is read, not what it does. Each probe changes reads of the trained model{on} and nothing else: "
        "a source is taken out and the other weights are scaled up to one, a read is made uniform, "
        "or it is frozen at its mean over tokens. The change of the loss is in nats "
        f"per token, with a 95 % interval over documents; above zero the model is worse for it.{untouched}"
    )


def _idle_note(probes: Mapping[str, Any]) -> list[Block]:
    idle: Sequence[Mapping[str, Any]] = probes["mass_without_effect"]
    above, negligible = finite(probes.get("above")), finite(probes.get("negligible"))
    weighty, nothing = "weight", "these tokens show no change of the loss"
    weighty = f"a mean weight of at least {above:g}" if above is not None else weighty
    nothing = f"their intervals lie within {negligible:g} nats of zero" if negligible is not None else nothing
    if not idle:
        words = f"None of the sources and groups that were taken out has {weighty} and no effect."
        return [Paragraph(words)] if probes.get("sites") else []
    have = "source or group has" if len(idle) == 1 else "sources and groups have"
    parts: list[Inline] = [
        Strong("Mass without effect. "),
        f"{len(idle):,} {have} {weighty}, and taken out one at a time they change nothing to speak of: {nothing}."
        + (f" The {NAMED} with the most weight:" if len(idle) > NAMED else ""),
    ]
    return [Note(parts), Bullets([_named(p) for p in _by_weight(idle)[:NAMED]])]


def _named(probe: Mapping[str, Any]) -> str:
    change, interval = _effect(probe)
    mass = weight(probe.get("mean_weight"))
    return f"{_source(probe)} at {place_words(probe)}{_role(probe)}: weight {mass}, change {change} ({interval})"


def _idle_table(idle: Sequence[Mapping[str, Any]]) -> Table:
    rows = [[place_words(p), role_words(p.get("role")), _source(p), weight(p.get("mean_weight")), *_effect(p)] for p in _by_weight(idle)]
    caption = "Sources and groups with weight that can be taken out without an effect to speak of, most weight first."
    return Table(caption, ["Site", "Role", "Source", "Mean weight", "Change, nats", "95 % interval"], [(None, rows, [])], text_columns=3)


def _families(families: Sequence[Mapping[str, Any]]) -> Table:
    groups: list[tuple[str | None, list[list[str]], list[list[str]]]] = []
    for family in dict.fromkeys(p.get("family") for p in families):
        rows = [
            [_family_probe(p), weight(p.get("mean_weight")), *_effect(p), "yes" if excludes_zero(p) else "no"]
            for p in families
            if p.get("family") == family
        ]
        groups.append((_family(family), rows, []))
    columns = ["Probe", "Mean weight", "Change, nats", "95 % interval", "Excludes zero"]
    caption = (
        "The same change at all reads of a family at once. Above zero the model is worse for it. Not corrected for how many there are."
    )
    return Table(caption, columns, groups)


def _family(family: object) -> str:
    known = {"all": "All reads", "attention": "Reads of attention", "mlp": "Reads of MLPs", "output": "The last read"}
    return known.get(str(family), f"Reads of the {role_words(family)}")


def _family_probe(probe: Mapping[str, Any]) -> str:
    words = probe_words(probe.get("probe"))
    return f"{_source(probe)} {words}" if probe.get("source") else f"read {words}"


def _source(probe: Mapping[str, Any]) -> str:
    """A source by its name, a group by what is in it."""
    name, members = str(probe.get("source")), probe.get("sources") or []
    group = {"older": "older history", "newest": "current state"}.get(name, name)
    return f"{group} ({members[0]})" if len(members) == 1 and name != members[0] else group


def _by_weight(probes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(probes, key=lambda p: -(finite(p.get("mean_weight")) or 0.0))


def _effect(probe: Mapping[str, Any]) -> list[str]:
    low, high = finite(probe.get("low")), finite(probe.get("high"))
    return [numbers.difference(finite(probe.get("delta"))), numbers.interval(None if low is None or high is None else (low, high))]


def _role(probe: Mapping[str, Any]) -> str:
    role = probe.get("role")
    return "" if role in (None, "shared") else f", {role_words(role)}"
