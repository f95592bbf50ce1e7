"""Calls that nobody waits for: they never stop the executor, and what they hold has a limit."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import MessageTooLargeError, RPCBacklogError, WorkerCallError
from drumline.executor import Executor
from tests.executor.conftest import Make
from tests.executor.test_failures import wait_until


def touch(worker: Any, path: str) -> None:
    Path(f"{path}-{worker.rank}").touch()


def many(executor: Executor, count: int) -> None:
    """Calls whose answers nobody takes yet, made while the workers are busy: no room for most of them."""
    executor.collective_rpc("sleep", (0.2,), non_block=True)
    futures = [executor.collective_rpc("echo", (i,), reply_rank=i % 2, non_block=True) for i in range(count)]
    assert executor.collective_rpc("note", (1,), timeout=100) == [0, 1]
    assert all(future.done() for future in futures)
    for i in (0, 1, count // 2, count - 1):
        assert futures[i].result() == (i % 2, (i,), {})


def test_ten_thousand_calls_whose_results_nobody_takes(make: Make) -> None:
    many(make("mp", 2), 10_000)


@pytest.mark.soak
def test_a_hundred_thousand_calls_whose_results_nobody_takes(make: Make) -> None:
    many(make("mp", 2), 100_000)


@pytest.mark.alone
def test_a_call_that_is_not_waited_for_returns_at_once(make: Make) -> None:
    executor = make("mp", 2, mq_slots=2, mq_slot_bytes=1024)
    executor.collective_rpc("sleep", (0.5,), non_block=True)
    start = time.monotonic()
    futures = [executor.collective_rpc("echo", (i, "x" * 900), non_block=True) for i in range(100)]
    assert time.monotonic() - start < 0.4
    assert futures[99].result(timeout=20) == [(r, (99, "x" * 900), {}) for r in (0, 1)]


def test_calls_are_sent_and_answers_taken_although_nobody_waits(make: Make, tmp_path: Path) -> None:
    """More calls than the broadcast ring takes, and more answers than the answer rings take."""
    executor = make("mp", 2, mq_slots=4, mq_slot_bytes=1024, mq_answer_slots=2, mq_answer_slot_bytes=4096)
    futures = [executor.collective_rpc("echo", (i, "x" * 3000), non_block=True) for i in range(50)]
    last = executor.collective_rpc(touch, (str(tmp_path / "done"),), non_block=True)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    assert futures[49].result(timeout=20)[1] == (1, (49, "x" * 3000), {})
    assert last.result(timeout=20) == [None, None]


def test_answers_are_taken_although_nobody_waits_or_asks(make: Make, tmp_path: Path) -> None:
    executor = make("mp", 2, mq_answer_slots=2, mq_answer_slot_bytes=4096)
    futures = [executor.collective_rpc("big", (3000,), non_block=True) for _ in range(5)]
    executor.collective_rpc(touch, (str(tmp_path / "done"),), non_block=True)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    wait_until(lambda: all(future.done_already for future in futures))


def test_order_is_kept_through_the_outbox(make: Make) -> None:
    executor = make("mp", 2, mq_slots=3, mq_slot_bytes=512)
    executor.collective_rpc("sleep", (0.1,), non_block=True)
    for i in range(300):
        executor.collective_rpc("note", ((i, "x" * (i % 700)),), non_block=True)
    for seen in executor.collective_rpc("get_seen", timeout=30):
        assert [i for i, _ in seen] == list(range(300))


def test_a_call_that_waits_for_room_may_be_cancelled(make: Make) -> None:
    executor = make("mp", 2, mq_slots=2, mq_slot_bytes=1024)
    executor.collective_rpc("sleep", (0.2,), non_block=True)
    futures = [executor.collective_rpc("note", ((i, "x" * 900),), non_block=True) for i in range(20)]
    assert all(future.cancel() for future in futures[5:])
    for seen in executor.collective_rpc("get_seen", timeout=30):
        assert [i for i, _ in seen] == [0, 1, 2, 3, 4]


def test_arguments_may_be_changed_after_the_call(make: Make) -> None:
    executor = make("mp", 2, mq_slots=2, mq_slot_bytes=1024)
    executor.collective_rpc("sleep", (0.2,), non_block=True)
    data = bytearray(b"a" * 1500)
    futures = [executor.collective_rpc("echo", (data,), non_block=True) for _ in range(4)]
    data[:] = b"b" * 1500
    assert [future.result(timeout=20)[1][1] for future in futures] == [(b"a" * 1500,)] * 4


def test_a_call_that_is_too_large_fails_alone(make: Make) -> None:
    executor = make("mp", 2, mq_slots=2, mq_slot_bytes=1024, mq_largest_bytes=5000)
    executor.collective_rpc("sleep", (0.2,), non_block=True)
    for _ in range(4):
        executor.collective_rpc("note", ("x" * 900,), non_block=True)
    with pytest.raises(MessageTooLargeError, match="--mq-largest-bytes"):
        executor.collective_rpc("note", ("x" * 9000,), non_block=True)
    after = executor.collective_rpc("note", (1,), non_block=True)
    assert after.result(timeout=20) == [0, 1]


def test_calls_that_wait_for_room_have_a_limit(make: Make) -> None:
    executor = make("mp", 2, mq_slots=2, mq_slot_bytes=1024, rpc_backlog_bytes=20_000)
    executor.collective_rpc("sleep", (0.3,), non_block=True)

    def flood() -> None:
        for _ in range(100):
            executor.collective_rpc("note", ("x" * 1500,), non_block=True)

    with pytest.raises(
        RPCBacklogError, match=r"^RPC call to note refused: 1\d calls wait for room .*rpc_backlog_bytes"
    ):
        flood()
    assert executor.collective_rpc("echo", timeout=20) == [(0, (), {}), (1, (), {})]
    assert executor.collective_rpc("echo", non_block=True).result(timeout=20) == [(0, (), {}), (1, (), {})]


def test_answers_that_nobody_takes_have_a_limit(make: Make) -> None:
    executor = make("mp", 2, rpc_backlog_bytes=1_000_000)
    futures = []

    def hoard() -> None:
        for _ in range(100):
            futures.append(executor.collective_rpc("big", (100_000,), reply_rank=0, non_block=True))
            executor.collective_rpc("note", (1,))

    with pytest.raises(RPCBacklogError, match=r"answers that nobody has taken hold 1.* bytes, together more than"):
        hoard()
    assert 8 <= len(futures) <= 12
    assert len(executor.collective_rpc("big", (100_000,), reply_rank=1)) == 100_000  # who waits is never refused
    futures[0].result()
    futures[1].result()
    executor.collective_rpc("note", (1,), non_block=True).result()
    with pytest.raises(RPCBacklogError):
        hoard()
    futures.clear()
    gc.collect()
    executor.collective_rpc("note", (1,), non_block=True).result()


def test_failures_of_calls_that_wait_for_room(make: Make) -> None:
    executor = make("mp", 2, mq_slots=2, mq_slot_bytes=1024)
    executor.collective_rpc("sleep", (0.1,), non_block=True)
    futures = [executor.collective_rpc("raise_on", (i % 2, "x" * 900), non_block=True) for i in range(20)]
    for future in futures:
        assert isinstance(future.exception(timeout=20), WorkerCallError)
    assert executor.collective_rpc("note", (1,)) == [0, 1]
