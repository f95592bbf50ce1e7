"""A process that has as many descriptors open as it may says so, and leaves nothing half made behind."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.errors import StartupError
from drumline.processes import EventKind
from drumline.processes import messages as m
from drumline.processes.connection import Connection
from drumline.processes.linux import children_of, process_state
from tests.processes.conftest import House
from tests.processes.test_spare import wait_gone


@contextlib.contextmanager
def room_for(pid: int, descriptors: int) -> Iterator[None]:
    """The process can open so many more. It is looked at while it waits, and has none open that are soon closed."""
    used: set[int] = set()
    deadline = time.monotonic() + 5
    while not used or (pid != os.getpid() and process_state(pid) != "S"):
        assert time.monotonic() < deadline, "it never waits"
        if pid == os.getpid() or process_state(pid) == "S":
            used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    limit = 0
    while descriptors or limit in used:
        descriptors -= limit not in used
        limit += 1
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("room", range(8))
def test_births_without_room(make_house: Callable[..., House], room: int) -> None:
    """Each more gets about one step further. It works, or says what to raise, and no child lives on."""
    house = make_house()
    house.ready(house.spawn("serve"))
    pids = [house.server.pid, *children_of(house.server.pid)]
    with room_for(house.server.pid, room):
        member = house.spawn("serve")
        said = ""
        try:
            house.ready(member)
        except StartupError as error:
            said = str(error)
    assert not said or "raise the limit of open files" in said
    pids.append(member.pid)
    house.close()
    for pid in filter(None, pids):
        wait_gone(pid)


@pytest.mark.parametrize("room", range(2, 6))
def test_spares_without_room(make_house: Callable[..., House], room: int) -> None:
    """It is there, or gone, and the root is told; the fork server goes on."""
    house = make_house()
    house.ready(house.spawn("serve"))
    before = set(children_of(house.server.pid))
    ended: queue.Queue[int] = queue.Queue()
    house.server.on_spare_ended = ended.put
    with room_for(house.server.pid, room):
        spare = house.server.spare()
        assert spare is not None
        met = spare.meet()
    if not met:
        assert ended.get(timeout=5) not in before
    house.ready(house.spawn("serve"))
    spare.close()


def test_descriptors_that_are_lost_on_the_way() -> None:
    left, right = socket.socketpair()
    sender: Connection[m.ToOwner] = Connection(left, m.ToOwner)
    receiver: Connection[m.ToOwner] = Connection(right, m.ToOwner)
    pipe = os.pipe()
    sender.send(m.Phase("x"), fds=list(pipe))
    # one more is free: that which the folder is read by
    with room_for(os.getpid(), 0), pytest.raises(OSError, match=r"ulimit -n\), now \d+$"):
        receiver.receive()
    sender.close()
    receiver.close()
    for fd in pipe:
        os.close(fd)


def test_a_fork_server_without_room_for_an_order_says_why(house: House) -> None:
    house.ready(house.spawn("serve"))
    with room_for(house.server.pid, 0):
        for _ in range(3):
            house.spawn("serve")
        report = house.event(EventKind.FAILURE).report
    assert report is not None
    assert (report.role, report.type) == ("ForkServer", "OSError")
    assert "raise the limit of open files" in report.text()
    assert "unknown exit code" not in report.text()  # of those that it did not come to make
