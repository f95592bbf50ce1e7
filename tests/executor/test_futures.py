"""Futures of calls: callbacks, asyncio, cancellation, over every backend, with tests that leave the executor usable."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from drumline.errors import ExecutorFailedError, RemoteCallError, RPCTimeoutError, WorkerCallError
from drumline.executor import Call, Executor
from tests.executor.conftest import Make


def ranks(executor: Executor) -> list[int]:
    return list(range(executor.world_size))


class Told:
    """A callback that remembers what it was told, and by whom."""

    def __init__(self, count: int = 1) -> None:
        self.calls: list[Call] = []
        self.threads: list[str] = []
        self._left = count
        self._all = threading.Event()

    def __call__(self, call: Call) -> None:
        self.threads.append(threading.current_thread().name)
        self.calls.append(call)
        if len(self.calls) == self._left:
            self._all.set()

    def wait(self) -> list[Call]:
        assert self._all.wait(20), f"only {len(self.calls)} callbacks"
        return self.calls


def test_a_callback_without_anybody_waiting(executor: Executor) -> None:
    told = Told()
    future = executor.collective_rpc("sleep", (0.05,), non_block=True)
    future.add_done_callback(told)
    assert told.wait() == [future]
    assert told.threads == ["drumline-keeper"]
    assert future.result(timeout=0) == ranks(executor)


def test_a_callback_of_a_call_that_has_ended_is_called_at_once(executor: Executor) -> None:
    future = executor.collective_rpc("echo", non_block=True)
    future.result(timeout=20)
    told = Told()
    future.add_done_callback(told)
    assert told.calls == [future]
    assert told.threads == [threading.current_thread().name]


def test_callbacks_come_in_the_order_of_the_calls(executor: Executor) -> None:
    told = Told(20)
    slow = executor.collective_rpc("sleep", (0.1, 0), reply_rank=0, non_block=True)
    quick = [
        executor.collective_rpc("echo", (i,), reply_rank=executor.world_size - 1, non_block=True) for i in range(19)
    ]
    for future in (*quick, slow):
        future.add_done_callback(told)
    assert told.wait() == [slow, *quick]


def test_a_callback_holds_no_lock(executor: Executor) -> None:
    answers: list[Any] = []
    ended = threading.Event()

    def ask_again(call: Call) -> None:
        answers.append(executor.collective_rpc("note", (call.result(),), timeout=20))
        executor.collective_rpc("note", (1,), non_block=True).add_done_callback(lambda call: ended.set())

    executor.collective_rpc("note", (0,), non_block=True).add_done_callback(ask_again)
    assert ended.wait(20)
    assert answers == [ranks(executor)]


def test_what_a_callback_raises_is_logged(executor: Executor, caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: Call) -> None:
        raise LookupError("in a callback")

    told = Told()
    with caplog.at_level(logging.ERROR):
        future = executor.collective_rpc("sleep", (0.02,), non_block=True)
        future.add_done_callback(fail)
        future.add_done_callback(told)
        told.wait()
        future.add_done_callback(fail)
    assert caplog.text.count("LookupError: in a callback") == 2
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_callbacks_are_called_exactly_once(executor: Executor) -> None:
    """Registered while calls end, by two threads, beside a third that waits for results."""
    n = 200
    told = Told(2 * n)
    futures: list[Call] = []

    def register(from_end: bool) -> None:
        for i in range(n):
            while len(futures) <= i:
                time.sleep(0)
            futures[i].add_done_callback(told)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(register, end) for end in (False, True)]
        for i in range(n):
            futures.append(executor.collective_rpc("echo", (i,), non_block=True))
            if i % 7 == 0:
                futures[i].result(timeout=20)
        for one in waiting:
            one.result(timeout=20)
    told.wait()
    executor.collective_rpc("echo")
    assert sorted(call.id for call in told.calls) == sorted(2 * [future.id for future in futures])


@pytest.mark.alone
def test_a_callback_hears_of_the_deadline(executor: Executor) -> None:
    told = Told()
    future = executor.collective_rpc("sleep", (0.3,), timeout=0.05, non_block=True)
    start = time.monotonic()
    future.add_done_callback(told)
    told.wait()
    assert time.monotonic() - start < 0.25
    assert isinstance(future.exception(), RPCTimeoutError)
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_a_callback_hears_of_a_failure(executor: Executor) -> None:
    told = Told()
    executor.collective_rpc("raise_on", (executor.world_size - 1,), non_block=True).add_done_callback(told)
    assert isinstance(told.wait()[0].exception(), WorkerCallError)
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_cancel(executor: Executor) -> None:
    told = Told()
    before = executor.collective_rpc("sleep", (0.05,), non_block=True)
    future = executor.collective_rpc("echo", ("cancelled",), non_block=True)
    future.add_done_callback(told)
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    for ask in (future.result, future.exception):
        with pytest.raises(CancelledError):
            ask()
    assert told.wait() == [future]
    assert executor.collective_rpc("echo", ("next",)) == [(r, ("next",), {}) for r in ranks(executor)]
    assert before.result(timeout=0) == ranks(executor)
    assert not before.cancel()
    assert not future.cancel()
    assert not before.cancelled()


@pytest.mark.alone
def test_cancel_wakes_who_waits(executor: Executor) -> None:
    future = executor.collective_rpc("sleep", (0.3,), non_block=True)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            future.result(timeout=20)
        except CancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert future.cancel()
    start = time.monotonic()
    thread.join(20)
    assert time.monotonic() - start < 0.2
    assert len(errors) == 1


def test_the_failure_of_a_cancelled_call_is_nobodys(executor: Executor) -> None:
    executor.collective_rpc("sleep", (0.05,), non_block=True)
    future = executor.collective_rpc("raise_on", (0,), non_block=True)
    assert future.cancel()
    assert executor.collective_rpc("note", (1,)) == ranks(executor)
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


async def test_await(executor: Executor) -> None:
    assert await executor.collective_rpc("sleep", (0.02,), non_block=True) == ranks(executor)
    futures = [executor.collective_rpc("echo", (i,), reply_rank=0, non_block=True) for i in range(50)]
    assert await asyncio.gather(*futures) == [(0, (i,), {}) for i in range(50)]
    assert await futures[7] == (0, (7,), {})


async def test_await_raises_what_the_call_raised(executor: Executor) -> None:
    with pytest.raises(WorkerCallError, match="boom"):
        await executor.collective_rpc("raise_on", (0,), non_block=True)
    with pytest.raises(RPCTimeoutError):
        await executor.collective_rpc("sleep", (0.2,), timeout=0.05, non_block=True)
    assert await executor.collective_rpc("note", (1,), non_block=True) == ranks(executor)


async def test_cancelling_what_awaits_cancels_the_call(executor: Executor) -> None:
    future = executor.collective_rpc("sleep", (0.2,), non_block=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future, 0.02)
    assert future.cancelled()
    other = executor.collective_rpc("echo", non_block=True)
    waiting = asyncio.ensure_future(other)
    await asyncio.sleep(0)
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_await_from_several_loops(executor: Executor) -> None:
    future = executor.collective_rpc("sleep", (0.1,), non_block=True)

    async def wait() -> Any:
        return await future

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: asyncio.run(wait()), range(3))) == [ranks(executor)] * 3


def test_a_loop_that_was_closed_is_no_ones_problem(executor: Executor) -> None:
    future = executor.collective_rpc("sleep", (0.1,), non_block=True)

    async def wait() -> None:
        await asyncio.wait({asyncio.ensure_future(asyncio.shield(future))}, timeout=0.01)

    asyncio.run(wait())
    future.cancel()
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_the_error_of_a_failed_call(executor: Executor) -> None:
    with pytest.raises(WorkerCallError) as caught:
        executor.collective_rpc("raise_odd", (executor.world_size - 1,))
    error = caught.value
    assert isinstance(error, RemoteCallError)
    assert (error.rank, error.message) == (executor.world_size - 1, "1 2 3")
    assert error.type_name.endswith(".OddError")
    assert "raise OddError(1, 2, 3)" in error.remote_traceback
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.report) == (WorkerCallError, str(error), error.report)


def test_all_failures_are_collected_and_the_earliest_is_raised(executor: Executor) -> None:
    def fail(worker: Any) -> None:
        time.sleep(0.02 * (worker.context.config.parallel.world_size - worker.rank))
        raise ValueError(f"boom rank{worker.rank}")

    with pytest.raises(WorkerCallError) as caught:
        executor.collective_rpc(fail)
    assert [failure.rank for failure in caught.value.failures] == ranks(executor)[::-1]
    assert caught.value.rank == executor.world_size - 1
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_shutdown_ends_futures_and_calls_their_callbacks(make: Make, backend: str) -> None:
    executor = make(backend)
    told = Told(3)
    for method in ("sleep", "echo", "echo"):
        executor.collective_rpc(method, (0.5,), non_block=True).add_done_callback(told)
    executor.shutdown()
    assert [type(call.exception()) for call in told.wait()] == [ExecutorFailedError] * 3


def test_a_callback_may_shut_down(make: Make) -> None:
    executor = make("mp", 2)
    ended = threading.Event()

    def end(call: Call) -> None:
        executor.shutdown()
        ended.set()

    executor.collective_rpc("sleep", (0.02,), non_block=True).add_done_callback(end)
    assert ended.wait(20)
    with pytest.raises(ExecutorFailedError):
        executor.collective_rpc("echo")


def test_a_death_ends_futures_and_calls_their_callbacks(make: Make) -> None:
    executor = make("mp", 2)
    told = Told(2)
    executor.collective_rpc("leave", (1, "kill"), non_block=True).add_done_callback(told)
    executor.collective_rpc("echo", non_block=True).add_done_callback(told)
    assert ["SIGKILL" in str(call.exception()) for call in told.wait()] == [True, True]
