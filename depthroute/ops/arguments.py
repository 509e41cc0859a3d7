"""What `depth_attention` refuses, by name, before any work starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from depthroute.common.errors import RequestError, choose
from depthroute.ops.form import DepthRead

KeyNorm = Literal["slice", "full", "none"]
Weighting = Literal["softmax", "sigmoid"]


def unstacked(name: str, width: str, rows: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    """A list of rows [..., D] as it is, or the rows of one tensor [S, ..., D]."""
    if not isinstance(rows, Tensor):
        return rows
    if rows.ndim < 2:
        raise RequestError(f"stacked {name} have shape {tuple(rows.shape)}; they must be [S, ..., {width}].")
    return rows.unbind(0)


def check(
    sources: Sequence[Tensor], query: Tensor, keys: Sequence[Tensor] | None, heads: int, key_norm: str,
    key_gain: Tensor | None, bias: Tensor | None, weighting: str, output_gain: Tensor | None, priors: Sequence[DepthRead], eps: float,
    output_eps: float, statistics: bool,
) -> torch.dtype:  # fmt: skip
    """The promoted dtype of sources, keys and prior outputs.

    Raises:
        RequestError: what does not fit, with its shape, dtype, device or value.
    """
    dtype = _sources(sources)
    first = sources[0]
    width = first.shape[-1]
    if query.ndim not in (1, 2) or query.shape[0] == 0:
        raise RequestError(f"the query has shape {tuple(query.shape)}; it must be [R] or [M, R].")
    rank = query.shape[-1]
    if rank < 1 or (keys is None and rank > width):
        raise RequestError(f"the key rank {rank} is not allowed; it must be 1 to the width, {width}.")
    if heads != 1 and (heads < 1 or width % heads or rank % heads):
        raise RequestError(f"heads = {heads} is not allowed; it must divide the width, {width}, and the key rank, {rank}.")
    if key_norm not in ("slice", "full", "none"):
        raise RequestError(choose("key_norm", str(key_norm), get_args(KeyNorm)))
    if weighting not in ("softmax", "sigmoid"):
        raise RequestError(choose("weighting", str(weighting), get_args(Weighting)))
    if statistics and weighting == "sigmoid":
        raise RequestError("return_statistics is for the softmax; a sigmoid has no maximum and no sum. Its reads add up as they are.")
    given: dict[str, Tensor | None] = {"query": query}
    if keys is not None:
        given.update(_keys(keys, sources, rank, key_norm))
        for key in keys:
            dtype = torch.promote_types(dtype, key.dtype)
    if priors:
        given.update(_priors(priors, query, first, heads, weighting))
        for one in priors:
            dtype = torch.promote_types(dtype, one.output.dtype)
    if key_gain is not None and key_gain.shape != (rank,):
        raise RequestError(f"key_gain has shape {tuple(key_gain.shape)}; it must be [{rank}].")
    if output_gain is not None and output_gain.shape != (width,):
        raise RequestError(f"output_gain has shape {tuple(output_gain.shape)}; it must be [{width}].")
    if bias is not None:
        shapes = ((len(sources),), (query.shape[0], len(sources))) if query.ndim == 2 else ((len(sources),),)
        if tuple(bias.shape) not in shapes:
            raise RequestError(f"bias has shape {tuple(bias.shape)}; it must be {' or '.join(map(str, shapes))}.")
    for name, tensor in {**given, "key_gain": key_gain, "bias": bias, "output_gain": output_gain}.items():
        if tensor is not None and not tensor.is_floating_point():
            raise RequestError(f"{name} has dtype {tensor.dtype}; it must be floating point.")
        if tensor is not None and hasattr(tensor, "full_tensor"):
            raise RequestError(f"{name} is a DTensor, of which this rank holds a part; hand in a whole tensor: gather it before the read.")
        if tensor is not None and tensor.device != first.device:
            raise RequestError(f"{name} is on {tensor.device}, source 0 on {first.device}; move them to one device.")
    for name, value in (("eps", eps), ("output_eps", output_eps)):
        if not value > 0:
            raise RequestError(f"{name} = {value} is not allowed; it must be positive, or a zero row divides by zero.")
    return dtype


def _sources(sources: Sequence[Tensor]) -> torch.dtype:
    if len(sources) == 0:
        raise RequestError("depth attention needs at least one source; the list is empty.")
    first = sources[0]
    shape, device, dtype = first.shape, first.device, first.dtype
    for index, source in enumerate(sources):
        if source.shape != shape or source.ndim == 0 or shape[-1] == 0:
            raise RequestError(
                f"source {index} has shape {tuple(source.shape)}, source 0 has {tuple(shape)}; all must be [..., D], D at least 1."
            )
        if not source.is_floating_point():
            raise RequestError(f"source {index} has dtype {source.dtype}; sources are floating point.")
        if source.device != device:
            raise RequestError(f"source {index} is on {source.device}, source 0 on {device}; move them to one device.")
        if source.dtype != dtype:
            dtype = torch.promote_types(dtype, source.dtype)
    return dtype


def _keys(keys: Sequence[Tensor], sources: Sequence[Tensor], rank: int, key_norm: str) -> Mapping[str, Tensor]:
    if key_norm == "full":
        raise RequestError("key_norm = 'full' is for sliced keys; projected keys take 'slice', which is their own RMS, or 'none'.")
    if len(keys) != len(sources):
        raise RequestError(f"there are {len(keys)} keys for {len(sources)} sources; give one key a source.")
    shape = (*sources[0].shape[:-1], rank)
    for index, key in enumerate(keys):
        if key.shape != shape:
            raise RequestError(f"key {index} has shape {tuple(key.shape)}; it must be {shape}.")
    return {f"key {index}": key for index, key in enumerate(keys)}


def _priors(priors: Sequence[DepthRead], query: Tensor, first: Tensor, heads: int, weighting: str) -> Mapping[str, Tensor]:
    count = 1 if query.ndim == 1 else query.shape[0]
    if len(priors) != count:
        raise RequestError(f"there are {len(priors)} prior reads for {count} queries; give one a query.")
    given = {}
    statistics = first.shape[:-1] if heads == 1 else (*first.shape[:-1], heads)
    for index, one in enumerate(priors):
        given[f"prior output {index}"] = one.output
        if one.output.shape != first.shape:
            raise RequestError(f"prior output {index} has shape {tuple(one.output.shape)}, source 0 has {tuple(first.shape)}.")
        for name, part in (("max", one.max), ("sum", one.sum)) if weighting == "softmax" else ():
            if part is None:
                raise RequestError(f"prior {index} has no {name}; make it with return_statistics=True.")
            if part.shape != statistics:
                raise RequestError(f"prior {name} {index} has shape {tuple(part.shape)}; it must be {tuple(statistics)}.")
            given[f"prior {name} {index}"] = part
    return given
