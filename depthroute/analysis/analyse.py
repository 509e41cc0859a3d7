"""Everything that can be said of a trained run from held-out text, in one pass where it can be, and on fewer tokens where it is dear."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthroute.analysis.feedback import routing_feedback
from depthroute.analysis.magnitudes import logit_lens, magnitudes, output_gradients
from depthroute.analysis.mixing import MixingTotals
from depthroute.analysis.probes import probe
from depthroute.analysis.routing import RoutingTotals
from depthroute.analysis.watch import place
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json_lines, write_json
from depthroute.data import evaluation_windows
from depthroute.model import Decoder
from depthroute.model.loss import token_nll
from depthroute.train import load_trained
from depthroute.train.config import RunConfig
from depthroute.train.devices import autocast
from depthroute.train.run_data import run_data

TEXT_TOKENS = 96
Report = Callable[[str], None]


def analyse(
    run: Path,
    out: Path,
    *,
    data: Path | None = None,
    tokens: int = 65_536,
    dear_tokens: int = 4_096,
    probe_tokens: int = 8_192,
    text: str | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Analyse a run and write `out/analysis.json` and `out/analysis.npz`; return what the JSON holds (docs/analysis.md names its fields).

    Args:
        run: a run folder with a checkpoint, or one of its checkpoint folders. data: the folder of its token shards; None is the one that
        its configuration names. tokens: validation tokens that routing and mixing are averaged over; memory does not grow with them.
        dear_tokens: tokens for what reads again, needs a backward pass, or the head at every site: magnitudes, gradients, feedback, the
        lens. probe_tokens: tokens for causal probes, which run the model again for every one of them; 0 leaves them out. text: what the
        token view shows; None is the beginning of the validation split.

    Raises:
        RequestError: no run, no checkpoint, no such data, or a text longer than the context.
        FailureError: a truncated checkpoint or shard, or a disk that refuses the files.
    """
    config, model = load_trained(run)
    model.eval()
    dataset = run_data(run, config, data)
    tokenizer = dataset.tokenizer()
    ids = tokenizer.encode(text) if text is not None else dataset.tokens("validation")[: min(TEXT_TOKENS, config.model.context)].tolist()
    if not ids or len(ids) > config.model.context:
        raise RequestError(f"the text has {len(ids)} tokens; it takes 1 to {config.model.context}, the context of the model.")

    def windows(limit: int) -> Iterator[np.ndarray]:
        return evaluation_windows(dataset.held_out(limit=limit).tokens, config.model.context, sequences=8)

    def batches(limit: int) -> Iterator[Tensor]:
        return (torch.from_numpy(window) for window in windows(limit))

    report("reads and mixing")
    found: dict[str, Any] = {"format": 1, "model": _model_facts(config, model)}
    arrays: dict[str, np.ndarray] = {}
    found |= streamed(config, model, batches(tokens), arrays)
    report("magnitudes and gradients by depth")
    found["magnitudes"] = magnitudes(model, batches(dear_tokens)).summary(output_gradients(model, batches(dear_tokens)))
    report("routing feedback")
    feedback = routing_feedback(model, batches(dear_tokens))
    if feedback is not None:
        found["feedback"] = feedback
    report("logit lens")
    found["lens"] = logit_lens(model, batches(dear_tokens))
    gradient_norms = gradient_statistics(run, config)
    if gradient_norms is not None:
        found["gradient_norms"] = gradient_norms
    if probe_tokens and found.get("routing"):
        report("causal probes")
        try:
            found["probes"] = probe(model, windows(probe_tokens), boundaries=dataset.held_out(limit=probe_tokens).boundaries)
        except RequestError as refusal:  # a read that is not a mixture by one weight a source
            found["probes"] = {"reason": str(refusal)}
    found["text"] = _text_view(model, ids, [tokenizer.decode([token]) for token in ids], arrays)
    found["documents"] = int(np.searchsorted(dataset.held_out(limit=tokens).boundaries, found["tokens"]))  # that begin among the inputs
    found["papers"] = beside_the_papers(found)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "analysis.json", found)
    _write_arrays(out / "analysis.npz", arrays)
    return found


def gradient_statistics(run: Path, config: RunConfig) -> dict[str, Any] | None:
    """Mean and variance over a run's steps of the gradient's norm before clipping, and the part of the steps above the clip; None without
    a record."""
    folder = run if (run / "metrics.jsonl").exists() else run.parent.parent
    metrics = read_json_lines(folder / "metrics.jsonl")
    series = [line["gradient_norm"] for line in metrics if math.isfinite(line["gradient_norm"])]
    if not series:
        return None
    clip = config.train.gradient_clip
    above = None if clip is None else sum(norm > clip for norm in series) / len(series)
    return {
        "steps": len(series), "mean": statistics.fmean(series), "variance": statistics.pvariance(series), "above_clip": above, "clip": clip,
        "series": series,
    }  # fmt: skip


def beside_the_papers(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers that a paper prints of its own models and data, beside ours: context, not a target."""
    rows = []
    divergence = found.get("routing", {}).get("divergence", [])
    for index, layer, paper in ((0, "first", "0.218 at 120M, 0.215 at 343M"), (-1, "last", "0.015 at 120M, 0.028 at 343M")):
        if divergence:
            ours = f"{divergence[index]['nats']:.3f}"
            rows.append({
                "measure": f"Jensen-Shannon divergence of QK and V routes, {layer} layer with two", "ours": ours, "paper": paper,
                "where": "Role-Decoupled AttnRes, section 4",
            })  # fmt: skip
    norms = found.get("gradient_norms")
    if norms and norms["above_clip"] is not None:
        rows.append({
            "measure": "steps with a gradient above the clip", "ours": f"{norms['above_clip']:.1%}",
            "paper": "AttnRes 35.1 % and 38.3 %, low-rank 11.0 % and 9.9 % (1B, 4B)", "where": "Low-Rank AttnRes, Appendix G.1",
        })  # fmt: skip
    return rows


def _model_facts(config: RunConfig, model: Decoder) -> dict[str, Any]:
    return {
        "label": config.model.residual.describe(), "parameters": model.parameter_counts()["total"], "layers": config.model.layers,
        "width": config.model.width, "residual": config.model.residual.describe(),
    }  # fmt: skip


@torch.no_grad()
def streamed(config: RunConfig, model: Decoder, batches: Iterator[Tensor], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """What one pass over the text gives: the loss, and sums over tokens of everything that a memory shows."""
    routing, mixing = RoutingTotals(model), MixingTotals(model)
    nll, tokens = 0.0, 0

    def observe(site: int, memory: Any) -> None:
        routing.observe(site, memory)
        mixing.observe(site, memory)

    device = next(model.parameters()).device.type
    for batch in batches:
        with autocast(device, config.train.precision):  # type: ignore[arg-type]
            hidden = model(batch[:, :-1], observe=observe)
            nll += token_nll(hidden.flatten(0, -2), model.head_weight, batch[:, 1:].flatten()).sum(dtype=torch.float64).item()
        tokens += batch[:, 1:].numel()
    found: dict[str, Any] = {"tokens": tokens, "nll": nll / tokens}
    routed, mixed = routing.summary(), mixing.summary()
    if routed is not None:
        found["routing"] = routed
    if mixed is None:
        return found | {"mixing": {"reason": mixing.reason}}
    roles = {role: {**facts, "matrix": facts["mean"], "row_sums": facts["sums"]} for role, facts in mixed["roles"].items()}
    for role, facts in roles.items():
        arrays[f"mixing/{role}"], arrays[f"mixing-spread/{role}"] = np.asarray(facts["matrix"]), np.asarray(facts["spread"])
        for name in ("mean", "sums", "spread"):
            del facts[name]
    return found | {"mixing": {**mixed, "roles": roles}}


@torch.no_grad()
def _text_view(model: Decoder, ids: list[int], words: list[str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Which source each token of a text reads at each site."""
    residual, sites = model.residual, []

    def observe(site: int, memory: Any) -> None:
        for role, weights in residual.source_weights(memory, site).items():
            of_text = weights.flatten(1).float()
            arrays[f"text/{site}/{role}"] = of_text.numpy()
            rounded = [[round(value, 4) for value in row] for row in of_text.tolist()]
            names = list(residual.source_names(site))
            sites.append({**place(site, residual.body.sublayers), "role": role, "sources": names, "weights": rounded})

    model(torch.tensor([ids]), observe=observe)
    return {"tokens": words, "sites": sites}


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An .npz without pickles, put in place in one step."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **{name.replace("/", "."): array for name, array in arrays.items()})
    temporary.replace(path)
