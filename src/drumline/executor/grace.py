"""After a failure: have all ranks ended the call?

A rank that raises goes on to its next call, but the others may stand in a collective that it will never join. Nobody
can tell a slow rank from a stuck one, so they get a grace. Ranks that end the call within it show that they can still
work together; if one does not, the executor is broken. The grace of a rank that is still in an earlier call counts
from that call's end: until then the earlier call's own limits hold (its deadline, the patience of the stall watch).

The question is asked for every failure, also when the call's future has ended already (its output rank had answered,
or its deadline was over), and also when nobody waits: a thread that lives only while there is something to find out
looks at the progress words. It polls, since ranks do not ring when they end a call: that would wake the executor for
nothing at every step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drumline.errors import FailureReport
from drumline.executor.future import Call
from drumline.worker.segment import Progress

log = logging.getLogger(__name__)

POLL_S = 0.005
"""How often the progress words are looked at."""


@dataclass(frozen=True)
class _Question:
    call_id: int
    """The call that failed."""
    report: FailureReport
    carrier: Call | None
    """The call whose future will carry the failure; None if that has been seen to."""


class Grace:
    """Watches the ranks of one executor after failures."""

    def __init__(
        self,
        progress: Progress,
        world_size: int,
        grace_s: float,
        *,
        closing: threading.Event,
        settle: Callable[[Call], None],
        give_up: Callable[[FailureReport, Sequence[int]], None],
    ) -> None:
        """Make an idle one.

        Args:
            progress: what ranks say of themselves.
            world_size: number of ranks.
            grace_s: time to end a call in, in seconds.
            closing: set when the executor shuts down.
            settle: called when all ranks have ended the call, with the call that carries the failure.
            give_up: called, with the failure and the ranks that did not end the call, when the grace is over.

        """
        self._progress = progress
        self._grace_s = grace_s
        self._closing = closing
        self._settle = settle
        self._give_up = give_up
        self._heard = [0] * world_size
        self._lock = threading.Lock()
        self._open: list[_Question] = []
        self._running = False
        self._thread: threading.Thread | None = None

    def failed(self, rank: int, call_id: int, report: FailureReport, carrier: Call | None) -> None:
        """A failure of this rank has been put into the call table. Never blocks."""
        with self._lock:
            self._heard[rank] += 1
            self._open.append(_Question(call_id, report, carrier))
            if self._running:
                return
            thread = threading.Thread(target=self._run, name="drumline-grace", daemon=True)
            thread.start()
            self._running, self._thread = True, thread

    def has_heard_all(self) -> bool:
        """Whether no failure is on its way that ranks have told of by now. Any thread."""
        return not self._unheard()

    def join(self) -> None:
        """Wait until nothing looks at the progress words any more. ``closing`` is set."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    self._running = False
                    return
                question = self._open[0]
            try:
                if self._answer(question):
                    return
            except Exception:  # this thread is the only one: later failures would never be settled
                log.exception("a failure of call %d could not be settled", question.call_id)
            with self._lock:
                del self._open[0]

    def _answer(self, question: _Question) -> bool:
        """Find out, and see to it. True: it is all over with this executor."""
        late = self._wait(question)
        if self._closing.is_set():
            return True
        if late:
            self._give_up(question.report, late)
            return True
        if question.carrier is not None:
            self._settle(question.carrier)
        return False

    def _wait(self, question: _Question) -> list[int]:
        """Ranks that have not ended the call when the grace is over, if any."""
        # From now: an earlier question has ended, and with it the calls before this one.
        until = time.monotonic() + self._grace_s
        due = [until] * len(self._heard)
        while True:
            now = time.monotonic()
            late = self._late(question.call_id)
            for rank in late:
                if self._is_before(rank, question.call_id):
                    due[rank] = now + self._grace_s
            over = [rank for rank in late if due[rank] <= now]
            if over or not (late or (self._unheard() and now < until)):
                return over
            if now >= until:
                self._settle_expired(now)
            if self._closing.wait(POLL_S):
                return late

    def _settle_expired(self, now: float) -> None:
        """Calls past their deadline have failed in any case: their callers do not wait for what is before them."""
        with self._lock:
            carriers = [question.carrier for question in self._open if question.carrier is not None]
        for call in carriers:
            if not call.done_already and call.deadline is not None and now >= call.deadline:
                self._settle(call)

    def _late(self, call_id: int) -> list[int]:
        return [rank for rank, ended in enumerate(self._progress.ended()) if ended < call_id]

    def _is_before(self, rank: int, call_id: int) -> bool:
        """Whether this rank is inside a call before this one."""
        begun, _, ended = self._progress.seen()[rank]
        return ended < begun < call_id

    def _unheard(self) -> bool:
        """Whether failures are still on their way here: they are folded into one report."""
        return self._progress.failures() != self._heard
