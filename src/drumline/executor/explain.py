"""Who has not answered, and what each of them is doing: for the text of a timeout and for log lines of long waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from drumline.processes.linux import STATES
from drumline.processes.reports import span


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What one rank is doing, as far as can be seen from outside."""

    rank: int
    name: str
    """``Worker_TP1``."""
    pid: int
    state: str
    """State letter of its process (``R``, ``S``, ``D``, ``T``, ``Z``); empty: there is no such process."""
    call_id: int
    """The last call that it has begun; 0: none yet."""
    since: float | None
    """``time.monotonic()`` at which it began that call; None: it has ended it."""

    def who(self) -> str:
        """``rank 1 (Worker_TP1, pid 77, stopped (T))``."""
        return f"rank {self.rank} ({self.name}, pid {self.pid}, {STATES.get(self.state, self.state)})"


Look = Callable[[Iterable[int]], Sequence[Doing]]
"""What these ranks are doing now."""


def nothing_known(ranks: Iterable[int]) -> Sequence[Doing]:
    """For an executor that cannot look."""
    return ()


def unanswered(
    call_id: int, missing: Sequence[int], doings: Iterable[Doing], name_of: Callable[[int], str], now: float
) -> str:
    """One line on the ranks that have not answered a call.

    Args:
        call_id: of the call.
        missing: the ranks that have not answered it.
        doings: what they are doing; may lack some.
        name_of: the method of a call; empty: forgotten.
        now: ``time.monotonic()``.

    """
    if not missing:
        return "All ranks have answered it; it waits for an earlier call."
    known = {doing.rank: doing for doing in doings}
    ranks = (_of_rank(call_id, known[r], name_of, now) if r in known else f"rank {r}" for r in missing)
    return f"Not answered by {'; '.join(ranks)}."


def _of_rank(call_id: int, doing: Doing, name_of: Callable[[int], str], now: float) -> str:
    if doing.call_id >= call_id:
        if doing.since is None:
            return f"{doing.who()}: has ended it"
        return (
            f"{doing.who()}: running it for {span(now - doing.since)}"
            if doing.call_id == call_id
            else _busy(doing, name_of, now)
        )
    if doing.since is None:
        return f"{doing.who()}: has not read it"
    return f"{_busy(doing, name_of, now)}, has not read it"


def _busy(doing: Doing, name_of: Callable[[int], str], now: float) -> str:
    return f"{doing.who()}: {current(doing, name_of, now)}"


def current(doing: Doing, name_of: Callable[[int], str], now: float) -> str:
    """``running echo (call 12) for 3.2 s`` or ``waiting for a call``."""
    if doing.since is None:
        return "waiting for a call"
    name = name_of(doing.call_id)
    what = f"{name} (call {doing.call_id})" if name else f"call {doing.call_id}"
    return f"running {what} for {span(now - doing.since)}"
