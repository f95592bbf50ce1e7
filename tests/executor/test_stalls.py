"""Ranks that hang are found, told apart and reported with stacks; whatever only takes long is left alone."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig, ParallelConfig
from drumline.errors import ExecutorFailedError, FailureReport
from drumline.executor import Executor
from drumline.executor.stalls import RankFacts, Seen, Stall, StallWatch, odd_ranks
from drumline.processes.live import innermost, only_stacks
from tests.executor.conftest import Make, configure
from tests.executor.test_failures import all_gone, pids_of, wait_until
from tests.executor.test_waits import wait_for_state
from tests.stopped import stop

STUCK = "tests.executor.stuck"
STALL_S = 1.0
START_S = 3.0
"""More than any step of a start takes on a busy machine."""
SLACK_S = 2.0
"""From the end of the stall timeout to the report."""


# ---- when: pure ------------------------------------------------------------------------------------------------------


def looks(
    watch: StallWatch,
    until: float,
    ranks: Callable[[float], list[Seen]],
    sent: int,
    patience: dict[int, float] | None = None,
) -> list[tuple[float, Stall]]:
    """What looks every half second from 0 on say."""
    found = []
    for step in range(int(until * 2) + 1):
        now = 1000.0 + step / 2
        stall = watch.look(ranks(step / 2), sent, patience or {}, now)
        if stall is not None:
            found.append((step / 2, stall))
    return found


def seen(begun: int, ended: int, sign: Any = 0) -> Seen:
    return Seen(begun, ended, (sign,))


def test_a_quiet_rank_is_suspected_at_half_time_and_hangs_at_the_end() -> None:
    found = looks(StallWatch(10.0), 12.0, lambda now: [seen(5, 5), seen(5, 4)], 5)
    assert [(at, stall.over) for at, stall in found[:1]] == [(5.0, False)]
    assert next(at for at, stall in found if stall.over) == 10.0
    assert all(stall.ranks == (1,) for _, stall in found)
    assert found[-1][1].seconds == 12.0


@pytest.mark.parametrize(
    ("ranks", "sent", "patience"),
    [
        pytest.param(lambda now: [seen(5, 5), seen(5, 5)], 5, {}, id="all has ended"),
        pytest.param(lambda now: [seen(5, 5), seen(3, 3)], 0, {}, id="nothing is in flight"),
        pytest.param(lambda now: [seen(5, 4, now)], 5, {}, id="it moves"),
        pytest.param(lambda now: [seen(5, 4)], 5, {5: math.inf}, id="declared"),
        pytest.param(lambda now: [seen(5, 4)], 5, {5: 100.0}, id="declared for long enough"),
        pytest.param(lambda now: [seen(4, 3), seen(5, 4)], 5, {4: 100.0}, id="another is in an earlier long one"),
        pytest.param(lambda now: [seen(5, 4, now), seen(5, 4)], 5, {}, id="another one moves in the same call"),
        pytest.param(lambda now: [seen(5, 4, now), seen(6, 5)], 6, {}, id="another one moves in an earlier call"),
    ],
)
def test_what_is_no_hang(ranks: Callable[[float], list[Seen]], sent: int, patience: dict[int, float]) -> None:
    assert looks(StallWatch(10.0), 40.0, ranks, sent, patience) == []


@pytest.mark.parametrize(
    ("ranks", "sent", "patience", "at", "who"),
    [
        (lambda now: [seen(5, 4), seen(5, 4)], 5, {}, 10.0, (0, 1)),
        (lambda now: [seen(4, 4)], 5, {}, 10.0, (0,)),  # it has not even read its call
        (lambda now: [seen(5, 4)], 5, {5: 15.0}, 15.0, (0,)),  # longer than it declared
        (lambda now: [seen(5, 4)], 5, {5: 3.0}, 10.0, (0,)),
        (lambda now: [seen(100 + int(now), 100 + int(now), now), seen(5, 4)], 200, {}, 10.0, (1,)),  # others run on
        (lambda now: [seen(5, 4, min(now, 7.0))], 5, {}, 17.0, (0,)),
    ],
)
def test_what_is_one(
    ranks: Callable[[float], list[Seen]], sent: int, patience: dict[int, float], at: float, who: tuple[int, ...]
) -> None:
    over = [(when, stall.ranks) for when, stall in looks(StallWatch(10.0), 30.0, ranks, sent, patience) if stall.over]
    assert over[0] == (at, who)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    watch = StallWatch(10.0)
    assert watch.look([seen(5, 4)], 5, {}, 1000.0) is None
    assert watch.look([seen(5, 4)], 5, {}, 1100.0) is None
    for now in range(1101, 1105):
        assert watch.look([seen(5, 4)], 5, {}, now) is None
    assert watch.look([seen(5, 4)], 5, {}, 1105.0) == Stall((0,), 5.0, False)
    watch.rest()
    assert watch.look([seen(5, 4)], 5, {}, 1106.0) is None


def facts(rank: int, state: str = "S", begun: int = 5, ended: int = 4, waits_for: tuple[int, ...] = ()) -> RankFacts:
    return RankFacts(
        rank=rank,
        state=state,
        begun=begun,
        ended=ended,
        waits_for=waits_for,
        waits_in="all_reduce" if waits_for else "",
    )


@pytest.mark.parametrize(
    ("ranks", "odd"),
    [
        ([facts(0), facts(1, "T"), facts(2)], {1: "is stopped (T)"}),
        ([facts(0, waits_for=(1,)), facts(1, "", 5, 4)], {1: "is gone"}),
        ([facts(0, waits_for=(1,)), facts(1)], {1: "does not come where rank 0 waits (all_reduce)"}),
        # stage 0 (ranks 0, 1) is waited for by stage 1, but only rank 1 keeps everybody
        (
            [facts(0, waits_for=(1,)), facts(1), facts(2, waits_for=(0,)), facts(3, waits_for=(1,))],
            {1: "does not come"},
        ),
        ([facts(0, waits_for=(1,)), facts(1, waits_for=(0,))], {}),
        ([facts(0, ended=5), facts(1)], {1: "has not ended a call that others have"}),
        ([facts(0), facts(1, begun=4, ended=4)], {0: "has not ended a call that others have"}),
        ([facts(0, ended=5), facts(1, begun=4, ended=4)], {1: "has not begun a call that others have"}),
        ([facts(0), facts(1)], {}),
    ],
)
def test_who_is_odd(ranks: list[RankFacts], odd: dict[int, str]) -> None:
    found = dict(odd_ranks(ranks))
    assert found.keys() == odd.keys()
    assert all(found[rank].startswith(why) for rank, why in odd.items())


def test_stacks_are_told_from_log_lines() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in poll\n\nCurrent thread 0x02 (most recent call '
        'first):\n  File "b.py", line 2 in inner\n  File "b.py", line 3 in outer\n'
    )
    assert only_stacks("INFO something\n" + dump) == dump
    assert innermost(dump, 1) == '  File "b.py", line 2 in inner'
    assert innermost("no stack: state T") == ""


# ---- real processes --------------------------------------------------------------------------------------------------


def hang_of(executor: Executor, begin: Callable[[], object], after_s: float = STALL_S) -> FailureReport:
    """The report of the hang that a call ends in; checks what all of them have in common."""
    told: list[FailureReport] = []
    executor.register_failure_callback(told.append)
    pids = pids_of(executor)
    began = time.monotonic()
    with pytest.raises(ExecutorFailedError) as caught:
        begin()
    assert after_s <= time.monotonic() - began < after_s + SLACK_S
    report = caught.value.report
    assert report.what == "hang"
    assert "no progress for" in report.headline()
    assert "\n" not in report.headline()
    file = Path(report.stacks_file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == report.stacks
    assert str(caught.value).count("most recent call first") == 0  # those are in the file
    assert len(str(caught.value)) < 4000
    wait_until(lambda: all_gone(pids))
    wait_until(lambda: told == [report])
    return report


def block_of(report: FailureReport, rank: int) -> str:
    """What the file says of one rank."""
    blocks = re.split(r"^==== ", report.stacks, flags=re.MULTILINE)[1:]
    return next(block for block in blocks if f"(rank {rank}, " in block.partition("\n")[0])


def test_a_stopped_worker(make: Make) -> None:
    executor = make("mp", 3, stall_timeout_s=STALL_S)
    pid = pids_of(executor)[1]
    stop(pid)
    report = hang_of(executor, lambda: executor.collective_rpc("echo"))
    assert (report.rank, report.pid, report.role, report.phase) == (1, pid, "Worker_TP1", "echo")
    assert "rank 1 (Worker_TP1, pid " in report.text()
    assert "is stopped (T)" in report.text()
    assert "no stack: state T" in block_of(report, 1)
    assert "in wait" in block_of(report, 0)  # the others have stacks: they wait for a call


@pytest.mark.parametrize("how", ["busy_in_python", "busy_in_c", "blocked_in_c", "waits_for_a_lock"])
def test_a_worker_that_is_stuck(make: Make, how: str) -> None:
    executor = make("mp", 3, worker=f"{STUCK}:Stuck", stall_timeout_s=STALL_S)
    report = hang_of(executor, lambda: executor.collective_rpc(how))
    assert report.rank == 2
    assert f"in {how}" in block_of(report, 2)
    assert f"in {how}" in report.text()  # the console says where it stands
    assert f"running {how} (call 1) for" in report.text()


@pytest.mark.parametrize("what", ["warm-up", pytest.param("KV cache", marks=pytest.mark.chaos)])
def test_a_worker_that_is_stuck_in_the_calls_of_a_start(make: Make, what: str) -> None:
    """These may take longer than others, but not for ever: they have the patience of a start."""
    options = {"stall_timeout_s": STALL_S / 10, "start_timeout_s": START_S}
    executor = make("mp", 2, worker=f"{STUCK}:StuckInItsStart", **options)
    begin = partial(executor.initialize_from_config, [what, what])  # type: ignore[list-item]
    report = hang_of(executor, begin, START_S)
    assert report.rank == 1
    assert f"(--start-timeout {START_S:g})" in report.text()
    assert report.phase == ("compile_or_warm_up_model" if what == "warm-up" else "initialize_from_config")


def test_a_rank_that_does_not_come_to_a_collective(make: Make) -> None:
    executor = make("mp", 3, worker=f"{STUCK}:StaysAway", stall_timeout_s=STALL_S)
    executor.collective_rpc("total")
    report = hang_of(executor, lambda: executor.collective_rpc("third"))
    assert report.rank == 1
    waits = re.search(r"waits in all_reduce (\d+) of tp ranks 0, 1, 2 for rank 1", block_of(report, 0))
    comes = re.search(r"has come to collective (\d+) of tp ranks 0, 1, 2", block_of(report, 1))
    assert waits is not None
    assert comes is not None
    assert int(waits[1]) == int(comes[1]) + 1
    assert "does not come where ranks 0, 2 wait" in report.text()
    assert "in third" in block_of(report, 1)


def stages() -> EngineConfig:
    plain = configure("mp", 1, worker=f"{STUCK}:Stages", stall_timeout_s=STALL_S)
    parallel = ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp", distributed_timeout_s=60.0)
    return plain.with_(parallel=parallel)


def test_a_stage_that_computes_for_long_keeps_nobody_from_waiting() -> None:
    config = stages()
    with Executor.get_class(config)(config) as executor:
        assert executor.execute_model(Plan(step=3)) == b"hidden states"  # type: ignore[arg-type]
        assert not executor.is_failed


def test_a_stage_that_sends_nothing() -> None:
    config = stages()
    with Executor.get_class(config)(config) as executor:
        report = hang_of(executor, lambda: executor.execute_model(Plan(step=-60)))  # type: ignore[arg-type]
        assert report.rank == 0
        assert "waits in recv of pp ranks 0, 1 for rank 0" in block_of(report, 1)
        assert "does not come where rank 1 waits" in report.text()
        assert "in execute_model" in block_of(report, 0)


@pytest.mark.parametrize("backend", ["mp", pytest.param("uni", marks=pytest.mark.chaos)])
def test_what_only_takes_long_is_left_alone(make: Make, caplog: pytest.LogCaptureFixture, backend: str) -> None:
    executor = make(backend, worker=f"{STUCK}:Stuck", stall_timeout_s=0.8)
    executor.collective_rpc("sleep", (1.2,), expected_s=math.inf)
    executor.collective_rpc("sleep", (1.2,), timeout=20.0)  # a deadline of its own
    executor.collective_rpc("tells_phases", (1.5,))
    for _ in range(20):
        executor.collective_rpc("sleep", (0.05,))
    assert not executor.is_failed
    assert "no progress" not in caplog.text


def test_an_idle_stopped_worker_is_no_hang_until_work_comes(make: Make) -> None:
    executor = make("mp", 2, stall_timeout_s=STALL_S)
    executor.collective_rpc("echo")
    stop(pids_of(executor)[0])
    time.sleep(2 * STALL_S)
    assert not executor.is_failed
    report = hang_of(executor, lambda: executor.collective_rpc("echo"))
    assert report.rank == 0


def test_who_goes_on_in_time_is_only_suspected(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make("mp", 2, stall_timeout_s=4.0)
    told: list[str] = []
    executor.register_stall_callback(told.append)
    pid = pids_of(executor)[1]
    stop(pid)
    wait_for_state(pid, "T")
    call = executor.collective_rpc("echo", non_block=True)
    wait_until(lambda: bool(told))
    assert re.match(r"no progress for [23]\.\d s with work outstanding: rank 1 \(Worker_TP1, pid \d+, stopped", told[0])
    os.kill(pid, signal.SIGCONT)
    assert len(call.result(timeout=20)) == 2
    wait_until(lambda: told[1:] == [""])
    assert not executor.is_failed
    assert [r.levelno for r in caplog.records if "no progress" in r.getMessage()] == [logging.WARNING]


def test_a_hang_in_the_process_of_the_caller(make: Make) -> None:
    executor = make("uni", stall_timeout_s=STALL_S)
    began = time.monotonic()
    with pytest.raises(ExecutorFailedError) as caught:
        executor.collective_rpc("sleep", (6.0,))
    assert STALL_S <= time.monotonic() - began < STALL_S + SLACK_S
    assert "in sleep" in caught.value.report.stacks
    assert caught.value.report.what == "hang"


@pytest.mark.parametrize("what", ["KV cache", pytest.param("warm-up", marks=pytest.mark.chaos)])
def test_a_start_that_hangs_in_the_process_of_the_caller(make: Make, what: str) -> None:
    executor = make("uni", worker=f"{STUCK}:StuckInItsStart", stall_timeout_s=STALL_S / 10, start_timeout_s=STALL_S)
    began = time.monotonic()
    with pytest.raises(ExecutorFailedError) as caught:
        executor.initialize_from_config([what])  # type: ignore[list-item]
    assert STALL_S <= time.monotonic() - began < STALL_S + SLACK_S
    assert "(--start-timeout 1)" in str(caught.value)
    assert caught.value.report.phase == ("compile_or_warm_up_model" if what == "warm-up" else "initialize_from_config")


def test_a_step_in_the_callers_thread_that_hangs(make: Make) -> None:
    executor = make("uni", stall_timeout_s=STALL_S, worker=f"{STUCK}:Sleeper")
    told = threading.Event()
    executor.register_failure_callback(lambda report: told.set())
    assert executor.run_steps_here()
    began = time.monotonic()
    step = threading.Thread(target=lambda: executor.execute_model(Plan(step=6), non_block=True))
    step.start()
    assert told.wait(STALL_S + SLACK_S)
    assert time.monotonic() - began >= STALL_S
    assert executor.failure is not None
    assert "in execute_model" in executor.failure.stacks
    step.join()


class Plan:
    def __init__(self, step: int) -> None:
        self.step = step


def test_a_report_of_a_healthy_executor_disturbs_nobody(make: Make) -> None:
    executor = make("mp", 3, worker="Gloo")
    done: list[float] = []
    running = threading.Event()

    def work() -> None:
        while not running.wait(0.0):
            done.append(executor.collective_rpc("total", reply_rank=0))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(done) > 5)
    live = executor.live_report()
    before = len(done)
    wait_until(lambda: len(done) > before + 5)
    running.set()
    thread.join()
    assert set(done) == {6.0}
    assert [process.rank for process in live.processes] == [0, 1, 2]
    assert all("most recent call first" in process.stacks for process in live.processes)
    assert all(process.collectives for process in live.processes)
    assert live.text().count("====") == 3
