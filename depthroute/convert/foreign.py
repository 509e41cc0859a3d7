"""Checkpoints of other projects: their config.json, the tensors of a folder by name, and what they are here.

Only safetensors are read, single files or shards with an index. A layout (`depthroute.convert.layouts`) says what a configuration means and
what the tensors are called; this file compares what there should be with what there is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.analysis.routing_tensors import locate_tensors
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json
from depthroute.convert.tensor_file import Stored, TensorReader
from depthroute.model import Decoder, ModelConfig
from depthroute.train.checkpoint import model_tensors

SHOWN = 5  # names of a list in an error
ROWS = 4_096  # of embedding and head that are compared at a time

# Fields of a public config.json that change no logit: of the tokenizer, of generation, of training, or notes.
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "auto_map", "begin_suppress_tokens",
        "bos_token_id", "dtype", "eos_token_id", "finetuning_task", "id2label", "initializer_range", "is_llama_config", "label2id",
        "max_sequence_length", "model_type", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix",
        "problem_type", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
        "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed",
        "unsloth_version", "use_bfloat16", "use_cache",
        # of generation, in configurations written by transformers 4
        "bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty",
        "temperature", "top_k", "top_p", "typical_p",
    }
)  # fmt: skip
# And those that would change what is computed, with the only values that do not.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "activation": ("swiglu",),
    "add_cross_attention": (False,),
    "attention_multiplier": (1, 1.0),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1, 1.0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logits_scaling": (1, 1.0),
    "pretraining_tp": (0, 1),
    "pruned_heads": ({},),
    "quantization_config": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}


class Fields:
    """A public configuration, read strictly: a field that nobody asked for must be known to change nothing.

    A field that is null counts as one that is not there. Raises RequestError by field, with its value.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._left = dict(values)
        self.where = where

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default it must be there."""
        found = self.maybe_whole(name)
        if found is None and default is None:
            raise RequestError(f"{self.where} lacks {name!r}, a whole number.")
        return found if found is not None else default  # type: ignore[return-value]

    def maybe_whole(self, name: str) -> int | None:
        value = self._left.pop(name, None)
        if value is not None and (type(value) is not int or value < 1):
            raise self.refused(name, value, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._left.pop(name, None)
        value = default if value is None else value
        if value is None:
            raise RequestError(f"{self.where} lacks {name!r}, a number.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refused(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, bool):
            raise self.refused(name, value, "true or false")
        return default if value is None else value

    def given(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._left

    def take(self, name: str) -> Any:
        """Whatever it is; None where it is not there."""
        return self._left.pop(name, None)

    def only(self, name: str, *allowed: Any) -> None:
        """A field for other values of which the decoder has no place."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            raise self.refused(name, value, " or ".join(map(repr, allowed)) or "null: the decoder has no place for it")

    def ignore(self, *names: str) -> None:
        """Fields of this layout that change nothing."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Refuse what is left, unless it is known to change nothing."""
        for name, allowed in PLAIN.items():
            self.only(name, *allowed)
        for name, value in self._left.items():
            if name not in HARMLESS and value is not None:
                raise RequestError(
                    f"{self.where} has {name} = {value!r}, of which this version does not know what it changes; such a model would be "
                    "another function here. If it is known to change nothing, remove it from config.json."
                )

    def refused(self, name: str, value: Any, allowed: str) -> RequestError:
        return RequestError(f"{self.where} has {name} = {value!r}; it takes {allowed}.")


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What a project calls the tensors of our decoder, without `.weight` and `.bias`.

    `layer`: what the tensors of a layer begin with, with `{}` for its number. `parts`: ours within a layer to theirs. `sites`: the name
    of a read's query and gain before `_proj` and `_norm`, for attention and MLP sites within a layer, and for the output with its whole
    name; None is a project without routing.
    """

    embedding: str
    norm: str
    head: str
    layer: str
    parts: Mapping[str, str]
    sites: tuple[str, str, str] | None = None

    def of(self, name: str, model: ModelConfig) -> str:
        """Their name of our tensor."""
        owner, _, local = name.rpartition(".")
        words = owner.split(".")
        if words[0] == "layers":
            return f"{self.layer.format(words[1])}{self.parts['.'.join(words[2:])]}.{local}"
        if words[0] == "residual":
            assert self.sites is not None
            site = int(words[2])
            place = self.sites[2] if site == 2 * model.layers else self.layer.format(site // 2) + self.sites[site % 2]
            return f"{place}_{'norm' if local == 'key_gain' else 'proj'}.weight"
        return f"{getattr(self, owner)}.{local}"  # embedding, norm, head


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A public checkpoint as our decoder has it.

    `layout`: what people call it. `architecture`: the class in transformers, where that package has it; None elsewhere. `model`: with the
    routing of the checkpoint, or PreNorm. `unused`: a regular expression of the names of tensors that are stored and never used.
    """

    layout: str
    model: ModelConfig
    naming: Naming
    architecture: str | None = None
    unused: str = r".*\.rotary_emb\.inv_freq"


@dataclass
class ForeignTensors:
    """The tensors of a folder under our names, in float64: what `TensorReader` is to a checkpoint of ours.

    `names`: ours to theirs. `unused`: theirs that are not taken over. `stored`: the types that they have there, and our shapes.

    Raises:
        RequestError: tensors are missing, have no place, or have another shape; a head that is said to be the embedding is not.
        FailureError: a file is truncated, missing, or lacks what it has by the index.
    """

    folder: Path
    foreign: Foreign
    names: dict[str, str] = field(init=False)
    unused: list[str] = field(init=False)
    stored: dict[str, Stored] = field(init=False)

    def __post_init__(self) -> None:
        self._files = tensor_files(self.folder)
        self._readers: dict[Path, TensorReader] = {}
        with torch.device("meta"):
            expected = model_tensors(Decoder(self.foreign.model))
        naming, model = self.foreign.naming, self.foreign.model
        self.names = {name: naming.of(name, model) for name in expected}
        there = {name for name in self._files if not re.fullmatch(self.foreign.unused, name)}
        head = f"{naming.head}.weight"
        tied = model.tied_embeddings and head in there
        self.unused = sorted((self._files.keys() - there) | ({head} if tied else set()))
        missing = [name for name in self.names.values() if name not in self._files]
        extra = sorted(there - {*self.names.values(), *self.unused})
        self.stored, misshapen = {}, []
        for ours, tensor in expected.items():
            if (theirs := self.names[ours]) in self._files:
                dtype, shape = self._reader(theirs).stored[theirs]
                self.stored[ours] = Stored(dtype, tuple(tensor.shape))
                if shape != tuple(tensor.shape) and not (ours.startswith("residual.") and shape == (1, *tensor.shape)):
                    misshapen.append(f"{theirs!r} is {list(shape)}, not {list(tensor.shape)}")
        parts = [
            _counted(f"{len(missing)} missing", list(map(repr, missing))),
            _counted(f"{len(extra)} without a place", list(map(repr, extra))),
            _counted(f"{len(misshapen)} of another shape", misshapen),
        ]
        if any(parts):
            raise RequestError(
                f"the tensors of {self.folder} are not those of its config.json ({self.foreign.layout}, {model.layers} layers): "
                f"{'; '.join(filter(None, parts))}. Nothing was written."
            )
        if tied and not self._is_embedding(head):
            raise RequestError(
                f"{self.folder} has a {head!r} that differs from the embedding, and a config.json that says that they are tied "
                "(tie_word_embeddings); one of the two is wrong."
            )

    def tensor(self, name: str) -> Tensor:
        """One of ours, float64, in our shape."""
        theirs = self.names[name]
        return self._reader(theirs).tensor(theirs).view(self.stored[name].shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        theirs = self.names[name]
        return self._reader(theirs).rows(theirs, start, stop)

    def _is_embedding(self, head: str) -> bool:
        reader, shape = self._reader(head), self.stored["embedding.weight"].shape
        pieces = ((start, min(start + ROWS, shape[0])) for start in range(0, shape[0], ROWS))
        return reader.stored[head].shape == shape and all(
            torch.equal(reader.rows(head, *piece), self.rows("embedding.weight", *piece)) for piece in pieces
        )

    def _reader(self, theirs: str) -> TensorReader:
        file = self._files[theirs]
        if file not in self._readers:
            self._readers[file] = TensorReader(file)
        reader = self._readers[file]
        if theirs not in reader.stored:
            raise FailureError(f"{file} lacks {theirs!r}, which it has by the index; download both again.")
        return reader


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a folder by its name, as transformers would choose: model.safetensors, or the index, or what there is.

    Raises:
        RequestError: no safetensors; pickled weights are not read.
        FailureError: the index is damaged.
    """
    if not any(folder.glob("*.safetensors")) and (pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])):
        raise RequestError(
            f"{folder} holds {pickled[0].name} and no safetensors. Pickled weights can run code when they are loaded, and are not read. "
            "Write the folder again as safetensors where you trust it: load it with transformers there, and save_pretrained(...)."
        )
    single = folder / "model.safetensors"
    return locate_tensors(single if single.exists() else folder)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises RequestError where there is none."""
    if not (folder / "config.json").exists():
        raise RequestError(f"{folder} has no config.json; it takes a folder as transformers' save_pretrained writes it.")
    values = read_json(folder / "config.json")
    if not isinstance(values, dict) or {"model", "train", "data"} <= values.keys():
        what = "is a run folder of depthroute already" if isinstance(values, dict) else "has a config.json that is no object"
        raise RequestError(f"{folder} {what}; it takes a folder as transformers' save_pretrained writes it.")
    return values


def numbers(names: Collection[str], pattern: str) -> list[int]:
    """The layers, ascending, that a pattern with one group finds in names."""
    return sorted({int(match.group(1)) for match in map(re.compile(pattern).search, names) if match})


def _counted(what: str, entries: Sequence[str]) -> str:
    more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
    return f"{what}: {', '.join(entries[:SHOWN])}{more}" if entries else ""
