"""The norm before a sub-layer, as a residual method applies it."""

from __future__ import annotations

from torch import Tensor, nn

from depthroute.residual.protocol import Inputs, Norm, RoleInputs


class RMSNorm(nn.RMSNorm):
    """RMS normalisation in the gain's dtype, which is also that of the result: bfloat16 input is normalised in float32 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def normalised(inputs: Inputs, norm: Norm | None) -> Inputs:
    """`inputs` through a norm. Roles that hold the same object still do: it is normalised once."""
    if norm is None:
        return inputs
    if isinstance(inputs, Tensor):
        return norm(inputs)
    query = norm(inputs.query)
    key = query if inputs.key is inputs.query else norm(inputs.key)
    value = query if inputs.value is inputs.query else key if inputs.value is inputs.key else norm(inputs.value)
    return RoleInputs(query, key, value)


def fusible(norm: Norm | None, width: int) -> nn.RMSNorm | None:
    """The norm if a read can apply it in its own pass: plain RMS over the whole width with a gain and an epsilon, and nobody's hooks."""
    if not isinstance(norm, nn.RMSNorm) or type(norm) not in (nn.RMSNorm, RMSNorm):
        return None
    plain = norm.weight is not None and norm.eps is not None and tuple(norm.normalized_shape) == (width,)
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return norm if plain and not any(hooks) else None
