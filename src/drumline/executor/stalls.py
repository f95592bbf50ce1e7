"""When ranks hang, and which of them is odd. Pure: no clocks, no processes.

**When.** A rank has work outstanding if it has begun a call that it has not ended, or has not ended the last call that
was sent. It is *quiet* for as long as nothing that it writes has changed: the words of its progress line
(:mod:`drumline.worker.segment`), and those of its collectives (:mod:`drumline.parallel.standing`), which move within a
step. A rank that is quiet for ``limit_s`` hangs, unless

* its call may take longer: a declared one (``expected_s``, or a deadline of its own);
* it may wait for another one: some rank that is at the same call or an earlier one is not quiet. A pipeline stage waits
  as long as the stage before it computes; a rank that is at a later call explains nothing.

A rank without work outstanding cannot hang, so an idle executor, or an idle stopped worker, is none. If nobody has
looked for a while (nothing was in flight, or the whole process was stopped), silence counts from the next look on.

**Which.** Ranks that wait for others are not odd: who is waited for, and waits for nobody, is. Without any wait that
can be seen, it is whoever is behind the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from drumline.processes.linux import STATES

UNSEEN_S = 5.0
"""Looks that are further apart than this say nothing about the time between them."""


@dataclass(frozen=True)
class Seen:
    """What a look found of one rank."""

    begun: int
    """The last call that it has begun."""
    ended: int
    """The last call that it has ended."""
    sign: tuple[Hashable, ...]
    """Changes whenever the rank does anything."""

    @property
    def current(self) -> int:
        """The call that it is at: the one that it runs, or the next one."""
        return self.begun if self.begun > self.ended else self.ended + 1

    def owes(self, sent: int) -> bool:
        """It has work outstanding; ``sent``: the last call that was sent and is in flight (0: none)."""
        return self.begun > self.ended or self.ended < sent


@dataclass(frozen=True)
class Stall:
    """Ranks that are quiet for too long, or nearly."""

    ranks: tuple[int, ...]
    seconds: float
    """How long the quietest of them has been so."""
    over: bool
    """The limit is over: they hang. Else half of it is."""


class StallWatch:
    """Looks at all ranks of one executor, a few times a second while calls are in flight."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._signs: list[Hashable] = []
        self._since: list[float] = []
        self._looked = 0.0

    def look(self, ranks: Sequence[Seen], sent: int, patience: Mapping[int, float], now: float) -> Stall | None:
        """What is to be said of the ranks now.

        Args:
            ranks: all of them.
            sent: the last call that was sent and is in flight.
            patience: calls that may take longer than the limit, and how long, in seconds.
            now: ``time.monotonic()``.

        """
        if len(self._since) != len(ranks) or now - self._looked > UNSEEN_S:
            self._signs = [None] * len(ranks)
            self._since = [now] * len(ranks)
        self._looked = now
        for rank, seen in enumerate(ranks):
            if seen.sign != self._signs[rank] or not seen.owes(sent):
                self._signs[rank], self._since[rank] = seen.sign, now
        allowed = [max(self.limit_s, patience.get(seen.current, 0.0)) for seen in ranks]
        owing = [rank for rank, seen in enumerate(ranks) if seen.owes(sent)]
        for over, slack in ((True, 0.0), (False, self.limit_s / 2)):
            quiet = {rank for rank in owing if now - self._since[rank] >= allowed[rank] - slack}
            awake = [ranks[rank].current for rank in owing if rank not in quiet]
            earliest = min(awake, default=None)
            found = tuple(rank for rank in owing if rank in quiet and not _excused(ranks[rank], earliest))
            if found:
                return Stall(found, max(now - self._since[rank] for rank in found), over)
        return None

    def quiet_s(self, rank: int, now: float) -> float:
        """For how long a rank has been quiet, as far as was seen."""
        return now - self._since[rank] if rank < len(self._since) else 0.0

    def rest(self) -> None:
        """Nothing is in flight: silence counts anew."""
        self._since = []


def _excused(seen: Seen, earliest: int | None) -> bool:
    return earliest is not None and earliest <= seen.current


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What is known of a rank when it is asked who is odd."""

    rank: int
    state: str
    """State letter of its process; empty: gone."""
    begun: int
    ended: int
    waits_for: tuple[int, ...] = ()
    """Ranks that it waits for in a collective."""
    waits_in: str = ""


def odd_ranks(facts: Sequence[RankFacts]) -> list[tuple[int, str]]:
    """Ranks that keep the others waiting, and why that is thought. Empty: nothing tells them apart."""
    stopped = [(one.rank, f"is {STATES.get(one.state, one.state)}") for one in facts if one.state in ("", *"TtZXD")]
    if stopped:
        return stopped
    waiting = {one.rank: one for one in facts if one.waits_for}
    wanted: dict[int, list[RankFacts]] = {}
    for one in waiting.values():
        for other in one.waits_for:
            wanted.setdefault(other, []).append(one)
    missing = [(rank, f"does not come where {_who(by)}") for rank, by in sorted(wanted.items()) if rank not in waiting]
    if missing:
        return missing
    if waiting:
        return []  # they wait for each other in a circle
    running = [one for one in facts if one.begun > one.ended]
    done = [one for one in facts if one.begun <= one.ended]
    if done and running:
        return [(one.rank, "has not ended a call that others have") for one in running]
    last = max((one.begun for one in facts), default=0)
    behind = [one for one in facts if one.begun < last]
    return [(one.rank, "has not begun a call that others have") for one in behind]


def _who(waiting: Sequence[RankFacts]) -> str:
    ranks = ", ".join(str(one.rank) for one in waiting)
    return f"rank{'s' * (len(waiting) > 1)} {ranks} wait{'s' * (len(waiting) == 1)} ({waiting[0].waits_in})"
