"""The waiter: the only thing on which a thread of this program sleeps for other processes.

A process owns one waiter. Everything that it may wait for (messages on any number of rings, free slots, a cancelled
call, a request from a local thread, a death that its supervisor thread saw) is looked at by one ``check`` function,
and whoever changes any of it rings this waiter's doorbell afterwards. So one wait covers all of them.

Death sources need no support of their own: ``check`` raises, and whoever learns of the death rings.

The sleep is cut every 4 to 5 s to look again. This is a safety net that must never catch anything: ``lost_wakes``
counts the times it did, and tests hold it at 0. It is not free: after seconds of sleep caches are cold, and one look
costs some 0.3 ms of CPU; tests hold an idle process under 10 ms in 20 s. Each look comes after another time: processes
that fell asleep at the same message would all look at once, and whoever sends just then (a message every 5 s, or the
first one after a minute) would find every core busy with that.

Signals: the kernel ends the sleep, Python runs the handler when the call returns, and the loop looks again; what is
left until the deadline is computed anew each time. A signal that arrives in the instant between Python's last look and
the system call is only handled at the next wake, at most 5 s later; who cannot have that sets ``signal.set_wakeup_fd``
and lets the thread that watches it ring.

Naps end on time: the thread that takes them gives up its timer slack, 50 us by default.

Watching: before it sleeps for good, a waiter may watch the word for a while when a message is due; :mod:`spin` decides,
from what it has seen and from what the sender says (:meth:`Waiter.expect`). After a watch in vain everything is looked
at once more, since a signal handler may have run. Where there are no more cores than processes that compute, nobody
watches: who does keeps the core from the one it waits for (2 cores, one worker, back to back: 60 us with watches of 40
us, 20 without), and to yield in between forfeits the slice since Linux 6.18.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from random import uniform
from typing import TYPE_CHECKING, Any, TypeVar

from drumline.errors import ChannelClosedError
from drumline.platforms import host
from drumline.transport.doorbell import DOORBELL_BYTES, OWNER_RINGER, Doorbell
from drumline.transport.fence import no_order, order
from drumline.transport.futex import sharpen_sleeps
from drumline.transport.memory import SharedMemory
from drumline.transport.spin import SpinPredictor, from_due

if TYPE_CHECKING:
    from drumline.transport.ring import RingReader

RECHECK_S = 5.0
"""Longest sleep in seconds before the conditions are looked at again."""
LEAST_RECHECK = 0.8
"""Shortest such sleep, as a share of that."""
UNKNOWN_COMPUTING = 2
"""Processes that compute, where nobody has said how many: those at both ends."""

NEVER_S = 1e9
"""Timeouts from here on (32 years, or infinity) are no timeouts: clocks and system calls take no such times."""

T = TypeVar("T")

_thread = threading.local()
"""``sharp``: this thread has given up its timer slack. (Idents of threads are used again.)"""


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
        self._watching = threading.Lock()
        self.predictor: SpinPredictor | None = None
        """Decides about watching; None where cores are few. See :mod:`spin`."""
        self._rehearsal: Callable[[], None] | None = None
        self._came: tuple[int, int, tuple[int, int] | None] | None = None
        """The last wait, its end and when it would have watched. The predictor learns of it when the next wait begins:
        then nobody waits for that."""
        self._count_cores()
        self._draw_recheck()
        self.lost_wakes = 0
        """Times that looking again after 5 s without a ring found something: a missing ring somewhere. Must be 0."""

    def _draw_recheck(self) -> None:
        self.recheck_s = RECHECK_S * uniform(LEAST_RECHECK, 1.0)
        """Longest sleep until the next look."""

    @classmethod
    def create(cls, name: str = "waiter", computing: int = 0) -> Waiter:
        """A waiter with new memory. Also used by an owner for its child, which then attaches.

        ``computing``: how many processes of this machine compute while others wait; 0: not known, taken as 2. With no
        more cores than that, nobody watches for messages that are not just about to come.
        """
        memory = SharedMemory.create(DOORBELL_BYTES, f"drumline-{name}")
        try:
            waiter = cls(memory)
            waiter.share_cores(computing)
        except BaseException:
            memory.close()
            raise
        return waiter

    @classmethod
    def attach(cls, fd: int) -> Waiter:
        """The waiter that another process made for this one. The descriptor stays the caller's."""
        return cls(SharedMemory.attach(fd, DOORBELL_BYTES))

    def share_cores(self, computing: int) -> None:
        """Say how many processes compute on the cores that this process may use, those that it starts counted in.

        For this object, and for who attaches later, who may be bound to some of the cores.
        """
        self._bell.roomy = host.cores() > (computing or UNKNOWN_COMPUTING)
        self._count_cores()

    def _count_cores(self) -> None:
        self.predictor = SpinPredictor() if self._bell.roomy else None
        self.rehearse(self._rehearsal)

    def rehearse(self, rehearsal: Callable[[], None] | None) -> None:
        """Have this run shortly before a message is due, by the thread that waits, where there is time for it.

        See :mod:`drumline.transport.rehearsal`.
        """
        self._rehearsal = rehearsal
        if self.predictor is not None:
            self.predictor.rehearses = rehearsal is not None

    def expect(self, due: int) -> None:
        """A sender says when its next message is due (``due`` of a message). A hint: it may come at any time."""
        if self.predictor is not None:
            self.predictor.expect(from_due(due, time.perf_counter_ns()))

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

        ``check`` runs at least once, without a lock, after every ring and at least every 5 s. What it raises is raised
        here. ChannelClosedError if the waiter is closed meanwhile.
        """
        bell = self._bell
        words = bell.words
        overslept = False
        start = now = 0
        watch: tuple[int, int] | None = None
        predictor = self.predictor
        while True:
            try:
                seen = words[0]
            except ValueError:
                raise ChannelClosedError("this waiter is closed") from None
            if order is not no_order:
                order()
            if start:
                now = time.perf_counter_ns()
            result = check()
            if result is not None:
                if start:
                    self._came = start, now, watch
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
            if predictor is not None:
                if watch is not None:
                    self._watch(predictor, seen, watch, left)
                    watch = None
                    continue
                if not start:
                    start = time.perf_counter_ns()
                    ready, watch = self._nap(predictor, seen, start, left)
                    if ready:
                        continue
            whole = left == RECHECK_S
            overslept = bell.wait(seen, self.recheck_s if whole else left) and whole and bell.value() == seen
            if overslept:
                self._draw_recheck()

    def receiver(self, ring: RingReader) -> Callable[[int, int], Any] | None:
        """How to sleep here for the next message of a ring, see :meth:`RingReader.receiver`; None: in :meth:`wait`."""
        return ring.receiver(self._bell) if self.predictor is None else None

    def found_late(self, seen: int) -> None:
        """Something was found when the time for :attr:`lost_wakes` was over, and the bell had been ``seen``."""
        if self._bell.value() == seen:
            self.lost_wakes += 1

    def look(self) -> int:
        """The bell now: what is changed from here on ends a sleep that was told of it. ChannelClosedError if closed."""
        seen = self._bell.value()
        if order is not no_order:
            order()
        return seen

    def _nap(self, predictor: SpinPredictor, seen: int, start: int, left: float) -> tuple[bool, tuple[int, int] | None]:
        """Sleep until a message is nearly due. Whether to look at everything again; from when to when to watch then.

        It is looked at before the watching and not only after, so that what that needs is at hand, too.
        """
        if not self._watching.acquire(False):
            return False, None  # another thread does
        try:
            came, self._came = self._came, None
            if came is not None:
                predictor.arrived(*came)
            nap_until, watch_until = predictor.plan(start)
            if not watch_until:
                return False, None
            begin = start
            if nap_until:
                if not getattr(_thread, "sharp", False):
                    _thread.sharp = True
                    sharpen_sleeps()
                self._bell.wait(seen, min(left, (nap_until - start) / 1e9))
                begin = time.perf_counter_ns()
                if begin >= nap_until:
                    predictor.napped(nap_until, begin)
                if begin < nap_until or self._bell.value() != seen:
                    return True, None
            if predictor.rehearse and self._rehearsal is not None:
                self._run_rehearsal(predictor, self._rehearsal, seen)
            elif not nap_until:
                self._watch(predictor, seen, (begin, watch_until), left)
                return True, None
            return True, (begin, watch_until)
        finally:
            self._watching.release()

    def _watch(self, predictor: SpinPredictor, seen: int, watch: tuple[int, int], left: float) -> None:
        """Watch the word until the second time; what is paid for began at the first."""
        begin, until = watch
        if left < RECHECK_S:
            until = min(until, begin + int(left * 1e9))
        hit, now = self._look(seen, until)
        predictor.watched(now - begin, hit)

    def _run_rehearsal(self, predictor: SpinPredictor, rehearse: Callable[[], None], seen: int) -> None:
        begin = time.perf_counter_ns()
        rehearse()
        predictor.rehearsed(time.perf_counter_ns() - begin, overtaken=self._bell.value() != seen)

    def _look(self, seen: int, until: int) -> tuple[bool, int]:
        """Watch the word until then; whether it changed, and the time now."""
        words = self._bell.words
        clock = time.perf_counter_ns
        now = 0
        try:
            while words[0] == seen:
                now = clock()
                if now > until:
                    return False, now
        except ValueError:
            raise ChannelClosedError("this waiter was closed while waiting") from None
        return True, now or clock()

    def close(self) -> None:
        """Wake all who wait here with ChannelClosedError and let go of the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bell.ring()
        self._bell.close()
        self._memory.close()
