"""What the two ends of a remote queue say to each other, and what they keep: pure, no socket and no thread.

::

    writer                                                     reader
    Outbox: messages not yet read by all   -- DATA -->         Inbox: the message that is arriving
    WELCOME, WANT, END, REFUSED            -------->
                                           <--------           HELLO, ACK, END_RECEIVED, BYE

A message has a sequence number (64 bits, from 0) and goes as chunks of at most 1 MiB, so that a heartbeat never waits
behind a large one. Each chunk says its message's number, its offset and the length of the whole, so a reader knows what
it has already (after a reconnect the writer starts again with the message that the reader's HELLO asks for) and notices
what is missing (which cannot happen, and ends the connection).

Credit. The writer keeps every message until all readers have *read* it (not merely received it), and takes no new one
while what it keeps is more than the window. So nothing is ever dropped, a slow reader stops the writer, the memory of
both is bounded, and what a lost connection swallowed is still there. Readers say what they have read after each
quarter of the window, and at once if a writer that is stopped asks for it (WANT).
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drumline.errors import TransportError
from drumline.transport.ring import Part

VERSION = 1
MAGIC = b"DRUM"
CHUNK_BYTES = 1 << 20
"""Body bytes of a chunk at most."""
OVERHEAD = 512
"""Bytes that a message counts for beside its own: head, objects that hold it."""
CONTROL_MAX = 1024
"""Longest frame in bytes that a reader sends, its handshake included."""

DATA, WANT, END, WELCOME, REFUSED = range(1, 6)
HELLO, ACK, END_RECEIVED, BYE = range(16, 20)

_DATA = struct.Struct("<BQQQ")
_BODY = struct.Struct("<IIQ")
_NUMBER = struct.Struct("<BQ")
_HELLO = struct.Struct("<B4sI16sQQ")
DATA_MAX = CHUNK_BYTES + _DATA.size + 256
"""Longest frame in bytes that a writer sends, with what CURVE adds."""


def pack_number(type_: int, number: int) -> bytes:
    """WANT, END, WELCOME, ACK, END_RECEIVED, BYE: one message number (0 where none is needed)."""
    return _NUMBER.pack(type_, number)


def unpack_number(frame: bytes) -> int:
    """The number in such a frame. TransportError if the frame has another length."""
    if len(frame) != _NUMBER.size:
        raise TransportError(f"a control frame has {_NUMBER.size} bytes, not {len(frame)}")
    number: int = _NUMBER.unpack(frame)[1]
    return number


class Hello(NamedTuple):
    """What a reader says first on every connection."""

    session: bytes
    """16 random bytes: this reader object, whatever connections it makes."""
    next_seq: int
    """First message that it does not have wholly."""
    read: int
    """Messages that were read by the one who uses it."""

    def pack(self) -> bytes:
        """The frame."""
        return _HELLO.pack(HELLO, MAGIC, VERSION, self.session, self.next_seq, self.read)

    @classmethod
    def unpack(cls, frame: bytes) -> Hello:
        """TransportError if it is none, or of another version."""
        if len(frame) != _HELLO.size:
            raise TransportError("no greeting of a queue's reader")
        _, magic, version, session, next_seq, read = _HELLO.unpack(frame)
        if magic != MAGIC or version != VERSION:
            raise TransportError(f"the reader speaks version {version} of the queue, this writer version {VERSION}")
        return cls(session, next_seq, read)


def body_bytes(parts: Sequence[Part], buffers: Sequence[memoryview]) -> int:
    """Length in bytes of a message's body."""
    return _BODY.size + 8 * len(buffers) + sum(map(_nbytes, parts)) + sum(map(_nbytes, buffers))


def _nbytes(part: Part) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


class Outgoing(NamedTuple):
    """A message that some reader has not read yet."""

    seq: int
    cost: int
    """Bytes that it counts for."""
    time: float
    """``time.monotonic()`` when it was written."""
    chunks: Sequence[bytes]


class Outbox:
    """What the writer keeps."""

    def __init__(self, n_readers: int, window_bytes: int) -> None:
        self.next_seq = 0
        """Number of the next message."""
        self._window = window_bytes
        self._used = 0
        self._kept: deque[Outgoing] = deque()
        self._read: list[int | None] = [0] * n_readers

    def room(self, body: int) -> bool:
        """Is there credit for a message of this many bytes? One that is larger than the window goes alone."""
        return not self._kept or self._used + body + OVERHEAD <= self._window

    def add(self, kind: int, parts: Sequence[Part], buffers: Sequence[memoryview], now: float) -> Outgoing:
        """Copy a message, once for all readers."""
        sizes = [_nbytes(buffer) for buffer in buffers]
        inline = sum(map(_nbytes, parts))
        head = _BODY.pack(kind, len(sizes), inline) + struct.pack(f"<{len(sizes)}Q", *sizes)
        total = len(head) + inline + sum(sizes)
        chunks = list(_chunks(self.next_seq, total, (head, *parts, *buffers)))
        message = Outgoing(self.next_seq, total + OVERHEAD, now, chunks)
        self._kept.append(message)
        self._used += message.cost
        self.next_seq += 1
        if not any(read is not None for read in self._read):
            self._free()
        return message

    def since(self, seq: int) -> Iterator[Outgoing]:
        """Messages from ``seq`` on. TransportError if one of them is gone or never was."""
        first = self.next_seq - len(self._kept)
        if not first <= seq <= self.next_seq:
            raise TransportError(f"messages {first} to {self.next_seq - 1} are there, and not {seq}")
        return itertools.islice(self._kept, seq - first, None)

    def read(self, reader: int, upto: int) -> bool:
        """Reader has read all messages before ``upto``. True if some could be let go. Late news does no harm."""
        before = self._read[reader]
        if before is None or upto <= before:
            return False
        if upto > self.next_seq:
            raise TransportError(f"reader {reader} says it has read message {upto - 1}, which was never sent")
        self._read[reader] = upto
        return self._free()

    def drop(self, reader: int) -> None:
        """Nothing is kept for this reader any more."""
        self._read[reader] = None
        self._free()

    def _free(self) -> bool:
        done = min((read for read in self._read if read is not None), default=self.next_seq)
        freed = False
        while self._kept and self._kept[0].seq < done:
            self._used -= self._kept.popleft().cost
            freed = True
        return freed

    def backlog(self, reader: int) -> int:
        """Messages that it has not (said that it has) read."""
        read = self._read[reader]
        return 0 if read is None else self.next_seq - read

    def waiting_since(self, reader: int) -> float | None:
        """``time.monotonic()`` of the oldest message that it has not read; None if there is none."""
        behind = self.backlog(reader)
        return self._kept[len(self._kept) - behind].time if behind else None


def _chunks(seq: int, total: int, pieces: Sequence[Part]) -> Iterator[bytes]:
    if total <= CHUNK_BYTES:
        yield b"".join((_DATA.pack(DATA, seq, 0, total), *pieces))
        return
    offset = 0
    views = [memoryview(piece).cast("B") for piece in reversed(pieces)]
    while offset < total:
        taken: list[memoryview] = []
        left = CHUNK_BYTES
        while left and views:
            view = views.pop()
            if len(view) > left:
                views.append(view[left:])
                view = view[:left]
            taken.append(view)
            left -= len(view)
        yield b"".join((_DATA.pack(DATA, seq, offset, total), *taken))
        offset += CHUNK_BYTES - left


class Received(NamedTuple):
    """A whole message."""

    kind: int
    data: memoryview
    buffers: list[memoryview]
    """Read-only, each with memory of its own, which starts at a multiple of 16 bytes or of a page."""
    cost: int


class Inbox:
    """Puts chunks together. ``largest`` bytes a message at most, whatever a chunk says."""

    def __init__(self, largest: int) -> None:
        self.next_seq = 0
        """First message that is not wholly here."""
        self._largest = largest
        self._have = 0
        self._arriving: _Arriving | None = None

    def take(self, frame: bytes) -> Received | None:
        """One DATA frame. The message if it is complete now; None if not, or if all of it was here already.

        TransportError if the frame is damaged, a chunk before it is missing, or the message is over the limit.
        """
        if len(frame) < _DATA.size:
            raise TransportError("half a header")
        _, seq, offset, total = _DATA.unpack_from(frame)
        if seq < self.next_seq or (seq == self.next_seq and offset < self._have):
            return None
        if seq > self.next_seq or offset > self._have:
            raise TransportError(f"message {self.next_seq} byte {self._have} is next, not message {seq} byte {offset}")
        chunk = memoryview(frame)[_DATA.size :]
        if total > self._largest:
            raise TransportError(f"a message of {total} bytes, where {self._largest} is the limit of this queue")
        if offset + len(chunk) > total or (offset + len(chunk) < total and len(chunk) != CHUNK_BYTES):
            raise TransportError(f"message {seq}: a chunk of {len(chunk)} bytes at {offset} of {total}")
        if self._arriving is None:
            self._arriving = _Arriving(chunk, total)
        self._have += len(chunk)
        self._arriving.add(chunk)
        if self._have < total:
            return None
        arrived, self._arriving, self._have = self._arriving, None, 0
        self.next_seq += 1
        return arrived.finish(total + OVERHEAD)


class _Arriving:
    """The message of which a part is here: each buffer goes into memory of its own."""

    def __init__(self, first: memoryview, total: int) -> None:
        if len(first) < _BODY.size:
            raise TransportError("a message without a head")
        self._kind, count, inline = _BODY.unpack_from(first)
        head = _BODY.size + 8 * count
        if len(first) < head:
            raise TransportError(f"a message with {count} buffers, more than a chunk can name")
        sizes = [inline, *struct.unpack_from(f"<{count}Q", first, _BODY.size)]
        if head + sum(sizes) != total:
            raise TransportError(f"a message of {total} bytes whose pieces say {head + sum(sizes)}")
        self._skip = head
        self._targets = [_memory(size) for size in sizes]
        self._open = [target for target in reversed(self._targets) if len(target)]

    def add(self, chunk: memoryview) -> None:
        """The next bytes."""
        chunk = chunk[self._skip :]
        self._skip = 0
        while len(chunk):
            target = self._open.pop()
            step = min(len(target), len(chunk))
            target[:step] = chunk[:step]
            if step < len(target):
                self._open.append(target[step:])
            chunk = chunk[step:]

    def finish(self, cost: int) -> Received:
        data, *buffers = (target.toreadonly() for target in self._targets)
        return Received(self._kind, data, buffers, cost)


def _memory(size: int) -> memoryview:
    """New memory: whole pages for large pieces, which go back to the system with the last view of them."""
    return memoryview(mmap.mmap(-1, size) if size >= CHUNK_BYTES // 4 else bytearray(size))
