"""Outputs that a worker finishes after its method has returned, over every backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from drumline.errors import WorkerCallError
from drumline.executor import Executor
from tests.executor.conftest import BACKENDS, Make, configure


@pytest.fixture(scope="module")
def _deferring() -> Iterator[dict[str, Executor]]:
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(Executor.get_class(config)(config))
            for name, size in BACKENDS.items()
            if (config := configure(name, size, "Deferred"))
        }
        for executor in made.values():  # so that the output thread of uni is no test's
            executor.collective_rpc("later", (0,))
        yield made


@pytest.fixture
def executor(_deferring: dict[str, Executor], backend: str) -> Executor:
    return _deferring[backend]


def ranks(executor: Executor) -> list[int]:
    return list(range(executor.world_size))


def test_they_are_finished_and_sent(executor: Executor) -> None:
    assert executor.collective_rpc("later", ("a",)) == [(r, "a") for r in ranks(executor)]
    assert executor.collective_rpc("later", ("b",), reply_rank=0) == (0, "b")


def test_the_output_thread_prepares_itself_first(executor: Executor) -> None:
    executor.collective_rpc("later", ("a",))
    assert executor.collective_rpc("get_prepared") == [["drumline-output"]] * executor.world_size
    for finished in executor.collective_rpc("get_finished"):
        assert {thread for _, thread, _ in finished} == {"drumline-output"}


def test_the_next_call_runs_meanwhile(executor: Executor) -> None:
    first = executor.collective_rpc("later", ("first", 0.1), non_block=True)
    second = executor.collective_rpc("later", ("second",), non_block=True)
    assert first.result(timeout=20) == [(r, "first") for r in ranks(executor)]
    assert second.result(timeout=20) == [(r, "second") for r in ranks(executor)]
    for seen, finished in zip(
        executor.collective_rpc("get_seen"), executor.collective_rpc("get_finished"), strict=True
    ):
        began = dict(seen)["second"]
        ended = next(at for value, _, at in finished if value == "first")
        assert began < ended - 0.05


def test_answers_keep_their_order(executor: Executor) -> None:
    """Ready answers behind an output that is not finished wait for it; then the loop sends by itself again."""
    futures = []
    for i in range(100):
        method, args = ("later", (i, 0.001)) if i % 3 == 0 else ("echo", (i,))
        futures.append(executor.collective_rpc(method, args, reply_rank=i % executor.world_size, non_block=True))
    for i, future in enumerate(futures):
        rank = i % executor.world_size
        assert future.result(timeout=20) == ((rank, i) if i % 3 == 0 else (rank, (i,), {}))


def test_a_ready_answer_behind_one_is_what_was_returned(executor: Executor) -> None:
    """The next calls change the list and the array that the method returned while it waits to be sent."""
    if executor.worker_in_process:
        pytest.skip("uni hands objects over as they are")

    def get_array(worker: Any) -> Any:
        if not hasattr(worker, "array"):
            worker.array = np.zeros(40_000)
        return worker.array

    def change(worker: Any) -> None:
        worker.array[:] = 1.0

    before = executor.collective_rpc("get_seen")
    executor.collective_rpc("later", ("first", 0.2), non_block=True)
    seen = executor.collective_rpc("get_seen", non_block=True)
    array = executor.collective_rpc(get_array, non_block=True)
    executor.collective_rpc("note", (1,), non_block=True)
    executor.collective_rpc(change, non_block=True)
    for now, then in zip(seen.result(timeout=20), before, strict=True):
        assert len(now) == len(then) + 1
    assert [float(one.sum()) for one in array.result(timeout=20)] == [0.0] * executor.world_size


def test_an_error_in_one_is_a_failure_of_its_call(executor: Executor) -> None:
    before = executor.collective_rpc("later", ("before", 0.05), non_block=True)
    bad = executor.collective_rpc("fail_later", non_block=True)
    after = executor.collective_rpc("later", ("after",), non_block=True)
    assert after.result(timeout=20) == [(r, "after") for r in ranks(executor)]
    assert before.result(timeout=20) == [(r, "before") for r in ranks(executor)]
    error = bad.exception(timeout=20)
    assert isinstance(error, WorkerCallError)
    assert error.type_name.endswith(".OddError")
    assert error.report.phase == "fail_later"
    assert len(error.failures) == executor.world_size


def test_a_program_exit_in_one_is_a_failure_too(executor: Executor) -> None:
    with pytest.raises(WorkerCallError, match="SystemExit"):
        executor.collective_rpc("leave_later")
    assert executor.collective_rpc("later", (1,)) == [(r, 1) for r in ranks(executor)]


def test_more_than_a_worker_may_owe(executor: Executor) -> None:
    futures = [executor.collective_rpc("later", (i,), reply_rank=0, non_block=True) for i in range(600)]
    assert [future.result(timeout=30) for future in futures] == [(0, i) for i in range(600)]


def test_it_is_finished_only_where_it_is_asked_for() -> None:
    config = configure("mp", 2, "Deferred")
    with Executor.get_class(config)(config) as executor:
        assert executor.collective_rpc("later", ("a",), reply_rank=1) == (1, "a")
        assert [len(finished) for finished in executor.collective_rpc("get_finished")] == [0, 1]


def test_what_cannot_be_encoded() -> None:
    config = configure("mp", 2, "Deferred")
    with Executor.get_class(config)(config) as executor:
        with pytest.raises(WorkerCallError, match="pickle"):
            executor.collective_rpc("unpicklable_later")
        assert executor.collective_rpc("note", (1,)) == [0, 1]


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_thread_that_cannot_be_prepared(monkeypatch: pytest.MonkeyPatch, make: Make, backend: str) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_FAIL", "init_output_thread")
    executor = make(backend, worker="Deferred")
    for _ in range(2):
        with pytest.raises(WorkerCallError, match="no device"):
            executor.collective_rpc("later", (1,))
    assert executor.collective_rpc("note", (1,)) == ranks(executor)


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_shutdown_with_an_output_unfinished(make: Make, backend: str) -> None:
    executor = make(backend, worker="Deferred")
    future = executor.collective_rpc("later", (1, 0.3), non_block=True)
    executor.collective_rpc("later", (1, 0.0), reply_rank=0, non_block=True)
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 3.0
    assert future.exception() is not None


@pytest.mark.alone
def test_a_failure_on_one_rank_while_others_have_outputs_to_finish(make: Make) -> None:
    """The call has ended on a rank only when its output is finished: until then nobody says that all have ended it."""
    executor = make("mp", 2, worker="Deferred")

    def later_or_raise(worker: object) -> object:
        if worker.rank == 1:  # type: ignore[attr-defined]
            raise ValueError("boom")
        return worker.later("slow", 0.3)  # type: ignore[attr-defined]

    start = time.monotonic()
    with pytest.raises(WorkerCallError, match="boom"):
        executor.collective_rpc(later_or_raise)
    assert 0.25 < time.monotonic() - start < 0.9
    assert executor.collective_rpc("note", (1,)) == [0, 1]
