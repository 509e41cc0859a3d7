"""What was run and what it takes to run it again: the data, the model, the recipe, the machine, the hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from depthroute.cost.body_words import body_facts
from depthroute.report import numbers
from depthroute.report.document import Block, Code, Details, Facts, Inline, Note, Paragraph, Strong, Table, Text
from depthroute.report.numbers import NO_BREAK, NONE
from depthroute.report.stored import Arm, Cell, StoredStudy

ABSENT = object()
HASH_DIGITS = 16
RESIDUAL = "model.residual."
# What tells residual methods apart; the arms' table shows these even where all arms agree.
SHOWN = tuple(RESIDUAL + name for name in ("method", "block", "layers_per_block", "num_blocks", "rank", "roles"))


def manifest(study: StoredStudy) -> Mapping[str, Any]:
    """The manifest of the data, as the first run on the planned data that recorded it has it; empty when none has."""
    found = (cell.environment.get("data") for cell in study.cells.values() if not _on_other_data(study, cell))
    return next((data for data in found if isinstance(data, dict)), {})


def setup(study: StoredStudy, data: Mapping[str, Any], many: int) -> list[Block]:
    """The setting in a list of facts, the arms (folded away when more than `many`), and the runs that are missing."""
    base = _shared([arm.config for arm in study.arms])
    facts: list[tuple[str, Text]] = [
        ("Corpus", _corpus(data)),
        ("Vocabulary", _vocabulary(data, base)),
        ("Model", _model(base)),
        ("Training", _training(base)),
        ("Optimiser", _optimiser(base)),
        ("Seeds", f"{_seeds(study)}; initial weights and batch order depend on the seed alone, so a pair shares both"),
        ("Machine", _machine(study)),
        ("Plan", _plan(study)),
        ("Stopping", str(study.plan.get("stopping") or "")),
    ]
    agreed = _agreed([arm.config for arm in study.arms])
    arms = [[arm.label, arm.name, _settings(arm, agreed)] for arm in study.arms]
    blocks = _warnings(study)
    blocks.append(Facts([(term, text) for term, text in facts if text]))
    caption = "The arms. Every other setting is the same in all arms that have it, and is listed at the end of the report."
    table = Table(caption, ["Arm", "Name in the files", "Settings"], [(None, arms, [])], text_columns=3)
    blocks.append(table if len(arms) <= many else Details(f"The {len(arms)} arms", [table]))
    missing = study.missing()
    if missing:
        rows = [[_label(study, cell.arm), study.seed_name(cell.seed), str(cell.reason)] for cell in missing]
        caption = "Missing runs, and why. They enter no number of this report."
        blocks.append(Table(caption, ["Arm", "Seed", "Reason"], [(None, rows, [])], text_columns=3))
    return blocks


def reproduction(study: StoredStudy, data: Mapping[str, Any]) -> list[Block]:
    """Hashes, versions and settings, folded away under the one sentence that most readers need."""
    environments = [cell.environment for cell in study.cells.values() if cell.environment]
    recorded = [("Plan hash", [study.plan.get("hash")]), ("Data fingerprint", [study.plan.get("data_fingerprint")])]
    for term in ("commit", "python"):
        recorded.append((term.capitalize(), [e.get(term) for e in environments]))
    for name in dict.fromkeys(name for e in environments for name in e.get("packages", {})):
        recorded.append((name, [e.get("packages", {}).get(name) for e in environments]))
    for term in ("platform", "processor", "processors", "instructions", "gpu", "threads"):
        recorded.append(("GPU" if term == "gpu" else term.capitalize(), [e.get(term) for e in environments]))
    recorded.append(("Depth attention", [e.get("depth_attention") for e in environments]))
    facts = [(term, _codes(values)) for term, values in recorded]
    folded: list[Block] = [Facts([(term, text) for term, text in facts if text])]
    for caption, settings in (
        ("The data's manifest.", dict(_flat(data))),
        ("Settings that are the same in all arms that have them.", _agreed([_without_place_and_seed(arm.config) for arm in study.arms])),
    ):
        rows = [[name, _value(value)] for name, value in settings.items() if not _has_objects(value)]
        if rows:
            folded.append(Table(caption, ["Field", "Value"], [(None, rows, [])], text_columns=2))
    words = Paragraph([
        "Every run folder holds a complete ", Code("config.json"), ": the run can be repeated from it and the data that it names. The last "
        "bits of a loss depend on the versions, the processor and the number of threads, which are listed here.",
    ])  # fmt: skip
    return [words, Details("Hashes, versions and settings", folded)]


def dig(value: Any, *path: str) -> Any:
    """A value inside nested objects, or ABSENT."""
    for name in path:
        value = value.get(name, ABSENT) if isinstance(value, dict) else ABSENT
    return value


def _warnings(study: StoredStudy) -> list[Block]:
    warnings: list[Block] = []
    if study.plan_intact is False:
        warnings.append(Note([Strong("The plan was changed after it was written: "), "it does not have the hash that it carries."]))
    others = [f"{_label(study, cell.arm)} seed {cell.seed}" for cell in study.cells.values() if _on_other_data(study, cell)]
    if others:
        warnings.append(Note([Strong("Not the planned data: "), f"{numbers.listed(others)} ran on other data."]))
    return warnings


def _on_other_data(study: StoredStudy, cell: Cell) -> bool:
    planned = study.plan.get("data_fingerprint")
    return bool(planned and cell.fingerprint and cell.fingerprint != planned)


def _corpus(data: Mapping[str, Any]) -> str:
    corpus = data.get("corpus")
    name = corpus.get("name", "") if isinstance(corpus, dict) else corpus or ""
    parts = [str(name)]
    for split, counts in (data.get("splits") or {}).items():
        words = [f"{numbers.count(counts[key])}{NO_BREAK}{key}" for key in ("documents", "tokens") if counts.get(key) is not None]
        words += [numbers.megabytes(counts["bytes"])] if counts.get("bytes") is not None else []
        parts.append(f"{split}: {', '.join(words)}")
    return "; ".join(part for part in parts if part)


def _vocabulary(data: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    size, entropy = data.get("vocabulary", dig(base, "model", "vocabulary")), data.get("unigram_entropy_nats")
    words = [f"{numbers.count(size)} entries"] if isinstance(size, int) else []
    words += [f"unigram entropy {numbers.nats(entropy)}{NO_BREAK}nats per token"] if entropy is not None else []
    return "; ".join(words)


def _model(base: Mapping[str, Any]) -> str:
    model = base.get("model", {})
    forms = {
        "layers": f"{{:,}}{NO_BREAK}layers",
        "width": f"width{NO_BREAK}{{:,}}",
        "heads": f"{{:,}}{NO_BREAK}heads",
        "mlp_width": f"MLP width{NO_BREAK}{{:,}}",
        "context": f"context{NO_BREAK}{{:,}}",
    }
    words = [form.format(model[key]) for key, form in forms.items() if isinstance(model.get(key), int)]
    words += _body(model)
    if "tied_embeddings" in model:
        words.append("tied embeddings" if model["tied_embeddings"] else "untied embeddings")
    return ", ".join(words)


def _body(model: Mapping[str, Any]) -> list[str]:
    """What the layers have in place of softmax attention and dense MLPs, as far as the arms share it."""
    said = body_facts(model)
    forms = {"mixers": "mixers {}", "experts": "experts {}", "activation": "activation {}", "documents": "packed documents {}"}
    return [form.format(said[name]) for name, form in forms.items() if name in said]


def _training(base: Mapping[str, Any]) -> str:
    sizes = [dig(base, "train", "steps"), dig(base, "train", "sequences"), dig(base, "model", "context")]
    if not all(isinstance(size, int) for size in sizes):
        return ""
    steps, sequences, context = sizes
    total = numbers.scaled(steps * sequences * context, "tokens")
    return f"{steps:,}{NO_BREAK}steps of {sequences:,}{NO_BREAK}sequences of {context:,}{NO_BREAK}tokens, {total} in all"


def _optimiser(base: Mapping[str, Any]) -> str:
    train = base.get("train", {})
    fall = "cosine decay"
    if train.get("schedule") == "wsd":
        share = train.get("decay_fraction")
        over = "" if share is None else f" over the last {100 * share:.3g}{NO_BREAK}% of the steps"
        fall = f"constant rate, then linear decay{over},"
    muon = train.get("optimiser") == "muon" or any(group.get("optimiser") == "muon" for group in train.get("groups") or ())
    forms = {
        "learning_rate": "peak learning rate {}",
        "route_rate": "routes at {} times the rate",
        **({"matrix_rate": "matrices of the layers at {} times the rate", "momentum": "Muon's momentum {}"} if muon else {}),
        "betas": "betas {}",
        "weight_decay": "weight decay {}",
        "gradient_clip": "gradients clipped at norm {}",
        "warmup_fraction": f"linear warm-up over {{}}{NO_BREAK}% of the steps",
        "warmup_steps": "linear warm-up over {} steps",
        "final_fraction": f"{fall} to {{}}{NO_BREAK}% of the peak",
    }
    groups = train.get("groups") or ()
    if groups and all(group.get("weight_decay") is not None for group in groups):
        del forms["weight_decay"]  # each has its own
    words = []
    for key, form in forms.items():
        value = train.get(key)
        if value is not None and (key, value) not in (("route_rate", 1.0), ("matrix_rate", 1.0)):
            shown = (
                f"{100 * value:.3g}" if key.endswith("_fraction") else " and ".join(map(_value, value)) if key == "betas" else _value(value)
            )
            words.append(form.format(shown))
    name = "Muon for the matrices of the layers and AdamW for the rest" if muon else "AdamW"
    if groups:
        name = "; ".join(map(group_words, groups))
    return f"{name}, {', '.join(words)}" if words else ""


def group_words(group: Mapping[str, Any]) -> str:
    """A group of `train.groups` in words."""
    name = {"muon": "Muon", "adamw": "AdamW"}.get(str(group.get("optimiser")), str(group.get("optimiser")))
    rate, decay = group.get("rate", 1.0), group.get("weight_decay")
    at = "" if rate == 1 else f", {_value(rate)} times the rate"
    decayed = "" if decay is None else f", weight decay {_value(decay)}"
    return f"{name}{at}{decayed} for the parameters {group.get('parameters')}"


def _machine(study: StoredStudy) -> str:
    lines: dict[str, None] = {}
    for cell in study.cells.values():
        e = cell.environment
        parts = [str(e[key]) for key in ("gpu", "processor") if e.get(key)]
        parts += [numbers.plural(e["threads"], "thread")] if isinstance(e.get("threads"), int) else []
        version = dig(e, "packages", "torch")
        parts += [f"torch{NO_BREAK}{version}"] if isinstance(version, str) else []
        workers = e.get("workers")
        if isinstance(workers, int):
            parts.append(f"{workers:,}{NO_BREAK}runs side by side" if workers > 1 else "one run at a time")
        if parts:
            lines[", ".join(parts)] = None
    return "; ".join(lines)


def _plan(study: StoredStudy) -> Text:
    parts: list[Inline] = []
    if study.plan.get("written_at"):
        when = str(study.plan["written_at"]).replace("T", " ").replace("+00:00", f"{NO_BREAK}UTC")
        parts.append(f"written {when}, before the first step; ")
    if study.plan.get("hash"):
        parts += ["SHA-256 ", Code(str(study.plan["hash"])[:HASH_DIGITS]), "…, verified" if study.plan_intact else "…"]
    for extension in study.plan["extensions"]:
        fields = [field for field in ("arms", "seeds", "comparisons", "claims") if extension[field]]
        what = [numbers.plural(len(extension[field]), field.removesuffix("s")) for field in fields]
        when = str(extension["written_at"]).replace("T", " ").replace("+00:00", f"{NO_BREAK}UTC")
        seen = numbers.plural(extension["complete_cells"], "run")
        parts.append(f"; extended {when} by {numbers.listed(what)}, with {seen} complete by then: post hoc")
    return parts


def _seeds(study: StoredStudy) -> str:
    words = ", ".join(map(study.seed_name, study.seeds))
    fewer = sum(len(arm.seeds) < len(study.seeds) for arm in study.arms)
    return words + (f"; {numbers.plural(fewer, 'arm')} of {len(study.arms)} with some of them" if fewer else "")


def _settings(arm: Arm, agreed: Mapping[str, Any]) -> str:
    """What tells an arm apart: the settings on which arms disagree, and what SHOWN names where it has a value."""
    told = [(n, value) for n, value in _flat(arm.config) if n not in agreed or (n in SHOWN and value is not None)]
    names = [name.removeprefix(RESIDUAL).removeprefix("model.").removeprefix("train.") for name, _ in told]
    return ", ".join(f"{name} {_value(value)}" for name, (_, value) in zip(names, told, strict=True)) or NONE


def _agreed(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings, by dotted name, that have one value in all the configurations that have them."""
    found: dict[str, list[Any]] = {}
    for name, value in (field for config in configs for field in _flat(config)):
        found.setdefault(name, []).append(value)
    return {name: values[0] for name, values in found.items() if all(value == values[0] for value in values)}


def _shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of nested settings that is the same in all of them."""
    shared: dict[str, Any] = {}
    for name, value in configs[0].items() if configs else ():
        values = [config.get(name, ABSENT) for config in configs]
        if all(isinstance(v, dict) for v in values):
            shared[name] = _shared(values)
        elif all(v == value for v in values):
            shared[name] = value
    return shared


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _without_place_and_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The seed is each run's own, and where the data lay means nothing elsewhere: their fingerprint says what they are."""
    kept = {name: value for name, value in config.items() if name != "data"}
    return kept | {"train": {name: value for name, value in config.get("train", {}).items() if name != "seed"}}


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _codes(values: Sequence[Any]) -> Text:
    distinct = dict.fromkeys(str(value) for value in values if value not in (None, ""))
    return [part for i, value in enumerate(distinct) for part in ([", "] if i else []) + [Code(value)]]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}" if isinstance(value, float) else str(value)


def _label(study: StoredStudy, name: str) -> str:
    return next(arm.label for arm in study.arms if arm.name == name)
