"""The process that makes all others of one root; its first argument is the descriptor of its connection.

It is executed (the user's ``__main__`` is never run again), imports what it was told to once, with one thread of every
kind, and then only forks, reaps and watches. It never computes and opens no device. One thread, one poll loop::

    root ========connection, pidfd=======> +-----------+ --fork--> EngineCore (a client too, if it was given access)
    EngineCore ==connection==============> | ForkServer| --fork--> Worker ...
    SIGCHLD, SIGTERM --wakeup fd---------> +-----------+ --exec--> child that needs other import-time variables

Deaths:

- A child's end is told to its owner (the client that had it made), with exit code or signal: this is the real parent.
- An owner's end (its connection or its pidfd): its children are killed after a grace of 1 s.
- The root's end without a goodbye: as the highest survivor this process prints the report on the console, kills all
  children after the grace and exits. While imports run (no loop yet) a timer signal looks for it.
- Its own end (its owners are told why, if that is an exception): the children have PDEATHSIG, which follows the thread
  that forked them: the only one here. If the root is gone too and nobody has said so, the root's own child with access
  (the engine core) reports both.
- The root starts the engine again (``Clear``): all children are killed at once, and it is told when they are gone.
- It is stopped (SIGSTOP) and the root is gone: a child that sees its owner gone kills it.

The root may ask for a **spare** (``Spare``): a copy of this process, made when its imports are done, that waits with a
connection of its own to the root. If this process dies, the root goes on with the spare at once: the imports are most
of a start (7 of 9 s where cores are slow), and pages that nobody writes to are shared, so it costs 6 MB of memory.
Nobody is its parent for long, so the root knows it by a pidfd; it has no PDEATHSIG, and ends with the root's
connection. Until the first child is asked of it, it reports nobody's death: this process does.

A fork server may be there to be **copied** (``Begin.copies``): it makes no children and reports no deaths, and for
``Copy`` forks a process that goes on as if it had been executed just then: it awaits a ``Begin`` of its own, and only
imports what the original has not. See warm.py for when that is right.

It is a subreaper: orphans of its children become its own, are reaped, and are killed when their grace is over.

Forking is only right when no other thread holds a lock at that moment and no device driver is in use, so that is
checked after the imports (threads by name against an allow-list, open device files, torch's own opinion). If the check
fails, it says so and children are executed fresh.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, cast

import msgspec

from drumline.errors import ChannelClosedError, FailureReport
from drumline.platforms import host
from drumline.processes import linux
from drumline.processes import messages as m
from drumline.processes.births import OomKills, execute_child, fork_child
from drumline.processes.child import ROOT_SAYS_S, ChildStart
from drumline.processes.connection import Connection, Frame, socket_pair
from drumline.processes.environment import ONE_THREAD, child_environment, needs_fresh
from drumline.processes.logs import ProcessLog, log_path
from drumline.processes.reports import exit_report, make_report, print_report
from drumline.processes.titles import COPIED_FORK_SERVER, FORK_SERVER, SPARE_FORK_SERVER, is_ending, set_title

_EXIT_WAIT_S = 0.2
_HANDLERS = (signal.SIGTERM, signal.SIGCHLD)
"""What this process handles and its children do not."""
_LAST_WAIT_S = 2.0
"""How long the end waits for killed children before it leaves them to the kernel (state D)."""


@dataclass(eq=False)
class _Client:
    """Someone who may ask for children."""

    conn: Connection[m.ToServer]
    pidfd: int
    root: bool = False
    gone: bool = False


@dataclass(eq=False)
class _Child:
    """One child that has not been reaped."""

    key: int
    pid: int
    pidfd: int
    owner: _Client
    kill_at: float | None = None
    as_client: _Client | None = field(default=None)


class ForkServerProcess:
    """State of the process; see the module."""

    def __init__(self, fd: int, *, copied: bool = False, imported: tuple[int, ...] = ()) -> None:
        """``fd``: of the connection to the root. ``copied``: this process is a copy of one whose imports opened
        ``imported``."""
        self.copied = copied
        self.root = _Client(Connection.from_fd(fd, m.ToServer), -1, root=True)
        self.clients = [self.root]
        self.children: dict[int, _Child] = {}
        self.strays: dict[int, float | None] = {}
        """Processes that children left, and when to kill them; None: killed, and there until reaped."""
        self.helpers: set[int] = set()
        """Processes that imports started, and spares."""
        self.spares: set[int] = set()
        self.spare = False
        """It waits for the death of the one that it is a copy of, or is there to be copied: deaths are others' to
        report."""
        self._opened_by_imports = linux.identities(imported)
        self.obstacles: list[str] = []
        self.early: list[Frame[m.ToServer]] = []
        self.ending: float | None = None
        self.clearing = False
        """The root wants all children gone; none is made meanwhile."""
        self.terminated_at: float | None = None
        """When a SIGTERM came that is to be acted upon."""
        self.importing = False
        self.exit_code = 0
        self.oom_kills = OomKills()
        self.wake_r, self.wake_w = os.pipe()
        self.told = mmap.mmap(-1, 1)
        """Not zero: the root's death has been reported. Shared with forked children."""

    # ---- start ----

    def run(self) -> int:
        """The whole life; exit code."""
        self._catch_signals()
        if not self._begin():
            return 1
        self.log = ProcessLog(self.log_dir, FORK_SERVER, self.begin.log_level, self.console_fd)
        linux.become_subreaper()
        if self.begin.copies:
            set_title(COPIED_FORK_SERVER)
        gc.disable()  # looking for garbage while millions of objects are made costs a quarter of the import time
        opened = set(linux.open_fds())
        if not self._import_all():
            return 1
        self._opened_by_imports |= linux.identities(fd for fd in linux.open_fds() if fd not in opened)
        self.helpers = set(linux.children_of(os.getpid()))
        self._check()
        gc.freeze()  # without a collection before: it takes 0.4 s, and what it would find is 11,000 small objects
        gc.enable()
        return self._serve_all()

    def imported(self) -> tuple[int, ...]:
        """Descriptors that imports opened and that are still open."""
        now = linux.identities(self._opened_by_imports)
        return tuple(fd for fd, identity in now.items() if identity == self._opened_by_imports[fd])

    def _serve_all(self) -> int:
        try:
            self._handle_frames(self.root, self.early)
            while not self._done():
                self._turn()
        except BaseException as error:  # noqa: BLE001 (its children die with it: their owners must hear why)
            self._tell_failure(make_report(error, role=FORK_SERVER, phase="ready", log_file=str(self.log.path)))
            return 1
        return self.exit_code

    def _catch_signals(self) -> None:
        os.set_blocking(self.wake_w, False)
        os.set_blocking(self.wake_r, False)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def _on_sigterm(self, number: int, frame: types.FrameType | None) -> None:
        if self.importing:  # no loop that would act on it, and no children that would need an end
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.terminated_at = time.monotonic()

    def _begin(self) -> bool:
        frames: list[Frame[m.ToServer]] = []
        deadline = time.monotonic() + 60
        while not frames and not self.root.conn.eof and time.monotonic() < deadline:
            frames = self.root.conn.receive_wait(1.0)
        if not frames or not isinstance(frames[0].message, m.Begin):
            return False
        self.begin = frames[0].message
        self.root.pidfd = frames[0].fds[0]
        self.early = frames[1:]
        self.env = cast("dict[str, str]", m.unpack_env(self.begin.env))
        self.spare = self.begin.copies
        self.log_dir = os.fsdecode(self.begin.log_dir)
        sys.path[:] = map(os.fsdecode, self.begin.sys_path)
        self.console_fd = frames[0].fds[1] if len(frames[0].fds) > 1 else -1
        if self.copied:
            os.environ.clear()
            os.environ.update({**self.env, **ONE_THREAD})
        return True

    def _import_all(self) -> bool:
        self.importing = True
        signal.signal(signal.SIGALRM, self._look_for_root)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        seconds = {}
        phase = "starting"
        try:
            for name in self.begin.preload:
                phase = f"imports {name}"
                self._tell(self.root, m.ServerPhase(phase, str(self.log.path)))
                start = time.monotonic()
                importlib.import_module(name)
                seconds[name] = time.monotonic() - start
        except BaseException as error:  # noqa: BLE001 (whatever it is, the root must hear of it)
            signal.setitimer(signal.ITIMER_REAL, 0)
            report = make_report(error, role=FORK_SERVER, phase=phase, log_file=str(self.log.path))
            report.message = f"{report.message} (module {phase.partition(' ')[2]} of the preload list)"
            self._tell_failure(report)
            return False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self.importing = False
        self.import_seconds = seconds
        return True

    def _tell_failure(self, report: FailureReport, timeout_s: float = 1.0) -> None:
        """Why it ends, to all that have children of it."""
        self.log.note(report.text())
        for client in self.clients:
            self._tell(client, m.ServerFailed(report), timeout_s=timeout_s)

    def _look_for_root(self, number: int, frame: types.FrameType | None) -> None:
        if _is_gone(self.root.pidfd) or _hung_up(self.root.conn.fd):
            signal.setitimer(signal.ITIMER_REAL, 0)  # what follows takes longer than the timer's interval
            if not self.spare and not self._said_goodbye() and _is_gone(self.root.pidfd, timeout_s=_EXIT_WAIT_S):
                self._tell_root_death()
            os._exit(1)

    def _said_goodbye(self) -> bool:
        with contextlib.suppress(ChannelClosedError):
            self.early += self.root.conn.receive()
        return any(isinstance(frame.message, m.Shutdown) for frame in self.early)

    def _check(self) -> None:
        self.obstacles = find_obstacles()
        for obstacle in self.obstacles:
            print(f"WARNING children are executed fresh instead of forked: {obstacle}", file=sys.stderr)
        self._tell(self.root, m.ServerReady(self.obstacles, self.import_seconds))

    # ---- loop ----

    def _turn(self) -> None:
        poller = select.poll()
        poller.register(self.wake_r, select.POLLIN)
        by_fd: dict[int, _Client] = {}
        for client in self.clients:
            events = select.POLLIN | (select.POLLOUT if client.conn.pending else 0)
            poller.register(client.conn.fd, events)
            by_fd[client.conn.fd] = client
            if client.pidfd >= 0:
                poller.register(client.pidfd, select.POLLIN)
                by_fd[client.pidfd] = client
        for fd, _ in poller.poll(self._timeout_ms()):
            if fd == self.wake_r:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_r, 4096)
            elif not by_fd[fd].gone:
                self._serve(by_fd[fd], fd)
        self._reap()
        if self.clearing and not self.children and not self.strays:
            self.clearing = False
            self._tell(self.root, m.Cleared())
        if self.terminated_at is not None and self.ending is None:
            self._consider_sigterm(self.terminated_at)
        self._kill_overdue()

    def _timeout_ms(self) -> float | None:
        times = [child.kill_at for child in self.children.values() if child.kill_at is not None]
        times += [kill_at for kill_at in self.strays.values() if kill_at is not None]
        if self.ending is not None:
            times.append(self.ending)
        elif self.terminated_at is not None:
            times.append(time.monotonic() + ROOT_SAYS_S / 30)
        if not times:
            return None
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1

    def _done(self) -> bool:
        if self.ending is None:
            return False
        return (not self.children and not self.strays) or time.monotonic() > self.ending

    def _serve(self, client: _Client, fd: int) -> None:
        if fd == client.pidfd:
            self._client_gone(client)
            return
        try:
            client.conn.flush()
            frames = client.conn.receive()
        except (ChannelClosedError, msgspec.MsgspecError):
            frames, client.conn.eof = [], True
        self._handle_frames(client, frames)
        if client.conn.eof and not client.gone:
            self._client_gone(client)

    def _handle_frames(self, client: _Client, frames: list[Frame[m.ToServer]]) -> None:
        for frame in frames:
            if isinstance(frame.message, m.Spawn):
                self._spawn(client, frame.message, frame.fds)
            elif isinstance(frame.message, m.Spare) and client.root:
                self._make_spare(*frame.fds)
            elif isinstance(frame.message, m.Copy) and client.root:
                self._make_copy(*frame.fds)
            elif isinstance(frame.message, m.Clear) and client.root:
                self._clear()
            elif isinstance(frame.message, m.Shutdown) and client.root:
                client.gone = True
                self._end_all()
                self._drop_client(client)
            _close(frame.fds)

    # ---- deaths ----

    def _client_gone(self, client: _Client) -> None:
        client.gone = True
        if client.root:
            if self.ending is None:
                # Its sockets are closed a moment before its pidfd tells. A root that lives on dropped us on purpose.
                if not self.spare and _is_gone(client.pidfd, timeout_s=_EXIT_WAIT_S):
                    self._tell_root_death()
                self.exit_code = 1
                self._end_all()
            self._drop_client(client)
            return
        kill_at = time.monotonic() + self.begin.grace_s
        for child in self.children.values():
            if child.owner is client:
                child.kill_at = min(child.kill_at or kill_at, kill_at)
        self._drop_client(client)

    def _drop_client(self, client: _Client) -> None:
        if client in self.clients:
            self.clients.remove(client)
        client.conn.close()
        if client.root and client.pidfd >= 0:  # that of others belongs to their child record
            os.close(client.pidfd)
        client.pidfd = -1

    def _tell_root_death(self) -> None:
        report = self._root_report()
        self.told[0] = 1
        print_report(report, self.console_fd)

    def _root_report(self) -> FailureReport:
        code, number = self._root_exit()
        deadline = time.monotonic() + _EXIT_WAIT_S
        while code is None and number is None and time.monotonic() < deadline:
            time.sleep(0.01)  # newer kernels tell it once the root's own parent has reaped it; there is no event for it
            code, number = self._root_exit()
        return exit_report(
            role=self.begin.role,
            rank=None,
            pid=self.begin.pid,
            phase="",
            code=code,
            signal=number,
            oom=number == signal.SIGKILL and self.oom_kills.grew(),
            message="it ended without closing; all its processes are being ended",
        )

    def _root_exit(self) -> tuple[int | None, int | None]:
        code, number = linux.exit_of_zombie(self.begin.pid)
        return linux.exit_of(self.root.pidfd) if code is None and number is None else (code, number)

    def _end_all(self) -> None:
        now = time.monotonic()
        self.ending = now + self.begin.grace_s + _LAST_WAIT_S
        for child in self.children.values():
            child.kill_at = now + self.begin.grace_s
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)

    def _clear(self) -> None:
        """Kill all children now; what they leave is killed when they are reaped."""
        self.clearing = True
        now = time.monotonic()
        for child in self.children.values():
            child.kill_at = now
        for pid, kill_at in self.strays.items():
            if kill_at is not None:
                self.strays[pid] = now
        self._kill_overdue()

    def _consider_sigterm(self, came: float) -> None:
        if is_ending(self.begin.pid):
            self.terminated_at = None  # it went to the root, too, which says when this is to end
        elif time.monotonic() > came + ROOT_SAYS_S:
            self._end_by_sigterm()

    def _end_by_sigterm(self) -> None:
        self.exit_code = 128 + signal.SIGTERM
        report = exit_report(
            role=FORK_SERVER,
            rank=None,
            pid=os.getpid(),
            phase="ready",
            code=None,
            signal=signal.SIGTERM,
            log_file=str(self.log.path),
        )
        self._tell_failure(report, 0.0)
        self._end_all()

    def _reap(self) -> None:
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if result is None:
                return
            stray = self.strays.pop(result.si_pid, self) is not self
            self.helpers.discard(result.si_pid)
            if result.si_pid in self.spares:
                self.spares.remove(result.si_pid)
                self._tell(self.root, m.SpareEnded(result.si_pid))
            child = self.children.pop(result.si_pid, None)
            if child is not None:
                self._tell_exit(child, result)
            if child is not None or stray:
                self._adopt_strays()

    def _tell_exit(self, child: _Child, result: os.waitid_result) -> None:
        os.close(child.pidfd)
        killed = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        message = m.Exited(
            key=child.key,
            code=None if killed else result.si_status,
            signal=result.si_status if killed else None,
            oom=killed and result.si_status == signal.SIGKILL and self.oom_kills.grew(),
            time=time.time(),
        )
        if not child.owner.gone:
            self._tell(child.owner, message)
        if child.as_client is not None and not child.as_client.gone:
            self._client_gone(child.as_client)

    def _adopt_strays(self) -> None:
        """Descendants of a child that ended are ours now; they get the grace too."""
        kill_at = time.monotonic() + (0.0 if self.clearing else self.begin.grace_s)
        for pid in linux.children_of(os.getpid()):
            if pid not in self.children and pid not in self.helpers:
                self.strays.setdefault(pid, kill_at)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self.children.values():
            if child.kill_at is not None and now >= child.kill_at:
                child.kill_at = None
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for pid, kill_at in list(self.strays.items()):
            if kill_at is not None and now >= kill_at:
                self.strays[pid] = None  # killed, and there until it is reaped
                with contextlib.suppress(OSError):  # unreaped children keep their pid, so it is the right one
                    os.kill(pid, signal.SIGKILL)

    # ---- births ----

    def _spawn(self, client: _Client, spawn: m.Spawn, fds: list[int]) -> None:
        if self.ending is not None or self.clearing or _hung_up(fds[0]):
            return  # nobody is left who would want it
        if self.spare:
            self.spare = False
            set_title(FORK_SERVER)
        changes = m.unpack_env(spawn.env)
        reasons = self.obstacles or needs_fresh(self.env, changes)
        fresh = spawn.fresh or bool(reasons)
        ours: socket.socket | None = None
        theirs: socket.socket | None = None
        if spawn.forkserver_access:
            ours, theirs = socket_pair()
        start = ChildStart(
            spawn=spawn,
            env=child_environment(self.env, changes, spawn.threads),
            conn_fd=fds[0],
            fds=fds[1:],
            server_fd=theirs.fileno() if theirs else -1,
            server_pid=os.getpid(),
            console_fd=self.console_fd,
            log_dir=self.log_dir,
            allowed=host.allowed_cpus(),
            log_level=self.begin.log_level,
            grace_s=self.begin.grace_s,
            root_role=self.begin.role,
            root_pid=self.begin.pid,
            of_root=client.root,
            told=self.told,
            imported=self.imported(),
        )
        pid = 0
        try:
            pid = (
                execute_child(start, self.begin.sys_path)
                if fresh
                else fork_child(start, lambda: self._forget(ours, theirs), _HANDLERS)
            )
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if pid:  # out of descriptors
                self.strays[pid] = time.monotonic()
            report = make_report(error, role=spawn.role, rank=spawn.rank, phase="starting")
            self._tell(client, m.SpawnFailed(spawn.key, report))
            for sock in (ours, theirs):
                if sock is not None:
                    sock.close()
            return
        child = self.children[pid] = _Child(spawn.key, pid, pidfd, client)
        if ours is not None and theirs is not None:
            theirs.close()
            child.as_client = _Client(Connection(ours, m.ToServer), pidfd)
            self.clients.append(child.as_client)
            self._tell(child.as_client, m.ServerReady(self.obstacles, self.import_seconds))
        self._tell(client, m.Spawned(spawn.key, pid, fresh), fds=[pidfd])

    def _make_spare(self, conn_fd: int, root_pidfd: int) -> None:
        """If it cannot be, the root sees its connection end."""
        if self.ending is None and not self.obstacles:
            pid = self._copy_self(conn_fd, lambda: self._be_spare(conn_fd, root_pidfd))
            if pid:
                self.spares.add(pid)

    def _make_copy(self, conn_fd: int) -> None:
        """As :meth:`_make_spare`."""
        if self.ending is None and not self.obstacles:
            self._copy_self(conn_fd, lambda: self._be_copy(conn_fd))

    def _copy_self(self, conn_fd: int, live: Callable[[], NoReturn]) -> int:
        """Fork a process that does ``live`` and say on its connection who it is; its pid, or 0 if none was made. One
        that cannot be introduced is killed, which the root sees too."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = 0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads: find_obstacles has looked at them
                pid = os.fork()
            if pid == 0:
                live()
            self.helpers.add(pid)
            self._introduce(pid, conn_fd)
        except OSError as error:
            self.log.note(f"no copy of the fork server: {error}")
            if pid:
                os.kill(pid, signal.SIGKILL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    def _introduce(self, pid: int, conn_fd: int) -> None:
        """Say on its connection who it is. It does not do so itself: it may be stopped before it could."""
        pidfd = os.pidfd_open(pid)
        try:
            conn: Connection[m.ToServer] = Connection.from_fd(os.dup(conn_fd), m.ToServer)
        except OSError:
            os.close(pidfd)
            raise
        try:
            log_file = log_path(self.log_dir, FORK_SERVER, pid)
            conn.send(m.SpareReady(pid, str(log_file), self.import_seconds), fds=[pidfd], timeout_s=0.0)
        except (ChannelClosedError, TimeoutError):
            pass  # the root is gone
        finally:
            conn.close()
            os.close(pidfd)

    def _leave_original(self, *fds: int) -> None:
        """In a copy. Nothing of the original's may stay open: others wait for the end of its connections."""
        signal.set_wakeup_fd(-1)
        for client in self.clients:
            client.conn.abandon()
        imported = self.imported()
        linux.keep_descriptors([0, 1, 2, *fds], imported)
        self._opened_by_imports = linux.identities(imported)  # some lead to /dev/null now

    def _be_copy(self, conn_fd: int) -> NoReturn:
        """The life of one that goes on as if it had been executed."""
        code = 1
        try:
            imported = self.imported()
            self._leave_original(conn_fd)
            set_title(FORK_SERVER)
            server = ForkServerProcess(conn_fd, copied=True, imported=imported)
            code = server.run()
            with contextlib.suppress(AttributeError):
                server.log.finish()
        finally:
            os._exit(code)

    def _be_spare(self, conn_fd: int, root_pidfd: int) -> NoReturn:
        """The spare's life."""
        code = 1
        try:
            self._leave_original(conn_fd, root_pidfd, self.console_fd)
            self.wake_r, self.wake_w = os.pipe()
            self.clearing, self.terminated_at = False, None  # before it can be told to end
            self._catch_signals()
            set_title(SPARE_FORK_SERVER)
            self.log = ProcessLog(self.log_dir, FORK_SERVER, self.begin.log_level, self.console_fd)
            linux.become_subreaper()
            self.root = _Client(Connection.from_fd(conn_fd, m.ToServer), root_pidfd, root=True)
            self.clients, self.children, self.strays, self.helpers, self.early = [self.root], {}, {}, set(), []
            self.spares = set()
            self.oom_kills = OomKills()
            self.spare = True
            code = self._serve_all()
            self.log.finish()
        finally:
            os._exit(code)

    def _forget(self, *sockets: socket.socket | None) -> None:
        """In the child: objects that own descriptors must forget them: their numbers will belong to others."""
        for client in self.clients:
            client.conn.abandon()
        for sock in sockets:
            if sock is not None:
                sock.detach()

    def _tell(self, client: _Client, message: object, fds: list[int] | None = None, timeout_s: float = 0.0) -> None:
        with contextlib.suppress(ChannelClosedError, TimeoutError):  # its end is seen elsewhere; what waits goes later
            client.conn.send(message, fds=fds or [], timeout_s=timeout_s)


def find_obstacles() -> list[str]:
    """Why this process should not fork; empty: it may."""
    found = []
    names = {name for tid, name in linux.thread_names().items() if tid != os.getpid()}
    foreign = sorted(names - linux.ALLOWED_THREADS)
    if foreign:
        found.append(f"an import started threads: {', '.join(foreign)}")
    devices = linux.device_files()
    if devices:
        found.append(f"an import opened devices: {', '.join(devices)}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("an import initialised CUDA")
    return found


def _is_gone(pidfd: int, timeout_s: float = 0.0) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _hung_up(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    return bool(poller.poll(0))


def _close(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()


def _above_stdio(fd: int) -> int:
    """Move the connection above the standard descriptors and make sure that these are open.

    Where the root had closed some of them, the connection or a received descriptor may have such a number, and would
    be overwritten when the log takes 1 and 2.
    """
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        try:
            os.fstat(standard)
        except OSError:
            os.dup2(null, standard, inheritable=True)
    if null > 2:
        os.close(null)
    return high


def main() -> None:
    """Entry point."""
    fd = _above_stdio(int(sys.argv[1]))
    set_title(FORK_SERVER)  # before any change of the environment: setproctitle looks for where it lies in memory
    server = ForkServerProcess(fd)
    code = server.run()
    with contextlib.suppress(AttributeError):
        server.log.finish()
    os._exit(code)
