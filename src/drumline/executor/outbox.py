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
        self._calls: deque[tuple[Call, bytes]] = deque()

    def put(self, call: Call, parts: Sequence[Part]) -> None:
        """Behind all others. The parts are copied: their owner may change them."""
        data = b"".join(parts)
        self.bytes += len(data)
        self._calls.append((call, data))

    def first(self) -> tuple[Call, bytes]:
        """The one that has waited longest."""
        return self._calls[0]

    def drop_first(self) -> None:
        """It was sent, or has ended."""
        self.bytes -= len(self._calls.popleft()[1])

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
