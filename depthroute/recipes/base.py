"""What a recipe is, and the run that it makes on the user's data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.common.config import override
from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig, parse_residual
from depthroute.train import RunConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model shape, how its paper trains it, and the AttnRes settings that its paper uses.

    A paper whose documents do not see each other has a shape with a `document_end`, that of its own tokenizer. `attnres` is what short
    residual specifications start from; `residual` is the paper's own method.
    """

    description: str
    model: Callable[[ResidualConfig], ModelConfig]
    train: TrainConfig
    attnres: AttnResConfig
    residual: str

    @property
    def masks_documents(self) -> bool:
        """Whether documents that share a sequence do not see each other."""
        return self.model(PreNormConfig()).document_end is not None

    def resolve(self, residual: str | None = None) -> ModelConfig:
        """The shape with a residual method (`block:8`, `rd`, ...), or with the paper's own."""
        return self.model(parse_residual(residual or self.residual, self.attnres))


def run_of(
    recipe: Recipe,
    data: Path,
    *,
    vocabulary: int | None = None,
    end: int | None = None,
    residual: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The run of a recipe on data.

    `vocabulary` is that of the data's tokenizer, and `end` the token behind each of its documents, which a recipe that masks documents
    goes by; None is the recipe's. `residual` is a specification; None is the recipe's method. `settings` are dotted changes
    (`{"train.steps": "100"}`), checked together with everything else.
    """
    plain = RunConfig(model=recipe.model(PreNormConfig()), train=recipe.train, data=str(data))
    method = parse_residual(residual or recipe.residual, recipe.attnres)
    changes: dict[str, Any] = {"model.residual": method, "model.vocabulary": vocabulary or plain.model.vocabulary}
    if recipe.masks_documents:
        size = int((settings or {}).get("model.vocabulary", changes["model.vocabulary"]))
        # Of a vocabulary without data, as for a cost, any end does that it has.
        changes["model.document_end"] = min(plain.model.document_end or 0, size - 1) if end is None else end
    return override(plain, {**changes, **(settings or {})})
