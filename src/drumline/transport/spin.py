"""When a waiter should watch its word instead of sleeping: a predictor, pure (times go in, times come out).

Waking a sleeping thread costs 50 to 250 us where steps are milliseconds apart: the core is in a deep sleep, and caches
are cold. Who knows when the next message is due sleeps until shortly before, watches the word until shortly after, and
then sleeps for good. All times here are nanoseconds of one clock.

What it learns: medians of the last few values, and how far these are off, of the time from one arrival to the next and
of the time from the beginning of a wait to the arrival. Whoever sends at a steady pace makes the first the better
guess, whoever sends as an answer to us the second. The third guess is what the sender says
(:meth:`SpinPredictor.expect`), who knows his own pace best (:class:`Pace`): no wake-up is in his times. The guess that
is off least is used; two regular gaps are enough for each. An arrival that was slept through is taken for as much
earlier as sleeps end late here.

**Three ways to wait**: `short` (the arrival is expected within 100 us: watch at once), `nap` (sleep until shortly
before, then watch), and `sleep` (no watching: the guess is too vague, the pause too long, or the budget spent).

**The budget.** Each arrival earns ``max(1.8 % of the gap before it, min(gap, 80 us))`` of watching, gaps of 100 ms and
more earn nothing further; what was watched is paid, and without money in hand there is no watching. So steps of 10 ms
cost at most 1.8 % of a core (and 4 % at 2 ms, where a message saves more than that), and an idle process pays nothing:
after one watch that nothing came of, the wait is a plain sleep however long it lasts. After
watches in vain in a row as many waits are not watched, up to 4.

**Rehearsals.** Between a nap and the watching there may be time to run the code that the message will need
(:mod:`rehearsal`), which is cold by then. It is paid like watching, and left out where that is too dear. There is one,
too, while an answer is awaited that takes a while, if the last message is more than 1 ms ago.

**Cores.** Who watches takes a core, so this is for machines with more cores than processes that compute; the waiter
knows.

Rejected: watching for a fixed time at the start of each wait (finds nothing at 10 ms and costs 1 %); watching until the
message comes (vLLM: a core per worker); means without deviations (they watch in vain where the pace is uneven); running
means (one late message in four and the deviation is never small enough; the first regular gaps took dozens to count).
"""

from __future__ import annotations

import math
from collections import deque

SHORT_NS = 100_000
"""Arrivals expected within this are watched for at once."""
LONGEST_GAP_NS = 100_000_000
"""Pace above which nothing is watched for."""
SHARE = 0.018
"""Share of a core that may be watched away at paces of some milliseconds."""
FLOOR_NS = 80_000
"""What a gap earns at least (never more than itself)."""
SAVINGS_NS = 1_000_000
"""Most that is kept of what was earned."""
MARGIN_NS = 20_000
"""Added on both sides of the time that is watched."""
_WEIGHT = 0.25
_KEPT_VALUES = 7
_MOST_SKIPPED = 4
_MOST_LATE_NS = 500_000
_MASK = 0xFFFFFFFF
BURST_NS = 300_000
"""Messages less than this after the one before belong to it, as far as the pace is concerned."""
_COLD_NS = 1_000_000
_FIRST_REHEARSAL_NS = 30_000
_LONGEST_REHEARSAL_NS = 4_000_000
_FORGET = 0.99
_KEPT_GAPS = 5


def to_due(ns: int) -> int:
    """A time in ns as messages say it: in microseconds, modulo 2^32, never 0."""
    return ns // 1000 & _MASK or 1


def from_due(due: int, now: int) -> int:
    """The time in ns, at most 36 minutes from ``now``, that :func:`to_due` made this of."""
    ahead = (due - now // 1000) & _MASK
    return now + 1000 * (ahead if ahead < 1 << 31 else ahead - (1 << 32))


class Pace:
    """When one who sends will do so next, by the times at which he has. Messages less than 0.3 ms apart are one."""

    __slots__ = ("_gaps", "_middle", "_start", "due", "gap", "last")

    def __init__(self) -> None:
        self._gaps: deque[int] = deque(maxlen=_KEPT_GAPS)
        self._start = self._middle = 0
        self.last = 0
        """When a message went last."""
        self.due = 0
        """What the last message said."""
        self.gap = 0
        """Time before the message that went last, of which :meth:`learn` has not learnt; 0: none."""

    def sends(self, now: int) -> int:
        """A message goes now. When the next one is due (:func:`to_due`); 0: there is no pace.

        Call :meth:`learn` once it is on its way.
        """
        before, self.last = self.last, now
        if now - before < BURST_NS:
            return self.due
        self.gap = now - self._start if self._start else 0
        self._start = now
        self.due = to_due(now + self._middle) if self._middle else 0
        return self.due

    def learn(self) -> None:
        """Take the time before the last message into the pace. Apart from :meth:`sends`, so that no message waits."""
        gaps = self._gaps
        gaps.append(self.gap)
        self.gap = 0
        ordered = sorted(gaps)
        middle = ordered[len(ordered) // 2]
        spread = ordered[-2] - ordered[1] if len(ordered) > 3 else ordered[-1] - ordered[0]
        steady = len(ordered) > 1 and 8 * spread < middle < LONGEST_GAP_NS
        self._middle = middle if steady else 0


class Estimate:
    """Of a duration, in ns: the median of the last few values, and how far two thirds of them are off at most.

    So a pause, a late message or two change nothing, and a new pace is known after a few messages.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_KEPT_VALUES)

    def learn(self, value: float) -> None:
        """Take one more value in."""
        self._values.append(value)

    def guess(self) -> tuple[float, float]:
        """The next value and how far off that may be; infinite as long as there were less than two."""
        values = self._values
        count = len(values)
        if count < 2:
            return math.inf, math.inf
        middle = sorted(values)[count // 2]
        off = sorted([abs(value - middle) for value in values])
        if count < 4:
            return middle, 2 * off[-1] + middle / 256
        return middle, off[2 * count // 3]


class SpinPredictor:
    """Says how to wait, and learns from what came. One for each waiter; used by one thread at a time."""

    def __init__(self) -> None:
        self._gap = Estimate()
        self._wait = Estimate()
        self._told = Estimate()
        self._quick = math.inf
        self._late = 60_000.0
        self._arrival = 0
        self._due = 0
        self._next_due = 0
        self._seen = False
        self._savings = 0.0
        self._misses = 0
        self._skip = 0
        self._rehearsal = float(_FIRST_REHEARSAL_NS)
        self._overtaken = 0
        self.rehearses = False
        """Whoever waits has something to rehearse."""
        self.rehearse = False
        """The wait that was planned last has time for a rehearsal before it watches (:mod:`rehearsal`)."""
        self.watched_ns = 0
        """Time that was watched so far."""

    def expect(self, due: int) -> None:
        """The sender says that the next message comes at this time. Good for the next wait."""
        self._next_due = due

    def plan(self, start: int) -> tuple[int, int]:
        """For a wait that begins now: sleep until the first time, then watch until the second. (0, 0): plain sleep.

        The first time is 0 if there is nothing to sleep for before.
        """
        self._due, self._next_due = self._next_due, 0
        self._seen = self.rehearse = False
        if self._savings < MARGIN_NS:
            return 0, 0
        if self._skip:
            self._skip -= 1
            return 0, 0
        if self._quick < SHORT_NS:
            cold = start - self._arrival > _COLD_NS
            self.rehearse = self.rehearses and cold and 1.25 * self._rehearsal < min(self._quick, self._savings)
            return 0, start + int(min(self._savings, 2 * SHORT_NS))
        return self._plan_nap(start)

    def _plan_nap(self, start: int) -> tuple[int, int]:
        due, off = self._guess(start)
        if not start < due < start + LONGEST_GAP_NS:
            return 0, 0
        side = 2 * off + MARGIN_NS
        if 2 * side > self._savings:
            return 0, 0
        nap = int(due - side - self._late)
        if self.rehearses and nap - self._rehearsal > start + self._late:
            self.rehearse = 2 * side + self._rehearsal < self._savings
            if self.rehearse:
                nap -= int(self._rehearsal)
            else:
                self._rehearsal *= _FORGET  # it may have been dear only once
        if nap > start and (nap > start + self._late or due - start > self._savings):
            return nap, int(due + side)
        return 0, int(due + max(side, (due - start) / 2))  # too short for a sleep; a little late is not in vain

    def _guess(self, start: int) -> tuple[float, float]:
        """When the next message is due, and how far off that may be."""
        wait, wait_off = self._wait.guess()
        gap, gap_off = self._gap.guess()
        if self._due > start:
            told, told_off = self._told.guess()
            told_off = told + told_off if told < math.inf else FLOOR_NS / 4
            if told_off <= wait_off and told_off <= gap_off:
                return self._due, told_off
        return (start + wait, wait_off) if wait_off <= gap_off else (self._arrival + gap, gap_off)

    def napped(self, planned: int, now: int) -> None:
        """A nap that should end then ended now: learn how late sleeps end on this machine."""
        self._late += _WEIGHT * (min(max(now - planned, 0), _MOST_LATE_NS) - self._late)

    def rehearsed(self, ns: int, *, overtaken: bool) -> None:
        """A rehearsal took so long; ``overtaken``: the message came meanwhile, nobody knows when."""
        self._rehearsal += _WEIGHT * (min(ns, _LONGEST_REHEARSAL_NS) - self._rehearsal)
        self._overtaken = ns if overtaken else 0

    def watched(self, ns: int, hit: bool) -> None:
        """The word was watched for so long; ``hit``: it changed."""
        self.watched_ns += ns
        self._savings -= ns
        self._seen = hit
        if hit:
            self._misses = 0
        else:
            self._misses += 1
            self._skip = min(_MOST_SKIPPED, self._misses) if self._misses > 1 else 0

    def arrived(self, start: int, now: int, watch: tuple[int, int] | None = None) -> None:
        """What the wait that began at ``start`` was for has come now; with ``watch`` just before it was watched for."""
        if watch is not None:
            self.watched(now - watch[0], True)
        if self._overtaken:  # to take the earliest moment makes the next one early enough
            now = max(start, now - self._overtaken)
            self._overtaken = 0
        if not self._seen:
            now = max(start, now - int(self._late))
        gap = now - self._arrival
        if self._arrival:
            if gap > SHORT_NS:
                self._gap.learn(gap)
            self._savings = min(SAVINGS_NS, self._savings + max(SHARE * min(gap, LONGEST_GAP_NS), min(gap, FLOOR_NS)))
        wait = now - start
        if wait > SHORT_NS:
            self._wait.learn(wait)
            self._quick = wait if self._quick >= SHORT_NS else self._quick + _WEIGHT * (wait - self._quick)
        else:
            self._quick = wait if self._quick == math.inf else self._quick + _WEIGHT * (wait - self._quick)
        if self._due:
            self._told.learn(abs(now - self._due))
            self._due = 0
        self._arrival = now
