"""What the statistics say, in sentences: the verdict, and the limits of what the study can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from depthroute.report import numbers
from depthroute.report.document import Block, Bullets, Inline, KeyNumbers, Note, Paragraph, Strong, Text
from depthroute.report.numbers import NO_BREAK
from depthroute.report.stored import Cell, Comparison, StoredStudy


def verdict(study: StoredStudy) -> Text:
    """The headline comparison in one paragraph, whichever way it points."""
    if not study.comparisons:
        return "This study compares no arms, so there is no verdict; the runs are reported below."
    headline = study.comparisons[0]
    end = headline.endpoint
    arm, parent = headline.arm.label, headline.parent.label
    if end is None:
        return [Strong(f"No verdict yet: no seed has finished both {arm} and {parent}."), " What is there so far is reported below."]
    mean, seeds = end["mean"], numbers.plural(len(end["seeds"]), "paired seed")
    size = f"{numbers.nats(abs(mean))}{NO_BREAK}nats {'lower' if mean < 0 else 'higher'}" if mean else "no different"
    after = f" after {headline.endpoint_step:,} steps" if headline.endpoint_step else ""
    change = numbers.percent(-end["mean_relative_perplexity_reduction"])
    than = "than" if mean else "from"
    parts: list[Inline] = [f"The {study.endpoint} loss of {arm} is ", Strong(size), f" {than} that of {parent}{after}"]
    if end["t_interval"] is None:
        parts.append(
            f", a perplexity change of {change}. Only one seed is complete in both arms, so there is no interval: the difference may be "
            "the luck of the seed, and this study cannot tell."
        )
        return parts
    interval = f"95{NO_BREAK}% t interval of the difference {numbers.interval(end['t_interval'])}"
    parts.append(f" on average over {seeds} ({interval}), a perplexity change of {change}. {_wins(end)} ")
    if _excludes_zero(end):
        parts += [Strong("The interval excludes zero"), f": here, {arm} is {'better' if mean < 0 else 'worse'} than {parent}."]
    elif _identical(end):
        parts.append(Strong("Every pair is exactly equal."))
    else:
        parts.append(Strong("The interval includes zero: this study cannot tell the two apart."))
    if headline.claim is not None:
        parts += [f" The claim \u201c{headline.claim['text']}\u201d is ", Strong(headline.claim["verdict"]), "."]
    return parts


def lead_blocks(study: StoredStudy) -> list[Block]:
    """Beside the verdict: its key numbers, and a note when cells are missing."""
    blocks: list[Block] = []
    end = study.comparisons[0].endpoint if study.comparisons else None
    if end is not None:
        n = len(end["seeds"])
        # Here, and only here, an interval may be broken after its first bound: the boxes are narrow on a phone.
        interval = numbers.interval(end["t_interval"]).replace(f"{NO_BREAK}to", " to") if end["t_interval"] else "none"
        freedom = f"{numbers.plural(n - 1, 'degree')} of freedom" if n > 1 else "one seed: no interval"
        change = numbers.percent(-end["mean_relative_perplexity_reduction"])
        blocks.append(KeyNumbers([
            ("Mean difference, nats", numbers.difference(end["mean"]), "negative is better"),
            (f"95{NO_BREAK}% t interval", interval, freedom),
            ("Perplexity", change, "relative to the parent"),
            ("Seeds that are better", f"{end['wins']} of {n}", f"sign-flip p {numbers.probability(end['sign_flip_p'])}"),
        ]))  # fmt: skip
    missing = study.missing()
    if missing:
        count = f"{len(missing)} of {numbers.plural(len(study.cells), 'run')} {'is' if len(missing) == 1 else 'are'} missing."
        rest = " The statistics use the seeds that are complete in both arms of a comparison. The missing runs are named below."
        blocks.append(Note([Strong(count), rest]))
    return blocks


def other_comparisons(study: StoredStudy, few: int) -> Block:
    """The comparisons after the first: a sentence for each, or with more than `few` in all, how many of them say something."""
    others = study.comparisons[1:]
    late = sum(comparison.post_hoc for comparison in others)
    if len(study.comparisons) <= few:
        return Bullets([_sentence(comparison) for comparison in others])
    decided = [c.endpoint["mean"] for c in others if c.endpoint is not None and c.endpoint["t_interval"] and _excludes_zero(c.endpoint)]
    below, above = sum(mean < 0 for mean in decided), sum(mean > 0 for mean in decided)
    without = sum(c.endpoint is None or c.endpoint["t_interval"] is None for c in others)
    same = sum(c.endpoint is not None and bool(c.endpoint["t_interval"]) and _identical(c.endpoint) for c in others)
    rest = [f"in {below} of them the interval lies below zero (the arm is better)", f"in {above} above it (worse)"]
    rest += [f"in {same} every pair is exactly equal"] if same else []
    undecided = len(others) - below - above - same - without
    rest += [f"in {undecided} it includes zero (which cannot tell)"] if undecided or not without else []
    rest += [f"{without} have no interval, with fewer than two complete pairs"] if without else []
    return Paragraph(
        f"Besides the headline there are {numbers.plural(len(others), 'comparison')}: {numbers.listed(rest)}."
        + (f" {late} of them came after the plan (post hoc)." if late else "")
    )


def limits(study: StoredStudy, data: Mapping[str, Any]) -> list[Text]:
    """What this study cannot show, computed from what it holds."""
    items: list[Text] = []
    counts = [len(c.endpoint["seeds"]) for c in study.comparisons if c.endpoint is not None]
    if counts:
        items.append(_seed_limit(counts))
    items += _multiplicity_limit(study)
    items += _scale_limit(study, data)
    if data.get("corpus") is not None:
        items.append(
            "One corpus, one split, one tokenizer. A corpus made from the packages that are installed on a machine changes with their "
            "versions: compare its hash before comparing losses between machines."
        )
    lines = [e for cell in _complete(study) for e in cell.evaluations if e.get("split", "validation") == "validation"]
    evaluated = max((e.get("evaluated_tokens") or 0 for e in lines), default=0)
    if evaluated:
        items.append(
            f"Validation averages over {numbers.count(evaluated)} tokens, the same ones in every run. The intervals above describe the "
            "spread over seeds, not over other validation texts"
            + ("; the section on seeds and texts has both." if has_documents(study) else ".")
        )
    return [*items, *_speed_limit(study), _recipe_limit(study)]


def smallest_p(seeds: int) -> float:
    """The smallest two-sided p that an exact sign-flip test of `seeds` pairs can reach: 2 / 2^n."""
    return 2.0 ** (1 - seeds)


def _seed_limit(counts: Sequence[int]) -> str:
    """`counts`: the complete pairs of every comparison. Where they differ, each number of seeds is said to be of so many comparisons."""
    nothing = "no interval can be formed, and no statement about other seeds follows"
    groups = sorted(set(counts))
    if groups == [1]:
        return f"One seed: {nothing}."
    parts = []
    for seeds in groups:
        with_them = counts.count(seeds)
        has = "has" if with_them == 1 else "have"
        of = f", as {with_them} of {len(counts)} comparisons {has}," if len(groups) > 1 else ""
        if seeds == 1:
            parts.append(f"With one seed{of} {nothing}.")
            continue
        p = smallest_p(seeds)
        never = f", so that it can never reach 0.05 {'there' if of else 'here'}" if p > 0.05 else ""
        parts.append(f"With {seeds} seeds{of} the exact sign-flip test cannot go below p = {numbers.probability(p)}{never}.")
    text, fewest = " ".join(parts), min(seeds for seeds in groups if seeds > 1)
    if fewest <= 5:
        which = f" of {fewest} seeds" if len(groups) > 1 else ""
        text += (
            f" The t interval{which} has {numbers.plural(fewest - 1, 'degree')} of freedom and rests on the differences being normally "
            "distributed, which so few cannot show; the bootstrap interval is too narrow with so few seeds and is given for comparison "
            "with the literature only."
        )
    return text


def _multiplicity_limit(study: StoredStudy) -> list[Text]:
    """What is adjusted for there being several questions, and what is not."""
    items: list[Text] = []
    lower = [claim for claim in study.claims if claim["kind"] == "lower"]
    planned = sum(not claim["post_hoc"] for claim in lower)
    several = len(study.comparisons) > 1
    headline = "the first was named as the headline in the plan, before training began."
    if lower:
        later, families = len(lower) - planned, []
        if planned:
            families.append(f"those of the {numbers.plural(planned, 'planned claim')} that a loss is lower over these")
        if later:
            families.append(f"those of {numbers.plural(later, 'later claim')} of that kind over all {len(lower)}")
        text = f"The p values of claims are adjusted by Holm: {numbers.listed(families)}."
        others = sorted({claim["kind"] for claim in study.claims} - {"lower"})
        text += f" The claims of other kinds ({', '.join(others)}) are decided one by one, each at its own level." if others else ""
        text += " Nothing else is adjusted: the intervals of single comparisons are for one comparison each." if several else ""
        items.append(text)
    elif several:
        items.append(f"{numbers.plural(len(study.comparisons), 'comparison')} are made and no correction for that is applied; {headline}")
    extensions = study.plan["extensions"]
    if extensions:
        seen = max(extension["complete_cells"] for extension in extensions)
        items.append([
            Strong("Not all of this was planned. "),
            f"{_added(extensions)} came after the plan, when up to {numbers.plural(seen, 'run')} had a result, and are marked post hoc "
            "wherever they appear: whoever added them could have seen what was there.",
        ])  # fmt: skip
    return items


def _added(extensions: Sequence[Mapping[str, Any]]) -> str:
    totals = {noun: sum(len(extension[field]) for extension in extensions)
              for noun, field in (("arm", "arms"), ("seed", "seeds"), ("comparison", "comparisons"), ("claim", "claims"))}  # fmt: skip
    words = numbers.listed([numbers.plural(total, noun) for noun, total in totals.items() if total])
    return words[:1].upper() + words[1:]


def _scale_limit(study: StoredStudy, data: Mapping[str, Any]) -> list[Text]:
    done = [cell.result for cell in _complete(study) if cell.result]
    totals = sorted({r["parameters"]["total"] for r in done})
    tokens = max((r["tokens"] for r in done), default=None)
    if not totals or tokens is None:
        return []
    size = numbers.scaled(totals[-1], "parameters")
    text = f"Models of {'up to ' if len(totals) > 1 else ''}{size}, trained on {numbers.scaled(tokens, 'tokens')}"
    available = ((data.get("splits") or {}).get("train") or {}).get("tokens")
    if available:
        text += f" ({tokens / available:.2f} passes over the training split)"
    text += f", which is {tokens / totals[-1]:.1f} tokens per parameter."
    return [f"{text} Nothing here says what happens at another scale or with longer training."]


def _speed_limit(study: StoredStudy) -> list[Text]:
    environments = [cell.environment for cell in _complete(study)]
    if not environments:
        return []
    if all(e.get("gpu") for e in environments):
        speed = "Speed comes from the wall-clock times of steps: small differences may be noise."
        memory = "Peak memory is the largest allocation on the GPU."
    else:
        speed = (
            "Speed comes from the wall-clock times of steps on a CPU, where anything else that runs slows a step: a difference of a few "
            "percent may be noise."
        )
        memory = "Peak memory is that of the whole process, libraries included."
    recorded = {e["workers"] for e in environments if isinstance(e.get("workers"), int)}
    if max(recorded, default=1) > 1:
        most = f"{'Up to ' if len(recorded) > 1 else ''}{max(recorded):,}"
        speed += f" {most} runs trained side by side; the last ones may have had the machine to themselves."
    return [f"{speed} {memory}"]


def _recipe_limit(study: StoredStudy) -> str:
    pairs = [(c.arm.config.get("train"), c.parent.config.get("train")) for c in study.comparisons]
    if any(ours != theirs for ours, theirs in pairs):
        return "The two arms of some pairs differ in their training recipe; there a difference may come from that as well."
    if all(arm.config.get("train") == study.arms[0].config.get("train") for arm in study.arms):
        return "All arms share one learning rate and one recipe; whether another would favour another arm, this study does not say."
    return "The two arms of every pair share one recipe; whether another would favour another arm, only the recipes tried here can say."


def has_documents(study: StoredStudy) -> bool:
    """Whether the runs kept their losses by document."""
    return any(cell.folder is not None and (cell.folder / "documents.npz").is_file() for cell in _complete(study))


def _complete(study: StoredStudy) -> list[Cell]:
    return [cell for arm in study.arms for cell in study.complete(arm)]


def _excludes_zero(end: Mapping[str, Any]) -> bool:
    low, high = end["t_interval"]
    return bool(low > 0 or high < 0)


def _identical(end: Mapping[str, Any]) -> bool:
    return not any(end["differences"])


def _wins(end: Mapping[str, Any]) -> str:
    n = len(end["seeds"])
    return f"It is higher in {n} of {n} seeds." if end["losses"] == n else f"It is lower in {end['wins']} of {n} seeds."


def _sentence(comparison: Comparison) -> Text:
    end = comparison.endpoint
    if end is None:
        return [Strong(f"{comparison.name}: "), "no complete pair yet."]
    if end["t_interval"] is None:
        rest = "one seed, no interval."
    else:
        zero = "which excludes zero" if _excludes_zero(end) else "which includes zero"
        rest = f"95{NO_BREAK}% t interval {numbers.interval(end['t_interval'])}, {zero}; {_wins(end).removeprefix('It is ')}"
    return [Strong(f"{comparison.name}: "), f"{numbers.difference(end['mean'])}{NO_BREAK}nats, {rest}"]
