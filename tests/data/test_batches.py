from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthroute.common.errors import RequestError
from depthroute.data import BatchOrder, evaluation_windows

TOKENS = np.arange(1001, dtype=np.uint16)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 400), st.integers(1, 9), st.integers(1, 7), st.integers(0, 2**40))
def test_every_epoch_reads_every_window_once(number_of_tokens: int, context: int, sequences: int, seed: int) -> None:
    """Over three epochs, batches that cross their borders included."""
    windows = (number_of_tokens - 1) // context
    if windows < sequences:
        with pytest.raises(RequestError, match="less than a batch"):
            BatchOrder(number_of_tokens, context, sequences, seed)
        return
    order = BatchOrder(number_of_tokens, context, sequences, seed)
    steps = -(-3 * windows // sequences)
    stream = np.concatenate([order.windows(step) for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * windows : (epoch + 1) * windows]) == [window * context for window in range(windows)]


def test_a_step_depends_on_seed_and_step_alone() -> None:
    """Not on the steps asked for before: a resumed run, or one that looks ahead, sees the same batches."""
    forwards = [BatchOrder(1001, 10, 8, 3).windows(step).tolist() for step in range(60)]
    for step in (59, 0, 30, 12, 13):
        assert BatchOrder(1001, 10, 8, 3).windows(step).tolist() == forwards[step]
    code = "from depthroute.data import BatchOrder; print(BatchOrder(1001, 10, 8, 3).windows(25).tolist())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == str(forwards[25])


def test_the_order_does_not_change_between_versions() -> None:
    """Stored values: runs made before must be repeatable."""
    assert BatchOrder(1001, 10, 8, 3).windows(0).tolist() == GOLDEN_FIRST
    assert BatchOrder(1001, 10, 8, 3).windows(12).tolist() == GOLDEN_ACROSS_EPOCHS


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = [BatchOrder(1001, 10, 100, seed).windows(epoch).tolist() for seed in (0, 1, 2**32) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_a_batch_holds_inputs_and_their_targets() -> None:
    order = BatchOrder(1001, 10, 8, 3)
    batch = order.batch(TOKENS, 5)
    assert batch.dtype == np.int64 and batch.shape == (8, 11) and batch.flags.writeable and batch.flags.c_contiguous
    np.testing.assert_array_equal(batch[:, 0], order.windows(5))
    np.testing.assert_array_equal(batch[:, 1:], batch[:, :-1] + 1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_shares_of_ranks_make_up_the_batch(ranks: int) -> None:
    order, share = BatchOrder(1001, 10, 8, 3), 8 // ranks
    parts = [order.batch(TOKENS, 12, slice(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    np.testing.assert_array_equal(np.concatenate(parts), order.batch(TOKENS, 12))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((80, 10, 8, 0), "80 training tokens hold 7 whole windows of 10 tokens and one more, which is less than a batch of 8 sequences"),
        ((0, 10, 1, 0), "the 0 training tokens hold 0 whole windows"),
        ((100, 0, 1, 0), "context cannot be 0"),
        ((100, 1, 0, 0), "sequences cannot be 0"),
        ((100, 1, 1, -1), "seed cannot be -1"),
    ],
)
def test_wrong_requests_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BatchOrder(*arguments)
    assert BatchOrder(81, 10, 8, 0).windows_per_epoch == 8
    with pytest.raises(RequestError, match="step cannot be -1"):
        BatchOrder(81, 10, 8, 0).windows(-1)


@pytest.mark.parametrize("targets", [1, 9, 10, 11, 640, 995, 1000])
@pytest.mark.parametrize("sequences", [1, 16, 200])
def test_evaluation_reads_every_target_in_order(targets: int, sequences: int) -> None:
    parts = list(evaluation_windows(TOKENS[: targets + 1], 10, sequences=sequences))
    assert max(map(len, parts)) <= sequences and {part.dtype for part in parts} == {np.dtype(np.int64)}
    lengths = [part.shape[1] - 1 for part in parts for _ in part]
    assert lengths == [10] * (targets // 10) + [targets % 10] * (targets % 10 > 0)
    np.testing.assert_array_equal(np.concatenate([part[:, 1:].ravel() for part in parts]), np.arange(1, targets + 1))
    assert all((part[:, 1:] == part[:, :-1] + 1).all() for part in parts)


def test_evaluation_refuses_what_holds_no_target() -> None:
    with pytest.raises(RequestError, match="the split has 1 tokens, and an evaluation needs one and another"):
        evaluation_windows(TOKENS[:1], 10)
    with pytest.raises(RequestError, match="sequences cannot be 0"):
        evaluation_windows(TOKENS, 10, sequences=0)


GOLDEN_FIRST = [150, 810, 660, 650, 460, 470, 730, 820]
GOLDEN_ACROSS_EPOCHS = [480, 350, 790, 750, 590, 760, 430, 160]
