"""How busy pipeline stages are while there is work: arithmetic on what workers say. Pure: no clock.

A stage's ranks each say for how long they have computed since they were made (``Worker.busy_ns``); their mean is the
stage's. The *active* time is that with at least one step in flight. A stage that is busy for most of it is what limits
the pipeline; if all are, micro-batches overlap well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WINDOW_S = 1.0
"""The busy fraction is that of the last so many seconds of active time, at least."""


class StageLoad(NamedTuple):
    """Of all stages, in their order."""

    active_s: float = 0.0
    """Seconds with a step in flight, since the start."""
    busy_s: tuple[float, ...] = ()
    """Seconds that each stage has computed since the start."""
    fractions: tuple[float, ...] = ()
    """Busy part of the active time lately, 0 .. 1."""


class StageMeter:
    """Takes what workers say, and when steps are in flight."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._active = 0.0
        """Seconds, without the stretch that goes on."""
        self._since: float | None = None
        self._before = StageLoad(0.0, (0.0,) * stages)
        """Where the window of the fractions begins."""
        self._fractions = (0.0,) * stages

    def flying(self, some: bool, now: float) -> None:
        """Whether steps are in flight from now on."""
        if some and self._since is None:
            self._since = now
        elif not some and self._since is not None:
            self._active += now - self._since
            self._since = None

    def load(self, busy_ns: Sequence[int], now: float) -> StageLoad:
        """The load now. ``busy_ns``: of each rank, those of a stage side by side; empty: nobody says."""
        if not busy_ns:
            return StageLoad()
        active = self._active + (0.0 if self._since is None else now - self._since)
        each = len(busy_ns) // self._stages
        busy = tuple(sum(busy_ns[at : at + each]) / each / 1e9 for at in range(0, len(busy_ns), each))
        passed = active - self._before.active_s
        if passed >= WINDOW_S or self._before.active_s == 0.0 < passed:
            parts = zip(busy, self._before.busy_s, strict=True)
            self._fractions = tuple(min(max((after - before) / passed, 0.0), 1.0) for after, before in parts)
        if passed >= WINDOW_S:
            self._before = StageLoad(active, busy)
        return StageLoad(active, busy, self._fractions)
