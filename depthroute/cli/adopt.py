"""`depthroute adopt`: a public checkpoint with depth routing, computing what it did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from depthroute.cli.options import changes, read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn a Llama-, Mistral- or Qwen-shaped checkpoint into one with depth routing whose logits are the same at the start.

    The new folder is a run at step 0: `depthroute train OUT` trains it on, with train.route_rate as the learning rate of the routing
    against that of the body. Checkpoints of flash-linear-attention with attnres_block_size, and those with Kimi K3's names, keep their own
    routing. Logits are compared in float64 before anything is there; adoption.json has the numbers. docs/adoption.md says more.
    """

    source: tyro.conf.Positional[Path]
    """A folder with config.json and safetensors."""
    out: tyro.conf.Positional[Path]
    """The new run folder."""
    residual: str | None = None
    """NAME[:BLOCK][,FIELD=VALUE...]: block:8, full, ... (8 sub-layers a block). Not for checkpoints with routing of their own."""
    role_decoupled: bool = False
    """A second route for the values of an attention."""
    rank: int | None = None
    """Coordinates of a key. Default: the width."""
    data: Path | None = None
    """Token shards of the training to come, made with the checkpoint's tokenizer. Default: given to `depthroute train`."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """Of the training to come: train.learning_rate=2e-5, train.route_rate=50, model.context=2048, ..."""
    dtype: Literal["float32", "bf16"] | None = None
    """What the body is stored in. Default: as it is."""
    skip_original: bool = False
    """Do not compare with the original under transformers, which needs memory for it in float32."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "adopt", arguments)
    from depthroute.convert.adopt import adopt_checkpoint, adopted_routing

    with suppress(ImportError):  # without transformers there is nothing to compare with, and nothing to silence
        from depthroute.hf.export import quiet

        quiet()
    residual = adopted_routing(options.residual, role_decoupled=options.role_decoupled, rank=options.rank)
    found = adopt_checkpoint(
        options.source, options.out, residual=residual, data=options.data, settings=changes(options.set), dtype=options.dtype,
        original=not options.skip_original,
    )  # fmt: skip
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{options.out}: {found['layout']}, {len(found['tensors'])} tensors taken over, {len(found['unused'])} without a use")
    if found["begin_of_document"] is not None:
        print(
            f"its tokenizer puts {found['begin_of_document']!r} in front of a text; so that the training does too: depthroute data "
            f"prepare ... --begin-of-document '{found['begin_of_document']}'"
        )
    for what, name in (("the plain decoder, float64", "float64"), ("the original under transformers, float32", "original")):
        check = found[name]
        if "skipped" in check:
            print(f"not compared with {what}: {check['skipped']}")
        else:
            print(f"logits against {what}: {check['logits_max_difference']:.1e} of {check['logits_max']:.1e} ({check['tokens']:,} tokens)")
