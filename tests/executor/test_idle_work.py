"""What workers do while no call waits."""

from __future__ import annotations

import math
import time

import pytest

from tests.executor.conftest import Make


def test_done_between_calls_and_then_no_more(make: Make) -> None:
    executor = make("mp", 2, worker="Busy")
    executor.collective_rpc("give_work", (1000,))
    deadline = time.monotonic() + 10
    while executor.collective_rpc("get_done") != [1000, 1000]:
        assert time.monotonic() < deadline
    assert executor.collective_rpc("get_done") == [1000, 1000]


def test_calls_go_first(make: Make) -> None:
    executor = make("mp", 2, worker="Busy")
    executor.collective_rpc("give_work", (math.inf,))
    for value in range(100):
        assert executor.collective_rpc("note", (value,), timeout=10) is not None
    assert min(executor.collective_rpc("get_done")) > 0
    assert executor.collective_rpc("get_seen")[0] == list(range(100))


@pytest.mark.parametrize("worker", ["Busy", "Plain"])
def test_by_the_thread_that_runs_the_steps(make: Make, worker: str) -> None:
    executor = make("uni", worker=worker)
    if worker == "Busy":
        executor.collective_rpc("give_work", (3,))
    assert not executor.while_idle()  # steps run in the worker thread, which does nothing of its own accord
    assert executor.run_steps_here()
    assert [executor.while_idle() for _ in range(5)] == [worker == "Busy"] * 3 + [False] * 2
    executor.shutdown()
    assert not executor.while_idle()
