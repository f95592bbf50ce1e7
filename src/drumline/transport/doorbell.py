"""The doorbell: the one word in shared memory on which a waiting process or thread sleeps.

    ringer (any process)                                   waiter
    -------------------------------------                  ---------------------------------------
    change something (a message, a flag)                   seen = value()
    fence; word = a value never seen before                fence; check every condition -> nothing
    futex(WAKE)                                            futex(WAIT, seen)   sleeps only if word == seen

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
one. So a signal handler may ring as well. Counters have 24 bits: a value comes again after 16.7 million rings of one
ringer, which would have to happen between a waiter's read and its sleep, a microsecond later. They start at a random
place, so that a ringer which takes over the id of a dead one does not repeat its values.

**Wake always.** Skipping the call when nobody seems to sleep saves about a microsecond and needs a flag with a Dekker
handshake; this is left to later work. All sleepers are woken: several threads may wait on one bell.

The futex is not process-private, and it is reached through ctypes: waiting releases the GIL (``CDLL``), waking does
not (``PyDLL``: it never blocks, and giving the GIL away for it costs more than the call).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import sys
from typing import Any

from drumline.errors import ChannelClosedError, TransportError
from drumline.transport.fence import fence
from drumline.transport.memory import SharedMemory

DOORBELL_BYTES = 64
"""Bytes of one doorbell: a cache line, of which the first four bytes are the word."""
OWNER_RINGER = 0
"""Ringer id of the process that waits; peers use 1 to 255, each its own."""

_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 0x7FFFFFFF
_LONGEST_WAIT_S = 86_400.0
_QUIET = frozenset({errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})


def futex_number(system: str = sys.platform, machine: str = "", bits: int = 64 if sys.maxsize > 2**32 else 32) -> int:
    """Number of the futex system call on this machine; TransportError with the reason where it is not known."""
    machine = machine or platform.machine()
    number = _SYSCALL_NUMBERS.get(machine)
    if not system.startswith("linux") or number is None or bits != 64:
        known = ", ".join(sorted(_SYSCALL_NUMBERS))
        raise TransportError(
            f"drumline's transport needs a futex: 64-bit Linux on {known}; this is {system} on {machine}, {bits}-bit"
        )
    return number


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


_ARGUMENTS: list[Any] = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
]
_wait_call = ctypes.CDLL(None, use_errno=True).syscall
_wait_call.argtypes = _ARGUMENTS
_wait_call.restype = ctypes.c_long
_wake_call = ctypes.PyDLL(None).syscall
_wake_call.argtypes = _ARGUMENTS
_wake_call.restype = ctypes.c_long


class Doorbell:
    """One ringer's side of a doorbell (and, through :class:`~drumline.transport.waiter.Waiter`, the waiter's).

    ``ringer_id`` (0 to 255) belongs to one process: two processes that ring the same bell must have two ids. A forked
    child must not go on with its parent's object.
    """

    def __init__(self, memory: SharedMemory, ringer_id: int, *, own_memory: bool = False) -> None:
        if not 0 <= ringer_id <= 255:
            raise ValueError(f"a ringer id is 0 to 255, not {ringer_id}")
        self._number = futex_number()
        self._memory = memory
        self._own_memory = own_memory
        anchor = ctypes.c_char.from_buffer(memory.mapping())
        self._address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from closing; the address stays good until then
        self.words = memory.buf[:DOORBELL_BYTES].cast("I")
        self._id = ringer_id
        self._counter = itertools.count(int.from_bytes(os.urandom(3), "little"))

    @classmethod
    def attach(cls, fd: int, ringer_id: int) -> Doorbell:
        """The peer side: map the waiter's descriptor, which stays the caller's."""
        return cls(SharedMemory.attach(fd, DOORBELL_BYTES), ringer_id, own_memory=True)

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
        fence()
        value = (next(self._counter) & 0xFFFFFF) << 8 | self._id
        try:
            self.words[0] = value
        except ValueError:
            return
        _wake_call(self._number, self._address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep while the word is ``seen``, for at most ``timeout_s`` seconds.

        May return early for no reason (a signal whose Python handler has run by then, another's wake): look again.
        """
        if timeout_s <= 0:
            return
        timeout_s = min(timeout_s, _LONGEST_WAIT_S)
        seconds = int(timeout_s)
        timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
        if _wait_call(self._number, self._address, _FUTEX_WAIT, seen, timeout, None, 0) == -1:
            code = ctypes.get_errno()
            if code == errno.EFAULT:
                raise ChannelClosedError("this doorbell is closed")
            if code not in _QUIET:
                raise OSError(code, f"futex wait: {os.strerror(code)}")

    def close(self) -> None:
        """Let go of the word; the memory too, if it was attached. Idempotent."""
        self.words.release()
        self._address = 0
        if self._own_memory:
            self._memory.close()
