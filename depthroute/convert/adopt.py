"""A checkpoint of another project as a run folder at step 0: the same function, with depth routing that starts as the plain stream.

With zero route queries a read that is multiplied by the number of its sources (`AttnResConfig.sum_reads`) is their sum, which is the
residual stream of the checkpoint: what every norm is given does not change, so neither does its epsilon's share, and the logits are the
same but for rounding. That is compared in float64 before the folder is there.

Checkpoints that have Attention Residuals already (`depthroute.convert.layouts`) keep their own routing.

Memory: the weights stream through (streamed.py). The comparison with transformers has the original in memory in float32, then ours.

Shapes: B windows, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.common.config import override, to_json
from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.common.files import new_folder, refuse_filled, write_json
from depthroute.convert.foreign import Foreign, ForeignTensors
from depthroute.convert.layouts import recognise
from depthroute.convert.streamed import write_checkpoint
from depthroute.convert.tensor_file import Stored
from depthroute.data import TokenDataset, same_tokenizer, usual_begin
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import SPECIFICATIONS, AttnResConfig, PreNormConfig, ResidualConfig, parse_residual
from depthroute.residual.method import unchanged
from depthroute.train import RunConfig, TrainConfig, checkpoint, initialise, load_trained
from depthroute.train.loop import for_data
from depthroute.train.run_folder import FORMAT as RUN_FORMAT

FORMAT = 1
WINDOWS, TOKENS = 2, 128  # of the comparisons; a window of attention that is not much longer is filled too
ALLOWED = 1e-10  # of the largest logit, in float64; rounding is some 1e-15
ALLOWED_FLOAT32 = 1e-3  # against transformers in float32; rounding is some 1e-6, a wrong tensor or rotation of order one
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
TRAINING = TrainConfig(steps=1_000, sequences=32, microbatch=1, learning_rate=1e-5, route_rate=100.0, evaluation_tokens=1_000_000)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# What a read must be to start as the sum of its sources.
STARTS_AS_SUM: Mapping[str, tuple[Any, ...]] = {
    "weighting": ("softmax",), "values": ("raw",), "summary": ("sum",), "window": (None,), "count_prior": (None, 0.0),
}  # fmt: skip


def adopt_checkpoint(
    source: Path, out: Path, *, residual: ResidualConfig | None = None, data: Path | None = None, settings: Mapping[str, Any] | None = None,
    dtype: str | None = None, original: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Write the checkpoint in the Hugging Face folder `source` as a run folder `out` at step 0, and return what its adoption.json says.

    `depthroute.train.train`, or `depthroute train OUT`, trains it on; `train.route_rate` is the learning rate of its routing against that
    of its body. The tokenizer's files are copied.

    Args:
        residual: the routing, see `adopted_routing`. None where the checkpoint has its own.
        out: a folder that is empty or not there.
        data: token shards of the training to come, made with the checkpoint's tokenizer. None: given to the training.
        settings: dotted changes of the run ("train.learning_rate", "model.context", "model.memory_dtype").
        dtype: what the body is stored in, "float32" or "bf16"; None keeps what it is. The routing is stored in float32, or in
            float64 where it was.
        original: compare with the original under transformers too, where that is installed and has the architecture.

    Raises:
        RequestError: a folder or checkpoint that cannot be read or is partial; an architecture or setting that our decoder has no place
            for; a residual method that does not start as the plain stream; data of another tokenizer; a folder that is not empty.
        FailureError: a damaged file, a full disk, or logits that differ by more than rounding.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(choose("dtype", dtype, DTYPES))
    foreign, config = recognise(source)
    target = _target(foreign, residual)
    run = _run(target, data, settings or {})
    if run.model.context > target.context:
        raise RequestError(
            f"model.context = {run.model.context} is longer than the checkpoint's max_position_embeddings = {target.context}: "
            f"it has seen no others, and is not the same model there. It takes {target.context} at most."
        )
    _check_tokenizer(source, data)
    refuse_filled(out)
    foreign = dataclasses.replace(foreign, model=dataclasses.replace(foreign.model, context=run.model.context))
    adoption = _Adoption(foreign, run.model, ForeignTensors(source, foreign), None if dtype is None else DTYPES[dtype], run.train.seed)
    tokens = _tokens(run.model)
    with new_folder(out) as folder:
        facts: dict[str, Any] = {
            "format": FORMAT, "layout": foreign.layout,
            "source": {"folder": str(source), "architectures": config.get("architectures"), "config": config},
            "residual": to_json(run.model.residual), "dtype": dtype or "as stored", "tensors": adoption.source.names,
            "unused": adoption.source.unused, "begin_of_document": _begin(source), "optimiser": "fresh",
        }  # fmt: skip
        facts["float64"] = _write(adoption, tokens, folder)
        write_json(folder / "config.json", {"format": RUN_FORMAT, **to_json(run)})
        facts["original"] = _against_original(source, foreign, folder, tokens, dtype) if original else {"skipped": "it was not asked for"}
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
        write_json(folder / "adoption.json", facts)
    return facts


def adopted_routing(text: str | None, *, role_decoupled: bool = False, rank: int | None = None) -> ResidualConfig | None:
    """The residual method of a specification (`block:8`), with a route of its own for the values, and with keys of so many coordinates.

    Low-rank keys have no gain, as in `low-rank:8,rank=128`. Attention Residuals multiply every read by the number of its sources. None is
    for a checkpoint that has routing.

    Raises:
        RequestError: the specification is wrong, or something is given twice, or with nothing to change.
    """
    if text is None:
        if role_decoupled or rank is not None:
            raise RequestError("--role-decoupled and --rank change a residual method; give it too, such as --residual block:8.")
        return None
    residual = parse_residual(text)
    if not isinstance(residual, AttnResConfig):
        if role_decoupled or rank is not None:
            option = "--role-decoupled" if role_decoupled else "--rank"
            raise RequestError(f"{option} is for Attention Residuals (full, block:8), not for {text}.")
        return residual
    if role_decoupled:
        if residual.roles != "shared":
            raise RequestError(f"residual method {text} has roles of its own ({residual.roles}); leave --role-decoupled out.")
        residual = dataclasses.replace(residual, roles="decoupled")
    if rank is not None:
        if residual.rank is not None:
            raise RequestError(f"residual method {text} has a rank of its own ({residual.rank}); leave --rank out.")
        residual = dataclasses.replace(residual, rank=rank, key_gain=False)
    return dataclasses.replace(residual, sum_reads=True)


class _Adoption:
    """What `Rewrite` is to a conversion: the tensors of the plain checkpoint, and those of the one with routing, in float64."""

    def __init__(self, foreign: Foreign, target: ModelConfig, source: ForeignTensors, dtype: torch.dtype | None, seed: int) -> None:
        self.config, self.target, self.source, self.dtype = foreign.model, target, source, dtype
        self._new: dict[str, Tensor] = {}
        if target.residual != foreign.model.residual:
            holder = nn.Module()
            holder.residual = target.residual.module(target.body)  # under the name that its initial values are drawn for
            initialise(holder, seed)
            self._new = checkpoint.model_tensors(holder)

    def layout(self) -> dict[str, Stored]:
        with torch.device("meta"):
            tensors = checkpoint.model_tensors(Decoder(self.target))
        found = {}
        for name, tensor in tensors.items():
            if name in self._new:
                found[name] = Stored(torch.float32, tuple(tensor.shape))
            else:
                dtype = self.source.stored[name].dtype if self.dtype is None else self.dtype
                if name.startswith("residual."):
                    dtype = torch.promote_types(self.source.stored[name].dtype, torch.float32)
                found[name] = Stored(dtype, tuple(tensor.shape))
        return found

    def tensor(self, name: str) -> Tensor:
        return self._new[name].double() if name in self._new else self.source.tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.source.rows(name, start, stop)


def _target(foreign: Foreign, residual: ResidualConfig | None) -> ModelConfig:
    """The decoder with the routing that was asked for, or with its own."""
    own = foreign.model.residual
    if own != PreNormConfig():
        if residual is not None:
            raise RequestError(f"this {foreign.layout} checkpoint has routing of its own ({own.describe()}); leave --residual out.")
        return foreign.model
    if residual is None:
        raise RequestError(f"this {foreign.layout} checkpoint has no routing; say which to give it, such as --residual block:8.")
    _check_start(residual)
    return dataclasses.replace(foreign.model, residual=residual)


def _check_start(residual: ResidualConfig) -> None:
    """Refuse a method that does not start as the plain residual stream."""
    if isinstance(residual, AttnResConfig):
        for name, allowed in STARTS_AS_SUM.items():
            if getattr(residual, name) not in allowed:
                raise RequestError(
                    f"residual.{name} = {getattr(residual, name)!r}: with zero queries such a read is not the residual stream, and the "
                    f"model would be another one. It takes {' or '.join(map(repr, allowed))}."
                )
        if not residual.sum_reads:
            raise RequestError("residual.sum_reads = False: a read would start as the mean of its sources, not their sum; set it to true.")
        return
    cases = [case for method in SPECIFICATIONS.values() for case in method.degenerate]
    may = {type(case.config) for case in cases if case.equals == PreNormConfig() and case.adjust is case.adjust_other is unchanged}
    if type(residual) not in may | {PreNormConfig}:  # for the others the comparison in float64 decides
        raise RequestError(
            f"the residual method {residual.name} does not start as the plain residual stream, so the model would be another one. It takes "
            "full, block:N and their forms, or a method that starts as PreNorm, such as muddformer or denseformer."
        )


def _run(model: ModelConfig, data: Path | None, settings: Mapping[str, Any]) -> RunConfig:
    for name in settings:
        if not name.startswith("train.") and name not in ("model.context", "model.memory_dtype"):
            raise RequestError(
                f"--set {name}: the checkpoint says what the model is; it takes train.FIELD, model.context and model.memory_dtype."
            )
    run = override(RunConfig(model=model, train=TRAINING, data="" if data is None else str(data)), dict(settings))
    return run if data is None else for_data(run, TokenDataset.open(data))


def _check_tokenizer(source: Path, data: Path | None) -> None:
    """Refuse shards whose token ids mean something else."""
    if data is None or not (source / "tokenizer.json").exists() or not (data / "tokenizer.json").exists():
        return
    if not same_tokenizer(source / "tokenizer.json", data / "tokenizer.json"):
        raise RequestError(
            f"the shards in {data} were made with another tokenizer than that of {source}: their token ids mean other things to this "
            f"model. Prepare them with {source / 'tokenizer.json'}."
        )


def _begin(source: Path) -> str | None:
    """The token that the tokenizer puts in front of a text; None where there is none, or no tokenizer that we read."""
    with suppress(RequestError, FailureError):
        return usual_begin(source / "tokenizer.json")
    return None


def _tokens(model: ModelConfig) -> Tensor:
    """Random ids [B, T] for the comparisons."""
    length, window = TOKENS, model.attention_window
    if window is not None and window <= 4 * TOKENS:
        length += window
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocabulary, (WINDOWS, min(length, model.context)), generator=generator)


def _write(adoption: _Adoption, tokens: Tensor, folder: Path) -> dict[str, Any]:
    """Write the checkpoint of step 0, and compare it in float64 with the same weights in a decoder without routing."""
    same = adoption.config == adoption.target  # then one token is enough: there is nothing to compare
    state = {"format": checkpoint.FORMAT, "step": 0, "tokens": 0, "peak_memory_bytes": 0}
    found = write_checkpoint(adoption, tokens[:1, :1] if same else tokens, checkpoint.folder(folder, 0), state)
    if same:
        return {"skipped": "no routing was added that could change a logit"}
    if not found.logits <= ALLOWED * found.largest_logit:
        raise RequestError(
            f"in float64 a logit of the routed model differs by {found.logits:.1e} from the plain one, where the largest is "
            f"{found.largest_logit:.1e}; rounding would explain {ALLOWED:.0e} of it at most. This residual method does not start as the "
            "plain residual stream, or not to the last bits where norms have their epsilon. Nothing was written."
        )
    return {"tokens": tokens.numel(), "logits_max_difference": found.logits, "logits_max": found.largest_logit}


@torch.no_grad()
def _against_original(source: Path, foreign: Foreign, folder: Path, tokens: Tensor, dtype: str | None) -> dict[str, Any]:
    """Compare the written model in float32 with the original under transformers, unchanged, one after the other."""
    if foreign.architecture is None:
        return {"skipped": f"transformers has no class for {foreign.layout}"}
    try:
        import transformers
    except ImportError:
        return {"skipped": "transformers is not installed"}
    architecture: Any = getattr(transformers, foreign.architecture, None)
    if architecture is None:
        return {"skipped": f"transformers {transformers.__version__} has no {foreign.architecture}"}
    model = architecture.from_pretrained(
        source, dtype=torch.float32 if dtype is None else DTYPES[dtype], local_files_only=True, attn_implementation="sdpa"
    )
    expected: Tensor = model.float().eval()(input_ids=tokens, use_cache=False).logits
    del model
    found = load_trained(folder)[1].eval().logits(tokens)
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= ALLOWED_FLOAT32 * largest:
        raise FailureError(
            f"in float32 a logit differs by {difference:.1e} from that of {foreign.architecture} in transformers "
            f"{transformers.__version__}, where the largest is {largest:.1e}; rounding would explain {ALLOWED_FLOAT32:.0e} of it at most. "
            "Nothing was written. Please report it with the config.json of the checkpoint."
        )
    return {
        "transformers": transformers.__version__, "precision": "float32", "tokens": tokens.numel(), "logits_max_difference": difference,
        "logits_max": largest,
    }  # fmt: skip
