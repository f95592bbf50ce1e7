"""Where the time of a start goes: moments in, seconds by phase out. Pure.

The phases follow each other on the way from the command to the first answer, so their seconds add up to the whole:
a phase ends when the last rank has ended it. What runs beside them (the tokenizer) is in none, unless the others wait.
"""

from __future__ import annotations

_ENGINE = (
    ("fork server", "fork server: imports"),
    ("imports", "fork server: ready"),
    ("engine core", "starting workers"),
    ("workers", "init_device"),
    ("groups", "load_model"),
    ("model", "KV cache"),
    ("KV cache", "warm-up"),
    ("warm-up", "ready"),
)
"""Phases of an engine's start, each with the moment that ends it: its interpreter, imports of torch and the model's
classes, fork of the engine core, fork of the workers, devices and process groups, weights, the pool, a first step."""


class StartMarks:
    """Moments of one start, in seconds of one clock. What changes within a phase (``load_model 40%``) is no news."""

    def __init__(self) -> None:
        self._marks: dict[str, float] = {}
        self._of_ranks: dict[tuple[str, int], float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._marks

    def mark(self, phase: str, now: float) -> None:
        """A phase begins; later moments of the same are no news."""
        self._marks.setdefault(_step(phase), now)

    def mark_rank(self, rank: int, phase: str, now: float) -> None:
        """A phase begins on one rank; it has begun when it has on the last one."""
        key = _step(phase), rank
        if key not in self._of_ranks:
            self._of_ranks[key] = now
            self._marks[key[0]] = max(now, self._marks.get(key[0], now))

    def seconds(self) -> dict[str, float]:
        """By phase, from the mark ``start`` to the last one that is known. Those that did not happen are left out."""
        found: dict[str, float] = {}
        before = self._marks["start"]
        for name, end in _ENGINE:
            if end in self._marks:
                found[name] = max(self._marks[end] - before, 0.0)
                before = max(self._marks[end], before)
        return found


def _step(phase: str) -> str:
    for name in ("fork server: imports", "load_model"):
        if phase.startswith(name):
            return name
    return phase


class FrontMarks:
    """The same for a command around an engine: what it does before, the engine's phases, and what is left then."""

    def __init__(self, process: float, command: float) -> None:
        """When the process was started, and when its first own line ran."""
        self._seconds = {"interpreter": max(command - process, 0.0)}
        self._last = max(command, process)

    def end(self, phase: str, now: float) -> None:
        """A phase that followed the one before has ended."""
        self._seconds[phase] = now - self._last
        self._last = now

    def ready(self, engine: dict[str, float], now: float) -> dict[str, float]:
        """All seconds by phase; the engine's followed the last one, and ``front end`` is what else passed till now."""
        return {**self._seconds, **engine, "front end": max(now - self._last - sum(engine.values()), 0.0)}
