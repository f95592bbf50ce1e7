"""The call table alone: no processes, no worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from drumline.errors import ExecutorFailedError, FailureReport, RemoteCallError, RPCTimeoutError, TransportError
from drumline.executor.calls import Call, CallTable, broken
from drumline.transport import Waiter


def report(text: str = "boom", rank: int = 1, at: float | None = None) -> FailureReport:
    return FailureReport(role=f"Worker_TP{rank}", rank=rank, type="ValueError", message=text, time=at or time.time())


class Harness:
    """A table whose answers are put in by the test."""

    def __init__(self, world_size: int = 3) -> None:
        self.waiter = Waiter.create("calls")
        self.arrived: list[tuple[int, int, Any]] = []
        self.world = range(world_size)
        self.table = CallTable(self.waiter, self.drain, 0, world_size)

    def drain(self) -> None:
        while self.arrived:
            self.table.answer(*self.arrived.pop(0))

    def begin(self, reply_rank: int | None = 0, timeout: float | None = None, **more: Any) -> Call:
        deadline = None if timeout is None else time.monotonic() + timeout
        ranks = self.world if reply_rank is None else (reply_rank,)
        single = reply_rank is not None or "aggregators" in more
        return self.table.begin("method", ranks, single=single, deadline=deadline, **more)

    def answer(self, rank: int, call: Call, value: Any) -> None:
        self.arrived.append((rank, call.id, value))
        self.waiter.ring()


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.table.close(None, broken(report("the test is over")))
    made.table.keeper.join(5.0)
    made.waiter.close()


def later(seconds: float, what: Callable[[], None]) -> threading.Thread:
    thread = threading.Timer(seconds, what)
    thread.start()
    return thread


def test_answers_make_a_value_or_a_list(harness: Harness) -> None:
    one, all_ranks = harness.begin(reply_rank=2), harness.begin(reply_rank=None)
    harness.answer(2, one, "two")
    for rank in (2, 0, 1):
        harness.answer(rank, all_ranks, rank * 10)
    assert all_ranks.result() == [0, 10, 20]
    assert one.result() == "two"
    assert harness.table.owing == [0, 0, 0]
    assert len(harness.table) == 0


def test_futures_complete_in_the_order_of_the_calls(harness: Harness) -> None:
    first, second = harness.begin(reply_rank=0), harness.begin(reply_rank=1)
    harness.answer(1, second, "b")
    assert not second.done()
    harness.answer(0, first, "a")
    assert second.done()
    assert (first.result(), second.result()) == ("a", "b")


def test_result_timeout_leaves_the_call_running(harness: Harness) -> None:
    call = harness.begin()
    with pytest.raises(TimeoutError, match="it goes on") as caught:
        call.result(timeout=0.01)
    assert not isinstance(caught.value, RPCTimeoutError)
    harness.answer(0, call, 5)
    assert call.result(timeout=0.01) == 5


def test_deadline_ends_the_call_and_its_late_answer_is_dropped(harness: Harness) -> None:
    call = harness.begin(timeout=0.02)
    with pytest.raises(RPCTimeoutError, match=r"^RPC call to method timed out\. Not answered by rank 0\.$"):
        call.result()
    following = harness.begin()
    harness.answer(0, call, "late")
    harness.answer(0, following, "own")
    assert following.result() == "own"
    assert isinstance(call.exception(), RPCTimeoutError)


def test_deadline_counts_while_an_older_call_runs(harness: Harness) -> None:
    harness.begin(reply_rank=0)
    call = harness.begin(reply_rank=1, timeout=0.02)
    harness.answer(1, call, "here, but the older one has not ended")
    with pytest.raises(RPCTimeoutError):
        call.result()


def test_an_older_call_that_times_out_lets_the_younger_complete(harness: Harness) -> None:
    old, young = harness.begin(reply_rank=0, timeout=0.05), harness.begin(reply_rank=1)
    harness.answer(1, young, "b")
    assert young.result(timeout=5) == "b"
    assert isinstance(old.exception(), RPCTimeoutError)


def test_failure_ends_the_call_once_it_is_settled(harness: Harness) -> None:
    call = harness.begin(reply_rank=0)
    assert harness.table.failed(call.id, report(rank=2)) is call
    assert not call.done()
    harness.answer(0, call, "dropped")
    harness.table.settle(call)
    with pytest.raises(RemoteCallError, match="boom") as caught:
        call.result()
    assert caught.value.report.rank == 2
    assert harness.begin().id == call.id + 1


def test_failures_are_folded_under_the_earliest(harness: Harness) -> None:
    call = harness.begin(reply_rank=None)
    for rank, at in ((0, 30.0), (1, 10.0), (2, 20.0)):
        harness.table.failed(call.id, report(f"rank {rank}", rank, at), owed_by=rank)
    harness.table.settle(call)
    error = call.exception()
    assert isinstance(error, RemoteCallError)
    assert error.report.rank == 1
    assert [r.rank for r in error.report.folded] == [2, 0]
    assert harness.table.owing == [0, 0, 0]


def test_a_call_with_a_failure_has_no_deadline_any_more(harness: Harness) -> None:
    call = harness.begin(timeout=0.3)
    harness.table.failed(call.id, report())
    with pytest.raises(TimeoutError, match="it goes on"):
        call.result(timeout=0.4)
    harness.table.settle(call)
    assert isinstance(call.exception(), RemoteCallError)


def test_failure_after_the_answer_goes_to_the_oldest_call_in_flight(harness: Harness) -> None:
    done, running = harness.begin(), harness.begin()
    harness.answer(0, done, 1)
    assert done.result() == 1
    assert harness.table.failed(done.id, report("late")) is running
    harness.table.settle(running)
    with pytest.raises(RemoteCallError, match="late"):
        running.result()


def test_failure_after_the_answer_goes_to_the_next_call(harness: Harness) -> None:
    done = harness.begin()
    harness.answer(0, done, 1)
    assert done.result() == 1
    assert harness.table.failed(done.id, report("late")) is None
    with pytest.raises(RemoteCallError, match="late"):
        harness.begin()
    harness.begin()


def test_failure_after_a_timeout_or_a_failure_is_dropped(harness: Harness) -> None:
    call, failing = harness.begin(timeout=0.001), harness.begin()
    assert isinstance(call.exception(), RPCTimeoutError)
    harness.table.failed(failing.id, report())
    harness.table.settle(failing)
    assert harness.table.failed(call.id, report()) is None
    assert harness.table.failed(failing.id, report()) is None
    harness.begin()


def test_close_ends_everything(harness: Harness) -> None:
    calls = [harness.begin(reply_rank=None) for _ in range(3)]
    caught: list[BaseException | None] = []
    threads = [threading.Thread(target=lambda c=call: caught.append(c.exception())) for call in calls]
    for thread in threads:
        thread.start()
    root = report("dead")
    harness.table.close(root, broken(root))
    for thread in threads:
        thread.join(5)
    assert [type(error) for error in caught] == [ExecutorFailedError] * 3
    with pytest.raises(ExecutorFailedError, match="dead"):
        harness.begin()


def test_another_thread_that_drains_wakes_the_one_that_waits(harness: Harness) -> None:
    first, second = harness.begin(reply_rank=0), harness.begin(reply_rank=1)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(second.result(timeout=5)))
    thread.start()
    harness.arrived += [(0, first.id, "a"), (1, second.id, "b")]  # no ring: only the drain below tells
    assert first.result(timeout=5) == "a"
    thread.join(5)
    assert got == ["b"]


def test_waiting_sleeps_until_the_ring(harness: Harness) -> None:
    call = harness.begin()
    timer = later(0.05, lambda: harness.answer(0, call, "slept"))
    before = time.process_time()
    assert call.result(timeout=5) == "slept"
    assert time.process_time() - before < 0.04
    timer.join()


class Sum:
    """Adds the outputs up."""

    def __init__(self) -> None:
        self.failures: list[Mapping[int, Any]] = []

    def aggregate(self, outputs: Sequence[Any], output_rank: int) -> Any:
        return sum(outputs)

    def failed(self, outputs: Mapping[int, Any], report: FailureReport) -> None:
        self.failures.append(dict(outputs))


class Double(Sum):
    """Doubles the output rank's."""

    def aggregate(self, outputs: Sequence[Any], output_rank: int) -> Any:
        return 2 * outputs[output_rank]


def test_aggregators_fold_onto_the_output_rank_in_order(harness: Harness) -> None:
    call = harness.begin(reply_rank=None, aggregators=(Sum(), Double()))
    for rank in range(3):
        harness.answer(rank, call, rank + 1)
    assert call.result() == 12


def test_aggregators_see_what_ranks_answered_when_one_failed(harness: Harness) -> None:
    aggregator = Sum()
    call = harness.begin(reply_rank=None, aggregators=(aggregator,))
    harness.answer(0, call, 7)
    harness.answer(2, call, 9)
    harness.table.failed(call.id, report(), owed_by=1)
    harness.table.settle(call)
    assert isinstance(call.exception(), RemoteCallError)
    assert aggregator.failures == [{0: 7, 2: 9}]


def test_an_aggregator_that_raises_fails_its_call_only(harness: Harness) -> None:
    call = harness.begin(reply_rank=None, aggregators=(Sum(),))
    for rank in range(3):
        harness.answer(rank, call, "no number")
    with pytest.raises(TypeError):
        call.result()
    assert len(harness.table) == 0


def test_the_keeper_goes_on_when_answers_could_not_be_taken_in(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    broken_once = threading.Event()

    def drain() -> None:
        if not broken_once.is_set():
            broken_once.set()
            raise TransportError("ring out of step")
        harness.drain()

    harness.table._drain = drain
    told = threading.Event()
    call = harness.begin()
    call.add_done_callback(lambda call: told.set())
    assert broken_once.wait(5)
    harness.answer(0, call, 5)
    assert told.wait(5)
    assert call.result() == 5
    assert caplog.text.count("answers cannot be taken in") == 1
