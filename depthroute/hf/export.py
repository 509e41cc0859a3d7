"""A trained run as a folder that transformers loads."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.common.files import new_folder, read_json, refuse_filled, write_json, write_text
from depthroute.data.tokenizer import EOS, PAD, SPECIAL_TOKENS, TextTokenizer
from depthroute.hf.bundle import MODELLING_FILE
from depthroute.hf.configuration import DepthrouteConfig
from depthroute.hf.modelling import ROUTE_QUERIES, DepthrouteForCausalLM
from depthroute.model import Decoder, ModelConfig
from depthroute.train import load_trained
from depthroute.train.run_data import run_tokenizer

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD = "5GB"
TOLERANCE = 1e-9  # of the largest logit, in float64
# Text that a tokenizer must not take for anything else than text.
PROBES = ("a b  c\n\td\u00e9f \u4e2d", " ".join(SPECIAL_TOKENS), "x<eos>y", "")


def export_hf(run: Path, out: Path, *, data: Path | None = None, dtype: Dtype | None = None, card: str = "") -> dict[str, Any]:
    """Write a run as a folder for transformers: configuration, weights, tokenizer, generation settings, `card` as README.md, and the
    self-contained modelling file.

    Before the folder gets its name it is loaded by that file, and its logits are compared with the run's own in float64.

    Args:
        run: a run folder with a checkpoint, or one checkpoint of a run.
        data: token shards made with the run's tokenizer. None: those that it names, or the tokenizer of an adopted checkpoint without any.
        dtype: that of the stored weights; route queries stay float32. None: the run's, float32.

    Returns:
        `parameters`, `dtype`, `logits_max_difference` beside `logits_max` (of the folder, from the run with its weights rounded as they
        are stored), and `rounding_max_difference` (of a logit, by that rounding).

    Raises:
        RequestError: no run, no checkpoint, no data, a folder that is not empty, or a body that is not for transformers.
        FailureError: a damaged checkpoint, a full disk, or logits or tokens that differ.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(choose("dtype", dtype, DTYPES))
    refuse_filled(out)
    config, decoder = load_trained(run)
    tokenizer = run_tokenizer(run, config, data)
    with new_folder(out) as folder:
        ids = write_tokenizer(tokenizer, folder, decoder.config.context)
        model = around(decoder, **ids)
        tokens = _one_document(decoder.config, torch.Generator().manual_seed(0))
        before = _exact_logits(decoder, tokens)
        cast(model, DTYPES[dtype or "float32"])
        rounding = (_exact_logits(decoder, tokens) - before).abs().max().item()
        if not math.isfinite(rounding):
            raise RequestError(f"dtype = {dtype}: it does not hold the weights of {run}: logits are no numbers any more. bfloat16 does.")
        model.save_pretrained(folder, max_shard_size=SHARD)
        if card:
            write_text(folder / "README.md", card)
        for path in folder.iterdir():
            path.chmod(0o644)  # weights are written as a private file
        found = _verified(decoder, folder, tokens)
    return {"parameters": model.num_parameters(), "dtype": dtype or "float32", **found, "rounding_max_difference": rounding}


def around(decoder: Decoder, **token_ids: int) -> DepthrouteForCausalLM:
    """A decoder as a model of transformers; the two share their parameters. `token_ids`: `pad_token_id`, `bos_token_id`, `eos_token_id`."""
    with torch.device("meta"):
        model = DepthrouteForCausalLM(DepthrouteConfig(decoder.config, **token_ids))  # type: ignore[arg-type]
    model.decoder = decoder
    model.train(decoder.training)
    return model


@torch.no_grad()
def cast(model: DepthrouteForCausalLM, dtype: torch.dtype) -> None:
    """Give the parameters a dtype, in place, as `from_pretrained` would: in half precision the route queries stay float32."""
    for name, parameter in model.named_parameters():
        kept = dtype in (torch.bfloat16, torch.float16) and ROUTE_QUERIES.search(name)
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
    model.config.dtype = dtype


def write_tokenizer(ours: TextTokenizer, folder: Path, context: int) -> dict[str, int]:
    """The files from which `AutoTokenizer` makes a tokenizer that gives a text the same ids, and the ids that a model must know.

    A text begins with the token that stands in front of documents. Where there is none it begins where another ended: the token for its
    beginning is then the one that ends documents, since no other was seen in training, and is not put in front by itself.

    Raises:
        FailureError: the ids differ.
    """
    path = folder / "tokenizer.json"
    ours.save(path)
    write_json(path, {**read_json(path), "post_processor": _template(ours)})
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path),
        split_special_tokens=True,  # what looks like a special token in a text is text
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        padding_side="left",
    )
    end = str(fast.convert_ids_to_tokens(ours.end))
    trained_here = ours.end == EOS and fast.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == list(SPECIAL_TOKENS)
    pad = PAD if trained_here else ours.end
    first = ours.end if ours.begin is None else ours.begin
    ids = {"pad_token": pad, "bos_token": first, "eos_token": ours.end}
    names: dict[str, Any] = {name: fast.convert_ids_to_tokens(token) for name, token in ids.items()}
    fast.add_special_tokens(names)
    fast.save_pretrained(folder)
    theirs, front = AutoTokenizer.from_pretrained(folder, local_files_only=True), [] if ours.begin is None else [ours.begin]
    for text in (*PROBES, f"a{end}b", end, f"a{names['bos_token']}b"):
        if (found := theirs(text)["input_ids"]) != (expected := front + ours.encode(text)):
            raise FailureError(f"the exported tokenizer gives {text!r} the ids {found}, not {expected}; report this as a bug.")
    return {"pad_token_id": pad, "bos_token_id": first, "eos_token_id": ours.end}


def _template(ours: TextTokenizer) -> dict[str, Any] | None:
    """The post-processor of a tokenizer.json that puts the begin in front of a text, if there is one, and nothing else around it."""
    if ours.begin is None:
        return None
    name = ours.name_of(ours.begin)
    front: list[Any] = [{"SpecialToken": {"id": name, "type_id": 0}}]
    texts = [[*front, {"Sequence": {"id": one, "type_id": 0}}] for one in "AB"]
    return {
        "type": "TemplateProcessing", "single": texts[0], "pair": texts[0] + texts[1],
        "special_tokens": {name: {"id": name, "ids": [ours.begin], "tokens": [name]}},
    }  # fmt: skip


def _one_document(config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Two rows of random tokens, none of which ends a document."""
    end, shape = config.document_end, (2, min(config.context, 64))
    if end is None:
        return torch.randint(config.vocabulary, shape, generator=generator)
    tokens = torch.randint(config.vocabulary - 1, shape, generator=generator)
    return tokens + (tokens >= end)


@torch.no_grad()
def _exact_logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    return copy.deepcopy(decoder).double().eval().logits(tokens)


@torch.no_grad()
def _verified(decoder: Decoder, folder: Path, tokens: Tensor) -> dict[str, float]:
    """Logits of the folder, loaded by its own modelling file, beside those of the decoder, its weights as they are stored, in float64."""
    expected = _exact_logits(decoder, tokens)
    with modelling_class(folder) as written:
        model = written.from_pretrained(folder, dtype=torch.float64, local_files_only=True).eval()
        logits: Tensor = model(tokens, use_cache=False).logits
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise FailureError(f"the exported logits differ by {difference:.1e} of {largest:.1e} in float64; report this as a bug.")
    return {"logits_max_difference": difference, "logits_max": largest}


def quiet() -> None:
    """No progress bars and no advice of transformers, for commands."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def modelling_class(folder: Path) -> Iterator[Any]:
    """The model class of a folder's own modelling file, without the copy that transformers would keep in its cache."""
    name = f"depthroute_exported_{id(folder):x}"
    spec = importlib.util.spec_from_file_location(name, folder / MODELLING_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the folder holds what was exported, and no __pycache__
    try:
        spec.loader.exec_module(module)
        sys.dont_write_bytecode = writes
        yield module.DepthrouteForCausalLM
    finally:
        sys.dont_write_bytecode = writes
        del sys.modules[name]
