"""What all tests share: repeatable hypothesis examples, one thread, and one tiny trained run."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("depthroute", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("depthroute")
# A shell starts background jobs with SIGINT ignored, and Python leaves it so: then no test of Ctrl-C could pass.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tensors here are tiny: a second thread only costs
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # and so would a pool of compilers beside two test processes


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an RD-AttnRes decoder trained for a few steps; its shards lie beside it in `tokens`."""
    from depthroute.data import PrepareConfig, prepare
    from depthroute.model import ModelConfig
    from depthroute.residual import AttnResConfig
    from depthroute.train import RunConfig, TrainConfig, train

    folder = tmp_path_factory.mktemp("trained")
    source, tokens, words = folder / "text.jsonl", folder / "tokens", random.Random(1)
    lexicon = ["".join(words.choice("abcdefghij") for _ in range(4)) for _ in range(30)]
    lines = [json.dumps({"text": " ".join(words.choice(lexicon) for _ in range(50))}) for _ in range(100)]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    prepare(PrepareConfig.of(str(source), vocabulary=300, sample_one_in=1, validation_share=0.2), tokens)
    model = ModelConfig(
        vocabulary=300, width=12, layers=3, heads=2, mlp_width=16, context=16, residual=AttnResConfig(block=2, roles="decoupled")
    )
    settings = TrainConfig(
        steps=4, sequences=4, learning_rate=3e-2, warmup_fraction=0, precision="float32", device="cpu", threads=1, evaluation_tokens=64
    )
    train(RunConfig(model=model, train=settings, data=str(tokens)), folder / "run")
    return folder / "run"
