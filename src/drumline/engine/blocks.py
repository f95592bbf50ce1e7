"""The pool of KV blocks: who uses which block, and which prefix lies in a block that nobody uses.

Pure accounting, no I/O. A block is in exactly one of three states:

- *blank*: free, its content is worth nothing;
- *idle*: free, but it holds a known prefix; given away only when no blank block is left, longest unused first;
- *used*: in the table of one request, or, if it holds a known prefix, of several (reference count).

A prefix is known by the hash of the chain (model, adapter, salt, tokens of block 0, tokens of block 1 ...). The hash is
blake2b with 32 bytes, so equal hashes mean equal tokens: tenants that share a server cannot make each other read
foreign blocks, which they could with a fast hash that is not made against attackers. Only full blocks are known. When
two requests compute the same block at the same time, the second one's stays unknown: replacing it by the first one's
would change a block table that workers hold already.

``free`` gives the tail of a table back first, so a chain loses its tail first and what is left of it can still be
found.

Memory grows with what is used, not with the pool, which may have tens of millions of blocks: blocks that were never
given away are a number (``_untouched``: they are the highest ones), references are kept of used blocks only, hashes of
known ones only.

Where an engine may come after this one (``table``: ``engine.prefix_table``), it is told which prefixes lie where: not
when a block becomes known here, which is when a plan goes out that fills it, but once that has happened on all ranks
(:meth:`BlockPool.settle`); and no longer, before the block is given away.

With decode context parallelism a block spans block size x DCP tokens; the caller gives that product as ``block_size``.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

HASH_BYTES = 32


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were asked for. The caller checks ``num_free`` first, so this is a bug of its."""


class HashChain:
    """Hashes of the full blocks of one request, extended as its tokens become known.

    A chain starts from what makes equal tokens give different keys and values, or what must keep tenants apart.

    Args:
        block_size: tokens of a block.
        model: which model (and which weights of it) the blocks belong to.
        adapter: which adapter changes the model for this request; empty: none.
        salt: requests share blocks only with those of the same salt.

    """

    __slots__ = ("_block_size", "_parent", "hashes")

    def __init__(self, block_size: int, *, model: str = "", adapter: str = "", salt: str = "") -> None:
        self._block_size = block_size
        self._parent = _root(model, adapter, salt)
        self.hashes: list[bytes] = []
        """``hashes[i]`` stands for all tokens up to the end of block i, model, adapter and salt."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the full blocks of ``tokens`` (all tokens so far) that are not hashed yet."""
        size = self._block_size
        for start in range(len(self.hashes) * size, len(tokens) - size + 1, size):
            content = array("i", tokens[start : start + size]).tobytes()
            self._parent = hashlib.blake2b(self._parent + content, digest_size=HASH_BYTES).digest()
            self.hashes.append(self._parent)


@lru_cache(maxsize=256)
def _root(*parts: str) -> bytes:
    """Where chains start. Each part is preceded by its length, so that no two lists of parts are read as one."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"drumline-kv")
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class Table(Protocol):
    """What outlives the engine (``engine.prefix_table.PrefixTable``)."""

    @property
    def entries(self) -> list[tuple[int, bytes]]:
        """Blocks that hold known prefixes from the beginning, and their digests; the first are given away first."""

    def put(self, block: int, digest: bytes) -> None:
        """This block holds this prefix."""

    def drop(self, block: int) -> None:
        """It may be overwritten from now on."""

    def drop_all(self) -> None:
        """The same of all blocks."""

    def stop(self) -> None:
        """Nothing may be used after this engine."""


class BlockPool:
    """Blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens each. See the module's text."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, table: Table | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV pool needs blocks: {num_blocks=}, {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._blank: list[int] = []
        self._untouched = num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._table = table
        self._due: dict[int, int] = {}
        """Known blocks that the table is not told of yet: the step that must be over on all ranks. Steps only grow."""
        if table is not None:
            self._restore(table.entries)

    def _restore(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Blocks of an engine before this one are idle: free, with a known prefix."""
        for block, digest in entries:
            self._idle[block] = None
            self._hash_of[block] = digest
            self._known[digest] = block
        used = max(self._idle, default=-1) + 1
        self._untouched = self.num_blocks - used
        self._blank = [block for block in range(used - 1, -1, -1) if block not in self._idle]

    @property
    def num_free(self) -> int:
        """Blocks that can be given away, those with a known prefix included."""
        return self.num_blocks - len(self._references)

    @property
    def num_used(self) -> int:
        """Blocks in at least one table."""
        return len(self._references)

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
        return sum(1 for block in blocks if block not in self._references)

    def share(self, blocks: Sequence[int]) -> None:
        """Put known blocks into one more table."""
        references = self._references
        for block in blocks:
            if block in references:
                references[block] += 1
            else:
                del self._idle[block]
                references[block] = 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; idle ones are forgotten, longest unused first."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._blank.pop() if self._blank else self._fresh() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take these blocks out of one table, the last one first."""
        references = self._references
        for block in reversed(blocks):
            count = references.get(block, 0)
            if count < 1:
                raise ValueError(f"block {block} is free already")
            if count > 1:
                references[block] = count - 1
                continue
            del references[block]
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def freed_with(self, blocks: Sequence[int], gone: Counter[int]) -> list[int]:
        """Which of the blocks of a table become free if it goes after others have gone. ``gone``: how many tables with
        each block have; this one is added. Nothing is freed."""
        gone.update(blocks)
        references = self._references
        return [block for block in blocks if references[block] == gone[block]]

    def register(self, block: int, digest: bytes, due: int = 0) -> None:
        """Make the prefix in a used block known, unless another block is known for it already. ``due``: the last step
        that may write there."""
        if self.enable_prefix_caching and block not in self._hash_of and digest not in self._known:
            self._hash_of[block] = digest
            self._known[digest] = block
            if self._table is not None:
                self._due[block] = due

    def settle(self, step: int) -> None:
        """This step, and all before it, are over on all ranks."""
        while self._due:
            block, due = next(iter(self._due.items()))
            if due > step:
                return
            del self._due[block]
            assert self._table is not None
            self._table.put(block, self._hash_of[block])

    def leave_nothing(self) -> None:
        """An engine that comes after this one must compute everything itself."""
        if self._table is not None:
            self._table.stop()
            self._table = None
            self._due.clear()

    def forget(self) -> None:
        """Forget all prefixes (new weights, or content that cannot be trusted). Tables stay as they are."""
        self._known.clear()
        self._hash_of.clear()
        self._blank.extend(self._idle)
        self._idle.clear()
        if self._table is not None:
            self._due.clear()
            self._table.drop_all()

    def _fresh(self) -> int:
        """A block that is not blank: one that was never used, else the one whose prefix is unused for longest."""
        if self._untouched:
            self._untouched -= 1
            return self.num_blocks - 1 - self._untouched
        block, _ = self._idle.popitem(last=False)
        del self._known[self._hash_of.pop(block)]
        if self._table is not None:
            self._due.pop(block, None)
            self._table.drop(block)
        return block

    def check(self) -> None:
        """Raise AssertionError if a block is lost or counted twice (for tests; linear time)."""
        untouched = set(range(self.num_blocks - self._untouched, self.num_blocks))
        blank, idle, used = set(self._blank), set(self._idle), set(self._references)
        assert len(blank) == len(self._blank), "a block is blank twice"
        states = (untouched, blank, idle, used)
        assert set().union(*states) == set(range(self.num_blocks)), "a block is lost, or made up"
        assert sum(map(len, states)) == self.num_blocks, "a block is in two states"
        assert min(self._references.values(), default=1) > 0, "a block was freed too often"
        known = set(self._hash_of)
        assert idle <= known, "a block is idle without a prefix"
        assert not known & (blank | untouched), "a block is blank with a prefix"
        assert self._known == {h: b for b, h in self._hash_of.items()}, "known prefixes differ"
