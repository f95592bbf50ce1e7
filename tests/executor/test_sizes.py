"""Calls and answers of any size: through ring, arena or in pieces, in order, and gone when they are over."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import pytest

from drumline.errors import MessageTooLargeError, RPCTimeoutError, WorkerCallError
from drumline.executor import Executor
from tests.executor.conftest import Make

SIZES = [0, 1, 1000, 1023, 1024, 4000, 16_383, 16_384, 70_000, 300_000, 1_000_000, 3_000_000]


def digest(worker: Any, data: Any) -> str:
    return hashlib.sha256(memoryview(data)).hexdigest()


def echo(worker: Any, data: Any) -> Any:
    return data


@pytest.fixture(scope="module", params=["ring", "arena"])
def small(request: pytest.FixtureRequest) -> Any:
    """Rings of some KiB, with and without an arena beside."""
    from tests.executor.conftest import configure

    config = configure(
        "mp",
        2,
        mq_slots=8,
        mq_slot_bytes=1024,
        mq_answer_slots=4,
        mq_answer_slot_bytes=1024,
        mq_arena_bytes=0 if request.param == "ring" else 2_000_000,
    )
    with Executor.get_class(config)(config) as executor:
        yield executor


@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_arrays_there_and_back(small: Executor, size: int) -> None:
    data = os.urandom(size)
    array = np.frombuffer(data, dtype=np.uint8)
    want = hashlib.sha256(data).hexdigest()
    assert small.collective_rpc(digest, (data,), timeout=30) == [want, want]
    assert small.collective_rpc(digest, (array,), timeout=30) == [want, want]
    assert small.collective_rpc(echo, (data,), timeout=30) == [data, data]
    back = small.collective_rpc(echo, (array,), reply_rank=1, timeout=30)
    np.testing.assert_array_equal(back, array)


def test_arrays_of_ranks_own(small: Executor) -> None:
    own = [(np.full(200_000, rank, dtype=np.int32),) for rank in range(2)]
    assert small.collective_rpc(lambda worker, a, b: int(b.sum() + a.sum()), (np.ones(50_000),), rank_args=own) == [
        50_000,
        250_000,
    ]


def test_order_of_all_sizes(small: Executor) -> None:
    sizes = [(i * 7919) % 40_000 for i in range(60)]
    futures = [
        small.collective_rpc(lambda worker, d, i: (i, len(d)), (b"x" * n, i), non_block=True)
        for i, n in enumerate(sizes)
    ]
    assert [future.result(timeout=30) for future in futures] == [[(i, n)] * 2 for i, n in enumerate(sizes)]


def test_a_large_call_that_is_given_up_on_its_way(small: Executor) -> None:
    small.collective_rpc("sleep", (0.3,), non_block=True)
    with pytest.raises(RPCTimeoutError, match="It was never sent"):
        small.collective_rpc("note", ([os.urandom(4_000_000)],), timeout=0.1)
    given_up = small.collective_rpc("note", ([os.urandom(4_000_000)],), non_block=True)
    assert given_up.cancel()
    assert small.collective_rpc("get_seen", timeout=30) == [[], []]


def test_arrays_may_be_changed_after_a_call_that_is_not_waited_for(small: Executor) -> None:
    small.collective_rpc("sleep", (0.1,), non_block=True)
    array = np.zeros(500_000)
    futures = [small.collective_rpc(lambda worker, a: float(a.sum()), (array,), non_block=True) for _ in range(4)]
    array[:] = 1.0
    assert [future.result(timeout=30) for future in futures] == [[0.0, 0.0]] * 4


def test_arguments_arrive_read_only(small: Executor) -> None:
    assert small.collective_rpc(lambda worker, a: bool(a.flags.writeable), (np.zeros(100_000),)) == [False, False]


def test_shutdown_while_a_large_call_is_on_its_way(make: Make) -> None:
    executor = make("mp", 2, mq_slots=4, mq_slot_bytes=1024, mq_arena_bytes=0)
    executor.collective_rpc("sleep", (0.3,), non_block=True)
    future = executor.collective_rpc("note", ([bytes(1_000_000)],), non_block=True)
    executor.shutdown()
    assert future.exception() is not None


@pytest.mark.parametrize("array", [False, True])
def test_the_limit_holds_for_what_would_fit(make: Make, array: bool) -> None:
    executor = make("mp", 2, mq_largest_bytes=100_000)
    for size in (100_000, 2_000_000, 30_000_000):
        data: Any = np.zeros(size, np.uint8) if array else bytes(size)
        for non_block in (False, True):
            with pytest.raises(MessageTooLargeError, match="--mq-largest-bytes"):
                executor.collective_rpc("note", (data,), non_block=non_block, timeout=10)
    assert executor.collective_rpc("get_seen", timeout=10) == [[], []]
    assert executor.collective_rpc(digest, (bytes(90_000),), timeout=10)[0] == digest(None, bytes(90_000))
    with pytest.raises(WorkerCallError, match="bytes, and the limit is 100000"):
        executor.collective_rpc("big", (100_000,), timeout=10)
    assert [len(answer) for answer in executor.collective_rpc("big", (90_000,), timeout=10)] == [90_000, 90_000]
