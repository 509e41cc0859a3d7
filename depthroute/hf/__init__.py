"""Trained decoders in the world of Hugging Face. Importing this makes the `Auto` classes of transformers know them."""

from __future__ import annotations

from depthroute.common.errors import RequestError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise RequestError("depthroute.hf needs transformers; install depthroute[hf].") from error

from depthroute.hf.configuration import DepthrouteConfig
from depthroute.hf.modelling import DepthrouteForCausalLM

AutoConfig.register(DepthrouteConfig.model_type, DepthrouteConfig, exist_ok=True)
AutoModelForCausalLM.register(DepthrouteConfig, DepthrouteForCausalLM, exist_ok=True)

__all__ = ["DepthrouteConfig", "DepthrouteForCausalLM"]
