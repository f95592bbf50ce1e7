"""The doorbell: the one word in shared memory on which a waiting process or thread sleeps.

    ringer (any process)                                   waiter
    -------------------------------------                  ---------------------------------------
    change something (a message, a flag)                   seen = value()
    order; word = a value never seen before                order; check every condition -> nothing
    fence; if the waiter is asleep: futex(WAKE)            futex(WAIT, seen)   sleeps only if word == seen

Nothing is lost: whatever was changed before the waiter read ``seen`` is found by its check; whatever is changed later
makes the word differ from ``seen``, so that the kernel, which compares under its own lock, does not let it sleep or
finds it in the queue and wakes it. One word stands for *all* conditions; with two words (say a poison flag beside it)
the kernel would compare the wrong one, and a third of the wakes were lost when that was tried.

**Why values are unique per ringer.** Several processes ring the same bell, and Python has no atomic add on shared
memory. If each did ``word += 1``, two ringers A and B could both read 7; A stores 8 and wakes; the waiter reads
seen = 8, checks, finds A's change and not B's, which comes only now; B stores its 8 and wakes nobody, since nobody
sleeps yet; the waiter then sleeps on 8 == 8, with B's change in front of it. (And the same with an old value: a ringer
that was preempted between load and store brings back a value that the waiter has seen.) So each ringer has an id of
its own and writes ``own counter << 8 | id``: never a value that anyone has written before, in whatever order the
stores arrive. No lock is needed between processes, nor between threads of a process: the counter is an
``itertools.count``, whose ``next`` is atomic under the GIL, and a late store of a unique value is as good as an early
one. So a signal handler may ring as well. Counters have 24 bits, the last of which tells rings in Python from those in
machine code (:mod:`native`): a value comes again after 8.4 million rings of one ringer, which would have to happen
between a waiter's read and its sleep, a microsecond later. They start at a random place, so that a ringer which takes
over the id of a dead one does not repeat its values.

**A wake may be skipped, and why nothing is lost by it.** A wake that wakes nobody costs a microsecond, and with eight
readers that watch the word anyway it would cost eight a message. So who is about to sleep says so first, in a word
beside the bell that only the waiting process writes::

    ringer: word = value; fence; asleep? futex(WAKE)          waiter: asleep = 1; fence; word == seen? futex(WAIT)

Of the two fences (full ones, see :mod:`fence`) one is first. If the ringer's is, the waiter finds the new word and does
not sleep. If the waiter's is, the ringer finds ``asleep`` and wakes. (The kernel's own comparison under its lock covers
what comes between the waiter's look and its sleep.) ``asleep`` is 1 while any thread sleeps, counted under a lock of
the waiting process; a process that died asleep leaves a 1 behind, which costs calls and loses nothing. All sleepers are
woken: several threads may wait on one bell.

**Without a futex** (:mod:`futex` says where) the waiter looks at the word in naps that grow from 50 us to 10 ms: up to
10 ms later per message and about 100 looks a second when idle. Nobody needs to be woken then, and ringers do not.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Iterable

from drumline.errors import ChannelClosedError
from drumline.transport import native
from drumline.transport.fence import fence, no_order, order
from drumline.transport.futex import (
    LONGEST_WAIT_S,
    futex_number,
    futex_or_none,
    futex_wait,
    wait_arguments,
    wake_arguments,
    wake_call,
)
from drumline.transport.memory import SharedMemory

__all__ = ["DOORBELL_BYTES", "OWNER_RINGER", "Doorbell", "futex_number", "ring_all"]

DOORBELL_BYTES = 64
"""Bytes of one doorbell: a cache line. Its words: the bell, "asleep" (waiter), what the maker tells the waiter."""
OWNER_RINGER = 0
"""Ringer id of the process that waits; peers use 1 to 255, each its own."""

_ASLEEP = 1
_CORES = 2
_ROOMY, _CROWDED = 1, 2
_MASK = 0xFFFFFFFF
_SHORT_NAP_S = 50e-6
_LONG_NAP_S = 10e-3
_LONGEST_LOOK_S = 0.05
_RISE_S = 0.5
"""How long a bell that is closed waits for those who sleep on it."""
_kept: list[memoryview] = []
"""Memory of bells that somebody may still sleep on."""


class Doorbell:
    """One ringer's side of a doorbell (and, through :class:`~drumline.transport.waiter.Waiter`, the waiter's).

    ``ringer_id`` (0 to 255) belongs to one process: two processes that ring the same bell must have two ids. A forked
    child must not go on with its parent's object. Only one object of one process waits on a bell, from any number of
    threads. ``futex`` False takes the fall-back on this side; all sides of a bell must take the same.
    """

    def __init__(
        self, memory: SharedMemory, ringer_id: int, *, own_memory: bool = False, futex: bool | None = None
    ) -> None:
        if not 0 <= ringer_id <= 255:
            raise ValueError(f"a ringer id is 0 to 255, not {ringer_id}")
        self._number = futex_or_none() if futex is not False else None
        self._memory = memory
        self._own_memory = own_memory
        anchor = ctypes.c_char.from_buffer(memory.mapping())
        address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from closing; the address stays good until then
        self._wake = wake_arguments(self._number or 0, address)
        self._wait = wait_arguments(self._number or 0, address)
        self.words = memory.buf[:DOORBELL_BYTES].cast("I")
        start = int.from_bytes(os.urandom(3), "little") << 8 | ringer_id
        self._counter = itertools.count(start, native.BELL_STEP)
        self.native_address, self._native = native.words(native.BELL_WORDS)
        """Where machine code finds what it needs to ring this bell. It takes the values between the counter's."""
        self._native[native.BELL_ADDRESS], self._native[native.BELL_COUNTER] = address, start + 256
        self._native[native.BELL_FUTEX] = self._number or 0
        code = native.native() if self._number is not None else None
        self._sleep = code.sleeper(self.native_address) if code is not None else None
        self.parts = self.words, self._counter, self._wake
        """What :func:`ring_all` needs, in one look."""
        self._sleepers_lock = threading.RLock()  # a signal handler may wait, too

    @classmethod
    def attach(cls, fd: int, ringer_id: int) -> Doorbell:
        """The peer side: map the waiter's descriptor, which stays the caller's."""
        return cls(SharedMemory.attach(fd, DOORBELL_BYTES), ringer_id, own_memory=True)

    @property
    def roomy(self) -> bool:
        """Whether who waits here has cores enough to watch for messages, as far as its maker knows."""
        return self.words[_CORES] == _ROOMY

    @roomy.setter
    def roomy(self, roomy: bool) -> None:
        self.words[_CORES] = _ROOMY if roomy else _CROWDED

    @property
    def sleeps_natively(self) -> bool:
        """Whether who waits here sleeps in machine code."""
        return self._sleep is not None

    @property
    def sleepers(self) -> int:
        """How many threads of this process sleep here now, or are about to, or about to rise."""
        return self._native[native.BELL_SLEEPERS]

    def value(self) -> int:
        """The word now (uint32). Read it before you check what you wait for; ChannelClosedError once closed."""
        try:
            return self.words[0]
        except ValueError:
            raise ChannelClosedError("this doorbell is closed") from None

    def ring(self) -> None:
        """Make all changes so far visible, change the word, wake whoever sleeps on it.

        Safe from any thread and from signal handlers. Nothing happens once the doorbell is closed.
        """
        words = self.words
        order()
        try:
            words[0] = next(self._counter) & _MASK
            fence()
            if words[_ASLEEP]:
                wake_call(*self._wake)
        except ValueError:
            return

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep while the word is ``seen``, for at most ``timeout_s`` seconds. True: the time is over.

        May return early for no reason (a signal whose Python handler has run by then, another's wake): look again.
        ChannelClosedError once closed.
        """
        if timeout_s <= 0:
            return True
        if self._sleep is not None:
            how = self._sleep(seen, int(min(timeout_s, LONGEST_WAIT_S) * 1e9))
            if how:
                self._explain(how)
            return how == native.LATE
        if self._number is None:
            return self._look(seen, timeout_s)
        words, lock = self.words, self._sleepers_lock
        try:
            # What a signal handler raises in here may leave the count too high, never too low: calls for nothing
            with lock:  # two calls would be quicker, but a handler may raise between the first and its "try"
                self._native[native.BELL_SLEEPERS] += 1
                words[_ASLEEP] = 1
            try:
                fence()
                return words[0] == seen and futex_wait(self._wait, seen, timeout_s)
            finally:
                with lock:
                    self._native[native.BELL_SLEEPERS] -= 1
                    if not self._native[native.BELL_SLEEPERS]:
                        words[_ASLEEP] = 0
        except ValueError:
            raise ChannelClosedError("this doorbell is closed") from None

    @staticmethod
    def _explain(how: int) -> None:
        """Raise if a sleep ended in a way that it should not."""
        if how == native.CLOSED:
            raise ChannelClosedError("this doorbell is closed")
        if how <= native.ERRNO:
            code = native.ERRNO - how
            raise OSError(code, f"futex wait: {os.strerror(code)}")

    def _look(self, seen: int, timeout_s: float) -> bool:
        """The wait without a futex: naps. Ends early, so that what a signal handler has noted is looked at."""
        until = time.monotonic() + min(timeout_s, _LONGEST_LOOK_S)
        nap = _SHORT_NAP_S
        while self.value() == seen:
            left = until - time.monotonic()
            if left <= 0:
                return timeout_s <= _LONGEST_LOOK_S
            time.sleep(min(nap, left))
            nap = min(nap * 1.5, _LONG_NAP_S)
        return False

    def _wake_sleepers(self) -> None:
        """None of this process may be inside of ``sleep`` when the memory goes."""
        self.ring()
        deadline = time.monotonic() + _RISE_S
        while self.sleepers:
            if time.monotonic() > deadline:  # in a forked child: they are the parent's
                _kept.append(memoryview(self._memory.mapping()))
                return
            time.sleep(_SHORT_NAP_S)

    def close(self) -> None:
        """Let go of the word; the memory too, if it was attached. Idempotent. Who sleeps here is woken and awaited."""
        self._native[native.BELL_ADDRESS] = 0
        if self._sleep is not None and self.sleepers:
            self._wake_sleepers()
        self.words.release()
        self._wait = wait_arguments(self._number or 0, 0)
        if self._own_memory:
            self._memory.close()


def ring_all(bells: Iterable[Doorbell]) -> None:
    """Ring several bells with one pair of fences, which is most of what a ring costs. As :meth:`Doorbell.ring`."""
    if order is not no_order:
        order()
    for bell in bells:
        words, counter, _ = bell.parts
        try:
            words[0] = next(counter) & _MASK
        except ValueError:  # closed
            pass
    fence()
    for bell in bells:
        words, _, wake = bell.parts
        try:
            if words[_ASLEEP]:
                wake_call(*wake)
        except ValueError:
            pass
