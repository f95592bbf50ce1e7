"""The pool of KV blocks: who uses which block, and which prefix lies in a block that nobody uses.

Pure accounting, no I/O. A block is in exactly one of three states:

- *blank*: free, its content is worth nothing;
- *idle*: free, but it holds a known prefix; given away only when no blank block is left, longest unused first;
- *used*: in the table of one request, or, if it holds a known prefix, of several (reference count).

A prefix is known by the hash of the chain (salt, tokens of block 0, tokens of block 1 ...). The hash is blake2b with
32 bytes, so equal hashes mean equal tokens: tenants that share a server cannot make each other read foreign blocks,
which they could with a fast hash that is not made against attackers. Only full blocks are known. When two requests
compute the same block at the same time, the second one's stays unknown: replacing it by the first one's would change a
block table that workers hold already.

``free`` gives the tail of a table back first, so a chain loses its tail first and what is left of it can still be
found.

With context parallelism a block spans block size x DCP x PCP tokens; the caller gives that product as ``block_size``.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

HASH_BYTES = 32


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were asked for. The caller checks ``num_free`` first, so this is a bug of its."""


class HashChain:
    """Hashes of the full blocks of one request, extended as its tokens become known."""

    __slots__ = ("_block_size", "_parent", "hashes")

    def __init__(self, block_size: int, salt: str = "") -> None:
        self._block_size = block_size
        self._parent = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"drumline-kv").digest()
        self.hashes: list[bytes] = []
        """``hashes[i]`` stands for all tokens up to the end of block i, and the salt."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the full blocks of ``tokens`` (all tokens so far) that are not hashed yet."""
        size = self._block_size
        for start in range(len(self.hashes) * size, len(tokens) - size + 1, size):
            content = array("i", tokens[start : start + size]).tobytes()
            self._parent = hashlib.blake2b(self._parent + content, digest_size=HASH_BYTES).digest()
            self.hashes.append(self._parent)


class BlockPool:
    """Blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens each. See the module's text."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV pool needs blocks: {num_blocks=}, {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._known: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be given away, those with a known prefix included."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks in at least one table."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of this chain. They are not taken yet."""
        found: list[int] = []
        for digest in hashes:
            block = self._known.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free now, so that sharing them costs free blocks."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Put known blocks into one more table."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; idle ones are forgotten, longest unused first."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take these blocks out of one table, the last one first."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if self._hash_of[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make the prefix in a used block known, unless another block is known for it already."""
        if self.enable_prefix_caching and self._hash_of[block] is None and digest not in self._known:
            self._hash_of[block] = digest
            self._known[digest] = block

    def forget(self) -> None:
        """Forget all prefixes (new weights, or content that cannot be trusted). Tables stay as they are."""
        self._known.clear()
        self._hash_of = [None] * self.num_blocks
        self._blank.extend(self._idle)
        self._idle.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        digest = self._hash_of[block]
        assert digest is not None
        del self._known[digest]
        self._hash_of[block] = None
        return block

    def check(self) -> None:
        """Raise AssertionError if a block is lost or counted twice (for tests; linear time)."""
        blank, idle = set(self._blank), set(self._idle)
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & idle, "a block is blank and idle"
        for block in range(self.num_blocks):
            free = block in blank or block in idle
            assert free == (self._references[block] == 0), f"block {block} is free and used, or neither"
            assert self._references[block] >= 0, f"block {block} was freed too often"
            assert (block in idle) <= (self._hash_of[block] is not None), f"block {block} is idle without a prefix"
            assert (block in blank) <= (self._hash_of[block] is None), f"block {block} is blank with a prefix"
        assert self._known == {h: b for b, h in enumerate(self._hash_of) if h is not None}, "known prefixes differ"
