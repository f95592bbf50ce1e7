"""The ring: messages from one writer to n readers over any writable buffer. Pure: no waiting, no system call.

Layout (cache lines of 64 bytes; every word has one writer)::

    line 0        magic, version, slot bytes, slots, readers, start     written once, by the maker
    line 1        [written] [wanted]                                    writer
    line 2 + i    [read]                                                reader i
    then          slot 0 | slot 1 | ... | slot n-1                      writer

A message is one record, or several if the ring cannot hold it in one piece. A record takes one slot or several
neighbouring ones and starts at the beginning of a slot: a head and its bytes. It goes on from the last slot to the
first: a reader gets such a record as a joined copy, every other one as a view of the ring. The head::

    sequence   the count of slots at which the record starts
    checksum   Adler-32 of the rest of the head and of the bytes, starting from the sequence number
    kind       the receiver's
    due        when the next message is likely to be sent, as spin.py says times; 0: the sender does not know
    length     of the bytes in this record
    buffers    how many buffers the message has; the highest bit: this record goes on with the message of the one
               before; the next: it does not have its bytes, but says in which block of the arena they are
    rest       bytes of the message that come in later records

The bytes of a message with buffers: its parts, then those buffers that are not in the arena, then a table that says for
each buffer where it is (:mod:`drumline.transport.arena`) and how long.

``written`` and ``read`` count slots, modulo 2^32, and are compared by difference; they start shortly before 2^32, as
Linux does with its clock, so that the wrap is a daily event and no surprise after months. Any number of slots works,
since each side keeps its own place in the ring beside the count. Free slots: ``slots - (written - min(read))``.

Order (see fence.py). Writer: bytes and head, order, ``written``. Reader: ``written``, order, head and bytes; after the
message was decoded: order, ``read``. A reader that finds another sequence number, or bytes that the checksum does not
fit, looks again a few times behind fences, which repairs what a weaker order would do, and counts it
(:attr:`RingReader.rereads`; tests hold it at 0). Then it refuses to go on: the order above does not hold on this
machine, or somebody wrote where he must not.

``wanted``: a reader that frees slots must wake a writer that waits for some, but waking it after every message would
cost two context switches a message. So a writer that finds no room sets ``wanted``, fence, looks once more; a reader
stores ``read``, fence, looks at ``wanted``. With the fences at least one of them sees the other. Whoever owns the
writer's doorbell rings it if :meth:`Message.release` says so (``on_wanted``).

Pieces of 64 KiB and more lie in blocks of the arena if it has room: such bytes are not summed, and copied in larger
steps. A reader copies them out at once, so the blocks are soon free again.

A message in pieces of which no end comes (its sender gave up at its deadline) is dropped by the reader when the next
one begins. The pieces are as large as what is free at that moment, half the ring at most, so that reader and writer
work at the same time and a message of any size costs about what its bytes cost.

Why Adler-32: it is as fast as CRC-32 in zlib and has no tables. Those of CRC-32 have 16 KiB, cold again after every
step of a model: 10 ms apart they cost 5 us a call, four calls a round trip.

Rejected: a flag for every (slot, reader) pair: n stores of the writer a message, and neighbours share cache lines.
Skipping the rest of the ring so that no message wraps: the largest message then fits only sometimes. A head in each
slot of a long record: every reader would have to join what it now gets as a view.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from zlib import adler32

from drumline.errors import MessageTooLargeError, TransportError
from drumline.transport import native
from drumline.transport.arena import LEAST_BYTES, ArenaReader, ArenaWriter, Block, Taking
from drumline.transport.doorbell import Doorbell
from drumline.transport.fence import fence, no_order, order
from drumline.transport.futex import futex_or_none
from drumline.transport.records import (
    CHUNK,
    COUNT,
    ENTRY,
    GOES_ON,
    HEAD,
    HEAD_BYTES,
    INLINE,
    LINE,
    MASK,
    SUMMED,
    WANTED,
    WORDS,
    WRITTEN,
    Part,
    RingLayout,
    bytes_of,
    flat,
    ring_bytes,
    start_of,
)

__all__ = ["HEAD_BYTES", "LINE", "Message", "Part", "Pieces", "RingLayout", "RingReader", "RingWriter", "ring_bytes"]

_DUE, _KIND, _WANTS = native.DUE, native.KIND, native.WANTS
_pack_head = HEAD.pack_into
_unpack_head = HEAD.unpack_from
_REREADS = 40
_CHUNK_LEAST = 65536
T = TypeVar("T")
_LARGE = 1 << 20
_KEPT = "what was decoded from a message still refers to its place in the ring: copy it before the release"


def _landing(size: int) -> memoryview:
    """Memory of this process for a message that comes in pieces."""
    if size < _LARGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)  # a page fault for each 4 KiB costs more than the copy
        except OSError:  # a kernel without
            pass
    return memoryview(memory)


class Outgoing:
    """A message with its buffers put where they go: some have blocks of the arena, the others are among the parts."""

    __slots__ = ("blocks", "count", "length", "parts", "squeezed")

    def __init__(self, parts: Sequence[Part], buffers: Sequence[Part], arena: ArenaWriter | None) -> None:
        inline: list[Part] = [*parts]
        table = bytearray()
        self.blocks: list[tuple[Block, memoryview]] = []
        self.squeezed = 0
        """Bytes that would be in the arena if there were room now."""
        for buffer in buffers:
            view = flat(buffer)
            size = len(view)
            large = arena is not None and LEAST_BYTES <= size <= arena.layout.data_bytes
            block = arena.allocate(size) if arena is not None and large else None
            if block is not None:
                table += ENTRY.pack(block.offset, size, block.index, block.generation)
                self.blocks.append((block, view))
            else:
                table += ENTRY.pack(0, size, INLINE, 0)
                inline.append(view)
                self.squeezed += size if large else 0
        inline.append(table)
        self.parts = inline if buffers else parts
        self.count = len(buffers)
        self.length = bytes_of(self.parts)


class RingWriter:
    """The writing side. One object in one process, one thread at a time.

    A thread that was told "no room" has its turn until it has written or given up: another's success in between would
    take back the wish to be woken. (With threads: one lock around the whole of ``enqueue``.)
    """

    def __init__(
        self, buf: memoryview, hint: str = "--mq-slots or --mq-slot-bytes", arena: ArenaWriter | None = None
    ) -> None:
        layout = RingLayout.of(buf)
        self.layout = layout
        self.arena = arena
        self._hint = hint
        self._words = buf[: layout.control_bytes].cast("I")
        self._data = buf[layout.control_bytes : layout.total_bytes]
        self._data_words = self._data.cast("I")
        if self._words[WRITTEN] != start_of(buf):
            raise TransportError("this ring has had a writer before")
        self._slot_bytes, self._slots, self._data_bytes = layout.slot_bytes, layout.slots, layout.data_bytes
        self._one_slot = layout.slot_bytes - HEAD_BYTES
        self._address, self._state = native.words(native.FIRST_BELL + layout.n_readers)
        native.describe(self._state, buf, layout)
        self._written = self._words[WRITTEN]
        self._free = layout.slots
        self._readers = range(2 * WORDS, (2 + layout.n_readers) * WORDS, WORDS)

    # Machine code counts here, too (see native.py), so these are in memory that it knows.

    @property
    def state(self) -> memoryview:
        """Words of :mod:`native`; COUNT is :attr:`written`."""
        return self._state

    @property
    def _place(self) -> int:
        return self._state[native.PLACE]

    @_place.setter
    def _place(self, place: int) -> None:
        self._state[native.PLACE] = place

    @property
    def _free(self) -> int:
        return self._state[native.FREE]

    @_free.setter
    def _free(self, free: int) -> None:
        self._state[native.FREE] = free

    @property
    def _written(self) -> int:
        return self._state[native.COUNT]

    @_written.setter
    def _written(self, written: int) -> None:
        self._state[native.COUNT] = written

    def sender(self, bells: Sequence[Doorbell]) -> native.Send | None:
        """``send(data, kind, due)`` in machine code, see :meth:`native.Native.sender`; None: there is none here."""
        code = native.native()
        if code is None or len(bells) > self.layout.n_readers:
            return None
        for place, bell in enumerate(bells):
            self._state[native.FIRST_BELL + place] = bell.native_address
        self._state[native.BELLS], self._state[native.FUTEX] = len(bells), futex_or_none() or 0
        return code.sender(self._address)

    def try_write(self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[Part] = (), due: int = 0) -> bool:
        """Write one message if there is room; False if not, and then readers will say when they free what it needs.

        ``kind`` is a uint32 for the receiver. Of ``buffers`` (contiguous) those of 16 KiB and more go to the arena if
        it has room, the others through the ring. ``due``: when the next message is likely to be sent
        (:func:`~drumline.transport.spin.to_due`), 0 if nobody knows. Everything is copied. MessageTooLargeError if it
        can never be written in one piece.
        """
        if buffers:
            return self._try_write_buffers(parts, kind, buffers, due)
        if len(parts) == 1:
            part = parts[0]
            length = len(part) if type(part) is bytes else flat(part).nbytes
        else:
            length = bytes_of(parts)
        if length > self._one_slot:
            count = self.layout.slots_of(length)
            if count > self._free and not self._make_room(count, length):
                return False
            self._put(parts, length, count, kind, due, 0, 0)
            return True
        if not self._free and not self._make_room(1, length):
            return False
        # From here on what _put does, for one slot, which never wraps: this is the path of nearly every message. To
        # join its parts takes less than to copy each to its place
        if len(parts) != 1:
            part = b"".join(parts)
        elif type(part) is memoryview:
            part = part.cast("B")
        place = self._place
        at = place * self._slot_bytes
        written, data = self._written, self._data
        _pack_head(data, at, written, 0, kind, due, length, 0, 0)
        begin = at + HEAD_BYTES
        end = begin + length
        data[begin:end] = part
        self._data_words[(at >> 2) + 1] = adler32(data[at + SUMMED : end], written)
        self._publish(1)
        return True

    def _publish(self, count: int) -> None:
        """A record of so many slots is in its place: readers may read it."""
        state = self._state
        place = state[native.PLACE] + count
        if place >= self._slots:
            place -= self._slots
        if order is not no_order:
            order()
        # No calls from here on: after each of them a signal handler may raise, and all of this is one act
        state[native.FREE] -= count
        state[native.PLACE] = place
        state[native.COUNT] = self._words[WRITTEN] = (state[native.COUNT] + count) & MASK

    def _try_write_buffers(self, parts: Sequence[Part], kind: int, buffers: Sequence[Part], due: int) -> bool:
        room = False
        try:
            message = self._place_buffers(parts, buffers)
            length = message.length
            if length - message.squeezed <= self.layout.largest_message < length:
                return False  # it fits once the arena has room
            count = self.layout.slots_of(length)
            room = self._make_room(count, length)
            if room:
                self.fill(message)
                self.goes(message, count)
                self._put(message.parts, length, count, kind, due, message.count, 0)
                self.sent(message)
        finally:
            self.abandon()
        return room

    def start(self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[Part] = (), due: int = 0) -> Pieces:
        """Begin to send a message of any size: see :meth:`Pieces.advance`. Nothing is in the ring yet."""
        return Pieces(self, self._place_buffers(parts, buffers), kind, due)

    def start_with_arena(
        self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[Part] = (), due: int = 0
    ) -> Pieces | None:
        """The same; None if much of it could be in the arena and has no room there now. Then a reader will ring."""
        message = self._place_buffers(parts, buffers)
        if message.squeezed > self.layout.largest_message // 4:
            self.cancel(message)
            return None
        return Pieces(self, message, kind, due)

    def _place_buffers(self, parts: Sequence[Part], buffers: Sequence[Part]) -> Outgoing:
        self.abandon()  # what an interrupt of an interrupt has left
        message = Outgoing(parts, buffers, self.arena)
        if self.arena is not None:
            if message.squeezed:
                self.arena.press(self.reads())
            else:
                self.arena.content()
        return message

    def fill(self, message: Outgoing) -> None:
        """Copy its buffers into their blocks."""
        for block, view in message.blocks:
            assert self.arena is not None
            self.arena.fill(block, view)

    def goes(self, message: Outgoing, count: int) -> None:
        """Its last record, of so many slots, is put next."""
        for block, _ in message.blocks:
            block.position = (self._written + count) & MASK

    def sent(self, message: Outgoing) -> None:
        """All of it is in the ring now."""
        for block, _ in message.blocks:
            assert self.arena is not None
            self.arena.sent(block, self._written)

    def cancel(self, message: Outgoing) -> None:
        """Give its blocks back: it was not sent, or not to its end."""
        for block, _ in message.blocks:
            assert self.arena is not None
            self.arena.cancel(block)
        message.blocks = []

    def abandon(self) -> None:
        """Give back all blocks of which no record in the ring tells: those of a message that was not sent."""
        if self.arena is not None:
            self.arena.abandon(self._written)

    def _put(
        self, parts: Sequence[Part], length: int, count: int, kind: int, due: int, buffers: int, rest: int
    ) -> None:
        """Write a record, for which there is room, and publish it."""
        at = self._place * self._slot_bytes
        written = self._written
        data = self._data
        HEAD.pack_into(data, at, written, 0, kind, due, length, buffers, rest)
        begin = at + HEAD_BYTES
        end = begin + length
        if end <= self._data_bytes:
            for part in parts:
                if type(part) is memoryview:
                    part = part.cast("B")
                data[begin : begin + len(part)] = part
                begin += len(part)
            checksum = adler32(data[at + SUMMED : end], written)
        else:
            checksum = self._copy_wrapped(at, begin, parts, written)
        self._data_words[(at >> 2) + 1] = checksum
        self._publish(count)

    def _copy_wrapped(self, start: int, at: int, parts: Sequence[Part], written: int) -> int:
        """Copy a record that goes on from the last slot to the first; its checksum."""
        data, size = self._data, self._data_bytes
        checksum = adler32(data[start + SUMMED : at], written)
        for part in parts:
            view = flat(part)
            checksum = adler32(view, checksum)
            done = 0
            while done < len(view):
                at %= size
                step = min(len(view) - done, size - at)
                data[at : at + step] = view[done : done + step]
                at += step
                done += step
        return checksum

    def _make_room(self, count: int, length: int) -> bool:
        layout = self.layout
        if count > layout.slots or length > layout.largest_message:
            raise MessageTooLargeError(
                f"a message of {length} bytes does not fit into this ring, whose largest is {layout.largest_message} "
                f"bytes ({layout.slots} slots of {layout.slot_bytes} bytes): make it smaller or raise {self._hint}"
            )
        return self.has_room(count)

    def has_room(self, count: int) -> bool:
        """Whether so many slots are free. If not, a reader that frees some will say so."""
        words = self._words
        if self._free < count and self._count_free() < count:
            words[WANTED] = 1
            fence()
            if self._count_free() < count:
                return False
        if words[WANTED]:
            words[WANTED] = 0
        return True

    def _count_free(self) -> int:
        written = self._written
        self._free = self.layout.slots - max((written - read) & MASK for read in self.reads())
        order()  # what the readers did before they freed these slots comes before what is written into them
        return self._free

    def reads(self) -> list[int]:
        """What the ring counts for each reader: the slots up to there are free."""
        words = self._words
        return [words[at] for at in self._readers]

    @property
    def written(self) -> int:
        """Slots written so far, modulo 2^32, from where the ring started to count."""
        return self._written

    def backlog(self) -> list[int]:
        """For each reader the slots that it has not freed yet: who is slow, for reports."""
        return [(self._written - read) & MASK for read in self.reads()]

    def close(self) -> None:
        """Let go of the buffers, the arena's too."""
        self._state[native.CONTROL] = 0
        self._words.release()
        self._data_words.release()
        self._data.release()
        if self.arena is not None:
            self.arena.close()


class Pieces:
    """A message on its way through the ring in several records. One that does not end is dropped by the readers."""

    def __init__(self, ring: RingWriter, message: Outgoing, kind: int, due: int) -> None:
        self._ring = ring
        self._message = message
        ring.fill(message)
        self._views = [view for part in message.parts if len(view := flat(part))]
        self._kind, self._due, self._buffers = kind, due, message.count
        self.done = False
        """All of it is in the ring, or it was closed."""
        self.rest = message.length
        """Bytes that are not in the ring yet."""

    def advance(self) -> bool:
        """Write one more piece if there is room for a reasonable one. False: none was written, a reader will ring."""
        if len(self._views) and len(self._views[0]) >= _CHUNK_LEAST and self._ring.arena is not None:
            sent = self._advance_chunk(self._ring.arena)
            if sent is not None:
                return sent
        ring = self._ring
        slots = ring.layout.slots
        needed = ring.layout.slots_of(self.rest)
        if not ring.has_room(min(needed, max(1, slots // 8))):
            return False
        count = min(needed, ring._free, max(1, slots // 2))
        length = min(self.rest, count * ring.layout.slot_bytes - HEAD_BYTES, MASK)
        self._put(self._cut(length), length, length, self._buffers)
        return True

    def _advance_chunk(self, arena: ArenaWriter) -> bool | None:
        """Write a piece into a block. None: the arena has no room for one."""
        ring = self._ring
        if not ring.has_room(ring.layout.slots_of(ENTRY.size)):
            return False
        size = min(len(self._views[0]), max(_CHUNK_LEAST, arena.layout.data_bytes // 8))
        block = arena.allocate(size)
        if block is None:
            return None
        arena.fill(block, self._cut(size)[0])
        entry = ENTRY.pack(block.offset, size, block.index, block.generation)
        block.position = (ring.written + ring.layout.slots_of(len(entry))) & MASK
        self._put([entry], len(entry), size, self._buffers | CHUNK)
        arena.sent(block, ring._written)
        return True

    def _put(self, parts: Sequence[Part], length: int, carried: int, buffers: int) -> None:
        """One record of ``length`` bytes that stands for ``carried`` bytes of the message."""
        ring = self._ring
        self.rest -= carried
        count = ring.layout.slots_of(length)
        if not self.rest:
            ring.goes(self._message, count)
        ring._put(parts, length, count, self._kind, self._due, buffers, self.rest)
        self._buffers |= GOES_ON
        if not self.rest:
            self.done = True
            ring.sent(self._message)

    def _cut(self, length: int) -> list[memoryview]:
        """The next bytes."""
        piece = []
        while length:
            view = self._views[0]
            if len(view) <= length:
                del self._views[0]
            else:
                self._views[0] = view[length:]
                view = view[:length]
            length -= len(view)
            piece.append(view)
        return piece

    def close(self) -> None:
        """No more of it will be written. If that was not its end, its blocks of the arena are free again."""
        if not self.done:
            self.done = True
            self._ring.cancel(self._message)


class Message:
    """One received message.

    ``data`` (memoryview of bytes) is good until :meth:`release`. ``kind`` is what the writer said. ``buffers`` are its
    buffers, in order, as read-only memoryviews of bytes, good for as long as anybody holds them; those that lie in the
    arena keep their block busy until then. ``due``: when the sender is likely to send the next one (see
    :meth:`Waiter.expect <drumline.transport.waiter.Waiter.expect>`); 0: it does not know.
    """

    __slots__ = ("_count", "_reader", "buffers", "data", "due", "kind", "piece")

    def __init__(self, reader: RingReader, kind: int, data: memoryview, count: int, due: int) -> None:
        self._reader = reader
        self._count = count
        self.kind = kind
        self.data = data
        self.due = due
        self.buffers: Sequence[memoryview] = ()
        self.piece: memoryview | bytes = b""
        """Its last piece, whose block it holds."""

    def release(self) -> None:
        """Free its slots, and let go of ``buffers``. Idempotent.

        ``data`` raises ValueError from then on. What was decoded must hold copies: arrays and views over ``data``
        are overwritten by a later message, and only some of them can be noticed (TransportError).
        """
        count = self._count
        if count < 0:
            return
        try:
            self.data.release()
        except BufferError:
            raise TransportError(_KEPT) from None
        self._reader._advance(count, self)
        self.buffers = ()

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RingReader:
    """The side of reader ``index``. One object in one process, used by one thread.

    ``on_wanted`` is called after slots were freed if the writer waits for some (it rings the writer's doorbell).
    """

    def __init__(
        self,
        buf: memoryview,
        index: int = 0,
        on_wanted: Callable[[], None] | None = None,
        arena: ArenaReader | None = None,
    ) -> None:
        layout = RingLayout.of(buf)
        if not 0 <= index < layout.n_readers:
            raise ValueError(f"this ring has readers 0 to {layout.n_readers - 1}, not {index}")
        self.layout = layout
        self._slot_bytes, self._slots, self._data_bytes = layout.slot_bytes, layout.slots, layout.data_bytes
        self._one_slot = layout.slot_bytes - HEAD_BYTES
        self.index = index
        self._on_wanted = on_wanted
        self._arena = arena
        self._words = buf[: layout.control_bytes].cast("I")
        self._data = buf[layout.control_bytes : layout.total_bytes]
        self._word = (2 + index) * WORDS
        if self._words[self._word] != start_of(buf):
            raise TransportError(f"this ring has had a reader {index} before")
        self._address, self._state = native.words(native.READER_WORDS)
        native.describe(self._state, buf, layout)
        self._state[native.OWN_WORD] = self._word
        self._read = self._words[self._word]
        code = native.native()
        self._native_take = code.taker(self._address) if code is not None else None
        self.on_due: Callable[[int], None] | None = None
        """Told when the next message is due, by each message that says it."""
        self.current: Message | None = None
        """The one that must be released before the next is taken."""
        self._partial: memoryview | None = None
        self._filled = 0
        self._taking: Taking | None = None
        """Blocks of the record that is read now."""
        self._own: Message | None = None
        """The one that :meth:`receive` has to release."""
        self.rereads = 0
        """Times that a record was not right at first look. Must be 0."""

    @property
    def _place(self) -> int:
        return self._state[native.PLACE]

    @_place.setter
    def _place(self, place: int) -> None:
        self._state[native.PLACE] = place

    @property
    def _read(self) -> int:
        return self._state[native.COUNT]

    @_read.setter
    def _read(self, read: int) -> None:
        self._state[native.COUNT] = read

    def receive(self, decode: Callable[[int, memoryview, Sequence[memoryview]], T]) -> tuple[T] | None:
        """What ``decode(kind, data, buffers)`` makes of the next message, which is released then; None: none is there.

        As :meth:`poll`, decode and :meth:`Message.release`, in one step. What ``decode`` raises is raised, and the
        message is gone. It must not use this reader, nor keep ``data``.
        """
        take = self._native_take
        if take is not None and self.current is None:
            found = take()
            if found is None:
                return None
            if type(found) is bytes:
                return (self.taken(found, decode),)
            if found == native.WRONG:
                self.rereads += 1
        return self._receive(decode)

    def taken(self, found: bytes, decode: Callable[[int, memoryview, Sequence[memoryview]], T]) -> T:
        """What ``decode`` makes of a message that machine code has just taken."""
        self._partial = None
        state = self._state
        if state[_WANTS] and self._on_wanted is not None:
            self._on_wanted()
        due = state[_DUE]
        if due and self.on_due is not None:
            self.on_due(due)
        return decode(state[_KIND], memoryview(found), ())

    def receiver(self, bell: Doorbell) -> native.Receive | None:
        """``receive(seen, nanoseconds)`` in machine code, see :meth:`native.Native.receiver`; None: there is none here.

        Not while a message that was polled is not released. What it has taken goes to :meth:`taken`.
        """
        code = native.native()
        if code is None or not bell.sleeps_natively:
            return None
        self._state[native.READER_BELL] = bell.native_address
        return code.receiver(self._address)

    def _receive(self, decode: Callable[[int, memoryview, Sequence[memoryview]], T]) -> tuple[T] | None:
        if self._own is not None:
            self._own.release()  # an exception came before that
        read = self._read
        if self._words[WRITTEN] == read:
            return None
        if self.current is None:
            if order is not no_order:
                order()
            data = self._data
            place = self._place
            at = place * self._slot_bytes
            sequence, checksum, kind, due, length, buffers, rest = _unpack_head(data, at)
            if length <= self._one_slot and not buffers and not rest and sequence == read:
                end = at + HEAD_BYTES + length
                if adler32(data[at + SUMMED : end], read) == checksum:
                    self._partial = None
                    if due and self.on_due is not None:
                        self.on_due(due)
                    payload = data[at + HEAD_BYTES : end]
                    try:
                        return (decode(kind, payload, ()),)
                    finally:
                        kept = False
                        try:
                            payload.release()
                        except BufferError:
                            kept = True
                        self._advance(1)
                        if kept:
                            raise TransportError(_KEPT)
        message = self.poll()
        if message is None:
            return None
        self._own = message
        try:
            return (decode(message.kind, message.data, message.buffers),)
        finally:
            message.release()

    def has_next(self) -> bool:
        """Something is there to read."""
        return self._words[WRITTEN] != self._read

    def poll(self) -> Message | None:
        """The next message, or None. It must be released before the next call.

        TransportError if what is in the ring is not what a writer of this ring writes.
        """
        while True:
            read = self._read
            if self._words[WRITTEN] == read:
                return None
            if self.current is not None:
                raise TransportError("release a message before you take the next one")
            order()
            data = self._data
            at = self._place * self._slot_bytes
            sequence, checksum, kind, due, length, buffers, rest = _unpack_head(data, at)
            end = at + HEAD_BYTES + length
            if sequence == read and end <= self._data_bytes and adler32(data[at + SUMMED : end], read) == checksum:
                payload = data[at + HEAD_BYTES : end]
            else:
                kind, due, length, buffers, rest, payload = self._look_again(at)
            count = 1 if length <= self._one_slot else self.layout.slots_of(length)
            self._taking = None  # if there is one, an exception has ended it: all of this record is taken anew
            if due and not rest and self.on_due is not None:
                self.on_due(due)
            if not (buffers or rest):
                message = Message(self, kind, payload, count, due)
                self._partial = None
                self.current = message
                return message
            found = self._take_piece(kind, due, payload, count, buffers, rest)
            if found is not None:
                self.current = found
                return found

    def _look_again(self, at: int) -> tuple[int, int, int, int, int, memoryview]:
        """A record that goes on from the last slot to the first, or that was not right at first look."""
        for attempt in range(_REREADS):
            sequence, checksum, kind, due, length, buffers, rest = HEAD.unpack_from(self._data, at)
            if length <= self.layout.largest_message and sequence == self._read:
                record = self._joined(at, HEAD_BYTES + length)
                if adler32(record[SUMMED:], sequence) == checksum:
                    if attempt or at + HEAD_BYTES + length <= self._data_bytes:
                        self.rereads += 1
                    return kind, due, length, buffers, rest, record[HEAD_BYTES:]
            fence()
            time.sleep(attempt * 5e-6)
        self.rereads += 1
        if sequence != self._read:
            raise TransportError(f"ring out of step: found message {sequence} in the place of {self._read}")
        raise TransportError(f"ring out of step: message {sequence} of {length} bytes does not fit its checksum")

    def _joined(self, at: int, length: int) -> memoryview:
        data, over = self._data, at + length - self._data_bytes
        return data[at : at + length] if over <= 0 else memoryview(b"".join((data[at:], data[:over])))

    def _take_piece(
        self, kind: int, due: int, payload: memoryview, count: int, buffers: int, rest: int
    ) -> Message | None:
        """A record that is not a whole message without buffers; None: its message is not all there yet."""
        if not buffers & GOES_ON:
            self._partial = None
            if not rest and not buffers & CHUNK:
                message = Message(self, kind, payload, count, due)
                self._find_buffers(message, buffers, own=False)
                return message
        piece = self._chunk(payload) if buffers & CHUNK else payload
        if not buffers & GOES_ON:
            self._partial = _landing(len(piece) + rest)
            self._filled = 0
        if self._partial is None or self._filled + len(piece) + rest != len(self._partial):
            raise TransportError("ring out of step: a piece of a message without the one before it")
        partial = self._partial
        filled = self._filled + len(piece)
        partial[self._filled : filled] = piece
        if rest:
            payload.release()
            self._advance(count, filled=filled)
            del piece
            return None
        message = Message(self, kind, partial.toreadonly(), count, due)
        message.piece = piece
        self._find_buffers(message, buffers & COUNT, own=True)
        return message

    def _find_buffers(self, message: Message, count: int, *, own: bool) -> None:
        """Split the bytes of a message into data and buffers. ``own``: they are not the ring's, so need no copies."""
        if not count:
            return
        whole = message.data
        table_at = len(whole) - count * ENTRY.size
        entries = list(ENTRY.iter_unpack(whole[table_at:]))
        at = table_at - sum(length for _, length, block, _ in entries if block == INLINE)
        message.data = whole[:at]
        found: list[memoryview] = []
        for offset, length, block, generation in entries:
            if block != INLINE:
                found.append(self._take_block(offset, length, block, generation))
                continue
            view = whole[at : at + length]
            found.append(view if own else memoryview(bytes(view)))
            at += length
        message.buffers = found

    def _chunk(self, payload: memoryview) -> memoryview:
        """Bytes of a record that lie in the arena."""
        return self._take_block(*ENTRY.unpack(payload))

    def _take_block(self, offset: int, length: int, block: int, generation: int) -> memoryview:
        if self._arena is None:
            raise TransportError("a message with buffers in an arena, and this reader has none")
        if self._taking is None:
            self._taking = Taking()
        return self._arena.take(offset, length, block, generation, self._taking)

    def _advance(self, count: int, message: Message | None = None, filled: int = 0) -> None:
        """Free the slots of a record: that of ``message``, or of a piece, up to which ``filled`` bytes are there."""
        words, state = self._words, self._state
        place = state[native.PLACE] + count
        if place >= self._slots:
            place -= self._slots
        read = (state[native.COUNT] + count) & MASK
        taking = self._taking
        try:
            if order is not no_order:
                order()
        finally:
            # No calls from here to the fence: after each of them a signal handler may raise, and all of this is one act
            state[native.PLACE] = place
            state[native.COUNT] = words[self._word] = read
            if taking is not None:
                taking.settled[0] = True
            self._filled = filled
            if message is not None:
                message._count = -1
                message.piece = b""
                self.current = self._own = self._partial = None
        self._taking = None
        try:
            fence()
        finally:
            if words[WANTED] and self._on_wanted is not None:
                self._on_wanted()

    def close(self) -> None:
        """Let go of the buffers, the arena's too. A message that was not released keeps its views."""
        self._state[native.CONTROL] = 0
        self._words.release()
        self._data.release()
        if self._arena is not None:
            self._arena.close()
