"""The message queue of one machine: a ring in a memfd and the doorbells of those who wait at its ends.

    writer process                        memfd                            reader process i
    --------------                        -----                            ----------------
    try_write/enqueue(parts) --copy-->  [slots] [written] ----------->  poll() -> Message (a view)
                             --ring-->  doorbell of reader i's Waiter ->  wakes
    wakes  <-  doorbell of the writer's Waiter  <--ring, if it waits---  Message.release(): [read i]

Who makes the queue and the waiters (usually an owner, for itself and its children) hands the descriptors over by a
fork or SCM_RIGHTS. Serialisation is the codec's, once a message, however many readers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drumline.errors import RPCTimeoutError
from drumline.transport.doorbell import Doorbell
from drumline.transport.memory import SharedMemory
from drumline.transport.ring import Message, Part, RingLayout, RingReader, RingWriter
from drumline.transport.waiter import Waiter


class QueueWriter:
    """The writing end. ``bells`` are the doorbells of the readers' waiters. Not thread-safe."""

    def __init__(self, ring: RingWriter, bells: Sequence[Doorbell]) -> None:
        self._ring = ring
        self._bells = tuple(bells)

    @property
    def largest_message(self) -> int:
        """Payload bytes of the largest message."""
        return self._ring.layout.largest_message

    def try_write(self, parts: Sequence[Part], kind: int = 0) -> bool:
        """Send one message to all readers if there is room now. False if not: this writer's waiter will be rung.

        The parts are copied: the caller may change them afterwards. MessageTooLargeError if it can never fit.
        """
        if not self._ring.try_write(parts, kind):
            return False
        for bell in self._bells:
            bell.ring()
        return True

    def enqueue(
        self,
        parts: Sequence[Part],
        waiter: Waiter,
        deadline: float | None = None,
        alive: Callable[[], None] | None = None,
        kind: int = 0,
    ) -> None:
        """Send one message to all readers, waiting for room on ``waiter`` (the one whose bell the readers have).

        ``alive`` raises if waiting has no sense any more (its exception is raised here). RPCTimeoutError, naming the
        slowest reader, if there is no room by ``deadline`` (``time.monotonic()``): nothing was sent then.
        """
        if self.try_write(parts, kind):
            return

        def check() -> bool | None:
            if alive is not None:
                alive()
            return self.try_write(parts, kind) or None

        if waiter.wait(check, deadline) is None:
            backlog = self.backlog()
            raise RPCTimeoutError(
                f"no room in the message queue until the deadline: reader {backlog.index(max(backlog))} is the slowest "
                f"(slots not read yet, by reader: {backlog}, of {self._ring.layout.slots})"
            )

    def backlog(self) -> list[int]:
        """For each reader the number of slots that it has not freed yet."""
        return self._ring.backlog()

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()


class BroadcastQueue:
    """The segment of one queue. Make it, hand ``fd`` over, and take one end: :meth:`writer` or :meth:`reader`."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.layout = RingLayout.of(memory.buf)

    @classmethod
    def create(cls, name: str, slot_bytes: int, slots: int, n_readers: int = 1) -> BroadcastQueue:
        """A new queue; ``ring_bytes(slot_bytes, slots, n_readers)`` bytes of shared memory, taken as they are used."""
        layout = RingLayout(slot_bytes, slots, n_readers)
        memory = SharedMemory.create(layout.total_bytes, f"drumline-{name}")
        layout.init(memory.buf)
        return cls(memory)

    @classmethod
    def attach(cls, fd: int) -> BroadcastQueue:
        """The queue that a peer made. The descriptor stays the caller's."""
        return cls(SharedMemory.attach(fd))

    @property
    def fd(self) -> int:
        """Descriptor to hand to peers; -1 where it was attached."""
        return self._memory.fd

    def writer(self, bells: Sequence[Doorbell], hint: str = "--mq-slots or --mq-slot-bytes") -> QueueWriter:
        """The only writer. ``bells``: one for each reader; ``hint``: the flags that make this ring larger."""
        return QueueWriter(RingWriter(self._memory.buf, hint), bells)

    def reader(self, index: int = 0, writer_bell: Doorbell | None = None) -> RingReader:
        """Reader ``index``; ``writer_bell`` belongs to the waiter on which the writer waits for room."""
        return RingReader(self._memory.buf, index, writer_bell.ring if writer_bell is not None else None)

    def close(self) -> None:
        """Unmap (when the last view of a message is gone) and close the descriptor. Idempotent."""
        self._memory.close()


__all__ = ["BroadcastQueue", "Message", "QueueWriter"]
