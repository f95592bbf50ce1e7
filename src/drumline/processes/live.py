"""What the processes of an engine are doing at one moment: stacks, states, collectives. Made of a hang before anything
is killed, and of a healthy server when an operator asks (``drumline doctor --live``, SIGUSR1).

Nobody is disturbed by it: stacks are written by a signal handler of C (faulthandler), also where C code holds the
interpreter's lock; a stopped process cannot write any, and is not sent a signal that it would find later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import time
from pathlib import Path

import msgspec

from drumline.processes import linux
from drumline.processes.reports import span
from drumline.transport.memory import memfd

STACK_CHARS = 100_000
"""Most characters of one process's stacks."""
MOST_THREADS = 64


class ProcessReport(msgspec.Struct, kw_only=True):
    """One process."""

    name: str
    pid: int
    rank: int | None = None
    state: str = ""
    """State letter; empty: there is no such process."""
    wait_channel: str = ""
    """Kernel function in which its main thread waits; empty: it runs, or the kernel does not tell."""
    doing: str = ""
    """``running execute_model (call 12) for 3.2 s``, ``waiting for a call``, a phase."""
    heartbeat_s: float | None = None
    """Seconds since its last sign of progress."""
    collectives: list[str] = []
    """Where it stands in them."""
    threads: list[str] = []
    """Threads as the kernel knows them: name, state, where they wait."""
    stacks: str = ""
    """Python stacks of all threads, or why there are none."""
    log_file: str = ""

    def line(self) -> str:
        """All but stacks and threads, in one line."""
        rank = "" if self.rank is None else f"rank {self.rank}, "
        channel = f" in {self.wait_channel}" if self.wait_channel else ""
        said = [self.doing, *self.collectives]
        if self.heartbeat_s is not None:
            said.append(f"last heartbeat {span(self.heartbeat_s)} ago")
        state = linux.STATES.get(self.state, self.state)
        return f"{self.name} ({rank}pid {self.pid}, {state}{channel}): {'; '.join(part for part in said if part)}"


class LiveReport(msgspec.Struct, kw_only=True):
    """All processes."""

    cause: str
    """Why it was made."""
    processes: list[ProcessReport]
    odd: list[int] = []
    """Ranks that keep the others waiting."""
    remarks: list[str] = []
    """Who is odd and why, and whatever could not be found out."""
    host: str = msgspec.field(default_factory=socket.gethostname)
    time: float = msgspec.field(default_factory=time.time)
    file: str = ""
    """Where it was written to."""

    def summary(self) -> str:
        """Remarks, and a line for each process."""
        return "\n".join([*self.remarks, *(process.line() for process in self.processes)])

    def text(self) -> str:
        """Everything."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        parts = [f"{self.cause}\n{self.host}, {when}\n", self.summary(), ""]
        for process in self.processes:
            parts += ["", f"==== {process.line()}"]
            parts += [f"thread {thread}" for thread in process.threads]
            parts += [process.stacks.rstrip() or "(no stacks)"]
        return "\n".join(parts) + "\n"

    def write(self, folder: Path, kind: str) -> str:
        """Write it into a folder; the file's path, which is kept in ``file``. Empty if that cannot be."""
        name = f"{kind}-{time.strftime('%H%M%S', time.localtime(self.time))}"
        for suffix in ("", *(f"-{n}" for n in range(1, 100))):
            path = folder / f"{name}{suffix}.txt"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            except OSError:
                return ""
            with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(self.text())
            self.file = str(path)
            return self.file
        return ""


def look_at(name: str, pid: int, *, rank: int | None = None, doing: str = "", log_file: str = "") -> ProcessReport:
    """What /proc tells of a process."""
    return ProcessReport(
        name=name,
        pid=pid,
        rank=rank,
        state=linux.process_state(pid),
        wait_channel=linux.wait_channel(pid),
        doing=doing,
        threads=linux.threads_of(pid)[:MOST_THREADS],
        log_file=log_file,
    )


def own_stacks() -> str:
    """Python stacks of all threads of this process."""
    fd = memfd("drumline-stacks")
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        return os.pread(fd, STACK_CHARS, 0).decode(errors="replace")
    except (OSError, ValueError) as error:
        return f"no stack: {error}"
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def only_stacks(text: str) -> str:
    """What faulthandler wrote, without log lines that came before it."""
    starts = [at for at in (text.find("Thread 0x"), text.find("Current thread 0x")) if at >= 0]
    return text[min(starts) :][:STACK_CHARS] if starts else text[:STACK_CHARS]


def innermost(stacks: str, frames: int = 6) -> str:
    """The innermost frames of the main thread, which faulthandler writes last; empty if there are none."""
    _, found, last = stacks.rpartition("(most recent call first):")
    lines = [line.strip() for line in last.splitlines() if line.strip().startswith("File ")] if found else []
    return "\n".join(f"  {line}" for line in lines[:frames])
