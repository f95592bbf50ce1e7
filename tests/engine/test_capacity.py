from __future__ import annotations

import pytest

from drumline.config import CacheConfig, SchedulerConfig
from drumline.engine.capacity import Capacity, fit_max_model_len, memory_text, pool_capacity
from drumline.errors import ConfigError
from drumline.plan.kv import KVSpec


def spec(heads: int) -> KVSpec:
    return KVSpec(
        num_layers=2, num_kv_heads=heads, head_dim=8, dtype="float32", block_size=16, bytes_per_block=2048 * heads
    )


def test_the_rank_with_most_heads_limits_equal_memory():
    capacity = pool_capacity([spec(2), spec(1)], [40960, 40960], CacheConfig())
    assert (capacity.num_blocks, capacity.limiting_rank) == (10, 0)
    assert "rank 0 has the least room" in capacity.reason
    assert [c.num_blocks for c in capacity.configs(2)] == [10, 10]


def test_the_rank_with_least_memory_limits_equal_shares():
    capacity = pool_capacity([spec(1)] * 3, [8192, 4096, 8192], CacheConfig())
    assert (capacity.num_blocks, capacity.limiting_rank) == (2, 1)


def test_what_the_others_do_not_use_is_told():
    capacity = pool_capacity([spec(2), spec(1), spec(1)], [20 << 20, 20 << 20, 10 << 20], CacheConfig())
    assert (capacity.num_blocks, capacity.limiting_rank) == (5120, 0)  # the same room as rank 2, and the first
    assert capacity.unused == (0, 10 << 20, 0)
    assert capacity.unused_text == "unused, since rank 0 has no more: rank 1 10 MiB"
    many = pool_capacity([spec(1)] * 11, [8192] + [1 << 20] * 10, CacheConfig())
    assert many.unused_text.endswith("rank 8 1 MiB and 2 ranks more")
    # Less than a block is left: it could not be used anyhow.
    assert pool_capacity([spec(1), spec(1)], [4096, 6000], CacheConfig()).unused_text == ""
    assert pool_capacity([spec(2), spec(1)], [0, 1 << 30], CacheConfig(num_gpu_blocks_override=7)).unused_text == ""
    given = pool_capacity([spec(2), spec(1)], [0, 0], CacheConfig(kv_cache_memory_bytes=40960))
    assert given.unused == (0, 20480)


def test_bytes_and_blocks_can_be_set():
    assert pool_capacity([spec(2), spec(1)], [0, 0], CacheConfig(kv_cache_memory_bytes=8192)).num_blocks == 2
    assert pool_capacity([spec(2), spec(1)], [0, 0], CacheConfig(num_gpu_blocks_override=7)).num_blocks == 7


def test_no_room_says_what_to_change():
    with pytest.raises(ConfigError, match=r"rank 1 has 0 bytes left .* takes 2\.0 KiB.*--gpu-memory-utilization"):
        pool_capacity([spec(1), spec(1)], [8192, -5], CacheConfig())


def test_no_room_in_what_was_given_says_so():
    words = r"--kv-cache-memory-bytes 10 is less than one block, which takes 6\.0 KiB on rank 1: give 6144 at least"
    with pytest.raises(ConfigError, match=words):
        pool_capacity([spec(1), spec(3)], [1 << 30, 1 << 30], CacheConfig(kv_cache_memory_bytes=10))
    capacity = pool_capacity([spec(1), spec(3)], [0, 0], CacheConfig(kv_cache_memory_bytes=6144))
    assert capacity.num_blocks == 1
    assert capacity.reason == "rank 1 has the least room: 6.0 KiB by --kv-cache-memory-bytes, 6.0 KiB a block"


def test_bytes_are_told_in_a_unit_that_shows_them():
    sizes = (0, 1, 1023, 1024, 3 << 19, 300 << 30)
    assert [memory_text(size) for size in sizes] == [
        "0 bytes",
        "1 byte",
        "1023 bytes",
        "1.0 KiB",
        "1.5 MiB",
        "300.0 GiB",
    ]


def test_max_model_len_is_clipped_to_the_pool_unless_asked_for():
    capacity = pool_capacity([spec(1)], [2048 * 4], CacheConfig())
    assert fit_max_model_len(None, 64, capacity, SchedulerConfig()) == (64, "")
    assert fit_max_model_len(None, 65, capacity, SchedulerConfig()) == (65, "")
    limit, reason = fit_max_model_len(None, 8192, capacity, SchedulerConfig())
    assert limit == 65
    assert "holds 64 tokens" in reason
    assert fit_max_model_len(65, 8192, capacity, SchedulerConfig()) == (65, "")
    with pytest.raises(ConfigError, match=r"--max-model-len 66 .*At most 65"):
        fit_max_model_len(66, 8192, capacity, SchedulerConfig())


def test_max_model_len_without_chunked_prefill():
    capacity = pool_capacity([spec(1)], [2048 * 100], CacheConfig())
    whole = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=32)
    assert fit_max_model_len(None, 8192, capacity, whole)[0] == 32
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 32"):
        fit_max_model_len(33, 8192, capacity, whole)


@pytest.mark.parametrize("asked", [None, 2])
def test_a_length_that_leaves_room_for_no_request_is_refused(asked: int | None):
    capacity = Capacity(num_blocks=1, block_size=1, limiting_rank=0, reason="")
    assert fit_max_model_len(asked, 8192, capacity, SchedulerConfig())[0] == 2
    whole = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=1)
    with pytest.raises(ConfigError, match=r"no request can be served.*--max-num-batched-tokens 1"):
        fit_max_model_len(asked, 8192, capacity, whole)
