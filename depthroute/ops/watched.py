"""Whether somebody looks at operators as they are called. If nobody does, a call may go round the dispatcher."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def watched(tensors: Iterable[Tensor]) -> bool:
    """A compiler, a tracer, a mode, a transform, a profiler, or a tensor of another kind among `tensors`."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
        or any(type(tensor) not in _PLAIN for tensor in tensors)
    )
