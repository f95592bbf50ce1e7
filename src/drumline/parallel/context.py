"""Context parallelism: which rank keeps which position, and which rank computes which token. Pure arithmetic, no torch.

**Decode context parallel (DCP).** The keys and values of a sequence are dealt out over the ranks of its DCP group::

    position   0 1 2 3 4 5 6 7 8 ...
    place      0 1 2 0 1 2 0 1 2       position % DCP
    number     0 0 0 1 1 1 2 2 2       position // DCP: the how-manieth it is at its place

By single tokens, not by blocks: so ranks differ by one token at most, however long a sequence is (blocks of 16 would
leave one of two ranks idle for each sequence of up to 16 tokens). And with a block for every ``block size x DCP``
tokens, each rank finds a token of its own in the same block of the table as all the others, ``number // block size``:
ranks need no tables of their own, and scheduler, prefix cache and preemption see blocks that are DCP times as long.

**Prefill context parallel (PCP).** The tokens that a step computes of one sequence are cut into 2 x PCP chunks, and
place i computes chunks i and 2 x PCP - 1 - i: a token sees all before it, so a cheap chunk comes with a dear one. Place
0 has the last token, whose logits are wanted. Few tokens (decoding above all) are computed by every place: exchanging
their keys and values in each layer would cost more than it saves, and a step of decoding reads all weights anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from drumline.errors import ConfigError
from drumline.parallel.layout import GroupKind, Layout
from drumline.parallel.shards import HeadShard, Range, attention_shards, split

LEAST_CHUNK = 4
"""Tokens of the smallest chunk: of shorter sequences every place computes all."""

Longs = npt.NDArray[np.int64]

_N = TypeVar("_N", int, npt.NDArray[Any])


def held(length: _N, place: int, size: int) -> _N:
    """How many of the first ``length`` positions a place keeps, of ``size`` places."""
    return (length + size - 1 - place) // size


def check_same_heads(layout: Layout, heads: Sequence[HeadShard], weights: Sequence[int] = ()) -> None:
    """ConfigError if ranks of one DCP group hold different KV heads. ``heads``: of each TP rank; ``weights``: in what
    proportions they are shared."""
    if layout.dcp == 1 or _same_heads(layout, heads):
        return
    queries, keys = heads[-1].q.stop, heads[-1].kv.stop
    if weights and _same_heads(layout, attention_shards(queries, keys, layout.tp)):
        raise ConfigError(
            f"--tp-weights {','.join(map(str, weights))} does not go with --decode-context-parallel-size {layout.dcp}: "
            f"the ranks of a DCP group would hold different KV heads (of {keys} in all), so they could not share out a "
            "request's keys and values. Shared evenly they would hold the same: leave --tp-weights out"
        )
    fitting = [
        size
        for size in range(1, layout.stage_size + 1)
        if layout.stage_size % size == 0 and _same_heads(Layout(tp=layout.tp, pcp=layout.pcp, dcp=size), heads)
    ]
    raise ConfigError(
        f"--decode-context-parallel-size {layout.dcp}: with --tensor-parallel-size {layout.tp} and "
        f"--prefill-context-parallel-size {layout.pcp} the ranks of a DCP group would hold different KV heads (of "
        f"{heads[-1].kv.stop} in all), so they could not share out a request's keys and values. Sizes that work here: "
        f"{', '.join(map(str, fitting))}; larger ones need more tensor parallel ranks than KV heads, or PCP"
    )


def _same_heads(layout: Layout, heads: Sequence[HeadShard]) -> bool:
    groups = layout.groups[GroupKind.DCP]
    return all(len({heads[layout.coordinates(rank).tp].kv for rank in group}) == 1 for group in groups)


def chunks(count: int, place: int, size: int) -> tuple[Range, ...]:
    """The tokens, of ``count`` of one sequence, that a place computes of ``size`` places: one range or two."""
    if size == 1 or count < 2 * size * LEAST_CHUNK:
        return (Range(0, count),)
    parts = split(count, 2 * size)
    early, late = parts[place], parts[2 * size - 1 - place]
    return (Range(early.start, late.stop),) if early.stop == late.start else (early, late)


def is_shared_out(num_tokens: npt.NDArray[Any], size: int) -> npt.NDArray[np.bool_]:
    """Of which sequences, by the number of their tokens in a step, each place computes a part only."""
    found: npt.NDArray[np.bool_] = (num_tokens >= 2 * size * LEAST_CHUNK) & (size > 1)
    return found


@dataclass(frozen=True)
class Segments:
    """Neighbouring tokens of a step, each segment of one row (sequence): arrays of [segments], in order."""

    rows: Longs
    offsets: Longs
    """Of the first token among those of its row in the step."""
    lengths: Longs

    def places(self, starts: Longs) -> Longs:
        """Places of all tokens among those of the step, ascending. ``starts``: of the rows' first tokens."""
        before = np.cumsum(self.lengths) - self.lengths
        return np.repeat(starts[self.rows] + self.offsets - before, self.lengths) + np.arange(int(self.lengths.sum()))

    def of(self, chosen: npt.NDArray[np.bool_]) -> Segments:
        """The segments of the chosen rows."""
        keep = chosen[self.rows]
        return Segments(self.rows[keep], self.offsets[keep], self.lengths[keep])


def segments(num_tokens: npt.NDArray[Any], place: int, size: int) -> Segments:
    """What a place computes of a step's rows, of which row b has ``num_tokens[b]`` tokens."""
    found = [
        (row, part.start, part.size)
        for row, count in enumerate(num_tokens.tolist())
        for part in chunks(count, place, size)
    ]
    rows, offsets, lengths = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Segments(rows, offsets, lengths)
