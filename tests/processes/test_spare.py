"""A copy of the fork server that waits for its death: it takes its place at once, and is in nobody's way before."""

from __future__ import annotations

import os
import queue
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.processes import EventKind, ForkServer, Supervisor
from drumline.processes.linux import process_state
from tests.processes.conftest import House


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def wait_gone(pid: int, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process_state(pid) not in ("", "Z"):
        assert time.monotonic() < deadline, f"{pid} is there"
        time.sleep(0.005)


def ready(house: House) -> ForkServer:
    """The house's server with its imports done and a child; and its spare, which is there."""
    house.ready(house.spawn("serve"))
    spare = house.server.spare()
    assert spare is not None
    poller = select.poll()
    poller.register(spare.conn.fd, select.POLLIN)
    assert poller.poll(5000)
    return spare


@pytest.fixture(autouse=True)
def spares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that a test which failed did not come to close."""
    made: list[ForkServer] = []
    spare = ForkServer.spare

    def noted(server: ForkServer) -> ForkServer | None:
        if (found := spare(server)) is not None:
            made.append(found)
        return found

    monkeypatch.setattr(ForkServer, "spare", noted)
    yield
    for one in made:
        one.close()


def pid_of_spare(house: House) -> int:
    children = Path(f"/proc/{house.server.pid}/task/{house.server.pid}/children")
    deadline = time.monotonic() + 5
    while not (pids := [pid for pid in map(int, children.read_text().split()) if "spare" in title(pid)]):
        assert time.monotonic() < deadline
    return pids[0]


def after_its_death(house: House, spare: ForkServer) -> None:
    """Kill the house's server, and live on with the spare."""
    house.supervisor.close(force=True)
    house.server.close()
    assert spare.meet()
    house.server = spare
    house.supervisor = Supervisor(spare, house.events.put)


def test_it_takes_the_place_of_one_that_was_killed(house: House) -> None:
    """Three times: the next spare is a copy of the one that took over. Its children are children like any others."""
    for _ in range(3):
        spare = ready(house)
        os.kill(house.server.pid, signal.SIGKILL)
        report = house.event(EventKind.FAILURE, 1.0).report  # at once: the copy holds nothing of its connections
        assert report is not None
        assert (report.role, report.pid, report.what) == ("ForkServer", house.server.pid, "signal")
        old = house.server.pid
        after_its_death(house, spare)
        assert spare.pid != old
        member = house.spawn("serve")
        house.ready(member)
        assert title(spare.pid) == "drumline::ForkServer"
        os.kill(member.pid, signal.SIGKILL)
        gone = house.event(EventKind.FAILURE).report
        assert gone is not None
        assert (gone.pid, gone.what) == (member.pid, "signal")
        house.supervisor.close(force=True)
        house.supervisor = Supervisor(house.server, house.events.put)
    pid = house.server.pid
    house.close()
    wait_gone(pid)


def test_its_children_die_with_it(house: House) -> None:
    spare = ready(house)
    os.kill(house.server.pid, signal.SIGKILL)
    house.event(EventKind.FAILURE)
    after_its_death(house, spare)
    house.ready(member := house.spawn("serve"))
    os.kill(spare.pid, signal.SIGKILL)
    report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert (report.pid, report.type) == (spare.pid, "SIGKILL")
    wait_gone(member.pid)


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("number", [0, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_one_that_is_not_needed_ends_when_it_is_closed(house: House, number: int, met: bool) -> None:
    spare = ready(house)
    if met:
        assert spare.meet()
    pid, deadline = pid_of_spare(house), time.monotonic() + 5
    if number:
        os.kill(pid, number)
        while process_state(pid) not in ("", "Z", "T"):
            assert time.monotonic() < deadline
        assert not spare.meet()
    ended: queue.Queue[int] = queue.Queue()
    house.server.on_spare_ended = ended.put
    house.ready(member := house.spawn("serve"))  # the original does not care
    began = time.monotonic()
    spare.close()
    spare.close()
    assert time.monotonic() - began < 1.0
    wait_gone(pid)
    if number not in (signal.SIGKILL, signal.SIGTERM):  # else it may have been told before
        assert ended.get(timeout=5) == pid
    assert process_state(member.pid) in tuple("SR")


def test_clearing_leaves_it(house: House) -> None:
    """It is no stray of the children that are killed."""
    spare = ready(house)
    assert spare.meet()
    house.ready(parent := house.spawn("with_grandchild"))
    os.kill(parent.pid, signal.SIGKILL)
    house.event(EventKind.FAILURE)
    house.supervisor.close(force=True)
    house.supervisor = Supervisor(house.server, house.events.put)
    assert house.server.clear(10)
    assert spare.meet()
    spare.close()


def test_it_sleeps(house: House) -> None:
    spare = ready(house)
    assert spare.meet()
    poller = select.poll()
    poller.register(spare.pidfd, select.POLLIN)
    stat = Path(f"/proc/{spare.pid}/schedstat")
    time.sleep(0.2)  # until its start is over
    before = stat.read_text().split()[2]
    assert not poller.poll(500)
    assert stat.read_text().split()[2] == before, "it ran"
    spare.close()


def test_it_may_be_asked_for_before_the_imports_are_done(make_house: Callable[..., House]) -> None:
    house = make_house(preload=("json",))
    spare = house.server.spare()
    assert spare is not None
    house.ready(house.spawn("serve"))
    assert spare.meet()
    assert "json" in spare.import_seconds
    other = make_house()
    early = other.server.spare()
    assert early is not None
    early.close()  # it ends as soon as it is there
    other.ready(other.spawn("serve"))


def test_none_where_it_cannot_be(make_house: Callable[..., House]) -> None:
    house = make_house()
    house.ready(house.spawn("serve"))
    house.server.obstacles = ["an import started threads"]
    assert house.server.spare() is None
    house.supervisor.close(force=True)
    house.server.close()
    assert house.server.spare() is None
