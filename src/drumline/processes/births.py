"""How a child comes to be, whoever makes it: a copy of this process, or a program of ours that is executed.

Both run :func:`drumline.processes.child.run_child`, so from its first own instruction on a child is like any other.
Nothing here waits for a child.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from drumline.platforms import host
from drumline.processes import messages as m
from drumline.processes.child import ChildStart, run_child
from drumline.processes.client import execution_command


class OomKills:
    """Processes that the kernel has killed for want of memory, as counted by the control group."""

    def __init__(self) -> None:
        self._before = host.oom_kills()

    def grew(self) -> bool:
        """Whether there are more than the last time; asked when a child was killed."""
        grew = host.oom_killed_since(self._before)
        self._before = host.oom_kills()
        return grew


def fork_child(
    start: ChildStart, forget: Callable[[], None] = lambda: None, handlers: Iterable[int] | None = None
) -> int:
    """A copy of this process with the calling thread alone; its pid.

    ``forget`` is called in the child, before its descriptors are closed. ``handlers``: signals whose handlers are not
    the child's; all, if None, since who forks may be any program.
    """
    # Signals wait until the child has handlers of its own.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: looked at by whoever calls this
            pid = os.fork()
        if pid == 0:
            _become_child(start, forget, handlers)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _become_child(start: ChildStart, forget: Callable[[], None], handlers: Iterable[int] | None) -> NoReturn:
    try:
        reset_signals(signal.valid_signals() if handlers is None else handlers)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        forget()
        run_child(start)
    finally:
        os._exit(70)


def reset_signals(numbers: Iterable[int]) -> None:
    """No handler of the process that was copied runs here, and no ended child is lost to a SIGCHLD that it ignored."""
    signal.set_wakeup_fd(-1)
    for number in numbers:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def execute_child(start: ChildStart, sys_path: list[bytes]) -> int:
    """A fresh interpreter on our own module (never the user's ``__main__``); its pid.

    No descriptor of this process becomes inheritable for that, not even for a moment: other threads may be executing
    programs too.
    """
    spec_fd = os.memfd_create("drumline-child")
    try:
        texts = {"env": m.pack_env(start.env), "log_dir": os.fsencode(start.log_dir)}
        given = {name: value for name, value in vars(start).items() if name not in ("told", "imported")}
        with os.fdopen(os.dup(spec_fd), "wb") as file:
            file.write(m.encode(m.FreshSpec(sys_path=sys_path, **{**given, **texts})))
        inherited = [spec_fd, start.conn_fd, *start.fds, start.server_fd, start.console_fd]
        # Onto itself: stays open.
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in inherited if fd >= 0]
        closed = [fd for fd in (1, 2) if not _is_open(fd)]
        actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, *closed)]
        command = execution_command("drumline.processes.fresh", spec_fd)
        # Ctrl-C stays blocked until the child ignores it.
        return os.posix_spawn(
            sys.executable,
            command,
            start.env,
            file_actions=actions,
            setsigmask=[signal.SIGINT],
            setsigdef=[signal.SIGCHLD],
        )
    finally:
        os.close(spec_fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
