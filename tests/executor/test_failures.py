"""What happens when a rank raises, hangs, or dies: the executor's promises for breaking."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from drumline.errors import ExecutorFailedError, FailureReport, RemoteCallError, RPCTimeoutError, StartupError
from drumline.executor import Call, Executor
from tests.executor.conftest import Make, configure
from tests.executor.workers import Plain
from tests.stopped import stop


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def all_gone(pids: list[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_of(executor: Executor) -> list[int]:
    return [state.pid for state in executor.workers()]


def test_one_rank_raises_while_the_others_block(make: Make) -> None:
    executor = make(failure_grace_s=0.5)
    told: list[FailureReport] = []
    executor.register_failure_callback(told.append)
    pids = pids_of(executor)
    start = time.monotonic()
    with pytest.raises(ExecutorFailedError, match="boom rank2") as caught:
        executor.collective_rpc("raise_while_others_block", (2, 60.0), reply_rank=0)
    assert time.monotonic() - start < 2.0
    assert caught.value.report.rank == 2
    assert "raise ValueError" in caught.value.report.traceback
    assert "Ranks that did not end the call within 0.5 s of its failure: 0, 1." in str(caught.value)
    wait_until(lambda: all_gone(pids))
    wait_until(lambda: len(told) == 1)
    assert told[0].rank == 2
    assert executor.is_failed
    with pytest.raises(ExecutorFailedError, match="boom rank2"):
        executor.collective_rpc("echo")
    with pytest.raises(ExecutorFailedError):
        executor.check_health()


def test_the_grace_runs_although_nobody_waits(make: Make) -> None:
    executor = make(failure_grace_s=0.2)
    told = threading.Event()
    executor.register_failure_callback(lambda report: told.set())
    future = executor.collective_rpc("raise_while_others_block", (1, 60.0), reply_rank=0, non_block=True)
    assert told.wait(5)
    assert isinstance(future.exception(timeout=1), ExecutorFailedError)


def test_others_end_within_the_grace(make: Make) -> None:
    executor = make()
    with pytest.raises(RemoteCallError, match="boom rank2"):
        executor.collective_rpc("raise_while_others_block", (2, 0.3), reply_rank=0)
    assert not executor.is_failed
    assert executor.collective_rpc("note", (1,)) == [0, 1, 2]


def test_a_failure_after_the_output_rank_has_answered(make: Make) -> None:
    executor = make()
    assert executor.collective_rpc("raise_on", (2, "late boom", 0.2), reply_rank=0) == 0
    with pytest.raises(RemoteCallError, match="late boom rank2"):
        executor.collective_rpc("sleep", (0.4,))
    assert executor.collective_rpc("note", (1,)) == [0, 1, 2]


def test_others_hang_after_the_output_rank_has_answered(make: Make) -> None:
    executor = make(failure_grace_s=0.2)
    told = threading.Event()
    executor.register_failure_callback(lambda report: told.set())

    def hang_on_1_raise_on_2(worker: Plain) -> int:
        if worker.rank == 1:
            time.sleep(60)
        if worker.rank == 2:
            time.sleep(0.2)
            raise ValueError("late boom")
        return worker.rank

    assert executor.collective_rpc(hang_on_1_raise_on_2, reply_rank=0) == 0
    assert told.wait(5)
    with pytest.raises(ExecutorFailedError, match="late boom"):
        executor.collective_rpc("echo")


def test_others_hang_after_the_deadline(make: Make) -> None:
    executor = make(failure_grace_s=0.2)
    with pytest.raises(RPCTimeoutError):
        executor.collective_rpc("raise_on", (2, "boom", 0.3), timeout=0.1)
    assert executor.collective_rpc("note", (1,)) == [0, 1, 2]
    with pytest.raises(RPCTimeoutError):
        executor.collective_rpc("raise_while_others_block", (2, 60.0, 0.3), timeout=0.1)
    wait_until(lambda: executor.is_failed)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("how", "text"),
    [("kill", "SIGKILL"), ("exit", "exit code 3"), ("sysexit", "exit code 4"), ("sysexit text", "no more of this")],
)
def test_a_worker_dies_in_a_call(make: Make, how: str, text: str, rank: int) -> None:
    executor = make()
    told: list[FailureReport] = []
    executor.register_failure_callback(told.append)
    pids = pids_of(executor)
    futures: list[Call] = [
        executor.collective_rpc("leave", (rank, how), non_block=True),
        executor.collective_rpc("echo", non_block=True),
    ]
    start = time.monotonic()
    for future in futures:
        with pytest.raises(ExecutorFailedError, match=text) as caught:
            future.result(timeout=10)
        assert caught.value.report.rank == rank
        assert caught.value.report.pid == pids[rank]
        assert caught.value.report.phase == "leave"
    assert time.monotonic() - start < 2.0
    wait_until(lambda: all_gone(pids))
    wait_until(lambda: len(told) == 1)
    late: list[FailureReport] = []
    executor.register_failure_callback(late.append)
    assert late == told


def test_a_worker_segfaults(make: Make) -> None:
    executor = make()
    with pytest.raises(ExecutorFailedError, match="SIGSEGV"):
        executor.collective_rpc("leave", (1, "segfault"))


def test_an_idle_worker_is_killed(make: Make) -> None:
    executor = make()
    told = threading.Event()
    executor.register_failure_callback(lambda report: told.set())
    os.kill(pids_of(executor)[1], signal.SIGKILL)
    assert told.wait(2)
    with pytest.raises(ExecutorFailedError, match="SIGKILL during waiting for a call"):
        executor.collective_rpc("echo")


def test_a_death_wakes_every_waiting_thread(make: Make) -> None:
    executor = make()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            executor.collective_rpc("sleep", (30.0,))
        except ExecutorFailedError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    os.kill(pids_of(executor)[2], signal.SIGKILL)
    for thread in threads:
        thread.join(5)
    assert len(errors) == 4


def test_calls_that_wait_for_room_hear_of_the_death(make: Make) -> None:
    executor = make(mq_slots=2, mq_slot_bytes=1024)
    executor.collective_rpc("sleep", (30.0,), non_block=True)
    futures = [executor.collective_rpc("echo", ("x" * 900,), non_block=True) for _ in range(10)]
    timer = threading.Timer(0.3, lambda: os.kill(pids_of(executor)[0], signal.SIGKILL))
    timer.start()
    with pytest.raises(ExecutorFailedError, match="SIGKILL"):
        executor.collective_rpc("echo", ("x" * 900,))
    assert [type(future.exception(timeout=1)) for future in futures] == [ExecutorFailedError] * 10
    timer.join()


def test_calls_that_wait_for_room_have_a_deadline(make: Make) -> None:
    executor = make(mq_slots=2, mq_slot_bytes=1024)
    executor.collective_rpc("sleep", (0.5,), non_block=True)
    futures = [executor.collective_rpc("note", ("x" * 900,), timeout=0.1, non_block=True) for _ in range(10)]
    with pytest.raises(RPCTimeoutError, match=r"^RPC call to note timed out\. It was never sent: no room"):
        executor.collective_rpc("note", ("x" * 900,), timeout=0.1)
    errors = [str(future.exception()) for future in futures]
    assert all(error.startswith("RPC call to note timed out. ") for error in errors)
    assert re.search(r"Worker_TP1, pid \d+, .*running sleep \(call \d+\) for 0\.\d s, has not read it", errors[-1])
    sent = [error for error in errors if "never sent" not in error]
    assert executor.collective_rpc("echo", timeout=10)[2] == (2, (), {})
    assert [len(notes) for notes in executor.collective_rpc("get_seen")] == [len(sent)] * 3
    assert 0 < len(sent) < 10


def test_a_stopped_worker_ends_only_the_call(make: Make) -> None:
    executor = make()
    pid = pids_of(executor)[1]
    stop(pid)
    with pytest.raises(TimeoutError, match="RPC call to echo timed out"):
        executor.collective_rpc("echo", timeout=0.2)
    os.kill(pid, signal.SIGCONT)
    assert executor.collective_rpc("note", (1,), timeout=10) == [0, 1, 2]


def test_shutdown_kills_a_stopped_worker(make: Make) -> None:
    executor = make()
    pids = pids_of(executor)
    stop(pids[1])
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 2.0
    assert all_gone(pids)


@pytest.mark.parametrize("where", ["construct", "init_device", "load_model"])
@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_start_fails_by_an_exception(monkeypatch: pytest.MonkeyPatch, make: Make, backend: str, where: str) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_FAIL", f"{where}:raise")
    with pytest.raises(StartupError, match=f"ValueError: no {where}") as caught:
        make(backend, worker="FailsToStart")
    report = caught.value.report
    assert report.phase == where
    assert report.rank == (2 if backend == "mp" else 0)
    assert "in _fail" in report.traceback


def test_start_fails_by_a_death(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_FAIL", "load_model:kill")
    start = time.monotonic()
    with pytest.raises(StartupError, match=r"rank 2 .* was killed by SIGKILL during load_model"):
        make(worker="FailsToStart")
    assert time.monotonic() - start < 4.0


def test_start_without_progress_names_rank_and_phase(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_FAIL", "load_model:hang")
    with pytest.raises(StartupError, match=r"no progress of any process for 3 s[^$]*load_model") as caught:
        make(worker="FailsToStart", start_timeout_s=3.0)
    assert caught.value.report.rank == 2


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_every_worker_is_shut_down_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make, backend: str
) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_SHUTDOWN", str(tmp_path / "rank"))
    executor = make(backend, worker="Slow")
    threads = [threading.Thread(target=executor.shutdown) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    executor.shutdown()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"rank-{r}" for r in range(executor.world_size)]
    assert all(file.read_text() == "shutdown\n" for file in files)
    with pytest.raises(ExecutorFailedError, match="shut down"):
        executor.collective_rpc("echo")


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_shutdown_after_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make, backend: str
) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_FAIL", "load_model:raise")
    monkeypatch.setenv("DRUMLINE_TEST_SHUTDOWN", str(tmp_path / "rank"))
    with pytest.raises(StartupError):
        make(backend, worker="FailsToStart")
    failed = 2 if backend == "mp" else 0
    assert f"rank-{failed}" in [file.name for file in tmp_path.iterdir()]


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_shutdown_ends_calls_in_flight(make: Make, backend: str) -> None:
    executor = make(backend)
    future = executor.collective_rpc("sleep", (1.0,), non_block=True)
    executor.shutdown()
    with pytest.raises(ExecutorFailedError, match="shut down"):
        future.result(timeout=1)


def test_sigterm_ends_a_worker_cleanly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_SHUTDOWN", str(tmp_path / "rank"))
    executor = make()
    os.kill(pids_of(executor)[1], signal.SIGTERM)
    wait_until(lambda: executor.is_failed)
    assert (tmp_path / "rank-1").exists()
    assert executor.failure is not None
    assert executor.failure.rank == 1


def test_sigterm_interrupts_a_call_once_and_never_the_clean_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make
) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_SHUTDOWN", str(tmp_path / "rank"))
    monkeypatch.setenv("DRUMLINE_TEST_SLOW_SHUTDOWN", "1")
    executor = make()
    future = executor.collective_rpc("sleep", (60.0, 1), non_block=True)
    victim = psutil.Process(pids_of(executor)[1])
    time.sleep(0.2)  # it has begun
    began = time.monotonic()
    victim.terminate()
    wait_until(lambda: (tmp_path / "rank-1").exists())
    victim.terminate()
    with pytest.raises(ExecutorFailedError) as caught:
        future.result(timeout=10)
    assert time.monotonic() - began < 2.0
    report = caught.value.report
    assert (report.rank, report.what, report.type, report.phase) == (1, "signal", "SIGTERM", "sleep")
    assert (tmp_path / "rank-1").read_text() == "shutdown\nwhole\n"


def test_the_ladder_interrupts_calls_so_that_workers_clean_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make
) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_SHUTDOWN", str(tmp_path / "rank"))
    executor = make(stop_timeout_s=2.0)
    executor.collective_rpc("sleep", (60.0,), non_block=True)
    time.sleep(0.2)
    began = time.monotonic()
    executor.shutdown()
    assert 2.0 <= time.monotonic() - began < 3.5  # asked, SIGTERM, no SIGKILL
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["shutdown\n"] * executor.world_size


def test_a_failure_callback_may_shut_down(make: Make) -> None:
    executor = make()
    ended = threading.Event()

    def callback(report: FailureReport) -> None:
        executor.shutdown()
        ended.set()

    executor.register_failure_callback(callback)
    os.kill(pids_of(executor)[0], signal.SIGKILL)
    assert ended.wait(10)


def test_what_cannot_be_sent(make: Make) -> None:
    executor = make(mq_largest_bytes=9_000_000)
    with pytest.raises(RemoteCallError, match="pickle"):
        executor.collective_rpc("unpicklable")
    with pytest.raises(RemoteCallError, match="the limit is 9000000"):
        executor.collective_rpc("big", (10_000_000,), reply_rank=1)
    with pytest.raises(ValueError, match="--mq-largest-bytes"):
        executor.collective_rpc("note", ([bytes(100_000) for _ in range(100)],))
    with pytest.raises(TypeError, match="pickle"):
        executor.collective_rpc("echo", (threading.Lock(),))
    assert executor.collective_rpc("note", (1,)) == [0, 1, 2]


def test_gloo_one_rank_raises_before_its_collective(make: Make) -> None:
    executor = make(worker="Gloo", failure_grace_s=0.5, preload=("torch",))
    assert executor.collective_rpc("total") == [6.0, 6.0, 6.0]
    pids = pids_of(executor)
    start = time.monotonic()
    with pytest.raises(ExecutorFailedError, match="boom rank2"):
        executor.collective_rpc("step", (2,), reply_rank=0)
    assert time.monotonic() - start < 2.0
    wait_until(lambda: all_gone(pids))


def test_a_shared_waiter_and_phases(make: Make) -> None:
    from drumline.transport import Waiter

    phases: list[tuple[int, str]] = []
    waiter = Waiter.create("engine")
    config = configure()
    executor = Executor.get_class(config)(
        config, waiter=waiter, on_phase=lambda state: phases.append((state.rank, state.phase))
    )
    try:
        future = executor.collective_rpc("sleep", (0.1,), non_block=True)
        assert waiter.wait(lambda: future.done() or None, time.monotonic() + 10)
        for rank in range(3):
            mine = [phase for r, phase in phases if r == rank]
            assert mine[-4:] == ["init_device", "load_model", "load_model 50%", "ready"]
    finally:
        executor.shutdown()
        waiter.close()


def test_names(make: Make) -> None:
    names = [state.name for state in make().workers()]
    assert names == ["Worker_TP0", "Worker_TP1", "Worker_TP2"]


def test_a_failure_callback_that_raises_stops_no_other(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make("mp", 2)
    told: list[FailureReport] = []

    def broken(report: FailureReport) -> None:
        raise ValueError("odd callback")

    for callback in (told.append, broken, told.append):
        executor.register_failure_callback(callback)
    os.kill(executor.workers()[0].pid, signal.SIGKILL)
    wait_until(lambda: len(told) == 2)
    assert "a failure callback failed" in caplog.text


def test_questions_after_the_shutdown(make: Make, backend: str) -> None:
    executor = make(backend)
    executor.shutdown()
    assert executor.busy_ns() == []
    assert {state.phase for state in executor.workers()} == {"ended"}
    if backend == "mp":
        with pytest.raises(ExecutorFailedError, match="was shut down"):
            executor.live_report()
    with pytest.raises(ExecutorFailedError, match="was shut down"):
        executor.check_health()


@pytest.mark.parametrize("timeout", [None, 0.3])
def test_a_failure_while_a_rank_is_in_an_earlier_call(make: Make, timeout: float | None) -> None:
    executor = make("mp", 2, failure_grace_s=1.5)
    earlier = executor.collective_rpc("sleep", (2.5, 1), non_block=True, expected_s=60)
    failing = [executor.collective_rpc(boom, non_block=True, timeout=timeout) for _ in range(3)]
    start = time.monotonic()
    for call in failing:
        with pytest.raises((RemoteCallError, RPCTimeoutError)):
            call.result(10)
        assert timeout is None or time.monotonic() - start < 2.0
    assert earlier.result(10) == [0, 1]
    assert executor.collective_rpc("echo", timeout=10) == [(0, (), {}), (1, (), {})]
    assert not executor.is_failed


def test_the_grace_of_a_rank_that_was_in_an_earlier_call(make: Make) -> None:
    executor = make("mp", 2, failure_grace_s=0.5)
    executor.collective_rpc("sleep", (1.0, 1), non_block=True)
    with pytest.raises(ExecutorFailedError, match="Ranks that did not end the call within"):
        executor.collective_rpc("raise_while_others_block", (0, 60.0), timeout=30)


def boom(worker: Plain) -> None:
    raise ValueError(f"boom rank{worker.rank}")
