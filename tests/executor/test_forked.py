"""A forked child has no executor: its copy of the parent's refuses, and disturbs nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from drumline.errors import ExecutorFailedError
from drumline.executor import Executor

Make = Callable[..., Executor]


def in_child(act: Callable[[], object]) -> str:
    """What ``act`` gives, or raises, in a forked child; nothing if it has not ended within 20 s."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = f"gave {act()}"
        except BaseException as exc:  # noqa: BLE001
            text = f"{type(exc).__name__}: {exc}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 20
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            break
        time.sleep(0.005)
    with os.fdopen(read, "rb") as file:
        return file.read().decode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_no_executor(make: Make, backend: str) -> None:
    executor = make(backend)
    size = executor.world_size
    assert len(executor.collective_rpc("echo", ("first",), timeout=10)) == size
    pending = executor.collective_rpc("sleep", (0.5,), non_block=True)
    pending.add_done_callback(lambda call: None)
    acts: list[Callable[[], object]] = [
        lambda: executor.collective_rpc("note", ("of the child",), timeout=2),
        lambda: executor.collective_rpc("note", ("of the child",), non_block=True),
        lambda: executor.execute_model(None, non_block=True),
        lambda: pending.result(5),
        executor.check_health,
        executor.live_report,
    ]
    for act in acts:
        said = in_child(act)
        assert said.startswith(ExecutorFailedError.__name__), said
        assert "a forked child has no executor" in said
    start = time.monotonic()
    assert in_child(executor.shutdown) == "gave None"
    assert in_child(lambda: pending.cancel() or pending.done()) == "gave True"
    assert time.monotonic() - start < 5
    assert len(pending.result(10)) == size
    for number in range(3):
        answers = executor.collective_rpc("echo", (number,), timeout=10)
        assert answers == [(rank, (number,), {}) for rank in range(size)]
    assert executor.collective_rpc("get_seen", timeout=10) == [[]] * size


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_while_other_threads_hold_the_locks(make: Make, backend: str) -> None:
    executor = make(backend)
    table = executor._table  # type: ignore[attr-defined]
    with table.lock, executor._send_lock, executor._state_lock:  # type: ignore[attr-defined]
        assert "a forked child" in in_child(lambda: executor.collective_rpc("echo"))
        assert in_child(executor.shutdown) == "gave None"
    assert len(executor.collective_rpc("echo", timeout=10)) == executor.world_size
