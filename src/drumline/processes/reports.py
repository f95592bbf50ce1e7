"""Failure reports: made from exceptions and from deaths, ordered, folded, printed.

Only text travels, so an exception class that cannot be pickled or has an odd constructor is no problem. The rule that
finds the root cause is :func:`fold`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from drumline.errors import CollectiveError, FailedError, FailureReport, RemoteCallError, remedy
from drumline.processes.logs import LAST_WORD_WAIT_S, ConsoleWriter

NOTICE_SLACK_S = 0.1
"""A death is noticed from outside, so possibly a little after peers of the dead one raised because of it."""

CONSEQUENCE_SLACK_S = 1.0
"""A rank that misses another in a collective tells of it at once, the other one only when its traceback is made."""

_TAIL_BYTES = 8192
_TAIL_LINES = 50
_TRACEBACK_CHARS = 20_000
_MESSAGE_CHARS = 65_536


def signal_name(number: int) -> str:
    """``SIGKILL``; ``signal 77`` if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def span(seconds: float) -> str:
    """A length of time as texts have it: ``3.2 s``, ``125 s``."""
    return f"{max(seconds, 0.0):.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def make_report(
    error: BaseException,
    *,
    role: str,
    rank: int | None = None,
    phase: str = "",
    step: int | None = None,
    log_file: str = "",
) -> FailureReport:
    """Report of an exception raised in this process.

    An exception that already carries a report (of a worker, say) keeps it: its root cause is the root cause.
    """
    if isinstance(error, FailedError | RemoteCallError):
        return error.report
    return FailureReport(
        role=role,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=phase,
        step=step,
        what="oom" if isinstance(error, MemoryError) else "exception",
        type=_type_name(error),
        message="; ".join(filter(None, [_message(error), remedy(error)])),
        traceback=_traceback(error),
        log_file=log_file,
    )


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _message(error: BaseException) -> str:
    try:
        return _cut(str.__str__(str(error)), _MESSAGE_CHARS)  # a str itself: __str__ may give a subclass
    except Exception as broken:  # noqa: BLE001 (any class may have a broken __str__)
        return f"(its text cannot be made: {type(broken).__name__})"


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001
        return f"(its traceback cannot be made: {type(broken).__name__})"
    return _cut(text, _TRACEBACK_CHARS)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def exit_report(
    *,
    role: str,
    rank: int | None,
    pid: int,
    phase: str,
    code: int | None,
    signal: int | None,
    oom: bool = False,
    log_file: str = "",
    when: float | None = None,
    message: str = "",
) -> FailureReport:
    """Report of a process that died without saying why. Neither code nor signal: how it ended is unknown."""
    if signal is not None:
        what, kind = ("oom" if oom else "signal"), signal_name(signal)
    else:
        what, kind = "exit", f"exit code {code}" if code is not None else "unknown exit code"
    if oom:
        why = "the kernel's out-of-memory killer ended it (oom_kill of the cgroup rose)"
        message = f"{why}; {message}" if message else why
    return FailureReport(
        role=role,
        rank=rank,
        host=socket.gethostname(),
        pid=pid,
        phase=phase,
        what=what,
        type=kind,
        message=message,
        log_file=log_file,
        time=time.time() if when is None else when,
    )


def with_log_tail(report: FailureReport) -> FailureReport:
    """Add the last lines of the log file, for a process that could not say anything itself."""
    if not report.log_tail and not report.traceback and report.log_file:
        lines = log_tail(report.log_file).splitlines()
        own = next((place for place, line in enumerate(lines) if report.headline() in line), len(lines))
        report.log_tail = "\n".join(lines[:own])  # what it wrote of this very failure is no news
    return report


def log_tail(path: str) -> str:
    """Last lines of a log file; empty if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return ""
    return "\n".join(data.decode(errors="replace").splitlines()[-_TAIL_LINES:])


def fold(reports: Sequence[FailureReport], server: FailureReport | None = None) -> FailureReport:
    """The root cause, with the others folded under it.

    A dead fork server explains the deaths of its children. Otherwise the earliest counts, where deaths seen from
    outside are taken as :data:`NOTICE_SLACK_S` earlier than they were noticed, and what a rank says that misses
    another one as :data:`CONSEQUENCE_SLACK_S` later. What a process says after its first word follows from that.
    """
    first: dict[tuple[str, int], float] = {}
    for report in sorted(reports, key=lambda report: report.time):
        if report.pid:
            first.setdefault((report.host, report.pid), _moment(report))
    ordered = sorted(reports, key=lambda report: max(_moment(report), first.get((report.host, report.pid), 0.0)))
    if server is not None:
        ordered = [server, *ordered]
    root, rest = ordered[0], ordered[1:]
    known = [root, *root.folded]
    for report in rest:
        for one in (report, *report.folded):
            if not any(one is other or _same(one, other) for other in known):
                known.append(one)
    root.folded = [msg for msg in known if msg is not root]
    return root


def _moment(report: FailureReport) -> float:
    """When it happened, probably."""
    if report.type == _type_name(CollectiveError()):
        return report.time + CONSEQUENCE_SLACK_S
    return report.time - (NOTICE_SLACK_S if report.what in ("signal", "oom", "exit") else 0.0)


def _same(one: FailureReport, other: FailureReport) -> bool:
    """The same failure told twice (a worker's report that came by two roads)."""
    return (one.host, one.pid, one.what, one.type, one.message, one.time) == (
        other.host,
        other.pid,
        other.what,
        other.type,
        other.message,
        other.time,
    )


def print_report(report: FailureReport, fd: int = 2) -> None:
    """Write the report on the console; a console that nobody reads is waited for a second at most."""
    text = "\n".join(["", "drumline failed:", *(f"  {line}" for line in report.text().splitlines()), ""])
    console = ConsoleWriter(fd)
    console.write(text.encode(errors="replace"), LAST_WORD_WAIT_S)
    console.close()
