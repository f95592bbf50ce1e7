"""All exceptions of drumline, and the failure report that some of them carry.

The tree::

    DrumlineError
    +-- ConfigError (ValueError)            what was asked for cannot work
    |   +-- UnsupportedModelError           this model cannot be served or split
    +-- RequestError (ValueError)           one request is wrong; the engine is fine
    +-- UnsupportedError (NotImplementedError)  a call that drumline does not have
    +-- TransportError
    |   +-- MessageTooLargeError (ValueError)
    |   +-- ChannelClosedError              the other side is gone or the channel was shut down
    |   +-- QueueTimeoutError (TimeoutError)  a message queue had no room, or no message, until the deadline
    |   +-- CollectiveError (RuntimeError)  a rank did not take part in a collective
    +-- RPCTimeoutError (TimeoutError)      a call did not end before its deadline
    +-- RPCBacklogError                     too much is outstanding that nobody takes
    +-- RemoteCallError                     a method raised in another process, which goes on
    |   +-- WorkerCallError                 a worker method raised; the executor stays usable
    +-- FailedError                         carries a FailureReport: something broke for good
        +-- StartupError                    before it was ready
        +-- ExecutorFailedError             a worker died or hangs; the executor is broken
        +-- EngineDeadError                 the engine core is gone; every request is lost

This module imports nothing of drumline, neither torch nor transformers.
"""

from __future__ import annotations

import enum
import errno
import reprlib
import time
from typing import Any

import msgspec

MORE_FILES = "raise the limit of open files (ulimit -n, LimitNOFILE= of a unit); drumline doctor says what is needed"
"""What to do about EMFILE and ENFILE."""
MORE_PROCESSES = (
    "raise the limit of processes and threads (docker run --pids-limit, TasksMax= of a unit, ulimit -u): it takes "
    "four processes and one more for each worker, with some ten threads each"
)
"""What to do where none can be made."""
_FORKS = ("fork_child", "execute_child", "_execute_child", "_copy_self")
"""Functions of ours and of subprocess whose EAGAIN is of such a limit."""


def remedy(error: BaseException | None) -> str:
    """What to do about a limit of the system that an error comes of, also where another was raised for it.

    Of open files (EMFILE, ENFILE), processes (EAGAIN of a fork) and threads (RuntimeError). Empty: it comes of neither.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return MORE_FILES
        if isinstance(error, BlockingIOError) and _raised_in(error) in _FORKS:
            return MORE_PROCESSES
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return MORE_PROCESSES
        error = error.__cause__ or error.__context__
    return ""


def _raised_in(error: BaseException) -> str:
    """The innermost Python function of its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_name


class ExitCode(enum.IntEnum):
    """How the ``drumline`` commands end, all of them; this is the one table, and the README repeats it.

    Programs of users get exceptions; ``exit_code`` of these is what the command would have ended with.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:  # noqa: D102
        found = int.__new__(cls, code)
        found._value_ = code
        found.meaning = meaning
        return found

    OK = 0, "it did what was asked; `serve`: ended by SIGTERM, after a drain or before it was ready"
    FAILED = 1, "`chat`, `bench`: no server, or a request failed"
    USAGE = 2, "usage: a flag or the configuration cannot work; nothing was started"
    START_FAILED = 3, "the start failed"
    WORKER_DIED = 4, "a worker, the engine core or the fork server died, and was not (or not again) started again"
    STALLED = 5, "stalled: no progress for `--stall-timeout` seconds (60) while work was outstanding"
    NODE_LOST = 6, "a node was lost (several machines are not built yet)"
    INTERNAL = 7, "a fault of drumline itself"
    INTERRUPTED = 130, "ctrl-C, or a second signal while it ended"


class _Shown(reprlib.Repr):
    """Shortens while it writes: the whole text of a value that somebody sent may take seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write numbers of thousands of digits."""
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"an integer of {x.bit_length()} bits"


def shown(value: Any) -> str:
    """``value`` as error messages show it: as Python writes it, but short."""
    return _Shown().repr(value)


def is_unicode(text: str) -> bool:
    """``text`` can be encoded: it has no lone surrogates, which stand for no character and no process could send."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class FailureReport(msgspec.Struct, kw_only=True):
    """What broke, where and why: one for each failure, msgpack-encodable.

    ``time`` is ``time.time()`` of the moment the failure was noticed by the one who could see it first; the report
    with the smallest time is the root cause and the others are folded under it (``folded``).
    """

    role: str
    """Log prefix of the process, such as ``Worker_TP1``, ``EngineCore_DP0``, ``ForkServer``."""
    rank: int | None = None
    host: str = ""
    pid: int = 0
    phase: str = ""
    """Where in its life the process was: ``starting``, ``init_device``, ``load_model``, ``execute_model`` ..."""
    step: int | None = None
    what: str = "exception"
    """``exception``, ``signal``, ``exit``, ``oom``, ``hang``, ``node lost``."""
    type: str = ""
    """Class name of the exception, name of the signal (``SIGKILL``) or ``exit code 3``."""
    message: str = ""
    traceback: str = ""
    stacks: str = ""
    """Of a hang: what every process was doing, with the stacks of all threads."""
    stacks_file: str = ""
    """Where those were written to; the text of the report names it instead of repeating them."""
    log_file: str = ""
    log_tail: str = ""
    """Last lines of the process's log file, where it could not say anything itself."""
    time: float = msgspec.field(default_factory=time.time)
    folded: list[FailureReport] = msgspec.field(default_factory=list)
    """Later failures, most likely consequences of this one."""

    @property
    def exit_code(self) -> ExitCode:
        """What a command ends with whose engine broke like this after its start."""
        if self.what == "hang":
            return ExitCode.STALLED
        if self.what == "node lost":
            return ExitCode.NODE_LOST
        if self.what == "exception" and self.role.startswith("EngineCore"):
            return ExitCode.INTERNAL
        return ExitCode.WORKER_DIED

    def headline(self) -> str:
        """One line: who, where, what."""
        rank = f" rank {self.rank}" if self.rank is not None else ""
        where = " while ready" if self.phase == "ready" else f" during {self.phase}" if self.phase else ""
        step = f" (step {self.step})" if self.step is not None else ""
        what = {
            "exception": f"raised {self.type}: {self.message}" if self.message else f"raised {self.type}",
            "signal": f"was killed by {self.type}",
            "exit": f"ended with {self.type}",
            "hang": f"hangs: {self.message.partition(chr(10))[0]}",
            "oom": self._out_of_memory(),
        }.get(self.what, f"{self.what} {self.type} {self.message}".strip())
        return f"{self.role}{rank} (pid {self.pid}) {what}{where}{step}"

    def _out_of_memory(self) -> str:
        if self.type.startswith("SIG"):
            return f"was killed by the kernel for want of memory ({self.type})"
        return f"ran out of memory: {self.type}: {self.message}".removesuffix(": ")

    def text(self) -> str:
        """The whole report as printed on the console and as carried in the text of exceptions."""
        lines = [self.headline()]
        if self.what == "hang":  # the headline has the first line
            lines.extend(self.message.splitlines()[1:])
        elif self.what != "exception" and self.message and not self.traceback:  # the headline has that of an exception
            lines.append(self.message)
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.log_tail:
            lines.append("last lines of its log:")
            lines.extend(f"  {line}" for line in self.log_tail.rstrip().splitlines())
        if self.stacks_file:
            lines.append(f"stacks of all threads of all ranks: {self.stacks_file}")
        elif self.stacks:
            lines.append(self.stacks.rstrip())
        if self.log_file:
            lines.append(f"log file: {self.log_file}")
        lines.extend(f"then: {other.headline()}" for other in self.folded)
        return "\n".join(lines)


class DrumlineError(Exception):
    """Base of all exceptions of drumline. Catch it to catch them all."""


class ConfigError(DrumlineError, ValueError):
    """The configuration cannot work. The message says which option to change; nothing was started."""

    exit_code = ExitCode.USAGE


class UnsupportedModelError(ConfigError):
    """This model cannot be served or split as asked. The message names the model and the reason."""


class RequestError(DrumlineError, ValueError):
    """One request is wrong (too long, a bad parameter). Fix the request; the engine is not affected."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        """Such as ``context_length_exceeded``, for programs."""


class RequestFailedError(DrumlineError, RuntimeError):
    """One request could not be computed: engines died of it, or there was no memory for it. Others are not affected.

    Do not send it again as it is; ``reason`` is ``engine_died`` or ``out_of_memory``.
    """

    def __init__(self, message: str, *, reason: int | str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class UnsupportedError(DrumlineError, NotImplementedError):
    """A call that users of vLLM know and drumline does not have. The message says why and what to use."""


class TransportError(DrumlineError):
    """A channel between processes cannot do what was asked. See its subclasses."""


class MessageTooLargeError(TransportError, ValueError):
    """A message is larger than the channel allows. Make it smaller or the ring larger (``--mq-slots``)."""


class ChannelClosedError(TransportError):
    """The channel was shut down or its other side is gone. Whoever owns the channel knows why."""


class QueueTimeoutError(TransportError, TimeoutError):
    """No room in a message queue, or no message, until the deadline. Nothing was sent or taken: try again.

    The message names the readers that have not read, how much and since when.
    """


class CollectiveError(TransportError, RuntimeError):
    """Ranks did not take part in a collective: the message names them. The group is of no use any more."""


class RPCTimeoutError(DrumlineError, TimeoutError):
    """A call did not end before its deadline. Its late answer will be dropped; the executor stays usable.

    The text is "RPC call to {method} timed out.", then which ranks have not answered and what each of them is doing.
    """


class RPCBacklogError(DrumlineError, RuntimeError):
    """A call was refused: earlier ones hold more bytes than ``rpc_backlog_bytes``. Nothing was sent.

    Take results (or let go of their futures) before you make more calls that you do not wait for, or raise
    ``--rpc-backlog-bytes``.
    """


class _ReportedError(DrumlineError, RuntimeError):
    """Carries a failure report. Can be pickled."""

    def __init__(self, report: FailureReport, message: str = "") -> None:
        super().__init__(f"{message}\n{report.text()}" if message else report.text())
        self.report = report
        self._said = message

    def __reduce__(self) -> tuple[type, tuple[FailureReport, str]]:
        return type(self), (self.report, self._said)


class RemoteCallError(_ReportedError):
    """A method raised in another process (an engine core, a worker), which goes on.

    ``report`` has rank, type, message and traceback of the first failure.
    """


class WorkerCallError(RemoteCallError):
    """A method raised on a worker, and every rank ended the call: the executor stays usable.

    Only text has travelled, so an exception class that cannot be pickled arrives like any other.
    """

    @property
    def rank(self) -> int | None:
        """The rank that failed first."""
        return self.report.rank

    @property
    def type_name(self) -> str:
        """Class of its exception: ``ValueError``, ``package.module.OddError``."""
        return self.report.type

    @property
    def message(self) -> str:
        """Text of its exception."""
        return self.report.message

    @property
    def remote_traceback(self) -> str:
        """Traceback on the worker, as Python prints it."""
        return self.report.traceback

    @property
    def failures(self) -> list[FailureReport]:
        """Failures of all ranks, the earliest first."""
        return [self.report, *self.report.folded]


class FailedError(_ReportedError):
    """Something broke for good. ``report`` says what was first; start a new engine.

    A program that ends because of it may say ``sys.exit(error.exit_code)``, as the command does.
    """

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command in this case."""
        return self.report.exit_code


class StartupError(FailedError):
    """Processes could not be started or did not become ready. All that did start has been ended."""

    @property
    def exit_code(self) -> ExitCode:
        """The same whatever the reason."""
        return ExitCode.START_FAILED


class ExecutorFailedError(FailedError):
    """A worker died, or the ranks can no longer finish a call together. Every later call raises this too."""


class EngineDeadError(FailedError):
    """The engine core is gone and with it all its requests. Start a new engine."""
