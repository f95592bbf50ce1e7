"""Memory that outlives an engine on CPUs: its keys and values, and the table of what they are.

::

    front end    KeptMemory: memfds (no name anywhere), handed on to each engine that it starts
       |  descriptors: table, life, KV of local rank 0, 1 ...
    engine core  KeptPrefixes: may what lies there be used? The table that BlockPool writes (engine.prefix_table)
       |  of each rank: KV, life
    worker       KVCache maps the memory and sizes it

When an engine is started again, the blocks whose content the table vouches for are free blocks with a known prefix, and
the requests that are sent again find them as any request does. What makes it safe:

- Nobody of the engine before may still write there. *Life* is a pipe that every process holds which maps the memory; a
  process lets go of its mappings before it lets go of its descriptors, so the pipe's end means that all are gone.
- An engine that may have written where it should not (a crash by SIGSEGV and the like) or that hung, or died before it
  gave a token, leaves nothing (``engine.healing``): the next one gets new memory.
- What another model, layout or size wrote is not used (:func:`fingerprint`), and given back to the system first.
- Whoever calls workers may have changed them: from then on this engine leaves nothing (:meth:`PrefixTable.stop`).

The number of blocks stays what it was: what the old engine's pool has taken is not free memory, but it is its own.
Rejected: to keep the workers' descriptors in the engine core (it dies too), a name in /dev/shm (stays after a kill).
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import select
from collections.abc import Sequence
from pathlib import Path

from drumline.config import EngineConfig
from drumline.engine.prefix_table import Geometry, PrefixTable
from drumline.executor import Executor
from drumline.plan.kv import KVSpec
from drumline.platforms import resolve_platform
from drumline.transport.memory import memfd

log = logging.getLogger(__name__)

MOST_RANKS = 200
"""More descriptors than these do not go into one message between processes."""
GONE_S = 1.0
"""How long the processes of a dead engine, which were killed, may still be there."""


def ranks_to_keep(config: EngineConfig) -> int:
    """Ranks of this machine whose KV memory outlives the engine; 0: none does."""
    kind = Executor.get_class(config)
    parallel, ranks = config.parallel, config.parallel.world_size
    possible = (
        config.cache.enable_prefix_caching
        and kind.keeps_memory
        and "__init__" not in {name for cls in kind.__mro__[: kind.__mro__.index(Executor)] for name in vars(cls)}
        and parallel.nnodes == 1
        # Where ranks share out tokens, an answer does not say that all of them have written theirs.
        and parallel.prefill_context_parallel_size == parallel.decode_context_parallel_size == 1
        and ranks <= MOST_RANKS
        and resolve_platform(config.platform).device_type == "cpu"
        and hasattr(os, "memfd_create")
    )
    return ranks if possible else 0


def fingerprint(config: EngineConfig, specs: Sequence[KVSpec]) -> bytes:
    """Equal for engines whose keys and values of the same tokens are the same: model, its files, layout, block size."""
    files = sorted(_state_of(path) for path in Path(config.model.path).iterdir())
    same = (config.model, config.parallel, config.platform, config.process.worker_cls, list(specs), files)
    return hashlib.blake2b(repr(same).encode(), digest_size=32).digest()


def _state_of(path: Path) -> tuple[str, int, int]:
    try:
        found = path.stat()
    except OSError:
        found = path.lstat()  # a link that leads nowhere
    return path.name, found.st_size, found.st_mtime_ns


class KeptMemory:
    """The front end's side. One engine at a time uses it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.incarnation = 0
        """Of the engine that uses it."""
        self._table = memfd("drumline-prefixes")
        self._kv: list[int] = []
        self._life = self._held = -1
        try:
            self._kv += [memfd(f"drumline-kv-{rank}") for rank in range(ranks)]
        except BaseException:
            self.close()
            raise

    def hand_over(self) -> tuple[int, ...]:
        """Descriptors for the next engine core, in the order that :class:`KeptPrefixes` takes them in. Follow it up by
        :meth:`handed_over`."""
        self.incarnation += 1
        self._close_life()
        self._life, self._held = os.pipe2(os.O_CLOEXEC)
        return (self._table, self._held, *self._kv)

    def handed_over(self) -> None:
        """They were sent, or will never be."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def is_free(self, limit_s: float = GONE_S) -> bool:
        """Nobody of the engine before can write there any more. Waits until it is so, up to ``limit_s`` seconds."""
        if self._life < 0:
            return True
        poll = select.poll()
        poll.register(self._life, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(limit_s * 1000))

    def close(self) -> None:
        """Give it back to the system, as soon as nobody maps it. Idempotent."""
        self._close_life()
        fds, self._kv = [*self._kv, self._table], []
        self._table = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _close_life(self) -> None:
        self.handed_over()
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)


class KeptPrefixes:
    """The engine core's side.

    Args:
        fds: from :meth:`KeptMemory.hand_over`; they stay open as long as the process.
        incarnation: of this engine.

    """

    def __init__(self, fds: Sequence[int], incarnation: int) -> None:
        self._table_fd, self._life, *self._kv = fds
        self._incarnation = incarnation
        self._geometry: Geometry | None = None
        self._specs: Sequence[KVSpec] = ()

    def of_workers(self) -> list[tuple[int, int]]:
        """What each worker of this machine gets: KV memory, life."""
        return [(fd, self._life) for fd in self._kv]

    def look(self, config: EngineConfig, specs: Sequence[KVSpec]) -> int | None:
        """Number of blocks of the pool that lies there, if this engine may use it. Else None, and the memory is given
        back. Before workers have mapped it."""
        self._specs = specs
        geometry = self._found(fingerprint(config, specs))
        if geometry is None or not self._sized(geometry.num_blocks):
            for fd in (self._table_fd, *self._kv):
                os.ftruncate(fd, 0)
            return None
        self._geometry = geometry
        return geometry.num_blocks

    def open(self, config: EngineConfig, num_blocks: int) -> PrefixTable | None:
        """The table, once workers have mapped their memory. None if one of them has not: then nothing is kept."""
        if not self._sized(num_blocks):
            return None
        size = PrefixTable.size_of(num_blocks)
        try:
            if self._geometry is None:
                os.ftruncate(self._table_fd, size)
            buf = memoryview(mmap.mmap(self._table_fd, size))
        except OSError as error:
            log.info("The prefix cache does not outlive this process: no memory file of %d bytes (%s)", size, error)
            return None
        geometry = self._geometry or Geometry(
            block_size=self._specs[0].block_size,
            num_blocks=num_blocks,
            bytes_per_block=sum(spec.bytes_per_block for spec in self._specs),
            fingerprint=fingerprint(config, self._specs),
        )
        return PrefixTable(buf, geometry, self._incarnation, take_over=self._geometry is not None)

    def _found(self, mine: bytes) -> Geometry | None:
        size = os.fstat(self._table_fd).st_size
        if not size:
            return None
        with mmap.mmap(self._table_fd, size) as mapping, memoryview(mapping) as buf:
            found = PrefixTable.read(buf)
        if found is None:
            return None
        geometry, incarnation = found
        same = (geometry.fingerprint, geometry.block_size) == (mine, self._specs[0].block_size)
        return geometry if same and incarnation < self._incarnation else None

    def _sized(self, num_blocks: int) -> bool:
        """Every rank's memory has the size of such a pool."""
        return [os.fstat(fd).st_size for fd in self._kv] == [num_blocks * spec.bytes_per_block for spec in self._specs]
