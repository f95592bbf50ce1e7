"""The one memory fence of this package.

Everything shared between processes here is plain loads and stores through memoryviews. x86-64 keeps stores in order
and loads in order, so "data, then sequence word" just works there and hides every mistake; aarch64 may swap both. So
each protocol in this room puts :func:`fence` where an order matters, on every machine alike:

* a writer: data, **fence**, sequence word, **fence**, doorbell (a reader must not see the sequence before the data, a
  waiter not the doorbell before the sequence);
* a reader: doorbell, **fence**, sequence word, **fence**, data; and after decoding: **fence**, its own sequence word
  (the writer must not overwrite what is still being read);
* "is anybody waiting?": my store, **fence**, load of the other's flag, on both sides (Dekker). Here even x86-64 needs
  the fence, since it lets a load overtake an earlier store.

What it rests on. Python has no fence, but its locks are semaphores (``sem_post`` and ``sem_trywait``; CPython 3.13: a
sequentially consistent exchange). On aarch64 releasing ends in a store-release (STLXR or CASL) and acquiring in a
load-acquire (LDAXR or CASA). What comes before a store-release stays before it, what comes after a load-acquire stays
after it, and the architecture keeps a store-release before a later load-acquire. So **release, then acquire** of a
lock is a full fence. On x86-64 both are locked instructions, each a full fence.

Rejected: acquire, then release: what stands before may sink into the critical section, what stands after may rise into
it, and there they may swap. A C extension: a compiler at install time for one instruction. ``atomic_thread_fence`` of
libatomic through ctypes: not installed everywhere, and dearer than this. membarrier(2): tens of microseconds.

The exception: collectives (:mod:`drumline.parallel.meeting`) run between computations that empty the caches, and then a
fence costs 2 us, a third of what a small one takes in all. Where only stores among themselves and loads among
themselves must keep their order they call :func:`order`, which is nothing on x86-64.

A lock that is released twice raises, so no lock may be shared by two threads, nor by a thread and the signal handler
that interrupts it: each call takes a (held) lock from a pool. ``list.pop`` and ``list.append`` are atomic under the
GIL, and a lock belongs to one call between them.
"""

from __future__ import annotations

import platform
from _thread import LockType, allocate_lock


def _held_lock() -> LockType:
    lock = allocate_lock()
    lock.acquire()
    return lock


_pool: list[LockType] = [_held_lock()]


def fence() -> None:
    """Keep all loads and stores before the call before all those after it, as seen by every other CPU."""
    try:
        lock = _pool.pop()
    except IndexError:  # another thread, or the code that this signal handler interrupted, is inside
        lock = _held_lock()
    lock.release()
    lock.acquire()
    _pool.append(lock)


def _nothing() -> None:
    pass


order = _nothing if platform.machine() in ("x86_64", "AMD64") else fence
"""Keep stores before it before stores after it, and loads and stores after it after loads before it. A load after it
may still overtake a store before it: that takes a :func:`fence`."""
