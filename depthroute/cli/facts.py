"""Facts that commands print, gathered from the floors below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthroute.common.errors import RequestError

if TYPE_CHECKING:
    from depthroute.data import SourceFacts


def data_facts(directory: Path) -> dict[str, Any]:
    """Counts and hashes of prepared data."""
    from depthroute.data import SPLITS, TokenDataset

    data = TokenDataset.open(directory)
    facts: dict[str, Any] = {"corpus": data.manifest.corpus.name, "vocabulary": data.vocabulary, "dtype": data.manifest.dtype}
    for split in SPLITS:
        counts = data.manifest.split(split)
        facts[f"{split}_documents"] = counts.documents
        facts[f"{split}_tokens"] = counts.tokens
    if len(data.manifest.sources) > 1:
        facts["sources"] = [_source_facts(source) for source in data.manifest.sources]
    facts["unigram_entropy_nats"] = data.manifest.unigram_entropy_nats
    facts["bytes_per_token"] = data.manifest.bytes_per_token
    facts["skipped"] = {entry.reason: entry.count for entry in data.manifest.skipped}
    facts["fingerprint"] = data.fingerprint
    return facts


def _source_facts(source: SourceFacts) -> dict[str, Any]:
    train = source.splits.train
    return {"name": source.name, "train_documents": train.documents, "train_tokens": train.tokens}


def run_facts(directory: Path) -> dict[str, Any]:
    """The shape of a run's model and how far the run has come."""
    from depthroute.cost.summary import model_facts
    from depthroute.train import recorded_config, recorded_result

    config = recorded_config(directory)
    assert config is not None
    result = recorded_result(directory)
    facts = {**model_facts(config.model), "steps": config.train.steps, "seed": config.train.seed, "complete": result is not None}
    if result is not None:
        facts |= {"validation_nll": result["nll"], "tokens": result["tokens"]}
    return facts


def facts_of(target: str, residual: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Facts of a recipe by name, of a run folder, or of a folder of token shards."""
    from depthroute.cost.summary import model_facts
    from depthroute.recipes import RECIPES, recipe, run_of

    path = Path(target)
    if target not in RECIPES and path.is_dir():
        if residual or settings:
            raise RequestError(f"{target} is a folder; --residual and --set change recipes only.")
        if (path / "config.json").exists():
            return run_facts(path)
        if (path / "manifest.json").exists():
            return data_facts(path)
        raise RequestError(f"{target} is neither a run folder (config.json) nor token shards (manifest.json).")
    run = run_of(recipe(target), Path(), residual=residual, settings=settings)
    return {"recipe": target, **model_facts(run.model)}
