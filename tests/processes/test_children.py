"""Children as they are made: environment, descriptors, names, messages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import StartupError
from drumline.processes import EventKind, Member, State
from tests.processes.conftest import House


def facts(member: Member) -> dict[str, Any]:
    return json.loads(member.info)  # type: ignore[no-any-return]


def test_three_children_become_ready_answer_and_end(house: House) -> None:
    members = [house.spawn("serve", b"%d" % i, f"Worker_{i}", rank=i) for i in range(3)]
    house.ready(*members)
    assert [member.info for member in members] == [b"info of 0", b"info of 1", b"info of 2"]
    members[1].send(b"x" * 1_000_000)
    event = house.event(EventKind.MESSAGE)
    assert (event.member, len(event.data)) == (members[1], 1_000_005)
    house.supervisor.shutdown()
    assert [member.state for member in members] == [State.GONE] * 3
    assert [str(member.exit) for member in members] == ["exit code 0"] * 3
    assert house.supervisor.failure is None


@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_child_has(house: House, fresh: bool) -> None:
    """Environment, CPUs, descriptors, title: the same for forked and for executed children."""
    cpu = max(os.sched_getaffinity(0))
    read, write = os.pipe()
    names = ["DRUMLINE_A", "HOME", "OMP_NUM_THREADS", "PYTHONPATH"]
    other = house.spawn("serve", role="Worker_9")
    member = house.spawn(
        "describe",
        json.dumps(names).encode(),
        env={"DRUMLINE_A": "a", "HOME": None},
        cpus=(cpu,),
        threads=1,
        fds=(write,),
        fresh=fresh,
    )
    os.close(write)
    house.ready(other, member)
    seen = facts(member)
    expected = {"DRUMLINE_A": "a", "HOME": None, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH")}
    assert seen["env"] == expected
    assert seen["cpus"] == [cpu]
    assert seen["parent"] == house.server.pid
    assert seen["title"] == "drumline::Worker_0"
    assert seen["path"] == sys.path
    assert seen["sigint"]
    assert member.fresh is fresh
    fds = {int(fd): path for fd, path in seen["fds"].items()}
    assert fds.pop(0) == "/dev/null"
    assert fds.pop(1) == fds.pop(2) == member.log_file
    assert fds.pop(seen["conn"]).startswith("socket:")
    given = fds.pop(seen["given"][0])
    assert given == f"pipe:[{os.fstat(read).st_ino}]"
    # Its own pipe for wake-ups and the listing of /proc/self/fd are all that is left.
    left = [path for path in fds.values() if not path.startswith(("pipe:", f"/proc/{seen['pid']}/fd"))]
    assert left == []
    assert sum(path.startswith("pipe:") for path in fds.values()) == 2
    house.supervisor.shutdown([member])
    assert os.read(read, 1) == b""  # nobody but that child had the other end
    os.close(read)


@pytest.mark.parametrize(
    ("env", "fresh"),
    [
        ({"PYTHONHASHSEED": "1"}, True),
        ({"LD_LIBRARY_PATH": "/nowhere"}, True),
        ({"TRANSFORMERS_OFFLINE": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO", "TORCH_NCCL_X": "1", "OMP_NUM_THREADS": "2"}, False),
    ],
)
def test_variables_read_at_import_make_a_child_be_executed(house: House, env: dict[str, str], fresh: bool) -> None:
    member = house.spawn("describe", json.dumps(list(env)).encode(), env=env)
    house.ready(member)
    assert member.fresh is fresh
    assert facts(member)["env"] == env


def test_torch_is_preloaded_and_gets_threads(make_house: Callable[..., House]) -> None:
    house = make_house(preload=("torch",))
    one, two = house.spawn("describe", threads=1), house.spawn("describe", role="Worker_1", threads=2)
    house.ready(one, two)
    assert house.server.obstacles == []
    assert house.server.import_seconds["torch"] > 0
    assert not one.fresh
    assert [facts(one)["torch_threads"], facts(two)["torch_threads"]] == [1, 2]


def test_a_module_that_does_not_import_is_reported(make_house: Callable[..., House]) -> None:
    house = make_house(preload=("json", "no_such_module_at_all"))
    member = house.spawn("serve")
    with pytest.raises(StartupError, match="No module named 'no_such_module_at_all'") as caught:
        house.ready(member)
    report = caught.value.report
    assert (report.role, report.type) == ("ForkServer", "ModuleNotFoundError")
    assert report.phase == "imports no_such_module_at_all"
    assert "of the preload list" in report.message


def test_an_import_that_starts_a_thread_makes_children_be_executed(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, ctypes\nthreading.Thread(target=threading.Event().wait, daemon=True, name='x').start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    house = make_house(preload=("starts_a_thread",))
    member = house.spawn("describe")
    house.ready(member)
    assert member.fresh
    assert "an import started threads" in house.server.obstacles[0]
    assert "executed fresh" in Path(house.server.log_file).read_text()


def test_a_hundred_children_leave_no_descriptor(house: House) -> None:
    def descriptors(pid: int) -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    house.ready(house.spawn("serve"))
    house.supervisor.shutdown()
    before = descriptors(os.getpid()), descriptors(house.server.pid)
    for _ in range(10):
        members = [house.spawn("serve", role=f"Worker_{i}", rank=i) for i in range(10)]
        house.ready(*members)
        house.supervisor.shutdown(members)
        house.supervisor.forget(members)
    assert (descriptors(os.getpid()), descriptors(house.server.pid)) == before
    assert house.supervisor.failure is None


def test_names_change_title_prefix_file_and_report(house: House) -> None:
    member = house.spawn("chatty", b"1", "Worker_1")
    house.ready(member)
    assert member.role == "Worker_TP1"
    title = Path(f"/proc/{member.pid}/cmdline").read_bytes().rstrip(b"\0")
    assert title == b"drumline::Worker_TP1"
    assert member.log_file.endswith(f"/Worker_TP1-{member.pid}.log")
    house.supervisor.shutdown()
    lines = Path(member.log_file).read_text().splitlines()
    assert lines[0].startswith("line 0 of 1 ")
    assert lines[-2:] == ["raw words of C code", "unfinished"]
    assert list(Path(house.log.dir).glob("Worker_1-*")) == []


def test_orphaned_grandchildren_are_ended(house: House) -> None:
    member = house.spawn("with_grandchild")
    house.ready(member)
    grandchild = os.pidfd_open(int(member.info))
    house.supervisor.shutdown([member])
    import select

    poller = select.poll()
    poller.register(grandchild, select.POLLIN)
    assert poller.poll(3000)
    os.close(grandchild)
