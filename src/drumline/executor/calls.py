"""Calls in flight: ids, futures, order, deadlines and failures. No I/O and no processes in here.

A :class:`CallTable` knows every call that was sent and has not ended. Answers and failures are put in by whoever
receives them (a waiting thread that drains the answer rings; the supervisor thread for failures; the worker thread of
``uni``), always under ``table.lock``. What it rests on:

* Ids grow by one with each call and ranks run calls in the order of their ids, so the futures complete in that order:
  a call whose answers are all here waits in the table until all older ones have ended. The exception is an error that
  is the call's own (its deadline), which ends it at once.
* An answer for an id that is not in the table any more belongs to a call that timed out: it is dropped and can never
  be taken for another one's.
* A failure marks its call and does not end it: the executor first finds out whether all ranks ended the call (then
  :meth:`CallTable.settle` makes it a RemoteCallError) or not (then :meth:`CallTable.close` ends everything).
* A failure of a call that has already been answered (its output rank was quicker) must not be lost: the oldest call in
  flight gets it, or else the next one that is begun.

Nothing sleeps but on the executor's :class:`~drumline.transport.Waiter`. A thread that completes somebody else's
future rings it, because that somebody may be asleep on it.

Rejected: ``concurrent.futures.Future`` (a condition variable each, and nobody would drain the rings while waiting).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from drumline.errors import (
    ChannelClosedError,
    DrumlineError,
    ExecutorFailedError,
    FailureReport,
    RemoteCallError,
    RPCTimeoutError,
)
from drumline.processes.reports import fold
from drumline.transport import deadline_after

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 2.0
"""How long :meth:`CallTable.close` waits for an aggregator that does not return."""
REMEMBERED = 1024
"""How many calls that ended with an error are remembered, so that later news of them is recognised."""


class Sleeper(Protocol):
    """What the table needs of a Waiter."""

    def wait(self, check: Callable[[], bool | None], deadline: float | None) -> bool | None:
        """Sleep until ``check`` gives something or ``time.monotonic()`` reaches ``deadline`` (then None)."""

    def ring(self) -> None:
        """Make every thread that sleeps here check again."""


class Aggregator(Protocol):
    """Folds the answers of all ranks onto the output rank's.

    Called once for each call, in the order of the calls, with the call table's lock held: it must not block, and calls
    of the executor from it raise RuntimeError.
    """

    def aggregate(self, outputs: Sequence[Any], output_rank: int) -> Any:
        """The one value that the caller gets. ``outputs`` are in rank order; what earlier aggregators made of the
        output rank's is in its place."""

    def failed(self, outputs: Mapping[int, Any], report: FailureReport) -> None:
        """The call failed; ``outputs`` are the answers of the ranks that did answer."""


class Call:
    """The future of one call. Made by :meth:`CallTable.begin`."""

    __slots__ = (
        "_aggregators",
        "_answers",
        "_broken",
        "_done",
        "_error",
        "_failures",
        "_missing",
        "_single",
        "_table",
        "_value",
        "deadline",
        "id",
        "method",
        "ranks",
    )

    def __init__(
        self,
        table: CallTable,
        call_id: int,
        method: str,
        ranks: Sequence[int],
        *,
        single: bool,
        deadline: float | None,
        aggregators: Sequence[Aggregator],
    ) -> None:
        self.id = call_id
        self.method = method
        self.deadline = deadline
        self.ranks = ranks
        self._table = table
        self._single = single
        self._aggregators = aggregators
        self._missing = len(ranks)
        self._answers: dict[int, Any] = {}
        self._failures: list[FailureReport] = []
        self._broken: BaseException | None = None
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not. Takes in what has arrived; never blocks."""
        return self._done or self._table.poll(self) is True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call's end and return what it gave, or raise what it failed with.

        Args:
            timeout: seconds to wait for it now. When they are over a plain TimeoutError is raised, the call goes on and
                may be asked again. The call's own deadline raises RPCTimeoutError and ends it; an answer that was late
                but here before anybody asked counts.

        """
        if not self._done:
            self._table.wait(self, timeout)
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # else: error -> traceback -> this frame -> call -> error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like :meth:`result`, but returns the exception, or None."""
        if not self._done:
            self._table.wait(self, timeout)
        return self._error

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self._done else "running"
        return f"<Call {self.id} {self.method} {state}>"

    # For the table, with its lock held.

    @property
    def _ready(self) -> bool:
        return self._done or (self._missing == 0 and not self._failures)

    def _take(self, rank: int, value: Any) -> None:
        self._answers[rank] = value
        self._missing -= 1

    def _complete(self) -> None:
        """All answers are here and nothing failed."""
        answers = self._answers
        if self._broken is not None:
            self._error = self._broken
            self._end()
            return
        try:
            if self._single and not self._aggregators:
                self._value = answers[self.ranks[0]]
            elif self._single:
                self._value = self._fold(answers)
            else:
                self._value = [answers[rank] for rank in self.ranks]
        except Exception as exc:  # noqa: BLE001  an aggregator's own mistake is its caller's to see
            self._error = exc
        self._end()

    def _fold(self, answers: dict[int, Any]) -> Any:
        output_rank = self._table.output_rank
        with self._table.aggregating():
            for aggregator in self._aggregators:
                answers[output_rank] = aggregator.aggregate([answers[rank] for rank in self.ranks], output_rank)
        return answers[output_rank]

    def _fail(self, error: BaseException, report: FailureReport | None = None) -> None:
        self._error = error
        if report is not None:
            for aggregator in self._aggregators:
                try:
                    with self._table.aggregating():
                        aggregator.failed(self._answers, report)
                except Exception as exc:  # noqa: BLE001  must not hide the failure itself
                    error.add_note(f"{type(aggregator).__name__}.failed raised {exc!r}")
        self._end()

    def _end(self) -> None:
        self._done = True
        self._answers = {}
        self._failures = []
        self._aggregators = ()


class CallTable:
    """All calls in flight of one executor."""

    def __init__(self, waiter: Sleeper, drain: Callable[[], None], output_rank: int, world_size: int) -> None:
        """Make an empty table.

        Args:
            waiter: what to sleep on.
            drain: puts all answers that have arrived into the table (:meth:`answer`); called with the lock held.
            output_rank: where aggregators fold answers to.
            world_size: number of ranks.

        """
        self.lock = threading.Lock()
        self.output_rank = output_rank
        self.owing = [0] * world_size
        """Answers that each rank has still to give, those that nobody waits for included. Read with the lock held."""
        self._waiter = waiter
        self._drain = drain
        self._next_id = 1
        self._open: dict[int, Call] = {}
        self._order: deque[Call] = deque()
        self._ended_badly: deque[int] = deque(maxlen=REMEMBERED)
        self._late: list[FailureReport] = []
        self._closed: Callable[[], DrumlineError] | None = None
        self._completed = 0
        self._aggregator_thread: int | None = None

    @contextlib.contextmanager
    def aggregating(self) -> Iterator[None]:
        """While an aggregator runs. The lock is held."""
        self._aggregator_thread = threading.get_ident()
        try:
            yield
        finally:
            self._aggregator_thread = None

    def refuse_aggregator(self) -> None:
        """RuntimeError if an aggregator runs in this thread: it holds the lock and would wait for itself."""
        if self._aggregator_thread == threading.get_ident():
            raise RuntimeError("an aggregator must not call the executor whose answers it folds")

    # The caller's side.

    def begin(
        self,
        method: str,
        ranks: Sequence[int],
        *,
        single: bool,
        deadline: float | None,
        aggregators: Sequence[Aggregator] = (),
    ) -> Call:
        """A new call with the next id. The caller holds whatever makes ids and sending one act.

        Raises what the table was closed with, or RemoteCallError of a failure that came after its call's answer.
        """
        with self.lock:
            self._check_open()
            call = Call(self, self._next_id, method, ranks, single=single, deadline=deadline, aggregators=aggregators)
            self._next_id += 1
            self._open[call.id] = call
            self._order.append(call)
            for rank in ranks:
                self.owing[rank] += 1
            return call

    def idle(self) -> bool:
        """Nothing is in flight, and no rank owes an answer. Raises what :meth:`begin` raises."""
        self.refuse_aggregator()
        with self.lock:
            self._check_open()
            return not (self._order or any(self.owing))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed()
        if self._late:
            report, self._late = fold(self._late), []
            raise RemoteCallError(report)

    def withdraw(self, call: Call, error: BaseException) -> None:
        """End a call that was never sent."""
        with self.lock:
            for rank in call.ranks:
                self.owing[rank] -= 1
            if not call._done:
                call._fail(error)
            self._advance()

    def poll(self, call: Call) -> bool | None:
        """True if the call has ended, else None. Takes in what has arrived."""
        if call._done:
            return True
        self.refuse_aggregator()
        with self.lock:
            before = self._completed
            self._drain()
            others = self._completed - before - call._done
        if others:
            self._waiter.ring()
        return call._done or None

    def collect(self) -> None:
        """Take in what has arrived."""
        with self.lock:
            before = self._completed
            self._drain()
            completed = self._completed != before
        if completed:
            self._waiter.ring()

    def wait(self, call: Call, timeout: float | None) -> None:
        """Sleep until the call has ended. Plain TimeoutError after ``timeout`` seconds."""
        give_up = deadline_after(timeout)
        self.refuse_aggregator()

        def check() -> bool | None:
            return self.poll(call)

        while not self._sleep(check, call, give_up):
            now = time.monotonic()
            self._expire(call, now)
            if call._done:
                return
            if give_up is not None and now >= give_up:
                raise TimeoutError(f"{call.method} has not ended after {timeout} s; it goes on")

    def _sleep(self, check: Callable[[], bool | None], call: Call, give_up: float | None) -> bool | None:
        try:
            return self._waiter.wait(check, self._wake_at(call, give_up))
        except ChannelClosedError:
            if call._done:  # it was ended, and then the waiter was closed
                return True
            raise

    def _wake_at(self, call: Call, give_up: float | None) -> float | None:
        """When the next deadline that concerns this call ends: its own, its caller's, or the oldest call's."""
        with self.lock:
            oldest = self._order[0] if self._order else call
            limits = [d for d in (give_up, *(c.deadline for c in (call, oldest) if not c._failures)) if d is not None]
        return min(limits) if limits else None

    def _expire(self, call: Call, now: float) -> None:
        """End this call and the oldest ones if their deadline is over."""
        with self.lock:
            before = self._completed
            self._drain()
            self._time_out(call, now)
            while self._order and self._time_out(self._order[0], now):
                self._advance()
            self._advance()
            others = self._completed != before
        if others:
            self._waiter.ring()

    def _time_out(self, call: Call, now: float) -> bool:
        """Whether the call is over. One that waits for its failure to be settled has no deadline any more."""
        if not call._done and not call._failures and call.deadline is not None:
            if now < call.deadline:
                return False
            self._ended_badly.append(call.id)
            call._fail(RPCTimeoutError(f"RPC call to {call.method} timed out."))
        return call._done

    # The receiving side. The first two with the lock held by the caller.

    def answer(self, rank: int, call_id: int, value: Any) -> None:
        """An answer has come. Nobody waits for it any more: it is dropped. ``lock`` is held by the caller."""
        self.owing[rank] -= 1
        call = self._open.get(call_id)
        if call is not None and not call._done:
            call._take(rank, value)
            if call._missing == 0:
                self._advance()

    def unreadable(self, rank: int, call_id: int, error: BaseException) -> None:
        """An answer has come that cannot be decoded. ``lock`` is held by the caller."""
        self.owing[rank] -= 1
        call = self._open.get(call_id)
        if call is not None and not call._done:
            error.add_note(f"while decoding the answer of rank {rank} to {call.method}")
            call._broken = error
            call._missing -= 1
            if call._missing == 0:
                self._advance()

    def failed(self, call_id: int, report: FailureReport, owed_by: int | None = None) -> Call | None:
        """A rank failed in a call.

        Returns the call that will carry the failure: pass it to :meth:`settle` when all ranks have ended the one that
        failed. None if there is none (that call has ended with an error already, or the next one will carry it).
        ``owed_by``: the rank, if it was to answer and now will not.
        """
        with self.lock:
            self._drain()
            if owed_by is not None:
                self.owing[owed_by] -= 1
            return self._mark(call_id, report)

    def _mark(self, call_id: int, report: FailureReport) -> Call | None:
        call = self._open.get(call_id)
        if call is None or call._done:
            if self._closed is not None or call_id in self._ended_badly:
                return None
            call = next((c for c in self._order if not c._done), None)
            if call is None:
                self._late.append(report)
                return None
        call._failures.append(report)
        return call

    def settle(self, call: Call) -> None:
        """All ranks have ended the call that failed: its future ends with RemoteCallError."""
        with self.lock:
            self._drain()
            if not call._done:
                report = fold(call._failures)
                self._ended_badly.append(call.id)
                call._fail(RemoteCallError(report), report)
            self._advance()
        self._waiter.ring()

    def failures(self, call: Call) -> list[FailureReport]:
        """Failures of a call that has not been settled."""
        with self.lock:
            return list(call._failures)

    def in_flight(self) -> tuple[str, list[FailureReport]]:
        """Method of the oldest call in flight (empty: none), and all failures that have not been settled."""
        with self.lock:
            running = [call for call in self._order if not call._done]
            return (running[0].method if running else ""), [f for call in running for f in call._failures] + self._late

    def close(self, report: FailureReport | None, make_error: Callable[[], DrumlineError]) -> None:
        """End every call with an error and refuse all later ones with it.

        Bounded: if an aggregator does not return (the lock is held), calls in flight are left to it.
        """
        self.refuse_aggregator()
        if not self.lock.acquire(timeout=CLOSE_WAIT_S):
            log.error("an aggregator does not return; calls in flight are left to it")
            self._closed = self._closed or make_error
            return
        try:
            if self._closed is not None:
                return
            self._closed = make_error
            while self._order:
                call = self._order.popleft()
                if not call._done:
                    call._fail(make_error(), report)
            self._open.clear()
        finally:
            self.lock.release()
        self._waiter.ring()

    def _advance(self) -> None:
        """Complete the oldest calls whose answers are all here. ``lock`` is held."""
        order = self._order
        while order and order[0]._ready:
            call = order.popleft()
            del self._open[call.id]
            self._completed += 1
            if not call._done:
                call._complete()

    def __len__(self) -> int:
        """Calls in flight."""
        return len(self._order)


def broken(report: FailureReport, message: str = "") -> Callable[[], ExecutorFailedError]:
    """Makes the error that a broken executor raises: a new one each time, since tracebacks grow on raised ones."""
    return lambda: ExecutorFailedError(report, f"The executor has failed. {message}".strip())
