"""Calls that wait for room in the broadcast ring, encoded and in order. Whoever uses it holds the sending lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from drumline.executor.future import Call
from drumline.transport import Part


class Outbox:
    """See the module's text."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes that it may hold together with answers that nobody has taken."""
        self.bytes = 0
        """Bytes of all calls in it."""
        self._calls: deque[tuple[Call, bytes, list[bytes]]] = deque()

    def put(self, call: Call, parts: Sequence[Part], buffers: Sequence[Part]) -> None:
        """Behind all others. All is copied: its owner may change it."""
        data, copies = b"".join(parts), [bytes(buffer) for buffer in buffers]
        self.bytes += len(data) + sum(map(len, copies))
        self._calls.append((call, data, copies))

    def first(self) -> tuple[Call, bytes, list[bytes]]:
        """The one that has waited longest, its parts joined, its buffers."""
        return self._calls[0]

    def drop_first(self) -> None:
        """It was sent, or has ended."""
        _, data, copies = self._calls.popleft()
        self.bytes -= len(data) + sum(map(len, copies))

    def clear(self) -> None:
        """None of them will be sent: their futures have ended."""
        self._calls.clear()
        self.bytes = 0

    def past_limit(self, held: int) -> bool:
        """Whether the calls here and ``held`` bytes of answers are more than is allowed. Any thread."""
        return held + self.bytes > self.limit

    def __len__(self) -> int:
        """Calls in it."""
        return len(self._calls)
