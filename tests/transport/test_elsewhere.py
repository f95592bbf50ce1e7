"""Machines that lack something: no futex, no memfd, hardly any /dev/shm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drumline.transport import SharedMemory, Waiter, memfd
from drumline.transport import doorbell as doorbell_module
from drumline.transport.futex import NO_FUTEX_VARIABLE

from . import stress
from .procs import children


def soon() -> float:
    return time.monotonic() + 20


@pytest.fixture
def no_futex(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a futex call")

    monkeypatch.setenv(NO_FUTEX_VARIABLE, "1")
    monkeypatch.setattr(doorbell_module, "futex_wait", never)
    monkeypatch.setattr(doorbell_module, "wake_call", never)


@pytest.mark.usefixtures("no_futex")
def test_without_a_futex_everything_arrives() -> None:
    assert stress.run(400, sorted(os.sched_getaffinity(0))[:2]).lost_wakes == 0


@pytest.mark.usefixtures("no_futex")
def test_without_a_futex_rings_are_seen_soon_and_deadlines_hold() -> None:
    waiter = Waiter.create()
    box: list[int] = []
    thread = threading.Timer(0.1, lambda: (box.append(1), waiter.ring()))
    thread.start()
    begin = time.monotonic()
    assert waiter.wait(lambda: box or None, soon()) == [1]
    assert time.monotonic() - begin < 1
    thread.join()
    begin = time.monotonic()
    assert waiter.wait(lambda: None, begin + 0.2) is None
    assert 0.2 <= time.monotonic() - begin < 1
    assert waiter.lost_wakes == 0
    waiter.close()


@pytest.mark.alone
@pytest.mark.usefixtures("no_futex")
def test_without_a_futex_waiting_costs_little() -> None:
    waiter = Waiter.create()

    def child() -> None:
        before = time.process_time()
        Waiter.attach(waiter.fd).wait(lambda: None, time.monotonic() + 1.0)
        assert time.process_time() - before < 0.1

    with children() as start:
        assert start(child).join() == 0
    waiter.close()


def test_without_memfd_a_file_that_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    before = sorted(Path(os.environ["TMPDIR"]).iterdir())
    fd = memfd("drumline-test", 8192)
    os.close(fd)
    memory = SharedMemory.create(8192)
    other = SharedMemory.attach(memory.fd)
    memory.buf[5000] = 7
    assert other.buf[5000] == 7
    assert sorted(Path(os.environ["TMPDIR"]).iterdir()) == before
    other.close()
    memory.close()


PROGRAM = """
import os, shutil
from tests.transport import stress
from tests.executor.conftest import configure
from drumline.executor import Executor

assert shutil.disk_usage("/dev/shm").total <= 1 << 20
outcome = stress.run(300, sorted(os.sched_getaffinity(0))[:2])
assert outcome.lost_wakes == 0
if __name__ == "__main__":
    config = configure("mp", 4, mq_slot_bytes=1 << 20, mq_answer_slot_bytes=1 << 18)
    with Executor.get_class(config)(config) as executor:
        data = b"x" * 4_000_000
        assert executor.collective_rpc("echo", (data,), reply_rank=2, timeout=30) is not None
assert os.listdir("/dev/shm") == []
print("everything works")
"""


def test_everything_works_where_dev_shm_is_one_megabyte(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a mount namespace of one's own needs root and unshare(1): NOT TESTED HERE")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    script = 'mount -t tmpfs -o size=1M tmpfs /dev/shm || exit 77; exec "$0" "$@"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, sys.executable, str(program)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode == 77 or "Operation not permitted" in done.stderr:
        pytest.skip(f"no mount namespace to be had: NOT TESTED HERE ({done.stderr.strip()})")
    assert done.returncode == 0, done.stderr
    assert "everything works" in done.stdout
