"""The training loop: one run, from its configuration to result.json.

The losses that are written down are means of the negative log-likelihood in nats per token, without the z-loss. On the CPU a run that
was interrupted, killed or stopped by a full disk and then continued with the same number of threads writes the same losses and weights,
bit for bit, as one that never stopped; on CUDA some kernels add in no fixed order, and the last bits may differ.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from depthroute.common.config import to_json
from depthroute.common.duration import duration
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json
from depthroute.data import HeldOut, TokenDataset, evaluation_windows
from depthroute.data.loader import Batch, Loader
from depthroute.data.order import ORDER
from depthroute.model import Decoder
from depthroute.parallel.layout import Layout
from depthroute.parallel.world import first, joined, started
from depthroute.train import checkpoint
from depthroute.train.config import RunConfig
from depthroute.train.console import Console
from depthroute.train.devices import keep_freed_memory, peak_memory_bytes, resolve_device, resolve_precision
from depthroute.train.environment import environment
from depthroute.train.evaluation import Evaluation, evaluate
from depthroute.train.interruption import Interruption
from depthroute.train.on_many import OnMany
from depthroute.train.on_one import OnOne
from depthroute.train.optimiser import check_groups, set_learning_rate
from depthroute.train.run_data import TOKENIZER, check_tokenizer, named_data
from depthroute.train.run_folder import RunFolder, recorded_config, recorded_result, refuse_other_configuration
from depthroute.train.schedule import learning_rate
from depthroute.train.sinks import Sinks, check_sinks


def train(
    config: RunConfig, directory: Path, *, console: bool = True, sinks: Sequence[str] = (), layout: Layout | None = None
) -> dict[str, Any]:
    """Train `config` in the run folder `directory` and return what its result.json says.

    A complete run is not repeated, an unfinished one continues from its last checkpoint. Ctrl-C or SIGTERM finishes the current step,
    writes a checkpoint and raises KeyboardInterrupt. `console` shows progress on standard output; log.txt gets it either way. `sinks`
    ("tensorboard", "trackio", "wandb") are given the numbers too, those of a complete run as well; one that fails is dropped, and
    the run goes on.

    `layout`: how the run lies on the processes that torchrun started, each of which calls this. It is the same run on any layout, up to
    rounding, and may go on in another one; the first process writes all but the checkpoints.

    Raises:
        RequestError: the folder holds another configuration, the data is not what the configuration names, a sink is not installed, or the
            layout does not fit.
        FailureError: a loss that is not finite, a full disk, a truncated checkpoint, another process that ended. The folder can be
            continued.
        KeyboardInterrupt: it was interrupted; the same call continues.
    """
    directory = Path(directory)
    sinks = check_sinks(sinks)
    recorded = recorded_config(directory)
    config = resolve(config, recorded)
    refuse_other_configuration(directory, recorded, config)
    if layout is None and (started() or 1) > 1:
        raise RequestError(f"torchrun started {started()} processes; say how they share the run, such as --parallel ddp.")
    result = recorded_result(directory)
    if result is not None:
        if sinks and first():
            with closing(_console(config, directory, config.train.steps, visible=console)) as shown:
                Sinks(sinks, config, directory, shown.line).close(complete=True)
        return result
    data = TokenDataset.open(named_data(directory, config))
    config = for_data(config, data)
    if recorded is not None and (directory / TOKENIZER).exists():
        check_tokenizer(directory, data)
    # now: a folder that is this run's would keep groups that do not fit, or data that are too few
    if config.train.groups:
        with torch.device("meta"):
            check_groups(Decoder(config.model), config.train)
    held_out = data.held_out(limit=config.train.evaluation_tokens)
    evaluation_windows(held_out.tokens, config.model.context)
    data.order(config.model.context, config.train.sequences, config.train.seed)
    folder = RunFolder(directory, writes=first())
    if config.train.device == "cpu":
        keep_freed_memory()
    with _threads(config.train.threads), Interruption(passed_on=layout is not None) as interruption, ExitStack() as stack:
        facts = environment(config.train.device) | {"data": to_json(data.manifest)}
        workers: OnOne | OnMany
        if layout is None:
            stack.enter_context(folder.claimed(config, facts))
            workers = OnOne(config)
        else:
            world = stack.enter_context(joined(layout, config.train.device))
            facts["parallel"] = {"layout": world.layout.describe(), "processes": world.layout.processes}
            workers = OnMany(config, world)  # before the folder is this run's: a layout that does not fit leaves nothing in it
            workers.from_first(lambda: stack.enter_context(folder.claimed(config, facts)))
        run = _Run(config, folder, data, held_out, interruption, workers)
        return run.complete(facts, visible=console and first(), sinks=sinks if first() else ())


def resolve(config: RunConfig, recorded: RunConfig | None = None, *, here: bool = True) -> RunConfig:
    """`config` with nothing left to choose: "auto" and None become what this machine, or the recorded run to be continued, takes.

    With `here` false the run is trained on another machine, and "cuda" needs no GPU in this one.

    Raises:
        RequestError: "cuda" where there is no GPU, or, elsewhere, with a precision that only that GPU could choose.
    """
    settings, before = config.train, recorded.train if recorded else None
    device = before.device if before and settings.device == "auto" else settings.device
    precision = before.precision if before and settings.precision == "auto" else settings.precision
    if here or device == "auto":
        device = resolve_device(device)
    elif device == "cuda" and precision == "auto":
        raise RequestError("train.precision = 'auto' is for the GPU to choose, which is in another machine; set bf16 or float32.")
    precision = resolve_precision(precision, device)
    settings = dataclasses.replace(settings, device=device, precision=precision, microbatch=settings.microbatch or settings.sequences)
    fingerprint = config.data_fingerprint or (recorded.data_fingerprint if recorded else "")
    return dataclasses.replace(config, train=settings, data_fingerprint=fingerprint)


class _Run:
    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        data: TokenDataset,
        held_out: HeldOut,
        interruption: Interruption,
        workers: OnOne | OnMany,
    ) -> None:
        self.config = config
        self.settings = config.train
        self.folder = folder
        self.interruption = interruption
        self.data = data
        self.held_out = held_out
        self.workers = workers
        self.step = 0
        self.order: str | None = ORDER  # of the batches of the steps so far; None where an earlier version did not record it
        self.saved: int | None = None  # the step of the last checkpoint, or of the one that is being written
        self.peak_memory = 0

    def complete(self, facts: dict[str, Any], *, visible: bool, sinks: Sequence[str]) -> dict[str, Any]:
        """Continue from the last checkpoint to the last step."""
        self._resume()
        loader = Loader(
            self.data, context=self.config.model.context, sequences=self.settings.sequences, seed=self.settings.seed,
            rank=self.workers.share, world_size=self.workers.shares, start=self.step, documents=False,
        )  # fmt: skip
        with loader:
            return self._train(iter(loader), facts, visible=visible, sinks=sinks)

    def _train(self, batches: Iterator[Batch], facts: dict[str, Any], *, visible: bool, sinks: Sequence[str]) -> dict[str, Any]:
        steps = self.settings.steps
        console = _console(self.config, self.folder.path, self.step, visible=visible, writes=self.workers.first)
        complete = False
        try:
            if self.workers.first:
                self._announce(console, facts)
            self.folder.sinks = Sinks(sinks, self.config, self.folder.path, console.line)
            self._milestone(console)  # one that was cut short is seen at once by what follows
            wish = self.workers.agreed(self.interruption.requested)
            while self.step < steps:
                if wish:
                    self._stop(console)
                wish = self._optimise(console, batches)
                wish = not self._milestone(console) or wish
                every = self.settings.checkpoint_every
                if (every and self.step % every == 0) or self.step == steps or self.step in self.settings.keep_checkpoints:
                    self._save()
            if self.workers.agreed(self.interruption.requested) and not self._evaluated():
                self._stop(console)
            self._save()
            self.workers.saved()
            self._note_memory()
            result = self.workers.from_first(self._write_result)
            complete = True
            console.line(
                f"complete: validation NLL {result['nll']:.4f}, perplexity {result['perplexity']:.2f}, "
                f"{result['tokens_per_second']['median']:,.0f} tokens/s, {duration(result['training_seconds'])} of training"
            )
            return result
        finally:
            if not complete:
                with suppress(FailureError):  # what ended the run is said already
                    self.workers.saved(alone=True)
            if self.folder.sinks is not None:
                self.folder.sinks.close(complete=complete)
            console.close()

    def _resume(self) -> None:
        found = self.workers.from_first(lambda: checkpoint.to_resume(self.folder.path, self.settings.steps))
        if found is not None:
            state = self.workers.load(found)
            self.step = self.saved = state["step"]
            if self.step:
                self.order = state.get("order")  # after the last step it may be another one
            self.peak_memory = state["peak_memory_bytes"]
        self.workers.from_first(lambda: self.folder.cut_back(self.step))

    def _announce(self, console: Console, facts: dict[str, Any]) -> None:
        counts = self.workers.parameter_counts
        settings = self.settings
        console.line(
            f"{facts['started_at']}  {counts['total']:,} parameters, {settings.steps} steps of {self.config.tokens_per_step:,} tokens, "
            f"{settings.precision} on {settings.device}, threads: {facts['threads']}"
        )
        if self.step:
            console.line(f"continuing after step {self.step}")
            first = read_json(self.folder.path / "environment.json")
            if "branched_from" in first:
                console.line("the first {step} steps are those of {folder}".format(**first["branched_from"]))
            for name in ("processor", "instructions", "threads", "packages", "depth_attention", "parallel"):
                if first.get(name) != facts.get(name):
                    was, now = (_layout(fact) if name == "parallel" else fact for fact in (first.get(name), facts.get(name)))
                    console.line(f"{name} was {was} and is {now}: the last bits of the losses may differ")

    def _optimise(self, console: Console, batches: Iterator[Batch]) -> bool:
        """One step; whether any process wishes to stop, which each says when it has taken it, so that the slowest is waited for."""
        started = time.perf_counter()
        settings, step = self.settings, self.step
        nll = self.workers.accumulate(self.workers.batch(next(batches).tokens))
        loss, gradient_norm = nll.item() / self.config.tokens_per_step, self.workers.gradient_norm()
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            self._refuse_step(loss, gradient_norm)
        if settings.gradient_clip is not None and gradient_norm > settings.gradient_clip:
            self.workers.clip(settings.gradient_clip, gradient_norm)
        loads = self.workers.balance()  # before the optimiser, which has no part in it: a GPU has counted and need not be waited for
        rate = learning_rate(step, settings)
        set_learning_rate(self.workers.optimiser, rate)
        self.workers.optimiser.step()
        self.workers.optimiser.zero_grad()
        self.step = step + 1
        wish = self.workers.agreed(self.interruption.requested)
        seconds = time.perf_counter() - started
        self.folder.add_metrics({
            "step": self.step, "tokens": self.step * self.config.tokens_per_step, "loss": loss, "learning_rate": rate,
            "gradient_norm": gradient_norm, "seconds": seconds, **loads,
        })
        console.step(self.step, loss, self.config.tokens_per_step, seconds)
        return wish

    def _refuse_step(self, loss: float, gradient_norm: float) -> None:
        self.folder.flush()
        self.workers.saved()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {gradient_norm}"
        raise FailureError(
            f"{what} at step {self.step + 1} of {self.folder.path}; the step was not taken, and the last checkpoint is that of step "
            f"{self.saved or 0}. Lower train.learning_rate or lengthen its warm-up, in a new folder.", everywhere=True,
        )  # fmt: skip

    def _evaluated(self) -> bool:
        due = self.step == self.settings.steps or self.step in self.settings.milestones
        return not due or self.workers.from_first(lambda: any(line["step"] == self.step for line in self.folder.evaluations()))

    def _milestone(self, console: Console) -> bool:
        """Evaluate if this step asks for it; false if it was interrupted: the run that continues catches up on it first."""
        if self._evaluated():
            return True
        settings = self.settings
        measured = evaluate(
            self.workers.network, self.held_out.tokens, context=self.config.model.context, microbatch=self.workers.evaluation_rows,
            device=settings.device, precision=settings.precision, boundaries=self.held_out.boundaries, markers=self.data.manifest.markers,
            stop=lambda: self.workers.agreed(self.interruption.requested),
        )
        if measured is None:
            return False
        self.workers.from_first(lambda: self._record(measured, console))
        return True

    def _record(self, measured: Evaluation, console: Console) -> None:
        if self.step == self.settings.steps and measured.documents is not None:
            measured.documents.write(self.folder.path)  # before the lines, which say that this evaluation is done
        where = {"step": self.step, "tokens": self.step * self.config.tokens_per_step}
        self.folder.add_evaluation(*({**where, "split": split, **fields} for split, fields in measured.splits.items()))
        line = measured.splits["validation"]
        console.line(f"step {self.step}/{self.settings.steps}  validation NLL {line['nll']:.4f}  perplexity {line['perplexity']:.2f}")

    def _save(self) -> None:
        if self.saved == self.step:
            return
        self.folder.flush(sync=True)
        self._note_memory()
        state = {"order": self.order, "tokens": self.step * self.config.tokens_per_step, "peak_memory_bytes": self.peak_memory}
        self.workers.save(self.folder.path, self.step, state, self.settings.keep_checkpoints)
        self.saved = self.step

    def _stop(self, console: Console) -> None:
        if self.step:
            self._save()
            self.workers.saved()
        text = f"interrupted after step {self.step}; run the same command again to continue in {self.folder.path}"
        # the first process has the checkpoint in its place last, and torchrun ends the others when one has ended
        self.workers.from_first(lambda: console.line(text))
        raise KeyboardInterrupt(text)

    def _note_memory(self) -> None:
        self.peak_memory = self.workers.largest(max(self.peak_memory, peak_memory_bytes(self.settings.device)))

    def _write_result(self) -> dict[str, Any]:
        last = [line for line in self.folder.evaluations() if line["split"] == "validation"][-1]
        metrics = self.folder.metrics()
        seconds = [line["seconds"] for line in metrics]
        norms = [line["gradient_norm"] for line in metrics]
        limit = self.settings.gradient_clip
        clipped = sum(limit is not None and norm > limit for norm in norms)
        self.folder.write_result({
            "status": "complete",
            "step": self.step,
            "tokens": self.step * self.config.tokens_per_step,
            "order": self.order,
            "nll": last["nll"],
            "perplexity": last["perplexity"],
            "parameters": self.workers.parameter_counts,
            "tokens_per_second": {
                "median": self.config.tokens_per_step / statistics.median(seconds),
                "mean": self.config.tokens_per_step * len(seconds) / sum(seconds),
            },
            "peak_memory_bytes": self.peak_memory,
            "training_seconds": sum(seconds),
            "gradient_norm": {"mean": sum(norms) / len(norms), "maximum": max(norms), "fraction_clipped": clipped / len(norms)},
        })
        result = recorded_result(self.folder.path)
        assert result is not None
        return result


def for_data(config: RunConfig, data: TokenDataset) -> RunConfig:
    """`config` with the fingerprint of `data`, which must be the data that it names and fit its model; RequestError otherwise."""
    if data.vocabulary > config.model.vocabulary:
        raise RequestError(
            f"model.vocabulary is {config.model.vocabulary} and the tokenizer of {config.data} has {data.vocabulary} entries; "
            "it must be at least as many."
        )
    if config.model.document_end not in (None, data.end):
        raise RequestError(
            f"model.document_end is {config.model.document_end} and the documents in {config.data} end with the token {data.end}; "
            "set that, or none."
        )
    if config.data_fingerprint not in ("", data.fingerprint):
        raise RequestError(
            f"the data in {config.data} has the fingerprint {data.fingerprint}, and the configuration asks for {config.data_fingerprint}; "
            "give the folder of that data, or leave data_fingerprint empty in a new run."
        )
    return dataclasses.replace(config, data_fingerprint=data.fingerprint)


def _console(config: RunConfig, path: Path, first_step: int, *, visible: bool, writes: bool = True) -> Console:
    log = path / "log.txt" if writes else None
    return Console(log, label=path.name, steps=config.train.steps, first_step=first_step, visible=visible)


def _layout(fact: dict[str, Any] | None) -> str:
    return "one process" if fact is None else "{layout} on {processes} processes".format(**fact)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
