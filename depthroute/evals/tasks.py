"""Runs single tasks of the lm-evaluation-harness, without a network unless it is asked for."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.evals.metrics import AnsweredItem, cells_of, items_of, metrics_of
from depthroute.evals.presets import REPORTED

if TYPE_CHECKING:
    from depthroute.evals.harness import DepthrouteLM

PACKAGE = "lm_eval"
SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


def require_harness() -> str:
    """The version of the harness that is installed. Raises RequestError where there is none."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise RequestError(f"tasks other than perplexity need the package {PACKAGE}: pip install 'depthroute[eval]'.")
    return importlib.metadata.version(PACKAGE)


class Tasks:
    """The tasks that can be run: those of the harness, those of YAML files in `folder`, or of both.

    Args:
        folder: YAML files of further tasks.
        known: also index the tasks that come with the harness, which takes seconds.
        download: may data sets be fetched from the hub?
    """

    def __init__(self, folder: Path | None, *, known: bool, download: bool) -> None:
        from lm_eval.tasks import TaskManager

        self._download = download
        self._manager = TaskManager(include_path=None if folder is None else str(folder), include_defaults=known)
        self._loaded: dict[str, Sequence[Any]] = {}

    def load(self, names: Sequence[str], also: Collection[str]) -> None:
        """Read the data of tasks, groups or tags, all before the first of them runs.

        Args:
            also: names that are meant where one is mistyped, beside those of the harness.

        Raises:
            RequestError: a task that is not there or needs a package that is not, or those whose data are not on this machine.
            FailureError: data cannot be fetched.
        """
        for name in names:
            if name not in self._manager.task_index:
                nearest = choose("task", name, [*self._manager.task_index, *also]).split(". Allowed")[0]  # there are thousands
                raise RequestError(f"{nearest}. The tasks of the harness are listed by `lm_eval ls tasks`.")
        missing = {}
        with network(self._download):
            for name in names:
                try:
                    loaded = self._manager.load([name])
                except ImportError as error:
                    raise _package_missing(name, error) from error
                except (OSError, ValueError) as error:  # of the data sets library, with and without a cache and a network
                    missing[name] = error
                    continue
                groups: dict[str, Any] = loaded.get("groups", {})
                self._loaded[name] = [groups[name]] if name in groups else list(loaded["tasks"].values())
        if missing:
            self._refuse(missing)

    def run(
        self, model: DepthrouteLM, name: str, *, limit: int | None, fewshot: int | None, seed: int
    ) -> tuple[dict[str, Any], list[AnsweredItem]]:
        """Run a task, a group or a tag that was loaded.

        Returns:
            `tasks`: for every task in it {`items`, `of` (how many all of it has), `fewshot`, `reported` (the metric that stands for it),
            `metrics` (`metrics_of`), and `cells` for a task that has some}; `groups`: what the harness averages over groups; `cut`: how
            many texts lost their beginning. And the items of all tasks.

        Raises:
            RequestError: the model cannot be asked what the task asks, or the task needs a package, or the network, that is not there.
            FailureError: the model gives no probabilities.
        """
        from lm_eval import simple_evaluate

        model.cut = 0
        with network(self._download) as refused:
            try:
                results = simple_evaluate(
                    model=model, tasks=self._loaded[name], task_manager=self._manager, num_fewshot=fewshot, limit=limit, bootstrap_iters=0,
                    random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed, fewshot_random_seed=seed,
                )  # fmt: skip
            except ImportError as error:
                raise _package_missing(name, error) from error
            except Exception as error:
                if not refused:
                    raise
                raise RequestError(
                    f"the task {name} reaches for {refused[0]}, and the network is off; run this with --download where there is one."
                ) from error
        assert results is not None
        found, items = {}, []
        for task, samples in results["samples"].items():
            samples = sorted(samples, key=lambda sample: (sample["filter"], sample["doc_id"]))
            of_task = items_of(task, samples)
            targets = [sample["target"] for sample in samples]
            metrics = metrics_of(results["configs"][task].get("output_type"), results["results"][task], of_task, targets)
            entry = {
                "items": results["n-samples"][task]["effective"],
                "of": results["n-samples"][task]["original"],
                "fewshot": results["n-shot"][task],
                "reported": REPORTED.get(task, "acc" if "acc" in metrics else next(iter(metrics), None)),
                "metrics": metrics,
            }
            if any("cell" in item for item in of_task):
                entry["cells"] = cells_of(of_task, entry["reported"])
            found[task] = entry
            items += of_task
        groups = {
            group: {key.removesuffix(",none"): value for key, value in values.items() if "," in key and isinstance(value, int | float)}
            for group, values in results.get("groups", {}).items()
        }
        return {"tasks": found, "groups": groups, "cut": model.cut}, items

    def _refuse(self, missing: Mapping[str, Exception]) -> None:
        entries = {name: self._manager.task_index[name].cfg or {} for name in missing}
        named = ", ".join(f"{name} ({entry.get('dataset_path') or 'several data sets'})" for name, entry in entries.items())
        error = next(iter(missing.values()))
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if self._download:
            raise FailureError(f"the data of {named} cannot be fetched: {reason}") from error
        raise RequestError(
            f"the data of {named} are not on this machine ({reason}); run this once with --download where there is a network, and they are "
            "found in the cache of Hugging Face from then on."
        ) from error


def _package_missing(task: str, error: ImportError) -> RequestError:
    link: BaseException | None = error
    while link is not None:
        package = (getattr(link, "name", None) or "").split(".")[0]
        if isinstance(link, ModuleNotFoundError) and package and package not in sys.modules:
            return RequestError(f"the task {task} needs the package {package}: pip install {package}")
        link = link.__cause__ or link.__context__
    return RequestError(f"the task {task} cannot be loaded: {(str(error).strip().splitlines() or ['a module is missing'])[0]}")


@contextmanager
def network(allowed: bool) -> Iterator[list[str]]:
    """Allow or forbid access to the network, for as long as the context lasts; gives the hosts that were refused.

    Where it is forbidden, the libraries of Hugging Face and the processes that they start are told to be offline, and every thread of this
    process gets an OSError in place of an address, or a connection, of another machine. Sockets of this machine stay.
    """
    refused: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_switched(offline=not allowed))
        if not allowed:
            stack.enter_context(_this_machine_only(refused))
        yield refused


@contextmanager
def _switched(*, offline: bool) -> Iterator[None]:
    # All three read the environment when they are imported, so their own switches are set, and the environment for other processes.
    names = ("huggingface_hub.constants", "datasets.config", *(["evaluate.config"] if importlib.util.find_spec("evaluate") else []))
    modules = [importlib.import_module(name) for name in names]
    before = [(module, name, getattr(module, name)) for module in modules for name in SWITCHES if hasattr(module, name)]
    environment = {name: os.environ.get(name) for name in SWITCHES}
    for module, name, _ in before:
        setattr(module, name, offline)
    os.environ.update(dict.fromkeys(SWITCHES, "1" if offline else "0"))
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        for name, given in environment.items():
            if given is None:
                del os.environ[name]
            else:
                os.environ[name] = given


@contextmanager
def _this_machine_only(refused: list[str]) -> Iterator[None]:
    resolve, sockets = socket.getaddrinfo, {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
    own = {name for name in sockets if name in vars(socket.socket)}

    def check(host: Any) -> None:
        if not _is_this_machine(host):
            name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
            refused.append(name)
            raise OSError(errno.ENETUNREACH, f"{name} is not this machine, and network access is off without --download")

    def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
        check(host)
        return resolve(host, *arguments, **options)

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def connected(self: socket.socket, address: Any) -> Any:
            if isinstance(address, tuple):  # of a path on this machine it is a string
                check(address[0])
            return connect(self, address)

        return connected

    socket.getaddrinfo = resolved
    for name, connect in sockets.items():
        setattr(socket.socket, name, guarded(connect))
    try:
        yield
    finally:
        socket.getaddrinfo = resolve
        for name, connect in sockets.items():
            if name in own:
                setattr(socket.socket, name, connect)
            else:
                delattr(socket.socket, name)  # inherited again


def _is_this_machine(host: Any) -> bool:
    name = host.decode(errors="replace") if isinstance(host, bytes) else host
    if name is None or name in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(name).split("%")[0]).is_loopback
    except ValueError:
        return False
