"""A thread that sleeps on descriptors and serves them: no tick, no cost while nothing happens."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

_JOIN_S = 5.0
_LONGEST_S = 86_400.0


def milliseconds(left: float | None) -> float | None:
    """Time limit for poll(2), which knows no more than 24 days, from seconds that are left; rounded up. None: none."""
    return None if left is None else min(max(left, 0.0), _LONGEST_S) * 1000 + 1


class Service:
    """Runs ``serve(ready)`` in a daemon thread from :meth:`start` on.

    That is: at once, whenever descriptors of :meth:`watch` wake, when told to (:meth:`wake`), and at the time
    (``time.monotonic()``; None: never) that it returned last. ``ready`` are the descriptors that woke. ``end`` runs in
    the thread when it ends, or in :meth:`stop` if it never ran.
    """

    def __init__(
        self,
        name: str,
        fds: Sequence[int],
        serve: Callable[[Sequence[int]], float | None],
        end: Callable[[], None] | None = None,
    ) -> None:
        self._serve = serve
        self._end = end
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._fds = set(fds)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"drumline-{name}", daemon=True)

    def start(self) -> None:
        """Once everything that ``serve`` needs is there."""
        self._thread.start()

    def watch(self, fd: int) -> None:
        """Serve when this one is readable, too."""
        with self._lock:
            self._fds.add(fd)
        self.wake()

    def forget(self, fd: int) -> None:
        """No more. To be called before it is closed, by the service itself."""
        with self._lock:
            self._fds.discard(fd)

    def wake(self) -> None:
        """Serve now. From any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread and wait for it. Idempotent. From another thread."""
        if self._wake < 0:
            return
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        elif self._end is not None:
            self._end()
        if not self._thread.is_alive():
            os.close(self._wake)
            self._wake = -1

    def _run(self) -> None:
        ready: list[int] = []
        try:
            while not self._stopping:
                deadline = self._serve(ready)
                poll = select.poll()
                with self._lock:
                    fds = (self._wake, *self._fds)
                for fd in fds:
                    poll.register(fd, select.POLLIN)
                left = None if deadline is None else deadline - time.monotonic()
                ready = [fd for fd, _ in poll.poll(milliseconds(left))]
                if self._wake in ready:
                    ready.remove(self._wake)
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
        finally:
            if self._end is not None:
                self._end()
