"""A batch of texts that a model goes on with, a token at a time.

A pass of a model has two memories. What earlier tokens have left (keys and values, latent vectors, states) is in the cache. The depth
memory is of the tokens of the pass alone: no later token looks into it. So it is kept in one place for passes of one shape, and its size
does not grow with the text.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.infer.cache import TextCache
from depthroute.infer.program import DecodingProgram
from depthroute.model import Decoder
from depthroute.ops import watched
from depthroute.residual import InPlace, Routing

CHUNK = 256  # tokens


class Session:
    """Texts of a batch that a model goes on with, a token at a time.

    Beyond the model's context the text slides: a token attends to the last `context` tokens, and states go on. Where a model has a
    `document_end`, the token behind it begins a new document and sees nothing before itself.
    """

    def __init__(self, model: Decoder, *, chunk: int = CHUNK) -> None:
        """`chunk`: how many tokens of a prompt are read in one pass, which bounds the memory of long prompts; the result is the same.

        Raises:
            RequestError: a residual method whose memory of a token depends on other tokens, or a chunk below 1.
        """
        if not model.residual.per_token:
            raise RequestError(
                f"the residual method {model.config.residual.name!r} cannot decode with a cache: what it carries for a token depends on "
                "other tokens."
            )
        if chunk < 1:
            raise RequestError(f"chunk = {chunk} is not allowed; it takes 1 token or more.")
        self.model = model
        self._chunk = min(chunk, model.config.context)
        self._cache: TextCache | None = None
        self._routing: tuple[tuple[object, ...], Routing] | None = None
        self._program: tuple[int, DecodingProgram | None] | None = None
        self._weights: tuple[object, ...] = ()
        self._ended: Tensor | None = None  # bool [B], rows whose last token ended a document; None where nothing ends one

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begin with these token ids; the logits behind each prompt, [B, V] in at least float32.

        Raises:
            RequestError: no prompt, an empty one, or an id that is not in the vocabulary.
        """
        weight = self.model.embedding.weight
        if len(prompts) == 0:
            raise RequestError("there is no prompt; give at least one.")
        check_prompts(prompts, self.model.config.vocabulary)
        end = self.model.config.document_end
        prompts = [_last_document(prompt, end) for prompt in prompts]
        self._ended = None if end is None else torch.tensor([prompt[-1] == end for prompt in prompts], device=weight.device)
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        tokens = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)], device=weight.device)
        self._routing = self._program = None  # the weights may have changed
        self._weights = _identity(self.model)
        self._cache = TextCache(self.model.config, len(prompts), weight, room=longest + 1)
        for start in range(0, longest, self._chunk):
            hidden = self._pass(tokens[:, start : start + self._chunk], padding if start == 0 else None)
        return self._logits(hidden)

    def step(self, tokens: Tensor) -> Tensor:
        """Go on with one token a row, int64 [B]; the logits behind it, [B, V].

        Raises:
            RequestError: nothing was begun; tokens of another shape or dtype, or not in the vocabulary; or a model whose weights were moved
                or cast since `prefill`.
        """
        rows, vocabulary = self._begun().rows, self.model.config.vocabulary
        if tokens.dtype != torch.int64 or tokens.shape != (rows,):
            raise RequestError(f"a step takes int64 tokens [{rows}], one a row, not {tokens.dtype} {list(tokens.shape)}.")
        if tokens.device.type == "cpu" and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise RequestError(f"a step has token ids {tokens.tolist()}; this model has 0 to {vocabulary - 1}.")
        if self._weights != _identity(self.model):
            raise RequestError("the model was cast or moved since its prompts were read; call prefill again.")
        end = self.model.config.document_end
        if end is not None and self._ended is not None:
            if self._ended.any():
                self._begun().hide(self._ended)
            self._ended = torch.eq(tokens, end)
        program = self._prepared(rows)
        return self._logits(self._pass(tokens[:, None], None)) if program is None else program(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, at least one, in this order; a row may come more than once.

        Raises:
            RequestError: nothing was begun, or rows that the batch does not have.
        """
        there = self._begun().rows
        if not len(rows) or any(type(row) is not int or not 0 <= row < there for row in rows):
            raise RequestError(f"rows = {list(rows)} is not allowed; the batch has the rows 0 to {there - 1}, and at least one is kept.")
        self._begun().keep(rows)
        self._ended = None if self._ended is None else self._ended[list(rows)]

    @property
    def cache_bytes(self) -> int:
        """What the cache takes: what grows with the text, up to twice the context, and the states that do not."""
        return 0 if self._cache is None else self._cache.bytes

    @property
    def depth_bytes(self) -> int | None:
        """What the depth memory of a step takes, whatever the length of the text; None where the method does not keep it in one place."""
        return self._routing[1].bytes if self._routing is not None and isinstance(self._routing[1], InPlace) else None

    @torch.no_grad()
    def _pass(self, tokens: Tensor, padding: Sequence[int] | None) -> Tensor:
        """Hidden states [B, D] of the last token."""
        cache, embedding = self._begun(), self.model.embedded(tokens)
        routing = self._routing_of(embedding)
        sight = cache.sight(self.model.rotary, tokens.shape[1], padding)
        return self.model.connect(embedding, sight, routing)[:, -1]

    def _routing_of(self, embedding: Tensor) -> Routing:
        kind = (embedding.shape, embedding.dtype)
        if self._routing is None or self._routing[0] != kind:
            self._routing = (kind, self.model.residual.decoding(embedding))
        return self._routing[1]

    @torch.no_grad()
    def _prepared(self, rows: int) -> DecodingProgram | None:
        """The program of a step, made anew where the cache has moved; None where there is none, or somebody watches what is computed."""
        cache = self._begun()
        cache.reserve(1)
        if watched(()) or torch.is_autocast_enabled("cpu"):
            return None
        if self._program is not None and self._program[0] == cache.moved:
            return self._program[1]
        weight = self.model.embedding.weight
        routing = self._routing_of(weight.new_empty(rows, 1, weight.shape[1]))
        program = None
        if isinstance(routing, InPlace) and DecodingProgram.serves(self.model, routing, rows):
            program = DecodingProgram(self.model, routing, cache)
        self._program = (cache.moved, program)
        return program

    def _begun(self) -> TextCache:
        if self._cache is None:
            raise RequestError("nothing was begun: call prefill first.")
        return self._cache

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.unembed(hidden)


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Refuse prompts that a model of this vocabulary cannot read.

    Raises:
        RequestError: an empty one, or an id that is not in the vocabulary.
    """
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise RequestError(f"prompt {row} is empty; give at least one token.")
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise RequestError(f"prompt {row} has the token id {wrong[0]}; this model has 0 to {vocabulary - 1}.")


def _last_document(prompt: Sequence[int], end: int | None) -> Sequence[int]:
    """What the last token of a prompt sees: the rest is of documents before its own."""
    start = max((place + 1 for place, token in enumerate(prompt[:-1]) if token == end), default=0)
    return prompt[start:]


def _identity(model: Decoder) -> tuple[object, ...]:
    """Where the first weight is and what it is, which casting and moving change."""
    weight = model.embedding.weight
    return (weight.data_ptr(), weight.dtype, weight.device)
