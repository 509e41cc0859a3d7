"""A trained run as a model of the lm-evaluation-harness, version 0.4.13 and later.

`python -m depthroute.evals.harness --model depthroute --model_args run=RUN --tasks ...` is the harness's own command line with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from depthroute.common.errors import RequestError, choose
from depthroute.evals.scoring import BATCH_TOKENS, Request, Score, is_cut, score
from depthroute.evals.subject import Subject, open_subject
from depthroute.train.config import Device, Precision

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("depthroute")
class DepthrouteLM(TemplateLM):  # type: ignore[misc, unused-ignore]  # the harness may come without types
    """A run under the harness's protocol.

    A text with an empty context stands behind the id that ends documents, as every document of the training stream does; with data whose
    documents begin with a token, every text stands behind that. What does not fit the model's context is cut at the left, and the answer
    stays whole; `cut` counts how often that was. The arithmetic is that of `depthroute.evals.scoring.score`.

    Args:
        run, data, precision: those of `open_subject`.
        device: as there; "cuda:0", which the harness gives where it was told nothing, is "auto".
        batch_tokens: tokens of a pass, padding included.
        seed: of generation where a task samples. A text depends on it and on the request's place among those of its kind.
        batch_size, max_batch_size: given by the harness, and without effect: batches are filled by tokens, and results do not depend on
            how.
        subject: a model that is already open, in place of `run`.
    """

    def __init__(
        self,
        run: str | Path = "",
        *,
        data: str | Path | None = None,
        device: str = "auto",
        precision: Precision = "auto",
        batch_tokens: int = BATCH_TOKENS,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        subject: Subject | None = None,
    ) -> None:
        super().__init__()
        if subject is None and not str(run):
            raise RequestError("the model 'depthroute' needs the folder of a run: --model_args run=RUN.")
        if int(batch_tokens) < 1:
            raise RequestError(f"batch_tokens = {batch_tokens} is not allowed; it takes 1 or more.")
        self.subject = subject or open_subject(
            Path(str(run)), data=None if data is None else Path(str(data)), device=_device(device), precision=precision
        )
        self.batch_tokens = int(batch_tokens)
        self.cut = 0
        self._seed = int(seed)
        self._text = self.subject.dataset.tokenizer()

    @property
    def eot_token_id(self) -> int:
        return self._text.end

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context stands behind: the token that begins documents, or else the one that ended the document before."""
        return self._text.end if self._text.begin is None else self._text.begin

    @property
    def max_length(self) -> int:
        return self.subject.config.model.context

    @property
    def max_gen_toks(self) -> int:
        return min(256, self.max_length - 1)

    @property
    def batch_size(self) -> int:
        """Whole contexts in a pass."""
        return max(1, self.batch_tokens // self.max_length)

    @property
    def device(self) -> str:
        return self.subject.device

    @property
    def tokenizer_name(self) -> str:
        """What tells the tokens apart from others'."""
        return self.subject.dataset.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, behind the token that begins documents if the data have one. No other special token is ever among them."""
        begins = [] if self._text.begin is None or add_special_tokens is False else [self._text.begin]
        return [*begins, *self._text.encode(string)]

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self._text.decode(tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for request in requests:
            if not request.args[1]:
                raise RequestError(f"the task {request.task_name} asks for the log-probability of an empty answer.")
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = []
        for (context, answer), before, behind in requests:
            if not behind:
                raise RequestError(
                    f"the answer {answer!r} has no token of its own behind {context[-20:]!r}; it is part of the context's last token."
                )
            asked.append(Request(before or [self.prefix_token_id], behind))
        found = self._scores(asked)
        for (pair, _, _), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, tuple(result))
        return [(result.log_probability, result.greedy) for result in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts behind an empty context; one longer than the model's context in windows, each token once."""
        texts = [request.args[0] for request in requests]
        windows = [[Request(*pair) for pair in self._windows(text)] for text in texts]
        scores = iter(self._scores([window for of_text in windows for window in of_text]))
        totals = [sum(next(scores).log_probability for _ in of_text) for of_text in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What goes on from contexts, until a document ends, a stop string comes, or `max_gen_toks`; greedy unless a task samples."""
        found: dict[int, str] = {}
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            options = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
            for batch in self._generations(numbers, int(options["max_gen_toks"])):
                prompts = [requests[number].args[0] for number in batch]
                found.update(zip(batch, self._generate(prompts, batch, options), strict=True))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, found[number])
        return [found[number] for number in range(len(requests))]

    def _windows(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length, 1)
        return map(make_disjoint_window, windows)

    def _scores(self, requests: Sequence[Request]) -> list[Score]:
        subject = self.subject
        self.cut += sum(is_cut(request, self.max_length) for request in requests)
        return score(subject.model, requests, device=subject.device, precision=subject.precision, batch_tokens=self.batch_tokens)

    def _generations(self, numbers: Sequence[int], limit: int) -> Iterable[Sequence[int]]:
        """Batches of prompts, each of which may fill the context."""
        if limit >= self.max_length:
            raise RequestError(
                f"a task generates {limit} tokens and the model's context is {self.max_length}; nothing of the prompt would be left. Leave "
                "the task out, or evaluate a model with a longer context."
            )
        return (numbers[start : start + self.batch_size] for start in range(0, len(numbers), self.batch_size))

    def _generate(self, prompts: Sequence[str], numbers: Sequence[int], options: dict[str, Any]) -> list[str]:
        from depthroute.infer import Sampling, generate
        from depthroute.train.devices import autocast

        settings = {name: value for name, value in options.items() if name not in ("max_gen_toks", "until", "do_sample")}
        for name in settings:
            if name not in SAMPLING:
                raise RequestError(f"a task asks for an {choose('generation setting', name, SAMPLING)}")
        if not options["do_sample"]:
            settings["temperature"] = 0.0
        limit = int(options["max_gen_toks"])
        ids = [self.tok_encode(prompt)[-(self.max_length - limit):] or [self.prefix_token_id] for prompt in prompts]
        self.cut += sum(len(self.tok_encode(prompt)) > self.max_length - limit for prompt in prompts)
        stop = [text for text in options.get("until") or [] if text]
        subject = self.subject
        with autocast(subject.device, subject.precision):
            found = generate(
                subject.model, ids, limit=limit, sampling=Sampling(**settings, seed=self._seed), end=(self.eot_token_id,), stop=stop,
                decode=self._text.decode, rows=numbers,
            )  # fmt: skip
        return [generation.text or "" for generation in found]


def _device(name: str) -> Device:
    name = "auto" if name == "cuda:0" else name
    if name not in get_args(Device):
        raise RequestError(f"device: {choose('device', name, get_args(Device))} CUDA_VISIBLE_DEVICES chooses among GPUs.")
    return cast(Device, name)


def main() -> None:
    """The harness's command line, with the model `depthroute` among its models."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
