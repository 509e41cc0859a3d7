"""Decoding at shape S, batch 1, on the CPU: a token, a prompt, what the depth memory takes, and how long an exported model takes to load.

Arms are interleaved in one process. What a token of the PreNorm model costs is compared with reading its weights once, as one sum over
them. Queries are random, so that no read is a plain mean. Weights are random: what is decoded does not matter.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.cli.options import changes
from depthroute.common.config import override
from depthroute.infer import Session
from depthroute.model import Decoder, ModelConfig
from depthroute.recipes import recipe
from depthroute.residual import AttnResConfig
from depthroute.train import initialise

ARMS = {"prenorm": "PreNorm", "block": "Block AttnRes", "rd": "RD-AttnRes", "full": "Full AttnRes"}
SLOWER = {"block": 1.05, "rd": 1.07, "full": None}
CONTEXTS = (1, 256, 1_024)
PROMPT = 1_024


def decoder(shape: str, arm: str, dtype: torch.dtype, settings: dict[str, str]) -> Decoder:
    config = override(recipe(shape).resolve(arm.removesuffix(", per site")), settings)
    if arm.endswith(", per site"):
        assert isinstance(config.residual, AttnResConfig)
        config = dataclasses.replace(config, residual=dataclasses.replace(config.residual, phases=False))
    model = Decoder(config)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.residual.named_parameters():
            if name.endswith("query"):
                parameter.normal_(0.0, 0.1, generator=generator)
    return model.cast_body(dtype)


def begun(model: Decoder, context: int) -> Session:
    """A text of `context` tokens that has gone on by a few, so that buffers and programs are there."""
    session = Session(model)
    vocabulary = model.config.vocabulary
    session.prefill([torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(1)).tolist()])
    for _ in range(3):
        session.step(torch.tensor([7]))
    return session


def token(model: Decoder, context: int) -> Callable[[], object]:
    session, chosen = begun(model, context), torch.tensor([7])
    return lambda: session.step(chosen)


def eager(model: Decoder, context: int) -> Callable[[], object]:
    """A token by the decoder itself, without a program."""
    session, chosen = begun(model, context), torch.tensor([[7]])
    return lambda: session._logits(session._pass(chosen, None))


def prompt(model: Decoder) -> Callable[[], object]:
    tokens = torch.randint(model.config.vocabulary, (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    return lambda: Session(model).prefill([tokens])


def reading(model: Decoder) -> Callable[[], object]:
    """All weights once, as one sum over as many bytes."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    weights = torch.ones(size // 4)
    return weights.sum


def decoding(models: dict[str, Decoder], dtype: torch.dtype, repeats: int) -> list[Row]:
    rows = []
    name = str(dtype).removeprefix("torch.")
    for context in CONTEXTS:
        runs = {arm: token(model, context) for arm, model in models.items()} | {"read": reading(models["prenorm"])}
        if context == 256:
            runs["eager"] = eager(models["prenorm"], context)
        seconds = interleaved(runs, repeats=repeats, warm_up=3)
        for arm, target in SLOWER.items():
            least, median = ratios(seconds, arm, "prenorm")
            rows += [
                Row(f"a token behind {context}, {name}: {ARMS[arm]} over PreNorm, minima", least, target),
                Row(f"a token behind {context}, {name}: {ARMS[arm]} over PreNorm, median of pairs", median, target),
            ]
        for arm in ("block", "full"):
            least, median = ratios(seconds, f"{arm}, per site", arm)
            rows.append(Row(f"a token behind {context}, {name}: {ARMS[arm]} read per site over in two phases, median of pairs", median))
        least, median = ratios(seconds, "prenorm", "read")
        target = 1.3 if context == 1 else None
        rows += [
            Row(f"a token behind {context}, {name}: PreNorm over reading its weights, minima", least, target),
            Row(f"a token behind {context}, {name}: PreNorm over reading its weights, median of pairs", median, target),
        ]
        if "eager" in seconds:
            slower = ratios(seconds, "eager", "prenorm")[1]
            rows.append(Row(f"a token behind {context}, {name}: PreNorm without a program over with it, median of pairs", slower))
    return rows


def prefill(models: dict[str, Decoder], repeats: int) -> list[Row]:
    seconds = interleaved({arm: prompt(model) for arm, model in models.items()}, repeats=repeats, warm_up=1)
    rows = []
    for arm in ("block", "full"):
        slower = ratios(seconds, f"{arm}, per site", arm)[1]
        rows.append(Row(f"a prompt of {PROMPT}: {ARMS[arm]} read per site over in two phases, median of pairs", slower))
    for arm in SLOWER:
        least, median = ratios(seconds, arm, "prenorm")
        target = None if arm == "full" else 1.03
        rows += [
            Row(f"a prompt of {PROMPT}: {ARMS[arm]} over PreNorm, minima", least, target),
            Row(f"a prompt of {PROMPT}: {ARMS[arm]} over PreNorm, median of pairs", median, target),
        ]
    return rows


def memory(models: dict[str, Decoder]) -> list[Row]:
    rows = []
    for arm in ("block", "rd", "full"):
        session = begun(models[arm], 1)
        first = session.depth_bytes
        for _ in range(200):
            session.step(torch.tensor([7]))
        behind = begun(models[arm], PROMPT).depth_bytes
        assert first is not None and behind is not None and session.depth_bytes is not None
        largest = max(behind, session.depth_bytes)
        rows.append(Row(f"depth memory of a text of {PROMPT} over one of 1: {ARMS[arm]}", largest / first, 1.0))
        rows.append(Row(f"depth memory of a text: {ARMS[arm]}, KiB", first / 1024))
    return rows


def loading(config: ModelConfig, repeats: int) -> list[Row]:
    """An exported model over a Llama of the same shape, both by `from_pretrained` in this process."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from depthroute.hf import DepthrouteConfig, DepthrouteForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        ours, llama = Path(folder, "ours"), Path(folder, "llama")
        DepthrouteForCausalLM(DepthrouteConfig(config)).save_pretrained(ours)
        theirs = LlamaConfig(
            vocab_size=config.vocabulary, hidden_size=config.width, num_hidden_layers=config.layers, num_attention_heads=config.heads,
            intermediate_size=config.mlp_width, max_position_embeddings=config.context, tie_word_embeddings=config.tied_embeddings,
        )
        LlamaForCausalLM(theirs).save_pretrained(llama)
        load: Any = AutoModelForCausalLM.from_pretrained
        seconds = interleaved({"ours": lambda: load(ours), "llama": lambda: load(llama)}, repeats=repeats, warm_up=1)
    pairs = [a - b for a, b in zip(seconds["ours"], seconds["llama"], strict=True)]
    return [Row("loading an exported model beyond a Llama of its size, median of pairs", sorted(pairs)[len(pairs) // 2], 1.0, unit=" s")]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--recipe", default="rd-s", help="the shape")
    options.add_argument("--set", action="append", default=[], help="FIELD=VALUE of the model, such as layers=4")
    options.add_argument("--repeats", type=int, default=40, help="tokens of every arm")
    given = options.parse_args()
    settings, dtypes, rows = changes(given.set), (torch.bfloat16, torch.float32), []
    plain = {dtype: decoder(given.recipe, "prenorm", dtype, settings) for dtype in dtypes}
    both = interleaved({str(dtype): token(model, 1) for dtype, model in plain.items()}, repeats=given.repeats)
    faster = min(dtypes, key=lambda dtype: min(both[str(dtype)]))
    rows.append(Row("a token in bfloat16 over one in float32, PreNorm, minima", min(both[str(dtypes[0])]) / min(both[str(dtypes[1])])))
    models = {arm: decoder(given.recipe, arm, faster, settings) for arm in (*ARMS, "block, per site", "full, per site")}
    rows += decoding(models, faster, given.repeats)
    rows += prefill(models, max(3, given.repeats // 8))
    rows += memory(models)
    rows += loading(override(recipe(given.recipe).resolve("block"), settings), max(3, given.repeats // 8))
    finish(rows, given)


if __name__ == "__main__":
    main()
