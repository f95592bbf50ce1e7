"""A death source for queues without a supervisor: one thread watches descriptors and rings the waiter.

The executor has its own (:mod:`drumline.processes`: control connections, pidfds, one supervisor thread a process). Who
uses a queue alone gives a :class:`DeathWatch` the pidfds of its peers, or any descriptors that become readable when a
peer is gone (the read end of a pipe whose write end only the peer has: end of file; works without pidfds, too), and
passes :meth:`DeathWatch.alive` to whatever waits::

    with DeathWatch(waiter, {"reader 0": os.pidfd_open(pid)}) as watch:
        writer.enqueue(parts, waiter, alive=watch.alive)          # ChannelClosedError: reader 0 is gone
        waiter.wait(lambda: watch.alive() or reader.poll())

The kernel makes the descriptor readable at once; thread and waiter need another millisecond. Nothing polls.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from drumline.errors import ChannelClosedError
from drumline.transport.waiter import Waiter


class DeathWatch:
    """Watches peers by descriptor, from its own thread. The descriptors stay the caller's: open until ``close``."""

    def __init__(self, waiter: Waiter, peers: Mapping[str, int]) -> None:
        """Begin to watch.

        Args:
            waiter: rung when a peer is gone; more than one may be watched for one waiter.
            peers: name, for the error, and descriptor of each.

        """
        self._waiter = waiter
        self._names = {fd: name for name, fd in peers.items()}
        self._gone: list[str] = []
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="drumline-deaths", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._stop_read, *self._names):
            poll.register(fd, select.POLLIN)
        left = len(self._names)
        while left:
            for fd, _ in poll.poll():
                if fd == self._stop_read:
                    return
                poll.unregister(fd)
                self._gone.append(self._names[fd])
                self._waiter.ring()
                left -= 1

    @property
    def gone(self) -> tuple[str, ...]:
        """Names of the peers that are gone, in the order of their deaths."""
        return tuple(self._gone)

    def alive(self) -> None:
        """ChannelClosedError, with the name, if a peer is gone. For ``alive`` of ``enqueue``, and in checks."""
        if self._gone:
            raise ChannelClosedError(f"{self._gone[0]} is gone")

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._stop_write >= 0:
            os.close(self._stop_write)  # end of file for the thread
            self._thread.join()
            os.close(self._stop_read)
            self._stop_write = -1

    def __enter__(self) -> DeathWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
