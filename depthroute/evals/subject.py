"""The trained model that is evaluated, with its data and where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from depthroute.data import TokenDataset
from depthroute.model import Decoder
from depthroute.train import RunConfig, checkpoint, load_trained
from depthroute.train.config import Device, Precision
from depthroute.train.devices import resolve_device, resolve_precision
from depthroute.train.run_data import run_data
from depthroute.train.run_folder import root_of, run_and_checkpoint


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on its device, in evaluation mode; `precision` is what "auto" stands for there.

    `checkpoint` is the name of the folder of its weights, `weights` their SHA-256.
    """

    path: Path
    config: RunConfig
    model: Decoder
    dataset: TokenDataset
    device: Device
    precision: Precision
    checkpoint: str
    weights: str

    @property
    def results(self) -> Path:
        """Where its results go unless told otherwise: `evals` in its run folder, and there in a folder for an older checkpoint."""
        root = root_of(self.path)
        return root / "evals" if root == self.path else root / "evals" / self.checkpoint


def open_subject(run: Path, *, data: Path | None = None, device: Device = "auto", precision: Precision = "auto") -> Subject:
    """Load the last checkpoint of a run, or the checkpoint folder that `run` is.

    Args:
        data: token shards, whose tokenizer and held-out text are used. None: those the run names.

    Raises:
        RequestError: no run, no checkpoint, no data or others than were trained on, `data` of another tokenizer, or a device that
            is not there.
        FailureError: the checkpoint or the data are cut short or altered.
    """
    config, model = load_trained(run)
    dataset = run_data(run, config, data)
    _, found = run_and_checkpoint(run)
    weights = checkpoint.model_sha256(found)
    where = resolve_device(device)
    return Subject(
        path=run,
        config=config,
        model=model.to(torch.device(where)).eval(),
        dataset=dataset,
        device=where,
        precision=resolve_precision(precision, where),
        checkpoint=found.name,
        weights=weights,
    )
