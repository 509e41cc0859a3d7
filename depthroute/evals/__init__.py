"""Evaluation of trained runs: tasks of the lm-evaluation-harness, tasks from held-out text, perplexity, and two runs item by item."""

from depthroute.evals.paired import compare_evaluations
from depthroute.evals.run import EvalConfig, compare_runs, evaluate_run

__all__ = ["EvalConfig", "compare_evaluations", "compare_runs", "evaluate_run"]
