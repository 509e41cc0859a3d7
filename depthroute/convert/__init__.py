"""Exact rewrites of trained models, and checkpoints of other projects as runs of ours."""

from depthroute.convert.adopt import adopt_checkpoint as adopt_checkpoint
from depthroute.convert.adopt import adopted_routing as adopted_routing
from depthroute.convert.low_rank import convert_low_rank as convert_low_rank
