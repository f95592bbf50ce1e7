"""Logs: a file for each process and one merged console without mixed lines.

::

    C code, fd 1 and 2 ------------------------------> <dir>/<name>-<pid>.log
    print, logging --> LineTee --(whole lines)-------> the same file
                             \\--(prefix + line)-----> console (stderr of the process that the user started)

Each console line is one ``write`` of at most PIPE_BUF bytes, which the kernel never mixes with those of others; longer
lines are cut into several. Rejected: a collecting process or thread (it would have to live longest, and the last words
of a dying process are the ones that matter).

Nobody may ever wait for the console: a pipe that nobody reads, a terminal stopped with ctrl-S or a pager would hold up
event loops, signals and the fork server. So everything goes through :class:`ConsoleWriter`, which loses lines (and
says how many) instead. Rejected: O_NONBLOCK on the descriptor itself (the flag belongs to the open file, which is the
user's shell's too), a writing thread (the fork server may have none, and the last words would be lost with it).

Folders are ``$XDG_STATE_HOME/drumline/logs/<time>-<pid>``; the newest 20 are kept.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import select
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from drumline.errors import ConfigError

KEEP_RUNS = 20
FULL_WAIT_S = 0.2
"""How long the writer of a line waits for room on a full console, once."""
CALM_S = 5.0
"""A console that was full is waited for again only after it has taken everything for so long."""
LAST_WORD_WAIT_S = 1.0
"""The same for a report at the end."""
_PIECE = 4096 - 256
"""A pipe takes PIPE_BUF (4096) bytes whole; the notice about lost lines goes with the piece after them."""
_TTY_PIECE = 256
"""A terminal that says it has room has about that much."""
_RUN_NAME = re.compile(r"\d{8}-\d{6}-(\d+)(-\d+)?")
LOG_FORMAT = "%(levelname)s %(asctime)s %(name)s] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where the processes of one run write."""

    dir: str
    level: str = "info"
    console_fd: int = 2
    """Descriptor, in the process that starts the fork server, of the merged console; -1: no console."""

    @classmethod
    def create(cls, level: str = "info", dir: str = "", console_fd: int = 2) -> LogConfig:
        """Make the folder of a new run (a given ``dir`` is used as it is) and prune old runs.

        ConfigError if a given one cannot be made or written to.
        """
        folder = Path(dir) if dir else _new_run_folder()
        if dir:
            check_log_dir(dir)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--log-dir {folder}: {error.strerror}: name a folder that can be written to") from None
        if console_fd == 2 and sys.__stderr__ is None:
            console_fd = -1  # closed when Python started: whatever has the number now is no console
        return cls(dir=str(folder.absolute()), level=level, console_fd=console_fd)


def check_log_dir(dir: str) -> None:
    """ConfigError if it is no folder for log files, nor can become one. Makes nothing."""
    folder = Path(dir).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"--log-dir {dir}: {folder} is no folder: name one that can be written to")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {dir}: {folder} cannot be written to: name a folder that can")


def state_folder() -> Path:
    """``$XDG_STATE_HOME/drumline``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "drumline"


def _new_run_folder() -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        base = state_folder() / "logs"
        base.mkdir(parents=True, exist_ok=True)
        if not os.access(base, os.W_OK):
            raise PermissionError(base)
    except (OSError, RuntimeError):  # no home folder, or one that cannot be written to
        base = _private_folder(Path(tempfile.gettempdir()) / f"drumline-{os.getuid()}-logs")
    prune(base, KEEP_RUNS - 1)
    for suffix in ("", *(f"-{n}" for n in range(1, 1000))):
        with contextlib.suppress(FileExistsError):
            folder = base / (name + suffix)
            folder.mkdir(mode=0o700)
            return folder
    return base / name


def _private_folder(path: Path) -> Path:
    """``path`` if it is ours alone, else a new folder: in a shared /tmp others can have made it, or a link."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return Path(tempfile.mkdtemp(prefix=path.name + "-"))
    return path


def prune(base: Path, keep: int) -> None:
    """Remove the oldest run folders until ``keep`` are left. Folders of living processes and foreign ones stay."""
    runs = sorted(path for path in base.iterdir() if _RUN_NAME.fullmatch(path.name) and path.is_dir())
    for path in runs[: max(0, len(runs) - keep)]:
        match = _RUN_NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


class LineTee(io.TextIOBase):
    """A text stream that writes whole lines to a log file and, with a prefix, to the console. Thread-safe."""

    def __init__(self, file_fd: int) -> None:
        self._file_fd = file_fd
        self._console: Console | None = None
        self._part = ""
        self._lost = 0
        self._lock = threading.RLock()

    def attach(self, console: Console) -> None:
        """Begin anew: what a process that this one is a copy of had begun is forgotten, and who held the lock there."""
        self._lock = threading.RLock()
        self._console, self._part, self._lost = console, "", 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Always UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """Yes."""
        return True

    def isatty(self) -> bool:
        """Never: progress bars and colours have no place in a log."""
        return False

    def fileno(self) -> int:
        """Descriptor of the log file."""
        return self._file_fd

    def write(self, text: str) -> int:
        """Take text; complete lines go out at once."""
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
            if lines:
                self._emit(lines)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        """As write, for each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Nothing to do: an unfinished line waits for its end (see :meth:`finish`)."""

    def finish(self) -> None:
        """Write an unfinished line too, at the end of the process."""
        with self._lock:
            if self._part:
                self._emit([self._part])
                self._part = ""

    def _emit(self, lines: list[str]) -> None:
        # Only what follows the last carriage return of a line is what a terminal would show in the end.
        shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        text = "\n".join(shown) + "\n"
        if self._lost:
            text = f"\n({self._lost} lines could not be written here: no space)\n{text}"
        self._lost = 0 if write_all(self._file_fd, text.encode(errors="replace")) else self._lost + len(shown)
        if self._console is not None:
            for line in shown:
                self._console.line(line)


class ConsoleWriter:
    """Writes to a console and never blocks, whatever the console is. Thread-safe; needs no threads.

    Pipes and terminals are opened once more through /proc, without blocking: the new open file has flags of its own.
    Sockets cannot be, but can be asked for each ``send``. A regular file is written to as it is: it never blocks, and
    only so the offset is shared with whoever else writes there. What can neither be opened nor sent to (a terminal of
    another user) is polled first.

    When the console is full, the writer waits a moment, once; then lines are lost at once and counted until there is
    room again. After any other error (no reader, full disk, closed descriptor) the console is given up for good.
    """

    def __init__(self, fd: int, *, prefix: bytes = b"", where: str = "; they are in the log files") -> None:
        """``prefix``: of the notice about lost lines, which ends with ``where`` to find them."""
        self.prefix = prefix
        self._where = where
        self._fd = fd
        self._opened: int | None = None
        self._is_socket = False
        self._poll = False
        self._torn = False
        self._lost = 0
        self._busy_until = 0.0
        self._lock = threading.RLock()
        self._pid = os.getpid()
        with self._giving_up():
            if fd >= 0:
                self._open()

    def _open(self) -> None:
        mode = os.fstat(self._fd).st_mode
        if stat.S_ISREG(mode):
            return
        if stat.S_ISSOCK(mode):
            self._is_socket = True
            return
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
        try:
            self._opened = self._fd = os.open(f"/proc/self/fd/{self._fd}", flags)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a pipe without a reader
                raise
            self._poll = True

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._lost = 0
            self.close()

    def write(self, data: bytes, wait_s: float | None = None) -> None:
        """Write lines; those that find no room are lost. ``wait_s``: wait so long in any case."""
        with self._lock, self._giving_up():
            if self._fd < 0:
                return
            now = time.monotonic()
            if wait_s is None:
                wait_s = FULL_WAIT_S if now >= self._busy_until else 0.0
            deadline = now + wait_s
            pieces = _pieces(data)
            while pieces and self._put((self._notice() if self._lost else b"") + pieces[0], deadline):
                self._lost = 0
                del pieces[0]
            if pieces:
                self._lost += sum(piece.count(b"\n") for piece in pieces)
                self._busy_until = time.monotonic() + CALM_S

    def _notice(self) -> bytes:
        lines = "1 line was" if self._lost == 1 else f"{self._lost} lines were"
        return self.prefix + f"({lines} not shown: the console was not read{self._where})\n".encode()

    def _put(self, data: bytes, deadline: float) -> bool:
        """Write one piece; False if there is no room until the deadline."""
        if self._torn:
            data = b"\n" + data
        size = len(data)
        while data:
            taken = self._take(data)
            data = data[taken:]
            if data and not taken and not self._room(deadline - time.monotonic()):
                self._torn = self._torn if len(data) == size else True
                return False
        self._torn = False
        return True

    def _take(self, data: bytes) -> int:
        try:
            if self._is_socket:
                return _send(self._fd, data)
            if self._poll and not self._room(0.0):
                return 0
            return os.write(self._fd, data[:_TTY_PIECE] if self._poll else data)
        except BlockingIOError:
            return 0

    def _room(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        """Nothing is written any more; the descriptor that was given stays open."""
        with self._lock:
            lost, self._fd = self._fd >= 0 and self._lost > 0, -1
            opened, self._opened = self._opened, None
            # The parent's: our descriptor of this number is something else.
            if opened is None or self._pid != os.getpid():
                return
            if lost:
                with contextlib.suppress(OSError):
                    os.write(opened, self._notice())
            os.close(opened)


def _send(fd: int, data: bytes) -> int:
    sock = socket.socket(fileno=fd)  # for this call only: objects that own descriptors do not go well with fork
    try:
        return sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        sock.detach()


def _pieces(data: bytes) -> list[bytes]:
    """Cut into pieces that a pipe takes whole, between lines where that is possible."""
    found = []
    while data:
        cut = len(data) if len(data) <= _PIECE else data.rfind(b"\n", 0, _PIECE) + 1 or _PIECE
        found.append(data[:cut])
        data = data[cut:]
    return found


class ConsoleStream(io.TextIOBase):
    """A text stream on a console that never blocks and never fails. What is no whole line goes out when flushed."""

    def __init__(self, fd: int) -> None:
        self._console_fd = fd
        self._writer = ConsoleWriter(fd, where="")
        self._encoding = getattr(sys.__stderr__, "encoding", None) or "utf-8"
        self._part = ""
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of stderr."""
        return self._encoding

    def writable(self) -> bool:
        """Yes."""
        return True

    def isatty(self) -> bool:
        """Is the console a terminal?"""
        return self._console_fd >= 0 and os.isatty(self._console_fd)

    def fileno(self) -> int:
        """Descriptor of the console."""
        if self._console_fd < 0:
            raise OSError("there is no console")
        return self._console_fd

    def write(self, text: str) -> int:
        """Take text."""
        with self._lock:
            lines, end, rest = (self._part + text).rpartition("\n")
            self._part = rest
            if end:
                self._emit(lines + end)
        return len(text)

    def flush(self) -> None:
        """Write an unfinished line (a bar, a prompt) too."""
        with self._lock:
            text, self._part = self._part, ""
            if text:
                self._emit(text)

    def last_word(self, text: str) -> None:
        """Write what matters most: room is waited for a little longer."""
        with self._lock:
            self.flush()
            self._emit(text, LAST_WORD_WAIT_S)

    def close(self) -> None:
        """End of the stream, not of the console."""
        if not self.closed:
            self.flush()
            self._writer.close()
            super().close()

    def _emit(self, text: str, wait_s: float | None = None) -> None:
        self._writer.write(text.encode(self._encoding, errors="replace"), wait_s)


def console_stream() -> TextIO:
    """Where a library call shows its progress: stderr, if it is the console then without blocking, or nothing."""
    if sys.stderr is not None and sys.stderr is not sys.__stderr__:
        return sys.stderr
    return cast(TextIO, ConsoleStream(_stderr_fd()))


def _stderr_fd() -> int:
    try:
        return sys.__stderr__.fileno() if sys.__stderr__ is not None else -1
    except (OSError, ValueError):
        return -1


@contextlib.contextmanager
def console_shown() -> Iterator[TextIO]:
    """:func:`console_stream`, whose descriptor is closed at the end."""
    stream = console_stream()
    try:
        yield stream
    finally:
        if stream is not sys.stderr and isinstance(stream, ConsoleStream):
            stream.close()


@contextlib.contextmanager
def console_as_stderr() -> Iterator[None]:
    """``sys.stderr`` never blocks and never fails in this context. One that somebody has put there stays."""
    before: Any = sys.stderr
    stream = console_stream()
    sys.stderr = stream
    try:
        yield
    finally:
        sys.stderr = before
        if stream is not before:
            stream.close()


class Console:
    """The merged console: one write for each line, with the prefix of this process."""

    def __init__(self, fd: int, name: str) -> None:
        self._writer = ConsoleWriter(fd)
        self.rename(name)

    def rename(self, name: str) -> None:
        """Lines carry ``(name pid=...)`` from now on."""
        self._writer.prefix = f"({name} pid={os.getpid()}) ".encode()

    def line(self, text: str) -> None:
        """Write one line; a very long one becomes several."""
        data = text.encode(errors="replace")
        prefix = self._writer.prefix
        room = _PIECE - len(prefix) - 1
        while True:
            cut = min(room, len(data))
            while cut < len(data) and data[cut] & 0xC0 == 0x80:  # in the middle of a character
                cut -= 1
            self._writer.write(prefix + data[:cut] + b"\n")
            data = data[cut:]
            if not data:
                return

    def close(self) -> None:
        """Nothing is shown any more."""
        self._writer.close()


def write_all(fd: int, data: bytes) -> bool:
    """Write everything to a file; what it does not take (full disk) is dropped: logging never fails a process."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError:
            return False
    return True


def _open_log(path: Path) -> tuple[int, Path]:
    """Descriptor and path of a log file. A given folder may hold an older one of the same name: it goes on there."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    for suffix in ("", *(f"-{n}" for n in range(1, 100))):
        path = path.with_name(f"{path.stem}{suffix}{path.suffix}") if suffix else path
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), path
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                break
            raise
        with contextlib.suppress(OSError):
            fd = os.open(path, flags | os.O_NONBLOCK)  # without waiting for the reader of a pipe
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                return fd, path
            os.close(fd)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), path


def log_path(folder: str, name: str, pid: int) -> Path:
    """Log file of a process."""
    return Path(folder) / f"{name}-{pid}.log"


_TEES = (LineTee(1), LineTee(2))
"""The same objects in a process and in its copies: libraries keep the ``sys.stderr`` of the time of their import
(transformers' own logging does), which was the fork server's. In a child it must lead to the child's console: the
descriptor that the fork server had opened for its own is something else there, a socket to the engine maybe."""


class ProcessLog:
    """The log of one child process: redirects descriptors 1 and 2, ``sys.stdout`` and ``sys.stderr``, and logging."""

    def __init__(self, folder: str, name: str, level: str, console_fd: int) -> None:
        self._folder = Path(folder)
        self._console = Console(console_fd, name)
        fd, self.path = _open_log(self._path(name))
        os.dup2(fd, 1, inheritable=True)
        os.dup2(fd, 2, inheritable=True)
        os.close(fd)
        for tee in _TEES:
            tee.attach(self._console)
        sys.stdout, sys.stderr = _TEES
        _configure_logging(level)

    def _path(self, name: str) -> Path:
        return log_path(str(self._folder), name, os.getpid())

    def rename(self, name: str) -> None:
        """Prefix and file name change with the name of the process."""
        self._console.rename(name)
        path = self._path(name)
        try:
            self.path.rename(path)
        except OSError:
            return
        self.path = path

    def note(self, text: str) -> None:
        """Write to the log file only."""
        write_all(2, (text.rstrip("\n") + "\n").encode(errors="replace"))

    def finish(self) -> None:
        """Write unfinished lines."""
        for tee in _TEES:
            tee.finish()


def _configure_logging(level: str) -> None:
    """Warnings of everybody, ``level`` of drumline, all to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, DATE_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("drumline").setLevel(level.upper())
