"""The waiter: the only thing on which a thread of this program sleeps for other processes.

A process owns one waiter. Everything that it may wait for (messages on any number of rings, free slots, a cancelled
call, a request from a local thread, a death that its supervisor thread saw) is looked at by one ``check`` function,
and whoever changes any of it rings this waiter's doorbell afterwards. So one wait covers all of them.

Death sources need no support of their own: ``check`` raises, and whoever learns of the death rings.

The sleep is cut every 30 s to look again. This is a safety net that must never catch anything: ``lost_wakes`` counts
the times it did, and tests hold it at 0. It is not free: after seconds of sleep caches are cold and one look costs 0.3
to 1.6 ms of CPU, so every 5 s would be most of what an idle process may use (10 ms in 30 s).

Signals: the kernel ends the sleep, Python runs the handler when the call returns, and the loop looks again. A signal
that arrives in the instant between Python's last look and the system call is only handled at the next wake, at most
30 s later; who cannot have that sets ``signal.set_wakeup_fd`` and lets the thread that watches it ring.

Spinning: before it sleeps, a waiter may watch the word for up to 50 us, but only if the machine has more than two cores
for this process and if its last wait ended that quickly too. Steps of a model are milliseconds apart, and a spin that
does not end in a message only takes time from those who compute.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

from drumline.errors import ChannelClosedError
from drumline.transport.doorbell import DOORBELL_BYTES, OWNER_RINGER, Doorbell
from drumline.transport.fence import fence
from drumline.transport.memory import SharedMemory

RECHECK_S = 30.0
"""Longest sleep in seconds before the conditions are looked at again."""
SPIN_NS = 50_000
"""Longest time in ns that a waiter watches the word before it sleeps, on machines with more than two cores."""

NEVER_S = 1e9
"""Timeouts from here on (32 years, or infinity) are no timeouts: clocks and system calls take no such times."""

T = TypeVar("T")


def deadline_after(timeout: float | None) -> float | None:
    """``time.monotonic()`` value of a deadline ``timeout`` seconds from now; None: never.

    ValueError for what is no number of seconds (NaN, text).
    """
    if timeout is None:
        return None
    try:
        seconds = float(min(timeout, NEVER_S))  # in this order: a whole number may be too large for a float
    except TypeError:
        seconds = math.nan
    if math.isnan(seconds) or isinstance(timeout, bool):
        raise ValueError(f"a timeout is a number of seconds or None, not {timeout!r}")
    return None if seconds >= NEVER_S else time.monotonic() + seconds


class Waiter:
    """Owns one doorbell. Several threads may wait on it, each with its own ``check``.

    ``fd`` is the descriptor to hand to peers (-1 on a waiter that was attached).
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._bell = Doorbell(memory, OWNER_RINGER)
        self._closed = False
        self._spin_ns = SPIN_NS if len(os.sched_getaffinity(0)) > 2 else 0
        self._quick = False
        self.lost_wakes = 0
        """Times that looking again after 30 s without a ring found something: a missing ring somewhere. Must be 0."""

    @classmethod
    def create(cls, name: str = "waiter") -> Waiter:
        """A waiter with new memory. Also used by an owner for its child, which then attaches."""
        return cls(SharedMemory.create(DOORBELL_BYTES, f"drumline-{name}"))

    @classmethod
    def attach(cls, fd: int) -> Waiter:
        """The waiter that another process made for this one. The descriptor stays the caller's."""
        return cls(SharedMemory.attach(fd, DOORBELL_BYTES))

    @property
    def fd(self) -> int:
        """Descriptor of the doorbell's memory."""
        return self._memory.fd

    def ringer(self, ringer_id: int) -> Doorbell:
        """A ringer's side of this bell over the same mapping: for one who made the waiter for another process.

        0 is the waiting process itself (:meth:`ring`).
        """
        return Doorbell(self._memory, ringer_id)

    def ring(self) -> None:
        """Wake whoever waits here: own process, any thread, signal handlers too.

        Not for a process that made the waiter for another one: it takes a :meth:`ringer`.
        """
        self._bell.ring()

    def wait(self, check: Callable[[], T | None], deadline: float | None = None) -> T | None:
        """The first result of ``check`` that is not None; None once ``deadline`` (``time.monotonic()``) has passed.

        ``check`` runs at least once, without a lock, after every ring and about every 30 s. What it raises is raised
        here. ChannelClosedError if the waiter is closed meanwhile.
        """
        bell = self._bell
        overslept = False
        while True:
            seen = bell.value()
            fence()
            result = check()
            if result is not None:
                if overslept and bell.value() == seen:
                    self.lost_wakes += 1
                return result
            if self._closed:
                raise ChannelClosedError("this waiter was closed while waiting")
            left = RECHECK_S
            if deadline is not None:
                left = min(left, deadline - time.monotonic())
                if left <= 0:
                    return None
            overslept = self._sleep(seen, left)

    def _sleep(self, seen: int, left: float) -> bool:
        """Sleep until the word is no longer ``seen``; True if the whole 30 s passed without a ring."""
        bell = self._bell
        start = time.perf_counter_ns()
        if self._quick:
            until = start + self._spin_ns
            while time.perf_counter_ns() < until:
                if bell.value() != seen:
                    return False
        bell.wait(seen, left)
        slept_ns = time.perf_counter_ns() - start
        self._quick = slept_ns < self._spin_ns * 2
        return left == RECHECK_S and slept_ns >= RECHECK_S * 1e9 and bell.value() == seen

    def close(self) -> None:
        """Wake all who wait here with ChannelClosedError and let go of the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bell.ring()
        self._bell.close()
        self._memory.close()
