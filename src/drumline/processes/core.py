"""What a supervisor knows and decides: events in, instructions out. Pure: no clock, no descriptor, no process.

States of a member only go up: STARTING, READY, STOPPING, GONE. A death has up to three signs (end of the control
connection, pidfd, exit told by the real parent) which come in any order; the member is gone when the parent has told
how it ended, or when the window after the first sign is over. Failures are collected for one window and then told as
one report (:func:`drumline.processes.reports.fold`); at once, if every member has said itself why it failed (an engine
core has collected for its workers) or its parent has told how it ended, since then there is nothing left to hear: had
the fork server died before, it could not have told.

The ladder of a stop: ask, wait, SIGTERM, wait, SIGKILL, wait, give up. A process in state T gets SIGKILL at once. A
member that has no process yet is dropped at once: closing its connection keeps it from being made.

``now`` is a monotonic clock; ``wall`` in events is ``time.time()``, which reports are ordered by.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from drumline.errors import FailureReport
from drumline.processes.reports import exit_report, fold


class State(enum.IntEnum):
    """Life of a member; only goes up."""

    STARTING = 0
    READY = 1
    STOPPING = 2
    GONE = 3


@dataclass(frozen=True)
class Exit:
    """How a process ended. Neither code nor signal: unknown."""

    code: int | None = None
    signal: int | None = None
    oom: bool = False

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal}"
        return f"exit code {self.code}" if self.code is not None else "unknown"


# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Added:
    """Watch this member. ``told``: a real parent will tell how it ends."""

    key: int
    role: str
    rank: int | None
    told: bool = True


@dataclass(frozen=True)
class Born:
    """The process exists."""

    key: int
    pid: int


@dataclass(frozen=True)
class Named:
    """It said who it is."""

    key: int
    name: str
    pid: int
    log_file: str


@dataclass(frozen=True)
class Progressed:
    """It is in this phase."""

    key: int
    phase: str


@dataclass(frozen=True)
class Spoke:
    """It sent its owner something, such as the phase of a process that it watches."""

    key: int


@dataclass(frozen=True)
class BecameReady:
    """It is ready."""

    key: int
    info: bytes


@dataclass(frozen=True)
class ToldFailure:
    """It (or who was to make it) said that it failed."""

    key: int
    report: FailureReport


@dataclass(frozen=True)
class ConnectionEnded:
    """End of file on its control connection."""

    key: int
    wall: float


@dataclass(frozen=True)
class ProcessEnded:
    """Its pidfd says that it ended."""

    key: int
    wall: float


@dataclass(frozen=True)
class ExitTold:
    """Its real parent says how it ended."""

    key: int
    exit: Exit
    wall: float


@dataclass(frozen=True)
class StopRequested:
    """End these members. ``ask`` False: no politeness, SIGKILL."""

    keys: tuple[int, ...]
    ask: bool = True


@dataclass(frozen=True)
class FoundStopped:
    """It is in state T."""

    key: int


@dataclass(frozen=True)
class ServerProgressed:
    """The fork server is doing this."""

    phase: str


@dataclass(frozen=True)
class ServerGone:
    """The fork server died or said that it cannot go on."""

    report: FailureReport


@dataclass(frozen=True)
class Tick:
    """Time went by."""


Event = (
    Added
    | Born
    | Named
    | Progressed
    | Spoke
    | BecameReady
    | ToldFailure
    | ConnectionEnded
    | ProcessEnded
    | ExitTold
    | StopRequested
    | FoundStopped
    | ServerProgressed
    | ServerGone
    | Tick
)

# ---- instructions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AskToStop:
    """Send Stop on its control connection."""

    key: int


@dataclass(frozen=True)
class SendSignal:
    """Send a signal."""

    key: int
    signal: int


@dataclass(frozen=True)
class Drop:
    """Close its connection: it has no process, or it cannot be waited for any longer."""

    key: int


@dataclass(frozen=True)
class TellPhase:
    """Tell the owner: phase changed."""

    key: int
    phase: str


@dataclass(frozen=True)
class TellReady:
    """Tell the owner: ready."""

    key: int
    info: bytes


@dataclass(frozen=True)
class TellGone:
    """Tell the owner: its process ended (or was given up, ``exit`` unknown). ``report``: if that is a failure."""

    key: int
    exit: Exit
    report: FailureReport | None


@dataclass(frozen=True)
class TellFailure:
    """Tell the owner: this failed; keys are the members that are part of it (empty: the fork server alone)."""

    report: FailureReport
    keys: tuple[int, ...]


Instruction = AskToStop | SendSignal | Drop | TellPhase | TellReady | TellGone | TellFailure


HALF_OPEN_S = 1.0
"""How long a process may go on living after the end of its control connection."""


class Rung(enum.IntEnum):
    """How far up the ladder."""

    NONE = 0
    ASKED = 1
    TERMINATED = 2
    KILLED = 3


SIGKILL = 9
SIGTERM = 15


@dataclass
class MemberRecord:
    """All that is known of one member."""

    key: int
    role: str
    rank: int | None
    told: bool
    since: float
    state: State = State.STARTING
    pid: int = 0
    phase: str = "starting"
    log_file: str = ""
    report: FailureReport | None = None
    own_words: bool = False
    """It said itself that it failed."""
    connected: bool = True
    ended_at: float | None = None
    exit: Exit | None = None
    first_sign: float | None = None
    first_sign_wall: float = 0.0
    rung: Rung = Rung.NONE
    rung_deadline: float | None = None


@dataclass
class _Failure:
    """Failures of one window."""

    deadline: float
    keys: list[int] = field(default_factory=list)
    reports: list[FailureReport] = field(default_factory=list)


class SupervisorCore:
    """See the module. ``handle`` is the only way in; afterwards ``next_deadline`` says when it wants a Tick."""

    def __init__(
        self, *, window_s: float = 0.15, rung_s: float = 2.0, term_s: float = 2.0, kill_wait_s: float = 3.0
    ) -> None:
        self.window_s = window_s
        self._rung_s = {Rung.ASKED: rung_s, Rung.TERMINATED: term_s, Rung.KILLED: kill_wait_s}
        self.members: dict[int, MemberRecord] = {}
        self.server: FailureReport | None = None
        self.server_phase = "starting"
        self.last_progress = 0.0
        self._failure: _Failure | None = None
        self._now = 0.0
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event; events about unknown or forgotten members are ignored."""
        self._now = max(now, self._now)
        match event:
            case Added():
                record = MemberRecord(event.key, event.role, event.rank, event.told, since=self._now)
                self.members.setdefault(event.key, record)
                self.last_progress = self._now
            case StopRequested():
                self._on_stop(event)
            case ServerProgressed():
                self.server_phase = event.phase
                self.last_progress = self._now
            case ServerGone():
                self._on_server_gone(event.report)
            case Tick():
                pass
            case _:
                record_or_none = self.members.get(event.key)
                if record_or_none is not None and record_or_none.state is not State.GONE:
                    self._on_member(record_or_none, event)
        self._advance()
        out, self._out = self._out, []
        return out

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the records of members that are gone."""
        for key in keys:
            self.members.pop(key, None)

    @property
    def ladder_s(self) -> float:
        """From the first rung to giving up."""
        return sum(self._rung_s.values())

    def next_deadline(self) -> float | None:
        """When a Tick is due, on the clock of ``now``; None: never."""
        times = [self._failure.deadline] if self._failure else []
        for record in self.members.values():
            if record.state is State.GONE:
                continue
            if record.rung_deadline is not None:
                times.append(record.rung_deadline)
            times += [at for at in (self._give_up_at(record), self._half_open_at(record)) if at is not None]
        return min(times) if times else None

    def stopping(self) -> list[int]:
        """Members on the ladder below SIGKILL: whoever runs this should look whether they are in state T."""
        return [
            record.key
            for record in self.members.values()
            if record.state is State.STOPPING and record.rung < Rung.KILLED and record.pid
        ]

    # ---- events ----

    def _on_member(self, record: MemberRecord, event: Event) -> None:
        match event:
            case Born():
                record.pid = event.pid
                self.last_progress = self._now
                if record.rung is Rung.KILLED:
                    self._out.append(SendSignal(record.key, SIGKILL))
            case Named():
                record.role, record.pid, record.log_file = event.name, event.pid, event.log_file
            case Progressed():
                record.phase = event.phase
                self.last_progress = self._now
                self._out.append(TellPhase(record.key, event.phase))
            case Spoke():
                self.last_progress = self._now
            case BecameReady():
                self.last_progress = self._now
                record.phase = "ready"
                if record.state is State.STARTING:
                    record.state = State.READY
                    self._out.append(TellReady(record.key, event.info))
            case ToldFailure():
                record.own_words = True
                self._fail(record, event.report)
            case ConnectionEnded():
                record.connected = False
                if self.server is not None and record.told and not record.pid:  # it was asked for too late
                    self._fail(record, self.server)
                self._sign(record, event.wall)
            case ProcessEnded():
                record.ended_at = record.ended_at or self._now
                self._sign(record, event.wall)
            case ExitTold():
                record.exit = event.exit
                self._sign(record, event.wall)
            case FoundStopped():
                if record.state is State.STOPPING and record.rung < Rung.KILLED:
                    self._climb(record, Rung.KILLED)

    def _sign(self, record: MemberRecord, wall: float) -> None:
        if record.first_sign is None:
            record.first_sign, record.first_sign_wall = self._now, wall
        record.first_sign_wall = min(record.first_sign_wall, wall)

    def _on_stop(self, event: StopRequested) -> None:
        for key in event.keys:
            record = self.members.get(key)
            if record is None or record.state is State.GONE:
                continue
            record.state = State.STOPPING
            if not record.pid:
                self._out.append(Drop(key))
                self._gone(record, Exit())
            elif not event.ask:
                self._climb(record, Rung.KILLED)
            elif record.rung is Rung.NONE:
                self._climb(record, Rung.ASKED)

    def _on_server_gone(self, report: FailureReport) -> None:
        if self.server is not None:
            return
        self.server = report
        self.last_progress = self._now
        if self._failure is None:
            self._failure = _Failure(self._now + self.window_s)
        for record in self.members.values():  # those that were never made have nobody left to make them
            if record.state is not State.GONE and record.told and not record.pid:
                self._failure.keys.append(record.key)
                record.report = report
                self._out.append(Drop(record.key))
                self._gone(record, Exit())

    # ---- failures ----

    def _fail(self, record: MemberRecord, report: FailureReport) -> None:
        if record.report is not None or record.state is State.STOPPING:
            record.report = record.report or report
            return
        record.report = report
        if self._failure is None:
            self._failure = _Failure(self._now + self.window_s)
        self._failure.keys.append(record.key)
        self._failure.reports.append(report)

    def _give_up_at(self, record: MemberRecord) -> float | None:
        """When to stop waiting for word of how it ended: nobody is going to tell, or not in time."""
        if record.first_sign is None:
            return None
        if record.ended_at is not None:
            return record.ended_at + self.window_s
        return record.first_sign + self.window_s if not record.told or self.server is not None else None

    def _half_open_at(self, record: MemberRecord) -> float | None:
        """When to end a process that closed its connection while nothing says that it ended."""
        if record.first_sign is None or not record.pid or record.rung is Rung.KILLED:
            return None
        return record.first_sign + HALF_OPEN_S if self._give_up_at(record) is None else None

    def _end_half_open(self, record: MemberRecord) -> None:
        report = exit_report(
            role=record.role,
            rank=record.rank,
            pid=record.pid,
            phase=record.phase,
            code=None,
            signal=None,
            log_file=record.log_file,
            when=record.first_sign_wall,
            message="it closed its control connection but did not end; it was killed",
        )
        self._fail(record, report)
        self._climb(record, Rung.KILLED)

    def _gone(self, record: MemberRecord, how: Exit) -> None:
        stopping = record.state is State.STOPPING
        if record.report is None and not stopping:
            report = exit_report(
                role=record.role,
                rank=record.rank,
                pid=record.pid,
                phase=record.phase,
                code=how.code,
                signal=how.signal,
                oom=how.oom,
                log_file=record.log_file,
                when=record.first_sign_wall,
                message="it ended although nobody had asked it to" if how.code == 0 else "",
            )
            self._fail(record, report)
        record.state, record.exit = State.GONE, how
        record.rung_deadline = None
        self._out.append(TellGone(record.key, how, record.report))

    # ---- time ----

    def _advance(self) -> None:
        for record in list(self.members.values()):
            if record.state is not State.GONE:
                self._advance_member(record)
        failure = self._failure
        if failure is not None and (self._now >= failure.deadline or self._all_is_said(failure)):
            self._failure = None
            if failure.reports or self.server is not None:
                root = fold(failure.reports, self.server)
                self._out.append(TellFailure(root, tuple(dict.fromkeys(failure.keys))))

    def _all_is_said(self, failure: _Failure) -> bool:
        concerned = [
            record for record in self.members.values() if record.state is not State.GONE or record.key in failure.keys
        ]
        return self.server is None and bool(failure.reports) and all(map(_has_said, concerned))

    def _due(self, at: float | None) -> bool:
        return at is not None and self._now >= at

    def _advance_member(self, record: MemberRecord) -> None:
        if record.exit is not None:
            self._gone(record, record.exit)
        elif self._due(self._give_up_at(record)):
            self._gone(record, Exit())
        elif self._due(self._half_open_at(record)):
            self._end_half_open(record)
        if record.state is State.GONE or record.rung_deadline is None or self._now < record.rung_deadline:
            return
        if record.rung is Rung.KILLED:  # it does not die: state D, most likely
            self._out.append(Drop(record.key))
            self._gone(record, Exit())
        else:
            self._climb(record, Rung(record.rung + 1))

    def _climb(self, record: MemberRecord, rung: Rung) -> None:
        if rung <= record.rung:
            return
        record.rung = rung
        if rung is Rung.ASKED:
            self._out.append(AskToStop(record.key))
        else:
            self._out.append(SendSignal(record.key, SIGTERM if rung is Rung.TERMINATED else SIGKILL))
        record.rung_deadline = self._now + self._rung_s[rung]


def _has_said(record: MemberRecord) -> bool:
    return record.own_words or (record.exit is not None and record.exit != Exit())
