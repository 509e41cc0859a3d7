"""depthroute: learned routing over depth for Transformers."""

__version__ = "0.1.0"
