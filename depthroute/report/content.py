"""The report as a document: from a stored study to headings, sentences, tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from depthroute.report import findings, numbers
from depthroute.report.curve_plots import curves_figure
from depthroute.report.document import Block, Bullets, Code, Details, Document, Facts, Inline, Note, Paragraph, Section, Strong, Table, Text
from depthroute.report.outcome_plots import endpoints_figure, gap_figure
from depthroute.report.routing_plots import divergence_figure, heat_figures
from depthroute.report.stored import Arm, Cell, Comparison, StoredStudy

ABSENT = object()
FEW = 4  # comparisons that are told one by one; more are counted, and their pairs folded away


def compose(study: StoredStudy) -> Document:
    """Everything the page and the Markdown say, in reading order."""
    data = _manifest(study)
    return Document(
        title=study.plan["name"],
        kicker="Paired study of residual connections over depth",
        question=study.plan.get("question") or "",
        lead=findings.verdict(study),
        lead_blocks=findings.lead_blocks(study),
        sections=[section for section in (
            Section("setup", "What was run", _setup(study, data)),
            Section("results", "Paired results", _results(study)),
            Section("curves", "Learning curves", _figures(curves_figure(study, data.get("unigram_entropy_nats")))),
            Section("routing", "What the models read", _figures(*heat_figures(study), divergence_figure(study))),
            Section("cost", "Cost beside quality", _cost(study)),
            Section("limits", "What this study cannot show", [Bullets(findings.limits(study, data))]),
            Section("reproduction", "To repeat it", _reproduction(study, data)),
        ) if section.blocks],
    )


def _results(study: StoredStudy) -> list[Block]:
    compared = [c for c in study.comparisons if c.endpoint is not None]
    blocks: list[Block] = [Paragraph([
        f"The endpoint is the {study.plan.get('endpoint', 'validation NLL at the last milestone')}"
        + (f", step {study.endpoint_step:,}" if study.endpoint_step else "")
        + ". A difference is arm minus parent within one seed, in nats per token: negative is better. The t interval is the headline."
    ])]
    if not compared:
        blocks.append(Paragraph("No pair is complete yet, so there is nothing to compare."))
    elif len(study.comparisons) > 1:
        blocks.append(findings.other_comparisons(study, FEW))
    if compared:
        pairs = _seed_table(compared)
        blocks += [_summary_table(compared), pairs if len(compared) <= FEW else Details("Every pair, seed by seed", [pairs])]
    return blocks + _figures(endpoints_figure(study), gap_figure(study))


def _summary_table(compared: Sequence[Comparison]) -> Table:
    rows = []
    for comparison in compared:
        end = comparison.endpoint or {}
        n = len(end["seeds"])
        rows.append([
            comparison.name, str(n), numbers.difference(end["mean"]), numbers.nats(end["sd"]), numbers.interval(end["t_interval"]),
            numbers.interval(end["bootstrap_interval"]), f"{numbers.probability(end['sign_flip_p'])} ({numbers.probability(findings.smallest_p(n))})",
            f"{end['wins']} of {n}",
        ])
    alone = any(len((c.endpoint or {})["seeds"]) == 1 for c in compared)
    return Table(
        "Paired statistics at the endpoint, nats. In brackets, the smallest p that so many seeds can give."
        + (" With one seed there is no standard deviation and no interval." if alone else ""),
        ["Comparison", "Seeds", "Mean", "SD", f"95{numbers.NO_BREAK}% t interval", f"95{numbers.NO_BREAK}% bootstrap", "Sign-flip p", "Better in"],
        [(None, rows, [])],
    )


def _seed_table(compared: Sequence[Comparison]) -> Table:
    groups = []
    for comparison in compared:
        end = comparison.endpoint or {}
        per_seed = zip(end["seeds"], end["arm_nll"], end["parent_nll"], end["differences"], end["relative_perplexity_reduction"], strict=True)
        rows = [
            [str(seed), numbers.nats(arm), numbers.nats(parent), numbers.difference(d), numbers.percent(-reduction)]
            for seed, arm, parent, d, reduction in per_seed
        ]
        closing = [[
            "Mean", numbers.nats(numbers.mean(end["arm_nll"])), numbers.nats(numbers.mean(end["parent_nll"])), numbers.difference(end["mean"]),
            numbers.percent(-end["mean_relative_perplexity_reduction"]),
        ]]
        groups.append((comparison.name, rows, closing if len(rows) > 1 else []))
    return Table(
        "Every pair at the endpoint: both validation NLLs and their difference in nats per token, and the arm's perplexity relative to its parent's.",
        ["Seed", "Arm", "Parent", "Difference", "Perplexity"], groups,
    )


def _cost(study: StoredStudy) -> list[Block]:
    rows = []
    for arm in study.arms:
        done, parent = study.complete(arm), study.parent_of(arm)
        if not done:
            rows.append([arm.label, *[numbers.NONE] * 9])
            continue
        parameters = (done[0].result or {})["parameters"]
        rows.append([
            arm.label, parent.label if parent else numbers.NONE, numbers.count(parameters["total"]), numbers.count(parameters["residual"]),
            numbers.count(_mean(done, "tokens_per_second", "median")), _relative(study, arm, "tokens_per_second", "median"),
            numbers.mebibytes(_mean(done, "peak_memory_bytes")), _relative(study, arm, "peak_memory_bytes"),
            numbers.duration(_mean(done, "training_seconds")), numbers.nats(_mean(done, "nll")),
        ])
    return [Table(
        "Means over the complete seeds. Added are the parameters of the residual method. Tokens per second are the median over steps, data and "
        "optimiser included. Relative columns compare with the arm's parent over the seeds that both have.",
        ["Arm", "Parent", "Parameters", "Added", "Tokens/s", "relative", "Peak memory", "relative", "Training", "NLL, nats"],
        [(None, rows, [])], text_columns=2,
    )]


def _relative(study: StoredStudy, arm: Arm, *path: str) -> str:
    parent = study.parent_of(arm)
    if parent is None:
        return numbers.NONE
    ours, theirs = ({c.seed: c for c in study.complete(a)} for a in (arm, parent))
    common = [seed for seed in study.seeds if seed in ours and seed in theirs]
    top, bottom = _mean([ours[s] for s in common], *path), _mean([theirs[s] for s in common], *path)
    return numbers.percent(top / bottom - 1, 1) if top and bottom else numbers.NONE


def _mean(done: Sequence[Cell], *path: str) -> float | None:
    return numbers.mean([value for cell in done for value in [_dig(cell.result, *path)] if value is not ABSENT and value is not None])


def _figures(*figures: Any) -> list[Block]:
    return [figure for figure in figures if figure is not None]
