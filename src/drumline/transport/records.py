"""How a ring lies in memory: its layout, and the head and the table of a record. Pure arithmetic; see :mod:`ring`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from drumline.errors import TransportError

Part = bytes | bytearray | memoryview
"""What a message is put together from: anything with a contiguous buffer."""

LINE = 64
WORDS = LINE // 4
MASK = 0xFFFFFFFF
_MAGIC = 0x44524D52
_VERSION = 2
_START = MASK - 200
GEOMETRY = struct.Struct("=6I")
HEAD = struct.Struct("=6IQ")
"""Sequence, checksum, kind, due, length, buffers, rest."""
HEAD_BYTES = HEAD.size
"""Bytes of a record that its head takes."""
SUMMED = 8
"""Where the checksummed part of a record begins: after sequence number and checksum."""
GOES_ON = 1 << 31
"""In ``buffers``: this record goes on with the message of the one before."""
CHUNK = 1 << 30
"""In ``buffers``: the bytes of this record lie in a block of the arena, and the record has an entry that says which."""
COUNT = CHUNK - 1
"""In ``buffers``: how many."""
ENTRY = struct.Struct("=QQII")
"""Of the table of buffers: offset in the arena, length, block, generation."""
INLINE = MASK
"""As block: the buffer is among the bytes of the message."""
WRITTEN = WORDS
WANTED = WORDS + 1


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
        """Payload bytes of the largest message that fits into the empty ring in one piece."""
        return min(self.data_bytes - HEAD_BYTES, MASK)

    def slots_of(self, length: int) -> int:
        """Slots that a record of ``length`` bytes takes."""
        return -(-(length + HEAD_BYTES) // self.slot_bytes)

    def init(self, buf: memoryview, start: int = _START) -> None:
        """Write the control lines of a new ring; ``start`` is where the counters begin."""
        GEOMETRY.pack_into(buf, 0, _MAGIC, _VERSION, self.slot_bytes, self.slots, self.n_readers, start)
        words = buf[: self.control_bytes].cast("I")
        words[WRITTEN] = start
        words[WANTED] = 0
        for reader in range(self.n_readers):
            words[(2 + reader) * WORDS] = start

    @classmethod
    def of(cls, buf: memoryview) -> RingLayout:
        """Layout of a ring that somebody else made; TransportError if it is none."""
        if len(buf) < LINE:
            raise TransportError(f"no ring: only {len(buf)} bytes")
        magic, version, slot_bytes, slots, n_readers, _start = GEOMETRY.unpack_from(buf, 0)
        if magic != _MAGIC or version != _VERSION:
            raise TransportError(f"no ring of this version: magic {magic:#x}, version {version}")
        layout = cls(slot_bytes, slots, n_readers)
        if layout.total_bytes > len(buf):
            raise TransportError(f"the ring needs {layout.total_bytes} bytes, the buffer has {len(buf)}")
        return layout


def ring_bytes(slot_bytes: int, slots: int, n_readers: int) -> int:
    """Bytes of shared memory that a ring of this shape takes."""
    return RingLayout(slot_bytes, slots, n_readers).total_bytes


def start_of(buf: memoryview) -> int:
    """Where the counters of a ring began."""
    start: int = GEOMETRY.unpack_from(buf, 0)[5]
    return start


def flat(part: Part) -> memoryview:
    """The bytes of a part, as a view of one dimension."""
    view = memoryview(part)
    return view if view.itemsize == 1 and view.ndim == 1 and view.format == "B" else view.cast("B")


def bytes_of(parts: Sequence[Part]) -> int:
    """Bytes of all parts together."""
    length = 0
    for part in parts:
        length += part.nbytes if type(part) is memoryview else len(part)
    return length
