"""Exact rewrites of trained models."""

from depthroute.convert.low_rank import convert_low_rank as convert_low_rank
