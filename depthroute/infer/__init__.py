"""Text from a trained model."""

from __future__ import annotations

from depthroute.infer.generate import Finish, Generation, Piece, generate, stream
from depthroute.infer.sampling import Sampling
from depthroute.infer.session import Session
from depthroute.infer.text import TextStream, first_stop

__all__ = ["Finish", "Generation", "Piece", "Sampling", "Session", "TextStream", "first_stop", "generate", "stream"]
