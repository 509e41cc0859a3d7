"""Which command was asked for. Nothing heavy is imported before the command's own options are read."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from depthroute import __version__
from depthroute.common.errors import DepthrouteError, FailureError, choose
from depthroute.common.say import drop, say

COMMANDS = {
    "study": "train matched arms over seeds and write the report; resumes by itself",
    "train": "train one model in a run folder; resumes by itself",
    "watch": "a live page of a study on this machine: curves, paired differences, every cell",
    "status": "where the cells of a study are, while it runs and after",
    "report": "write the report of a study folder again, without training",
    "compare": "where two runs or two studies part: settings, first differing step, loss gap",
    "power": "how many seeds a study needs, from a pilot",
    "data": "turn text into token shards",
    "sample": "continue prompts with a trained model",
    "eval": "a trained run on tasks and held-out text, and against another run",
    "export": "a trained run as a Hugging Face model",
    "adopt": "a checkpoint from elsewhere as a run: a plain one routed, exactly, or a routed one read",
    "analyse": "what a trained run routes, how sharply, and what of it matters",
    "dynamics": "runs side by side: validation loss, magnitudes and gradients by depth",
    "boundaries": "block boundaries from a pilot run",
    "geometry": "what the route queries of any checkpoint span",
    "convert": "a trained run with low-rank keys, exactly",
    "gather": "sharded checkpoints of a parallel run as whole files",
    "cost": "what a shape costs: parameters, arithmetic, memory, traffic, time",
    "info": "parameters, shape and routing of a recipe, a run or prepared data",
    "methods": "the residual methods, and whether each does what it says",
    "recipes": "the model shapes and training recipes by name",
}
INTERRUPTED = 130

HELP = f"""depthroute {__version__}: learned routing over depth for Transformers

usage: depthroute COMMAND [OPTIONS]

{chr(10).join(f"  {name:<10} {text}" for name, text in COMMANDS.items())}

  depthroute COMMAND --help   the options of a command
  --debug                     after COMMAND: a traceback instead of one sentence
  --version                   the version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 a failure, 2 a wrong request, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if given else 2
    if given[0] == "--version":
        print(__version__)
        return 0
    name, *rest = given
    if name not in COMMANDS:
        say(f"depthroute: {choose('command', name, COMMANDS)}", sys.stderr)
        return 2
    debug = "--debug" in rest
    options = [word for word in rest if word != "--debug"]
    try:
        importlib.import_module(f"depthroute.cli.{name}").main(options)
        if sys.stdout is not None:  # it was closed before the start
            sys.stdout.flush()
    except DepthrouteError as error:
        if debug:
            raise
        _drop_unwritten_output()
        if not error.everywhere or _first_process():
            say(f"depthroute {name}: {error}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interruption:
        if _first_process():
            say(str(interruption) or f"depthroute {name}: interrupted.", sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if debug:
            raise
        _drop_unwritten_output()
        if isinstance(error, BrokenPipeError):  # the reader of a pipe (head, less) has seen enough
            return 0
        say(f"depthroute {name}: {error}", sys.stderr)
        return FailureError.exit_code
    except Exception as error:
        if debug:
            raise
        what = str(error).strip().splitlines() or [""]
        say(f"depthroute {name}: unexpected {type(error).__name__}: {what[0]} (--debug shows where)", sys.stderr)
        return FailureError.exit_code
    return 0


def _first_process() -> bool:
    """Of those that torchrun started, or the only one."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def _drop_unwritten_output() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        drop(sys.stdout)
