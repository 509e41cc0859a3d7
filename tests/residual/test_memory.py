"""The memory of a residual method: an immutable pytree that may be taken apart, kept, or recomputed at any moment, in the dtype that the
model names; and the gradient of what many sites read from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from depthroute.model import Decoder
from depthroute.ops.native import missing
from depthroute.residual import AttnResConfig, Body, PreNormConfig, ResidualConfig, bank
from depthroute.residual.attnres import AttnRes

Make = Callable[..., Decoder]
Run = Callable[[Decoder], tuple[Tensor, dict[str, Tensor]]]
Watch = Callable[[Decoder, Tensor], dict[int, Any]]


def tensors(memory: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(memory) if leaf is not None]


def test_memory_is_a_pytree_that_reading_leaves_alone(decoder: Make, watch: Watch, tokens: Tensor, config: ResidualConfig) -> None:
    model = decoder(config)
    for site, memory in watch(model, tokens[:, :-1]).items():
        leaves, spec = pytree.tree_flatten(memory)
        assert tensors(memory) and all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves)
        before = [None if leaf is None else leaf.detach().clone() for leaf in leaves]
        with torch.no_grad():
            first = pytree.tree_leaves(model.residual.read(memory, site, model.norm))
            again = pytree.tree_leaves(model.residual.read(pytree.tree_unflatten(leaves, spec), site, model.norm))
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        assert all(leaf is None or torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True))


def test_writing_leaves_the_old_memory_alone(decoder: Make, tokens: Tensor, config: ResidualConfig) -> None:
    model, seen = decoder(config), []
    original = model.residual.write

    def write(memory: Any, *rest: Any) -> Any:
        old = [(leaf, leaf.detach().clone()) for leaf in tensors(memory)]
        written = original(memory, *rest)
        seen.extend(torch.equal(leaf, copy) for leaf, copy in old)
        return written

    model.residual.write = write  # type: ignore[method-assign]
    model(tokens[:, :-1])
    assert seen and all(seen)


def test_a_memory_taken_apart_before_every_step_gives_the_same_bits(decoder: Make, run: Run, config: ResidualConfig) -> None:
    logits, gradients = run(decoder(config))
    model = decoder(config)
    read, write, ahead = model.residual.read, model.residual.write, 0

    def rebuilt(memory: Any) -> Any:
        nonlocal ahead
        ahead += bool(getattr(memory, "ahead", ()))
        leaves, spec = pytree.tree_flatten(memory)
        return pytree.tree_unflatten(list(leaves), spec)

    model.residual.read = lambda memory, *rest: read(rebuilt(memory), *rest)  # type: ignore[method-assign]
    model.residual.write = lambda memory, *rest: write(rebuilt(memory), *rest)  # type: ignore[method-assign]
    found, again = run(model)
    assert torch.equal(found, logits)
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
    prepares = isinstance(config, AttnResConfig) and config.has_blocks and config.phases
    assert bool(ahead) == (prepares or getattr(config, "query_from", None) == "block")


def test_nothing_is_different_without_gradients(decoder: Make, tokens: Tensor, config: ResidualConfig) -> None:
    model = decoder(config)
    with torch.no_grad():
        found = model.logits(tokens[:, :-1])
    torch.testing.assert_close(found, model.logits(tokens[:, :-1]), rtol=1e-13, atol=1e-13)  # products may take another kernel


def test_backward_passes_over_one_graph_do_not_disturb_each_other(decoder: Make, run: Run, tokens: Tensor, config: ResidualConfig) -> None:
    """One that stops half-way leaves nothing behind, and two add up."""
    model = decoder(config)
    _, expected = run(model)
    objective = model.loss(tokens[:, :-1], tokens[:, 1:]).objective
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name in ("layers.1.mlp.down.weight", "norm.weight", "embedding.weight"):
        (found,) = torch.autograd.grad(objective, model.get_parameter(name), retain_graph=True)
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-14)
    for _ in range(2):
        for name, found in zip(names, torch.autograd.grad(objective, parameters, retain_graph=True), strict=True):
            assert torch.equal(found, expected[name]), name


def test_gradients_of_the_memory_can_be_looked_at(
    decoder: Make, watch: Watch, tokens: Tensor, config: ResidualConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far the output moves with a source, over all reads of it: by `autograd.grad`, by `retain_grad` and by a hook."""

    def reaches(source: Tensor, objective: Tensor) -> bool:
        """Some of what a memory holds is not read any more at its last site."""
        return torch.autograd.grad(objective, source, retain_graph=True, allow_unused=True)[0] is not None

    model = decoder(config)

    def looked_at() -> list[list[Tensor]]:
        seen = watch(model, tokens[:, :-1])
        last = seen[6]
        sources = list(last.closed) if isinstance(last, bank.Bank) else tensors(last)
        objective = (model.residual.close(last, model.norm) * torch.arange(12)).sum()
        sources = [source for source in sources if reaches(source, objective)]
        assert sources
        direct = [torch.autograd.grad(objective, source, retain_graph=True)[0] for source in sources]
        together = list(torch.autograd.grad(objective, sources, retain_graph=True))  # here the nodes of all but the first run too
        hooked: dict[int, Tensor] = {}
        for number, source in enumerate(sources):
            source.retain_grad()
            source.register_hook(lambda gradient, number=number: hooked.update({number: gradient}))
        objective.backward()
        return [direct, together, [source.grad for source in sources], [hooked[number] for number in range(len(sources))]]

    found = looked_at()
    monkeypatch.setattr(bank, "hold", lambda x: x.view_as(x))
    for ways, expected in zip(zip(*found, strict=True), looked_at()[0], strict=True):
        for gradient in ways:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("config", [PreNormConfig(), AttnResConfig(block=3, roles="decoupled"), AttnResConfig(rank=4, keys="projected")])
def test_the_memory_has_the_dtype_that_the_model_names(
    decoder: Make, watch: Watch, tokens: Tensor, config: ResidualConfig, qk_norm: bool
) -> None:
    """Rows do: sources, their keys, and what was read of them ahead. The scalars of a read ahead are float32, as all statistics."""

    def kinds(seen: dict[int, Any]) -> tuple[set[torch.dtype], set[torch.dtype]]:
        rows, others = set(), set()
        for memory in seen.values():
            ahead = getattr(memory, "ahead", ())
            outputs = [read.output for site in ahead for read in site.reads]
            of_ahead = {id(leaf) for leaf in tensors(ahead)} - {id(output) for output in outputs}
            for leaf in tensors(memory):
                (others if id(leaf) in of_ahead else rows).add(leaf.dtype)
        return rows, others

    for memory_dtype, expected in (("parameter", torch.float32), ("compute", torch.bfloat16)):
        model = decoder(config, dtype=torch.float32, memory_dtype=memory_dtype, qk_norm=qk_norm)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows, others = kinds(watch(model, tokens[:, :-1]))
        assert rows == {expected}
        assert others == ({torch.float32} if isinstance(config, AttnResConfig) and config.has_blocks else set())
        rows, others = kinds(watch(model, tokens[:, :-1]))  # no autocast: what sub-layers put out is float32
        assert rows == {torch.float32} and others <= {torch.float32}


class Recomputed(nn.Module):
    """A sub-layer that keeps its inputs alone and runs again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.runs = inner, 0

    def forward(self, *inputs: Any) -> Any:
        def go(*given: Any) -> Any:
            self.runs += 1
            return self.inner(*given)

        return checkpoint(go, *inputs, use_reentrant=False)


def test_recomputing_sub_layers_changes_nothing(decoder: Make, run: Run, config: ResidualConfig) -> None:
    logits, gradients = run(decoder(config))
    model = decoder(config)
    for layer in model.layers:
        layer.attention, layer.mlp = Recomputed(layer.attention), Recomputed(layer.mlp)
    found, recomputed = run(model)
    assert torch.equal(found, logits)
    assert {name.replace("inner.", "") for name in recomputed} == set(gradients)
    for name, gradient in recomputed.items():
        assert torch.equal(gradient, gradients[name.replace("inner.", "")]), name
    assert model.layers[0].mlp.runs == 3  # forward, again for the backward, and the logits


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_whole_layers_changes_nothing(decoder: Make, run: Run, tokens: Tensor, config: ResidualConfig, reentrant: bool) -> None:
    """Read, sub-layer and write twice inside a checkpoint, with the memory's leaves going in and coming out."""
    _, gradients = run(decoder(config))
    model, runs = decoder(config), 0
    memory, sight = model.residual.open(model.embedding(tokens[:, :-1])), model.sight(tokens[:, :-1])
    for number in range(len(model.layers)):
        leaves, spec = pytree.tree_flatten(memory)

        def go(*given: Any, spec: Any = spec, first: int = 2 * number) -> tuple[Any, ...]:
            nonlocal runs, after
            runs += 1
            memory = pytree.tree_unflatten(list(given), spec)
            for site in (first, first + 1):
                memory = model.step(memory, site, sight)
            leaves, after = pytree.tree_flatten(memory)
            return tuple(leaves)

        after = spec
        memory = pytree.tree_unflatten(list(checkpoint(go, *leaves, use_reentrant=reentrant)), after)
    hidden = model.residual.close(memory, model.norm)
    loss = nn.functional.cross_entropy((hidden @ model.head_weight.T).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    assert runs == 2 * len(model.layers)
    largest = 1e-2 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = max(gradients[name].abs().max().item(), largest)  # what only scales an input that is normalised has none but noise
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-12 * scale)


def read_at_every_site(residual: AttnRes, rows: Tensor, upstream: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The gradients of the embedding and of every block's last output, where only reads lead to the loss. rows, upstream: [2L+1, T, D]."""
    embedding, *outputs = (row.to(dtype, copy=True).requires_grad_() for row in rows)
    memory, reads = residual.open(embedding), []
    for site, output in enumerate(outputs):
        reads.append(residual.read(memory, site))
        memory = residual.write(memory, site, output)
    reads.append(residual.close(memory))
    last = [outputs[end - 1] for end in residual.ends]
    return list(torch.autograd.grad(reads, [embedding, *last], [gradient.to(dtype) for gradient in upstream]))


@pytest.mark.parametrize(
    ("config", "roundings"),
    [
        (AttnResConfig(), 1.01),
        (AttnResConfig(rank=8, key_norm="full"), 1.01),
        (AttnResConfig(block=6, phases=False), 1.01),
        (AttnResConfig(block=6), 1.5),  # what was read ahead is rounded too: two roundings would be 1.41
        (AttnResConfig(num_blocks=5, rank=8), 1.5),
    ],
    ids=["full", "low-rank", "per site", "block", "low-rank blocks"],
)
def test_gradients_of_a_bf16_source_are_summed_in_float32(config: AttnResConfig, roundings: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sites read a source, its gradient is rounded once, not each site's share of it."""
    if missing() is not None:
        pytest.skip("the definition leaves the sums to autograd")
    body = Body(width=32, layers=12, attention_activation=32, mlp_activation=32)
    method, exact = config.build(body), config.build(body).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for ours, theirs in zip(method.parameters(), exact.parameters(), strict=True):
            theirs.copy_(ours.add_(0.5 * torch.randn(ours.shape, generator=generator)))
    rows = torch.randint(-4, 5, (25, 40, 32), generator=generator)  # sums of a block are exact in bfloat16
    upstream = torch.randn(25, 40, 32, generator=generator).bfloat16()
    truths = read_at_every_site(exact, rows, upstream, torch.float64)

    def errors() -> list[float]:
        """Of each gradient, against what rounding the true one costs."""
        found = read_at_every_site(method, rows, upstream, torch.bfloat16)
        return [
            ((got.double() - true).norm() / (true.bfloat16().double() - true).norm()).item()
            for got, true in zip(found, truths, strict=True)
        ]

    assert max(errors()) < roundings
    monkeypatch.setattr(bank, "hold", lambda x: x)
    assert errors()[0] > 1.5 * roundings
