"""Calls in flight: ids, order, deadlines and failures. No I/O and no processes in here.

A :class:`CallTable` knows every call that was sent and has not ended. Answers and failures are put in by whoever
receives them (a waiting thread that drains the answer rings; the supervisor thread for failures; the worker thread of
``uni``), always under ``table.lock``. What it rests on:

* Ids grow by one with each call and ranks run calls in the order of their ids, so the futures complete in that order:
  a call whose answers are all here waits in the table until all older ones have ended. The exception is an error that
  is the call's own (its deadline, its cancellation), which ends it at once.
* An answer for an id that is not in the table any more belongs to a call that timed out or was cancelled: it is dropped
  and can never be taken for another one's.
* A failure marks its call and does not end it: the executor first finds out whether all ranks ended the call (then
  :meth:`CallTable.settle` makes it a WorkerCallError) or not (then :meth:`CallTable.close` ends everything).
* A failure of a call that has already been answered (its output rank was quicker) must not be lost: the oldest call in
  flight gets it, or else the next one that is begun.
* Callbacks never run with the lock held: whoever ends a call puts it on a list for the keeper
  (:mod:`drumline.executor.keeper`), which also does what nobody else does while nobody waits.

Nothing sleeps but on the executor's :class:`~drumline.transport.Waiter`. A thread that completes somebody else's
future rings it, because that somebody may be asleep on it.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, Protocol

from drumline.errors import (
    ChannelClosedError,
    DrumlineError,
    ExecutorFailedError,
    FailureReport,
    RPCTimeoutError,
    WorkerCallError,
)
from drumline.executor.explain import Doing, Look, nothing_known, unanswered
from drumline.executor.future import Aggregator, Call, Held, run_callback
from drumline.executor.keeper import LINGER_S, PATROL_S, Keeper, KeeperSettings
from drumline.processes.reports import fold
from drumline.transport import deadline_after

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 2.0
"""How long :meth:`CallTable.close` waits for an aggregator that does not return."""
REMEMBERED = 4096
"""How many calls that ended with an error are remembered, so that later news of them is recognised."""
NAMES = 1024
"""How many calls' names are remembered, so that it can be said what a rank is busy with."""


class Sleeper(Protocol):
    """What the table needs of a Waiter."""

    def wait(self, check: Callable[[], bool | None], deadline: float | None) -> bool | None:
        """Sleep until ``check`` gives something or ``time.monotonic()`` reaches ``deadline`` (then None)."""

    def ring(self) -> None:
        """Make every thread that sleeps here check again."""


class CallTable:
    """All calls in flight of one executor.

    ``_deadlines`` and ``_due`` belong to calls with callbacks: a heap of (deadline, id), which keeps no call alive, and
    those that have ended and whose callbacks have not run.
    """

    def __init__(
        self,
        waiter: Sleeper,
        drain: Callable[[], None],
        output_rank: int,
        world_size: int,
        *,
        pump: Callable[[], None] = lambda: None,
        look: Look = nothing_known,
        keeper: KeeperSettings | None = None,
    ) -> None:
        """Make an empty table.

        Args:
            waiter: what to sleep on.
            drain: puts all answers that have arrived into the table (:meth:`answer`); called with the lock held.
            output_rank: where aggregators fold answers to.
            world_size: number of ranks.
            pump: sends calls that wait for room (:attr:`unsent` of them), as far as there is some; called without the
                lock.
            look: what ranks are doing, for texts.
            keeper: what the keeper's log lines say, and when.

        """
        self.lock = threading.Lock()
        self.output_rank = output_rank
        self.owing = [0] * world_size
        """Answers that each rank has still to give, those that nobody waits for included. Read with the lock held."""
        self.unsent = 0
        """Calls that wait for room. Written by whoever sends."""
        self.next_id = 1
        """Of the next call."""
        self.held = 0
        """Bytes of answers that nobody had taken when the last one came, at most (:meth:`recount`)."""
        self.looks = 0
        """Times that somebody has looked for answers, so that the keeper knows whether anybody does."""
        self._waiter = waiter
        self._drain = drain
        self._pump = pump
        self._look = look
        self._open: dict[int, Call] = {}
        self._order: deque[Call] = deque()
        self._names = [""] * NAMES
        self._ended_badly = _Remembered(REMEMBERED)
        self._late: list[FailureReport] = []
        self._closed: Callable[[], DrumlineError] | None = None
        self._completed = 0
        self._aggregator_thread: int | None = None
        self._freed: list[int] = []
        self._watched = 0
        self._lone = 0.0
        self._deadlines: list[tuple[float, int]] = []
        self._due: deque[Call] = deque()
        self.keeper = Keeper(self, waiter, keeper or KeeperSettings())

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
        if self._aggregator_thread is not None and self._aggregator_thread == threading.get_ident():
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
        expected_s: float = 0.0,
        waits: bool = False,
    ) -> Call:
        """A new call with the next id. The caller holds whatever makes ids and sending one act.

        ``waits``: the caller will wait for it at once, and so look after it. Raises what the table was closed with, or
        WorkerCallError of a failure that came after its call's answer.
        """
        with self.lock:
            if self._closed is not None or self._late:
                self._check_open()
            call_id = self.next_id
            call = Call(self, call_id, method, ranks, single, deadline, aggregators, expected_s)
            self.next_id = call_id + 1
            self._names[call_id % NAMES] = method
            self._open[call_id] = call
            self._order.append(call)
            owing = self.owing
            for rank in ranks:
                owing[rank] += 1
        if not self.keeper.armed and not (waits and self._is_lone()):
            self.keeper.arm()
        return call

    def _is_lone(self) -> bool:
        """The first call after a pause. The keeper sleeps on: woken, it would want the interpreter's lock just when the
        answer comes. :meth:`wait` wakes it if the call takes long, a second call if one comes soon."""
        before, self._lone = self._lone, time.monotonic()
        return self._lone - before > LINGER_S

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
            raise WorkerCallError(
                report, "A call that was answered before failed afterwards on a rank that was not asked"
            )

    def withdraw(self, call: Call, error: BaseException | None) -> None:
        """A call is not sent, and never will be. It ends with ``error`` unless it has ended already."""
        with self.lock:
            for rank in call.ranks:
                self.owing[rank] -= 1
            if not call._done and error is not None:
                call._fail(error)
            self._advance()

    def abandon(self, call: Call, error: BaseException) -> None:
        """A call ends with ``error`` for its caller; ranks run it all the same, and their answers are dropped."""
        with self.lock:
            if not call._done:
                self._ended_badly.add(call.id)
                call._fail(error)
            self._advance()

    def forget(self, call_id: int, error: BaseException) -> None:
        """:meth:`begin` of this call was interrupted, anywhere: it will not be sent.

        ``owing`` stays, since nobody knows how far it was counted: too much there only costs a look for answers more,
        too little would leave answers in the rings.
        """
        with self.lock:
            call = self._open.get(call_id)
            if call is None:
                return
            if call not in self._order:
                self._order.append(call)
            if not call._done:
                call._fail(error)
            self._advance()

    def poll(self, call: Call) -> bool | None:
        """True if the call has ended, else None. Takes in what has arrived."""
        if call._done:
            return True
        if self._aggregator_thread is not None:
            self.refuse_aggregator()
        self.looks += 1
        if self.unsent:
            self._pump()
        with self.lock:
            before = self._completed
            self._drain()
            others = self._completed - before - call._done
        if others:
            self._waiter.ring()
        return call._done or None

    def collect(self) -> None:
        """Send what waits for room, take in what has arrived."""
        if self.unsent:
            self._pump()
        with self.lock:
            before = self._completed
            self._drain()
            completed = self._completed != before
        if completed:
            self._waiter.ring()

    def wait(self, call: Call, timeout: float | None) -> None:
        """Sleep until the call has ended. Plain TimeoutError after ``timeout`` seconds."""
        give_up = None if timeout is None else deadline_after(timeout)
        if self._aggregator_thread is not None:
            self.refuse_aggregator()
        call._asked = True
        check = partial(self.poll, call)
        if not self.keeper.armed:
            soon = time.monotonic() + PATROL_S
            try:
                if self._sleep(check, call, soon if give_up is None else min(soon, give_up)):
                    return
            finally:
                if not call._done:
                    self.keeper.arm()
        while not self._sleep(check, call, give_up):
            now = time.monotonic()
            self.expire(now, call)
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
        wake_at = give_up
        deadline = call.deadline
        if deadline is not None and not call._failures and (wake_at is None or deadline < wake_at):
            wake_at = deadline
        try:
            oldest = self._order[0]  # no lock: one look, and whoever is the oldest later has a deadline of its own
        except IndexError:
            return wake_at
        if oldest is not call:
            deadline = oldest.deadline
            if deadline is not None and not oldest._failures and (wake_at is None or deadline < wake_at):
                wake_at = deadline
        return wake_at

    def expire(self, now: float, call: Call | None = None) -> None:
        """End what is past its deadline: ``call``, the oldest ones, those with callbacks."""
        late = _Late(self, now)
        with self.lock:
            before = self._completed
            self._drain()
            if call is not None:
                self._time_out(call, late)
            self._drop_ended()
            while self._deadlines and self._deadlines[0][0] <= now:
                self._time_out(self._open[heapq.heappop(self._deadlines)[1]], late)
                self._drop_ended()
            while self._order and self._time_out(self._order[0], late):
                self._advance()
            self._advance()
            others = self._completed != before
        if others:
            self._waiter.ring()

    def _time_out(self, call: Call, late: _Late) -> bool:
        """Whether the call is over. One that waits for its failure to be settled has no deadline any more."""
        if not call._done and not call._failures and call.deadline is not None:
            if late.now < call.deadline:
                return False
            self._ended_badly.add(call.id)
            call._fail(RPCTimeoutError(f"RPC call to {call.method} timed out. {late.text(call)}"))
        return call._done

    def cancel(self, call: Call) -> bool:
        """End a call with CancelledError. False if it has ended."""
        self.refuse_aggregator()
        with self.lock:
            self._drain()
            if call._done:
                return False
            self._ended_badly.add(call.id)
            call._fail(CancelledError(f"{call.method} was cancelled"))
            self._advance()
        self._waiter.ring()
        return True

    # Bytes that nobody has taken.

    def recount(self) -> int:
        """Bytes of answers that nobody has taken, exactly."""
        with self.lock:
            self._reap()
            return self.held

    def _reap(self) -> None:
        """Take off what was given back. ``lock`` is held."""
        while self._freed:
            self.held -= self._freed.pop()

    # Callbacks, and what else the keeper does. See keeper.py.

    def watch(self, call: Call, callback: Callable[[Call], object]) -> bool:
        """Have the keeper call this when the call has ended. False if it has ended already."""
        self.refuse_aggregator()
        with self.lock:
            if call._done:
                return False
            if call._callbacks is None:
                call._callbacks = []
                self._watched += 1
                if call.deadline is not None:
                    heapq.heappush(self._deadlines, (call.deadline, call.id))
            call._callbacks.append(callback)
        self.keeper.wake()
        return True

    def callbacks_due(self, call: Call) -> None:
        """A call with callbacks has ended. ``lock`` is held."""
        self._watched -= 1
        self._due.append(call)
        self._drop_ended()
        self.keeper.wake()

    def _drop_ended(self) -> None:
        """Take deadlines of calls that have ended off the heap's top. ``lock`` is held."""
        while self._deadlines:
            call = self._open.get(self._deadlines[0][1])
            if call is not None and not call._done:
                return
            heapq.heappop(self._deadlines)

    def run_callbacks(self) -> None:
        """Run the callbacks of calls that have ended, in that order."""
        while self._due:
            call = self._due.popleft()
            callbacks, call._callbacks = call._callbacks or (), None
            for callback in callbacks:
                try:
                    run_callback(callback, call)
                except BaseException:  # SystemExit of a callback must not end the keeper
                    log.exception("a callback of call %d (%s) failed", call.id, call.method)

    @property
    def closed(self) -> bool:
        """No call will ever be in flight again."""
        return self._closed is not None

    @property
    def callbacks_ready(self) -> bool:
        """There are callbacks to run."""
        return bool(self._due)

    @property
    def needs_keeper(self) -> bool:
        """Somebody must look for answers although perhaps nobody waits: there are callbacks, or calls to send."""
        return bool(self._watched or self.unsent)

    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to do, if nobody waits."""
        with self.lock:
            limits = [self._deadlines[0][0]] if self._deadlines else []
            if self._order and self._order[0].deadline is not None and not self._order[0]._failures:
                limits.append(self._order[0].deadline)
        return min(limits) if limits else None

    def last_sent(self) -> int:
        """Id of the newest call in flight that has been sent; 0: there is none."""
        with self.lock:
            return next((call.id for call in reversed(self._order) if call.sent), 0)

    def oldest(self) -> tuple[int, float] | None:
        """Id and ``expected_s`` of the oldest call in flight."""
        with self.lock:
            call = self._order[0] if self._order else None
        return (call.id, call.expected_s) if call is not None else None

    def describe(self, call_id: int) -> str:
        """Method of a call in flight and who has not answered it; empty if it has ended."""
        with self.lock:
            call = self._open.get(call_id)
            if call is None:
                return ""
            return f"{call.method} (call {call.id}). {_Late(self, time.monotonic()).text(call)}"

    def look(self) -> Sequence[Doing]:
        """What every rank is doing."""
        return self._look(range(len(self.owing)))

    def name_of(self, call_id: int) -> str:
        """Method of a call, ended or not; empty: forgotten."""
        return self._names[call_id % NAMES] if 0 <= self.next_id - call_id <= NAMES else ""

    # The receiving side. The first two with the lock held by the caller.

    def answer(self, rank: int, call_id: int, value: Any, size: int = 0) -> None:
        """An answer of ``size`` bytes has come. Nobody waits for it any more: it is dropped. ``lock`` is held."""
        self.owing[rank] -= 1
        call = self._open.get(call_id)
        if call is not None and not call._done:
            if size and not call._asked:
                if self._freed:
                    self._reap()
                self.held += size
                call._hold(Held(self._freed, size))
            call._answers[rank] = value
            call._missing = missing = call._missing - 1
            if not missing:
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

    def end_lost(self, before_id: int, ended: Sequence[int]) -> bool:
        """End calls whose answers were taken out of their rings and lost. ``lock`` is held by the caller.

        ``ended``: for each rank the last call that it has ended, and whose answer would have been taken in by now.
        False: there are calls with ids below ``before_id`` of which that cannot be said yet.
        """
        sure = True
        for call in self._order:
            if call.id >= before_id:
                break
            if call._done or call._failures:
                continue
            missing = [rank for rank in call.ranks if rank not in call._answers]
            lost = [rank for rank in missing if call.id <= ended[rank]]
            if lost and call._broken is None:
                ranks = ", ".join(map(str, lost))
                call._broken = DrumlineError(
                    f"answer of rank {ranks} to {call.method} lost: a signal handler raised while it was taken in"
                )
            call._missing = len(missing) - len(lost)
            sure = sure and not call._missing
        self._advance()
        return sure

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
        call._failures = [*call._failures, report]
        return call

    def settle(self, call: Call) -> None:
        """All ranks have ended the call that failed: its future ends with WorkerCallError."""
        with self.lock:
            self._drain()
            if not call._done:
                report = fold(call._failures)
                self._ended_badly.add(call.id)
                call._fail(WorkerCallError(report), report)
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
            self.keeper.wake()
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
        self.keeper.wake()

    def after_fork(self, make_error: Callable[[], DrumlineError]) -> None:
        """In a forked child: the calls are the parent's. Futures end here with an error, and no answer is taken."""
        self.lock = threading.Lock()  # the old one may be held by a thread that is not here
        self._closed = make_error
        self._aggregator_thread = None
        self.owing = [0] * len(self.owing)
        self.unsent = 0
        for call in self._open.values():
            if not call._done:
                call._callbacks, call._error, call._done = None, make_error(), True
        self._order.clear()
        self._open.clear()
        self._due.clear()

    def _advance(self) -> None:
        """Complete the oldest calls whose answers are all here. ``lock`` is held."""
        order = self._order
        while order:
            call = order[0]
            if not call._done and (call._missing or call._failures):
                return
            if not call._done:
                call._complete()
            self._open.pop(call.id, None)  # only now: a signal handler may raise anywhere, and whoever waits must not
            order.popleft()
            self._completed += 1

    def __len__(self) -> int:
        """Calls in flight."""
        return len(self._order)


class _Late:
    """Texts about calls that are late, of one moment: workers are looked at once, however many calls there are."""

    def __init__(self, table: CallTable, now: float) -> None:
        self.now = now
        self._table = table
        self._doings: Sequence[Doing] | None = None

    def text(self, call: Call) -> str:
        """Who has not answered it. The table's lock is held."""
        if self._doings is None:
            self._doings = self._table.look()
        if not call.sent:
            ranks = range(len(self._table.owing))
            busy = unanswered(call.id, ranks, self._doings, self._table.name_of, self.now)
            return f"It was never sent: no room in the message queue. {busy}"
        missing = [rank for rank in call.ranks if rank not in call._answers]
        return unanswered(call.id, missing, self._doings, self._table.name_of, self.now)


class _Remembered:
    """The last ids that were added."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: dict[int, None] = {}

    def add(self, call_id: int) -> None:
        self._ids[call_id] = None
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._ids


def broken(report: FailureReport, message: str = "") -> Callable[[], ExecutorFailedError]:
    """Makes the error that a broken executor raises: a new one each time, since tracebacks grow on raised ones."""
    return lambda: ExecutorFailedError(report, f"The executor has failed. {message}".strip())
