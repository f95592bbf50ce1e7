from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.parallel.shards import Range, attention_shards, layer_shards, split, vocab_shards, width_shards


def cover(ranges: tuple[Range, ...], total: int) -> bool:
    """Whether the ranges are contiguous, disjoint and whole, in order."""
    ends = [0, *(part.stop for part in ranges)]
    return [part.start for part in ranges] == ends[:-1] and ends[-1] == total


@given(st.integers(0, 500), st.integers(1, 40))
def test_split_covers_and_is_even(total: int, parts: int) -> None:
    ranges = split(total, parts)
    assert cover(ranges, total)
    counts = [part.size for part in ranges]
    assert len(counts) == parts
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_smollm2_heads() -> None:
    two = attention_shards(9, 3, 2)
    assert [(shard.q, shard.kv) for shard in two] == [((0, 6), (0, 2)), ((6, 9), (2, 3))]
    five = attention_shards(9, 3, 5)
    assert [shard.q.size for shard in five] == [2, 1, 2, 1, 3]
    assert [shard.kv for shard in five] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]
    assert [shard.q for shard in five] == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 9)]


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_attention_shards(kv_heads: int, group: int, data: st.DataObject) -> None:
    heads = kv_heads * group
    tp = data.draw(st.integers(1, heads))
    shards = attention_shards(heads, kv_heads, tp)
    assert len(shards) == tp
    assert cover(tuple(shard.q for shard in shards), heads)
    assert {head for shard in shards for head in range(*shard.kv)} == set(range(kv_heads))
    for shard in shards:
        assert shard.q.size >= 1
        assert shard.q.size % shard.kv.size == 0  # repeat_kv works unchanged on the rank
        assert {head // group for head in range(*shard.q)} == set(range(*shard.kv))
    if tp <= kv_heads:
        assert cover(tuple(shard.kv for shard in shards), kv_heads)
        assert max(s.kv.size for s in shards) - min(s.kv.size for s in shards) <= 1
    else:
        holders = [sum(shard.kv.start == head for shard in shards) for head in range(kv_heads)]
        assert max(holders) - min(holders) <= 1
        assert all(shard.kv.size == 1 for shard in shards)


def test_more_ranks_than_query_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 10 is more than the model's 9 query heads"):
        attention_shards(9, 3, 10)
    with pytest.raises(ConfigError, match="no multiple"):
        attention_shards(9, 2, 1)


@given(st.integers(1, 3000), st.integers(1, 16), st.sampled_from([1, 8, 32, 64, 128]))
def test_width_shards(width: int, tp: int, multiple: int) -> None:
    if tp > width:
        with pytest.raises(ConfigError, match="use at most"):
            width_shards(width, tp, multiple)
        return
    ranges = width_shards(width, tp, multiple)
    assert cover(ranges, width)
    assert len(ranges) == tp
    assert all(part.size >= 1 for part in ranges)
    if width >= tp * multiple:
        assert all(part.start % multiple == 0 for part in ranges)


def test_widths_of_smollm2() -> None:
    assert [part.size for part in width_shards(1536, 5, 32)] == [320, 320, 320, 288, 288]
    assert [part.size for part in vocab_shards(49152, 5)] == [9831, 9831, 9830, 9830, 9830]


@given(st.integers(1, 100), st.data())
def test_layer_shards(layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, layers))
    ranges = layer_shards(layers, pp)
    assert cover(ranges, layers)
    counts = [part.size for part in ranges]
    assert len(counts) == pp
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)  # the last stage has the head and the sampler too


def test_layer_partition() -> None:
    assert layer_shards(30, 4) == ((0, 7), (7, 15), (15, 23), (23, 30))
    assert layer_shards(5, 2, [1, 4]) == ((0, 1), (1, 5))
    for partition in ([2, 2], [5, 0], [1, 1, 3]):
        with pytest.raises(ConfigError, match="--pp-layer-partition"):
            layer_shards(5, 2, partition)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 6"):
        layer_shards(5, 6)


def test_ranges() -> None:
    assert Range(2, 3).scaled(64) == (128, 192)
    assert list(range(10))[Range(2, 4).as_slice()] == [2, 3]
    with pytest.raises(ValueError, match="cannot split"):
        split(3, 0)
