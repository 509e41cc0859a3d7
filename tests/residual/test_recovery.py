"""Members of the family that must coincide: with the plain residual stream, with their parents, with each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, PreNormConfig

Make = Callable[..., Decoder]
Run = Callable[[Decoder], tuple[Tensor, dict[str, Tensor]]]

TINY = 1e-30  # the mean of the sources is the stream divided by their number, which only a norm without epsilon removes
SUBLAYERS, WIDTH = 6, 12

BLOCKS = {
    "full": {},
    **{f"block={size}": {"block": size} for size in range(1, SUBLAYERS + 1)},
    **{f"layers_per_block={size}": {"layers_per_block": size} for size in range(1, SUBLAYERS // 2 + 1)},
    **{f"num_blocks={count}": {"num_blocks": count} for count in range(1, SUBLAYERS + 3)},
}
MEMBERS = {
    "plain": AttnResConfig(),
    "no gain": AttnResConfig(key_gain=False),
    "slice": AttnResConfig(rank=5, key_gain=False),
    "full norm": AttnResConfig(rank=5, key_norm="full"),
    "projected": AttnResConfig(rank=5, keys="projected"),
    "first read": AttnResConfig(first_read=True),
    **{roles: AttnResConfig(roles=roles) for roles in ("decoupled", "tied", "average", "frozen_value")},
    "decoupled low-rank": AttnResConfig(roles="decoupled", rank=4, key_norm="full", first_read=True),
    "decoupled projected": AttnResConfig(roles="decoupled", rank=4, keys="projected"),
}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance * gradient.abs().max().item(), msg=name)


@pytest.fixture(scope="module")
def plain(decoder: Make, run: Run) -> tuple[Tensor, dict[str, Tensor]]:
    return run(decoder(PreNormConfig(), norm_eps=TINY))


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
def test_zero_route_queries_are_the_plain_residual_stream(
    decoder: Make, run: Run, plain: tuple[Tensor, dict[str, Tensor]], member: AttnResConfig, blocks: dict[str, int]
) -> None:
    """Every read is the mean of sources that add up to the stream. Output and every gradient of the body are those of PreNorm."""
    logits, gradients = run(decoder(replace(member, **blocks), scattered=False, norm_eps=TINY))
    torch.testing.assert_close(logits, plain[0], rtol=1e-11, atol=1e-11)
    assert_same_gradients(gradients, plain[1], 1e-10)
    if member.roles != "shared":
        return
    queries = [gradient for name, gradient in gradients.items() if name.endswith(".query") and not name.endswith("sites.0.query")]
    assert all(gradient.norm() > 0 for gradient in queries)


KINDS = {
    "full": AttnResConfig(),
    "block": AttnResConfig(block=2),
    "role-decoupled": AttnResConfig(block=3, roles="decoupled"),
    "low-rank": AttnResConfig(block=2, rank=5, key_norm="full"),
    "projected": AttnResConfig(rank=5, keys="projected", roles="separate"),
    "multi-head": AttnResConfig(block=2, heads=3),
    "sigmoid": AttnResConfig(block=4, weighting="sigmoid"),
    "no key norm": AttnResConfig(key_norm="none"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_zero_route_queries_are_the_plain_residual_stream_of_every_body(
    decoder: Make, run: Run, body: dict[str, Any], kind: AttnResConfig
) -> None:
    """Of gated delta rules, latent attention and experts too: whatever normalises what it reads cannot tell a mean from a sum."""
    expected, plain = run(decoder(PreNormConfig(), norm_eps=TINY, **body))
    logits, gradients = run(decoder(kind, scattered=False, norm_eps=TINY, **body))
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    assert_same_gradients(gradients, plain, 1e-10)
    routes = [gradient for name, gradient in gradients.items() if name.endswith("query") and name.startswith("residual.")]
    assert len(routes) >= SUBLAYERS and all(gradient.norm() > 0 for gradient in routes)


def test_non_zero_route_queries_are_not(decoder: Make, run: Run, plain: tuple[Tensor, dict[str, Tensor]]) -> None:
    logits, _ = run(decoder(AttnResConfig(), norm_eps=TINY))
    assert (logits - plain[0]).abs().max() > 0.1


@pytest.mark.parametrize("other", [{"block": 1}, {"num_blocks": SUBLAYERS}, {"num_blocks": 50}], ids=str)
@pytest.mark.parametrize("roles", ["shared", "decoupled"])
def test_blocks_of_one_sub_layer_are_full_attnres(decoder: Make, run: Run, other: dict[str, int], roles: str) -> None:
    full, gradients = run(decoder(AttnResConfig(roles=roles)))
    blocked, blocked_gradients = run(decoder(AttnResConfig(roles=roles, **other)))
    assert torch.equal(blocked, full)
    for name, gradient in gradients.items():
        assert torch.equal(blocked_gradients[name], gradient), name


@pytest.mark.parametrize("member", [MEMBERS["plain"], MEMBERS["full norm"], MEMBERS["projected"], AttnResConfig(block=2)])
def test_tied_roles_are_the_parent_bit_for_bit(decoder: Make, tokens: Tensor, member: AttnResConfig) -> None:
    models = [decoder(replace(member, roles=roles), dtype=torch.float32) for roles in ("shared", "tied")]
    optimisers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for _ in range(3):
        for model, optimiser in zip(models, optimisers, strict=True):
            optimiser.zero_grad()
            model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
        parent, tied = ({name: p.grad for name, p in model.named_parameters()} for model in models)
        assert parent.keys() == tied.keys()
        assert all(torch.equal(parent[name], tied[name]) for name in parent)  # type: ignore[arg-type]
        for optimiser in optimisers:
            optimiser.step()
    assert torch.equal(models[0].logits(tokens[:, :-1]), models[1].logits(tokens[:, :-1]))


@pytest.mark.parametrize("roles", ["decoupled", "average"])
@pytest.mark.parametrize("blocks", [{}, {"block": 4}], ids=str)
def test_equal_route_queries_are_the_parent(decoder: Make, run: Run, roles: str, blocks: dict[str, int]) -> None:
    """Role-Decoupled AttnRes, Appendix B; and the mean of two equal mixtures is one of them."""
    parent, parent_gradients = run(decoder(AttnResConfig(**blocks)))
    model = decoder(AttnResConfig(roles=roles, **blocks))
    with torch.no_grad():
        for site in model.residual.sites.values():
            if site.value_query is not None:
                site.value_query.copy_(site.query)
    logits, gradients = run(model)
    torch.testing.assert_close(logits, parent, rtol=1e-12, atol=1e-12)
    body = {name: gradient for name, gradient in parent_gradients.items() if not name.endswith(".query")}
    assert_same_gradients(gradients, body, 1e-11)
    for name in (name for name in gradients if name.endswith("value_query")):  # the two halves of the parent's gradient
        both = gradients[name] + gradients[name.replace("value_query", "query")]
        torch.testing.assert_close(both, parent_gradients[name.replace("value_query", "query")], rtol=1e-9, atol=1e-9)


def test_different_route_queries_are_not_the_parent(decoder: Make, run: Run) -> None:
    parent, _ = run(decoder(AttnResConfig()))
    for roles in ("decoupled", "average", "frozen_value"):
        assert (run(decoder(AttnResConfig(roles=roles)))[0] - parent).abs().max() > 1e-2, roles


@pytest.mark.parametrize("key_norm", ["slice", "full"])
@pytest.mark.parametrize("roles", ["shared", "decoupled"])
def test_rank_equal_to_the_width_is_attnres(decoder: Make, run: Run, key_norm: str, roles: str) -> None:
    parent, gradients = run(decoder(AttnResConfig(block=2, roles=roles)))
    logits, low_rank = run(decoder(AttnResConfig(block=2, roles=roles, rank=WIDTH, key_norm=key_norm)))
    assert torch.equal(logits, parent)
    assert all(torch.equal(low_rank[name], gradients[name]) for name in gradients)


def test_slice_and_full_norm_differ_below_the_width(decoder: Make, run: Run) -> None:
    slice_norm, _ = run(decoder(AttnResConfig(rank=5, key_norm="slice")))
    full_norm, _ = run(decoder(AttnResConfig(rank=5, key_norm="full")))
    assert (slice_norm - full_norm).abs().max() > 1e-3


def test_the_first_reads_parameters_change_nothing(decoder: Make, run: Run) -> None:
    for roles in ("shared", "decoupled"):
        without, _ = run(decoder(AttnResConfig(roles=roles)))
        model = decoder(AttnResConfig(roles=roles, first_read=True))
        logits, gradients = run(model)
        torch.testing.assert_close(logits, without, rtol=1e-12, atol=1e-12)  # one norm is in the read, the other is not
        memory = model.residual.open(x := torch.randn(2, 3, WIDTH, dtype=torch.float64))
        assert all(torch.equal(read, x) for read in pytree.tree_leaves(model.residual.read(memory, 0)))
        first = {name: gradient for name, gradient in gradients.items() if name.startswith("residual.sites.0.")}
        assert {name.rpartition(".")[2] for name in first} == {"query", "key_gain", *(["value_query"] if roles == "decoupled" else [])}
        assert all(torch.count_nonzero(gradient) == 0 for gradient in first.values())
        assert all(gradient.count_nonzero() for name, gradient in gradients.items() if name.startswith("residual.sites.1."))
