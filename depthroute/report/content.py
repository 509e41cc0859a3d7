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


def _setup(study: StoredStudy, data: Mapping[str, Any]) -> list[Block]:
    base = _shared([arm.config for arm in study.arms])
    facts = [
        ("Corpus", _corpus(data)),
        ("Vocabulary", _vocabulary(data, base)),
        ("Model", _model(base)),
        ("Training", _training(base)),
        ("Optimiser", _optimiser(base)),
        ("Seeds", f"{', '.join(map(str, study.seeds))}; initial weights and batch order depend on the seed alone, so a pair shares both"),
        ("Machine", _machine(study)),
        ("Plan", _plan(study)),
    ]
    blocks: list[Block] = []
    if study.plan_intact is False:
        blocks.append(Note([Strong("The plan was changed after it was written: "), "its content does not have the hash that it carries."]))
    strangers = [c for arm in study.arms for c in study.complete(arm) if c.fingerprint and c.fingerprint != study.plan.get("data_fingerprint")]
    if strangers and study.plan.get("data_fingerprint"):
        blocks.append(Note([Strong("Not the planned data: "), numbers.listed([_cell_name(study, c) for c in strangers]) + " ran on other data."]))
    blocks.append(Facts([(term, text) for term, text in facts if text]))
    blocks.append(Table(
        "The arms. Everything that is not in this table is the same in all of them.", ["Arm", "Name in the files", "What is its own"],
        [(None, [[arm.label, arm.name, _own(arm, base)] for arm in study.arms], [])], text_columns=3,
    ))
    missing = study.missing()
    if missing:
        rows = [[_label(study, c.arm), str(c.seed), str(c.reason)] for c in missing]
        blocks.append(Table("Missing runs, and why. They enter no number of this report.", ["Arm", "Seed", "Reason"], [(None, rows, [])], text_columns=3))
    return blocks


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


def _reproduction(study: StoredStudy, data: Mapping[str, Any]) -> list[Block]:
    environments = [cell.environment for cell in study.cells.values() if cell.environment]
    facts: list[tuple[str, Text]] = []

    def add(term: str, values: Sequence[Any]) -> None:
        distinct = list(dict.fromkeys(str(v) for v in values if v not in (None, "")))
        if distinct:
            facts.append((term, [part for i, v in enumerate(distinct) for part in ([", "] if i else []) + [Code(v)]]))

    add("Plan hash", [study.plan.get("hash")])
    add("Data fingerprint", [study.plan.get("data_fingerprint")])
    add("Commit", [e.get("commit") for e in environments])
    add("Python", [e.get("python") for e in environments])
    packages = {name: None for e in environments for name in e.get("packages", {})}
    for name in packages:
        add(name, [e.get("packages", {}).get(name) for e in environments])
    add("Platform", [e.get("platform") for e in environments])
    add("Processor", [e.get("processor") for e in environments])
    add("Instructions", [e.get("instructions") for e in environments])
    add("GPU", [e.get("gpu") for e in environments])
    add("Threads", [e.get("threads") for e in environments])
    settings = [[name, _value(value)] for name, value in _flat(_shared([arm.config for arm in study.arms]))]
    hashes = [[name, _value(value)] for name, value in _flat(data) if isinstance(value, str | int | float) and not isinstance(value, bool)]
    folded: list[Block] = [Facts(facts)] if facts else []
    if hashes:
        folded.append(Table("The data's manifest.", ["Field", "Value"], [(None, hashes, [])], text_columns=2))
    if settings:
        folded.append(Table("Settings that all arms share.", ["Field", "Value"], [(None, settings, [])], text_columns=2))
    words = Paragraph([
        "Every run folder holds a complete ", Code("config.json"), ": the run can be repeated from it and the data that it names. The same seed, versions, "
        "processor and number of threads give the same losses, bit for bit.",
    ])
    return [words, Details("Hashes, versions and settings", folded)] if folded else [words]


def _manifest(study: StoredStudy) -> Mapping[str, Any]:
    found = (cell.environment.get("data") for cell in study.cells.values())
    return next((data for data in found if isinstance(data, dict)), {})


def _corpus(data: Mapping[str, Any]) -> Text:
    corpus = data.get("corpus")
    name = corpus if isinstance(corpus, str) else corpus.get("name", corpus.get("kind", "")) if isinstance(corpus, dict) else ""
    splits = []
    for split, counts in (data.get("splits") or {}).items():
        words = [f"{numbers.count(counts[key])} {key}" for key in ("documents", "tokens") if counts.get(key) is not None]
        words += [numbers.megabytes(counts["bytes"])] if counts.get("bytes") is not None else []
        splits.append(f"{split}: {', '.join(words)}" if words else split)
    return "; ".join(part for part in [str(name), *splits] if part)


def _vocabulary(data: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    size = data.get("vocabulary", _dig(base, "model", "vocabulary"))
    entropy = data.get("unigram_entropy_nats")
    words = f"{numbers.count(size)} entries" if isinstance(size, int | float) else ""
    return words + (f"{'; ' if words else ''}unigram entropy {numbers.nats(entropy)}{numbers.NO_BREAK}nats per token" if entropy is not None else "")


def _model(base: Mapping[str, Any]) -> str:
    model = base.get("model", {})
    words = [
        f"{model[key]:,}{numbers.NO_BREAK}{noun}" if noun == "layers" else f"{noun} {model[key]:,}"
        for key, noun in (("layers", "layers"), ("width", "width"), ("heads", "heads"), ("mlp_width", "MLP width"), ("context", "context"))
        if isinstance(model.get(key), int)
    ]
    words = [f"{model['heads']}{numbers.NO_BREAK}heads" if word.startswith("heads ") else word for word in words]
    if "tied_embeddings" in model:
        words.append("tied embeddings" if model["tied_embeddings"] else "untied embeddings")
    return ", ".join(words)


def _training(base: Mapping[str, Any]) -> str:
    train, context = base.get("train", {}), _dig(base, "model", "context")
    words = [f"{train['steps']:,} steps"] if isinstance(train.get("steps"), int) else []
    if isinstance(train.get("sequences"), int):
        words.append(f"{train['sequences']:,} sequences a step")
        if words[:-1] and isinstance(context, int):
            words.append(f"{numbers.scaled(train['steps'] * train['sequences'] * context, 'tokens')} in all")
    return ", ".join(words)


def _optimiser(base: Mapping[str, Any]) -> str:
    train = base.get("train", {})
    words = []
    for key, noun in (("learning_rate", "peak learning rate"), ("betas", "betas"), ("weight_decay", "weight decay"), ("gradient_clip", "gradient clipping")):
        if train.get(key) is not None:
            words.append(f"{noun} {_value(train[key])}")
    for key, noun in (("warmup_fraction", "linear warm-up over"), ("final_fraction", "cosine decay to")):
        if isinstance(train.get(key), int | float):
            words.append(f"{noun} {100 * train[key]:.3g}{numbers.NO_BREAK}%" + (" of the steps" if key.startswith("warmup") else " of the peak"))
    return "AdamW, " + ", ".join(words) if words else ""


def _machine(study: StoredStudy) -> str:
    lines: dict[str, None] = {}
    for cell in study.cells.values():
        e = cell.environment
        parts = [str(e[key]) for key in ("gpu", "processor") if e.get(key)]
        parts += [numbers.plural(e["threads"], "thread")] if isinstance(e.get("threads"), int) else []
        torch = e.get("packages", {}).get("torch")
        parts += [f"torch {torch}"] if torch else []
        if parts:
            lines[", ".join(parts)] = None
    return "; ".join(lines)


def _plan(study: StoredStudy) -> Text:
    parts: list[Inline] = []
    if study.plan.get("written_at"):
        parts.append(f"written {str(study.plan['written_at']).replace('T', ' ').replace('+00:00', ' UTC')}, before the first step")
    if study.plan.get("hash"):
        parts += ["; " if parts else "", "SHA-256 ", Code(str(study.plan["hash"])[:16]), "…" + (", verified" if study.plan_intact else "")]
    return parts


def _own(arm: Arm, base: Mapping[str, Any]) -> str:
    """The settings of an arm that not all arms have; `none` values say nothing to a reader and stay out."""
    common = dict(_flat(base))
    own = [(name, value) for name, value in _flat(arm.config) if common.get(name, ABSENT) != value and value is not None]
    return ", ".join(f"{name.removeprefix('model.').removeprefix('train.')} {_value(value)}" for name, value in own) or numbers.NONE


def _shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of nested settings that is the same in all of them."""
    first, shared = configs[0], {}
    for name, value in first.items():
        values = [config.get(name, ABSENT) for config in configs]
        if all(isinstance(v, dict) for v in values):
            shared[name] = _shared(values)
        elif all(v == value for v in values):
            shared[name] = value
    return shared


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        dotted = f"{prefix}{name}"
        if isinstance(inner, dict):
            yield from _flat(inner, f"{dotted}.")
        else:
            yield dotted, inner


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_value(v) for v in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _dig(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name, ABSENT) if isinstance(value, dict) else ABSENT
    return value


def _label(study: StoredStudy, name: str) -> str:
    return next(arm.label for arm in study.arms if arm.name == name)


def _cell_name(study: StoredStudy, cell: Cell) -> str:
    return f"{_label(study, cell.arm)} seed {cell.seed}"


def _figures(*figures: Any) -> list[Block]:
    return [figure for figure in figures if figure is not None]
