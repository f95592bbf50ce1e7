"""The one memory fence of this package, and the proof that it is one.

Everything shared between processes here is plain loads and stores through memoryviews. x86-64 keeps stores in order
and loads in order, so "data, then sequence word" just works there and hides every mistake; aarch64 may swap both. So
each protocol in this room names the order that it needs, on every machine alike:

* a writer: data, **order**, sequence word, **order**, doorbell (a reader must not see the sequence before the data, a
  waiter not the doorbell before the sequence);
* a reader: doorbell, **order**, sequence word, **order**, data; and after decoding: **order**, its own sequence word
  (the writer must not overwrite what is still being read);
* "is anybody waiting?": my store, **fence**, load of the other's flag, on both sides (Dekker). Here even x86-64 needs
  the fence, since it lets a load overtake an earlier store.

:func:`fence` is the only thing that orders; :func:`order` is the same function, or nothing on machines that keep stores
among stores, loads among loads, and stores after loads by themselves (x86: TSO, Intel SDM volume 3, 9.2.2).

**The proof.** Python has no fence, but its locks are made of atomic instructions, and ``fence`` **releases** a lock
that it holds, **then acquires** it again. Releasing ends in an atomic store with release semantics, call it R;
acquiring starts with an atomic load with acquire semantics, call it A (``sem_post`` and ``sem_trywait`` of glibc; a
mutex unlocked and locked where Python has no semaphores; from CPython 3.14 on a sequentially consistent exchange).

====================== ==========================================================================================
x86, i386              each is a locked instruction, and each of these is a full fence (SDM volume 3, 9.2.3.9)
aarch64                R: STLXR or LDADDL, so its store is L. A: LDAXR or CASA, so its load is A. The architecture (ARM
                       ARM B2.3, "barrier-ordered-before"; ``aarch64.cat``: ``po; [L]``, ``[L]; po; [A]``, ``[A]; po``)
                       orders everything before R, R before A, A before everything after: a chain from any access before
                       the call to any access after it. It does not matter what the lock's other halves allow.
riscv64                R: ``.rl`` or a fence, A: ``.aq`` or a fence; RVWMO rules 5 to 7 give the same chain (RCsc)
arm                    both contain DMB, a full fence
s390x                  COMPARE AND SWAP serialises
anything else          not proven (Power: LWSYNC lets a load overtake a store): a futex call that wakes nobody instead,
                       in which the kernel has a full barrier before it looks for waiters (``smp_mb`` in kernel/futex).
                       Where there is no futex either, the lock cycle, unproven: checksums and looks still guard
====================== ==========================================================================================

Rejected: acquire, then release: what stands before may sink into the critical section, what stands after may rise into
it, and there they may swap. (Two whole lock cycles are right, since they have "release, acquire" in the middle, and
cost twice as much.) A C extension: a compiler at install time for one instruction. ``atomic_thread_fence`` of libatomic
through ctypes: not installed everywhere, and dearer than this. membarrier(2): tens of microseconds.

What no fence here has to hold back is the compiler: each access is a call into the interpreter.

A lock that is released twice raises, so no lock may be shared by two threads, nor by a thread and the signal handler
that interrupts it: each call takes a (held) lock from a pool. ``list.pop`` and ``list.append`` are atomic under the
GIL, and a lock belongs to one call between them.
"""

from __future__ import annotations

import ctypes
import platform
from _thread import LockType, allocate_lock
from collections.abc import Callable

from drumline.transport import futex

_TSO = frozenset({"x86_64", "amd64", "i386", "i486", "i586", "i686"})
_PROVEN = _TSO | {"aarch64", "arm64", "riscv64", "armv7l", "armv8l", "s390x"}


def _held_lock() -> LockType:
    lock = allocate_lock()
    lock.acquire()
    return lock


_pool: list[LockType] = [_held_lock()]


def _lock_fence() -> None:
    """Keep all loads and stores before the call before all those after it, as seen by every other CPU."""
    try:
        lock = _pool.pop()
    except IndexError:  # another thread, or the code that this signal handler interrupted, is inside
        lock = _held_lock()
    lock.release()
    lock.acquire()
    _pool.append(lock)


def _call_fence(number: int) -> Callable[[], None]:
    word = ctypes.c_uint32()
    arguments = futex.wake_arguments(number, ctypes.addressof(word))

    def fence_by_a_system_call(_word: object = word) -> None:
        futex.wake_call(*arguments)

    return fence_by_a_system_call


def no_order() -> None:
    """``order`` of machines that need none. Who is in a hurry asks ``if order is not no_order`` and makes no call."""


def fences_of(machine: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """``fence`` and ``order`` of a kind of machine, as ``platform.machine()`` calls it."""
    machine = machine.lower()
    number = None if machine in _PROVEN else futex.futex_or_none()
    full = _lock_fence if number is None else _call_fence(number)
    return full, no_order if machine in _TSO else full


fence, order = fences_of(platform.machine())
"""``fence``: all loads and stores before the call stay before all those after it, as seen by every other CPU.

``order``: stores before it stay before stores after it, and loads before it before loads and stores after it. A load
after it may still overtake a store before it: that takes a ``fence``."""
