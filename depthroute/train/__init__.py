"""Training: initial values, optimiser, schedule, the loop, checkpoints and the run folder."""

from depthroute.train.branch import branch_run, branch_step, shared_steps
from depthroute.train.config import RunConfig, TrainConfig
from depthroute.train.evaluation import evaluate
from depthroute.train.initialise import initialise
from depthroute.train.loop import resolve, train
from depthroute.train.run_folder import load_trained, recorded_config, recorded_result

__all__ = [
    "RunConfig",
    "TrainConfig",
    "branch_run",
    "branch_step",
    "evaluate",
    "initialise",
    "load_trained",
    "recorded_config",
    "recorded_result",
    "resolve",
    "shared_steps",
    "train",
]
