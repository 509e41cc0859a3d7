"""Activation memory against what autograd saves in a real decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tried import NARROW

from depthroute.cost.memory import training_activations
from depthroute.model import Decoder, ModelConfig
from depthroute.ops import native
from depthroute.residual import SPECIFICATIONS, AttnResConfig, PreNormConfig, parse_residual

needs_kernel = pytest.mark.skipif(native.missing() is not None, reason="the definition of a read saves more than its kernels do")
BATCH, TOKENS = 3, 37
MORE = [
    "block:4,phases=false", "block:3", "block,ends=[1,2,5,6,12]", "low-rank:3,rank=4,keys=projected", "rd:4,first_read=true",
    "rd:4,window=3", "rd-average:3,first_read=true", "sigmoid,block=3,heads=2", "rms-block:1", "rms-block:3", "block:3,summary=mean",
    "inkling:3,heads=2", "full,roles=average,weighting=sigmoid", "hc:2", "mhc:3", "highway,gate=full,coupled=false",
    "laurel-pa,weights=true,rank=3", "dynamic-query:4,query_rank=2", "delta,gate=sigmoid", "denseformer,dilation=2,period=3",
    "unet,embedding=true", "static:3,summary=rms",
]  # fmt: skip


def shape(text: str, **fields: Any) -> ModelConfig:
    residual = parse_residual(NARROW.get(text, text), AttnResConfig(block=4, rank=6))
    return ModelConfig(
        vocabulary=101, width=24, layers=6, heads=4, key_value_heads=2, head_width=10, mlp_width=34, context=64, residual=residual, **fields
    )


def saved(config: ModelConfig, checkpointed: bool = False, mixed: bool = False) -> float:
    """Bytes per token that a forward pass keeps, each storage once; parameters and what is made of them alone are left out."""
    torch.manual_seed(0)
    model = Decoder(config)
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        return tensor

    residual: Any = model.residual
    read = residual.read

    def again(memory: Any, site: int, norm: Any = None) -> Any:
        alive.extend(leaf for leaf in tree_leaves(memory) if leaf is not None)
        inputs = checkpoint(read, memory, site, norm, use_reentrant=False)
        alive.extend(tree_leaves(inputs))
        return inputs

    if checkpointed:
        residual.read = again
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        hidden = model(torch.randint(0, config.vocabulary, (BATCH, TOKENS)))
    alive.append(hidden)  # for the head
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in alive if tensor.dtype != torch.int64}
    sizes = [tensor.untyped_storage().nbytes() / BATCH / TOKENS for tensor in storages.values()]
    return sum(size for size in sizes if size == int(size))


@needs_kernel
@pytest.mark.parametrize("text", [*SPECIFICATIONS, *MORE])
def test_the_count_is_what_autograd_saves(text: str) -> None:
    assert training_activations(shape(text), on_cpu=True).total == saved(shape(text))


@needs_kernel
@pytest.mark.parametrize("memory", ["parameter", "compute"])
@pytest.mark.parametrize("text", [*SPECIFICATIONS, "rd:3,phases=false", "inkling:3,heads=2", "low-rank:3,rank=4,keys=projected"])
def test_it_holds_in_mixed_precision(text: str, memory: str) -> None:
    config = shape(text, memory_dtype=memory)
    assert training_activations(config, mixed=True, on_cpu=True).total == saved(config, mixed=True)


@needs_kernel
@pytest.mark.parametrize("fields", [{"norms": "post"}, {"norms": "sandwich"}, {"norms": "hybrid"}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("text", ["prenorm", "rd", "rd-average", "hc", "delta"])
def test_it_holds_for_bodies_with_other_norms(text: str, fields: dict) -> None:
    assert training_activations(shape(text, **fields), on_cpu=True).total == saved(shape(text, **fields))


@needs_kernel
@pytest.mark.parametrize(
    "text", ["prenorm", "full", "block:4,phases=false", "rd:3,phases=false", "hc", "denseformer", "static", "inkling,phases=false"]
)
def test_checkpointed_reads_keep_what_is_carried(text: str) -> None:
    assert training_activations(shape(text), checkpointed=True, on_cpu=True).total == saved(shape(text), checkpointed=True)


def test_checkpointed_attnres_keeps_as_much_as_the_plain_stream() -> None:
    plain = training_activations(shape("prenorm"), checkpointed=True)
    for text in ("full", "block", "block:6", "low-rank"):
        assert training_activations(shape(text), checkpointed=True) == plain
    more = training_activations(shape("rd"), checkpointed=True).sublayers - plain.sublayers
    assert more == 4 * 5 * 24  # the first of six attentions has one source


def test_a_memory_in_bfloat16_halves_the_sources_of_attnres_and_nothing_of_the_plain_stream() -> None:
    """A norm of its own works on float32 rows, which it keeps, whatever the stream is."""
    found = {
        (text, memory): training_activations(shape(text, memory_dtype=memory), mixed=True)
        for text in ("block", "prenorm") for memory in ("parameter", "compute")
    }  # fmt: skip
    assert found["block", "compute"].sources * 2 == found["block", "parameter"].sources
    assert found["prenorm", "compute"].total == found["prenorm", "parameter"].total


def test_a_large_model_is_counted_without_being_built() -> None:
    model = ModelConfig(vocabulary=100, width=7_168, layers=93, heads=56, mlp_width=20_480, context=64, residual=PreNormConfig())
    assert training_activations(model).sources == 4 * 187 * 7_168
