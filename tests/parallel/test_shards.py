from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.parallel.shards import (
    Range,
    attention_shards,
    layer_partition,
    pipeline_split,
    split,
    vocab_shards,
    width_shards,
)


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


costs = st.one_of(st.integers(1, 20), st.floats(0.1, 10))


@given(st.lists(costs, min_size=1, max_size=8), st.integers(0, 30), st.floats(0, 30), st.data())
def test_pipeline_split_is_the_best_of_all(layers: list[float], first: float, last: float, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    ranges = pipeline_split(layers, first, last, stages)
    assert cover(ranges, len(layers))
    assert len(ranges) == stages
    assert all(part.size >= 1 for part in ranges)

    def stage_costs(cuts: tuple[int, ...]) -> list[float]:
        ends = [0, *cuts, len(layers)]
        found = [sum(layers[start:stop]) for start, stop in pairwise(ends)]
        found[0] += first
        found[-1] += last
        return found

    every = [stage_costs(cuts) for cuts in combinations(range(1, len(layers)), stages - 1)]
    mine = stage_costs(tuple(part.stop for part in ranges[:-1]))
    slowest = min(max(one) for one in every)
    assert max(mine) <= slowest * (1 + 1e-6)
    evenest = min(sum(c * c for c in one) for one in every if max(one) <= slowest * (1 + 1e-12))
    assert sum(c * c for c in mine) <= evenest * (1 + 1e-6)


def test_pipeline_split() -> None:
    assert [part.size for part in pipeline_split([1.0] * 30, 0, 8, 2)] == [19, 11]  # a head that costs 8 layers
    assert [part.size for part in pipeline_split([1.0] * 5, 0, 0, 2)] == [3, 2]
    assert [part.size for part in pipeline_split([1.0] * 3, 0, 100, 3)] == [1, 1, 1]
    assert [part.size for part in pipeline_split([1.0] * 128, 2, 3, 16)][::15] == [7, 5]
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 6 is more than the model's 5 layers"):
        pipeline_split([1.0] * 5, 0, 0, 6)


def test_layer_partition() -> None:
    assert layer_partition(5, 2, [1, 4]) == ((0, 1), (1, 5))
    refused = {
        (2, 2): "adds up to 4 layers, but the model has 5",
        (5, 0): "leaves a stage without layers",
        (1, 1, 3): "has 3 numbers, but --pipeline-parallel-size is 2",
    }
    for partition, reason in refused.items():
        with pytest.raises(ConfigError, match=f"--pp-layer-partition {','.join(map(str, partition))} {reason}"):
            layer_partition(5, 2, partition)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 6"):
        layer_partition(5, 6, [1] * 6)


def test_ranges() -> None:
    assert Range(2, 3).scaled(64) == (128, 192)
    assert list(range(10))[Range(2, 4).as_slice()] == [2, 3]
    with pytest.raises(ValueError, match="cannot split"):
        split(3, 0)
