"""What the statistics say, in sentences: the verdict, and the limits of what the study can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from depthroute.report import numbers
from depthroute.report.document import Block, Bullets, Inline, KeyNumbers, Note, Paragraph, Strong, Text
from depthroute.report.stored import Comparison, StoredStudy


def verdict(study: StoredStudy) -> Text:
    """The headline comparison in one paragraph, whichever way it points."""
    if not study.comparisons:
        return "This study compares no arms, so there is no verdict; the runs are reported below."
    headline = study.comparisons[0]
    end = headline.endpoint
    arm, parent = headline.arm.label, headline.parent.label
    if end is None:
        return [Strong(f"No verdict yet: no seed has finished both {arm} and {parent}."), " What is there so far is reported below."]
    n, mean = len(end["seeds"]), end["mean"]
    steps = f" after {study.endpoint_step:,} steps" if study.endpoint_step else ""
    direction = "lower" if mean < 0 else "higher" if mean > 0 else "no different"
    perplexity = -end["mean_relative_perplexity_reduction"]
    parts: list[Inline] = [
        f"The validation loss of {arm} is ",
        Strong(f"{numbers.nats(abs(mean))}{numbers.NO_BREAK}nats {direction}" if mean else "no different"),
        f" than {'' if mean else 'from '}that of {parent}{steps}" if mean else f" from that of {parent}{steps}",
    ]
    if end["t_interval"] is None:
        parts.append(
            f", a perplexity change of {numbers.percent(perplexity)}. Only one seed is complete in both arms, so there is no interval: the "
            "difference may be the luck of the seed, and this study cannot tell."
        )
        return parts
    parts.append(
        f" on average over {numbers.plural(n, 'paired seed')} (95{numbers.NO_BREAK}% t interval of the difference "
        f"{numbers.interval(end['t_interval'])}), a perplexity change of {numbers.percent(perplexity)}. {_wins(end)} "
    )
    low, high = end["t_interval"]
    if low <= 0 <= high:
        parts.append(Strong("The interval includes zero: this study cannot tell the two apart."))
    else:
        parts += [Strong("The interval excludes zero"), f": here, {arm} is {'better' if mean < 0 else 'worse'} than {parent}."]
    return parts


def lead_blocks(study: StoredStudy) -> list[Block]:
    """Beside the verdict: its key numbers, and a note when cells are missing."""
    blocks: list[Block] = []
    end = study.comparisons[0].endpoint if study.comparisons else None
    if end is not None:
        n = len(end["seeds"])
        interval = numbers.interval(end["t_interval"]).replace(f"{numbers.NO_BREAK}to{numbers.NO_BREAK}", f" to{numbers.NO_BREAK}") if end["t_interval"] else "none"
        blocks.append(KeyNumbers([
            ("Mean difference, nats", numbers.difference(end["mean"]), "negative is better"),
            (f"95{numbers.NO_BREAK}% t interval", interval, f"{numbers.plural(n - 1, 'degree')} of freedom" if n > 1 else "one seed: no interval"),
            ("Perplexity", numbers.percent(-end["mean_relative_perplexity_reduction"]), "relative to the parent"),
            ("Seeds that are better", f"{end['wins']} of {n}", f"sign-flip p {numbers.probability(end['sign_flip_p'])}"),
        ]))
    missing = study.missing()
    if missing:
        total = len(study.cells)
        blocks.append(Note([
            Strong(f"{len(missing)} of {numbers.plural(total, 'run')} {'is' if len(missing) == 1 else 'are'} missing."),
            " The statistics use the seeds that are complete in both arms of a comparison. The missing runs are named below.",
        ]))
    return blocks


def other_comparisons(study: StoredStudy, few: int) -> Block:
    """The comparisons after the first: a sentence for each, or with more than `few` in all, how many of them say something."""
    others = study.comparisons[1:]
    if len(study.comparisons) <= few:
        return Bullets([_sentence(comparison) for comparison in others])
    intervals = [c.endpoint["t_interval"] for c in others if c.endpoint is not None and c.endpoint["t_interval"]]
    below, above = sum(high < 0 for _, high in intervals), sum(low > 0 for low, _ in intervals)
    return Paragraph(
        f"Besides the headline there are {numbers.plural(len(others), 'comparison')}. In {below} of them the interval lies below zero (the arm is "
        f"better), in {above} above it (worse), and {len(others) - below - above} cannot tell or have no interval yet."
    )


def limits(study: StoredStudy, data: Mapping[str, Any]) -> list[Text]:
    """What this study cannot show, computed from what it holds."""
    items: list[Text] = []
    counts = [len(c.endpoint["seeds"]) for c in study.comparisons if c.endpoint is not None]
    if counts:
        items.append(_seed_limit(min(counts)))
    if len(study.comparisons) > 1:
        items.append(
            f"{numbers.plural(len(study.comparisons), 'comparison')} are made and no correction for that is applied; the first was named as the "
            "headline in the plan before training began."
        )
    items += _scale_limit(study, data)
    if data.get("corpus") is not None:
        items.append([
            "One corpus, one split, one tokenizer. ",
            "If it is made from the packages installed on a machine, its text changes with their versions: compare its hash before comparing losses.",
        ])
    evaluated = _evaluated_tokens(study)
    if evaluated:
        items.append(
            f"Validation averages over {numbers.count(evaluated)} tokens, the same ones in every run. The intervals above describe the spread over "
            "seeds, not over other validation texts."
        )
    items.append(
        "Speed is the median of step times on one machine"
        + (", a CPU shared with whatever else ran on it" if _on_cpu(study) else "")
        + ": small differences in tokens per second may be noise. Peak memory is that of the whole process, libraries included."
    )
    items.append("One setting of the learning rate and of every other hyperparameter serves all arms; none was tuned separately, and no other was tried here.")
    return items


def smallest_p(seeds: int) -> float:
    """The smallest two-sided p an exact sign-flip test of `seeds` pairs can reach: 2 / 2^n."""
    return 2.0 / 2**seeds


def _seed_limit(fewest: int) -> str:
    if fewest == 1:
        return "One seed: no interval can be formed, and no statement about other seeds follows."
    p = smallest_p(fewest)
    text = (
        f"With {fewest} seeds the exact sign-flip test cannot go below p = {numbers.probability(p)}"
        + (", so that it can never reach 0.05 here" if p > 0.05 else "")
        + "."
    )
    if fewest <= 5:
        text += (
            f" The t interval has {numbers.plural(fewest - 1, 'degree')} of freedom and rests on the differences being normally distributed, which so "
            "few cannot show; the bootstrap interval is too narrow with so few seeds and is given for comparison with the literature only."
        )
    return text


def _scale_limit(study: StoredStudy, data: Mapping[str, Any]) -> list[Text]:
    done = [cell.result for arm in study.arms for cell in study.complete(arm) if cell.result]
    totals = sorted({r["parameters"]["total"] for r in done if r.get("parameters")})
    tokens = max((r["tokens"] for r in done if r.get("tokens")), default=None)
    if not totals or tokens is None:
        return []
    size = numbers.scaled(totals[-1], "parameters")
    text = f"Models of {'up to ' if len(totals) > 1 else ''}{size}, trained on {numbers.scaled(tokens, 'tokens')}"
    available = ((data.get("splits") or {}).get("train") or {}).get("tokens")
    if available:
        text += f" ({tokens / available:.2f} passes over the training split)"
    return [text + f", which is {tokens / totals[-1]:.1f} tokens per parameter. Nothing here says what happens at another scale or with longer training."]


def _wins(end: Mapping[str, Any]) -> str:
    n = len(end["seeds"])
    lower, higher = end["wins"], end["losses"]
    if lower == n or higher == n:
        return f"It is {'lower' if lower == n else 'higher'} in {n} of {n} seeds."
    return f"It is lower in {lower} of {n} seeds."


def _sentence(comparison: Comparison) -> Text:
    end = comparison.endpoint
    if end is None:
        return [Strong(f"{comparison.name}: "), "no complete pair yet."]
    if end["t_interval"] is None:
        rest = "one seed, no interval."
    else:
        low, high = end["t_interval"]
        zero = "which includes zero" if low <= 0 <= high else "which excludes zero"
        rest = f"95{numbers.NO_BREAK}% t interval {numbers.interval(end['t_interval'])}, {zero}; lower in {end['wins']} of {len(end['seeds'])} seeds."
    return [Strong(f"{comparison.name}: "), f"{numbers.difference(end['mean'])}{numbers.NO_BREAK}nats, {rest}"]


def _evaluated_tokens(study: StoredStudy) -> int | None:
    sizes: Sequence[int] = [
        e["evaluated_tokens"] for arm in study.arms for cell in study.complete(arm) for e in cell.evaluations[-1:] if e.get("evaluated_tokens")
    ]
    return max(sizes, default=None)


def _on_cpu(study: StoredStudy) -> bool:
    environments = [cell.environment for arm in study.arms for cell in study.complete(arm)]
    return any("cpu" in str(e.get("device", "cpu")).lower() for e in environments)
