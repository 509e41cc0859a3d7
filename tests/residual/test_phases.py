"""Two phases (Attention Residuals, Algorithm 1): closed blocks are read once for all sites of the open block; only speed changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, attnres, block_ends

Make = Callable[..., Decoder]
Run = Callable[[Decoder], tuple[Tensor, dict[str, Tensor]]]
Watch = Callable[[Decoder, Tensor], dict[int, Any]]

BLOCKS: dict[str, dict[str, int]] = {  # of 8 sub-layers
    "full": {},
    **{
        f"block={size}": {"block": size} for size in (1, 2, 3, 5, 7, 8)
    },  # 3, 5 and 7 leave a shorter last block, 7 one of a single sub-layer
    **{f"layers_per_block={size}": {"layers_per_block": size} for size in (1, 3)},
    **{f"num_blocks={count}": {"num_blocks": count} for count in (1, 3, 5, 6)},  # of 2, 2, 1, 2 and 1, and of 2, 1, 1, 2, 1 and 1
}
MEMBERS = {
    "plain": AttnResConfig(),
    "no gain": AttnResConfig(key_gain=False),
    "slice": AttnResConfig(rank=5),
    "full norm": AttnResConfig(rank=5, key_norm="full"),
    "projected": AttnResConfig(rank=5, keys="projected"),
    "first read": AttnResConfig(first_read=True),
    "large epsilon": AttnResConfig(rank=5, eps=0.3),
    **{roles: AttnResConfig(roles=roles) for roles in ("decoupled", "tied", "average", "frozen_value")},
    "decoupled, everything": AttnResConfig(roles="decoupled", rank=5, key_norm="full", key_gain=False, first_read=True),
    "decoupled projected": AttnResConfig(roles="decoupled", rank=5, keys="projected"),
}
EVERY_BLOCK = pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
EVERY_MEMBER = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)


@EVERY_BLOCK
@EVERY_MEMBER
def test_phases_are_reads_of_all_sources(decoder: Make, run: Run, member: AttnResConfig, blocks: dict[str, int]) -> None:
    """Logits and every gradient; the loss is a function of the logits."""
    (logits, gradients), (expected, wanted) = (run(decoder(replace(member, **blocks, phases=phases), layers=4)) for phases in (True, False))
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12 * gradient.abs().max().item(), msg=name)


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("precision", ["float32", "bf16 over a float32 memory", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        AttnResConfig(block=3),
        AttnResConfig(num_blocks=3, rank=5, key_norm="full"),
        AttnResConfig(layers_per_block=2, roles="decoupled"),
        AttnResConfig(block=3, rank=5, keys="projected", roles="average"),
    ],
    ids=["block", "low-rank", "decoupled", "projected"],
)
def test_with_rounding_they_are_as_near_to_the_truth(decoder: Make, run: Run, config: AttnResConfig, precision: str) -> None:
    """Routes are soft here: sharp ones turn a rounding into another route."""

    def soft(phases: bool, **fields: Any) -> Decoder:
        model = decoder(replace(config, phases=phases), layers=4, **fields)
        with torch.no_grad():
            for name, parameter in model.residual.named_parameters():
                parameter.mul_(0.2 if name.endswith("query") else 1)
        return model

    truth, truths = run(soft(False))
    errors: dict[bool, tuple[float, float]] = {}
    for phases in (True, False):
        model = soft(phases, dtype=torch.float32, memory_dtype="compute" if precision == "bf16" else "parameter")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "float32"):
            logits, gradients = run(model)
        whole, expected = (torch.cat([of[name].flatten() for name in truths]) for of in (gradients, truths))
        errors[phases] = distance(logits, truth), distance(whole, expected)
    largest = 2e-6 if precision == "float32" else 3e-2
    assert max(errors[True][0], errors[False][0]) < largest
    assert errors[True][0] < 1.5 * errors[False][0] and errors[True][1] < 1.5 * errors[False][1]


@EVERY_BLOCK
def test_weights_of_the_sources_are_the_same(decoder: Make, watch: Watch, tokens: Tensor, blocks: dict[str, int]) -> None:
    models = [decoder(AttnResConfig(roles="decoupled", phases=phases, **blocks), layers=4) for phases in (True, False)]
    seen, expected = (watch(model, tokens[:, :-1]) for model in models)
    for site in range(9):
        found, wanted = (model.residual.source_weights(memory[site], site) for model, memory in zip(models, (seen, expected), strict=True))
        assert found.keys() == wanted.keys()
        for role, weights in wanted.items():
            torch.testing.assert_close(found[role], weights, rtol=1e-12, atol=1e-12)


@EVERY_MEMBER
def test_weights_of_one_setting_serve_the_other(decoder: Make, tokens: Tensor, member: AttnResConfig) -> None:
    """The same parameters with the same initial values, and as many."""
    with_phases, without = (decoder(replace(member, block=3, phases=phases), scattered=False, layers=4) for phases in (True, False))
    ours, theirs = with_phases.state_dict(), without.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert with_phases.parameter_counts() == without.parameter_counts()


# (sources, queries, whether they merge an earlier read) of each call, in order, for 8 sub-layers
DIRECT, AHEAD, MERGE = False, False, True
CALLS: list[tuple[AttnResConfig, list[tuple[int, int, bool]]]] = [
    (
        AttnResConfig(block=3),
        [
            (1, 1, DIRECT), (2, 1, DIRECT), (2, 1, DIRECT), (2, 2, AHEAD),  # the first block reads the embedding with its sum
            (2, 1, DIRECT), (1, 1, MERGE), (1, 1, MERGE), (3, 1, AHEAD),
            (3, 1, DIRECT), (1, 1, MERGE),  # the last block is short
            (4, 1, DIRECT),
        ],
    ),
    (
        AttnResConfig(layers_per_block=2, roles="decoupled"),
        [
            (1, 1, DIRECT), (2, 1, DIRECT), (2, 2, DIRECT), (2, 1, DIRECT), (2, 4, AHEAD),  # for MLP, attention (two roles), MLP
            (2, 2, DIRECT), (1, 1, MERGE), (1, 2, MERGE), (1, 1, MERGE),
            (3, 1, DIRECT),
        ],
    ),
    (AttnResConfig(), [(site + 1, 1, DIRECT) for site in range(9)]),
    (AttnResConfig(block=8), [(1, 1, DIRECT), *[(2, 1, DIRECT)] * 8]),
    (
        AttnResConfig(num_blocks=5),  # ends at 2, 4, 5, 7 and 8
        [
            (1, 1, DIRECT), (2, 1, DIRECT), (2, 1, AHEAD),
            (2, 1, DIRECT), (1, 1, MERGE),
            (3, 1, DIRECT),  # a block of one sub-layer: nobody to read ahead for
            (4, 1, AHEAD), (4, 1, DIRECT), (1, 1, MERGE),
            (5, 1, DIRECT), (6, 1, DIRECT),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), CALLS, ids=["block", "decoupled", "full", "one block", "blocks of one and two"])
@pytest.mark.parametrize("phases", [True, False])
def test_what_each_call_reads(
    decoder: Make,
    tokens: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    config: AttnResConfig,
    expected: list[tuple[int, int, bool]],
    phases: bool,
) -> None:
    """A closed block is read by one call a block, and by the block's first site, which has nothing to merge with it."""
    calls: list[tuple[int, int, bool]] = []
    original: Any = attnres.depth_attention

    def spy(sources: Any, query: Tensor, **options: Any) -> Any:
        calls.append((len(sources), 1 if query.ndim == 1 else len(query), options.get("prior") is not None))
        return original(sources, query, **options)

    model = decoder(replace(config, phases=phases), layers=4)
    monkeypatch.setattr(attnres, "depth_attention", spy)
    model(tokens[:, :-1])
    if phases:
        assert calls == expected
        return
    ends = model.residual.ends
    closed = [sum(end <= site for end in ends) for site in range(9)]
    assert [sources for sources, _, _ in calls] == [1 + number + (site not in (0, *ends)) for site, number in enumerate(closed)]
    assert not any(merges for _, _, merges in calls)


@EVERY_BLOCK
@pytest.mark.parametrize("roles", ["shared", "decoupled"])
def test_the_memory_carries_what_sites_to_come_will_merge(
    decoder: Make, watch: Watch, tokens: Tensor, blocks: dict[str, int], roles: Any
) -> None:
    model = decoder(AttnResConfig(roles=roles, **blocks), layers=4)
    ends = (0, *block_ends(8, **blocks))
    for site, memory in watch(model, tokens[:, :-1]).items():
        start, end = max(e for e in ends if e <= site), min((e for e in ends if e > site), default=site)
        to_come = range(max(site, start + 1), end) if start else range(0)  # the first block reads the embedding itself
        assert len(memory.ahead) == len(to_come)
        for number, (queries, reads) in zip(to_come, memory.ahead, strict=True):
            parameters = model.residual.sites[str(number)]
            own = [parameters.query] if parameters.value_query is None else [parameters.query, parameters.value_query]
            torch.testing.assert_close(queries, torch.stack(own) * parameters.key_gain, rtol=1e-14, atol=0)
            assert len(reads) == len(own) and all(read.output.shape == memory.closed[0].shape for read in reads)


@pytest.mark.parametrize("blocks", [{}, {"block": 1}, {"block": 2}], ids=str)
@pytest.mark.parametrize("roles", ["shared", "decoupled", "average"])
def test_the_smallest_network_and_the_shortest_sequence(decoder: Make, tokens: Tensor, blocks: dict[str, int], roles: Any) -> None:
    models = [decoder(AttnResConfig(roles=roles, phases=phases, **blocks), layers=1) for phases in (True, False)]
    for x in (tokens[:, :-1], tokens[:1, :1]):
        found, expected = (model.logits(x) for model in models)
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_few_closed_sources_are_not_read_ahead(decoder: Make, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default phase 1 begins with three closed sources; fewer are read again faster than they are merged."""
    monkeypatch.undo()
    assert attnres.READ_AHEAD_FROM == 3
    ahead: list[int] = []
    original: Any = attnres.depth_attention

    def spy(sources: Any, query: Tensor, **options: Any) -> Any:
        if options.get("return_statistics"):
            ahead.append(len(sources))
        return original(sources, query, **options)

    monkeypatch.setattr(attnres, "depth_attention", spy)
    decoder(AttnResConfig(block=2), layers=5)(tokens[:, :-1])
    assert ahead == [3, 4, 5]  # two closed sources after the first block, then one more with each
