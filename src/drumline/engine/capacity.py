"""How many KV blocks there will be, and how long a request may be: arithmetic on what the ranks said. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.config import LEAST_MODEL_LEN, CacheConfig, SchedulerConfig
from drumline.errors import ConfigError
from drumline.plan.kv import KVConfig, KVSpec

UNUSED_SHOWN = 8
"""Most ranks that the log names."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The KV pool that all ranks can hold."""

    num_blocks: int
    block_size: int
    limiting_rank: int
    """The rank whose memory (with uneven heads: whose share of the heads) sets ``num_blocks``."""
    reason: str
    """For the log: where the number comes from."""
    unused: tuple[int, ...] = ()
    """Bytes that each rank could have given to the pool beyond what it gives; 0 where that is less than a block, and
    where the number of blocks was given."""

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self.num_blocks * self.block_size

    @property
    def unused_text(self) -> str:
        """For the log; empty: every rank gives what it has."""
        found = [(rank, spare) for rank, spare in enumerate(self.unused) if spare]
        shown = ", ".join(f"rank {rank} {spare / 2**20:.0f} MiB" for rank, spare in found[:UNUSED_SHOWN])
        more = f" and {len(found) - UNUSED_SHOWN} ranks more" if len(found) > UNUSED_SHOWN else ""
        return f"unused, since rank {self.limiting_rank} has no more: {shown}{more}" if found else ""

    def configs(self, world_size: int) -> list[KVConfig]:
        """What each rank is told: the same number of blocks."""
        return [KVConfig(num_blocks=self.num_blocks, block_size=self.block_size) for _ in range(world_size)]


def memory_text(nbytes: int) -> str:
    """Bytes in the largest unit of which there is one at least."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} byte{'' if nbytes == 1 else 's'}"


def pool_capacity(specs: Sequence[KVSpec], available: Sequence[int], cache: CacheConfig) -> Capacity:
    """The pool: as many blocks as the rank with the least room has.

    Args:
        specs: what one block costs on each rank.
        available: bytes that each rank may use, in rank order.
        cache: may set the number of blocks, or the bytes, whatever the memory.

    Raises ConfigError if not even one block fits.

    """
    if len({spec.block_size for spec in specs}) != 1:
        raise ConfigError(f"ranks disagree on the block size: {[spec.block_size for spec in specs]}")
    size = specs[0].block_size
    if cache.num_gpu_blocks_override is not None:
        blocks, reason = cache.num_gpu_blocks_override, "--num-gpu-blocks-override"
        return Capacity(num_blocks=blocks, block_size=size, limiting_rank=0, reason=reason)
    if cache.kv_cache_memory_bytes is not None:
        available = [cache.kv_cache_memory_bytes] * len(specs)
    room = [bytes_ // spec.bytes_per_block for spec, bytes_ in zip(specs, available, strict=True)]
    rank = min(range(len(room)), key=room.__getitem__)
    given = "" if cache.kv_cache_memory_bytes is None else " by --kv-cache-memory-bytes"
    has = max(available[rank], 0)
    reason = (
        f"rank {rank} has the least room: {f'{has >> 20} MiB' if has >> 20 else memory_text(has)}{given}, "
        f"{specs[rank].bytes_per_block / 2**10:.1f} KiB a block"
    )
    spare = [bytes_ - room[rank] * spec.bytes_per_block for spec, bytes_ in zip(specs, available, strict=True)]
    unused = tuple(bytes_ if bytes_ >= spec.bytes_per_block else 0 for spec, bytes_ in zip(specs, spare, strict=True))
    capacity = Capacity(num_blocks=room[rank], block_size=size, limiting_rank=rank, reason=reason, unused=unused)
    if capacity.num_blocks < 1:
        raise ConfigError(_no_room(rank, specs, available, cache))
    return capacity


def _no_room(rank: int, specs: Sequence[KVSpec], available: Sequence[int], cache: CacheConfig) -> str:
    """Why there is no KV cache, by the rank with the least room, and what to do."""
    if cache.kv_cache_memory_bytes is not None:
        most = max(range(len(specs)), key=lambda rank: specs[rank].bytes_per_block)
        need = specs[most].bytes_per_block
        return (
            f"no room for a KV cache: --kv-cache-memory-bytes {cache.kv_cache_memory_bytes} is less than one block, "
            f"which takes {memory_text(need)} on rank {most}: give {need} at least, or leave it out"
        )
    return (
        f"no room for a KV cache: rank {rank} has {memory_text(max(available[rank], 0))} left after the weights, and "
        f"one block takes {memory_text(specs[rank].bytes_per_block)}. Raise --gpu-memory-utilization or "
        f"--tensor-parallel-size, or set --kv-cache-memory-bytes"
    )


def fit_max_model_len(
    asked: int | None, model_max: int, capacity: Capacity, scheduler: SchedulerConfig
) -> tuple[int, str]:
    """Longest prompt plus output in tokens, and why it is less than the model's own (empty if it is not).

    Args:
        asked: ``--max-model-len``, or None: as long as possible.
        model_max: the most that the model takes, or takes by default.
        capacity: of the pool, which must hold one request of that length alone. (Its last token is never computed.)
        scheduler: with chunked prefill off, a whole prompt must fit into one step.

    Raises ConfigError if ``asked`` does not fit, or no request at all.

    """
    limit, reason = model_max, ""
    if capacity.num_tokens + 1 < limit:
        limit = capacity.num_tokens + 1
        reason = f"the KV pool holds {capacity.num_tokens} tokens ({capacity.reason})"
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < limit:
        limit = scheduler.max_num_batched_tokens
        reason = f"without chunked prefill a prompt must fit into --max-num-batched-tokens {limit}"
    if limit < LEAST_MODEL_LEN:
        raise ConfigError(f"no request can be served, as it has {LEAST_MODEL_LEN} tokens at least: {reason}")
    if asked is None:
        return limit, reason
    if asked > limit and reason:
        raise ConfigError(f"--max-model-len {asked} cannot be served: {reason}. At most {limit} is possible here")
    return min(asked, model_max), ""
