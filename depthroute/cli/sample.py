"""`depthroute sample`: continue prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continue prompts with a trained model. One text is printed as it comes, several are printed when they are finished."""

    run: tyro.conf.Positional[Path]
    """A run folder with a checkpoint, or one of its checkpoint folders."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT"), tyro.conf.UseAppendAction]
    """The text to continue; give it once for each prompt. `-` reads it from standard input, without the newline at its end."""
    tokens: int = 100
    """How many tokens at most."""
    count: int = 1
    """Texts for each prompt, each with draws of its own."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the smallest set of likeliest tokens whose mass reaches p."""
    min_p: float | None = None
    """Draw among the tokens that are at least so many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that have occurred become less likely."""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT"), tyro.conf.UseAppendAction] = ()
    """Ends a text, and is not printed; give it once for each."""
    seed: int = 0
    """Of the draws."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. `auto`: on a GPU, where there is one."""
    precision: Literal["auto", "float32", "bf16"] = "float32"
    """Of the weights. `auto`: bf16 where the processor has it."""
    data: Path | None = None
    """The token shards whose tokenizer to use. Default: those the run names, or the tokenizer of an adopted checkpoint."""
    json: bool = False
    """Print a JSON list with ids, log-probabilities and how each text ended."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "sample", arguments)
    import torch

    from depthroute.common.errors import RequestError
    from depthroute.infer import Sampling, generate, stream
    from depthroute.train import load_trained
    from depthroute.train.devices import resolve_device, resolve_precision
    from depthroute.train.run_data import run_tokenizer

    if not options.prompt:
        raise RequestError("there is no prompt; give --prompt TEXT, or --prompt - for standard input.")
    if options.prompt.count("-") > 1:
        raise RequestError("--prompt - is given twice, and standard input can be read once; give the other prompts as text.")
    if options.count < 1:
        raise RequestError(f"count = {options.count} is not allowed; it takes 1 or more.")
    sampling = Sampling(
        repetition_penalty=options.repetition_penalty, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        min_p=options.min_p, seed=options.seed,
    )  # fmt: skip
    config, model = load_trained(options.run)
    tokenizer = run_tokenizer(options.run, config, options.data)
    prompts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in options.prompt]
    texts = [text for text in prompts for _ in range(options.count)]
    front = [] if tokenizer.begin is None else [tokenizer.begin]
    device = resolve_device(options.device)
    settings: dict[str, Any] = {
        "model": model.to(device), "prompts": [front + tokenizer.encode(text) for text in texts], "limit": options.tokens,
        "sampling": sampling, "end": [tokenizer.end], "stop": options.stop, "decode": tokenizer.decode,
    }  # fmt: skip
    if resolve_precision(options.precision, device) == "bf16":
        model.cast_body(torch.bfloat16)
    if len(texts) == 1 and not options.json:
        pieces = stream(**settings)
        print(texts[0], end="", flush=True)
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
        return
    found = generate(**settings)
    if options.json:
        rows = [{"prompt": text, **generation._asdict()} for text, generation in zip(texts, found, strict=True)]
        print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")
    else:
        print("\n---\n".join(f"{text}{generation.text}" for text, generation in zip(texts, found, strict=True)))
