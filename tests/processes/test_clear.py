"""A fork server that outlives all its children: they are killed, and those of their children, and new ones are made."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from drumline.processes import Supervisor
from drumline.processes.linux import process_state
from tests.processes.conftest import House
from tests.stopped import stop


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def after(house: House) -> Supervisor:
    """The next owner of the same fork server."""
    house.supervisor.close(force=True)
    house.supervisor = Supervisor(house.server, house.events.put)
    return house.supervisor


def test_all_are_gone_at_once_and_new_ones_are_made(house: House) -> None:
    """Also a worker that a core had made, one that is stopped, and what a child left behind."""
    core = house.spawn("core", json.dumps({"worker": "serve"}).encode(), role="EngineCore_DP0", forkserver_access=True)
    parent = house.spawn("with_grandchild", role="Worker_7")
    stopped = house.spawn("stubborn", role="Worker_8")
    house.ready(core, parent, stopped)
    pids = [core.pid, parent.pid, stopped.pid, *json.loads(core.info), int(parent.info)]
    stop(stopped.pid)
    house.supervisor.shutdown([core], force=True)
    began = time.monotonic()
    assert house.server.clear(10)
    assert all(gone(pid) for pid in pids)
    assert time.monotonic() - began < 0.9, "it waited for the grace of those whose owner is gone"
    for _ in range(2):
        after(house)
        member = house.spawn("serve")
        house.ready(member)
        assert house.server.clear(10)
        assert gone(member.pid)
    assert house.server.clear(10), "there may be none"


def test_what_children_left_is_gone_too_however_deep(house: House) -> None:
    for _ in range(5):
        house.ready(member := house.spawn("with_descendants"))
        left: list[psutil.Process] = []
        deadline = time.monotonic() + 5
        while len(left) < 3:
            assert time.monotonic() < deadline
            left = psutil.Process(member.pid).children(recursive=True)
        assert house.server.clear(10)
        assert [pid for pid in (member.pid, *(one.pid for one in left)) if not gone(pid)] == []
        after(house)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_cannot_is_told_at_once(make_house: Callable[..., House], number: int) -> None:
    house = make_house()
    house.ready(house.spawn("serve"))
    os.kill(house.server.pid, number)
    deadline = time.monotonic() + 5
    while process_state(house.server.pid) not in ("", "Z", "T"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    assert not house.server.clear(10)
    assert time.monotonic() - began < 1.0
