"""Tensors in, tensors out: the depth-attention operator and its backends. No modules, no configuration."""

from depthroute.ops.attention import depth_attention
from depthroute.ops.form import DepthRead
from depthroute.ops.held import hold
from depthroute.ops.native import missing as kernel_unavailable

__all__ = ["DepthRead", "depth_attention", "hold", "kernel_unavailable"]
