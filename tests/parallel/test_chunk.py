"""What a pipeline keeps and sends: each source once a process, no longer than its micro-batch, and in the order of the formulas."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.parallel.chunk import Kept, chunk_decoder
from depthroute.parallel.cut import Cut, cut, layers_of_chunks, passages
from depthroute.parallel.layout import parse_layout
from depthroute.parallel.network import Network
from depthroute.parallel.world import meshes
from depthroute.residual import parse_residual
from depthroute.train import initialise
from tests.parallel.world import World


def shape(residual: str, **fields: Any) -> ModelConfig:
    given = {"vocabulary": 17, "width": 12, "layers": 8, "heads": 2, "mlp_width": 20, "context": 6} | fields
    return ModelConfig(**given, residual=parse_residual(residual))


def cut_of(config: ModelConfig, chunks: int) -> Cut:
    layers = layers_of_chunks(config, chunks)
    return cut(config, layers, rows=2, tokens=6, kind="cpu", dtype=torch.float32, precision=None)


def network(residual: str, layout: str, sequences: int, **fields: Any) -> Network:
    world = meshes(parse_layout(layout).fitted(distributed.get_world_size()), torch.device("cpu"))
    return Network(
        shape(residual, **fields), world, sequences=sequences, microbatch=1, precision=None, fill=lambda module: initialise(module, 0)
    )  # fmt: skip


def test_parameters_belong_to_the_chunks_that_use_them() -> None:
    config = shape("block:3", tied_embeddings=False)
    plan = cut_of(config, 4)
    every = {name for name, _ in Decoder(config).named_parameters()}
    assert set().union(*plan.parameters) == every and sum(map(len, plan.parameters)) == len(every)
    assert plan.shared() == {}
    for chunk, layers in enumerate(plan.layers):
        own = {name for name, _ in chunk_decoder(config, plan, chunk, torch.float32).named_parameters()}
        sites = {str(site) for site in range(2 * layers.start, 2 * layers.stop + (chunk == 3))}
        assert own == plan.parameters[chunk]
        assert {name.split(".")[2] for name in own if name.startswith("residual.sites.")} == sites - {"0"}


def test_a_tied_embedding_is_the_first_and_the_last_chunks() -> None:
    assert cut_of(shape("block:3"), 4).shared() == {"embedding.weight": (0, 3)}


def test_coefficients_that_are_made_where_the_block_is_written_belong_there() -> None:
    """Hyper-Connections compute those of a site when the sub-layer before it has written: on the other side of the cut."""
    plan = cut_of(shape("hc"), 4)
    first_of_second = 2 * plan.layers[1].start
    names = {name for name in plan.parameters[0] if f".{first_of_second}." in f"{name}."}
    assert names and not any(f".{first_of_second}." in f"{name}." for name in plan.parameters[1])


@pytest.mark.parametrize(("keeps", "expected"), [("none", [3, 5, 7]), ("received", [3, 4, 4]), ("all", [3, 2, 2])])
def test_what_two_processes_with_two_stages_send(keeps: Any, expected: list[int]) -> None:
    """Eight blocks on four chunks: the embedding and two blocks a chunk, of which a process lacks ever fewer."""
    assert [len(sent) for sent in passages(cut_of(shape("block:2"), 4), 2, keeps).sent] == expected


def test_what_left_the_window_is_not_kept() -> None:
    plan = cut_of(shape("window,window=4"), 4)
    found = passages(plan, 2, "all")
    for chunk in (0, 1):
        assert found.kept[chunk] <= set(plan.memories[chunk + 1].sources)


def keeps_and_lets_go() -> tuple[int, int]:
    steps, buffers = 3, []
    found = network("block:2", "pp,virtual=3,microbatch=1", 4, layers=6)
    assert found.pipeline is not None
    batch = torch.randint(17, (4, 7), generator=torch.Generator().manual_seed(0))
    sent = []
    for _ in range(steps):
        before = found.pipeline.wire.total
        found.accumulate(batch, 0.0)
        sent.append(found.pipeline.wire.total - before)
        for stage in found.pipeline.stages:
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            found_there = [getattr(info, "buffer", None) for several in infos for info in several]
            buffers += [buffer for buffer in found_there if buffer is not None and buffer.numel()]
        assert len(found.pipeline.kept) == 0
        forward, backward = found.pipeline.wire.forward, found.pipeline.wire.backward
        found.token_nll(batch[:, :-1], batch[:, 1:])
        assert found.pipeline.wire.forward > forward and found.pipeline.wire.backward == backward
        assert len(found.pipeline.kept) == 0
    assert not buffers, "a buffer is held beyond its micro-batch"
    assert len(set(sent)) == 1
    return sent[0], found.pipeline.kept.most


def test_sources_are_kept_for_their_micro_batch_alone(world: World) -> None:
    """Six blocks on six chunks and two processes, which send each source of a cut forward and its gradient back, for four micro-batches."""
    (first, most_first), (second, most_second) = world.run(2, keeps_and_lets_go)
    tensor = 6 * 12 * 4 * 2 * 4
    # chunk 0 sends the embedding and block 1; later cuts the block that was made before them and what it went past
    assert (first + second) / tensor == sum(len(sent) for sent in passages(cut_of(shape("block:2", layers=6), 6), 2, "all").sent)
    # of a micro-batch between chunks: the embedding and four blocks; four micro-batches are under way at most
    assert 5 <= most_first <= 4 * 5 and 5 <= most_second <= 4 * 5


def fills_few_buffers() -> int:
    """The most receive buffers that were there at once in two steps and an evaluation between them."""
    found = network("block:2", "pp,microbatch=1", 12)
    assert found.pipeline is not None
    stage, most = found.pipeline.stages[0], 0
    allot = stage._allot

    def counted(*given: Any) -> None:
        nonlocal most
        allot(*given)
        infos = [info for several in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()) for info in several]
        most = max(most, sum(getattr(info, "buffer", None) is not None and info.buffer.numel() > 0 for info in infos))

    stage._allot = counted  # type: ignore[method-assign]
    batch = torch.randint(17, (12, 7), generator=torch.Generator().manual_seed(0))
    found.accumulate(batch, 0.0)
    found.token_nll(batch[:, :-1], batch[:, 1:])
    found.accumulate(batch, 0.0)
    return most


def test_buffers_are_made_when_they_are_filled(world: World) -> None:
    """Of twelve micro-batches two are under way in a stage of two, with five sources each: the first step and one behind an evaluation,
    for which torch itself would make all of them, are no others."""
    assert max(world.run(2, fills_few_buffers)) <= 2 * 5


def test_a_kept_source_is_the_one_that_arrived() -> None:
    kept, arrived = Kept(), torch.zeros(3, requires_grad=True)
    kept.keep(0, 7, arrived)
    leaf = kept.leaf(0, 7)
    assert leaf.data_ptr() == arrived.data_ptr() and leaf.is_leaf and leaf is not arrived
    (leaf * 2).sum().backward()
    (leaf * 3).sum().backward()
    gradient = kept.give_back(0, 7)
    assert isinstance(gradient, Tensor) and gradient.tolist() == [5.0] * 3
    assert len(kept) == 0 and kept.most == 1 and arrived.grad is None


def refused() -> None:
    with pytest.raises(RequestError, match=r"need as many layers, and model\.layers = 3"):
        network("block:2", "pp,virtual=2", 4, layers=3)
    with pytest.raises(RequestError, match=r"train\.sequences = 3 does not divide"):
        network("block:2", "ddp", 3)
    with pytest.raises(RequestError, match=r"model\.heads = 3 cannot be shared"):
        network("block:2", "tp", 4, heads=3)
    with pytest.raises(RequestError, match="looks inside"):
        network("value-residual", "tp", 4)
    found = network("block:2", "pp", 4)
    with pytest.raises(RequestError, match=r"a batch of \[3, 7\] was given, and this share of the batch is \[4, 7\]"):
        found.accumulate(torch.zeros(3, 7, dtype=torch.long), 0.0)
    for given in ((5, 6), (4, 7)):
        tokens = torch.zeros(given, dtype=torch.long)
        with pytest.raises(RequestError, match="they have 6 tokens at most, and a pipeline takes 4 at once"):
            found.token_nll(tokens, tokens)
    attnres = type(shape("block:2").residual)  # a method with a buffer that nothing fills again
    real = attnres.module

    def with_buffer(self: Any, body: Any) -> Any:
        made = real(self, body)
        made.register_buffer("table", torch.ones(3))
        return made

    with mock.patch.object(attnres, "module", with_buffer), pytest.raises(RequestError, match="no reset_buffers"):
        network("block:2", "ddp", 4)


def test_what_does_not_fit_is_refused_before_any_work(world: World) -> None:
    world.run(2, refused)


def test_a_stage_reads_ahead_again_for_its_own_sites() -> None:
    """What was read ahead stays behind, and is read again for those sites of the open block that the stage has."""
    decoder = Decoder(shape("block:4", layers=12))
    tokens = torch.zeros(1, 6, dtype=torch.long)
    memory = decoder.run(decoder.residual.open(decoder.embedded(tokens)), range(9), decoder.sight(tokens))
    assert memory.partial is not None and len(memory.ahead) == 2  # of sites 18 and 19: the block ends with sub-layer 20
    handed = decoder.residual.hand_over(memory)
    assert handed.ahead == ()
    for stop, sites in ((25, 2), (19, 1)):
        decoder.residual.reads = range(18, stop)
        assert len(decoder.residual.take_over(handed, 18).ahead) == sites
