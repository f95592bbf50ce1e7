"""Children of this very process: the start methods ``spawn`` and ``fork``.

A thread stands where the fork server stands otherwise. It speaks the same messages, so members, supervisor, failure
reports and the ladder of a stop are the same whatever the start method::

    caller --Spawn--> socketpair --> launcher thread --fork, or posix_spawn--> child (run_child)
    supervisor thread <--Spawned, Exited-- launcher thread <--pidfds-- children

- The children's death bond is PDEATHSIG, which follows the *thread* that made them. So all are made by this thread,
  which lives until :meth:`OwnChildren.close`; that of the caller may end when it likes.
- This thread never computes. libgomp keeps the threads of a parallel region for the thread that opened it, and a copy
  of that one hangs in its next region since they are not copied: a copy of this one has none to miss, so there is
  nothing to release before a fork.
- It waits for its children one by one, by pidfd: children that the user's program has beside them are left alone. If
  the program takes the exit status of ours (``os.wait``), how it ended is asked from the kernel, else unknown.
- ``fork`` copies whatever state the program is in. Its descriptors are closed in the child (their numbers are taken
  by /dev/null), its signal handlers dropped. Locks that its other threads hold at that moment stay locked there: that
  is what the default, the fork server, is for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumline.errors import ChannelClosedError
from drumline.platforms import host
from drumline.processes import client
from drumline.processes import messages as m
from drumline.processes.births import OomKills, execute_child, fork_child
from drumline.processes.child import ChildStart
from drumline.processes.client import ForkServer, check_interpreter, open_console, refuse_inside
from drumline.processes.connection import Connection, socket_pair
from drumline.processes.environment import child_environment, needs_fresh, root_environment
from drumline.processes.linux import exit_of
from drumline.processes.logs import LogConfig
from drumline.processes.reports import make_report

_CLOSE_WAIT_S = 3.0
_GRACE_S = 1.0
LAUNCHER = "Launcher"
"""What reports call the thread."""

_kept: list[Any] = []
"""In a forked child: the program's streams. Whatever these still hold is not ours to write."""


class OwnChildren(ForkServer):
    """Makes children of this process; to be used like a :class:`ForkServer`. Thread-safe.

    Args:
        method: ``spawn`` or ``fork``.
        log: of the run.
        env: changes to this process's environment, for all children.
        trusted: this process is one of drumline's own that may make others (an engine core).

    """

    def __init__(
        self,
        method: str,
        log: LogConfig,
        env: Mapping[str, str | None] | None = None,
        *,
        trusted: bool = False,
    ) -> None:
        if not trusted:
            refuse_inside()
        check_interpreter()
        ours, theirs = socket_pair()
        super().__init__(Connection(ours, m.ToClient), None, "")
        self.log = log
        self.pid = os.getpid()
        self._launcher = _Launcher(Connection(theirs, m.ToServer), method == "fork", log, root_environment(env or {}))
        self._launcher.start()

    def close(self, timeout_s: float = _CLOSE_WAIT_S) -> None:
        """Kill the children that are left and end the thread. Idempotent, bounded."""
        with self._lock:
            if self.closing or os.getpid() != self._owner_pid:
                return
            self.closing = True
        with contextlib.suppress(ChannelClosedError, TimeoutError):
            self.conn.send(m.Shutdown(), timeout_s=0.0)
        self._launcher.join(timeout_s)
        self._let_go()


@dataclass(eq=False)
class _Child:
    key: int
    pid: int
    pidfd: int


class _Launcher(threading.Thread):
    """The thread; see the module."""

    def __init__(self, conn: Connection[m.ToServer], fork: bool, log: LogConfig, env: dict[str, str]) -> None:
        super().__init__(name="drumline-launcher", daemon=True)
        self._conn = conn
        self._fork = fork
        self._log = log
        self._env = env
        self._sys_path = [os.fsencode(str(entry)) for entry in sys.path]
        console = open_console(log)
        # A number of its own: descriptors 1 and 2 become the child's log file.
        self._console_fd = fcntl.fcntl(console, fcntl.F_DUPFD_CLOEXEC, 3) if console >= 0 else -1
        self._children: dict[int, _Child] = {}
        """By pidfd."""
        self._oom_kills = OomKills()
        self._ending = False

    def run(self) -> None:
        """Until it is told to end, or its other side is gone."""
        try:
            self._tell(m.ServerReady())
            while not self._ending:
                self._turn()
        except BaseException as error:  # noqa: BLE001 (whoever waits for children must hear of it)
            self._tell(m.ServerFailed(make_report(error, role=LAUNCHER)))
        finally:
            self._end_children()
            self._conn.close()
            if self._console_fd >= 0:
                os.close(self._console_fd)

    def _turn(self, timeout_ms: float | None = None) -> None:
        poller = select.poll()
        if not self._ending:
            poller.register(self._conn.fd, select.POLLIN | (select.POLLOUT if self._conn.pending else 0))
        for pidfd in self._children:
            poller.register(pidfd, select.POLLIN)
        for fd, _ in poller.poll(timeout_ms):
            if fd in self._children:
                self._reap(self._children.pop(fd))
            else:
                self._read()

    def _read(self) -> None:
        with contextlib.suppress(ChannelClosedError):
            self._conn.flush()
        for frame in self._conn.receive():
            fds = [_above_stdio(fd) for fd in frame.fds]
            match frame.message:
                case m.Spawn():
                    self._spawn(frame.message, fds)
                case m.Shutdown():
                    self._ending = True
            for fd in fds:
                os.close(fd)
        self._ending = self._ending or self._conn.eof

    def _spawn(self, spawn: m.Spawn, fds: list[int]) -> None:
        if self._ending or _hung_up(fds[0]):
            return  # nobody is left who would want it
        changes = m.unpack_env(spawn.env)
        fresh = not self._fork or spawn.fresh or bool(needs_fresh(self._env, changes))
        start = ChildStart(
            spawn=spawn,
            env=child_environment(self._env, changes, spawn.threads),
            conn_fd=fds[0],
            fds=fds[1:],
            server_fd=-1,
            server_pid=os.getpid(),
            console_fd=self._console_fd,
            log_dir=self._log.dir,
            log_level=self._log.level,
            grace_s=_GRACE_S,
            root_pid=client.root_pid or os.getpid(),
            own=True,
            allowed=host.allowed_cpus(),
        )
        try:
            if spawn.forkserver_access:
                raise RuntimeError("children of the start methods spawn and fork have no fork server to give access to")
            pid = execute_child(start, self._sys_path) if fresh else self._copy(start, fds)
            pidfd = os.pidfd_open(pid)
        except (OSError, RuntimeError) as error:
            report = make_report(error, role=spawn.role, rank=spawn.rank, phase="starting")
            self._tell(m.SpawnFailed(spawn.key, report))
            return
        self._children[pidfd] = _Child(spawn.key, pid, pidfd)
        self._tell(m.Spawned(spawn.key, pid, fresh), fds=[pidfd])

    def _copy(self, start: ChildStart, fds: list[int]) -> int:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # whatever the program has put there
                stream.flush()
        return fork_child(start, _keep_streams)

    def _reap(self, child: _Child) -> None:
        """Tell how it ended. The child is one of many of this process, so nobody else is waited for."""
        code, number = None, None
        try:
            result = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # the program took it, or ignores SIGCHLD
            code, number = exit_of(child.pidfd)
        else:
            if result is not None and result.si_code == os.CLD_EXITED:
                code = result.si_status
            elif result is not None:
                number = result.si_status
        os.close(child.pidfd)
        oom = number == signal.SIGKILL and self._oom_kills.grew()
        self._tell(m.Exited(key=child.key, code=code, signal=number, oom=oom, time=time.time()))

    def _end_children(self) -> None:
        """Those that are left: nobody wants them any more."""
        for child in self._children.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        deadline = time.monotonic() + _CLOSE_WAIT_S / 2
        self._ending = True
        while self._children and time.monotonic() < deadline:
            self._turn(100)
        for child in self._children.values():  # in state D: the kernel's to end
            os.close(child.pidfd)

    def _tell(self, message: object, fds: list[int] | None = None) -> None:
        with contextlib.suppress(ChannelClosedError, TimeoutError):  # its end is seen elsewhere; what waits goes later
            self._conn.send(message, fds=fds or [], timeout_s=0.0)


def _keep_streams() -> None:
    _kept.extend((sys.stdout, sys.stderr))


def _above_stdio(fd: int) -> int:
    """Where the program has closed standard descriptors, one that came may have such a number."""
    if fd > 2:
        return fd
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return high


def _hung_up(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    return bool(poller.poll(0))


__all__ = ["OwnChildren"]
