"""Whether the engine core itself stands still: stopped, in an endless loop, or in C code that never returns.

Its ranks are the executor's business (:mod:`drumline.executor.stalls`). This looks at the process above them, from the
front end, only while somebody waits for something of it::

    front end: this thread  -- BeatRequest, control connection -->  engine core: thread that reads that connection
                            <-- Beat: turns of its loop, where it is --

No answer for ``--stall-timeout`` is a hang; while the process computes (a step in its main thread may hold the
interpreter's lock for all of it) only that of a step is. So is an answer that says, for so long, that the loop is
neither in a step nor waiting and has not turned. Looks are a second apart, or an eighth of the timeout if that is less;
who is idle is not looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from drumline.engine.protocol import Beat

BUSY = "busy"
"""Where a loop is that neither waits nor runs a step."""
APART_S = 1.0
"""Most seconds between two looks."""
COMPUTES = 0.05
"""Share of its time from which on a process counts as computing."""
ASLEEP_S = 3600.0


class CoreLooks:
    """What looks have shown. Pure."""

    def __init__(self, limit_s: float, step_limit_s: float) -> None:
        self._limit_s = limit_s
        self._step_limit_s = max(limit_s, step_limit_s)
        self._silent: tuple[float, float] | None = None
        """Since when a question has waited for an answer, and the seconds that the process had computed by then."""
        self._computed = 0.0
        self._turns = -1
        self._turned = 0.0
        """When the last answer came whose turns were others."""
        self._busy_since: float | None = None
        self._looked = 0.0

    def reset(self) -> None:
        """Nobody waits for anything any more."""
        self._silent = self._busy_since = None
        self._turns = -1

    def asked(self, computed_s: float, now: float, *, apart_s: float) -> None:
        """A question was sent. ``computed_s``: of the process so far. ``apart_s``: how far apart looks should be."""
        if now - self._looked > 3 * apart_s + 1.0:  # this process was stopped itself: it cannot tell
            self.reset()
        self._looked, self._computed = now, computed_s
        if self._silent is None:
            self._silent = now, computed_s

    def answered(self, turns: int, where: str, now: float) -> None:
        """It came."""
        self._silent = None
        if turns != self._turns:
            self._turns, self._turned = turns, now
        self._busy_since = self._turned if where == BUSY else None

    def look(self, now: float) -> tuple[float, bool] | None:
        """Seconds of standing still, and whether that is a hang; None: less than half of the limit."""
        limit, since = self._limit_s, self._busy_since
        if self._silent is not None:
            since, before = self._silent
            if self._computed - before > COMPUTES * (now - since):
                limit = self._step_limit_s
        if since is None or now - since < limit - self._limit_s / 2:
            return None
        return now - since, now - since >= limit


class CoreWatch:
    """A thread that sleeps while nobody waits.

    Args:
        looks: what they have shown so far.
        apart_s: seconds between two looks.
        waits: whether somebody waits for something of the engine core.
        ask: sends it a BeatRequest with this number.
        computed: seconds that it has computed so far.
        on_look: told what a look says, once that changes from or to None, and with each hang.

    """

    def __init__(
        self,
        looks: CoreLooks,
        apart_s: float,
        *,
        waits: Callable[[], bool],
        ask: Callable[[int], None],
        computed: Callable[[], float],
        on_look: Callable[[tuple[float, bool] | None], None],
    ) -> None:
        self._looks = looks
        self._apart_s = apart_s
        self._waits = waits
        self._ask = ask
        self._computed = computed
        self._on_look = on_look
        self._armed = False
        self._event = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="drumline-core-watch", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """Somebody waits from now on. Any thread."""
        if not self._armed:
            self._armed = True
            self._event.set()

    def on_beat(self, beat: Beat) -> None:
        """An answer. Any thread."""
        with self._lock:
            if beat.number == self._number:
                self._looks.answered(beat.turns, beat.where, time.monotonic())

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        self._event.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self._over.is_set():
            self._event.wait(ASLEEP_S)
            self._event.clear()
            while self._waits() and not self._over.is_set():
                self._look()
                self._over.wait(self._apart_s)
            with self._lock:
                self._looks.reset()
            self._armed = False
            if self._waits():  # looked at after that store: who waits does both the other way round
                self.arm()

    def _look(self) -> None:
        with self._lock:
            found = self._looks.look(time.monotonic())
        self._on_look(found)
        with self._lock:
            self._number += 1
            self._looks.asked(self._computed(), time.monotonic(), apart_s=self._apart_s)
        self._ask(self._number)
