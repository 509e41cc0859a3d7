"""The decoder and its configuration."""

from depthroute.model.config import ModelConfig as ModelConfig
from depthroute.model.decoder import Decoder as Decoder
from depthroute.model.loss import LossSums as LossSums
