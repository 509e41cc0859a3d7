"""Checkpoints that several ranks write: the same bits on any number of ranks, whole or not there, whatever is killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from depthroute.common.errors import DepthrouteError, FailureError
from depthroute.common.files import read_json
from depthroute.train import checkpoint as plain
from depthroute.train import sharded
from depthroute.train.optimiser import Optimiser
from tests.parallel.world import World

SHAPES = {
    "a.weight": (7, 5), "b.weight": (5, 3), "c.bias": (3,), "d.gain": (1,), "e.count": (), "a.weight.exp_avg": (7, 5),
    "b.weight.exp_avg": (5, 3), "c.bias.exp_avg": (3,), "a.weight.step": (), "d.gain.exp_avg": (1,),
}  # fmt: skip
MODEL = ("a.weight", "b.weight", "c.bias", "d.gain", "e.count")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def values(step: int, dtype: str) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=source, dtype=DTYPES[dtype]) for name, shape in SHAPES.items()}


def placed(whole: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """What this rank holds of `whole`: a copy, in a layout for however many ranks there are."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    whole = {name: tensor.clone() for name, tensor in whole.items()}
    if layout == "plain":
        return whole
    if layout == "stages":
        return {name: tensor for number, (name, tensor) in enumerate(whole.items()) if number % ranks == rank}
    if layout == "mixed":  # rows, columns, replicated, plain everywhere, and on one rank alone
        mesh = init_device_mesh("cpu", (ranks,))
        kinds = {name: (Shard(0), Shard(min(1, tensor.ndim - 1)), Replicate())[i % 3] for i, (name, tensor) in enumerate(whole.items())}
        found = {name: tensor if name == "d.gain" else on(mesh, tensor, kinds[name]) for name, tensor in whole.items()}
        return {name: tensor for name, tensor in found.items() if name != "d.gain" or rank == ranks - 1}
    if layout in ("rows", "columns"):
        mesh = init_device_mesh("cpu", (ranks,))
        dimension = 1 if layout == "columns" else 0
        return {name: on(mesh, tensor, Shard(min(dimension, max(tensor.ndim - 1, 0)))) for name, tensor in whole.items()}
    if layout == "copies":  # plain ones, and DTensors that are whole everywhere
        mesh = init_device_mesh("cpu", (ranks,))
        return {name: on(mesh, tensor, Replicate()) if i % 2 else tensor for i, (name, tensor) in enumerate(whole.items())}
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    first = Replicate() if layout == "hybrid" else Shard(0)
    return {name: on(mesh, tensor, first, Shard(tensor.ndim - 1)) for name, tensor in whole.items()}


def on(mesh: DeviceMesh, tensor: Tensor, *placements: Any) -> Tensor:
    return distribute_tensor(tensor, mesh, placements) if tensor.ndim else tensor


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def names_in(checkpoint: Path) -> set[str]:
    return set(plain.shapes(checkpoint, plain.read_state(checkpoint)))


def write(run: Path, step: int, layout: str, dtype: str = "float64", keep: tuple[int, ...] = ()) -> list[str]:
    tensors = placed(values(step, dtype), layout)
    sharded.save(run, step, tensors, {"tokens": 5 * step}, model=[name for name in tensors if name in MODEL], keep=keep).wait()
    distributed.barrier()
    return sorted(path.name for path in plain.folder(run, step).iterdir()) if plain.folder(run, step).exists() else []


def read_back(checkpoint: Path, layout: str, dtype: str = "float64") -> int:
    wanted = values(read_json(checkpoint / "state.json")["step"], dtype)
    tensors = placed({name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}, layout)
    state = sharded.load(checkpoint, lambda _: tensors)
    for name, tensor in tensors.items():
        assert torch.equal(full(tensor), wanted[name]), name
    assert state["tokens"] == 5 * state["step"]
    return len(tensors)


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    """How this rank is refused."""
    try:
        function(*arguments)
    except DepthrouteError as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


@pytest.mark.parametrize(
    ("ranks", "layout", "dtype"),
    [
        (2, "rows", "float32"), (2, "mixed", "float64"), (2, "hybrid", "float32"), (3, "stages", "float64"), (4, "grid", "float64"),
        (4, "hybrid", "float64"), (1, "plain", "float32"), (3, "columns", "float64"),
    ],
)
def test_what_is_written_on_some_ranks_comes_back_on_any_number_bit_for_bit(
    tmp_path: Path, world: World, ranks: int, layout: str, dtype: str
) -> None:
    files = world.run(ranks, write, tmp_path, 3, layout, dtype)[0]
    assert files[-1] == "state.json" and all(name.endswith(".safetensors") for name in files[:-1])
    found = plain.folder(tmp_path, 3)
    for others, other in ((1, "plain"), (2, "mixed"), (3, "rows"), (3, "stages"), (4, "grid"), (4, "hybrid"), (2, "columns")):
        assert sum(world.run(others, read_back, found, other, dtype)) >= len(SHAPES)
    assert names_in(found) == set(SHAPES)
    alone = {name: torch.full_like(tensor, torch.nan) for name, tensor in values(3, dtype).items()}
    assert sharded.load(found, lambda _: alone)["step"] == 3  # without a process group
    assert all(torch.equal(alone[name], tensor) for name, tensor in values(3, dtype).items())


def test_nothing_that_is_written_is_a_pickle(tmp_path: Path, world: World) -> None:
    world.run(2, write, tmp_path, 1, "mixed")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError)):
            pickle.loads(path.read_bytes())
        assert path.suffix in (".safetensors", ".json")
        if path.suffix == ".safetensors":
            load_file(path)


def parts(layout: str) -> tuple[int, int]:
    """Elements this rank holds, and those that DCP would write of them if none were on two ranks."""
    tensors = placed(values(1, "float64"), layout)
    return sum(full(tensor).numel() for tensor in tensors.values()), sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors.values()
    )


@pytest.mark.parametrize(("ranks", "layout"), [(2, "plain"), (4, "hybrid"), (3, "mixed")])
def test_what_several_ranks_hold_is_written_once(tmp_path: Path, world: World, ranks: int, layout: str) -> None:
    world.run(ranks, write, tmp_path, 1, layout)
    shards = [load_file(path) for path in plain.folder(tmp_path, 1).glob("*.safetensors")]
    written = sum(tensor.numel() for shard in shards for tensor in shard.values())
    assert written == sum(tensor.numel() for tensor in values(1, "float64").values())
    assert sum(held for _, held in world.run(ranks, parts, layout)) > written


def staged(run: Path, layout: str) -> dict[str, int]:
    """The tensors that this rank copies for a checkpoint, and how many elements of each."""
    found: dict[str, int] = {}
    real = sharded.async_save

    def noted(tensors: dict[str, Tensor], **options: Any) -> Any:
        found.update({name: (part.to_local() if isinstance(part, DTensor) else part).numel() for name, part in tensors.items()})
        return real(tensors, **options)

    sharded.async_save = noted
    try:
        write(run, 1, layout)
    finally:
        sharded.async_save = real
    return found


@pytest.mark.parametrize(("ranks", "layout", "most"), [(2, "plain", 55), (3, "copies", 38), (4, "hybrid", 34), (4, "copies", 35)])
def test_of_what_several_ranks_hold_each_copies_its_share_alone(
    tmp_path: Path, world: World, ranks: int, layout: str, most: int
) -> None:
    found = world.run(ranks, staged, tmp_path, layout)
    assert sum(sum(part.values()) for part in found) == sum(tensor.numel() for tensor in values(1, "float64").values())
    assert max(sum(part.values()) for part in found) <= most
    assert set().union(*found) == set(SHAPES)
    for others, other in ((1, "plain"), (2, "mixed"), (3, "copies")):
        world.run(others, read_back, plain.folder(tmp_path, 1), other)


def write_one_tensor(run: Path) -> list[str]:
    sharded.save(run, 1, {"a": torch.ones(2)}, {}, model=["a"]).wait()
    distributed.barrier()
    return list(plain.read_state(plain.folder(run, 1))["files"])


def test_a_rank_without_a_share_writes_no_file(tmp_path: Path, world: World) -> None:
    assert [len(files) for files in world.run(3, write_one_tensor, tmp_path)] == [1, 1, 1]
    plain.verify(plain.folder(tmp_path, 1))


def save_with_a_late_listing(run: Path) -> list[str]:
    """As on a file system over the network, where the first rank does not see yet what the others have made; what this rank hashed."""
    real, recorded, hashed = Path.glob, plain.recorded, list[str]()

    def noted(file: Path) -> plain.File:
        hashed.append(file.name)
        return recorded(file)

    def late(path: Path, pattern: str) -> Any:
        return (found for found in real(path, pattern) if "shard-00002" not in found.name)

    if distributed.get_rank() == 0:
        Path.glob = late  # type: ignore[method-assign,assignment]
    plain.recorded = noted
    try:
        write(run, 1, "rows")
    finally:
        Path.glob, plain.recorded = real, recorded  # type: ignore[method-assign]
    return hashed


def test_the_state_names_the_shards_that_the_ranks_wrote_whatever_the_first_one_sees(tmp_path: Path, world: World) -> None:
    hashed = world.run(2, save_with_a_late_listing, tmp_path)
    found = plain.folder(tmp_path, 1)
    assert [[f"shard-0000{rank + 1}-" in name for name in names] for rank, names in enumerate(hashed)] == [[True], [True]]
    assert sorted(plain.verify(found)["files"]) == sorted(path.name for path in found.glob("*.safetensors"))
    world.run(2, read_back, found, "columns")


def save_and_lose(run: Path, what: str) -> str:
    """The second rank's shard cannot be hashed, or is gone or cut behind its hash."""
    real = plain.recorded

    def losing(file: Path) -> plain.File:
        if what == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if what == "broken":
            raise ValueError("no hash today")
        found = real(file)
        if what == "cut":
            os.truncate(file, 10)
        else:
            file.unlink()
        return found

    if distributed.get_rank() == 1:
        plain.recorded = losing
    try:
        return refusal(write_two, run)
    finally:
        plain.recorded = real


@pytest.mark.parametrize(
    ("what", "words", "both"),
    [
        ("full", "the disk is full while writing", True), ("broken", "ValueError on rank 1: no hash today", True),
        ("gone", "-00001.safetensors is not there for the first rank", False), ("cut", "has 10 bytes for the first rank", False),
    ],
)  # fmt: skip
def test_a_shard_that_is_lost_on_one_rank_fails_the_checkpoint(tmp_path: Path, world: World, what: str, words: str, both: bool) -> None:
    world.run(2, write, tmp_path, 1, "rows")
    found = world.run(2, save_and_lose, tmp_path, what)
    assert [text.startswith("FailureError") and words in text and "step-00000002" in text for text in found] == [True, both], found
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    world.run(2, read_back, plain.folder(tmp_path, 1), "rows")


def test_older_checkpoints_go_and_kept_ones_stay(tmp_path: Path, world: World) -> None:
    for step in (1, 2, 3):
        world.run(2, write, tmp_path, step, "rows", "float64", (1,))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000003"]


def save_and_change(run: Path) -> None:
    """Nothing is written before every tensor has changed and the ranks have talked over their own group."""
    changed = threading.Event()
    real = safetensors.torch.save

    def late(*arguments: Any, **options: Any) -> bytes:
        assert changed.wait(60)
        return real(*arguments, **options)

    safetensors.torch.save = late
    try:
        tensors = placed(values(1, "float64"), "mixed")
        saving = sharded.save(run, 1, tensors, {"tokens": 5}, model=MODEL)
        for tensor in tensors.values():
            tensor.zero_()
        for _ in range(20):
            distributed.all_reduce(torch.ones(3))
        assert not saving.done() and plain.latest(run) is None
        changed.set()
        saving.wait()
        assert saving.done()
    finally:
        safetensors.torch.save = real


def test_what_changes_after_saving_does_not_reach_the_files(tmp_path: Path, world: World) -> None:
    world.run(2, save_and_change, tmp_path)
    world.run(2, read_back, plain.folder(tmp_path, 1), "rows")


def save_with_a_late_rank(run: Path) -> bool:
    real = safetensors.torch.save

    def late(*arguments: Any, **options: Any) -> bytes:
        time.sleep(0.7)
        return real(*arguments, **options)

    if distributed.get_rank() == 1:
        safetensors.torch.save = late
    try:
        tensors = placed(values(1, "float64"), "rows")
        saving = sharded.save(run, 1, tensors, {"tokens": 5}, model=MODEL)
        time.sleep(0.3)
        early = saving.done() or plain.latest(run) is not None
        saving.wait()
        return early
    finally:
        safetensors.torch.save = real


def test_the_first_rank_waits_for_the_shards_of_all(tmp_path: Path, world: World) -> None:
    assert world.run(2, save_with_a_late_rank, tmp_path) == [False, False]
    plain.verify(plain.folder(tmp_path, 1))


def save_on_a_full_disk(run: Path, rank: int, call: int, code: int) -> str:
    real, calls = os.fsync, 0

    def refuse(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(code, os.strerror(code))
        real(handle)

    if distributed.get_rank() == rank:
        os.fsync = refuse
    try:
        return refusal(write_two, run)
    finally:
        os.fsync = real


def write_two(run: Path) -> None:
    tensors = placed(values(2, "float64"), "rows")
    sharded.save(run, 2, tensors, {"tokens": 10}, model=MODEL).wait()


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "the disk is full while writing"), (errno.EACCES, "no permission while writing")]
)
def test_a_disk_that_refuses_one_rank_is_explained_on_all_and_leaves_the_checkpoint_before(
    tmp_path: Path, world: World, code: int, words: str
) -> None:
    world.run(2, write, tmp_path, 1, "rows")
    for rank, call, both in ((1, 1, True), (0, 1, True), (0, 3, False)):
        found = world.run(2, save_on_a_full_disk, tmp_path, rank, call, code)
        assert [words in text and "step-00000002" in text for text in found] == [True, both]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    world.run(2, read_back, plain.folder(tmp_path, 1), "rows")


def save_twice(run: Path) -> str:
    return refusal(write, run, 1, "rows")


def test_a_step_that_has_a_checkpoint_is_refused_on_every_rank(tmp_path: Path, world: World) -> None:
    world.run(2, write, tmp_path, 1, "rows")
    found = world.run(2, save_twice, tmp_path)
    assert all(text.startswith("RequestError") and "is there already" in text for text in found)


def load_what_does_not_fit(checkpoint: Path, change: str) -> str:
    tensors = placed(values(1, "float64"), "stages")
    if change == "more" and distributed.get_rank() == 1:
        tensors["z.weight"] = torch.zeros(2)
    if change == "less":
        tensors.pop("b.weight", None)
    if change == "other" and "c.bias" in tensors:
        tensors["c.bias"] = torch.zeros(4)
    return refusal(sharded.load, checkpoint, lambda _: tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("more", "the run has 'z.weight', which it does not"),
        ("less", "it has 'b.weight', which the run does not"),
        ("other", r"'c.bias' is [3] there and [4] in the run"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_on_every_rank(tmp_path: Path, world: World, change: str, words: str) -> None:
    world.run(2, write, tmp_path, 1, "rows")
    found = world.run(3, load_what_does_not_fit, plain.folder(tmp_path, 1), change)
    assert all(text.startswith("FailureError") and "step-00000001" in text and words in text for text in found), found


def load_damaged(checkpoint: Path) -> str:
    def unread(names: set[str]) -> dict[str, Tensor]:
        raise AssertionError(f"{len(names)} names were read from files that nobody has verified")

    return refusal(sharded.load, checkpoint, unread)


def load_for_another_optimiser(checkpoint: Path) -> str:
    tensors = placed(values(1, "float64"), "stages")

    def make(names: set[str]) -> dict[str, Tensor]:
        assert names == set(SHAPES)
        if distributed.get_rank() == 1:
            raise KeyError("c.bias.exp_avg")
        return tensors

    return refusal(sharded.load, checkpoint, make)


def test_state_that_the_optimiser_of_one_rank_does_not_keep_is_refused_by_name_on_every_rank(tmp_path: Path, world: World) -> None:
    world.run(2, write, tmp_path, 1, "rows")
    found = world.run(3, load_for_another_optimiser, plain.folder(tmp_path, 1))
    words = "step-00000001 cannot be used: it has 'c.bias.exp_avg', which the optimiser of this run does not. Delete that folder"
    assert all(text.startswith("FailureError") and words in text for text in found), found


@pytest.mark.parametrize(("damage", "sentence"), [("truncated", "has "), ("altered", "is not what was written"), ("missing", "is missing")])
def test_a_damaged_shard_is_named_on_every_rank(tmp_path: Path, world: World, damage: str, sentence: str) -> None:
    names = world.run(2, write, tmp_path, 1, "rows")[0]
    found = plain.folder(tmp_path, 1)
    file = found / names[1]
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if damage == "truncated" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    for text in world.run(2, load_damaged, found):
        assert text.startswith("FailureError") and f"{names[1]} {sentence}" in text
        assert "Delete that folder to start this run again" in text
    with pytest.raises(FailureError, match=names[1]):
        plain.verify(found)
    with pytest.raises(FailureError, match=names[1]):
        sharded.consolidate(found)
    assert not (found / plain.MODEL).exists() and file.exists() == (damage != "missing")


def test_a_file_that_the_state_does_not_name_is_not_read(tmp_path: Path, world: World) -> None:
    world.run(2, write, tmp_path, 1, "rows")
    found = plain.folder(tmp_path, 1)
    safetensors.torch.save_file({"a.weight": torch.zeros(7, 5), "stranger": torch.zeros(1)}, found / "other.safetensors")
    assert names_in(found) == set(SHAPES)
    world.run(2, read_back, found, "columns")


def body() -> tuple[nn.Module, Optimiser]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    optimiser = Optimiser(torch.optim.AdamW(model.parameters()))
    model(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
    optimiser.step()
    return model, optimiser


def everything(model: nn.Module, optimiser: Optimiser) -> dict[str, Tensor]:
    return plain.model_tensors(model) | optimiser.state_tensors(model.named_parameters())


def load_body(checkpoint: Path) -> None:
    wanted = everything(*body())
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    tensors = {name: on(mesh, torch.full_like(tensor, torch.nan), Shard(0)) for name, tensor in wanted.items()}
    assert sharded.load(checkpoint, lambda _: tensors)["tokens"] == 7
    assert all(torch.equal(full(tensors[name]), tensor) for name, tensor in wanted.items())


def write_body(run: Path) -> None:
    model, optimiser = body()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    tensors = {name: on(mesh, tensor, Shard(tensor.ndim - 1)) for name, tensor in everything(model, optimiser).items()}
    sharded.save(run, 4, tensors, {"tokens": 7}, model=plain.model_tensors(model)).wait()


def test_a_plain_checkpoint_loads_onto_ranks(tmp_path: Path, world: World) -> None:
    model, optimiser = body()
    found = plain.save(tmp_path, 4, model, optimiser, {"tokens": 7})
    assert names_in(found) == everything(model, optimiser).keys()
    for ranks in (1, 2, 3):
        world.run(ranks, load_body, found)


def test_shards_make_the_files_of_a_plain_checkpoint(tmp_path: Path, world: World) -> None:
    model, optimiser = body()
    whole = plain.save(tmp_path / "whole", 4, model, optimiser, {"tokens": 7})
    world.run(2, write_body, tmp_path / "run")
    found = plain.folder(tmp_path / "run", 4)
    other, other_optimiser = body()
    with torch.no_grad():
        for tensor in everything(other, other_optimiser).values():
            tensor.fill_(torch.nan)
    assert plain.load(found, other, other_optimiser)["tokens"] == 7  # in one process, from the shards
    assert all(torch.equal(value, everything(model, optimiser)[name]) for name, value in everything(other, other_optimiser).items())
    assert plain.model_sha256(found) == plain.model_sha256(whole)
    assert sharded.consolidate(found) and not sharded.consolidate(found)
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in whole.iterdir())
    for path in whole.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name
    world.run(2, load_body, found)


def killed(moment: int) -> None:
    """This process dies at the `moment`-th of the calls that make a checkpoint."""
    calls = 0

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for owner, names in ((os, ("fsync", "rename", "replace", "unlink")), (shutil, ("rmtree",)), (safetensors.torch, ("save",))):
        for name in names:
            setattr(owner, name, before(getattr(owner, name)))
    plain.save_file = before(plain.save_file)


def killed_save(rank: int, victim: int, moment: int, run: Path, meeting: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    if rank == victim:
        killed(moment)
    write(run, 2, "mixed")
    distributed.destroy_process_group()


def killed_gather(checkpoint: Path, moment: int) -> None:
    killed(moment)
    sharded.consolidate(checkpoint)


@pytest.fixture
def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["depthroute.train.sharded"])
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_at_any_moment_of_saving_leaves_a_checkpoint_and_its_garbage_goes(
    tmp_path: Path, world: World, context: Any, victim: int
) -> None:
    world.run(2, write, tmp_path / "first", 1, "mixed")
    steps, moment = [], 0
    while not steps or steps[-1] is not None:
        moment += 1
        run = tmp_path / str(moment)
        shutil.copytree(tmp_path / "first", run)
        ranks = [context.Process(target=killed_save, args=(rank, victim, moment, run, f"{run}.meeting")) for rank in range(2)]
        for process in ranks:
            process.start()
        ranks[victim].join(60)
        if ranks[victim].exitcode == 0:
            ranks[1 - victim].join(60)
        for process in ranks:
            process.kill()
            process.join()
        found = plain.latest(run)
        assert found is not None
        steps.append(plain.verify(found)["step"] if ranks[victim].exitcode == -signal.SIGKILL else None)
        world.run(1, read_back, found, "plain")
        world.run(2, write, run, 3, "rows")
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert ranks[victim].exitcode == 0
    if victim == 0:  # killed before and after the rename
        assert len(steps) > 8 and {1, 2} <= set(steps)
    else:
        assert len(steps) > 2 and set(steps[:-1]) == {1}


def test_a_kill_at_any_moment_of_gathering_leaves_one_form_or_the_other(tmp_path: Path, world: World, context: Any) -> None:
    world.run(2, write, tmp_path / "first", 1, "mixed")
    forms, moment = [], 0
    while not forms or forms[-1] is not None:
        moment += 1
        run = tmp_path / str(moment)
        shutil.copytree(tmp_path / "first", run)
        found = plain.folder(run, 1)
        process = context.Process(target=killed_gather, args=(found, moment))
        process.start()
        process.join(60)
        forms.append(plain.is_sharded(plain.verify(found)) if process.exitcode == -signal.SIGKILL else None)
        world.run(2, read_back, found, "rows")
        assert sharded.consolidate(found) == (forms[-1] is True)
        assert sorted(path.name for path in found.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
        assert load_file(found / plain.MODEL).keys() == set(MODEL)
        world.run(1, read_back, found, "plain")
    assert process.exitcode == 0 and len(forms) > 6 and {True, False} <= set(forms)


def two_dimensional(rows: int, columns: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A linear map split over two ranks by tensor parallelism and over the rest by FSDP: what it holds, and the whole of it."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows), nn.Linear(rows, columns)).double()
    whole = {name: tensor.clone() for name, tensor in plain.model_tensors(model).items()}
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return plain.model_tensors(model), whole


def write_two_dimensional(run: Path) -> None:
    tensors, _ = two_dimensional(12, 5)
    sharded.save(run, 1, tensors, {}, model=tensors).wait()


def read_two_dimensional(checkpoint: Path) -> None:
    tensors, whole = two_dimensional(12, 5)
    for tensor in tensors.values():
        tensor.zero_()
    sharded.load(checkpoint, lambda _: tensors)
    assert all(torch.equal(full(tensors[name]), tensor) for name, tensor in whole.items())


def test_fsdp_over_tensor_parallelism_comes_back(tmp_path: Path, world: World) -> None:
    """Both split the same dimension of one of the matrices."""
    world.run(4, write_two_dimensional, tmp_path)
    found = plain.folder(tmp_path, 1)
    world.run(4, read_two_dimensional, found)
    world.run(2, read_two_dimensional, found)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Linear(12, 5)).double()
    there = plain.read_model(found, plain.read_state(found))
    assert all(torch.equal(tensor, there[name]) for name, tensor in plain.model_tensors(model).items())


def stage_of(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two pipeline stages of two ranks each, every stage sharded on a mesh of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = mesh.get_local_rank("stage")
    return {name: on(mesh["data"], tensor, Shard(0)) for i, (name, tensor) in enumerate(whole.items()) if i % 2 == stage}


def write_stages(run: Path) -> None:
    tensors = stage_of(values(1, "float64"))
    sharded.save(run, 1, tensors, {"tokens": 5}, model=[name for name in tensors if name in MODEL]).wait()


def read_stages(checkpoint: Path) -> None:
    wanted = values(1, "float64")
    tensors = stage_of({name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()})
    sharded.load(checkpoint, lambda _: tensors)
    assert all(torch.equal(full(tensor), wanted[name]) for name, tensor in tensors.items())


def test_sharded_stages_come_back(tmp_path: Path, world: World) -> None:
    world.run(4, write_stages, tmp_path)
    found = plain.folder(tmp_path, 1)
    assert sorted(plain.read_state(found)["model"]) == sorted(MODEL)
    world.run(4, read_stages, found)
    world.run(2, read_back, found, "columns")
