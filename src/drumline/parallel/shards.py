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

**Weights** (``--tp-weights``). Ranks of unlike devices get heads, MLP widths and vocabulary in proportion to whole
numbers, one for each rank, by largest remainders (Hamilton's method): every share is within one unit of its exact one,
and a larger weight never has less. A unit is a KV head with all its query heads, 16 columns of an MLP, an id of the
vocabulary. With TP > KV heads the ranks are laid over the KV heads so that their query heads come closest to the
proportions, in the sum of squares. Weights that leave a rank no head at all are refused. Equal weights are no weights.
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


def apportion(total: int, weights: Sequence[int], least: int = 0) -> tuple[int, ...]:
    """``total`` units in proportion to ``weights``, by largest remainders; among equal ones the first gets more.

    ``least``: what each gets at least; the others share what is left. ValueError if that is more than there is, or a
    weight is not above 0.
    """
    if not weights or min(weights) < 1 or total < least * len(weights):
        raise ValueError(f"cannot share {total} units by {list(weights)}, at least {least} each")
    others, rest = list(range(len(weights))), total
    while True:
        whole = sum(weights[place] for place in others)
        low = {place for place in others if rest * weights[place] < least * whole}
        if not low:
            break
        others, rest = [place for place in others if place not in low], rest - least * len(low)
    shares = [least] * len(weights)
    for place in others:
        shares[place] = rest * weights[place] // whole
    short = rest - sum(shares[place] for place in others)
    for place in sorted(others, key=lambda place: (-(rest * weights[place] % whole), place))[:short]:
        shares[place] += 1
    return tuple(shares)


def auto_weights(free: Sequence[int]) -> tuple[int, ...]:
    """Weights of ranks whose devices have so much free memory, in bytes: sixteenths of the largest, at least 1.

    That coarse on purpose: two like devices never have the same number of bytes free. Empty: even, or unknown (0).
    """
    if not free or min(free) <= 0:
        return ()
    weights = tuple(max(1, round(16 * one / max(free))) for one in free)
    divisor = math.gcd(*weights)
    return () if len(set(weights)) == 1 else tuple(weight // divisor for weight in weights)


def ease_weights(num_heads: int, num_kv_heads: int, weights: Sequence[int]) -> tuple[int, ...]:
    """The weights, or else those nearest to them with which every rank has heads: the same is added to each. Empty:
    equal ones, which may not do either (``attention_shards`` says why)."""
    for more in range(16 * max(weights, default=0)):  # by then they are as good as equal
        eased = tuple(weight + more for weight in weights)
        try:
            attention_shards(num_heads, num_kv_heads, len(eased), eased)
        except ConfigError:
            continue
        return eased
    return ()


def attention_shards(num_heads: int, num_kv_heads: int, tp: int, weights: Sequence[int] = ()) -> tuple[HeadShard, ...]:
    """Heads of each TP rank, see the module's docstring. ConfigError if TP is above the number of query heads, or the
    weights leave a rank without a head."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if tp > num_heads:
        raise ConfigError(
            f"--tensor-parallel-size {tp} is more than the model's {num_heads} query heads, so some ranks would have "
            f"none: use at most {num_heads}"
        )
    weights = _checked_weights(weights, tp)
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        shares = _no_empty(apportion(num_kv_heads, weights), weights, "KV heads (with all their query heads)")
        return tuple(HeadShard(kv.scaled(group), kv) for kv in _ranges(shares))
    _no_empty(apportion(num_heads, weights), weights, "query heads")
    even = len(set(weights)) == 1
    shards: list[HeadShard] = []
    for head, ranks in enumerate(split(tp, num_kv_heads) if even else _over_heads(group, num_kv_heads, weights)):
        for part in _ranges(apportion(group, weights[ranks.as_slice()], least=1)):
            shards.append(HeadShard(part.shifted(head * group), Range(head, head + 1)))
    return tuple(shards)


def _checked_weights(weights: Sequence[int], tp: int) -> tuple[int, ...]:
    if not weights:
        return (1,) * tp
    if len(weights) != tp:
        raise ConfigError(
            f"--tp-weights {_shown(weights)} has {len(weights)} numbers, but --tensor-parallel-size is {tp}: give one "
            "for each rank"
        )
    return tuple(weights)


def _no_empty(shares: tuple[int, ...], weights: Sequence[int], what: str) -> tuple[int, ...]:
    if 0 in shares:
        rank, total = shares.index(0), sum(shares)
        raise ConfigError(
            f"--tp-weights {_shown(weights)} leaves TP rank {rank} nothing: its part of {total} {what} is "
            f"{total * weights[rank] / sum(weights):.2f} of one. Use weights that are less far apart"
        )
    return shares


def _shown(weights: Sequence[int]) -> str:
    return ",".join(map(str, weights))


def _ranges(sizes: Sequence[int]) -> tuple[Range, ...]:
    return tuple(Range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)]))


def _over_heads(group: int, num_kv_heads: int, weights: Sequence[int]) -> tuple[Range, ...]:
    """Ranks that share each KV head, whose ``group`` query heads they split; there are more ranks than KV heads."""
    tp, whole, heads = len(weights), sum(weights), group * num_kv_heads

    def cost(start: int, stop: int) -> int:
        """Squares of how far the ranks' query heads are from their exact part, times the sum of weights."""
        shares = apportion(group, weights[start:stop], least=1)
        return sum(
            (share * whole - heads * weight) ** 2 for share, weight in zip(shares, weights[start:stop], strict=True)
        )

    # Over "the first h KV heads have the first n ranks": the least cost, and where the last of them starts.
    table: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for _ in range(num_kv_heads):
        row: dict[int, tuple[int, int]] = {}
        for start, (before, _) in table[-1].items():
            for stop in range(start + 1, min(start + group, tp) + 1):
                found = before + cost(start, stop), start
                row[stop] = min(row.get(stop, found), found)
        table.append(row)
    ends = [tp]
    for row in reversed(table[1:]):
        ends.append(row[ends[-1]][1])
    return tuple(Range(start, stop) for start, stop in pairwise(reversed(ends)))


def width_shards(width: int, tp: int, multiple: int = 1, weights: Sequence[int] = ()) -> tuple[Range, ...]:
    """Rows or columns of an MLP (or any plain matrix) of each TP rank; each has one at least.

    Ranges begin at whole multiples of ``multiple`` if every rank can have at least one whole multiple (kernels and
    caches like round widths), else they are split to the element. ConfigError if there are more ranks than elements.
    """
    if tp > width:
        raise ConfigError(
            f"--tensor-parallel-size {tp} is more than the model's width of {width}, so some ranks would have nothing: "
            f"use at most {width}"
        )
    weights = _checked_weights(weights, tp)
    if multiple > 1 and width // multiple >= tp:
        units = _ranges(apportion(-(-width // multiple), weights, least=1))
        return tuple(Range(part.start * multiple, min(part.stop * multiple, width)) for part in units)
    return _ranges(apportion(width, weights, least=1))


def vocab_shards(vocab_size: int, tp: int, weights: Sequence[int] = ()) -> tuple[Range, ...]:
    """Vocabulary ids of each TP rank; embedding and output head use the same ranges (tied or not). ConfigError if there
    are more ranks than ids."""
    if tp > vocab_size:
        raise ConfigError(
            f"--tensor-parallel-size {tp} is more than the model's vocabulary of {vocab_size} ids (vocab_size), so "
            f"some ranks would have nothing: use at most {vocab_size}"
        )
    return width_shards(vocab_size, tp, weights=weights)


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
