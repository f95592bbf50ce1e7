"""A worker that the kernel kills for want of memory is told apart from one that somebody killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 400 << 20

PROGRAM = """
import os, sys
with open(sys.argv[1], "w") as file:  # all processes of ours are born in the group
    file.write(str(os.getpid()))
from drumline.errors import ExecutorFailedError
from drumline.executor import Executor
from tests.executor.conftest import configure

def grow(worker):
    taken = []
    while worker.rank == 1:
        taken.append(b"x" * (16 << 20))

config = configure("mp", 2)
with Executor.get_class(config)(config) as executor:
    try:
        if sys.argv[2] == "grow":
            executor.collective_rpc(grow)
        else:
            os.kill(executor.workers()[1].pid, 9)
            executor.collective_rpc("echo")
    except ExecutorFailedError as error:
        print(error.report.what, error.report.rank, error.report.message)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a memory limit."""
    folder = GROUPS / f"drumline-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.parametrize(("how", "said"), [("grow", "oom 1 the kernel's out-of-memory"), ("kill", "signal 1 \n")])
def test_a_kill_for_want_of_memory(group: Path, how: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(group / "cgroup.procs"), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith(said), done.stdout + done.stderr
