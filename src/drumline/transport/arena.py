"""The arena: memory for buffers that are larger than a ring wants, written once and read where it lies.

    writer                             second memfd                      reader i
    ------                             ------------                      --------
    allocate (free list) -> fill  ->   [blocks: pages]          ------>  take -> read-only view of the block
    entry in the message's table       [stamp of block b]                      |  slices, arrays, tensors over it
    free again  <-------------------   [reader i has freed b]   <------  the last of them is collected

Control words (each has one writer)::

    line 0          magic, version, readers, blocks, offset and bytes of the data      the maker, once
    line 1          [wanted]                                                           writer
    then            [reader i gets copies]                                             writer
    then            [stamp of block b]                                                 writer
    then, a reader  [generation of block b that this reader has freed]                 reader i

A block has a number, which says where its words are, and a generation, which is another one each time the number is
used. It is free when every reader has written its generation into that reader's word: counts of n readers without
anything that two processes write. Generations are counted modulo 2^32 and only compared for being equal.

**Life of a block on the reader's side.** A view is made over an object that owns nothing (a ctypes array at that place
of the mapping); every memoryview, numpy array or tensor that is made from it holds that object. When the last of them
is collected, its finalizer writes the generation. It runs wherever the collection happens, in any thread, and needs no
lock. Until the message was taken for good it does nothing: where an exception (a signal handler's) ends the taking, the
same message is taken again, and its blocks must still be there. A process that was forked meanwhile has the views too
and must not free anything: finalizers look at the pid. At the end of the interpreter nothing is freed: who still held
views then was not done with them.

Order (see fence.py). Writer: bytes and stamp, order, the ring's ``written``. Reader: ``written``, order, stamp and
bytes; reads, order, freed word, **fence**, ``wanted``. Writer: ``wanted``, **fence**, freed words, order, bytes.

The data are mapped without the right to write into them (:func:`~drumline.transport.memory.map_readonly`), so no reader
can change what the others read, not even through a library that ignores read-only buffers. Pages are taken from the
kernel when they are first written; the lowest place that fits is taken, so few are.

**Closing** with views alive is safe: the mapping is held by what the views are made of, and goes with the last of them.

**Who holds blocks for long** stands in everybody's way once the arena is full: :meth:`ArenaWriter.press` finds readers
that are done with a message's place in the ring for a second and still hold its blocks, says so in one line of the log,
and has them get copies from then on. What they hold they keep.

Rejected: an mmap for each block (a descriptor and hundreds of page faults each); counters of references (two writers
for a word); a lease that ends (views must never change under who holds them); powers of two (a message of 33 MiB needs
64).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drumline.errors import TransportError
from drumline.transport.fence import fence, order
from drumline.transport.memory import SharedMemory, map_readonly

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
LEAST_BYTES = 16384
"""Smaller buffers go through the ring: a view of a block costs some 5 us, as much as copying and summing these."""
BLOCKS = 512
"""Blocks that can be in use at a time."""
HOLD_S = 1.0
"""How long a reader may hold a block of a full arena before it gets copies."""
_LINE = 64
_GEOMETRY = struct.Struct("=4I2Q")
_MAGIC = 0x44524D41
_VERSION = 1
_WANTED = _LINE // 4
_FLAGS = 2 * _LINE // 4
_MASK = 0xFFFFFFFF
_SIGN = 0x80000000
_LOOKED_AT = 8  # oldest blocks that each allocation looks at
_REREADS = 40
_NOTHING = memoryview(b"").cast("I")


def _lines(words: int) -> int:
    """Words that so many take in whole cache lines."""
    return -(-words * 4 // _LINE) * _LINE // 4


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes of one arena. ``data_bytes`` is rounded up to whole pages."""

    data_bytes: int
    n_readers: int
    blocks: int = BLOCKS

    def __post_init__(self) -> None:
        if self.data_bytes < 1 or self.n_readers < 1 or self.blocks < 1:
            raise ValueError(f"an arena has at least one byte, one reader and one block: {self}")
        object.__setattr__(self, "data_bytes", -(-self.data_bytes // PAGE) * PAGE)

    @property
    def stamps_at(self) -> int:
        """Index of the first stamp, in words."""
        return _FLAGS + _lines(self.n_readers)

    def freed_at(self, reader: int) -> int:
        """Index of a reader's first word."""
        return self.stamps_at + (1 + reader) * _lines(self.blocks)

    @property
    def control_bytes(self) -> int:
        """Bytes before the data: whole pages."""
        return -(-self.freed_at(self.n_readers) * 4 // PAGE) * PAGE

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.control_bytes + self.data_bytes

    def init(self, buf: memoryview) -> None:
        """Write the control words of a new arena, whose memory is zero."""
        _GEOMETRY.pack_into(buf, 0, _MAGIC, _VERSION, self.n_readers, self.blocks, self.control_bytes, self.data_bytes)

    @classmethod
    def of(cls, buf: memoryview) -> ArenaLayout:
        """Layout of an arena that somebody else made; TransportError if it is none."""
        if len(buf) < _LINE:
            raise TransportError(f"no arena: only {len(buf)} bytes")
        magic, version, n_readers, blocks, at, data_bytes = _GEOMETRY.unpack_from(buf, 0)
        if magic != _MAGIC or version != _VERSION:
            raise TransportError(f"no arena of this version: magic {magic:#x}, version {version}")
        layout = cls(data_bytes, n_readers, blocks)
        if layout.control_bytes != at:
            raise TransportError(f"an arena of another page size: data at {at}, not at {layout.control_bytes}")
        return layout


class FreeList:
    """Pieces of ``[0, size)`` that are free, by place. First fit; neighbours are joined. Pure."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._ends = [size]

    def allocate(self, size: int) -> int | None:
        """The lowest place with room for ``size``, or None."""
        for i, start in enumerate(self._starts):
            if self._ends[i] - start >= size:
                self._starts[i] = start + size
                if self._starts[i] == self._ends[i]:
                    del self._starts[i], self._ends[i]
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Take back what :meth:`allocate` gave. All of it or, if a signal handler raises, nothing."""
        end = start + size
        i = bisect_left(self._starts, start)
        joins_before = i > 0 and self._ends[i - 1] == start
        joins_after = i < len(self._starts) and self._starts[i] == end
        if joins_before and joins_after:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_before:
            self._ends[i - 1] = end
        elif joins_after:
            self._starts[i] = start
        else:
            self._starts[i:i] = [start]
            self._ends[i:i] = [end]

    def pieces(self) -> list[tuple[int, int]]:
        """Start and end of each free piece, in order."""
        return list(zip(self._starts, self._ends, strict=True))


class Block:
    """A place in the arena that is in use, as the writer knows it."""

    __slots__ = ("generation", "index", "offset", "position", "sent", "size")

    def __init__(self, index: int, generation: int, offset: int, size: int) -> None:
        self.index = index
        self.generation = generation
        self.offset = offset
        self.size = size
        """Bytes, whole pages."""
        self.position: int | None = None
        """What the ring counts after its message; None: not sent yet."""
        self.sent = 0.0
        """When, by ``time.monotonic()``."""


class ArenaWriter:
    """The writing side. One object in one process, one thread at a time (the ring writer's)."""

    def __init__(self, memory: SharedMemory, names: Sequence[str] = (), generation: int = 0) -> None:
        layout = ArenaLayout.of(memory.buf)
        self.layout = layout
        self._words = memory.buf[: layout.control_bytes].cast("I")
        self._data = memory.buf[layout.control_bytes : layout.total_bytes]
        self._names = tuple(names) or tuple(f"reader {i}" for i in range(layout.n_readers))
        self._freed = [layout.freed_at(i) for i in range(layout.n_readers)]
        self._free = FreeList(layout.data_bytes)
        self._indices = list(range(layout.blocks - 1, -1, -1))
        self._unsent: list[Block] = []
        """Blocks that were allocated since all of them were known to be sent, or free again."""
        self._generation = generation
        self._used: dict[int, Block] = {}
        """Blocks in use by index, oldest first."""
        self._pressed = 0.0

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that are in use, as far as it was looked."""
        return sum(block.size for block in self._used.values())

    def allocate(self, size: int) -> Block | None:
        """A block for ``size`` bytes, or None; then readers that free some will ring until :meth:`content`.

        Fill it, or cancel it.
        """
        if size > self.layout.data_bytes:
            return None
        self._collect(_LOOKED_AT)
        pages = -(-max(size, 1) // PAGE) * PAGE
        block = self._find(pages)
        if block is None:
            self._collect(len(self._used))
            block = self._find(pages)
        if block is None:
            self._words[_WANTED] = 1
            fence()
            self._collect(len(self._used))
            block = self._find(pages)
        return block

    def content(self) -> None:
        """All that was asked for was there: nobody needs to ring any more."""
        if self._words[_WANTED]:
            self._words[_WANTED] = 0

    def _find(self, pages: int) -> Block | None:
        if not self._indices:
            return None
        generation = (self._generation + 1) & _MASK or 1
        block = Block(self._indices[-1], generation, 0, pages)
        block.sent = time.monotonic()
        offset = self._free.allocate(pages)
        # No calls from here on: after each of them a signal handler may raise, and the place would be lost
        if offset is None:
            return None
        block.offset = offset
        self._generation = generation
        self._used[block.index] = block
        del self._indices[-1]
        self._unsent += [block]
        return block

    def fill(self, block: Block, view: memoryview) -> None:
        """Copy the bytes in."""
        self._data[block.offset : block.offset + len(view)] = view
        self._words[self.layout.stamps_at + block.index] = block.generation

    def sent(self, block: Block, position: int) -> None:
        """Its message is in the ring, which counts ``position`` after it."""
        block.position = position
        block.sent = time.monotonic()

    def cancel(self, block: Block) -> None:
        """No message has gone out with this block."""
        if self._used.get(block.index) is block:
            self._give_back(block)

    def abandon(self, written: int) -> None:
        """No message is under way: free the blocks of those that the ring, which counts ``written``, never got."""
        unsent = self._unsent
        while unsent:
            position = unsent[-1].position
            if position is None or (written - position) & _SIGN:
                self.cancel(unsent[-1])
            del unsent[-1]

    def _collect(self, most: int) -> None:
        """Give back what all readers have freed, among the ``most`` oldest."""
        words, freed = self._words, self._freed
        found = []
        for index, block in self._used.items():
            if most <= 0:
                break
            most -= 1
            if block.position is None:
                continue
            for at in freed:
                if words[at + index] != block.generation:
                    break
            else:
                found.append(block)
        for block in found:
            self._give_back(block)
        order()  # what the readers did before they freed these comes before what is written into them

    def _give_back(self, block: Block) -> None:
        self._free.free(block.offset, block.size)
        del self._used[block.index]  # no calls between these three, see above
        self._indices += [block.index]

    def press(self, reads: Sequence[int]) -> None:
        """The arena is full: name readers that hold blocks for long, and have them get copies from now on.

        ``reads``: what the ring counts for each reader. A reader that has not come to a message yet holds nothing.
        """
        now = time.monotonic()
        if now < self._pressed:
            return
        self._pressed = now + 0.1
        for reader, read in enumerate(reads):
            if self._words[_FLAGS + reader]:
                continue
            held = [block for block in self._used.values() if self._held(block, reader, read, now)]
            if held:
                self._words[_FLAGS + reader] = 1
                total = sum(block.size for block in held)
                log.warning(
                    "%s still holds %d blocks (%.1f of %.1f MiB) of a full arena, some for %.1f s: it gets copies of "
                    "large buffers from now on",
                    self._names[reader],
                    len(held),
                    total / 2**20,
                    self.layout.data_bytes / 2**20,
                    now - min(block.sent for block in held),
                )

    def _held(self, block: Block, reader: int, read: int, now: float) -> bool:
        if block.position is None or now - block.sent < HOLD_S:
            return False
        has_read = not (read - block.position) & _SIGN
        return has_read and self._words[self._freed[reader] + block.index] != block.generation

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._data.release()


class ArenaReader:
    """The side of reader ``index``: read-only views of blocks. One object in one process.

    ``on_wanted`` is called after a block was freed if the writer waits for room, in whatever thread let go of it.
    """

    def __init__(self, fd: int, index: int = 0, on_wanted: Callable[[], None] | None = None) -> None:
        with_head = SharedMemory.attach(fd)
        try:
            self.layout = layout = ArenaLayout.of(with_head.buf)
        finally:
            with_head.close()
        if not 0 <= index < layout.n_readers:
            raise ValueError(f"this arena has readers 0 to {layout.n_readers - 1}, not {index}")
        self._control = SharedMemory.attach(fd, layout.control_bytes)
        self._words = self._control.buf.cast("I")
        self._ledger = _Ledger(self._words, layout.freed_at(index), on_wanted)
        self._data: mmap.mmap | None = map_readonly(fd, layout.control_bytes, layout.data_bytes)
        self._flag = _FLAGS + index
        self.rereads = 0
        """Times that a block was not there at first look. Must be 0."""

    def take(self, offset: int, length: int, index: int, generation: int, taking: Taking | None = None) -> memoryview:
        """A read-only view (bytes) of a block that a message names. The block is freed when the last view is collected.

        A copy, and the block freed at once, if this reader has held blocks for too long. TransportError if the block is
        not the one that the message means, or the reader is closed.

        ``taking``: the block is not freed before that is settled, so that it can be taken once more.
        """
        if self._data is None:
            raise TransportError("this arena is closed")
        if index >= self.layout.blocks or offset + length > self.layout.data_bytes:
            raise TransportError(f"no such block in this arena: {length} bytes at {offset}, number {index}")
        self._await_stamp(index, generation)
        # An array type for each length would be made anew each time, so there is one for each power of two
        span = min(1 << (length - 1).bit_length(), self.layout.data_bytes - offset) if length else 1
        owner = (ctypes.c_char * span).from_buffer(self._data, offset)
        view = memoryview(owner).toreadonly().cast("B")[:length]
        if taking is None:
            taking = Taking()
            taking.settled[0] = True
        finalizer = weakref.finalize(owner, self._ledger.free, index, generation, taking.settled)
        finalizer.atexit = False
        if self._words[self._flag]:
            taking.copied.append(view)
            return memoryview(bytes(view))
        return view

    def _await_stamp(self, index: int, generation: int) -> None:
        at = self.layout.stamps_at + index
        for attempt in range(_REREADS):
            if self._words[at] == generation:
                order()
                self.rereads += attempt > 0
                return
            fence()
            time.sleep(attempt * 5e-6)
        raise TransportError(
            f"arena out of step: block {index} has generation {self._words[at]}, the message means {generation}"
        )

    def close(self) -> None:
        """Let go of the memory; what views still need stays until they are collected. Idempotent."""
        self._ledger.close()
        self._data = None
        self._words, self._ledger = _NOTHING, _Ledger(_NOTHING, 0, None)  # finalizers have the old ones
        self._control.close()


class Taking:
    """Blocks that one record names, from when the first is taken until it is known that it will not be read again."""

    __slots__ = ("copied", "settled")

    def __init__(self) -> None:
        self.settled = [False]
        """True from then on, as one store: views that end now free their blocks."""
        self.copied: list[memoryview] = []
        """Views of which the message has copies: they end with this."""


class _Ledger:
    """What the finalizers of one reader need; it outlives the reader."""

    def __init__(self, words: memoryview, at: int, on_wanted: Callable[[], None] | None) -> None:
        self._words = words
        self._at = at
        self._on_wanted = on_wanted
        self._pid = os.getpid()

    def free(self, index: int, generation: int, settled: Sequence[bool]) -> None:
        """The last view of this block is gone. Nothing happens unless its taking is ``settled``."""
        if not settled[0] or os.getpid() != self._pid:
            return
        order()
        self._words[self._at + index] = generation
        fence()
        if self._words[_WANTED] and self._on_wanted is not None:
            self._on_wanted()

    def close(self) -> None:
        """The queue is gone: nobody is to be rung any more."""
        self._on_wanted = None
