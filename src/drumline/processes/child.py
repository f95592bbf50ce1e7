"""Life of a child process, from its first own instruction to its exit.

1. PDEATHSIG, then the parent's pid rechecked; descriptors that are not its own closed.
2. CPUs, memory policy, environment, compute threads; title; log.
3. A supervisor thread reads the control connection, the main thread runs the target.
4. The end: always ``os._exit`` after the logs are flushed. No atexit function of the fork server's, no thread of a
   library and no destructor of a device can hold it up.

::

    owner ==control connection==> supervisor thread --callbacks--> whatever the main thread waits on (a doorbell)
                                        |                                     |
                                        +--SIGTERM to itself--> main thread (before ready only: raises StopRequested)
    SIGTERM of the ladder or of anybody ======================> main thread (before ready and in a call: the same, once)

The owner's end (end of file) gives the main thread one second, then the supervisor thread ends the process. If the
main thread is stuck in C code that holds the GIL, that thread is stuck too: then the fork server kills the process
(it watches the owner as well), and if the fork server is gone, PDEATHSIG has.

Two at once. Root and fork server killed: nobody is left to report it but the engine core, so that one gets a moment
for it (:func:`drumline.processes.linux.die_with_parent`). Root gone and fork server stopped: whoever sees its own owner
gone kills the fork server at its own end, and PDEATHSIG ends all the rest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from drumline.errors import ChannelClosedError, FailureReport
from drumline.platforms import host
from drumline.processes import client, linux
from drumline.processes import messages as m
from drumline.processes.client import ForkServer
from drumline.processes.connection import Connection
from drumline.processes.logs import LogConfig, ProcessLog
from drumline.processes.reports import exit_report, fold, make_report, print_report
from drumline.processes.titles import FORK_SERVER, is_ending, set_title

logger = logging.getLogger(__name__)

_AT_ONCE_S = 0.1
"""Two deaths within this time count as one event."""
ROOT_SAYS_S = 0.3
"""How long a process that gets a SIGTERM waits for the root to say that it got one, too."""

Target = Callable[["ChildContext", bytes], Any]


class StopRequested(BaseException):
    """Raised in the main thread, once, to end what blocks there.

    Before the process is ready (a blocking load) when it is asked to stop, or by SIGTERM; in a call
    (``ChildContext.in_call``) by SIGTERM, which the ladder sends if asking did not help. Never during the clean-up.
    """


@dataclass(kw_only=True)
class ChildStart:
    """What the child was given."""

    spawn: m.Spawn
    env: dict[str, str]
    conn_fd: int
    fds: list[int]
    server_fd: int
    server_pid: int
    console_fd: int
    log_dir: str
    log_level: str
    grace_s: float
    root_role: str = ""
    root_pid: int = 0
    of_root: bool = False
    """The owner is the root."""
    own: bool = False
    """The owner itself made it: there is no fork server between them."""
    allowed: tuple[int, ...] = ()
    """CPUs that its maker might use before it was bound to some of them."""
    imported: tuple[int, ...] = ()
    """Descriptors that modules of its maker opened when they were imported; the child has these modules too."""
    told: mmap.mmap | None = None
    """One byte that the fork server shares: not zero once it has reported the root's death. None: executed fresh."""

    @property
    def last_words(self) -> bool:
        """Whether this process reports that root and fork server died at once."""
        return self.of_root and self.spawn.forkserver_access and self.told is not None


class ChildContext:
    """The child's side of its control connection. Methods may be called from any thread."""

    def __init__(self, start: ChildStart, log: ProcessLog) -> None:
        self.conn: Connection[m.ToChild] = Connection.from_fd(start.conn_fd, m.ToChild)
        self.role = start.spawn.role
        """Current name, ``Worker_TP1``."""
        self.rank = start.spawn.rank
        self.fds = tuple(start.fds)
        """Descriptors that the owner gave; the target owns them."""
        self.phase = "starting"
        self.step: int | None = None
        """Step that it works on; goes into failure reports."""
        self.owner_gone = False
        self.failed: FailureReport | None = None
        self.in_call = False
        """Set by the main thread while it runs code that SIGTERM may interrupt."""
        self.on_message: Callable[[bytes], None] | None = None
        """Called in the supervisor thread with bytes that the owner sent. Set it with :meth:`listen`."""
        self._forkserver_fd = start.server_fd
        self._forkserver: ForkServer | None = None
        self._log = log
        self._start = start
        self._muted = False
        self._server_pidfd = os.pidfd_open(start.server_pid) if start.last_words else -1
        self._grace_s = start.grace_s
        self._lock = threading.Lock()
        self._stop_event = threading.Event()
        self._finished = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._unread: list[bytes] = []
        self._asked = False
        self._terminated = False
        self._interruptible = True
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)

    # ---- what the target says ----

    @property
    def log_file(self) -> str:
        """Its log file."""
        return str(self._log.path)

    def set_name(self, name: str) -> None:
        """Title, log prefix, log file name and the name in reports, from now on."""
        self.role = name
        set_title(name)
        self._log.rename(name)
        self._tell(m.Hello(os.getpid(), name, self.log_file))

    def set_phase(self, text: str) -> None:
        """What it does now (``load_model 40%``); counts as progress."""
        self.phase = text
        self._tell(m.Phase(text))

    def ready(self, info: bytes = b"") -> None:
        """It is ready. From now on a stop only calls the callbacks, and SIGTERM interrupts only what is a call."""
        self._interruptible = False
        self.phase = "ready"
        self._tell(m.Ready(info))

    def begin_clean_up(self) -> None:
        """Nothing is interrupted any more."""
        self._interruptible = self.in_call = False

    def send(self, data: bytes, timeout_s: float = 5.0) -> None:
        """Bytes for the owner. ChannelClosedError if it is gone, TimeoutError if it does not read."""
        self.conn.send(m.Data(data), timeout_s=timeout_s)

    def note(self, text: str) -> None:
        """Write into its log file, not on the console."""
        self._log.note(text)

    def fail(self, error: BaseException, phase: str | None = None, step: int | None = None) -> FailureReport:
        """Tell the owner that this process failed; it should end then. The first failure counts."""
        report = make_report(
            error,
            role=self.role,
            rank=self.rank,
            phase=self.phase if phase is None else phase,
            step=self.step if step is None else step,
            log_file=self.log_file,
        )
        with self._lock:
            if self.failed is not None:
                return self.failed
            self.failed = report
        self._log.note(report.text())
        self._tell(m.Failed(report))
        return report

    def _tell(self, message: Any) -> None:
        if self._muted:
            return
        # An owner that is gone is the supervisor thread's business; one that does not read gets it later or never.
        with contextlib.suppress(ChannelClosedError, TimeoutError):
            self.conn.send(message, timeout_s=1.0)

    # ---- what the target hears ----

    @property
    def stopping(self) -> bool:
        """Has the owner asked to stop, is it gone, or did somebody send SIGTERM?"""
        return self._asked or self._terminated or self.owner_gone

    def wait_stop(self, timeout_s: float | None = None) -> bool:
        """Wait until it should stop; False after the timeout."""
        return self._stop_event.wait(timeout_s)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call this (in the supervisor thread) when the process should stop; at once if it should already."""
        with self._lock:
            if not self._stop_event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def listen(self, callback: Callable[[bytes], None]) -> None:
        """Call this in the supervisor thread with what the owner sends; what has come before is handed over first."""
        with self._lock:
            unread, self._unread = self._unread, []
            for data in unread:
                callback(data)
            self.on_message = callback

    @property
    def forkserver(self) -> ForkServer:
        """Own connection to the fork server. RuntimeError if the owner did not ask for one."""
        if self._forkserver is None:
            if self._forkserver_fd < 0:
                raise RuntimeError("this process has no access to the fork server (ProcessSpec.forkserver_access)")
            self._forkserver = ForkServer.attach(socket.socket(fileno=self._forkserver_fd), self._log_config())
        return self._forkserver

    def _log_config(self) -> LogConfig:
        return LogConfig(level=self._start.log_level, dir=self._start.log_dir, console_fd=self._start.console_fd)

    # ---- life ----

    def begin(self) -> None:
        """Signals, first words, supervisor thread."""
        client.inside, client.root_pid = self.role, self._start.root_pid
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the root's to handle
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._tell(m.Hello(os.getpid(), self.role, self.log_file))
        threading.Thread(target=self._supervise, name="drumline-supervisor", daemon=True).start()

    def _on_sigterm(self, number: int, frame: types.FrameType | None) -> None:
        if not self._terminated and self._root_ends():
            return
        # Only notes: an Event may not be set here, its lock may be held by the very code that was interrupted.
        self._terminated = True
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"t")
        if self._interruptible or self.in_call:
            self._interruptible = self.in_call = False
            raise StopRequested

    def _root_ends(self) -> bool:
        """Whether the root was told to end, too, and will tell this process when: a signal for all (see ``titles``)."""
        deadline = time.monotonic() + ROOT_SAYS_S
        while not (self._asked or self.owner_gone or time.monotonic() > deadline):
            if is_ending(self._start.root_pid):
                return True
            time.sleep(ROOT_SAYS_S / 30)
        return False

    def _supervise(self) -> None:
        poller = select.poll()
        poller.register(self.conn.fd, select.POLLIN)
        poller.register(self._wake_r, select.POLLIN)
        if self._server_pidfd >= 0:
            poller.register(self._server_pidfd, select.POLLIN)
        while not self.owner_gone:
            for fd, _ in poller.poll():
                if fd == self._server_pidfd:
                    self._server_ended()
                elif fd == self._wake_r:
                    os.read(self._wake_r, 64)
                    self._announce_stop()
                else:
                    self._read_owner()
        if self._server_pidfd >= 0:
            self._watch_server(self._grace_s)
        if not self._finished.wait(0.0 if self._server_pidfd >= 0 else self._grace_s):
            self._end_stopped_server()
            self._log.note(f"{self.role}: owner gone, and no end within {self._grace_s} s: exiting")
            os._exit(1)

    def _watch_server(self, timeout_s: float) -> None:
        """Watch the fork server for this time, or until the main thread ends the process."""
        poller = select.poll()
        poller.register(self._server_pidfd, select.POLLIN)
        if poller.poll(timeout_s * 1000):
            self._server_ended()

    def _server_ended(self) -> NoReturn:
        """The fork server is gone: this process ends now, as all its children do.

        The root reports that, and must hear nothing more from here. If it died at the same moment, this one reports
        both, unless the fork server still had the time to.
        """
        self._muted = True
        if not self._asked and self._start.told is not None:
            poller = select.poll()
            poller.register(self.conn.fd, select.POLLRDHUP)
            gone = self.owner_gone or bool(poller.poll(_AT_ONCE_S * 1000))
            if gone and not self._start.told[0]:
                report = self._root_report("it ended without closing, and so did the fork server")
                code, number = linux.exit_of(self._server_pidfd)
                server = exit_report(
                    role=FORK_SERVER, rank=None, pid=self._start.server_pid, phase="", code=code, signal=number
                )
                print_report(fold([report, server]), self._start.console_fd)
        os._exit(1)

    def _end_stopped_server(self) -> None:
        """Kill the fork server if it is stopped and the root is gone: its other children would stay for ever."""
        server = self._start.server_pid
        if self._start.own or linux.process_state(server) != "T":
            return
        deadline = time.monotonic() + _AT_ONCE_S
        while linux.parent_of(server) == self._start.root_pid:  # only the middle owner is gone, or not quite the root
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(server)
            if os.getppid() != server:  # looked at after the descriptor was made: it is the right one
                return
            if self._start.of_root and self._start.spawn.rank in (None, 0):
                report = self._root_report("it ended without closing, and the fork server is stopped; ending all")
                print_report(report, self._start.console_fd)
            self._muted = True
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _root_report(self, message: str) -> FailureReport:
        pid = self._start.root_pid
        code, number = linux.exit_of_zombie(pid)
        return exit_report(
            role=self._start.root_role, rank=None, pid=pid, phase="", code=code, signal=number, message=message
        )

    def _read_owner(self) -> None:
        try:
            frames = self.conn.receive()
        except Exception as error:  # noqa: BLE001 (a broken stream is as good as none)
            self._log.note(f"{self.role}: {error}")
            self.conn.eof = True
            frames = []
        for frame in frames:
            if isinstance(frame.message, m.Stop):
                self._asked = True
                self._announce_stop()
            else:
                self._hand_over(frame.message.data)
        if self.conn.eof:
            self.owner_gone = True
            self._announce_stop()

    def _hand_over(self, data: bytes) -> None:
        with self._lock:
            callback = self.on_message
            if callback is None:
                self._unread.append(data)
                return
        try:
            callback(data)
        except Exception:
            logger.exception("on_message failed")

    def _announce_stop(self) -> None:
        with self._lock:
            first = not self._stop_event.is_set()
            self._stop_event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("on_stop callback failed")
        if first and self._interruptible and not self._finished.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def run(self, target_name: str, payload: bytes) -> int:
        """Run the target; exit code."""
        try:
            try:
                target = load_target(target_name)
                target(self, payload)
                code = 0
            finally:
                self._interruptible = False
        except StopRequested:
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr, flush=True)  # as Python does: the report quotes it from the log
        except BaseException as error:  # noqa: BLE001 (whatever it is, the owner must hear of it)
            self.fail(error)
            code = 1
        if self.failed is not None:
            code = code or 1
        return code

    def finish(self, code: int) -> NoReturn:
        """Flush logs and end. After a SIGTERM that nobody of ours sent, the end is one by SIGTERM."""
        self._finished.set()
        with contextlib.suppress(Exception):
            logging.shutdown()
            self._log.finish()
            if self.owner_gone:
                self._end_stopped_server()
        if self._terminated and not self._asked and not self.owner_gone and self.failed is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(code)


def load_target(name: str) -> Target:
    """``pkg.mod:function``."""
    module, _, attribute = name.partition(":")
    target: Any = importlib.import_module(module)
    for part in attribute.split("."):
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]


def run_child(start: ChildStart) -> NoReturn:
    """Everything from the first own instruction on; never returns."""
    code = 70
    try:
        if not linux.die_with_parent(start.server_pid, last_words=start.last_words):
            os._exit(1)
        complaints = _take_place(start)
        _clear_descriptors(start)
        _settle(start)
        set_title(start.spawn.role)
        log = ProcessLog(start.log_dir, start.spawn.role, start.log_level, start.console_fd)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        context = ChildContext(start, log)
        context.begin()
        for complaint in complaints:
            logger.warning("%s", complaint)
        code = context.run(start.spawn.target, start.spawn.payload)
        context.finish(code)
    except BaseException:  # noqa: BLE001 (nothing may run on into the fork server's code)
        with contextlib.suppress(BaseException):
            import traceback

            os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def _take_place(start: ChildStart) -> list[str]:
    """CPUs and memory, before anything is allocated or any thread made. Refusals are returned, not raised."""
    complaints = []
    spawn = start.spawn
    cpus = spawn.cpus or (start.allowed if set(start.allowed) != os.sched_getaffinity(0) else ())
    if cpus:
        try:
            host.bind(cpus, start.allowed)
        except OSError as error:
            complaints.append(f"cannot bind to CPUs {list(cpus)}: {error}")
    if spawn.numa_node is not None:
        try:
            linux.prefer_numa_node(spawn.numa_node)
        except OSError as error:
            complaints.append(
                f"cannot prefer memory of NUMA node {spawn.numa_node}: {error} (a container needs the right to: "
                "--cap-add SYS_NICE)"
            )
    return complaints


def _clear_descriptors(start: ChildStart) -> None:
    """None is left that this process was not given."""
    keep = [fd for fd in (0, 1, 2, start.conn_fd, *start.fds, start.server_fd, start.console_fd) if fd >= 0]
    if start.own:  # objects of the owner's program may still close their numbers, which must not be ours then
        linux.blank_all_but(keep[1:])
    else:
        linux.keep_descriptors(keep, start.imported)


def _settle(start: ChildStart) -> None:
    """Environment, working folder, threads."""
    os.environ.clear()
    os.environ.update(start.env)
    if not linux.has_working_folder():
        os.chdir("/")
    threads = start.env.get("OMP_NUM_THREADS", "").split(",")[0]
    torch = sys.modules.get("torch")
    if torch is not None:
        cores = min(len(os.sched_getaffinity(0)), host.cores())
        count = int(threads) if threads.strip().isdecimal() and int(threads) > 0 else cores
        torch.set_num_threads(min(count, max(cores, start.spawn.threads)))
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # else all children would draw the same numbers
    gc.freeze()
    gc.enable()
