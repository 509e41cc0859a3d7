"""Tensors in, tensors out: the depth-attention operator and its backends. No modules, no configuration."""

from depthroute.ops.attention import depth_attention
from depthroute.ops.delta_rule import delta_rule, delta_rule_by_token
from depthroute.ops.form import DepthRead
from depthroute.ops.grouped import collect
from depthroute.ops.held import hold
from depthroute.ops.mixing import weighted_sum
from depthroute.ops.native import missing as kernel_unavailable
from depthroute.ops.prepared import PreparedRead, can_prepare
from depthroute.ops.registry import automatic as automatic_backend
from depthroute.ops.routed import into_experts, out_of_experts, routes, weighed
from depthroute.ops.thin import linear, linears
from depthroute.ops.watched import watched

__all__ = [
    "DepthRead",
    "PreparedRead",
    "automatic_backend",
    "can_prepare",
    "collect",
    "delta_rule",
    "delta_rule_by_token",
    "depth_attention",
    "hold",
    "into_experts",
    "kernel_unavailable",
    "linear",
    "linears",
    "out_of_experts",
    "routes",
    "watched",
    "weighed",
    "weighted_sum",
]
