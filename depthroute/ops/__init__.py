"""Tensors in, tensors out: the depth-attention operator and its backends. No modules, no configuration."""

from depthroute.ops.attention import DepthRead as DepthRead
from depthroute.ops.attention import depth_attention as depth_attention
