"""The client's side of the fork server: start it or join it, and have children made.

Nothing here reads the connection: that is the work of the one :class:`drumline.processes.supervisor.Supervisor` that
claims the fork server in this process. The fork server itself gets no PDEATHSIG, since that follows the *thread* that
started it, which may end; its bond to the root is the connection and a pidfd.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Protocol

from drumline.errors import ChannelClosedError, ConfigError, DrumlineError, FailureReport
from drumline.platforms import host
from drumline.processes import messages as m
from drumline.processes.connection import Connection, socket_pair
from drumline.processes.core import Exit, State
from drumline.processes.environment import ONE_THREAD, root_environment
from drumline.processes.linux import exit_of, exit_of_zombie, has_working_folder, process_state
from drumline.processes.logs import LogConfig, log_path
from drumline.processes.reports import exit_report
from drumline.processes.titles import FORK_SERVER, SPARE_FORK_SERVER

if TYPE_CHECKING:
    from drumline.processes.supervisor import Supervisor

_IMPORTING_WAIT_S = 0.3
"""How long a fork server that has no children yet may take to end: an import may be deep in C code."""

_keys = itertools.count(1)
_open_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()

inside = ""
"""Role of this process if it is a child of a fork server. One that started another would go on without end where the
module of a worker class starts an engine when it is imported."""
root_pid = 0
"""The root of the run, where this process is such a child."""


class Original(Protocol):
    """Makes fork servers whose imports are done."""

    def copy(self, base: Mapping[str, str]) -> ForkServer | None:
        """One that awaits its ``Begin``, for a root environment; None: none that would be as if just executed."""


@dataclass
class _Originals:
    """What this program keeps of the kind, if anything: :mod:`drumline.processes.warm`."""

    current: Original | None = None


originals = _Originals()


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What child to make."""

    role: str
    """Name until it calls ``set_name``: ``Worker_3``, ``EngineCore_DP0``."""
    target: str
    """``pkg.mod:function``, called as ``function(context: ChildContext, payload: bytes)``."""
    payload: bytes = b""
    rank: int | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Changes to the root's environment; None removes. Variables that are read when an interpreter or a library starts
    (:data:`drumline.processes.environment.READ_AT_IMPORT`) make the child be executed fresh instead of forked."""
    threads: int = 0
    """Compute threads (OMP_NUM_THREADS and kin, torch); 0: what the environment says."""
    cpus: tuple[int, ...] = ()
    """CPUs that it may run on; empty: all of the fork server's."""
    numa_node: int | None = None
    """Node that its memory should come from (asked for; a refusal is only logged)."""
    fds: tuple[int, ...] = ()
    """Descriptors that it gets, in this order, as ``context.fds``. The caller keeps (and closes) its own."""
    forkserver_access: bool = False
    """It gets a connection of its own to the fork server: ``context.forkserver``."""
    fresh: bool = False
    """Execute it in any case."""


class Member:
    """What an owner holds of a process: a connection, an identity, a state. The supervisor keeps it up to date."""

    def __init__(
        self,
        role: str,
        rank: int | None,
        conn: Connection[m.ToOwner],
        *,
        key: int | None = None,
        server: ForkServer | None = None,
        pid: int = 0,
    ) -> None:
        self.key = next(_keys) if key is None else key
        self.role = role
        self.rank = rank
        self.conn = conn
        self.server = server
        self.pid = pid
        self.pidfd = -1
        self.state = State.STARTING
        self.phase = "starting"
        self.log_file = ""
        self.info = b""
        """What it said with ``ready``."""
        self.exit: Exit | None = None
        """How it ended, once it is gone."""
        self.report: FailureReport | None = None
        """Its own failure, if it failed."""
        self.fresh = False
        """It was executed, not forked."""

    @property
    def name(self) -> str:
        """Current name: ``Worker_TP1``."""
        return self.role

    def send(self, data: bytes, timeout_s: float = 5.0) -> None:
        """Bytes for its ``on_message``. ChannelClosedError if it is gone, TimeoutError if it does not read."""
        self.conn.send(m.Data(data), timeout_s=timeout_s)

    def signal(self, number: int) -> bool:
        """Send a signal; never hits another process that got the same pid. False if it is gone."""
        if self.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except OSError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<Member {self.role} pid={self.pid} {self.state.name} {self.phase!r}>"


class _Adopted:
    """What is used of ``subprocess.Popen``, for a process that somebody else forked."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int | None:
        """Its exit status; None where the kernel does not tell (it has been reaped, and this is no Linux 6.15).

        subprocess.TimeoutExpired if it is there after so many seconds.
        """
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout * 1000):
            raise subprocess.TimeoutExpired(SPARE_FORK_SERVER, timeout)
        with contextlib.suppress(ChildProcessError):  # it is ours if this process takes orphans in
            _, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status)
        if self.returncode is None:
            found = exit_of_zombie(self.pid)
            code, number = exit_of(self._pidfd) if found == (None, None) else found
            self.returncode = code if number is None else -number
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, number)


class ForkServer:
    """A connection to a fork server. Thread-safe.

    :meth:`start` makes one whose root is this process; :meth:`attach` uses a connection that one gave us;
    :meth:`spare` makes one that is there already, for the case of this one's death.
    """

    def __init__(self, conn: Connection[m.ToClient], process: subprocess.Popen[bytes] | None, log_file: str) -> None:
        self.conn = conn
        self.process: subprocess.Popen[bytes] | _Adopted | None = process
        self.pid = process.pid if process else 0
        self.pidfd = os.pidfd_open(process.pid) if process else -1
        self.log_file = log_file
        self.phase = "starting"
        self.obstacles: list[str] = []
        """Why it does not fork, if it does not (children are then executed fresh)."""
        self.import_seconds: dict[str, float] = {}
        self.oom_kills = host.oom_kills() if process else None
        """Out-of-memory kills before its own end. The supervisor counts again when it has heard of one."""
        self.members: dict[int, Member] = {}
        self.log: LogConfig | None = None
        """Of the run, where it is known here."""
        self.closing = False
        self._waits_as_spare = False
        """It has not been met yet."""
        self.on_spare_ended: Callable[[int], None] = lambda pid: None
        """Called in the supervisor's thread when a spare of this one has ended, whoever ended it. Must not block."""
        self.cleared = threading.Event()
        """Set by the supervisor that reads the connection."""
        self._owner_pid = os.getpid()
        self._supervisor: weakref.ref[Supervisor] | None = None
        self._lock = threading.Lock()
        _open_servers.add(self)

    @classmethod
    def start(
        cls,
        preload: tuple[str, ...] = (),
        env: Mapping[str, str | None] | None = None,
        log: LogConfig | None = None,
        *,
        role: str = "Root",
        grace_s: float = 1.0,
        copies: bool = False,
    ) -> ForkServer:
        """Start a fork server with this process as its root; returns before it has imported anything.

        ``preload``: modules that it imports before it forks. One that fails to import ends it, with a report.
        ``env``: changes to this process's environment, for it and all children. ``role``: what reports of this
        process's death call it. ``copies``: it is to be copied (:mod:`drumline.processes.warm`), not to make children.
        """
        refuse_inside()
        check_interpreter()
        log = log or LogConfig.create()
        base = root_environment(env or {})
        original = None if copies else originals.current
        server = original.copy(base) if original is not None else None
        if server is None:
            server = cls._executed(base)
        server.log_file = str(log_path(log.dir, FORK_SERVER, server.pid))
        server.log = log
        begin = m.Begin(
            role=role,
            pid=os.getpid(),
            sys_path=[os.fsencode(str(entry)) for entry in sys.path],
            preload=list(preload),
            env=m.pack_env(base),
            log_dir=os.fsencode(log.dir),
            log_level=log.level,
            grace_s=grace_s,
            copies=copies,
        )
        own_pidfd = os.pidfd_open(os.getpid())
        try:
            server.conn.send(begin, fds=[fd for fd in (own_pidfd, open_console(log)) if fd >= 0])
        except (ChannelClosedError, TimeoutError):
            pass  # whoever supervises it sees its end
        finally:
            os.close(own_pidfd)
        return server

    @classmethod
    def _executed(cls, base: Mapping[str, str]) -> ForkServer:
        ours, theirs = socket_pair()
        with theirs:
            try:
                process = _execute(theirs.fileno(), base)
            except BaseException:
                ours.close()
                raise
        return cls(Connection(ours, m.ToClient), process, "")

    def copy(self, timeout_s: float = 2.0) -> ForkServer | None:
        """One more with this process as its root, which awaits its ``Begin``; None: this one cannot be copied now.

        This one must have been started for it, and nobody else may read its connection.
        """
        ours, theirs = socket_pair()
        made = ForkServer(Connection(ours, m.ToClient), None, "")
        try:
            with theirs:
                self.conn.send(m.Copy(), fds=[theirs.fileno()], timeout_s=0.0)
            if made._meet_copy(timeout_s):
                return made
        except (ChannelClosedError, TimeoutError):
            pass
        except BaseException:
            made.close()
            raise
        made.close()
        return None

    def _meet_copy(self, timeout_s: float) -> bool:
        """Hear who the copy is that was made for this object."""
        frames = self.conn.receive_wait(timeout_s)
        if not frames or not isinstance(frames[0].message, m.SpareReady):
            return False
        said = frames[0].message
        self.pid, self.pidfd = said.pid, frames[0].fds[0]
        self.process = _Adopted(self.pid, self.pidfd)
        self.log_file, self.import_seconds = said.log_file, said.seconds
        self.oom_kills = host.oom_kills()
        return True

    @classmethod
    def attach(cls, sock: socket, log: LogConfig | None = None) -> ForkServer:
        """Use a connection that a fork server made for this process."""
        server = cls(Connection(sock, m.ToClient), None, "")
        server.pid = os.getppid()  # it forked us
        server.log = log
        return server

    def spawn(self, spec: ProcessSpec) -> Member:
        """Ask for a child and return at once. Give the member to a supervisor, which sees it start, fail, end."""
        if self.closing:
            raise DrumlineError("this fork server has been closed")
        ours, theirs = socket_pair()
        member = Member(spec.role, spec.rank, Connection(ours, m.ToOwner), server=self)
        message = m.Spawn(
            key=member.key,
            role=spec.role,
            target=spec.target,
            payload=spec.payload,
            rank=spec.rank,
            env=m.pack_env(spec.env),
            threads=spec.threads,
            cpus=list(spec.cpus),
            numa_node=spec.numa_node,
            forkserver_access=spec.forkserver_access,
            fresh=spec.fresh,
        )
        self.members[member.key] = member
        try:
            with theirs, contextlib.suppress(ChannelClosedError, TimeoutError):  # the supervisor sees to both
                self.conn.send(message, fds=[theirs.fileno(), *spec.fds], timeout_s=0.0)
        except BaseException:
            del self.members[member.key]
            member.conn.close()
            raise
        return member

    def clear(self, timeout_s: float = 3.0) -> bool:
        """Have all children killed, also those of others than this process, and wait until they are gone.

        False: it did not get there in time, or is dead, stopped or not ready; then close it. A supervisor must have
        claimed it. Nobody may have children made meanwhile.
        """
        if self.process is None or self.closing or self.phase != "ready" or process_state(self.pid) in ("", "T", "Z"):
            return False
        self.cleared.clear()
        with contextlib.suppress(ChannelClosedError, TimeoutError):
            self.conn.send(m.Clear(), timeout_s=0.0)
            return self.cleared.wait(timeout_s)
        return False

    def spare(self) -> ForkServer | None:
        """Have it fork a copy of itself that waits, once its imports are done and what was asked before has been seen
        to; returns at once. None: it cannot.

        Nobody reads the copy's connection until it is needed: call :meth:`meet` then. The caller closes it.
        """
        if self.process is None or self.closing or self.obstacles:
            return None
        ours, theirs = socket_pair()
        made = ForkServer(Connection(ours, m.ToClient), None, "")
        made.log, made.phase, made._waits_as_spare = self.log, "spare", True
        own_pidfd = os.pidfd_open(os.getpid())
        try:
            with theirs:
                self.conn.send(m.Spare(), fds=[theirs.fileno(), own_pidfd], timeout_s=0.0)
        except (ChannelClosedError, TimeoutError):
            made.close()
            return None
        finally:
            os.close(own_pidfd)
        return made

    def meet(self, timeout_s: float = 1.0) -> bool:
        """Whether a spare is there and works. From then on it is a fork server like any other, which is ready."""
        if self._waits_as_spare:
            if not self._meet_copy(timeout_s):
                return False
            self.phase, self._waits_as_spare = "ready", False
        return not self.conn.eof and process_state(self.pid) not in ("", "T", "Z")

    def claim(self, supervisor: Supervisor | None) -> None:
        """Say who reads the connection (None: nobody any more)."""
        with self._lock:
            current = self._supervisor() if self._supervisor else None
            if supervisor is not None and current is not None and current is not supervisor:
                raise DrumlineError("a fork server has one supervisor in a process; close the other one first")
            self._supervisor = weakref.ref(supervisor) if supervisor else None

    def death_report(self) -> FailureReport:
        """How it ended. Waits a moment for its exit status."""
        code: int | None = None
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(timeout=0.1)
        killed = code is not None and code < 0
        return exit_report(
            role=FORK_SERVER,
            rank=None,
            pid=self.pid,
            phase=self.phase,
            code=None if killed else code,
            signal=-code if killed and code is not None else None,
            oom=code == -signal.SIGKILL and host.oom_killed_since(self.oom_kills),
            log_file=self.log_file,
        )

    def close(self, timeout_s: float = 3.0) -> None:
        """End it and all its children if we started it, else only this connection. Idempotent, bounded."""
        with self._lock:
            if self.closing or os.getpid() != self._owner_pid:
                return
            self.closing = True
        _open_servers.discard(self)
        if self._waits_as_spare:
            with contextlib.suppress(ChannelClosedError):
                self.meet(0.0)  # one that does not exist yet ends with its connection
        if self.process is not None:
            with contextlib.suppress(ChannelClosedError, TimeoutError):
                self.conn.send(m.Shutdown(), timeout_s=0.0)
            if self.phase != "ready":  # it reads nothing while it imports
                self.process.terminate()
                timeout_s = min(timeout_s, _IMPORTING_WAIT_S)
            self._reap(self.process, timeout_s)
        self._let_go()

    def _let_go(self) -> None:
        supervisor = self._supervisor() if self._supervisor else None
        if supervisor is not None:
            supervisor.release(self)
        self.conn.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _reap(self, process: subprocess.Popen[bytes] | _Adopted, timeout_s: float) -> None:
        if process_state(process.pid) == "T":  # stopped: it will not hear us
            process.kill()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ForkServer pid={self.pid} {self.phase!r}>"


@atexit.register
def _close_all() -> None:
    """A program that ends without closing is no failure: the fork server must not report the root's death."""
    for server in list(_open_servers):
        server.close(timeout_s=2.0)


def refuse_inside() -> None:
    """ConfigError in a process that was itself made by a fork server or an executor."""
    if inside:
        raise ConfigError(
            f"{inside} is a process of drumline and cannot start an engine or executor of its own. Most likely the "
            "module of your worker or extension class starts one while it is imported: put that part under "
            "if __name__ == '__main__', or the class into a module of its own"
        )


def check_interpreter() -> None:
    """DrumlineError if this interpreter cannot be executed again."""
    if not sys.executable:
        raise DrumlineError("sys.executable is empty: this interpreter cannot be started again (embedded Python?)")


def open_console(log: LogConfig) -> int:
    """The descriptor of the console, or -1 if it is not open."""
    try:
        os.fstat(log.console_fd)
    except OSError:  # -1 too
        return -1
    return log.console_fd


def _execute(fd: int, base: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # Ctrl-C goes to the whole terminal group: it stays blocked in the new process until that ignores it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            execution_command("drumline.processes.forkserver", fd),
            stdin=subprocess.DEVNULL,
            env={**base, **ONE_THREAD},
            cwd=None if has_working_folder() else "/",
            pass_fds=[fd],
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_BOOT = """
import sys
_, _, module, package, *paths = sys.argv
sys.path[:] = [package, *sys.path, *(path for path in paths if path not in sys.path)]
__import__(module)
sys.modules[module].main()
"""


def execution_command(module: str, fd: int) -> list[str]:
    """Command that calls ``main()`` of one of our modules, found where this process has it; ``argv[1]`` is ``fd``.

    Not ``-m`` and PYTHONPATH: with ``-I`` or ``-E`` that is not read, and then a package which the program found
    only through its own changes of ``sys.path`` is not found. ``-P``: the working directory is no place to import from
    (it may hold a file named like a module), so entries of ``sys.path`` that mean it are left out here.
    """
    flags = [flag for flag in subprocess._args_from_interpreter_flags() if flag != "-P"]  # type: ignore[attr-defined]
    package = str(Path(__file__).resolve().parents[2])
    paths = [path for path in map(str, sys.path) if os.path.isabs(path)]  # noqa: PTH117 (as they are)
    return [sys.executable, *flags, "-P", "-c", _BOOT, str(fd), module, package, *paths]


__all__ = ["ForkServer", "Member", "ProcessSpec"]
