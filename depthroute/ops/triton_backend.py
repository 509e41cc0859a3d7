"""The GPU backend: what the kernels of `triton_kernels` are launched with.

Triton compiles a kernel anew for all that it is told is constant. Here that is the form, the dtype, D, R and H, and the powers of two that
hold S and M; whatever else changes, strides among it, finds the kernel compiled. Nothing is tuned by trial: block sizes follow from shapes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.ops.form import Form, Gradients, Operands, Saved, Upstream

_device_of: Any = torch.cuda.device_of  # torch has no types for it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ALIGNMENT = 16  # bytes, the widest access of a thread
_TILE = 8192  # elements of [queries, width] that a program may hold in registers, if it is more than one query
_WARP_FORWARD, _WARP_BACKWARD, _MOST_WARPS = 4096, 2048, 16  # bytes of that tile to a warp, in the statistics dtype
_MOST_STAGES, _STAGED = 8, 48 * 1024  # rows on their way at once, and the bytes of shared memory that they may take
# Programs of a backward: enough to fill a GPU, and few enough that the partial sums that each leaves are small beside the sources.
_MOST_PROGRAMS, _FEWEST_PROGRAMS, _FEWEST_TOKENS, _PARTIAL = 2048, 256, 4, 2**22


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot serve, or None. On the CPU it serves only where Triton interprets, as its tests do."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install 'depthroute[triton]'"
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"it runs on CUDA and ROCm devices, and the sources are on {device}"
    if dtype not in _DTYPES:
        return f"it has no arithmetic for {dtype}"
    return None


def forward(operands: Operands, form: Form, outputs: Sequence[Tensor], saved: Saved) -> None:
    """As `form.Backend.forward`."""
    from depthroute.ops.triton_kernels import forward_kernel

    count, block = operands.reads, _block(operands, form)
    length, programs = _power_of_two(count), saved.scores.shape[:-3].numel() * -(-count // block)
    prior = [_packed(tensor) for tensor in operands.prior]
    if programs == 0:
        return
    with _device_of(operands.queries):
        forward_kernel[(programs,)](
            **_shared(operands, form, block, _WARP_FORWARD),
            bias=None if operands.bias is None else _packed(operands.bias),
            prior_outputs=_filled(prior[:count], length),
            prior_maxima=_filled(prior[count : 2 * count], length),
            prior_sums=_filled(prior[2 * count :], length),
            outputs=_filled(outputs, length),
            maxima=_filled(saved.max, length),
            sums=_filled(saved.sum, length),
            weights=saved.weights,
            scores=saved.scores,
            rstd=saved.rstd,
            output_rstd=saved.output_rstd,
            EPS=form.eps,
            OUTPUT_EPS=form.output_eps,
        )


def backward(
    operands: Operands, form: Form, saved: Saved, upstream: Upstream, into: Sequence[Tensor], add: Sequence[bool], found: Gradients
) -> None:
    """As `form.Backend.backward`. A program sums the gradients of queries, bias and gain over its tokens, then torch sums the programs'.

    How many programs there are depends on the shapes alone: the sums have the same parts on every device.
    """
    from depthroute.ops.triton_kernels import backward_kernel

    count, block, number, rank = operands.reads, _block(operands, form), len(operands.sources), operands.queries.shape[1]
    tokens, exact, length = saved.scores.shape[:-3].numel(), operands.queries.dtype, _length(number)
    firsts = range(0, count, block)
    sizes = [found.queries.numel(), 0 if operands.bias is None else found.bias.numel(), found.output_gain.numel() * len(firsts)]
    each, programs = _programs(tokens, sum(sizes))
    partial = operands.queries.new_empty(programs, sum(sizes))
    shared = _shared(operands, form, block, _WARP_BACKWARD)
    prior, gradients, of_sums = ([_packed(x) for x in some] for some in (operands.prior, upstream.outputs, upstream.sums))
    # A launch for every block of queries: those after the first add to what it wrote, in the exact dtype until the last is done.
    kept = exact if len(firsts) > 1 else None
    goals, adds = _goals(into, exact, kept), [flag and not again for flag, again in zip(add, _repeated(into), strict=True)]
    key_goals = [key.to(kept or key.dtype) for key in found.keys]
    is_exact = [goal.dtype == exact for goal in goals]
    with _device_of(operands.queries):
        for index, first in enumerate(firsts if tokens else ()):
            asked = slice(first, first + block)
            backward_kernel[(programs,)](
                **shared,
                prior_outputs=_filled(prior[:count][asked], block),
                prior_sums=_filled(prior[2 * count :][asked], block),
                sums=_filled(saved.sum[asked], block),
                weights=saved.weights,
                scores=saved.scores,
                rstd=saved.rstd,
                output_rstd=saved.output_rstd,
                output_gradients=_filled(gradients[asked], block),
                sum_gradients=_filled(of_sums[asked], block),
                weight_gradients=None if upstream.weights is None else _packed(upstream.weights),
                into=_filled([shared["sources"][0] if yes else goal for goal, yes in zip(goals, is_exact, strict=True)], length),
                into_exact=_filled([goal if yes else partial for goal, yes in zip(goals, is_exact, strict=True)], length),
                flags=_flags(is_exact, [True] * number if index else adds, length),
                key_gradients=_filled(key_goals, length),
                prior_gradients=_filled(found.prior[:count][asked], block),
                prior_sum_gradients=_filled(found.prior[count:][asked], block),
                partial=partial,
                spare=operands.queries.new_empty(programs, rank) if shared["KEYS"] == "slice" else None,
                N=tokens,
                first=first,
                count=min(block, count - first),
                tokens_each=each,
                slots=sum(sizes),
                gain_slot=sizes[0] + sizes[1] + index * found.output_gain.numel(),
                BS=length,
                BIAS=operands.bias is not None,
                ALONE=form.weighting == "softmax" and number == 1 and not prior,
                ADD_TO_KEYS=index > 0,
            )
        for buffer, goal, again in zip((*into, *found.keys), (*goals, *key_goals), _repeated((*into, *found.keys)), strict=True):
            if again:
                buffer.add_(goal)
            elif buffer is not goal:
                buffer.copy_(goal)
        for gradient, parts in zip(found[2:], torch.split(partial, sizes, 1), strict=True):
            if parts.shape[1]:
                size = gradient.numel()
                torch.sum(parts.reshape(programs, parts.shape[1] // size, size), (0, 1), out=gradient.view(-1))
            else:
                gradient.zero_()


def _repeated(buffers: Sequence[Tensor]) -> list[bool]:
    """Which of them came before in the list."""
    return [any(buffer is earlier for earlier in buffers[:s]) for s, buffer in enumerate(buffers)]


def _goals(into: Sequence[Tensor], exact: torch.dtype, kept: torch.dtype | None) -> list[Tensor]:
    """Where the kernel puts the gradients of the sources: into a buffer of its own where it must be kept in another dtype, or where the
    buffer came before in the list, because threads do not wait for each other between sources."""
    return [
        torch.empty_like(buffer, dtype=exact) if again else buffer.to(kept or buffer.dtype)
        for buffer, again in zip(into, _repeated(into), strict=True)
    ]


def _shared(operands: Operands, form: Form, block: int, warp: int) -> dict[str, Any]:
    """What both kernels take, for programs of `block` queries that have `warp` bytes of their tile to a warp."""
    first, exact = operands.sources[0], operands.queries
    width, rank, length = first.shape[-1], exact.shape[1], _length(len(operands.sources))
    heads, group = _power_of_two(form.heads), _power_of_two(width // form.heads)
    keys = "projected" if operands.keys else "row" if form.heads == 1 or rank == width else "slice"
    rows = _rows(operands.sources, length)
    key_rows = rows if keys == "slice" else _rows(operands.keys, length) if operands.keys else _Rows(None, None, 1)
    return {
        "sources": rows.bases,
        "strides": rows.strides,
        "keys": key_rows.bases,
        "key_strides": key_rows.strides,
        "queries": _packed(exact),
        "gain": None if operands.output_gain is None else _packed(operands.output_gain),
        "S": len(operands.sources),
        "M": operands.reads,
        "D": width,
        "R": rank,
        "H": form.heads,
        "BM": block,
        "BH": heads,
        "BG": group,
        "BK": 1 if keys == "row" else _power_of_two(rank // form.heads),
        "KEYS": keys,
        "NORM": form.key_norm,
        "SOFTMAX": form.weighting == "softmax",
        "UNIT": rows.unit,
        "KEY_UNIT": key_rows.unit,
        "STAGES": min(2 + block, _MOST_STAGES, 1 + _STAGED // (heads * group * first.element_size())),
        "num_warps": min(_MOST_WARPS, _power_of_two(-(-block * heads * group * exact.element_size() // warp))),
        "num_stages": 1,  # where the kernel does not say otherwise
        "enable_fp_fusion": True,
    }


def _block(operands: Operands, form: Form) -> int:
    """Queries to a program, a power of two."""
    row = _power_of_two(form.heads) * _power_of_two(operands.sources[0].shape[-1] // form.heads)
    return min(_power_of_two(operands.reads), max(1, _TILE // row))


def _length(number: int) -> int:
    """Of the tuples over `number` sources: a kernel is compiled for every power of two from 8."""
    return max(8, _power_of_two(number))


def _programs(tokens: int, slots: int) -> tuple[int, int]:
    """Tokens to each program of a backward, and programs."""
    most = min(_MOST_PROGRAMS, max(_FEWEST_PROGRAMS, _PARTIAL // slots))
    each = max(_FEWEST_TOKENS, -(-tokens // most))
    return each, -(-tokens // each)


class _Rows(NamedTuple):
    """Tensors as the kernels read them: row t of tensor s begins t x stride x unit elements after its base.

    A stride is passed as 2 x stride + 3, because Triton compiles anew for a number in a tuple that is 1 or a multiple of 16.
    """

    bases: tuple[Tensor, ...] | None
    strides: tuple[int, ...] | None
    unit: int


def _rows(tensors: Sequence[Tensor], length: int) -> _Rows:
    """Where rows follow each other at no single stride, or channels are apart, that tensor alone is copied."""
    bases = [_packed(tensor) if _row_stride(tensor) is None else _aligned(tensor) for tensor in tensors]
    strides = [_row_stride(base) or 0 for base in bases]
    wide = _ALIGNMENT // tensors[0].element_size()
    unit = 1 if any(stride % wide for stride in strides) else wide
    codes = {stride: 2 * (stride // unit) + 3 for stride in strides}
    return _Rows(_filled(bases, length), _filled([codes[stride] for stride in strides], length), unit)


def _row_stride(tensor: Tensor) -> int | None:
    """The distance of one row [D] to the next, if there is one and channels are adjacent."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    stride, following = None, 0
    for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != following:
            return None
        following = step * size
    return 0 if stride is None else stride


def _packed(tensor: Tensor) -> Tensor:
    return _aligned(tensor.contiguous())


def _aligned(tensor: Tensor) -> Tensor:
    """Itself, or a copy: Triton would compile anew for every pattern of tensors that start off the alignment."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


def _flags(exact: Sequence[bool], add: Sequence[bool], length: int) -> tuple[int, ...]:
    """Eight sources a number: bits 1 to 8 say which are exact, 9 to 16 which are added to. Bits 0 and 17 make it odd and not 1."""
    words = [1 | 1 << 17 for _ in range(length // 8)]
    for s, (is_exact, adds) in enumerate(zip(exact, add, strict=True)):
        words[s // 8] |= (2 * is_exact | 512 * adds) << s % 8
    return tuple(words)


def _filled(values: Sequence[Any], length: int) -> Any:
    """As a tuple of this length with padding, of length 1 if all are the same, or None if there are none."""
    if not values:
        return None
    if all(value is values[0] for value in values):
        return (values[0],)
    return (*values, *[values[0]] * (length - len(values)))


def _power_of_two(number: int) -> int:
    """The smallest that is not below."""
    return 1 << (number - 1).bit_length()
