"""Threads and descriptors that the system does not give: an error that says what to raise, and nothing is left."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drumline.errors import MORE_FILES, MORE_PROCESSES, remedy
from drumline.executor import Executor

from .conftest import Make


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many more threads this process may make."""
    left = [10**9]
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    yield left
    left[0] = 10**9


def test_threads_of_a_start(make: Make, backend: str, threads: list[int]) -> None:
    """Whichever of those that a start makes is the first one too many."""
    found = None
    for most in range(20):
        threads[0] = most
        found = attempt(make, backend, MORE_PROCESSES)
        threads[0] = 10**9
        if found is not None:
            break
    assert most > 0
    assert found is not None
    assert found.collective_rpc("echo", (1,))


def attempt(make: Make, backend: str, advice: str) -> Executor | None:
    """An executor; None if its start failed with this advice."""
    try:
        return make(backend)
    except Exception as error:  # noqa: BLE001  of many kinds, as the system has it
        said = f"{error} {remedy(error)}"
    assert advice in said
    return None


@contextmanager
def descriptors(more: int) -> Iterator[None]:
    """So many more may be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    gaps = [os.open(os.devnull, os.O_RDONLY)]
    while gaps[-1] < highest:
        gaps.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 1 + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in gaps:
            os.close(fd)


def test_descriptors_of_a_start(make: Make, backend: str) -> None:
    found = None
    for more in (*range(22), 25, 29, 60):  # then there are many descriptors of one kind
        with descriptors(more):
            found = attempt(make, backend, MORE_FILES)
        if found is not None:
            break
    assert more > 0
    assert found is not None
    assert found.collective_rpc("echo", (1,))


def test_other_errors_have_no_remedy() -> None:
    """A socket that has nothing to read says EAGAIN too."""
    one, other = socket.socketpair()
    one.setblocking(False)
    with pytest.raises(BlockingIOError) as caught:
        one.recv(1)
    assert not remedy(caught.value)
    assert not remedy(RuntimeError("x"))
    assert not remedy(None)
    one.close()
    other.close()


def test_a_cause_counts() -> None:
    error = ValueError("x")
    error.__cause__ = OSError(errno.EMFILE, "y")
    assert remedy(error) == MORE_FILES
