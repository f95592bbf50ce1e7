"""Start engine after engine without importing torch and transformers again: a fork server that is kept to be copied.

The imports are most of a start (5 of 7 s where cores are slow). A program that starts several engines one after the
other (a notebook, a sweep, a test suite) may keep one process that has done them; each engine's fork server is then a
fork of that process instead of an executed interpreter, and costs 20 ms::

    program ==connection==> ForkServer_warm (imports once, makes no children, reports no deaths)
        |                        | fork, for each engine
        +====connection====> ForkServer --fork--> EngineCore, workers, ...

The copy goes on exactly where an executed one would begin: it is told environment, search path, log folder, console
and modules to import, and is bound to the program, not to the original, which may end before it.

Rejected: keeping the fork server of the engine before. What that engine's code has left in it (modules that the user
has changed since, an environment, strays of killed workers) would be in the next one. So the original imports only
modules that do not change while a program runs, and a copy is taken only where an executed process would have begun
the same way: see :func:`surroundings` and the variables that are read at import time. Else one is executed as ever.
"""

from __future__ import annotations

import os
import resource
import select
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from drumline.errors import ChannelClosedError, ConfigError, DrumlineError
from drumline.processes import messages as m
from drumline.processes.client import ForkServer, originals
from drumline.processes.environment import import_variables, root_environment
from drumline.processes.linux import has_working_folder
from drumline.processes.logs import LogConfig

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_LOOK_S = 0.1
"""How often a thread that waits for the imports looks whether it was closed by another."""
_claim = threading.Lock()


def _forget() -> None:
    """In a fork of the program: it has no part in the connection, and may have a warm start of its own."""
    global _claim
    _claim = threading.Lock()
    originals.current = None


os.register_at_fork(after_in_child=_forget)


class WarmStart:
    """While it is open, engines and executors of this program start without importing again.

    Returns at once; the imports go on in the background, and an engine that is started before they are done does its
    own. One at a time in a process. Costs the memory of one process with the modules loaded (300 MB; pages are shared
    with the engines' processes) and no CPU.
    """

    def __init__(self, preload: tuple[str, ...], log: LogConfig | None = None) -> None:
        """``preload``: modules that do not change while the program runs.

        ConfigError if there is one already (one whose process has died is closed, and this one takes its place).
        """
        self._lock = threading.Lock()
        """Held for moments only, never while something is waited for."""
        self._pid = os.getpid()
        self._failure = ""
        self._base = import_variables(root_environment({}))
        self._surroundings = surroundings()
        with _claim:
            before = originals.current
            if isinstance(before, WarmStart) and before._works():
                raise ConfigError("this program has a warm start already: close that one first")
            self._server: ForkServer | None = ForkServer.start(preload, log=log, role="WarmStart", copies=True)
            originals.current = self
        if isinstance(before, WarmStart):
            before.close()

    @property
    def pid(self) -> int:
        """Of the process; 0 once closed."""
        return self._server.pid if self._server is not None else 0

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait for the imports. DrumlineError if they failed, the process is gone, or after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            if os.getpid() != self._pid:  # the lock may be held for ever here
                raise DrumlineError(f"no warm start: this one belongs to process {self._pid}, of which this is a fork")
            with self._lock:
                if self._is_ready():
                    return
                if self._failure:
                    raise DrumlineError(f"no warm start: {self._failure}")
                fd = self._server.conn.fd if self._server is not None else -1
            left = deadline - time.monotonic()
            if left <= 0:
                raise DrumlineError(f"no warm start: its imports are not done after {timeout_s:g} s")
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(min(left, _LOOK_S) * 1000)  # it may be closed meanwhile, which ends no poll

    def copy(self, base: Mapping[str, str]) -> ForkServer | None:
        """A fork server for the environment ``base``, or None where one must be executed."""
        if os.getpid() != self._pid or import_variables(base) != self._base or surroundings() != self._surroundings:
            return None
        with self._lock:
            return self._server.copy() if self._is_ready() and self._server is not None else None

    def _works(self) -> bool:
        with self._lock:
            return self._is_ready() or not self._failure

    def _is_ready(self) -> bool:
        """Take in what it has said, which nobody else reads. The lock is held."""
        server = self._server
        if server is None:
            self._failure = "it has been closed"
            return False
        try:
            frames = server.conn.receive()
        except ChannelClosedError:
            frames, server.conn.eof = [], True
        for frame in frames:
            match frame.message:
                case m.ServerPhase():
                    server.phase = frame.message.text
                case m.ServerReady():
                    server.phase, server.obstacles = "ready", frame.message.obstacles
                case m.ServerFailed():
                    self._failure = frame.message.report.text()
        if server.obstacles:
            self._failure = "; ".join(server.obstacles)
        elif server.conn.eof and not self._failure:
            self._failure = server.death_report().text()
        return server.phase == "ready" and not self._failure

    def close(self) -> None:
        """End the process; engines that started from it go on, and threads that wait for it are told. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            server, self._server = self._server, None
        with _claim:
            if originals.current is self:
                originals.current = None
        if server is not None:
            server.close()

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def surroundings() -> dict[str, object]:
    """What a process that is executed now would begin with, beside its environment."""
    found: dict[str, object] = {
        "working folder": os.getcwd() if has_working_folder() else "",  # noqa: PTH109 (as libraries see it)
        "CPUs": frozenset(os.sched_getaffinity(0)),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "session": (os.getsid(0), os.getpgid(0)),
        "limits": tuple(resource.getrlimit(limit) for limit in _LIMITS),
        "user": (os.getresuid(), os.getresgid(), tuple(os.getgroups())),
    }
    for name, keys in (("status", ("Umask:", "NoNewPrivs:", "Seccomp:", "CapEff:")), ("cgroup", ())):
        try:
            lines = Path("/proc/self", name).read_text().splitlines()
        except OSError:
            continue
        found[name] = tuple(line for line in lines if not keys or line.startswith(keys))
    return found
