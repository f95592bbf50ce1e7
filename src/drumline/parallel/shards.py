"""Which part of the model a rank holds: pure ranges, uneven where sizes do not divide. No torch.

Every function answers for all ranks at once, so that any rank (and ``drumline plan``) knows everybody's share. Ranges
are half-open ``(start, stop)`` in the model's own order, ascending with the TP rank; the first ranks get what is left
over. Uneven on purpose: SmolLM2 has 9 query and 3 KV heads, and refusing TP 2 for that would be our limit, not the
model's.

Attention heads. A KV head and the query heads that read it stay together:

- TP <= KV heads: KV heads are split as evenly as possible, each takes all its query heads along.
- TP > KV heads: ranks are split as evenly as possible over the KV heads; the ranks of one KV head each hold a copy of
  it and split its query heads.

So on every rank the query heads are a whole multiple of its KV heads and ``repeat_kv`` works there unchanged. (A more
even split of query heads over ranks exists, for example 2, 2, 2, 2, 1 of 9 heads over 5 ranks, but its ranks hold
query heads of two KV heads with different counts, which no attention kernel takes.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from drumline.errors import ConfigError

WIDTH_MULTIPLE = 16
"""Ranges of an MLP's or an expert's width begin at whole cache lines of float32 where they can."""


class Range(NamedTuple):
    """Half-open range ``start .. stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def scaled(self, factor: int) -> Range:
        """The range of elements if each unit of this one has ``factor`` of them (heads to rows of a projection)."""
        return Range(self.start * factor, self.stop * factor)

    def shifted(self, offset: int) -> Range:
        """The range ``offset`` elements further on (a piece of a packed projection)."""
        return Range(self.start + offset, self.stop + offset)

    def as_slice(self) -> slice:
        """For indexing a tensor or a safetensors slice."""
        return slice(self.start, self.stop)


class HeadShard(NamedTuple):
    """Attention heads of one rank."""

    q: Range
    """Query heads."""
    kv: Range
    """KV heads; one that several ranks share is in the range of each."""


def split(total: int, parts: int) -> tuple[Range, ...]:
    """``total`` elements over ``parts``, sizes differing by at most 1, larger ones first. Parts may be empty."""
    if parts < 1 or total < 0:
        raise ValueError(f"cannot split {total} elements into {parts} parts")
    small, larger = divmod(total, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return tuple(Range(start, stop) for start, stop in pairwise(starts))


def attention_shards(num_heads: int, num_kv_heads: int, tp: int) -> tuple[HeadShard, ...]:
    """Heads of each TP rank, see the module's docstring. ConfigError if TP is above the number of query heads."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if tp > num_heads:
        raise ConfigError(
            f"--tensor-parallel-size {tp} is more than the model's {num_heads} query heads, so some ranks would have "
            f"none: use at most {num_heads}"
        )
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        return tuple(HeadShard(kv.scaled(group), kv) for kv in split(num_kv_heads, tp))
    shards: list[HeadShard] = []
    for head, ranks in enumerate(split(tp, num_kv_heads)):
        first = head * group
        for part in split(group, ranks.size):
            shards.append(HeadShard(Range(first + part.start, first + part.stop), Range(head, head + 1)))
    return tuple(shards)


def width_shards(width: int, tp: int, multiple: int = 1) -> tuple[Range, ...]:
    """Rows or columns of an MLP (or any plain matrix) of each TP rank.

    Ranges begin at whole multiples of ``multiple`` if every rank can have at least one whole multiple (kernels and
    caches like round widths), else they are split to the element. ConfigError if there are more ranks than elements.
    """
    if tp > width:
        raise ConfigError(
            f"--tensor-parallel-size {tp} is more than the model's width of {width}, so some ranks would have nothing: "
            f"use at most {width}"
        )
    if multiple > 1 and width // multiple >= tp:
        units = split(-(-width // multiple), tp)
        return tuple(Range(part.start * multiple, min(part.stop * multiple, width)) for part in units)
    return split(width, tp)


def vocab_shards(vocab_size: int, tp: int) -> tuple[Range, ...]:
    """Vocabulary ids of each TP rank; embedding and output head use the same ranges (tied or not)."""
    return width_shards(vocab_size, tp)


def pipeline_split(
    layer_costs: Sequence[float], first_extra: float, last_extra: float, stages: int
) -> tuple[Range, ...]:
    """Layers of each pipeline stage, so that the slowest stage is as fast as can be; then the others as even as can be.

    ``layer_costs`` has what each layer costs, ``first_extra`` what the first stage does beside its layers (embedding),
    ``last_extra`` the last one (head, sampling), all in one unit of the caller's. Every stage has at least one layer.
    Equally good splits: the one whose first stages are larger. ConfigError if there are more stages than layers.
    """
    layers = len(layer_costs)
    _check_stages(layers, stages)
    sums = [0.0, *accumulate(layer_costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        extra = (first_extra if stage == 0 else 0.0) + (last_extra if stage == stages - 1 else 0.0)
        return sums[stop] - sums[start] + extra

    # Two rounds over "the first s stages have the first n layers": the smallest possible largest stage, then, under
    # that bound (a hair above it, for sums of floats), the smallest sum of squares.
    largest = _best_splits(layers, stages, lambda best, own: max(best, own), cost)[-1][layers][0]
    bound = largest * (1 + 1e-9)
    table = _best_splits(layers, stages, lambda best, own: best + own * own if own <= bound else math.inf, cost)
    ends = [layers]
    for stage in range(stages - 1, 0, -1):
        ends.append(table[stage][ends[-1]][1])
    ends.append(0)
    return tuple(Range(start, stop) for start, stop in pairwise(reversed(ends)))


def _best_splits(
    layers: int, stages: int, fold: Callable[[float, float], float], cost: Callable[[int, int, int], float]
) -> list[list[tuple[float, int]]]:
    """For each stage and each number of layers up to and with it: the smallest fold of its and former stages' costs,
    and where the stage starts. Infinite where it cannot be."""
    never = (math.inf, 0)
    table = [[never] + [(fold(0.0, cost(0, 0, stop)), 0) for stop in range(1, layers + 1)]]
    for stage in range(1, stages):
        before, row = table[-1], [never] * (layers + 1)
        for stop in range(stage + 1, layers + 1):
            choices = ((fold(before[start][0], cost(stage, start, stop)), -start) for start in range(stage, stop))
            value, start = min(choices)
            row[stop] = (value, -start)
        table.append(row)
    return table


def layer_partition(num_layers: int, stages: int, sizes: Sequence[int]) -> tuple[Range, ...]:
    """Layers of each pipeline stage as the user gave their numbers. ConfigError if they do not fit."""
    _check_stages(num_layers, stages)
    given = f"--pp-layer-partition {','.join(map(str, sizes))}"
    if len(sizes) != stages:
        raise ConfigError(
            f"{given} has {len(sizes)} numbers, but --pipeline-parallel-size is {stages}: give one for each stage"
        )
    if min(sizes) < 1:
        raise ConfigError(f"{given} leaves a stage without layers: each needs at least one")
    if sum(sizes) != num_layers:
        raise ConfigError(f"{given} adds up to {sum(sizes)} layers, but the model has {num_layers}")
    return tuple(Range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True))


def _check_stages(num_layers: int, stages: int) -> None:
    if stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {stages} is more than the model's {num_layers} layers, so some stages would "
            f"have none: use at most {num_layers}"
        )
