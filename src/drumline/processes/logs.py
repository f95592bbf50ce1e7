"""Logs: a file for each process and one merged console without mixed lines.

::

    C code, fd 1 and 2 ------------------------------> <dir>/<name>-<pid>.log
    print, logging --> LineTee --(whole lines)-------> the same file
                             \\--(prefix + line)-----> console (stderr of the process that the user started)

Each console line is one ``write`` of at most PIPE_BUF bytes, which the kernel never mixes with those of others; longer
lines are cut into several. Rejected: a collecting process or thread (it would have to live longest, and the last words
of a dying process are the ones that matter).

Folders are ``$XDG_STATE_HOME/drumline/logs/<time>-<pid>``; the newest 20 are kept.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

KEEP_RUNS = 20
_PIPE_BUF = 4096
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
        """Make the folder of a new run (a given ``dir`` is used as it is) and prune old runs."""
        folder = Path(dir) if dir else _new_run_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(dir=str(folder.absolute()), level=level, console_fd=console_fd)


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
        base = Path(tempfile.gettempdir()) / f"drumline-{os.getuid()}-logs"
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
    prune(base, KEEP_RUNS - 1)
    for suffix in ("", *(f"-{n}" for n in range(1, 1000))):
        with contextlib.suppress(FileExistsError):
            folder = base / (name + suffix)
            folder.mkdir(mode=0o700)
            return folder
    return base / name


def prune(base: Path, keep: int) -> None:
    """Remove the oldest run folders until ``keep`` are left. Folders of living processes and foreign ones stay."""
    runs = sorted(path for path in base.iterdir() if _RUN_NAME.fullmatch(path.name) and path.is_dir())
    for path in runs[: max(0, len(runs) - keep)]:
        match = _RUN_NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


class LineTee(io.TextIOBase):
    """A text stream that writes whole lines to a log file and, with a prefix, to the console. Thread-safe."""

    def __init__(self, file_fd: int, console: Console) -> None:
        self._file_fd = file_fd
        self._console = console
        self._part = ""
        self._lock = threading.RLock()

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
        write_all(self._file_fd, ("\n".join(shown) + "\n").encode(errors="replace"))
        for line in shown:
            self._console.line(line)


class Console:
    """The merged console: one write for each line, with the prefix of this process."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._prefix = b""
        self.rename(name)

    def rename(self, name: str) -> None:
        """Lines carry ``(name pid=...)`` from now on."""
        self._prefix = f"({name} pid={os.getpid()}) ".encode()

    def line(self, text: str) -> None:
        """Write one line; a very long one becomes several."""
        if self._fd < 0:
            return
        data = text.encode(errors="replace")
        room = _PIPE_BUF - len(self._prefix) - 1
        while True:
            cut = min(room, len(data))
            while cut < len(data) and data[cut] & 0xC0 == 0x80:  # in the middle of a character
                cut -= 1
            write_all(self._fd, self._prefix + data[:cut] + b"\n")
            data = data[cut:]
            if not data:
                return


def write_all(fd: int, data: bytes) -> None:
    """Write everything; what cannot be written (no reader, full disk) is dropped: logging never fails a process."""
    while data:
        try:
            written = os.write(fd, data)
        except BlockingIOError:
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            if not poller.poll(1000):
                return
            continue
        except OSError:
            return
        data = data[written:]


class ProcessLog:
    """The log of one child process: redirects descriptors 1 and 2, ``sys.stdout`` and ``sys.stderr``, and logging."""

    def __init__(self, folder: str, name: str, level: str, console_fd: int) -> None:
        self._folder = Path(folder)
        self.path = self._path(name)
        self._console = Console(console_fd, name)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, 1, inheritable=True)
        os.dup2(fd, 2, inheritable=True)
        os.close(fd)
        self._tees = (LineTee(1, self._console), LineTee(2, self._console))
        sys.stdout, sys.stderr = self._tees
        _configure_logging(level)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}-{os.getpid()}.log"

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
        for tee in self._tees:
            tee.finish()


def _configure_logging(level: str) -> None:
    """Warnings of everybody, ``level`` of drumline, all to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, DATE_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("drumline").setLevel(level.upper())
