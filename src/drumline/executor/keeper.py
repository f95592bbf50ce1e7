"""The keeper: the thread that looks after calls while nobody waits for them.

It runs callbacks and serves ``await``; ends calls with callbacks at their deadline; sends calls that wait for room in
the message queue; takes in answers that nobody asks for, since workers would stand before a full answer ring; and says
in the log which call is late and which rank keeps it waiting. On patrol it also has the watchdog look at the ranks.

None of that may cost a step anything. So it sleeps in one of three ways::

    asleep     no call was in flight for a second: without end, until a call is begun (or a callback is due); not for
               the first call after a pause if its caller waits for it, unless it takes longer than a patrol
    patrol     calls are in flight and somebody looks for their answers: four looks a second
    on watch   there are callbacks or calls to send, or nobody has looked since the last patrol: on the executor's
               waiter, where every answer wakes it

A call that is begun only looks at one attribute (``armed``). Rejected: a thread that always waits on the executor's
waiter (it would fight for the interpreter's lock with the thread that wants the answer, at every step); a thread for
each stretch of work (starting one costs what ten wake-ups cost).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drumline.errors import ChannelClosedError
from drumline.processes.reports import span

if TYPE_CHECKING:
    from drumline.executor.calls import CallTable, Sleeper

log = logging.getLogger(__name__)

PATROL_S = 0.25
"""Time between two looks while somebody else looks for answers."""
LINGER_S = 1.0
"""How long after the last call it goes on patrol before it falls asleep."""
ASLEEP_S = 3600.0
"""Longest sleep; it is woken before, by whoever has something for it."""


@dataclass(frozen=True, kw_only=True)
class KeeperSettings:
    """What its log lines say, and when."""

    role: str = "executor"
    """Who waits."""
    long_wait_s: float = 60.0
    """A call that takes longer, and longer than was expected of it, is explained in the log."""
    queue: Callable[[], str] = lambda: ""
    """What is to be said about the queue to the workers: who has not read. Empty: nothing."""
    patrol: Callable[[float], None] = lambda now: None
    """Called with ``time.monotonic()`` a few times a second while calls are in flight: the watchdog's look."""
    rest: Callable[[], None] = lambda: None
    """Called when nothing is in flight any more."""


class Keeper:
    """See the module's text. The thread is started when it is first needed, or before, and ends with the table."""

    def __init__(self, table: CallTable, waiter: Sleeper, settings: KeeperSettings) -> None:
        self._table = table
        self._waiter = waiter
        self._settings = settings
        self.armed = False
        """It is on patrol or on watch: a call that is begun need not wake it."""
        self._event = threading.Event()
        self._watching = False
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._looks = -1
        self._empty_since: float | None = None
        self._failed = False
        self._late = _LongWait(settings.long_wait_s)
        self._next_patrol = 0.0

    def arm(self) -> None:
        """A call was begun. Any thread."""
        self.armed = True
        self.start()
        self._event.set()

    def wake(self) -> None:
        """There is something to do now. Any thread, with or without the table's lock."""
        if not self._table.closed or self._table.callbacks_ready:
            self.start()
        self._event.set()
        if self._watching:
            self._waiter.ring()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end; the table is closed. Not from a callback."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                log.warning("a callback of a call does not return; it is left alone")

    def start(self) -> None:
        """Start the thread, if there is none yet. It sleeps until there is something to do."""
        if self._thread is None:
            with self._start_lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="drumline-keeper", daemon=True)
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        table = self._table
        while True:
            self._event.clear()
            table.run_callbacks()
            if table.closed:
                if not table.callbacks_ready:
                    return
                continue
            try:
                self._turn(time.monotonic())
            except ChannelClosedError:  # the executor was shut down, and with it the waiter
                return
            except Exception:
                if not self._failed:  # who waits for an answer is told by himself, each time
                    log.exception("answers cannot be taken in")
                self._failed = True
                self._event.wait(PATROL_S)

    def _turn(self, now: float) -> None:
        """One sleep, and what is to be done before it."""
        table = self._table
        if len(table) == 0 and not table.needs_keeper:
            self._rest(now)
            return
        self._empty_since = None
        deadline = table.next_deadline()
        if deadline is not None and deadline <= now:
            table.expire(now)
            return
        self._explain(now)
        if now >= self._next_patrol:
            self._next_patrol = now + PATROL_S
            self._settings.patrol(now)
        until = now + PATROL_S if deadline is None else min(deadline, now + PATROL_S)
        looks, self._looks = self._looks, table.looks
        if table.needs_keeper or looks == self._looks:
            self._watch(until)
        else:
            self._event.wait(until - now)

    def _rest(self, now: float) -> None:
        """Nothing is in flight."""
        self._late.over()
        self._settings.rest()
        if self._empty_since is None:
            self._empty_since = now
        if now - self._empty_since < LINGER_S:
            self._event.wait(PATROL_S)
            return
        self.armed = False
        if len(self._table) == 0:  # looked at after that store: who begins a call does both the other way round
            self._event.wait(ASLEEP_S)
        self.armed = True
        self._empty_since = None

    def _watch(self, until: float) -> None:
        """Sleep where every answer wakes us."""
        self._watching = True
        try:
            self._waiter.wait(self._check, until)
        finally:
            self._watching = False

    def _check(self) -> bool | None:
        table = self._table
        if self._event.is_set() or table.closed:
            return True
        table.collect()
        over = len(table) == 0 and not table.needs_keeper
        return True if table.callbacks_ready or over else None

    def _explain(self, now: float) -> None:
        oldest = self._table.oldest()
        waited = self._late.look(oldest, now)
        if waited is None or oldest is None:
            return
        self._table.collect()  # what has arrived and nobody has looked at is not late
        what = self._table.describe(oldest[0])
        if what:
            log.warning("%s: %s of waiting for %s%s", self._settings.role, span(waited), what, self._settings.queue())


class _LongWait:
    """When a call is to be explained: once it is late, then each time that the wait has doubled. Pure."""

    def __init__(self, long_wait_s: float) -> None:
        self._long_wait_s = long_wait_s
        self._call_id = 0
        self._since = 0.0
        self._at = 0.0

    def look(self, oldest: tuple[int, float] | None, now: float) -> float | None:
        """Seconds waited so far if the oldest call (id, expected seconds) is to be explained now."""
        if oldest is None:
            return None
        call_id, expected_s = oldest
        if call_id != self._call_id:
            self._call_id, self._since = call_id, now
            self._at = now + max(self._long_wait_s, expected_s)
            return None
        if now < self._at:
            return None
        waited = now - self._since
        self._at = now + waited
        return waited

    def over(self) -> None:
        """Nothing is in flight."""
        self._call_id = 0
