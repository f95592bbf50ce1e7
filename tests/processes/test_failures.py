"""How failures of children reach their owner, and how stubborn ones are ended."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.errors import DrumlineError, StartupError
from drumline.processes import EventKind, ForkServer, MemberEvent, ProcessSpec, State, Supervisor
from tests.chaos.preload.sitecustomize import NUMBERS
from tests.chaos.tree import PRELOAD
from tests.processes.conftest import House
from tests.processes.targets import TARGETS
from tests.stopped import stop


@pytest.mark.parametrize(
    ("how", "what", "kind", "message"),
    [
        ("raise", "exception", "ValueError", "boom in a child"),
        ("odd", "exception", "tests.processes.targets.OddError", "(its text cannot be made: RuntimeError)"),
        ("exit3", "exit", "exit code 3", ""),
        ("sysexit", "exit", "exit code 5", ""),
        ("segfault", "signal", "SIGSEGV", ""),
        ("return", "exit", "exit code 0", "it ended although nobody had asked it to"),
    ],
)
def test_failure_before_ready(house: House, how: str, what: str, kind: str, message: str) -> None:
    good = house.spawn("block", role="Worker_0", rank=0)
    bad = house.spawn("break_in", how.encode(), role="Worker_1", rank=1)
    while house.event(EventKind.PHASE).member is not bad:
        pass
    start = time.monotonic()
    with pytest.raises(StartupError) as caught:
        house.ready(good, bad)
    assert time.monotonic() - start < 2
    report = caught.value.report
    assert (report.role, report.rank, report.pid, report.phase) == ("Worker_1", 1, bad.pid, "load_model")
    assert (report.what, report.type, report.message) == (what, kind, message)
    assert report.log_file == bad.log_file
    assert report.folded == []
    if how in ("raise", "odd"):
        assert "targets.py" in report.traceback
        assert "Traceback" in Path(bad.log_file).read_text()
    if how == "segfault":
        assert "last words before the segfault" in report.log_tail
        assert "Fatal Python error: Segmentation fault" in report.log_tail
    assert (good.state, bad.state) == (State.GONE, State.GONE)


@pytest.mark.parametrize(("how", "text"), [("late-raise", "boom in a child"), ("late-exit3", "exit code 3")])
def test_failure_after_ready(house: House, how: str, text: str) -> None:
    bad = house.spawn("break_in", how.encode())
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert text in report.text()
    assert bad.report is report
    assert house.supervisor.failure is report


def test_target_that_cannot_be_imported(house: House) -> None:
    with pytest.raises(StartupError, match="no_such_target"):
        house.ready(house.spawn("no_such_target"))


def test_later_failures_are_folded_under_the_first(make_house: Callable[..., House]) -> None:
    """So far apart that a busy machine does not change their order; told as soon as all have said why."""
    house = make_house(window_s=10.0)
    members = [house.spawn("late_twin", role=f"Worker_{i}", rank=i) for i in range(3)]
    house.ready(*members)
    for member, delay in zip(members, (b"500", b"0", b"250"), strict=True):
        member.send(delay)
    event = house.event(EventKind.FAILURE)
    assert event.report is not None
    assert event.report.role == "Worker_1"
    assert [report.role for report in event.report.folded] == ["Worker_2", "Worker_0"]
    assert set(event.members) == set(members)


def test_a_kill_comes_before_the_exceptions_that_it_causes(house: House) -> None:
    killed, other = house.spawn("serve", role="Worker_0"), house.spawn("late_twin", role="Worker_1")
    house.ready(killed, other)
    other.send(b"0")
    killed.signal(signal.SIGKILL)
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert (report.role, report.type) == ("Worker_0", "SIGKILL")
    assert [one.role for one in report.folded] == ["Worker_1"]


def test_a_child_that_closes_its_connection_is_ended(house: House) -> None:
    member = house.spawn("break_in", b"close")
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert "closed its control connection" in report.message
    house.supervisor.shutdown([member])
    assert str(member.exit) == "signal 9"


def test_no_progress_names_who_and_where(house: House) -> None:
    member = house.spawn("progress", b"40 stuck", rank=0)
    house.event(EventKind.PHASE)
    start = time.monotonic()
    with pytest.raises(StartupError) as caught:
        house.supervisor.wait_all_ready([member], no_progress_timeout=1.0)
    assert time.monotonic() - start > 2.0  # forty phases of 50 ms were progress
    assert caught.value.report.what == "hang"
    assert "no progress of any process for 1 s" in str(caught.value)
    assert f"Worker_0 in phase 'load_model 39' (pid {member.pid}, state S" in str(caught.value)
    assert "most recent call first" in caught.value.report.stacks
    assert Path(caught.value.report.stacks_file).read_text() == caught.value.report.stacks
    assert member.state is State.GONE


def test_no_progress_names_the_one_that_is_stopped(house: House) -> None:
    """Others wait for it; nobody else could tell, so it gets no longer either."""
    members = [house.spawn("progress", b"1 stuck", role=f"Worker_{rank}", rank=rank) for rank in range(3)]
    for _ in members:
        house.event(EventKind.PHASE)
    stop(members[1].pid)
    with pytest.raises(StartupError) as caught:
        house.supervisor.wait_all_ready(members[1:], 1.0, deputies_s=60.0)
    assert (caught.value.report.role, caught.value.report.pid) == ("Worker_1", members[1].pid)
    assert f"(pid {members[1].pid}, state T" in str(caught.value)


def test_no_progress_names_a_stopped_fork_server(house: House) -> None:
    stop(house.server.pid)
    member = house.spawn("serve")
    with pytest.raises(StartupError) as caught:
        house.supervisor.wait_all_ready([member], 1.0, deputies_s=60.0)
    assert (caught.value.report.role, caught.value.report.pid) == ("ForkServer", house.server.pid)
    assert f"(pid {house.server.pid}, state T)" in str(caught.value)


def test_what_it_tells_of_others_is_progress(house: House) -> None:
    """An engine core whose workers load for longer than the limit, and get on."""
    member = house.spawn("words", b"60")
    house.event(EventKind.MESSAGE)
    start = time.monotonic()
    house.supervisor.wait_all_ready([member], no_progress_timeout=1.5)
    assert time.monotonic() - start > 2.0


def test_a_fork_server_that_fails_says_why(make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children die with it, and their owner hears of the exception, not only of an exit code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PRELOAD, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CHAOS_FAULTS", "1")
    house = make_house()
    member = house.spawn("serve")
    house.ready(member)
    os.kill(house.server.pid, NUMBERS["raise"])
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert (report.role, report.pid, report.phase) == ("ForkServer", house.server.pid, "ready")
    assert report.headline().endswith("raised sitecustomize.InjectedError: a fault of the test while ready")
    assert "in _turn" in report.traceback
    house.supervisor.shutdown()
    assert member.state is State.GONE


def test_a_deputy_has_longer(house: House) -> None:
    member = house.spawn("progress", b"1 stuck")
    house.event(EventKind.PHASE)
    start = time.monotonic()
    with pytest.raises(StartupError, match="no progress"):
        house.supervisor.wait_all_ready([member], 0.2, deputies_s=1.0)
    assert time.monotonic() - start > 1.0


def test_sigterm_from_outside_ends_a_child_and_is_told(house: House) -> None:
    member = house.spawn("serve")
    house.ready(member)
    os.kill(member.pid, signal.SIGTERM)
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert report.type == "SIGTERM"


def test_stop_interrupts_a_blocking_load_and_lets_it_clean_up(house: House) -> None:
    member = house.spawn("block")
    house.event(EventKind.MESSAGE)
    start = time.monotonic()
    house.supervisor.shutdown()
    assert time.monotonic() - start < 2.0  # no rung of the ladder is over
    assert str(member.exit) == "exit code 0"
    assert Path(member.log_file).with_suffix(".ended").exists()


def test_stop_and_sigterm_do_not_interrupt_the_clean_up(house: House) -> None:
    member = house.spawn("clean_up")
    house.event(EventKind.MESSAGE)
    os.kill(member.pid, signal.SIGTERM)
    house.supervisor.shutdown()
    assert Path(member.log_file).with_suffix(".ended").exists()


def test_ladder_ends_a_stubborn_one_with_sigkill(make_house: Callable[..., House]) -> None:
    house = make_house(rung_s=0.3)
    member = house.spawn("stubborn")
    house.ready(member)
    start = time.monotonic()
    house.supervisor.shutdown()
    assert 0.6 <= time.monotonic() - start < 2.0  # two rungs of 0.3 s
    assert str(member.exit) == "signal 9"
    assert house.supervisor.failure is None


def test_a_stopped_process_gets_sigkill_at_once(house: House) -> None:
    member = house.spawn("serve")
    house.ready(member)
    stop(member.pid)
    start = time.monotonic()
    house.supervisor.shutdown()
    assert time.monotonic() - start < 2.0  # no rung of the ladder is over
    assert str(member.exit) == "signal 9"


def test_children_that_were_never_made_are_dropped(house: House) -> None:
    stop(house.server.pid)
    member = house.spawn("serve")
    house.supervisor.shutdown()
    assert member.state is State.GONE
    os.kill(house.server.pid, signal.SIGCONT)
    other = house.spawn("serve")
    house.ready(other)
    assert member.pid == 0


def test_death_of_the_fork_server_explains_those_of_its_children(house: House) -> None:
    members = [house.spawn("serve", role=f"Worker_{i}") for i in range(2)]
    house.ready(*members)
    start = time.monotonic()
    os.kill(house.server.pid, signal.SIGKILL)
    event = house.event(EventKind.FAILURE)
    assert time.monotonic() - start < 1
    assert event.report is not None
    assert (event.report.role, event.report.pid, event.report.type) == ("ForkServer", house.server.pid, "SIGKILL")
    house.supervisor.shutdown()
    assert [member.state for member in members] == [State.GONE] * 2


def test_spawn_after_the_fork_server_died_fails_at_once(house: House) -> None:
    house.ready(house.spawn("serve"))
    os.kill(house.server.pid, signal.SIGKILL)
    house.event(EventKind.FAILURE)
    start = time.monotonic()
    with pytest.raises(StartupError, match="ForkServer"):
        house.ready(house.spawn("serve"))
    assert time.monotonic() - start < 1


def test_stacks_of_all_even_where_c_code_holds_the_gil(house: House) -> None:
    sleeping, stuck, stopped = (
        house.spawn(target, role=f"Worker_{i}") for i, target in enumerate(("block", "hang_in_c", "serve"))
    )
    for _ in range(2):
        house.event(EventKind.MESSAGE)
    house.ready(stopped)
    stop(stopped.pid)
    stacks = house.supervisor.stacks([sleeping, stuck, stopped])
    for member in (sleeping, stuck):
        assert "most recent call first" in stacks[member.key]
        assert "in block" in stacks[member.key]
    assert stacks[stopped.key].startswith("no stack: state T")


def test_a_stopped_fork_server_does_not_hold_up_the_end(house: House) -> None:
    member = house.spawn("serve")
    house.ready(member)
    stop(house.server.pid)
    start = time.monotonic()
    house.supervisor.shutdown()
    house.server.close()
    assert time.monotonic() - start < 2.0
    assert member.state is State.GONE


def test_ctrl_c_reaches_only_the_root(house: House) -> None:
    os.kill(house.server.pid, signal.SIGINT)  # while its interpreter starts
    member = house.spawn("block")
    house.event(EventKind.MESSAGE)
    for pid in (house.server.pid, member.pid):
        os.kill(pid, signal.SIGINT)
    other = house.spawn("serve")
    house.ready(other)
    assert house.supervisor.failure is None


def test_sigterm_to_the_fork_server_ends_all_and_is_told(house: House) -> None:
    member = house.spawn("stubborn")
    house.ready(member)
    os.kill(house.server.pid, signal.SIGTERM)
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert (report.role, report.type) == ("ForkServer", "SIGTERM")
    assert report.text().count("was killed by SIGTERM") == 1  # it does not quote itself from the log
    house.supervisor.shutdown()
    assert member.state is State.GONE


def test_sigterm_to_the_fork_server_while_it_imports(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    house = make_house(preload=("takes_long",))
    house.spawn("serve")
    while house.event(EventKind.PHASE).phase != "imports takes_long":
        pass
    os.kill(house.server.pid, signal.SIGTERM)
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert (report.role, report.type) == ("ForkServer", "SIGTERM")


def test_waiting_on_a_closed_supervisor_says_so(house: House) -> None:
    member = house.spawn("serve")
    house.supervisor.close()
    other = house.server.spawn(ProcessSpec(role="Worker_1", target=f"{TARGETS}:serve"))
    with pytest.raises(DrumlineError, match="closed"):
        house.supervisor.wait_all_ready([other], 5)
    assert member.state is State.GONE
    with Supervisor(house.server) as second:  # the fork server is free for the next one
        second.add(other)
        second.wait_all_ready([other], 30)


def test_on_event_must_not_wait_for_its_own_thread(house: House) -> None:
    refused: queue.Queue[str] = queue.Queue()

    def on_event(event: MemberEvent) -> None:
        try:
            supervisor.shutdown()
        except RuntimeError as error:
            refused.put(str(error))

    server = ForkServer.start(log=house.log)
    supervisor = Supervisor(server, on_event)
    member = server.spawn(ProcessSpec(role="Worker_1", target=f"{TARGETS}:serve"))
    supervisor.add(member)
    assert "request_stop" in refused.get(timeout=10)
    supervisor.close()
    server.close()
