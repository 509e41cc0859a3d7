"""`depthroute sample`: continue a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continue a prompt with a trained model."""

    run: tyro.conf.Positional[Path]
    """A run folder with a checkpoint."""
    prompt: str
    """The text to continue."""
    tokens: int = 100
    """How many tokens at most."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    seed: int = 0
    """Of the draws."""
    data: Path | None = None
    """The token shards whose tokenizer to use. Default: those the run names."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "sample", arguments)
    from depthroute.data import EOS, TokenDataset
    from depthroute.infer import sample_tokens
    from depthroute.train import load_trained

    config, model = load_trained(options.run)
    tokenizer = TokenDataset.open(options.data or Path(config.data)).tokenizer()
    ids = tokenizer.encode(options.prompt)
    drawn = sample_tokens(
        model, ids, count=options.tokens, end=EOS, temperature=options.temperature, top_k=options.top_k, seed=options.seed
    )
    print(tokenizer.decode([*ids, *drawn]))
