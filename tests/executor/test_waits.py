"""Long waits explain themselves; waits that are no trouble are silent."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from pathlib import Path

import pytest

from drumline.errors import RPCTimeoutError
from drumline.executor import Executor
from drumline.executor.explain import Doing, unanswered
from drumline.executor.keeper import _LongWait
from tests.executor.conftest import Make
from tests.executor.test_failures import pids_of, wait_until
from tests.stopped import stop


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "of waiting" in record.getMessage()]


def wait_for_state(pid: int, state: str) -> None:
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == state)


def test_a_stopped_rank_is_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make("mp", 3, long_wait_s=0.2)
    pids = pids_of(executor)
    stop(pids[1])
    wait_for_state(pids[1], "T")
    future = executor.collective_rpc("echo", non_block=True)  # nobody waits for it
    wait_until(lambda: bool(lines(caplog)))
    os.kill(pids[1], signal.SIGCONT)
    assert len(future.result(timeout=20)) == 3
    text = lines(caplog)[0]
    assert re.match(r"executor: 0\.\d s of waiting for echo \(call \d+\)\. Not answered by rank 1 \(Worker_TP1, ", text)
    assert f"pid {pids[1]}, stopped (T)): has not read it." in text


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_busy_rank_is_named(make: Make, caplog: pytest.LogCaptureFixture, backend: str) -> None:
    executor = make(backend, long_wait_s=0.2)
    executor.collective_rpc("sleep", (0.9, 0))
    said = lines(caplog)
    assert 1 <= len(said) <= 2  # after 0.2 s or a little more, then when that has doubled
    assert re.search(r"sleep \(call 1\)\. Not answered by rank 0 \(.*pid \d+, .*\): running it for 0\.\d s\.$", said[0])


@pytest.mark.alone
@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_declared_long_calls_and_idleness_are_silent(
    make: Make, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    executor = make(backend, long_wait_s=0.1)
    executor.collective_rpc("sleep", (0.6,), expected_s=math.inf)
    executor.collective_rpc("sleep", (0.6,), expected_s=5.0)
    time.sleep(0.6)
    for _ in range(10):
        executor.collective_rpc("sleep", (0.05,))
    assert lines(caplog) == []


def test_a_full_queue_names_who_does_not_read(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make("mp", 3, long_wait_s=0.2, mq_slots=4, mq_slot_bytes=512)
    pids = pids_of(executor)
    stop(pids[2])
    wait_for_state(pids[2], "T")
    futures = [executor.collective_rpc("note", (i,), non_block=True) for i in range(20)]
    wait_until(lambda: bool(lines(caplog)))
    os.kill(pids[2], signal.SIGCONT)
    assert futures[19].result(timeout=20) == [0, 1, 2]
    text = lines(caplog)[0]
    assert "Not answered by rank 2 (Worker_TP2, " in text
    assert "16 calls wait for room in the broadcast queue; slots not read yet: rank 0: 0, rank 1: 0, rank 2: 4." in text


def test_a_worker_that_cannot_answer_says_so(make: Make, tmp_path: Path) -> None:
    executor = make("mp", 2, long_wait_s=0.2, mq_answer_slots=2, mq_answer_slot_bytes=1024, log_dir=str(tmp_path))

    def log_of_rank_0() -> str:
        return "".join(path.read_text() for path in tmp_path.rglob("Worker_TP0-*"))

    futures = [executor.collective_rpc("big", (900,), non_block=True) for _ in range(4)]
    with executor._table.lock:  # type: ignore[attr-defined]  # nobody takes answers
        wait_until(lambda: "of waiting" in log_of_rank_0())
    assert [len(value) for value in futures[3].result(timeout=20)] == [900, 900]
    assert re.search(
        r"rank 0: 0\.\d s of waiting to send the answer to big \(call \d+\) to the executor "
        rf"\(pid {os.getpid()}, state [RS]\): no room .*slots not read yet, by reader: \[2\], of 2",
        log_of_rank_0(),
    )


def test_the_text_of_a_timeout_names_each_rank(make: Make) -> None:
    executor = make("mp", 3)
    pids = pids_of(executor)
    executor.collective_rpc("sleep", (0.3, 0), reply_rank=2)
    progress = executor._progress  # type: ignore[attr-defined]
    wait_until(lambda: progress.ended()[1] == 1)
    stop(pids[1])
    wait_for_state(pids[1], "T")
    with pytest.raises(RPCTimeoutError) as caught:
        executor.collective_rpc("echo", timeout=0.1)
    os.kill(pids[1], signal.SIGCONT)
    assert re.match(
        rf"RPC call to echo timed out\. Not answered by rank 0 \(Worker_TP0, pid {pids[0]}, sleeping \(S\)\): running "
        rf"sleep \(call 1\) for 0\.\d s, has not read it; rank 1 \(Worker_TP1, pid {pids[1]}, stopped \(T\)\): has not "
        r"read it\.$",
        str(caught.value),
    )


def test_a_health_check_has_a_deadline(make: Make) -> None:
    executor = make("mp", 2)
    executor.collective_rpc("sleep", (0.3, 1), non_block=True)
    with pytest.raises(RPCTimeoutError, match=r"^RPC call to check_health timed out\. Not answered by rank 1 "):
        executor.check_health(timeout=0.1)
    executor.check_health()


@pytest.mark.alone
def test_an_idle_executor_costs_nothing(executor: Executor) -> None:
    executor.collective_rpc("echo", non_block=True).result()
    time.sleep(1.3)  # the keeper goes on patrol for a second
    before = time.process_time()
    time.sleep(0.7)
    assert time.process_time() - before < 0.003


def doing(rank: int, call_id: int, since: float | None) -> Doing:
    return Doing(rank=rank, name=f"W{rank}", pid=70 + rank, state="S", call_id=call_id, since=since)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (doing(1, 5, 8.0), "rank 1 (W1, pid 71, sleeping (S)): running it for 2.0 s"),
        (doing(1, 5, None), "rank 1 (W1, pid 71, sleeping (S)): has ended it"),
        (doing(1, 6, 8.0), "rank 1 (W1, pid 71, sleeping (S)): running m6 (call 6) for 2.0 s"),
        (doing(1, 4, 8.0), "rank 1 (W1, pid 71, sleeping (S)): running m4 (call 4) for 2.0 s, has not read it"),
        (doing(1, 0, None), "rank 1 (W1, pid 71, sleeping (S)): has not read it"),
        (doing(2, 0, None), "rank 1"),
    ],
)
def test_what_is_said_of_a_rank(seen: Doing, said: str) -> None:
    assert unanswered(5, [1], [seen], lambda call_id: f"m{call_id}", 10.0) == f"Not answered by {said}."


def test_a_call_that_waits_for_an_earlier_one() -> None:
    assert "waits for an earlier call" in unanswered(5, [], [], str, 10.0)


def test_when_a_wait_is_explained() -> None:
    wait = _LongWait(60.0)
    said = [(at, waited) for at in range(0, 500, 5) if (waited := wait.look((1, 0.0), at)) is not None]
    assert said == [(60, 60), (120, 120), (240, 240), (480, 480)]
    assert [at for at in range(500, 700, 5) if wait.look((2, 100.0), at) is not None] == [600]
    wait.over()
    assert wait.look((2, 0.0), 700) is None
    assert wait.look(None, 800) is None
