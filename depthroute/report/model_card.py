"""The model card of an exported run, from what its own files say. What they do not say is left out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from depthroute import __version__
from depthroute.common.config import to_json
from depthroute.common.files import read_json, read_json_lines
from depthroute.cost.body_words import body_facts
from depthroute.model import ModelConfig
from depthroute.report.facts import group_words
from depthroute.residual import SPECIFICATIONS, AttnResConfig, Method, ResidualConfig
from depthroute.residual.bank import BLOCK_FIELDS
from depthroute.train import RunConfig
from depthroute.train.run_folder import root_of, run_and_checkpoint

SMALL = 10**9  # parameters
PAPERS = {
    "Kimi Team 2026": "Kimi Team, Attention Residuals, 2026, arXiv 2603.15031",
    "Su 2026": "Su, Low-Rank Attention Residuals, 2026, arXiv 2607.09694",
    "RD-AttnRes": "Role-Decoupled Attention Residuals, 2026",
}


def model_card(path: Path) -> str:
    """README.md in the form of the Hugging Face hub: what the model is, how it was trained, what was measured, how to load it.

    `path`: a run folder, of whose last checkpoint the card is, or one of its checkpoint folders.

    Raises:
        RequestError: it is neither, or has no checkpoint.
    """
    (config, checkpoint), run = run_and_checkpoint(path), root_of(path)
    step = int(_read(checkpoint / "state.json")["step"])
    environment, result, adoption = (_read(run / f"{name}.json") for name in ("environment", "result", "adoption"))
    data = environment.get("data") or {}
    lines = [line for line in read_json_lines(run / "evaluations.jsonl") if isinstance(line, dict)]
    evaluations = [line for line in lines if line["step"] <= step]  # a killed run may have gone on behind its checkpoint
    method = method_of(config.model.residual)
    label = method.label if method is not None else config.model.residual.name
    sections = [
        _front_matter(method, evaluations),
        f"# A decoder with {label}",
        "Exported by depthroute, a library for learned routing over depth in place of the fixed residual sum of a Transformer.",
        "## What it is\n\n" + _rows(_shape(config.model, method, result, adoption)),
        f"## How it was trained{' on' if adoption else ''}\n\n" + _rows(_training(config, environment, data, step)),
        _measured(evaluations, data, step, config),
        _LOADING,
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(config, result, adoption, step)),
        "## References\n\n" + "\n".join(f"- {line}" for line in _references(config.model.residual, method)),
    ]
    return "\n\n".join(section.rstrip() for section in sections if section) + "\n"


def method_of(residual: ResidualConfig) -> Method | None:
    """The row of the table of methods that a configuration is of, or is nearest to; None for a method that is not registered."""
    named = {field.name for field in dataclasses.fields(residual)}
    base = AttnResConfig(**{name: getattr(residual, name) for name in (BLOCK_FIELDS | {"rank"}) & named})

    def distance(method: Method) -> int:
        """In fields, that of its size left out."""
        row = method.configure(base)
        return sum(getattr(row, name) != getattr(residual, name) for name in named - {method.size})

    alike = [method for method in SPECIFICATIONS.values() if type(method.configure(base)) is type(residual)]
    return min(alike, key=distance, default=None)


def _front_matter(method: Method | None, evaluations: list[dict[str, Any]]) -> str:
    tags = ["depthroute", "depth-routing", *([method.name] if method is not None else [])]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags)]
    if evaluations:
        lines += ["metrics:", "- perplexity"]
    return "\n".join([*lines, "---"])


def _shape(model: ModelConfig, method: Method | None, result: dict[str, Any], adoption: dict[str, Any]) -> Iterable[tuple[str, str]]:
    softmax = any(model.mixer(layer) == "softmax" for layer in range(model.layers))
    positions = "rotary positions" if softmax else "no positions"
    yield "Kind", f"decoder-only Transformer: RMSNorm, {positions}, {'SwiGLU' if model.activation == 'swiglu' else 'SiTU'}"
    said = body_facts(to_json(model))
    if adoption:
        source = adoption.get("source") or {}
        yield "Made of", f"a checkpoint of {', '.join(source.get('architectures') or [str(adoption.get('layout'))])}"
    yield "Layers, width", f"{model.layers}, {model.width:,}"
    groups = model.resolved_key_value_heads
    yield "Attention heads", f"{model.heads}" + (f", {groups} for keys and values" if groups != model.heads else "")
    if model.attention_window is not None:
        yield "Attention window", f"{model.attention_window:,} tokens"
    if "mixers" in said:
        yield "Token mixers", said["mixers"]
    yield "MLP width", f"{model.mlp_width:,}"
    if "experts" in said:
        yield "Experts", said["experts"]
    if "documents" in said:
        yield "Packed documents", said["documents"]
    yield "Vocabulary, context", f"{model.vocabulary:,}, {model.context:,} tokens"
    counts = result.get("parameters") or {}
    if counts:
        yield "Parameters", f"{counts['total']:,}, of which {counts['residual']:,} are the residual method's"
    yield "Residual method", model.residual.describe()
    if method is not None:
        yield "Equation", f"`{method.equation}`"
        yield "Paper", method.paper


def _training(config: RunConfig, environment: dict[str, Any], data: dict[str, Any], step: int) -> Iterable[tuple[str, str]]:
    train = config.train
    corpus = (data.get("corpus") or {}).get("name")
    if corpus:
        yield "Data", f"`{corpus}`"
    if config.data_fingerprint:
        yield "Data fingerprint", f"`{config.data_fingerprint}`"
    yield "Steps, tokens", f"{step:,} of {train.steps:,}, {step * config.tokens_per_step:,}"
    yield "Batch", f"{train.sequences:,} sequences of {config.model.context:,} tokens"
    muon = f"Muon, momentum {train.momentum:g}, for the matrices of the layers; for the rest " if train.optimiser == "muon" else ""
    adamw = f"AdamW, betas {train.betas[0]:g} and {train.betas[1]:g}, eps {train.eps:g}, weight decay {train.weight_decay:g}"
    if train.groups:
        yield "Optimiser", f"Muon, momentum {train.momentum:g}, and {adamw}, by groups of parameters"
        yield "Groups", "; ".join(group_words(to_json(group)) for group in train.groups)
    else:
        yield "Optimiser", muon + adamw
    rate = f"{train.learning_rate:g} at its peak, {train.schedule}, {train.steps_of_warmup:,} steps of warm-up"
    rates = {"the residual method": train.route_rate, "the matrices of the layers": train.matrix_rate}
    yield "Learning rate", rate + "".join(f"; times {factor:g} for {what}" for what, factor in rates.items() if factor != 1)
    yield "Precision, seed", f"{train.precision}, {train.seed}"
    machine = environment.get("gpu") or environment.get("processor")
    if machine:
        yield "Machine", str(machine)
    versions = environment.get("packages") or {}
    if versions:
        yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "Made with", f"depthroute {__version__}"


def _measured(evaluations: list[dict[str, Any]], data: dict[str, Any], step: int, config: RunConfig) -> str:
    if not evaluations:
        return ""
    last = max(line["step"] for line in evaluations)
    lines = [line for line in evaluations if line["step"] == last]
    bytes_per_token = _bytes_per_token(data)
    columns = ["Split", "Nats per token", "Perplexity", "Tokens"]
    accuracy = any("accuracy" in line for line in lines)
    rows = []
    for line in lines:
        of_split = bytes_per_token if line["split"] == "validation" else None
        row = [str(line["split"]), f"{line['nll']:.4f}", f"{line['perplexity']:.2f}", f"{line['evaluated_tokens']:,}"]
        row.append(f"{line['nll'] / math.log(2) / of_split:.4f}" if of_split else "")
        row.append(f"{line['accuracy']:.3f}" if "accuracy" in line else "")
        rows.append(row)
    columns += ["Bits per byte", "Accuracy"]
    kept = [index for index, name in enumerate(columns) if not (name == "Accuracy" and not accuracy) and any(row[index] for row in rows)]
    table = [[row[index] for index in kept] for row in [columns, ["---"] * len(columns), *rows]]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    note = f"On held-out text, after step {last:,}{'' if last == step else f', before these weights, which are those of step {step:,}'}."
    if bytes_per_token:
        note += " Bits per byte use the bytes and tokens of the whole validation split."
    if step < config.train.steps:
        note += " The training had not ended."
    return f"## What was measured\n\n{note}\n\n{text}"


def _limits(config: RunConfig, result: dict[str, Any], adoption: dict[str, Any], step: int) -> Iterable[str]:
    total = (result.get("parameters") or {}).get("total")
    if total is not None and total < SMALL:
        yield f"A small model, with {total:,} parameters: for experiments with the method, not for use."
    if adoption:
        then = "the steps above came after" if step else "its logits are those of that model"
        yield f"Its weights come from another model, whose training, licence and limits apply; {then}."
    else:
        yield "Its training was the prediction of the next token on the data above, nothing else: it follows no instructions."
    yield "Nothing was done to make what it writes true or safe, and nothing beyond the numbers above was measured."
    yield (
        f"It was configured for sequences of {config.model.context:,} tokens; longer ones are positions that it has not met. The caches of "
        "transformers do not slide: a token sees all before it."
    )


def _bytes_per_token(data: dict[str, Any]) -> float | None:
    split = (data.get("splits") or {}).get("validation") or {}
    return split["bytes"] / split["tokens"] if split.get("bytes") and split.get("tokens") else None


def _references(residual: ResidualConfig, method: Method | None) -> Iterable[str]:
    if method is None:
        yield f"Residual method `{residual.name}`"
        return
    known = [line for name, line in PAPERS.items() if method.paper.startswith(name)]
    yield known[0] if known else method.paper
    if isinstance(residual, AttnResConfig) and not method.paper.startswith("Kimi Team 2026"):
        yield PAPERS["Kimi Team 2026"]


def _rows(facts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in facts)])


def _read(path: Path) -> dict[str, Any]:
    value = read_json(path) if path.exists() else {}
    return value if isinstance(value, dict) else {}


_LOADING = """## How to load it

Without depthroute, by the modelling file in this folder (plain PyTorch):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))
```

With depthroute installed, by its own code and its kernels: `import depthroute.hf`, and leave `trust_remote_code` out."""
