"""The message queue of one machine: a ring in a memfd, an arena in another, and the doorbells of who waits at the ends.

    writer process                        memfds                           reader process i
    --------------                        ------                           ----------------
    try_write/enqueue(parts) --copy-->  [slots] [written] ----------->  poll() -> Message (a view)
                   (buffers) --copy-->  [blocks of the arena] ------->  Message.buffers (views where they lie)
                             --ring-->  doorbell of reader i's Waiter ->  wakes
    wakes  <-  doorbell of the writer's Waiter  <--ring, if it waits---  Message.release(): [read i]
                                                                         last view collected: [freed i]

Who makes the queue and the waiters (usually an owner, for itself and its children) hands the descriptors over by a
fork or SCM_RIGHTS. Serialisation is the codec's, once a message, however many readers there are.

**How a message goes** (order is kept, since everything has a record in the one ring):

===================================================== ==============================================================
parts and small buffers that fit into the ring        one record
buffers of 16 KiB and more                            blocks of the arena; the record says where
the arena is full                                     what fits into a quarter of the ring goes inline at once; for
                                                      more, up to 50 ms are waited for readers to let go
what does not fit into the ring in one piece          pieces, as the readers make room: any size up to ``largest``
===================================================== ==============================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter_ns

from drumline.errors import MessageTooLargeError, RPCTimeoutError
from drumline.transport.arena import ArenaLayout, ArenaReader, ArenaWriter
from drumline.transport.doorbell import Doorbell, ring_all
from drumline.transport.memory import SharedMemory
from drumline.transport.native import SMALL as NATIVE_SMALL
from drumline.transport.records import bytes_of
from drumline.transport.ring import Message, Part, Pieces, RingLayout, RingReader, RingWriter
from drumline.transport.spin import BURST_NS, Pace
from drumline.transport.waiter import Waiter

PATIENCE_S = 0.05
"""How long a large message waits for room in the arena before it goes through the ring."""


class Sending:
    """A message of any size on its way, for who has other things to wait for as well. Call :meth:`go_on` until True.

    The buffers and parts must not change until then. :meth:`close` in any case; what did not come to its end is dropped
    by the readers.
    """

    def __init__(
        self,
        ring: RingWriter,
        bells: Sequence[Doorbell],
        parts: Sequence[Part],
        kind: int,
        buffers: Sequence[Part],
        due: int,
    ) -> None:
        self._ring = ring
        self._bells = bells
        self._message = (parts, kind, buffers, due)
        self._pieces: Pieces | None = None

    @property
    def begun(self) -> bool:
        """It does not wait for the arena any more."""
        return self._pieces is not None

    def without_arena(self) -> None:
        """Wait no longer for the arena: what has no room there now goes through the ring."""
        if self._pieces is None:
            try:
                self._pieces = self._ring.start(*self._message)
            except BaseException:
                self._ring.abandon()
                raise

    def go_on(self) -> bool:
        """Send what there is room for now. True: all is sent. False: this writer's waiter will be rung.

        If it raises, the message will not be finished.
        """
        try:
            return self._go_on()
        except BaseException:
            self._ring.abandon()
            raise

    def _go_on(self) -> bool:
        pieces = self._pieces
        if pieces is None:
            pieces = self._pieces = self._ring.start_with_arena(*self._message)
            if pieces is None:
                return False
        while not pieces.done:
            if not pieces.advance():
                return False
            ring_all(self._bells)
        return True

    def close(self) -> None:
        """It will not be finished, or is. Idempotent."""
        if self._pieces is not None:
            self._pieces.close()


class QueueWriter:
    """The writing end. ``bells`` are the doorbells of the readers' waiters. Not thread-safe.

    ``largest``: most bytes of a message, buffers counted in. Without it a message must fit into the ring in one piece,
    and each of its buffers into ring or arena.
    """

    def __init__(self, ring: RingWriter, bells: Sequence[Doorbell], largest: int | None = None) -> None:
        self._ring = ring
        self._bells = tuple(bells)
        self._largest = largest
        most = ring.layout.largest_message // 4
        self.small = NATIVE_SMALL if largest is None else min(NATIVE_SMALL, most, largest)
        """Bytes up to which a message without buffers may go straight to :meth:`try_write`: it is not too large, and so
        small that no other way is better."""
        self._patience_s = PATIENCE_S
        self._send = ring.sender(self._bells)
        self._pace = Pace() if any(bell.roomy for bell in self._bells) else None
        """Tells readers that watch when the next message is due."""

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message."""
        return self._ring.layout.largest_message if self._largest is None else self._largest

    def try_write(self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[Part] = ()) -> bool:
        """Send one message to all readers if there is room now. False if not: this writer's waiter will be rung.

        Everything is copied: the caller may change it afterwards. MessageTooLargeError if it can never fit in one piece
        (:meth:`enqueue` sends it in several). See :meth:`RingWriter.try_write` for the arguments.
        """
        if buffers or len(parts) != 1:
            if buffers or bytes_of(parts) > NATIVE_SMALL:
                return self._try_write(parts, kind, buffers)
            part: Part = b"".join(parts)
        else:
            part = parts[0]
        if type(part) is bytes and len(part) <= NATIVE_SMALL:
            return self.write_small(part, kind)
        return self._try_write(parts, kind, buffers)

    def write_small(self, data: bytes, kind: int = 0) -> bool:
        """:meth:`try_write` for at most ``native.SMALL`` bytes: the way of nearly every message."""
        pace = self._pace
        due = 0
        if pace is not None:
            now = perf_counter_ns()
            if now - pace.last < BURST_NS:
                pace.last, due = now, pace.due
            else:
                due = pace.sends(now)
        if self._send is None or not self._send(data, kind, due):
            if not self._ring.try_write((data,), kind, (), due):
                return False
            ring_all(self._bells)
        if pace is not None and pace.gap:
            pace.learn()
        return True

    def _try_write(self, parts: Sequence[Part], kind: int, buffers: Sequence[Part]) -> bool:
        if not self._ring.try_write(parts, kind, buffers, self._due()):
            return False
        ring_all(self._bells)
        return True

    def _due(self) -> int:
        pace = self._pace
        if pace is None:
            return 0
        due = pace.sends(perf_counter_ns())
        if pace.gap:
            pace.learn()
        return due

    def enqueue(
        self,
        parts: Sequence[Part],
        waiter: Waiter,
        deadline: float | None = None,
        alive: Callable[[], None] | None = None,
        kind: int = 0,
        buffers: Sequence[Part] = (),
    ) -> None:
        """Send one message to all readers, waiting for room on ``waiter`` (the one whose bell the readers have).

        ``alive`` raises if waiting has no sense any more (its exception is raised here). RPCTimeoutError, naming the
        slowest reader, if there is no room by ``deadline`` (``time.monotonic()``): no reader gets any of it then.
        MessageTooLargeError for more than :attr:`largest_message` bytes.
        """
        if self._largest is not None and (
            buffers or len(parts) != 1 or type(parts[0]) is not bytes or len(parts[0]) > self.small
        ):
            size = bytes_of(parts) + (bytes_of(buffers) if buffers else 0)
            if size > self._largest:
                raise MessageTooLargeError(f"a message of {size} bytes, and the limit is {self._largest}")
            if size > self._ring.layout.largest_message // 4:
                self._enqueue_long(self.start(parts, kind, buffers), waiter, deadline, alive)
                return
        if self.try_write(parts, kind, buffers):
            return

        def check() -> bool | None:
            if alive is not None:
                alive()
            return self.try_write(parts, kind, buffers) or None

        if waiter.wait(check, deadline) is None:
            raise self._no_room()

    def _enqueue_long(
        self, sending: Sending, waiter: Waiter, deadline: float | None, alive: Callable[[], None] | None
    ) -> None:
        def go_on() -> bool | None:
            if alive is not None:
                alive()
            return sending.go_on() or None

        try:
            patience = time.monotonic() + self._patience_s
            done = waiter.wait(
                lambda: go_on() or sending.begun or None, patience if deadline is None else min(deadline, patience)
            )
            if done is None:
                self._patience_s /= 2
                sending.without_arena()
            elif self._patience_s < PATIENCE_S:
                self._patience_s = PATIENCE_S
            if waiter.wait(go_on, deadline) is None:
                raise self._no_room()
        finally:
            sending.close()

    def start(self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[Part] = ()) -> Sending:
        """Begin to send a message of any size without waiting, see :class:`Sending`. One at a time, none between."""
        return Sending(self._ring, self._bells, parts, kind, buffers, self._due())

    def _no_room(self) -> RPCTimeoutError:
        backlog = self.backlog()
        return RPCTimeoutError(
            f"no room in the message queue until the deadline: reader {backlog.index(max(backlog))} is the slowest "
            f"(slots not read yet, by reader: {backlog}, of {self._ring.layout.slots})"
        )

    @property
    def state(self) -> memoryview:
        """See :attr:`RingWriter.state`."""
        return self._ring.state

    @property
    def written(self) -> int:
        """Slots written so far, modulo 2^32, from where the ring started to count."""
        return self._ring.written

    def backlog(self) -> list[int]:
        """For each reader the number of slots that it has not freed yet."""
        return self._ring.backlog()

    def close(self) -> None:
        """Let go of ring and arena."""
        self._ring.close()


class BroadcastQueue:
    """The memory of one queue. Make it, hand ``fds`` over, and take one end: :meth:`writer` or :meth:`reader`."""

    def __init__(self, memory: SharedMemory, arena: SharedMemory | None = None, arena_fd: int = -1) -> None:
        self._memory = memory
        self._arena = arena
        self._arena_fd = arena_fd
        self.layout = RingLayout.of(memory.buf)

    @classmethod
    def create(cls, name: str, slot_bytes: int, slots: int, n_readers: int = 1, arena_bytes: int = 0) -> BroadcastQueue:
        """A new queue; ``ring_bytes(slot_bytes, slots, n_readers)`` bytes of shared memory, taken as they are used.

        ``arena_bytes``: of the arena for large buffers; 0: none, then all goes through the ring.
        """
        layout = RingLayout(slot_bytes, slots, n_readers)
        with ExitStack() as made:
            memory = SharedMemory.create(layout.total_bytes, f"drumline-{name}")
            made.callback(memory.close)
            layout.init(memory.buf)
            arena = create_arena(f"{name}-arena", arena_bytes, n_readers) if arena_bytes else None
            if arena is not None:
                made.callback(arena.close)
            queue = cls(memory, arena, arena.fd if arena is not None else -1)
            made.pop_all()
        return queue

    @classmethod
    def attach(cls, fd: int, arena_fd: int = -1) -> BroadcastQueue:
        """The queue that a peer made. The descriptors stay the caller's; the arena's until an end is taken."""
        with ExitStack() as made:
            arena = SharedMemory.attach(arena_fd) if arena_fd >= 0 else None
            if arena is not None:
                made.callback(arena.close)
            memory = SharedMemory.attach(fd)
            made.callback(memory.close)
            queue = cls(memory, arena, arena_fd)
            made.pop_all()
        return queue

    @property
    def fd(self) -> int:
        """Descriptor of the ring, to hand to peers; -1 where it was attached."""
        return self._memory.fd

    @property
    def arena_fd(self) -> int:
        """Descriptor of the arena, to hand to peers; -1 if there is none, or where it was attached."""
        return self._arena.fd if self._arena is not None else -1

    def writer(
        self,
        bells: Sequence[Doorbell],
        hint: str = "--mq-slots or --mq-slot-bytes",
        largest: int | None = None,
        names: Sequence[str] = (),
    ) -> QueueWriter:
        """The only writer. ``bells``: one for each reader; ``hint``: the flags that make this ring larger.

        ``largest``: see :class:`QueueWriter`; ``names`` of the readers, for the log.
        """
        arena = ArenaWriter(self._arena, names) if self._arena is not None else None
        return QueueWriter(RingWriter(self._memory.buf, hint, arena), bells, largest)

    def reader(self, index: int = 0, writer_bell: Doorbell | None = None) -> RingReader:
        """Reader ``index``; ``writer_bell`` belongs to the waiter on which the writer waits for room."""
        on_wanted = writer_bell.ring if writer_bell is not None else None
        arena = ArenaReader(self._arena_fd, index, on_wanted) if self._arena is not None else None
        return RingReader(self._memory.buf, index, on_wanted, arena)

    def close(self) -> None:
        """Unmap (when the last view of a message is gone) and close the descriptors. Idempotent."""
        self._memory.close()
        if self._arena is not None:
            self._arena.close()


def create_arena(name: str, data_bytes: int, n_readers: int) -> SharedMemory:
    """Memory of a new arena: an :class:`ArenaWriter` takes it, an :class:`ArenaReader` its descriptor."""
    layout = ArenaLayout(data_bytes, n_readers)
    memory = SharedMemory.create(layout.total_bytes, f"drumline-{name}")
    try:
        layout.init(memory.buf)
    except BaseException:
        memory.close()
        raise
    return memory


__all__ = ["BroadcastQueue", "Message", "QueueWriter", "create_arena"]
