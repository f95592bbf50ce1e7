"""The ring: messages from one writer to n readers over any writable buffer. Pure: no waiting, no system call.

Layout (cache lines of 64 bytes; every word has one writer)::

    line 0        magic, version, slot bytes, slots, readers, start     written once, by the maker
    line 1        [written] [wanted]                                    writer
    line 2 + i    [read]                                                reader i
    then          slot 0 | slot 1 | ... | slot n-1                      writer

A message takes one slot or several neighbouring ones and starts at the beginning of a slot: a head (sequence number,
kind, length), the payload, and if it takes more than one slot a tail (sequence number again). It goes on from the last
slot to the first: a reader gets such a message as a joined copy, every other one as a view of the ring.

``written`` and ``read`` count slots, modulo 2^32, and are compared by difference; they start shortly before 2^32, as
Linux does with its clock, so that the wrap is a daily event and no surprise after months. Any number of slots works,
since each side keeps its own place in the ring beside the count. Free slots: ``slots - (written - min(read))``.

Order (see fence.py). Writer: payload and head, fence, ``written``. Reader: ``written``, fence, head and payload; after
the message was decoded: fence, ``read``. The sequence number in head and tail is the count at which the message starts;
a reader that finds another one there refuses to go on: it would mean that the order above does not hold.

``wanted``: a reader that frees slots must wake a writer that waits for some, but waking it after every message would
cost two context switches a message. So a writer that finds no room sets ``wanted``, fence, looks once more; a reader
stores ``read``, fence, looks at ``wanted``. With the fences at least one of them sees the other. Whoever owns the
writer's doorbell rings it if :meth:`Message.release` says so (``on_wanted``).

Rejected: a flag for every (slot, reader) pair: n stores of the writer a message, and neighbours share cache lines.
Skipping the rest of the ring so that no message wraps: the largest message then fits only sometimes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drumline.errors import MessageTooLargeError, TransportError
from drumline.transport.fence import fence

Part = bytes | bytearray | memoryview
"""What a message is put together from: anything with a contiguous buffer."""

LINE = 64
_WORDS = LINE // 4
_MASK = 0xFFFFFFFF
_MAGIC = 0x44524D52
_VERSION = 1
_START = _MASK - 200
_GEOMETRY = struct.Struct("=6I")
_HEAD = struct.Struct("=IIQ")
_TAIL = struct.Struct("=I")
HEAD_BYTES = _HEAD.size
"""Bytes of a slot that the message's head takes."""
_WRITTEN = _WORDS
_WANTED = _WORDS + 1


@dataclass(frozen=True)
class RingLayout:
    """Sizes of one ring, in bytes where not said otherwise. ``slot_bytes`` is rounded up to whole cache lines."""

    slot_bytes: int
    slots: int
    n_readers: int

    def __post_init__(self) -> None:
        if self.slot_bytes < 1 or self.slots < 1 or self.n_readers < 1:
            raise ValueError(f"a ring has at least one slot, of one byte, and one reader: {self}")
        if self.slots > 2**30 or self.slot_bytes > 2**31:
            raise ValueError(f"this ring is too large to count: {self}")
        object.__setattr__(self, "slot_bytes", -(-self.slot_bytes // LINE) * LINE)

    @property
    def control_bytes(self) -> int:
        """Bytes before the first slot."""
        return (2 + self.n_readers) * LINE

    @property
    def data_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole ring."""
        return self.control_bytes + self.data_bytes

    @property
    def largest_message(self) -> int:
        """Payload bytes of the largest message that fits into the empty ring."""
        return self.data_bytes - _HEAD.size - (_TAIL.size if self.slots > 1 else 0)

    def slots_of(self, length: int) -> int:
        """Slots that a message of ``length`` payload bytes takes."""
        if length + _HEAD.size <= self.slot_bytes:
            return 1
        return -(-(length + _HEAD.size + _TAIL.size) // self.slot_bytes)

    def init(self, buf: memoryview, start: int = _START) -> None:
        """Write the control lines of a new ring; ``start`` is where the counters begin."""
        _GEOMETRY.pack_into(buf, 0, _MAGIC, _VERSION, self.slot_bytes, self.slots, self.n_readers, start)
        words = buf[: self.control_bytes].cast("I")
        words[_WRITTEN] = start
        words[_WANTED] = 0
        for reader in range(self.n_readers):
            words[(2 + reader) * _WORDS] = start

    @classmethod
    def of(cls, buf: memoryview) -> RingLayout:
        """Layout of a ring that somebody else made; TransportError if it is none."""
        if len(buf) < LINE:
            raise TransportError(f"no ring: only {len(buf)} bytes")
        magic, version, slot_bytes, slots, n_readers, _start = _GEOMETRY.unpack_from(buf, 0)
        if magic != _MAGIC or version != _VERSION:
            raise TransportError(f"no ring of this version: magic {magic:#x}, version {version}")
        layout = cls(slot_bytes, slots, n_readers)
        if layout.total_bytes > len(buf):
            raise TransportError(f"the ring needs {layout.total_bytes} bytes, the buffer has {len(buf)}")
        return layout


def ring_bytes(slot_bytes: int, slots: int, n_readers: int) -> int:
    """Bytes of shared memory that a ring of this shape takes."""
    return RingLayout(slot_bytes, slots, n_readers).total_bytes


def _start_of(buf: memoryview) -> int:
    start: int = _GEOMETRY.unpack_from(buf, 0)[5]
    return start


class RingWriter:
    """The writing side. One object in one process, one thread at a time.

    A thread that was told "no room" has its turn until it has written or given up: another's success in between would
    take back the wish to be woken. (With threads: one lock around the whole of ``enqueue``.)
    """

    def __init__(self, buf: memoryview, hint: str = "--mq-slots or --mq-slot-bytes") -> None:
        layout = RingLayout.of(buf)
        self.layout = layout
        self._hint = hint
        self._words = buf[: layout.control_bytes].cast("I")
        self._data = buf[layout.control_bytes : layout.total_bytes]
        self._written = self._words[_WRITTEN]
        if self._written != _start_of(buf):
            raise TransportError("this ring has had a writer before")
        self._slot_bytes, self._slots, self._data_bytes = layout.slot_bytes, layout.slots, layout.data_bytes
        self._place = 0
        self._free = layout.slots
        self._readers = range(2 * _WORDS, (2 + layout.n_readers) * _WORDS, _WORDS)

    def try_write(self, parts: Sequence[Part], kind: int = 0) -> bool:
        """Write one message if there is room; False if not, and then readers will say when they free slots.

        ``kind`` is a uint32 for the receiver. The parts are copied. MessageTooLargeError if it can never fit.
        """
        length = 0
        for part in parts:
            length += part.nbytes if type(part) is memoryview else len(part)
        slot_bytes = self._slot_bytes
        count = 1 if length + HEAD_BYTES <= slot_bytes else self.layout.slots_of(length)
        if count > self._free and not self._make_room(count, length):
            return False
        at = self._place * slot_bytes
        written = self._written
        _HEAD.pack_into(self._data, at, written, kind, length)
        if at + count * slot_bytes <= self._data_bytes:
            self._copy(at + HEAD_BYTES, parts)
            if count > 1:
                _TAIL.pack_into(self._data, at + HEAD_BYTES + length, written)
        else:
            self._copy_wrapped(at + HEAD_BYTES, [*parts, _TAIL.pack(written)])
        self._free -= count
        place = self._place + count
        self._place = place if place < self._slots else place - self._slots
        self._written = written = (written + count) & _MASK
        fence()
        self._words[_WRITTEN] = written
        return True

    def _copy(self, at: int, parts: Sequence[Part]) -> None:
        data = self._data
        for part in parts:
            if type(part) is memoryview and (part.itemsize != 1 or part.ndim != 1):
                part = part.cast("B")
            end = at + len(part)
            data[at:end] = part
            at = end

    def _copy_wrapped(self, at: int, parts: Sequence[Part]) -> None:
        data, size = self._data, self.layout.data_bytes
        for part in parts:
            view = memoryview(part).cast("B")
            done = 0
            while done < len(view):
                at %= size
                step = min(len(view) - done, size - at)
                data[at : at + step] = view[done : done + step]
                at += step
                done += step

    def _make_room(self, count: int, length: int) -> bool:
        layout = self.layout
        if count > layout.slots:
            raise MessageTooLargeError(
                f"a message of {length} bytes does not fit into this ring, whose largest is {layout.largest_message} "
                f"bytes ({layout.slots} slots of {layout.slot_bytes} bytes): make it smaller or raise {self._hint}"
            )
        words = self._words
        if self._count_free() < count:
            words[_WANTED] = 1
            fence()
            if self._count_free() < count:
                return False
        if words[_WANTED]:
            words[_WANTED] = 0
        return True

    def _count_free(self) -> int:
        written, words = self._written, self._words
        used = max((written - words[at]) & _MASK for at in self._readers)
        fence()  # what the readers did before they freed these slots comes before what is written into them
        self._free = self.layout.slots - used
        return self._free

    def backlog(self) -> list[int]:
        """For each reader the slots that it has not freed yet: who is slow, for reports."""
        return [(self._written - self._words[at]) & _MASK for at in self._readers]

    def close(self) -> None:
        """Let go of the buffer."""
        self._words.release()
        self._data.release()


class Message:
    """One received message. ``data`` is good until :meth:`release`; ``kind`` is what the writer said."""

    __slots__ = ("_count", "_reader", "data", "kind")

    def __init__(self, reader: RingReader, kind: int, data: memoryview, count: int) -> None:
        self._reader = reader
        self._count = count
        self.kind = kind
        self.data = data

    def release(self) -> None:
        """Free its slots. Idempotent.

        ``data`` raises ValueError from then on. What was decoded must hold copies: arrays and views over ``data``
        are overwritten by a later message, and only some of them can be noticed (TransportError).
        """
        if self._count:
            self._reader._release(self)

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RingReader:
    """The side of reader ``index``. One object in one process, used by one thread.

    ``on_wanted`` is called after slots were freed if the writer waits for some (it rings the writer's doorbell).
    """

    def __init__(self, buf: memoryview, index: int = 0, on_wanted: Callable[[], None] | None = None) -> None:
        layout = RingLayout.of(buf)
        if not 0 <= index < layout.n_readers:
            raise ValueError(f"this ring has readers 0 to {layout.n_readers - 1}, not {index}")
        self.layout = layout
        self._slot_bytes, self._slots = layout.slot_bytes, layout.slots
        self.index = index
        self._on_wanted = on_wanted
        self._words = buf[: layout.control_bytes].cast("I")
        self._data = buf[layout.control_bytes : layout.total_bytes]
        self._word = (2 + index) * _WORDS
        self._read = self._words[self._word]
        if self._read != _start_of(buf):
            raise TransportError(f"this ring has had a reader {index} before")
        self._place = 0
        self._current: Message | None = None

    def poll(self) -> Message | None:
        """The next message, or None. It must be released before the next call."""
        read = self._read
        if self._words[_WRITTEN] == read:
            return None
        if self._current is not None:
            raise TransportError("release a message before you take the next one")
        fence()
        at = self._place * self._slot_bytes
        sequence, kind, length = _HEAD.unpack_from(self._data, at)
        if sequence != read:
            raise TransportError(f"ring out of step: found message {sequence} in the place of {read}")
        end = at + HEAD_BYTES + length
        if length + HEAD_BYTES <= self._slot_bytes:
            message = Message(self, kind, self._data[at + HEAD_BYTES : end], 1)
        else:
            message = Message(self, kind, self._take_long(at, length), self.layout.slots_of(length))
        self._current = message
        return message

    def _take_long(self, at: int, length: int) -> memoryview:
        data, size = self._data, self.layout.data_bytes
        end = at + _HEAD.size + length
        if end + _TAIL.size <= size:
            payload, tail = data[at + _HEAD.size : end], data[end : end + _TAIL.size]
        else:
            over = end + _TAIL.size - size
            joined = memoryview(b"".join((data[at + _HEAD.size :], data[:over])))
            payload, tail = joined[:length], joined[length:]
        if _TAIL.unpack(tail)[0] != self._read:
            raise TransportError(f"ring out of step: message {self._read} has another's end")
        return payload

    def _release(self, message: Message) -> None:
        try:
            message.data.release()
        except BufferError:
            raise TransportError(
                "what was decoded from a message still refers to its place in the ring: copy it before the release"
            ) from None
        count, message._count = message._count, 0
        self._current = None
        place = self._place + count
        self._place = place if place < self._slots else place - self._slots
        self._read = read = (self._read + count) & _MASK
        words = self._words
        fence()
        words[self._word] = read
        fence()
        if words[_WANTED] and self._on_wanted is not None:
            self._on_wanted()

    def close(self) -> None:
        """Let go of the buffer. A message that was not released keeps its view."""
        self._words.release()
        self._data.release()
