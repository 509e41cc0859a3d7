"""Other implementations of one AttnRes read, as functions of a list of sources and a query. Those that are installed run beside ours.

The two below are written here: the Low-Rank paper's pseudo-code, and the loop over a list that people write who know not to stack.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Read = Callable[[Sequence[Tensor], Tensor], Tensor]


def pseudo_code(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    """Low-Rank AttnRes, Appendix H."""
    values = torch.stack(list(sources))
    keys = torch.nn.functional.rms_norm(values, values.shape[-1:])
    weights = (keys * query).sum(-1).softmax(dim=0)
    return (weights[..., None] * values).sum(dim=0)


def list_loop(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    """Scores and mixture source by source; nothing is stacked but the scores."""
    scores = [torch.nn.functional.rms_norm(source, source.shape[-1:]) @ query for source in sources]
    weights = torch.stack(scores).softmax(dim=0)
    mixed = weights[0, ..., None] * sources[0]
    for index in range(1, len(sources)):
        mixed = mixed + weights[index, ..., None] * sources[index]
    return mixed


def installed(device: str) -> dict[str, Read]:
    """What other packages offer on this device."""
    found: dict[str, Read] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, load in (_CPU if device == "cpu" else _CUDA).items():
            try:
                found[name] = load()
            except (ImportError, RuntimeError):  # not installed, or not for this machine
                continue
    return found


def _fla_naive() -> Read:
    from fla.ops.attnres.naive import naive_attnres

    return lambda sources, query: naive_attnres(query, list(sources), torch.ones_like(query))


def _fla_fused() -> Read:
    from fla.ops.attnres import fused_attnres

    return lambda sources, query: fused_attnres(query, list(sources), torch.ones_like(query))


def _fast_attnres() -> Read:
    from attnres import attnres

    return lambda sources, query: attnres(list(sources), query.to(sources[0].dtype))


def _flash_attn_res() -> Read:
    from flash_attn_res import phase_1_batched_attention_triton_op as phase_1

    return lambda sources, query: phase_1(torch.stack(list(sources)), query[None], 1e-6)[0][0]


def _liger() -> Read:
    from liger_kernel.transformers.functional import liger_attn_res

    return lambda sources, query: liger_attn_res(torch.stack(list(sources)), query, torch.ones_like(query))


_CPU: dict[str, Callable[[], Read]] = {"fla-core naive": _fla_naive}
_CUDA: dict[str, Callable[[], Read]] = {
    "fla-core naive": _fla_naive, "fla-core fused": _fla_fused, "fast-attnres": _fast_attnres, "flash-attn-res": _flash_attn_res,
    "liger": _liger,
}  # fmt: skip
