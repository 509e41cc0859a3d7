"""The report as a document: from a stored study to headings, sentences, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence

from depthroute.report import claims, costs, facts, findings, noise, numbers, trajectories
from depthroute.report.control_plots import control_figure
from depthroute.report.cost_plots import cost_figure
from depthroute.report.curve_plots import curves_figure
from depthroute.report.document import Block, Bullets, Details, Document, FigureBlock, Paragraph, Section, Table
from depthroute.report.effect_view import effect_blocks
from depthroute.report.featured import featured_arms, left_out
from depthroute.report.gradient_plots import gradient_figure
from depthroute.report.numbers import NO_BREAK
from depthroute.report.outcome_plots import endpoints_figure, gap_figure
from depthroute.report.routing_plots import divergence_figure, heat_figures
from depthroute.report.scale_view import scale_blocks
from depthroute.report.scaling_plots import scaling_blocks
from depthroute.report.split_plots import split_blocks
from depthroute.report.stored import Comparison, StoredStudy
from depthroute.report.sweep_plots import sweep_blocks

FEW = 4  # comparisons that are told one by one; more are counted, and their pairs folded away
STANDING = "Standing: whether the comparison decides a claim of the plan, was planned without one, or came after the plan."
MANY = 12  # rows from which a table or a figure of rows is folded away itself


def compose(study: StoredStudy) -> Document:
    """Everything the page and the Markdown say, in reading order."""
    data = facts.manifest(study)
    sections = [
        Section("claims", "Claims", [*claims.blocks(study), *_present(control_figure(study))]),
        Section("setup", "What was run", facts.setup(study, data, MANY)),
        Section("results", "Paired results", _results(study)),
        Section("sweep", "The sweep", sweep_blocks(study)),
        Section("scales", "Over scales", [*scale_blocks(study, FEW), *scaling_blocks(study)]),
        Section("effects", "Which factor decides", effect_blocks(study)),
        Section("splits", "Other evaluation splits", split_blocks(study, FEW)),
        Section("noise", "Seeds and texts", noise.blocks(study, FEW)),
        Section("papers", "Beside the papers", _papers(study)),
        Section("curves", "Learning curves", _present(curves_figure(study, data.get("unigram_entropy_nats")), gradient_figure(study))),
        Section("routing", "What the models read", _routing(study)),
        Section("cost", "Cost beside quality", [*costs.blocks(study, MANY), *_present(cost_figure(study))]),
        Section("limits", "What this study cannot show", [Bullets(findings.limits(study, data))]),
        Section("reproduction", "To repeat it", facts.reproduction(study, data)),
    ]
    return Document(
        title=study.plan["name"],
        kicker="Paired study of residual connections over depth",
        question=study.plan.get("question") or "",
        lead=findings.verdict(study),
        lead_blocks=findings.lead_blocks(study),
        sections=[section for section in sections if section.blocks],
    )


def _results(study: StoredStudy) -> list[Block]:
    compared = [c for c in study.comparisons if c.endpoint is not None]
    step = f", step {study.endpoint_step:,}" if study.endpoint_step else ""
    blocks: list[Block] = [
        Paragraph(
            f"The endpoint is the {study.endpoint} NLL at the last milestone{step}. A difference is arm minus parent within one seed, "
            "in nats per token: negative is better. The t interval is the headline."
        )
    ]
    if not compared:
        blocks.append(Paragraph("No pair is complete yet, so there is nothing to compare."))
    else:
        if len(study.comparisons) > 1:
            blocks.append(findings.other_comparisons(study, FEW))
        pairs, summary = _seed_table(study, compared), _summary_table(study, compared)
        blocks += [summary] if len(compared) <= MANY else [Details("Every comparison", [summary])]
        blocks += [pairs] if len(compared) <= FEW else [Details("Every pair, seed by seed", [pairs])]
    endpoints = _present(endpoints_figure(study))
    blocks += endpoints if len(study.arms) <= MANY else [Details("Every endpoint, seed by seed", endpoints)] if endpoints else []
    blocks += _folded("Every difference over training", _present(gap_figure(study)), len(study.comparisons))
    return blocks + trajectories.blocks(study, FEW)


def _papers(study: StoredStudy) -> list[Block]:
    found: list[Block] = list(claims.papers(study))
    return _folded("Every published loss and difference", found, max(len(study.arms), len(study.comparisons)) // 2)


def _routing(study: StoredStudy) -> list[Block]:
    heat = _present(*heat_figures(study))
    blocks = _folded("Every arm, site by site", heat, len(heat)) + _present(divergence_figure(study))
    words = left_out(len(featured_arms(study)), len(study.arms), "arms").strip()
    return [Paragraph(words), *blocks] if blocks and words else blocks


def _folded(summary: str, blocks: list[Block], number: int) -> list[Block]:
    """Blocks as they are while they are few, and folded away when a page of them would hide the rest."""
    return blocks if number <= FEW or not blocks else [Details(summary, blocks)]


def _summary_table(study: StoredStudy, compared: Sequence[Comparison]) -> Table:
    rows, standing = [], bool(study.claims or study.plan["extensions"])
    for comparison in compared:
        end = comparison.endpoint or {}
        n = len(end["seeds"])
        rows.append([
            comparison.name,
            str(n),
            numbers.difference(end["mean"]),
            numbers.nats(end["sd"]),
            numbers.interval(end["t_interval"]),
            numbers.interval(end["bootstrap_interval"] if n > 1 else None),
            f"{numbers.probability(end['sign_flip_p'])} ({numbers.probability(findings.smallest_p(n))})",
            f"{end['wins']} of {n}",
            *([claims.standing(comparison)] if standing else []),
        ])  # fmt: skip
    alone = any(row[1] == "1" for row in rows)
    columns = ["Comparison", "Seeds", "Mean", "SD", f"95{NO_BREAK}% t interval", f"95{NO_BREAK}% bootstrap", "Sign-flip p", "Better in"]
    return Table(
        "Paired statistics at the endpoint, nats. In brackets, the smallest p that so many seeds can give."
        + (" With one seed there is no standard deviation and no interval." if alone else "")
        + (f" {STANDING}" if standing else ""),
        [*columns, *(["Standing"] if standing else [])],
        [(None, rows, [])],
    )


def _seed_table(study: StoredStudy, compared: Sequence[Comparison]) -> Table:
    groups = []
    for comparison in compared:
        end = comparison.endpoint or {}
        columns = (end["seeds"], end["arm_nll"], end["parent_nll"], end["differences"], end["relative_perplexity_reduction"])
        rows = [_pair(study.seed_name(seed), *values) for seed, *values in zip(*columns, strict=True)]
        means = [numbers.mean(end["arm_nll"]), numbers.mean(end["parent_nll"]), end["mean"], end["mean_relative_perplexity_reduction"]]
        groups.append((comparison.name, rows, [_pair("Mean", *means)] if len(rows) > 1 else []))
    return Table(
        "Every pair at the endpoint: both validation NLLs and their difference in nats per token, and the arm's perplexity relative to its "
        "parent's.",
        ["Seed", "Arm", "Parent", "Difference", "Perplexity"],
        groups,
    )


def _pair(name: str, arm: float, parent: float, difference: float, reduction: float) -> list[str]:
    return [name, numbers.nats(arm), numbers.nats(parent), numbers.difference(difference), numbers.percent(-reduction)]


def _present(*figures: FigureBlock | None) -> list[Block]:
    return [figure for figure in figures if figure is not None]
