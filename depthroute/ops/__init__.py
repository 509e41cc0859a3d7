"""Tensors in, tensors out: the depth-attention operator and its backends. No modules, no configuration."""

from depthroute.ops.attention import depth_attention
from depthroute.ops.form import DepthRead
from depthroute.ops.held import hold
from depthroute.ops.mixing import weighted_sum
from depthroute.ops.native import missing as kernel_unavailable
from depthroute.ops.registry import automatic as automatic_backend

__all__ = ["DepthRead", "automatic_backend", "depth_attention", "hold", "kernel_unavailable", "weighted_sum"]
