"""Text from a trained model."""

from depthroute.infer.sampling import sample_tokens as sample_tokens
