"""Which KV blocks hold which prefix, written so that an engine that dies at any moment leaves the truth behind.

The engine core writes it, the one that comes in its place reads it. It lies in memory that outlives both
(``engine.kept``), beside the keys and values that it speaks of. Pure: bytes of a buffer, no I/O.

::

    header   magic, version, geometry, fingerprint, incarnation of the writer, check
             generation, number of blocks that may have an entry
    entry    digest of the prefix chain (engine.blocks), number in order of writing, check       one for each block

An entry says: *this block holds the keys and values of all tokens of this chain's last block, on every rank*. It is
written when the block is full and a step after which nobody writes there has been answered (``BlockPool.settle``), and
taken away before the block is given to anybody else, so before a plan goes out that may have it overwritten.

What can go wrong: the writer is killed in the middle of a write. Each write makes at most one entry wrong, and that is
seen by its check, which covers digest, number, block and generation: an entry counts only if all of its bytes are of
one write. Forgetting everything is one write of eight bytes: the generation.

Digests depend on no secret of a process (blake2b without a key over model, adapter, salt and tokens), so the next
engine finds the same ones. The fingerprint stands for everything else that makes keys and values what they are.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from drumline.engine.blocks import HASH_BYTES

MAGIC = b"drumKV\r\n"
VERSION = 1
CHECK_BYTES = 16
FINGERPRINT_BYTES = 32

_GEOMETRY = struct.Struct(f"<8sIIQQ{FINGERPRINT_BYTES}s")
_INCARNATION = struct.Struct("<Q")
_WORDS = struct.Struct("<QQ")
_HEADER_CHECK_AT = _GEOMETRY.size + _INCARNATION.size
_GENERATION_AT = 128
_TOP_AT = 136
_ENTRIES_AT = 256
_ENTRY_BYTES = 64
_NUMBER = struct.Struct("<Q")
_CHECK_AT = HASH_BYTES + _NUMBER.size
_NOTHING = bytes(CHECK_BYTES)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What must be the same for another engine to use what lies there."""

    block_size: int
    """Tokens of a block."""
    num_blocks: int
    bytes_per_block: int
    """On all ranks together."""
    fingerprint: bytes
    """Of all that decides what keys and values are (``engine.kept.fingerprint``), 32 bytes."""

    def pack(self) -> bytes:
        """As the header has it."""
        return _GEOMETRY.pack(MAGIC, VERSION, self.block_size, self.num_blocks, self.bytes_per_block, self.fingerprint)


class PrefixTable:
    """See the module's text. One writer.

    Args:
        buf: :meth:`size_of` bytes, writable. Whatever it holds is forgotten, except with ``take_over``.
        geometry: of the pool.
        incarnation: of the engine that writes from now on.
        take_over: :meth:`read` has found this geometry: entries that are right stay.

    """

    def __init__(self, buf: memoryview, geometry: Geometry, incarnation: int, *, take_over: bool = False) -> None:
        if len(buf) < self.size_of(geometry.num_blocks):
            raise ValueError(f"a table of {geometry.num_blocks} blocks does not fit into {len(buf)} bytes")
        self.geometry = geometry
        self.entries: list[tuple[int, bytes]] = []
        """Blocks and their digests that were taken over, longest known first."""
        self._buf = buf
        self._key = hashlib.blake2b(geometry.pack(), digest_size=32).digest()
        self._number = 0
        self._stopped = False
        self._generation, self._top = _WORDS.unpack_from(buf, _GENERATION_AT)
        if take_over:
            self._take_over()
        else:
            self.drop_all()
        self._write_header(incarnation)

    @staticmethod
    def size_of(num_blocks: int) -> int:
        """Bytes of a table."""
        return _ENTRIES_AT + num_blocks * _ENTRY_BYTES

    @staticmethod
    def read(buf: memoryview) -> tuple[Geometry, int] | None:
        """Geometry and incarnation of the last writer; None if this is no table, or not a whole one."""
        if len(buf) < _ENTRIES_AT:
            return None
        magic, version, block_size, num_blocks, bytes_per_block, fingerprint = _GEOMETRY.unpack_from(buf)
        if magic != MAGIC or version != VERSION or len(buf) != PrefixTable.size_of(num_blocks):
            return None
        head = bytes(buf[:_HEADER_CHECK_AT])
        if _check(head) != bytes(buf[_HEADER_CHECK_AT : _HEADER_CHECK_AT + CHECK_BYTES]):
            return None
        (incarnation,) = _INCARNATION.unpack_from(buf, _GEOMETRY.size)
        found = Geometry(
            block_size=block_size, num_blocks=num_blocks, bytes_per_block=bytes_per_block, fingerprint=fingerprint
        )
        return found, incarnation

    def put(self, block: int, digest: bytes) -> None:
        """From now on this block is known to hold this prefix. It has no entry yet."""
        if self._stopped:
            return
        if block >= self._top:
            self._top = block + 1
            self._write(_TOP_AT, _NUMBER.pack(self._top))
        self._number += 1
        body = digest + _NUMBER.pack(self._number)
        at = _place(block)
        self._write(at, body)
        self._write(at + _CHECK_AT, self._entry_check(block, body))

    def drop(self, block: int) -> None:
        """It is not known any more what this block holds. One without an entry may be named."""
        if not self._stopped and block < self._top:
            self._write(_place(block) + _CHECK_AT, _NOTHING)

    def drop_all(self) -> None:
        """The same of all blocks."""
        if not self._stopped:
            self._generation = (self._generation + 1) % 2**64
            self._write(_GENERATION_AT, _NUMBER.pack(self._generation))

    def stop(self) -> None:
        """Nothing of this engine may be used by another one, from now on for good."""
        if not self._stopped:
            self._stopped = True
            self._write(0, bytes(len(MAGIC)))

    def _write_header(self, incarnation: int) -> None:
        """The check goes last: a header that is not whole is none."""
        head = self.geometry.pack() + _INCARNATION.pack(incarnation)
        self._write(_HEADER_CHECK_AT, _NOTHING)
        self._write(0, head)
        self._write(_HEADER_CHECK_AT, _check(head))

    def _take_over(self) -> None:
        found: list[tuple[int, int, bytes]] = []
        seen: set[bytes] = set()
        self._top = min(self._top, self.geometry.num_blocks)
        for block in range(self._top):
            at = _place(block)
            check = bytes(self._buf[at + _CHECK_AT : at + _CHECK_AT + CHECK_BYTES])
            if check == _NOTHING:
                continue
            body = bytes(self._buf[at : at + _CHECK_AT])
            digest = body[:HASH_BYTES]
            if check != self._entry_check(block, body) or digest in seen:
                self.drop(block)
                continue
            seen.add(digest)
            found.append((*_NUMBER.unpack_from(body, HASH_BYTES), block, digest))
        found.sort()
        self._number = found[-1][0] if found else 0
        self.entries = [(block, digest) for _, block, digest in found]

    def _entry_check(self, block: int, body: bytes) -> bytes:
        return hashlib.blake2b(
            body + _WORDS.pack(block, self._generation), key=self._key, digest_size=CHECK_BYTES
        ).digest()

    def _write(self, at: int, data: bytes) -> None:
        self._buf[at : at + len(data)] = data


def _check(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=CHECK_BYTES).digest()


def _place(block: int) -> int:
    return _ENTRIES_AT + block * _ENTRY_BYTES
