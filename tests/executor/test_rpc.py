"""The executor's contract, over every backend, with tests that leave it usable."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from drumline.errors import FailureReport, RemoteCallError, RPCTimeoutError
from drumline.executor import Executor
from drumline.plan.step import StepPlan, pack
from tests.executor.workers import Payload, Plain

PLAN = StepPlan(step=7, slots=pack([1, 2]), num_tokens=pack([1, 1]))


def ranks(executor: Executor) -> list[int]:
    return list(range(executor.world_size))


def last(executor: Executor) -> int:
    return executor.world_size - 1


def test_a_list_in_rank_order_or_one_value(executor: Executor) -> None:
    assert executor.collective_rpc("echo", (1, "b"), {"c": 3}) == [(r, (1, "b"), {"c": 3}) for r in ranks(executor)]
    assert executor.collective_rpc("echo", reply_rank=last(executor)) == (last(executor), (), {})


def test_life_before_the_first_call(executor: Executor) -> None:
    for life in executor.collective_rpc("get_life"):
        assert life[:3] == ["construct", "init_device", "load_model"]
    assert [state.phase for state in executor.workers()] == ["ready"] * executor.world_size


def test_every_rank_knows_its_place(executor: Executor) -> None:
    for rank, place in enumerate(executor.collective_rpc("place")):
        assert place["rank"] == place["local_rank"] == rank
        assert place["driver"] == (rank == 0)
        assert place["init"].startswith("file:///proc/self/fd/") == (executor.world_size > 1)
        assert place["pid"] == executor.workers()[rank].pid


def test_a_function_gets_the_worker_first(executor: Executor) -> None:
    offset = 10

    def rank_plus(worker: Plain, more: int) -> int:
        return worker.rank + more + offset

    assert executor.collective_rpc(rank_plus, (1,)) == [r + 11 for r in ranks(executor)]


def test_arguments_of_ranks_own(executor: Executor) -> None:
    own = [(f"for {r}", b"x" * r * 1000) for r in ranks(executor)]
    answers = executor.collective_rpc("echo", ("all",), {"k": 1}, rank_args=own)
    assert answers == [(r, ("all", *own[r]), {"k": 1}) for r in ranks(executor)]
    assert executor.collective_rpc("echo", rank_args=own, reply_rank=0)[1] == own[0]
    with pytest.raises(ValueError, match="one entry for each"):
        executor.collective_rpc("echo", rank_args=[()] * 7)


def test_step_calls(executor: Executor) -> None:
    assert executor.execute_model(PLAN) == 7
    assert executor.sample_tokens(7, "grammar") == (7, "grammar")
    future = executor.execute_model(PLAN, non_block=True)
    assert executor.sample_tokens(8, None, non_block=True).result() == (8, None)
    assert future.done()
    assert future.result() == 7


def test_large_arrays(executor: Executor) -> None:
    array = np.arange(300_000, dtype=np.int64)
    back = executor.collective_rpc(lambda worker, a: int(a.sum()), (array,))
    assert back == [int(array.sum())] * executor.world_size


def test_futures_complete_in_order(executor: Executor) -> None:
    slow = executor.collective_rpc("sleep", (0.2, 0), reply_rank=0, non_block=True)
    quick = executor.collective_rpc("echo", reply_rank=last(executor), non_block=True)
    assert not quick.done()
    assert quick.result()[0] == last(executor)
    assert slow.done()
    assert slow.result(timeout=0) == 0


def test_result_with_a_timeout_can_be_asked_again(executor: Executor) -> None:
    future = executor.collective_rpc("sleep", (0.2,), non_block=True)
    with pytest.raises(TimeoutError, match="goes on"):
        future.result(timeout=0.01)
    assert future.result(timeout=30) == ranks(executor)


def test_deadline_and_the_late_answer(executor: Executor) -> None:
    worker = r"rank 0 \(Worker.*, pid \d+, .*\([RS]\)\)"
    with pytest.raises(
        RPCTimeoutError, match=rf"^RPC call to sleep timed out\. Not answered by {worker}: running it for"
    ):
        executor.collective_rpc("sleep", (0.3,), timeout=0.05)
    assert executor.collective_rpc("echo", ("next",))[0] == (0, ("next",), {})
    assert not executor.is_failed


def test_deadline_of_one_slow_rank_leaves_no_answer_for_the_next_call(executor: Executor) -> None:
    for _ in range(3):
        with pytest.raises(RPCTimeoutError):
            executor.collective_rpc("sleep", (0.1, last(executor)), timeout=0.02)
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_exception_of_the_answering_rank(executor: Executor) -> None:
    with pytest.raises(RemoteCallError, match="boom rank0") as caught:
        executor.collective_rpc("raise_on", (0,), reply_rank=0)
    report = caught.value.report
    assert (report.rank, report.type, report.message, report.phase) == (0, "ValueError", "boom rank0", "raise_on")
    assert "raise ValueError" in report.traceback
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_exception_of_another_rank(executor: Executor) -> None:
    with pytest.raises(RemoteCallError, match=f"boom rank{last(executor)}"):
        executor.collective_rpc("raise_on", (last(executor), "boom", 0.0), reply_rank=None)
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_exception_of_a_step_names_it(executor: Executor) -> None:
    def fail(worker: Plain, plan: StepPlan) -> None:
        raise LookupError("no such block")

    with pytest.raises(RemoteCallError, match=r"\(step 7\)") as caught:
        executor.collective_rpc(fail, (PLAN,))
    assert caught.value.report.step == 7
    assert len(caught.value.report.folded) == executor.world_size - 1


def test_an_exception_that_cannot_be_pickled(executor: Executor) -> None:
    with pytest.raises(RemoteCallError, match="1 2 3") as caught:
        executor.collective_rpc("raise_odd", (last(executor),))
    assert caught.value.report.type.endswith("OddError")


def test_a_method_that_does_not_exist(executor: Executor) -> None:
    with pytest.raises(RemoteCallError, match="worker class Plain has no method 'nothing'"):
        executor.collective_rpc("nothing")
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_futures_of_failing_calls(executor: Executor) -> None:
    good = executor.collective_rpc("note", (1,), non_block=True)
    bad = executor.collective_rpc("raise_on", (last(executor),), non_block=True)
    after = executor.collective_rpc("note", (2,), non_block=True)
    assert after.result(timeout=30) == ranks(executor)
    assert isinstance(bad.exception(), RemoteCallError)
    assert good.result() == ranks(executor)


def test_many_failures_in_a_row(executor: Executor) -> None:
    futures = [executor.collective_rpc("raise_on", (i % executor.world_size,), non_block=True) for i in range(50)]
    for future in futures:
        assert isinstance(future.exception(timeout=30), RemoteCallError)
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


def test_three_thousand_calls_whose_results_nobody_takes(executor: Executor) -> None:
    futures = [executor.collective_rpc("echo", (i, "x" * 500), non_block=True) for i in range(3000)]
    assert executor.collective_rpc("note", (3000,), timeout=60) == ranks(executor)
    assert all(future.done() for future in futures)
    assert futures[2999].result()[0] == (0, (2999, "x" * 500), {})


def test_threads_share_it(executor: Executor) -> None:
    def work(thread: int) -> bool:
        for i in range(60):
            reply_rank = i % executor.world_size
            answer = executor.collective_rpc("echo", (thread, i), reply_rank=reply_rank, timeout=60)
            if answer != (reply_rank, (thread, i), {}):
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_a_waiting_thread_does_not_hold_up_another(executor: Executor) -> None:
    slow = executor.collective_rpc("sleep", (0.2,), non_block=True)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(slow.result(timeout=30))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [ranks(executor)] * 3


def test_payload_is_garbage_before_the_next_call(executor: Executor) -> None:
    executor.collective_rpc("watch", (Payload(100_000),))
    assert executor.collective_rpc("alive_payloads") == [0] * executor.world_size


class Largest:
    """Takes the largest output."""

    def __init__(self) -> None:
        self.failures: list[Mapping[int, Any]] = []

    def aggregate(self, outputs: Sequence[Any], output_rank: int) -> Any:
        return max(outputs)

    def failed(self, outputs: Mapping[int, Any], report: FailureReport) -> None:
        self.failures.append(dict(outputs))


def test_aggregators(executor: Executor) -> None:
    aggregator = Largest()
    assert executor.collective_rpc("note", (1,), aggregators=(aggregator,)) == last(executor)
    with pytest.raises(RemoteCallError):
        executor.collective_rpc("raise_on", (0,), aggregators=(aggregator,))
    assert aggregator.failures == [{r: r for r in ranks(executor) if r != 0}]


def test_check_health_and_flags(executor: Executor) -> None:
    executor.check_health()
    assert all(life[-1] == "check_health" for life in executor.collective_rpc("get_life"))
    assert executor.max_concurrent_batches == 2
    assert executor.supports_async_scheduling
    assert not executor.uses_ray
    assert executor.output_rank == 0


def test_a_reply_rank_that_does_not_exist(executor: Executor) -> None:
    with pytest.raises(ValueError, match="reply_rank 9"):
        executor.collective_rpc("echo", reply_rank=9)


@pytest.mark.alone
def test_waiting_costs_no_cpu(executor: Executor) -> None:
    before = time.process_time()
    executor.collective_rpc("sleep", (0.3,))
    assert time.process_time() - before < 0.1


def test_no_torch(executor: Executor) -> None:
    assert not any(place["torch"] for place in executor.collective_rpc("place")) or "torch" in sys.modules
