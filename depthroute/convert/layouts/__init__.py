"""Public layouts of checkpoints, a file each: what a configuration means, and what the tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError, choose
from depthroute.convert.foreign import Foreign, read_config, tensor_files
from depthroute.convert.layouts import fla, kimi, llama

# By the first of `architectures` in config.json.
READERS: dict[str, Callable[[str, Mapping[str, Any], Collection[str]], Foreign]] = {
    **dict.fromkeys(llama.ARCHITECTURES, llama.read),
    fla.ARCHITECTURE: fla.read,
}


def recognise(folder: Path) -> tuple[Foreign, dict[str, Any]]:
    """What the checkpoint in a Hugging Face folder is, with its config.json.

    Raises:
        RequestError: no config.json or safetensors, an architecture that is not known, or a setting that our decoder has no place for.
        FailureError: a file is damaged.
    """
    config = read_config(folder)
    names = tensor_files(folder).keys()
    if any(kimi.RECOGNISED.fullmatch(name) for name in names):
        return kimi.read(config, names), config
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise RequestError(
            f"{folder / 'config.json'} has architectures = {architectures!r}; it takes a list of one: {', '.join(sorted(READERS))}."
        )
    architecture = str(architectures[0])
    if architecture not in READERS:
        raise RequestError(f"{folder / 'config.json'}: {choose('architecture', architecture, READERS)}")
    return READERS[architecture](architecture, config, names), config
