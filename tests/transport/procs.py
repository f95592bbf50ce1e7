"""Real child processes for the transport tests: forked, watched, always reaped."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Child:
    """A forked process that runs one function; exit code 0 if it returned."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                function(*args)
                code = 0
            except BaseException:  # noqa: BLE001  the exit code tells
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        self.pidfd = os.pidfd_open(self.pid)

    def join(self, timeout: float = 30.0) -> int:
        """Exit code (negative: signal); kills the child and fails if it does not end in time."""
        if self.code is None:
            ended, _, _ = select.select([self.pidfd], [], [], timeout)
            if not ended:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.pidfd)
            assert ended, f"child {self.pid} did not end within {timeout} s"
        return self.code

    def kill(self) -> None:
        if self.code is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.join()

    def cpu_seconds(self) -> float:
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def asleep(self, deadline: float) -> None:
        """Wait until the child sleeps in a futex."""
        while time.monotonic() < deadline:
            with open(f"/proc/{self.pid}/syscall") as file:
                if file.read().split()[0] in ("202", "98"):
                    return
            time.sleep(0.002)
        raise AssertionError("the child never went to sleep")


@contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Starts children; whatever still runs at the end is killed."""
    started: list[Child] = []

    def start(function: Callable[..., Any], *args: Any) -> Child:
        child = Child(function, *args)
        started.append(child)
        return child

    try:
        yield start
    finally:
        for child in started:
            child.kill()
