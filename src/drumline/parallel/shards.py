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

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from drumline.errors import ConfigError


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


def layer_shards(num_layers: int, pp: int, partition: Sequence[int] | None = None) -> tuple[Range, ...]:
    """Layers of each pipeline stage; ``partition`` gives the number of layers of each stage instead of an even split.

    What is left over goes to the middle stages, later ones first: the first stage also has the embedding, the last
    one the head and the sampler.
    """
    if pp > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {pp} is more than the model's {num_layers} layers: use at most {num_layers}"
        )
    if partition is None:
        sizes = [num_layers // pp] * pp
        for stage in _stages_by_spare_time(pp)[: num_layers % pp]:
            sizes[stage] += 1
    else:
        sizes = list(partition)
        if len(sizes) != pp or sum(sizes) != num_layers or min(sizes) < 1:
            raise ConfigError(
                f"--pp-layer-partition {','.join(map(str, sizes))} must have {pp} positive numbers that add up to "
                f"{num_layers} layers"
            )
    ends = [sum(sizes[: stage + 1]) for stage in range(pp)]
    return tuple(Range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _stages_by_spare_time(pp: int) -> list[int]:
    """Stages in the order in which they get a layer more: middle ones from the back, then the first, then the last."""
    return [*range(pp - 2, 0, -1), 0, *([pp - 1] if pp > 1 else [])]
