"""What to do when an engine dies: the decision. Pure: no clock, no I/O, no threads (``engine.recovering`` acts).

Events in: a request was :meth:`~Recovery.added`, got tokens (:meth:`~Recovery.advanced`), or is over
(:meth:`~Recovery.ended`); the engine :meth:`~Recovery.died`, or is :meth:`~Recovery.ready` again. Instructions out:
restart after some seconds, send requests (again), withdraw one, fail one, give up.

**Who is suspect.** A request that the engine had in two deaths in a row may be what kills it (it is *poisonous*). After
the next restart suspects are sent one at a time, alone. If the engine dies under one, it is named and failed, and not
sent again. If it gets ``trial_tokens`` tokens further than it was at the death, it is not what killed the engine:
outputs are a pure function of the request, so it has passed that place. It is withdrawn then, and the next one is
tried; when none is left all are sent together. Requests that were not tried wait meanwhile, as do new ones.

**When it is enough.** ``restarts`` restarts in ``window_s`` seconds; the death after these is final. Deaths under a
poisonous request are not counted once it is named. But as many named in a window, with no request that passed its
trial or ended in between, mean that the engine is broken and not the requests: that is final too. The first restart is
at once, later ones of the same window wait ``backoff_s``, then twice that, and so on up to half a minute.

Rejected: to halve the suspects instead of trying each (half as many restarts when many run, but a death under a group
would have to be counted against all of it); to try them in the engine beside the others (an innocent one could be
named).
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.config import RecoveryConfig

LONGEST_BACKOFF_S = 30.0
"""Of one wait before a restart."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to give up, and how fast to go on."""

    restarts: int = 3
    """Most restarts within ``window_s``; at least 1."""
    window_s: float = 600.0
    backoff_s: float = 1.0
    """Before the second restart of a window; doubled for each further one."""
    trial_tokens: int = 16
    """Output tokens that a suspect must get, alone, to be cleared: more than can be in flight."""

    @classmethod
    def of(cls, config: RecoveryConfig) -> Limits:
        """Those that a configuration asks for."""
        return cls(
            restarts=config.recovery_restarts, window_s=config.recovery_window_s, backoff_s=config.recovery_backoff_s
        )


@dataclass(frozen=True)
class Restart:
    """Start all processes again, ``after_s`` seconds after the old ones are gone."""

    after_s: float


@dataclass(frozen=True)
class Send:
    """The engine is to get these requests, with the tokens that they have."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Withdraw:
    """The engine is to forget this request, which is sent again later."""

    request_id: str


@dataclass(frozen=True)
class Fail:
    """This request kills the engine: it ends with an error of its own."""

    request_id: str
    deaths: int
    """Under which it was running."""


@dataclass(frozen=True)
class GiveUp:
    """No more restarts; ``why`` in words."""

    why: str


Instruction = Restart | Send | Withdraw | Fail | GiveUp


@dataclass(slots=True)
class _Life:
    """One request that is not over."""

    deaths: int = 0
    """In a row, with the engine having it."""
    sent: bool = False
    """This engine has it."""


class Recovery:
    """See the module's text."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lives: dict[str, _Life] = {}
        self._serving = True
        """The engine is ready."""
        self._given_up = False
        self._renounced = ""
        self._counted: list[float] = []
        """Times of deaths that count."""
        self._named: list[float] = []
        """Times at which poisonous requests were named since a good one."""
        self._trial: str | None = None
        self._trial_left = 0

    # state

    @property
    def settled(self) -> bool:
        """The engine is ready and has all requests, so that new ones are sent at once."""
        return self._serving and self._trial is None

    @property
    def trial(self) -> str | None:
        """The request that is tried alone."""
        return self._trial

    @property
    def seeking(self) -> bool:
        """Some request is suspect."""
        return self._trial is not None or bool(self._suspects())

    def counted(self, now: float) -> int:
        """Deaths of the window that ends now."""
        self._counted = [time for time in self._counted if now - time < self.limits.window_s]
        return len(self._counted)

    # events

    def renounce(self, why: str) -> None:
        """The next death is final, because of what somebody did; ``why`` in words."""
        self._renounced = self._renounced or why

    def added(self, request_id: str) -> bool:
        """A new request. True: send it; False: it is sent later."""
        self._lives[request_id] = _Life(sent=self.settled)
        return self.settled

    def advanced(self, request_id: str, tokens: int) -> list[Instruction]:
        """A request got new output tokens."""
        if request_id != self._trial:
            return []
        self._trial_left -= tokens
        if self._trial_left > 0:
            return []
        life = self._lives[request_id]
        life.deaths, self._named, self._trial = 0, [], None
        if self._suspects():
            life.sent = False
            return [Withdraw(request_id), *self._go_on()]
        return self._go_on()

    def ended(self, request_id: str, *, well: bool = False) -> list[Instruction]:
        """A request is over; ``well``: by its own end, not because somebody ended it. Unknown ones are ignored."""
        if self._lives.pop(request_id, None) is None:
            return []
        if well:
            self._named = []
        if request_id != self._trial:
            return []
        self._trial = None
        return self._go_on()

    def died(self, now: float) -> list[Instruction]:
        """The engine, or what was to be one, is dead."""
        if self._given_up:
            return []
        self._serving = False
        if self._renounced:
            return self._give_up(self._renounced)
        poison = self._trial
        if poison is not None:
            return self._name(poison, now)
        running = [life for life in self._lives.values() if life.sent]
        if running:  # a start that failed says nothing about requests
            for life in self._lives.values():
                life.deaths = life.deaths + 1 if life.sent else 0
                life.sent = False
        used = self.counted(now)
        self._counted.append(now)
        if used >= self.limits.restarts:
            return self._give_up(f"{used} restarts within {self.limits.window_s:g} s did not help")
        return [Restart(min(self.limits.backoff_s * 2.0 ** min(used - 1, 60), LONGEST_BACKOFF_S) if used else 0.0)]

    def ready(self) -> list[Instruction]:
        """The restarted engine is ready."""
        self._serving = True
        return self._go_on()

    # decisions

    def _suspects(self) -> list[str]:
        return [name for name, life in self._lives.items() if life.deaths >= 2]

    def _go_on(self) -> list[Instruction]:
        """Try the next suspect, or send all that wait."""
        if not self._serving:
            return []
        suspects = self._suspects()
        if suspects:
            self._trial, self._trial_left = suspects[0], self.limits.trial_tokens
            self._lives[suspects[0]].sent = True
            return [Send((suspects[0],))]
        waiting = tuple(name for name, life in self._lives.items() if not life.sent)
        for name in waiting:
            self._lives[name].sent = True
        return [Send(waiting)] if waiting else []

    def _name(self, poison: str, now: float) -> list[Instruction]:
        """The engine died under a request that was alone."""
        deaths = self._lives.pop(poison).deaths
        self._trial = None
        self._named = [time for time in self._named if now - time < self.limits.window_s] + [now]
        del self._counted[max(len(self._counted) - deaths, 0) :]
        failed = Fail(poison, deaths + 1)
        if len(self._named) >= self.limits.restarts:
            return [
                failed,
                *self._give_up(f"{len(self._named)} requests in a row killed it, each alone: it is not them"),
            ]
        return [failed, Restart(0.0)]

    def _give_up(self, why: str) -> list[Instruction]:
        self._given_up = True
        return [GiveUp(why)]
