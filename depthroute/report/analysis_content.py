"""The page of one analysed model as a document: what there is of an analysis.json, in reading order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthroute.report import numbers
from depthroute.report.analysis_depth_plots import feedback_figure, finite, lens_figure, magnitudes_figure, role_words
from depthroute.report.analysis_gradient_plots import gradient_blocks
from depthroute.report.analysis_mixing_plots import mixing_blocks, ranks
from depthroute.report.analysis_probes import idle_count, probe_blocks
from depthroute.report.analysis_routing_plots import mean_effective, routing_blocks
from depthroute.report.document import (
    Block,
    Bullets,
    Code,
    Document,
    Facts,
    FigureBlock,
    KeyNumbers,
    Note,
    Paragraph,
    Section,
    Strong,
    Table,
    Text,
)
from depthroute.report.numbers import NO_BREAK

TEXT = "text"  # the anchor of the section that the token view goes into
KEY_NUMBERS = 4
LIMITS = (
    "One model is described, with one seed: nothing here says that another run, or another method, would look the same.",
    "A weight is what is read, not what it is good for; where probes were run, they are the better witness.",
    "Means over tokens hide tokens that differ; the spread of the effective sources and the text show some of that.",
)


def compose_analysis(data: Mapping[str, Any], *, with_text: bool) -> Document:
    """Everything the page says but the token view, whose section is there when it will be filled."""
    model = _part(data, "model")
    label = str(model.get("label") or "A trained model")
    coloured = Paragraph("Each token has the colour of the source that it reads most, at the chosen site and for the chosen role.")
    sections = [
        Section("model", "The model and the text", _setup(data, model)),
        Section("routing", "What it reads", routing_blocks(_part(data, "routing"), label)),
        Section(TEXT, "What each token reads", [coloured] if with_text else []),
        Section("probes", "What the reads do", probe_blocks(_part(data, "probes"))),
        Section("mixing", "The depth-mixing matrix", mixing_blocks(_part(data, "mixing"))),
        Section("magnitudes", "Magnitudes and gradients by depth", _present(magnitudes_figure(data.get("magnitudes") or []))),
        Section("gradients", "Gradient norms of the run", gradient_blocks(data["gradient_norms"]) if data.get("gradient_norms") else []),
        Section("feedback", "What the routing itself is taught", _present(feedback_figure(data.get("feedback") or []))),
        Section("lens", "What the reads already know", _present(lens_figure(data.get("lens") or []))),
        Section("papers", "Beside the papers", _papers(data)),
        Section("limits", "What this page cannot show", [Bullets(LIMITS)]),
    ]
    found = _key_numbers(data)
    return Document(
        title=label,
        kicker="Inside one trained model",
        question="",
        lead=_lead(data, label),
        lead_blocks=[KeyNumbers(found)] if found else [],
        sections=[section for section in sections if section.blocks],
    )


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section that is an object; empty where there is none."""
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _lead(data: Mapping[str, Any], label: str) -> Text:
    effective, idle = mean_effective(_part(data, "routing")), idle_count(_part(data, "probes"))
    words = f"{label} "
    words += (
        f"reads {effective[0]:.1f} effective sources, of the {effective[1]:.1f} there are, as a mean over its sites, roles and tokens."
        if effective is not None
        else "is a model without routing weights over sources: what there is to see is how its parts grow, mix and learn by depth."
    )
    if not idle:
        return words
    has = "source or group carries" if idle == 1 else "sources or groups carry"
    found = f"{idle:,} {has} weight at a site and can be taken out with no effect to speak of."
    return [f"{words} ", Strong("Weight is not effect here: "), found]


def _key_numbers(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The first few of these that the analysis has."""
    found = []
    loss, tokens = finite(data.get("nll")), finite(data.get("tokens"))
    if loss is not None:
        found.append(("Loss", numbers.nats(loss), "nats per token" + (f", {numbers.scaled(tokens)} tokens" if tokens is not None else "")))
    effective = mean_effective(_part(data, "routing"))
    if effective is not None:
        found.append(("Effective sources", f"{effective[0]:.2f}", f"mean; {effective[1]:.1f} sources on average"))
    found += [
        ("Rank across depth", str(rank), "of the mean mixing matrix" + (f"; {role_words(role)}" if role != "shared" else ""))
        for role, rank in list(ranks(_part(data, "mixing")).items())[:1]
    ]
    if _part(data, "probes").get("mass_without_effect") is not None and _part(data, "probes").get("sites"):
        found.append(("Weight without effect", str(idle_count(_part(data, "probes"))), "sources and groups"))
    above = finite(_part(data, "gradient_norms").get("above_clip"))
    if above is not None:
        found.append(("Steps clipped", f"{100 * above:.1f}{NO_BREAK}%", "of the training run"))
    return found[:KEY_NUMBERS]


def _setup(data: Mapping[str, Any], model: Mapping[str, Any]) -> list[Block]:
    parameters, layers, width = (finite(model.get(name)) for name in ("parameters", "layers", "width"))
    shape = [numbers.plural(round(layers), "layer")] if layers is not None else []
    shape += [f"width{NO_BREAK}{numbers.count(width)}"] if width is not None else []
    shape += [f"{numbers.count(parameters)}{NO_BREAK}parameters"] if parameters is not None else []
    tokens, documents, loss = (finite(data.get(name)) for name in ("tokens", "documents", "nll"))
    text = [f"{numbers.count(tokens)}{NO_BREAK}held-out tokens"] if tokens is not None else []
    text += [numbers.plural(round(documents), "document")] if documents is not None else []
    facts: list[tuple[str, Text]] = [
        ("Model", ", ".join(shape)),
        ("Residual", str(model.get("residual") or "")),
        ("Text", ", ".join(text)),
        ("Loss", f"{numbers.nats(loss)}{NO_BREAK}nats per token" if loss is not None else ""),
    ]
    kept = [(term, words) for term, words in facts if words]
    numbers_at: Text = ["all of them in ", Code("analysis.json"), " beside this page"]
    return [Facts([*kept, ("Numbers", numbers_at)])] if kept else []


def _papers(data: Mapping[str, Any]) -> list[Block]:
    rows = [[_shown(row.get(name)) for name in ("measure", "ours", "paper", "where")] for row in data.get("papers") or []]
    if not rows:
        return []
    words: Text = [
        Strong("Context, not a comparison. "),
        "The papers' numbers are of their models on their data, at their sizes. That ours is near or far from one is no result.",
    ]
    caption = "What the papers print, beside this model: their models, their data."
    return [Note(words), Table(caption, ["Measure", "This model", "The paper's model", "Where"], [(None, rows, [])], text_columns=4)]


def _shown(value: Any) -> str:
    if value is None:
        return numbers.NONE
    return f"{value:.4g}".replace("-", numbers.MINUS) if isinstance(value, float) else str(value)


def _present(*figures: FigureBlock | None) -> list[Block]:
    return [figure for figure in figures if figure is not None]
