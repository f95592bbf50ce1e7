from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.parallel.shards import (
    Range,
    apportion,
    attention_shards,
    auto_weights,
    ease_weights,
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


weight_lists = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@given(st.integers(0, 400), weight_lists, st.integers(0, 3))
def test_apportioned_shares_are_proportional(total: int, weights: list[int], least: int) -> None:
    if total < least * len(weights):
        with pytest.raises(ValueError, match="cannot share"):
            apportion(total, weights, least)
        return
    shares = apportion(total, weights, least)
    assert sum(shares) == total
    assert min(shares) >= least
    by_weight = sorted(zip(weights, shares, strict=True))
    assert all(one <= other + (weight == more) for (weight, one), (more, other) in pairwise(by_weight))
    exact = [Fraction(total * weight, sum(weights)) for weight in weights]
    if all(one >= least for one in exact):
        assert all(abs(share - one) < 1 for share, one in zip(shares, exact, strict=True))


@given(st.integers(0, 400), st.integers(1, 12), st.integers(1, 5))
def test_equal_weights_are_no_weights(total: int, parts: int, weight: int) -> None:
    assert apportion(total, [weight] * parts) == tuple(part.size for part in split(total, parts))


@given(st.integers(1, 12), st.integers(1, 8), weight_lists)
def test_weighted_attention_shards(kv_heads: int, group: int, weights: list[int]) -> None:
    heads, tp = kv_heads * group, len(weights)
    if tp > heads:
        return
    units = kv_heads if tp <= kv_heads else heads
    if 0 in apportion(units, weights):
        with pytest.raises(ConfigError, match=rf"--tp-weights .* leaves TP rank \d+ nothing: its part of {units} "):
            attention_shards(heads, kv_heads, tp, weights)
        return
    shards = attention_shards(heads, kv_heads, tp, weights)
    assert cover(tuple(shard.q for shard in shards), heads)
    assert {head for shard in shards for head in range(*shard.kv)} == set(range(kv_heads))
    for shard in shards:
        assert shard.q.size >= 1
        assert shard.q.size % shard.kv.size == 0
        assert {head // group for head in range(*shard.q)} == set(range(*shard.kv))
    if tp <= kv_heads:  # whole KV heads with all that read them
        assert cover(tuple(shard.kv for shard in shards), kv_heads)
        assert [shard.kv.size for shard in shards] == list(apportion(kv_heads, weights))
    else:
        assert all(shard.kv.size == 1 for shard in shards)


@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_ranks_are_laid_over_kv_heads_as_well_as_can_be(kv_heads: int, group: int, data: st.DataObject) -> None:
    heads = kv_heads * group
    tp = data.draw(st.integers(kv_heads, heads))
    weights = data.draw(st.lists(st.integers(1, 6), min_size=tp, max_size=tp).filter(lambda all_: len(set(all_)) > 1))
    if tp == kv_heads or 0 in apportion(heads, weights):
        return

    def distance(sizes: list[int]) -> Fraction:
        return sum((size - Fraction(heads * w, sum(weights))) ** 2 for size, w in zip(sizes, weights, strict=True))

    best = []
    for cuts in combinations(range(1, tp), kv_heads - 1):
        spans = list(pairwise([0, *cuts, tp]))
        if all(stop - start <= group for start, stop in spans):
            best.append(distance([n for start, stop in spans for n in apportion(group, weights[start:stop], 1)]))
    assert distance([shard.q.size for shard in attention_shards(heads, kv_heads, tp, weights)]) == min(best)


def test_weights_by_example() -> None:
    def sizes(*args: Any) -> list[tuple[int, int]]:
        return [(shard.q.size, shard.kv.size) for shard in attention_shards(*args)]

    assert sizes(32, 8, 3, (2, 1, 1)) == [(16, 4), (8, 2), (8, 2)]
    assert sizes(28, 4, 3, (2, 1, 1)) == [(14, 2), (7, 1), (7, 1)]
    assert sizes(8, 2, 3, (2, 1, 1)) == [(4, 1), (2, 1), (2, 1)]
    assert sizes(8, 2, 3, (1, 1, 2)) == [(2, 1), (2, 1), (4, 1)]
    assert sizes(8, 1, 3, (5, 2, 1)) == [(5, 1), (2, 1), (1, 1)]
    assert [part.size for part in width_shards(131, 3, 16, (2, 1, 1))] == [80, 32, 19]
    assert [part.size for part in vocab_shards(50277, 3, (2, 1, 1))] == [25139, 12569, 12569]
    with pytest.raises(ConfigError, match=r"9,1 leaves TP rank 1 nothing: its part of 2 KV heads.* is 0\.20 of one"):
        attention_shards(16, 2, 2, (9, 1))
    with pytest.raises(ConfigError, match=r"40,1 leaves TP rank 1 nothing: its part of 8 query heads is 0\.20"):
        attention_shards(8, 1, 2, (40, 1))
    with pytest.raises(ConfigError, match=r"--tp-weights 2,1 has 2 numbers, but --tensor-parallel-size is 3"):
        attention_shards(8, 1, 3, (2, 1))


@given(st.integers(1, 4000), weight_lists, st.sampled_from([1, 16]))
def test_weighted_widths(width: int, weights: list[int], multiple: int) -> None:
    tp = len(weights)
    if tp > width:
        with pytest.raises(ConfigError, match="use at most"):
            width_shards(width, tp, multiple, weights)
        return
    ranges = width_shards(width, tp, multiple, weights)
    assert cover(ranges, width)
    assert min(part.size for part in ranges) >= 1
    if multiple > 1 and width // multiple >= tp:
        assert all(part.start % multiple == 0 for part in ranges)
    unit = multiple if width // multiple >= tp else 1
    exact = [width * weight / sum(weights) for weight in weights]
    if min(exact) >= unit:
        assert all(abs(part.size - one) < 2 * unit for part, one in zip(ranges, exact, strict=True))


def test_weights_from_free_memory() -> None:
    gib = 1 << 30
    assert auto_weights([80 * gib, 40 * gib, 40 * gib]) == (2, 1, 1)
    assert auto_weights([139 * gib, 140 * gib]) == ()  # like devices never have the same number of bytes free
    assert auto_weights([24 * gib, 16 * gib]) == (16, 11)
    assert auto_weights([80 * gib, gib]) == (16, 1)
    assert auto_weights([80 * gib, 0]) == auto_weights([]) == ()


@given(st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(1, 16), min_size=1, max_size=9))
def test_eased_weights_leave_nobody_without_heads(kv_heads: int, group: int, weights: list[int]) -> None:
    heads, tp = kv_heads * group, len(weights)
    eased = ease_weights(heads, kv_heads, weights)
    if tp > heads:
        assert eased == ()
        return
    assert all(shard.q.size >= 1 for shard in attention_shards(heads, kv_heads, tp, eased))
    assert len({after - before for before, after in zip(weights, eased, strict=False)}) <= 1  # the order stays
    if 0 not in apportion(kv_heads if tp <= kv_heads else heads, weights):
        assert eased == tuple(weights)


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
