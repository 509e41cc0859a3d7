"""`depthroute export`: a trained run in another library's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a run as a folder that transformers loads: weights, configuration, tokenizer, generation settings, model card.

    The folder holds its own modelling file, so it also loads where depthroute is not installed (trust_remote_code=True). It is loaded by
    that file, and its logits are compared with the run's in float64, before it gets its name.
    """

    form: tyro.conf.Positional[Literal["hf"]]
    """Whose form: Hugging Face."""
    run: tyro.conf.Positional[Path]
    """A run folder with a checkpoint."""
    out: tyro.conf.Positional[Path]
    """The new folder."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """That of the stored weights; route queries stay float32. Default: the run's, float32."""
    data: Path | None = None
    """The token shards whose tokenizer to use. Default: those the run names, or the tokenizer of an adopted checkpoint."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "export", arguments)
    from depthroute.hf.export import export_hf, quiet
    from depthroute.report.model_card import model_card

    quiet()
    found = export_hf(options.run, options.out, data=options.data, dtype=options.dtype, card=model_card(options.run))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{options.out}: {found['parameters']:,} parameters in {found['dtype']}")
    print(f"float64 logits differ by {found['logits_max_difference']:.1e} of {found['logits_max']:.1e} from the run's with these weights")
    if found["rounding_max_difference"]:
        print(f"storing the weights in {found['dtype']} moved a logit by {found['rounding_max_difference']:.1e} at most")
