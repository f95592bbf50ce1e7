"""Calls that wait for room in the broadcast ring, encoded and in order. Whoever uses it holds the sending lock.

The first of them is on its way as soon as there is room for some of it: a large one goes in pieces, and nothing else is
written until it is through or given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from drumline.errors import MessageTooLargeError
from drumline.executor.future import Call
from drumline.transport import Part, QueueWriter
from drumline.transport.broadcast import Sending
from drumline.transport.records import bytes_of

PATIENCE_S = 0.05
"""How long a large call waits for room in the arena before it goes through the ring."""


class Unsent:
    """One call of the outbox."""

    def __init__(self, call: Call, parts: Sequence[Part], buffers: Sequence[Part], size: int) -> None:
        self.call = call
        self.size = size
        """Bytes of it all."""
        self._parts = parts
        self._buffers = buffers
        self._sending: Sending | None = None
        self._arena_until = 0.0
        self._sent = False

    def go_on(self, queue: QueueWriter, arena_bytes: int, now: float) -> bool:
        """Send as much as there is room for. True: it is sent. False: the writer's waiter will be rung."""
        if self.size <= queue.largest_message // 4:
            before = queue.written
            try:
                self._sent = self._sent or queue.try_write(self._parts, 0, self._buffers)
            except BaseException:  # of a signal handler, perhaps after it was written: it must not be sent twice
                self._sent = queue.written != before
                raise
            return self._sent
        sending = self._sending
        if sending is None:
            sending = self._sending = queue.start(self._parts, 0, self._buffers)
            self._arena_until = now + PATIENCE_S if self.size < arena_bytes else now
        if not sending.begun and now >= self._arena_until:
            sending.without_arena()
        return sending.go_on()

    def close(self) -> None:
        """It is sent, or never will be: readers drop what they have of it."""
        if self._sending is not None:
            self._sending.close()


class Outbox:
    """See the module's text."""

    def __init__(self, limit: int, largest: int) -> None:
        self.limit = limit
        """Bytes that it may hold together with answers that nobody has taken."""
        self.bytes = 0
        """Bytes of all calls in it."""
        self._largest = largest
        self._calls: deque[Unsent] = deque()

    def check(self, parts: Sequence[Part], buffers: Sequence[Part]) -> int:
        """Bytes of a call. MessageTooLargeError if it is larger than any call may be."""
        size = bytes_of(parts) + bytes_of(buffers)
        if size > self._largest:
            raise MessageTooLargeError(f"a call of {size} bytes, and the limit is {self._largest} (--mq-largest-bytes)")
        return size

    def put(self, call: Call, parts: Sequence[Part], buffers: Sequence[Part], *, copy: bool) -> None:
        """Behind all others. MessageTooLargeError if it is larger than any call may be.

        ``copy``: the owner of the buffers may change them, since nobody waits until the call is sent.
        """
        size = self.check(parts, buffers)
        data = b"".join(parts)
        if copy:
            buffers = [bytes(buffer) for buffer in buffers]
        self.bytes += size
        self._calls.append(Unsent(call, (data,), buffers, size))

    def first(self) -> Unsent:
        """The one that has waited longest."""
        return self._calls[0]

    def has(self, call: Call) -> bool:
        """Whether this call is the newest one here."""
        return bool(self._calls) and self._calls[-1].call is call

    def drop_first(self) -> None:
        """It was sent, or has ended."""
        unsent = self._calls.popleft()
        self.bytes -= unsent.size
        unsent.close()

    def clear(self) -> None:
        """None of them will be sent: their futures have ended."""
        while self._calls:
            self.drop_first()

    def past_limit(self, held: int) -> bool:
        """Whether the calls here and ``held`` bytes of answers are more than is allowed. Any thread."""
        return held + self.bytes > self.limit

    def __len__(self) -> int:
        """Calls in it."""
        return len(self._calls)
