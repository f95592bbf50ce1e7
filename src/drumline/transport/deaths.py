"""Death sources: what tells a queue that the process at its other end is gone.

A source is a descriptor that becomes readable then (a pidfd, the end of a control connection), as an object
(:class:`DeathSource`) or with a name. So whoever waits costs nothing until it happens, and nobody guesses from time
that has passed.

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
from collections.abc import Mapping, Sequence
from typing import Protocol

from drumline.errors import ChannelClosedError
from drumline.transport.service import Service
from drumline.transport.waiter import Waiter


class DeathSource(Protocol):
    """Tells of one death."""

    def fileno(self) -> int:
        """Descriptor that becomes readable when it has happened, and stays so."""

    @property
    def reason(self) -> str:
        """What to say then, such as "worker 3 was killed by SIGKILL"."""


class ProcessDeath:
    """The end of a process, by its pidfd. Close it when it is not needed any more."""

    def __init__(self, pid: int, name: str = "", pidfd: int = -1) -> None:
        """Watch ``pid``; ``pidfd`` if you have one already (it is taken over).

        ProcessLookupError if there is no such process.
        """
        self.pid = pid
        self.name = name or "process"
        self._fd = pidfd if pidfd >= 0 else os.pidfd_open(pid)

    def fileno(self) -> int:
        """The pidfd; -1 once closed."""
        return self._fd

    @property
    def reason(self) -> str:
        """Name and pid; the exit code is known to its parent only."""
        return f"{self.name} (pid {self.pid}) has died"

    def close(self) -> None:
        """Let go of the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
        self._service = Service("deaths", list(self._names), self._serve)
        self._service.start()

    def _serve(self, ready: Sequence[int]) -> None:
        for fd in ready:
            self._service.forget(fd)
            self._gone.append(self._names[fd])
            self._waiter.ring()

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
        self._service.stop()

    def __enter__(self) -> DeathWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
