"""When a waiter should watch its word instead of sleeping: a predictor, pure (times go in, times come out).

Waking a sleeping thread costs 50 to 250 us where steps are milliseconds apart: the core is in a deep sleep, and caches
are cold. Who knows when the next message is due sleeps until shortly before, watches the word until shortly after, and
then sleeps for good. All times here are nanoseconds of one clock.

What it learns: two running means with their mean deviations, of the time from one arrival to the next and of the time
from the beginning of a wait to the arrival. Whoever sends at a steady pace makes the first the better guess, whoever
sends as an answer to us the second; the one that deviates less is used. If the sender has said when the next one is due
(:meth:`SpinPredictor.expect`), that is used, with the deviation that such words have had so far.

**Three ways to wait**: `short` (the arrival is expected within 100 us: watch at once), `nap` (sleep until shortly
before, then watch), and `sleep` (no watching: the guess is too vague, the pause too long, or the budget spent).

**The budget.** Each arrival earns ``max(1.2 % of the gap before it, min(gap, 80 us))`` of watching, gaps of 100 ms and
more earn nothing further; what was watched is paid, and without money in hand there is no watching. So steps of 10 ms
cost at most 1.2 % of a core (and 4 % at 2 ms, where a message saves more than that), and an idle process pays nothing:
after one watch that nothing came of, the wait is a plain sleep however long it lasts. Watches in vain in a row double
the number of waits that are not watched, up to 16.

**Pauses.** A gap far above the mean says nothing about the pace and is not learnt, unless the next one is as long.

**Cores.** Who watches takes a core, so this is for machines with more cores than processes that compute; the waiter
knows.

Rejected: watching for a fixed time at the start of each wait (finds nothing at 10 ms and costs 1 %); watching until the
message comes (vLLM: a core per worker); means without deviations (they watch in vain where the pace is uneven).
"""

from __future__ import annotations

import math

SHORT_NS = 100_000
"""Arrivals expected within this are watched for at once."""
LONGEST_GAP_NS = 100_000_000
"""Pace above which nothing is watched for."""
SHARE = 0.012
"""Share of a core that may be watched away at paces of some milliseconds."""
FLOOR_NS = 80_000
"""What a gap earns at least (never more than itself)."""
SAVINGS_NS = 1_000_000
"""Most that is kept of what was earned."""
MARGIN_NS = 15_000
"""Added on both sides of the time that is watched."""
_WEIGHT = 0.25
_MOST_SKIPPED = 16
_OUTLIER_NS = 50_000
_MOST_LATE_NS = 500_000


class Estimate:
    """Running mean and mean deviation of a duration, in ns; pauses left out."""

    __slots__ = ("_paused", "deviation", "mean")

    def __init__(self) -> None:
        self.mean = math.inf
        """Infinite until there was a value."""
        self.deviation = math.inf
        self._paused = False

    def learn(self, value: float) -> None:
        """Take one more value in."""
        if self.mean == math.inf:
            self._start(value)
            return
        if value > 4 * self.mean + SHORT_NS:
            if self._paused:
                self._start(value)
            self._paused = not self._paused
            return
        self._paused = False
        most = 3 * self.deviation + _OUTLIER_NS  # one late message does not hide the pace of the others
        error = max(-most, min(most, value - self.mean))
        self.mean += _WEIGHT * error
        self.deviation += _WEIGHT * (abs(error) - self.deviation)

    def _start(self, value: float) -> None:
        self.mean = value
        self.deviation = value / 2


class SpinPredictor:
    """Says how to wait, and learns from what came. One for each waiter; used by one thread at a time."""

    def __init__(self) -> None:
        self._gap = Estimate()
        self._wait = Estimate()
        self._hint = Estimate()
        self._late = 60_000.0
        self._arrival = 0
        self._due = 0
        self._savings = 0.0
        self._misses = 0
        self._skip = 0
        self.watched_ns = 0
        """Time that was watched so far."""

    def expect(self, due: int) -> None:
        """The sender says that the next message comes at this time. Good for one wait."""
        self._due = due

    def plan(self, start: int) -> tuple[int, int]:
        """For a wait that begins now: sleep until the first time, then watch until the second. (0, 0): plain sleep.

        The first time is 0 if there is nothing to sleep for before.
        """
        if self._savings < MARGIN_NS:
            return 0, 0
        if self._skip:
            self._skip -= 1
            return 0, 0
        wait = self._wait
        if wait.mean + wait.deviation < SHORT_NS:
            return 0, start + int(min(self._savings, SHORT_NS, wait.mean + 4 * wait.deviation + MARGIN_NS))
        return self._plan_nap(start)

    def _plan_nap(self, start: int) -> tuple[int, int]:
        due, deviation = self._guess(start)
        if not start < due < start + LONGEST_GAP_NS:
            return 0, 0
        side = 1.5 * deviation + MARGIN_NS
        if 2 * side > self._savings:
            return 0, 0
        nap = int(due - side - self._late)
        return (nap if nap > start else 0), int(due + side)

    def _guess(self, start: int) -> tuple[float, float]:
        """When the next message is due, and how far off that may be."""
        if self._due > start:
            deviation = self._hint.deviation
            return self._due, deviation if deviation < math.inf else FLOOR_NS / 4
        wait, gap = self._wait, self._gap
        if wait.deviation <= gap.deviation:
            return start + wait.mean, wait.deviation
        return self._arrival + gap.mean, gap.deviation

    def napped(self, planned: int, now: int) -> None:
        """A nap that should end then ended now: learn how late sleeps end on this machine."""
        self._late += _WEIGHT * (min(max(now - planned, 0), _MOST_LATE_NS) - self._late)

    def watched(self, ns: int, hit: bool) -> None:
        """The word was watched for so long; ``hit``: it changed."""
        self.watched_ns += ns
        self._savings -= ns
        if hit:
            self._misses = 0
        else:
            self._misses += 1
            self._skip = min(_MOST_SKIPPED, 1 << self._misses) if self._misses > 1 else 0

    def arrived(self, start: int, now: int) -> None:
        """What the wait that began at ``start`` was for has come now."""
        gap = now - self._arrival
        if self._arrival:
            self._gap.learn(gap)
            self._savings = min(SAVINGS_NS, self._savings + max(SHARE * min(gap, LONGEST_GAP_NS), min(gap, FLOOR_NS)))
        self._wait.learn(now - start)
        if self._due:
            self._hint.learn(abs(now - self._due))
            self._hint.deviation = self._hint.mean
            self._due = 0
        self._arrival = now
