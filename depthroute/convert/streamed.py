"""The converted checkpoint, written a tensor at a time, and compared with the stored one in float64 before its values are rounded.

Either model has the weights of one layer at a time; embedding and head pass in pieces. So the peak of memory is near one layer and what
the compared tokens carry: (S + 1) D float64 numbers a token and model.

Shapes: B windows, T tokens, D width, S sources, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from depthroute.convert.tensor_file import Stored, TensorWriter
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import Memory
from depthroute.train import checkpoint

ELEMENTS = 2**21  # of the embedding or head in memory at a time
TOGETHER = 1_024  # tokens that pass a sub-layer together, where a window is not longer


class Difference(NamedTuple):
    """How far two models are apart on the same tokens: their largest difference of a logit and of a source's weight at any site."""

    logits: float
    largest_logit: float
    weights: float


class Tensors(Protocol):
    """Stored tensors by our names, in float64."""

    def tensor(self, name: str) -> Tensor: ...
    def rows(self, name: str, start: int, stop: int) -> Tensor: ...


class Conversion(Protocol):
    """Tensors of a model made from those of another: `Rewrite`, or an adopted checkpoint."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def target(self) -> ModelConfig: ...
    @property
    def source(self) -> Tensors: ...
    def layout(self) -> Mapping[str, Stored]: ...
    def tensor(self, name: str) -> Tensor: ...
    def rows(self, name: str, start: int, stop: int) -> Tensor: ...


@torch.no_grad()
def write_checkpoint(rewrite: Conversion, windows: Tensor, folder: Path, state: dict[str, Any]) -> Difference:
    """Write the converted model into the checkpoint `folder` and compare it with the original on token ids `windows` [B, T].

    `state`: that of the original checkpoint, of which the sizes and hashes of the files are replaced. The optimiser's file is empty.
    `new_folder` around the run hands all of it to the disk.

    Raises:
        FailureError: a value is not finite, or beyond the range of the type that it is stored in.
    """
    folder.mkdir(parents=True)
    layout = rewrite.layout()
    with TensorWriter(folder / checkpoint.MODEL, layout) as file:
        original, converted = _Layerwise(rewrite.config, rewrite.source.tensor), _Layerwise(rewrite.target, rewrite.tensor)
        for name in layout:
            if name.startswith(("residual.", "norm.")):
                file.write(name, rewrite.tensor(name))
        memories = _opened(rewrite, windows, file, original.model, converted.model)
        sight = original.model.sight(windows)
        weights = torch.zeros((), dtype=torch.float64)
        for site in range(2 * rewrite.config.layers):
            if site % 2 == 0:
                original.enter(site // 2)
                for name, tensor in converted.enter(site // 2).items():
                    file.write(name, tensor)
            weights = torch.maximum(weights, _weight_difference(memories, site, original.model, converted.model))
            memories = [(original.model.step(one, site, sight), converted.model.step(other, site, sight)) for one, other in memories]
        weights = torch.maximum(weights, _weight_difference(memories, 2 * rewrite.config.layers, original.model, converted.model))
        logits, largest = _logit_difference(rewrite, _closed(memories, original.model, converted.model), file)
    save_file({}, folder / checkpoint.OPTIMISER)
    for name in (checkpoint.MODEL, checkpoint.OPTIMISER):
        (folder / name).chmod(0o644)
    checkpoint.write_state(folder, state)
    return Difference(logits, largest, weights.item())


class _Layerwise:
    """A float64 decoder with the weights of its routing, its final norm and one layer."""

    def __init__(self, config: ModelConfig, tensor: Callable[[str], Tensor]) -> None:
        with torch.device("meta"):
            self.model = Decoder(config).eval()
        # these have tables that are no weights, and would stay without values
        self.model.residual = config.residual.build(config.body).double()
        self.model.rotary = self.model.rotary.to_empty(device="cpu").double()
        self.model.rotary.reset_buffers()
        self._tensor = tensor
        self._names = list(checkpoint.model_tensors(self.model))
        self._fill("residual.")
        self._fill("norm.")

    def enter(self, layer: int) -> dict[str, Tensor]:
        """Let go of the layer before this one; the weights of this one by name."""
        if layer:
            self.model.layers[layer - 1].to("meta")
        return self._fill(f"layers.{layer}.")

    def _fill(self, prefix: str) -> dict[str, Tensor]:
        tensors = {name: self._tensor(name) for name in self._names if name.startswith(prefix)}
        self.model.load_state_dict(tensors, strict=False, assign=True)
        return tensors


def _opened(rewrite: Conversion, windows: Tensor, file: TensorWriter, original: Decoder, converted: Decoder) -> list[tuple[Memory, Memory]]:
    """Convert the embedding piece by piece, and open the memories of both models for some windows at a time."""
    embedded = [torch.empty(*windows.shape, rewrite.config.width, dtype=torch.float64) for _ in range(2)]
    for start, stop in _pieces(rewrite.config):
        here = (windows >= start) & (windows < stop)
        rows = rewrite.rows("embedding.weight", start, stop)
        file.write("embedding.weight", rows, start)
        embedded[0][here] = rewrite.source.rows("embedding.weight", start, stop)[windows[here] - start]
        embedded[1][here] = rows[windows[here] - start]
    together = max(1, TOGETHER // windows.shape[1])
    parts = zip(*(torch.split(one, together) for one in embedded), strict=True)
    return [(original.residual.open(one), converted.residual.open(other)) for one, other in parts]


def _weight_difference(memories: list[tuple[Memory, Memory]], site: int, original: Decoder, converted: Decoder) -> Tensor:
    largest = torch.zeros((), dtype=torch.float64)
    for one, other in memories:
        found = converted.residual.source_weights(other, site)
        for role, expected in original.residual.source_weights(one, site).items():
            largest = torch.maximum(largest, (found[role] - expected).abs().max())
    return largest


def _closed(memories: list[tuple[Memory, Memory]], original: Decoder, converted: Decoder) -> tuple[Tensor, Tensor]:
    """What the heads read, [B*T, D]."""
    one = torch.cat([original.residual.close(memory, original.norm) for memory, _ in memories])
    other = torch.cat([converted.residual.close(memory, converted.norm) for _, memory in memories])
    return one.flatten(0, -2), other.flatten(0, -2)


def _logit_difference(rewrite: Conversion, hidden: tuple[Tensor, Tensor], file: TensorWriter) -> tuple[float, float]:
    """Convert the head piece by piece: the largest difference of a logit, and the largest logit."""
    stored = "embedding.weight" if rewrite.config.tied_embeddings else "head.weight"
    target = "embedding.weight" if rewrite.target.tied_embeddings else "head.weight"
    difference = largest = torch.zeros((), dtype=torch.float64)
    for start, stop in _pieces(rewrite.config):
        rows = rewrite.rows(target, start, stop)
        if target == "head.weight":
            file.write(target, rows, start)
        logits = F.linear(hidden[0], rewrite.source.rows(stored, start, stop))
        largest = torch.maximum(largest, logits.abs().max())
        difference = torch.maximum(difference, (F.linear(hidden[1], rows) - logits).abs().max())
    return difference.item(), largest.item()


def _pieces(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """The rows of embedding and head, some at a time."""
    rows = max(1, ELEMENTS // config.width)
    return ((start, min(start + rows, config.vocabulary)) for start in range(0, config.vocabulary, rows))
