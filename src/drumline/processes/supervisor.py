"""The owner's side: one thread that watches all members, and what callers may ask of it.

The thread is thin: descriptors in, :class:`drumline.processes.core.SupervisorCore` decides, instructions out::

    control connections, pidfds,          +------+      Stop, signals, closed connections
    fork server's connection and pidfd ==>| core |====> on_event(MemberEvent)   (in this thread)
    requests of other threads (eventfd)   +------+      waiters (a condition)

It sleeps in epoll without a timeout unless the core wants a tick, so an idle supervisor costs nothing.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.errors import ChannelClosedError, DrumlineError, FailureReport, StartupError
from drumline.platforms import host
from drumline.processes import core as c
from drumline.processes import linux
from drumline.processes import messages as m
from drumline.processes.client import ForkServer, Member
from drumline.processes.live import LiveReport, look_at, only_stacks
from drumline.processes.reports import make_report, with_log_tail
from drumline.processes.titles import FORK_SERVER

logger = logging.getLogger(__name__)

_LOOK_FOR_STOPPED_S = 0.1


class EventKind(enum.Enum):
    """What happened to a member."""

    PHASE = "phase"
    READY = "ready"
    MESSAGE = "message"
    FAILURE = "failure"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class MemberEvent:
    """Given to ``on_event`` in the supervisor's thread."""

    kind: EventKind
    member: Member | None = None
    """None: PHASE of the fork server, or FAILURE of it alone (or of the supervisor itself)."""
    phase: str = ""
    """PHASE."""
    data: bytes = b""
    """MESSAGE: what it sent; READY: its info."""
    report: FailureReport | None = None
    """FAILURE: the root cause with everything of the same moment folded under it. GONE: its own failure, if any."""
    members: tuple[Member, ...] = ()
    """FAILURE: all members that are part of it."""


class Supervisor:
    """Watches members. All methods but ``on_event`` may be called from any thread but the supervisor's own."""

    def __init__(
        self,
        forkserver: ForkServer | None = None,
        on_event: Callable[[MemberEvent], None] | None = None,
        *,
        rung_s: float = 2.0,
        term_s: float = 0.5,
        window_s: float = 0.15,
    ) -> None:
        """Seconds: ``rung_s`` from asking to SIGTERM, ``term_s`` from there to SIGKILL, ``window_s`` in which failures
        are collected."""
        self._core = c.SupervisorCore(window_s=window_s, rung_s=rung_s, term_s=term_s)
        self._on_event = on_event
        self._members: dict[int, Member] = {}
        self._early: dict[int, list[c.Event]] = {}
        self._servers: list[ForkServer] = []
        self._failures: list[tuple[FailureReport, tuple[int, ...]]] = []
        self._changed = threading.Condition()
        self._requests: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._closing = False
        self._closed = False
        self._next_look = 0.0
        self._pid = os.getpid()
        if forkserver is not None:
            self._claim(forkserver)
        self._thread = threading.Thread(target=self._run, name="drumline-supervisor", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            if forkserver is not None:
                forkserver.claim(None)
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
            raise

    # ---- for callers ----

    @property
    def failure(self) -> FailureReport | None:
        """Root cause of the first failure."""
        return self._failures[0][0] if self._failures else None

    def add(self, member: Member) -> None:
        """Watch this member from now on; what it did before is not lost."""
        if member.server is not None:
            self._claim(member.server)
        self._members[member.key] = member
        self._post(lambda: self._add(member))

    def wait_all_ready(
        self, members: Sequence[Member], no_progress_timeout: float = 600.0, *, deputies_s: float = 0.0
    ) -> None:
        """Wait until all are ready. StartupError with the root cause if one fails, or if nobody makes progress.

        Progress is a phase, a birth, a word or a ready report of anyone, the fork server's imports included. Before it
        raises, all of ``members`` are killed. ``deputies_s``: how much longer members have that watch others with the
        same limit, know better who is late, and can say so: those that exist and are not stopped.
        """
        self._wait_start(members, lambda member: member.state is c.State.READY, no_progress_timeout, deputies_s)

    def _wait_start(
        self,
        members: Sequence[Member],
        done: Callable[[Member], bool],
        no_progress_timeout: float,
        deputies_s: float = 0.0,
    ) -> None:
        self._not_in_own_thread()
        started = time.monotonic()
        keys = {member.key for member in members}
        report: FailureReport | None = None
        with self._changed:
            while report is None:
                report = self._startup_failure(keys, members)
                if report is not None or all(map(done, members)):
                    break
                if self._closed:
                    raise DrumlineError("this supervisor has been closed")
                left = max(self._core.last_progress, started) + no_progress_timeout - time.monotonic()
                if left <= 0 and all(one.pid and linux.process_state(one.pid) != "T" for one in _late(members)):
                    left += deputies_s
                if left <= 0:
                    report = self._no_progress(members, no_progress_timeout)
                else:
                    self._changed.wait(min(left, 1.0))
        if report is not None:
            if report.what == "hang":
                self._add_stacks(report, members)
            self.shutdown(members, force=True)
            raise StartupError(report)

    def wait_alive(self, member: Member, no_progress_timeout: float = 600.0) -> None:
        """Wait until it has said its first word: its environment, CPUs and threads are set then. StartupError as
        :meth:`wait_all_ready`."""
        self._wait_start([member], lambda one: bool(one.log_file), no_progress_timeout)

    def request_stop(self, members: Iterable[Member], *, force: bool = False) -> None:
        """Start the ladder for these and return at once. ``force``: SIGKILL at once."""
        keys = tuple(member.key for member in members)
        self._post(lambda: self._feed(c.StopRequested(keys, ask=not force)))

    def shutdown(self, members: Iterable[Member] | None = None, *, force: bool = False) -> None:
        """End these (all, if None): ask, wait, SIGTERM, wait, SIGKILL, bounded wait. Returns when they are gone.

        A stopped process (state T) gets SIGKILL at once. One that does not die even so is given up and logged.
        """
        self._not_in_own_thread()
        chosen = list(self._members.values()) if members is None else list(members)
        self.request_stop(chosen, force=force)
        deadline = time.monotonic() + self._core.ladder_s + 1.0
        with self._changed:
            while any(member.state is not c.State.GONE for member in chosen):
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return
                self._changed.wait(left)

    def forget(self, members: Iterable[Member]) -> None:
        """Release what is kept of members that are gone."""
        chosen = [member for member in members if member.state is c.State.GONE]
        self._post(lambda: self._forget(chosen))

    def close(self, *, force: bool = False) -> None:
        """Shut all members down and end the thread. Does not close the fork server. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self.shutdown(force=force)
        self._post(self._stop_thread)
        self._thread.join(5.0)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stacks(self, members: Sequence[Member], timeout_s: float = 1.0) -> dict[int, str]:
        """Python stacks of all threads of each member, by its key; also of those that hang in C code with the GIL held.

        They are dumped into its log file (SIGUSR1, faulthandler). One that cannot (stopped, say) gives its state and
        the kernel function that it waits in; a stopped one is sent nothing.
        """
        able = [member for member in members if linux.process_state(member.pid) in tuple("RSDI")]
        starts = {member.key: _size(member.log_file) for member in able}
        for member in able:
            member.signal(signal.SIGUSR1)
        found: dict[int, str] = {}
        written: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(able) and time.monotonic() < deadline:
            time.sleep(0.05)  # a file tells nobody that it has grown
            for member in able:
                if member.key in found:
                    continue
                text = _read_from(member.log_file, starts[member.key])
                if "most recent call first" in text and text == written.get(member.key):  # it does not grow any more
                    found[member.key] = only_stacks(text)
                written[member.key] = text
        for member in members:
            if member.key not in found:
                state, channel = linux.process_state(member.pid), linux.wait_channel(member.pid)
                found[member.key] = f"no stack: state {state or 'gone'}, waits in {channel or '(unknown)'}"
        return found

    # ---- waiting ----

    def _startup_failure(self, keys: set[int], members: Sequence[Member]) -> FailureReport | None:
        for report, failed in self._failures:
            if not failed or keys.intersection(failed):
                return report
        for member in members:
            # Gone without a failure: somebody had it stopped. (A failing one is gone before its failure is told.)
            if member.state is c.State.GONE and member.report is None:
                return FailureReport(
                    role=member.role,
                    rank=member.rank,
                    host=socket.gethostname(),
                    pid=member.pid,
                    phase=member.phase,
                    what="exit",
                    type="a stop",
                    message="it was stopped before it was ready",
                )
        return None

    def _no_progress(self, members: Sequence[Member], timeout: float) -> FailureReport:
        late = _late(members)
        lines = [f"no progress of any process for {timeout:g} s; not ready:"]
        for member in late:
            where = "no process yet"
            if member.pid:
                state, channel = linux.process_state(member.pid), linux.wait_channel(member.pid)
                where = f"pid {member.pid}, state {state or 'gone'}" + (f", waits in {channel}" if channel else "")
            lines.append(f"  {member.role} in phase {member.phase!r} ({where}) {member.log_file}".rstrip())
        stopped = [member for member in late if linux.process_state(member.pid) == "T"]
        unborn = any(not member.pid for member in late)
        for server in self._servers if unborn else ():
            state = linux.process_state(server.pid)
            lines.append(f"  the fork server is in phase {server.phase!r} (pid {server.pid}, state {state or 'gone'})")
        report = FailureReport(role="", host=socket.gethostname(), what="hang", message="\n".join(lines))
        if unborn and self._servers and not stopped:
            server = self._servers[0]
            report.role, report.pid, report.phase = FORK_SERVER, server.pid, server.phase
            report.log_file = server.log_file
        else:  # one that is stopped is why others wait
            odd = (stopped or late)[0]
            report.role, report.rank, report.pid, report.phase = odd.role, odd.rank, odd.pid, odd.phase
            report.log_file = odd.log_file
        return report

    def _add_stacks(self, report: FailureReport, members: Sequence[Member]) -> None:
        """Of a start without progress, before anything is killed."""
        alive = [member for member in members if member.pid]
        processes = [
            look_at(member.name, member.pid, rank=member.rank, doing=member.phase, log_file=member.log_file)
            for member in alive
        ]
        stacks = self.stacks(alive)
        for member, process in zip(alive, processes, strict=True):
            process.stacks = stacks[member.key]
        live = LiveReport(cause=report.message.partition("\n")[0], processes=processes)
        folder = next((Path(member.log_file).parent for member in alive if member.log_file), None)
        report.stacks = live.text()
        report.stacks_file = live.write(folder, "hang") if folder is not None else ""

    def _not_in_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("on_event must not wait for the supervisor whose thread it runs in (use request_stop)")

    # ---- thread ----

    def _post(self, action: Callable[[], None]) -> None:
        self._requests.append(action)
        with self._wake_lock:  # else the number could belong to somebody else by the time of the write
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            logger.exception("the supervisor thread failed")
            self._tell_failure(make_report(error, role="Supervisor"), ())
        finally:
            self._release_all()

    def _turn(self) -> None:
        self._watch_writes()
        for selector_key, _ in self._selector.select(self._timeout()):
            handler = selector_key.data
            if handler is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            elif selector_key.fd in self._selector.get_map():  # an earlier handler may have dropped it
                handler()
        while self._requests:
            self._requests.popleft()()
        now = time.monotonic()
        if now >= self._next_look and self._core.stopping():
            self._next_look = now + _LOOK_FOR_STOPPED_S
            for key in self._core.stopping():
                if linux.process_state(self._members[key].pid) == "T":
                    self._feed(c.FoundStopped(key))
        self._feed(c.Tick())

    def _timeout(self) -> float | None:
        deadline = self._core.next_deadline()
        if self._core.stopping():
            deadline = min(deadline or self._next_look, self._next_look)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _watch_writes(self) -> None:
        """Ask for writability where something is queued."""
        conns: list[Any] = [member.conn for member in list(self._members.values())] + [s.conn for s in self._servers]
        for conn in conns:
            registered = self._selector.get_map().get(conn.fd) if conn.fd >= 0 else None
            if registered is None:
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if conn.pending else 0)
            if registered.events != events:
                self._selector.modify(conn.fd, events, registered.data)

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(fd)

    # ---- fork servers ----

    def _claim(self, server: ForkServer) -> None:
        server.claim(self)
        if server not in self._servers:
            self._servers.append(server)
            self._post(lambda: self._watch_server(server))

    def _watch_server(self, server: ForkServer) -> None:
        if server.conn.fd >= 0:
            self._watch(server.conn.fd, lambda: self._read_server(server))
        if server.pidfd >= 0:
            self._watch(server.pidfd, lambda: self._server_gone(server, None))

    def _unwatch_server(self, server: ForkServer) -> None:
        self._unwatch(server.conn.fd)
        self._unwatch(server.pidfd)

    def release(self, server: ForkServer) -> None:
        """Forget a fork server that is being closed. Returns when it is no longer watched."""
        done = threading.Event()

        def act() -> None:
            self._unwatch_server(server)
            with contextlib.suppress(ValueError):
                self._servers.remove(server)
            done.set()

        self._post(act)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            done.wait(2.0)
        server.claim(None)

    def _read_server(self, server: ForkServer) -> None:
        frames: list[Any] = []
        try:
            server.conn.flush()
        except ChannelClosedError:
            pass  # what it said before it ended can still be read
        try:
            frames = server.conn.receive()
        except Exception:
            logger.exception("broken connection to the fork server")
            server.conn.eof = True
        for frame in frames:
            self._on_server_message(server, frame.message, frame.fds)
        if server.conn.eof:
            self._server_gone(server, None)

    def _on_server_message(self, server: ForkServer, message: m.ToClient, fds: list[int]) -> None:
        match message:
            case m.ServerPhase():
                server.log_file = message.log_file or server.log_file
                self._on_server_phase(server, message.text)
            case m.ServerReady():
                server.obstacles, server.import_seconds = message.obstacles, message.seconds
                self._on_server_phase(server, "ready")
            case m.ServerFailed():
                self._server_gone(server, message.report)
            case m.Spawned():
                self._on_spawned(server, message, fds[0])
            case m.SpawnFailed():
                self._feed(c.ToldFailure(message.key, message.report))
                self._feed(c.ExitTold(message.key, c.Exit(), time.time()))
            case m.Exited():
                if message.oom:
                    server.oom_kills = host.oom_kills()
                how = c.Exit(message.code, message.signal, message.oom)
                self._feed(c.ExitTold(message.key, how, message.time))
            case m.Cleared():
                server.cleared.set()
            case m.SpareEnded():
                server.on_spare_ended(message.pid)

    def _on_server_phase(self, server: ForkServer, phase: str) -> None:
        server.phase = phase
        self._feed(c.ServerProgressed(phase))
        self._emit(MemberEvent(kind=EventKind.PHASE, phase=phase))

    def _on_spawned(self, server: ForkServer, message: m.Spawned, pidfd: int) -> None:
        member = server.members.get(message.key)
        if member is None or member.state is c.State.GONE:
            os.close(pidfd)
            return
        member.pid, member.pidfd, member.fresh = message.pid, pidfd, message.fresh
        self._feed(c.Born(member.key, message.pid))
        if member.key in self._members:
            self._watch_pidfd(member)

    def _server_gone(self, server: ForkServer, report: FailureReport | None) -> None:
        # Its last words may still be in the socket: they are read before its death is judged.
        self._unwatch(server.pidfd)
        if report is None and not server.conn.eof and server.conn.fd >= 0:
            self._read_server(server)
            return
        self._unwatch_server(server)
        if server.closing or server.phase == "gone":
            return
        report = report or with_log_tail(server.death_report())
        server.phase = "gone"
        self._feed(c.ServerGone(report))

    # ---- members ----

    def _add(self, member: Member) -> None:
        if member.key in self._core.members:
            return
        self._feed(c.Added(member.key, member.role, member.rank, told=member.server is not None))
        for event in self._early.pop(member.key, []):
            self._feed(event)
        if member.state is not c.State.GONE:
            self._watch(member.conn.fd, lambda: self._read_member(member))
            self._watch_pidfd(member)

    def _watch_pidfd(self, member: Member) -> None:
        if member.pidfd < 0 or member.pidfd in self._selector.get_map():
            return

        def ended() -> None:
            self._unwatch(member.pidfd)
            self._feed(c.ProcessEnded(member.key, time.time()))

        self._watch(member.pidfd, ended)

    def _read_member(self, member: Member) -> None:
        with contextlib.suppress(ChannelClosedError):
            member.conn.flush()
        frames: list[Any] = []
        try:
            frames = member.conn.receive()
        except Exception:
            logger.exception("broken control connection of %s", member.role)
            member.conn.eof = True
        for frame in frames:
            self._on_member_message(member, frame.message)
        if member.conn.eof and member.state is not c.State.GONE:
            self._unwatch(member.conn.fd)
            self._feed(c.ConnectionEnded(member.key, time.time()))

    def _on_member_message(self, member: Member, message: m.ToOwner) -> None:
        match message:
            case m.Hello():
                member.role, member.log_file = message.name, message.log_file
                member.pid = member.pid or message.pid
                self._feed(c.Named(member.key, message.name, message.pid, message.log_file))
            case m.Phase():
                self._feed(c.Progressed(member.key, message.text))
            case m.Ready():
                self._feed(c.BecameReady(member.key, message.info))
            case m.Failed():
                self._feed(c.ToldFailure(member.key, message.report))
            case m.Data():
                if member.state is c.State.STARTING:
                    self._feed(c.Spoke(member.key))
                self._emit(MemberEvent(kind=EventKind.MESSAGE, member=member, data=message.data))

    def _forget(self, members: list[Member]) -> None:
        self._core.forget(member.key for member in members)
        for member in members:
            self._members.pop(member.key, None)
            if member.server is not None:
                member.server.members.pop(member.key, None)

    # ---- core ----

    def _feed(self, event: c.Event) -> None:
        key = getattr(event, "key", None)
        if key is not None and key not in self._core.members and not isinstance(event, c.Added):
            if any(key in server.members for server in self._servers):  # else it is gone and forgotten
                self._early.setdefault(key, []).append(event)
            return
        with self._changed:
            instructions = self._core.handle(event, time.monotonic())
            self._sync()
            self._changed.notify_all()
        for instruction in instructions:
            self._obey(instruction)

    def _sync(self) -> None:
        for key, record in self._core.members.items():
            member = self._members.get(key)
            if member is not None:
                member.phase, member.report = record.phase, record.report
                if record.state is not c.State.GONE:  # that one is told by TellGone, when all is cleaned up
                    member.state = record.state

    def _obey(self, instruction: c.Instruction) -> None:
        match instruction:
            case c.AskToStop():
                with contextlib.suppress(ChannelClosedError, TimeoutError):
                    self._members[instruction.key].conn.send(m.Stop(), timeout_s=0.0)
            case c.SendSignal():
                self._members[instruction.key].signal(instruction.signal)
            case c.Drop():
                self._drop(self._members[instruction.key])
            case c.TellPhase():
                member = self._members[instruction.key]
                self._emit(MemberEvent(kind=EventKind.PHASE, member=member, phase=instruction.phase))
            case c.TellReady():
                member = self._members[instruction.key]
                member.info = instruction.info
                self._emit(MemberEvent(kind=EventKind.READY, member=member, data=instruction.info))
            case c.TellGone():
                self._tell_gone(self._members[instruction.key], instruction)
            case c.TellFailure():
                self._tell_failure(instruction.report, instruction.keys)

    def _drop(self, member: Member) -> None:
        if member.pid:
            channel = linux.wait_channel(member.pid)
            logger.error("%s (pid %d) does not die; it waits in %s", member.role, member.pid, channel or "(unknown)")
        self._unwatch(member.conn.fd)
        member.conn.close()

    def _tell_gone(self, member: Member, instruction: c.TellGone) -> None:
        if member.conn.fd >= 0:
            self._unwatch(member.conn.fd)
            member.conn.close()
        if member.pidfd >= 0:
            self._unwatch(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = -1
        if member.server is not None:
            member.server.members.pop(member.key, None)
        with self._changed:
            member.exit = instruction.exit
            member.state = c.State.GONE
            self._changed.notify_all()
        self._emit(MemberEvent(kind=EventKind.GONE, member=member, report=instruction.report))

    def _tell_failure(self, report: FailureReport, keys: tuple[int, ...]) -> None:
        with_log_tail(report)
        members = tuple(self._members[key] for key in keys if key in self._members)
        with self._changed:
            self._failures.append((report, keys))
            self._changed.notify_all()
        first = members[0] if members else None
        self._emit(MemberEvent(kind=EventKind.FAILURE, member=first, report=report, members=members))

    def _emit(self, event: MemberEvent) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event failed for %s", event.kind)

    # ---- end ----

    def _stop_thread(self) -> None:
        self._closing = True

    def _release_all(self) -> None:
        for server in self._servers:
            self._unwatch_server(server)
            server.claim(None)
        for member in self._members.values():
            member.conn.close()
            if member.pidfd >= 0:
                os.close(member.pidfd)
                member.pidfd = -1
        self._selector.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _late(members: Sequence[Member]) -> list[Member]:
    """Those that are not ready."""
    return [member for member in members if member.state is not c.State.READY]


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _read_from(path: str, start: int) -> str:
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
