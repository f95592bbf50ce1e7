"""Attention over keys and values that are dealt out over the ranks of a DCP group (``parallel.context``).

Flow of one layer, after the step's keys and values are written::

    queries of this rank [T, Hq, D]
      |  all-gather: every rank has the queries of all (those that it computed itself anyway stay at home)
      |  partial attention: all queries over the keys that lie here, each output with its log-sum-exp
      |  all-gather: every rank has all partial outputs
      v  merge those of its own queries -> [T, Hq, D]

Two sets of queries: *common* ones, of tokens that every PCP place computes, and those of tokens that one PCP place of
the group computes alone. In a set the query heads of TP ranks stand side by side: the ranks of a group hold the same KV
heads, so if they are different TP ranks there is one KV head, which all these query heads read.

A prompt goes the same way as decoding: one path, whose work is even whatever is long, context or prompt. Gathering the
keys of the context instead would move less where few query heads share a KV head and a step has many tokens of a
prompt; it would need room for the context of a whole sequence, which DCP is there to avoid.

Softmax is in float32, by matrix products: torch's fused kernels do not give the log-sum-exp away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from drumline.model.attention import QUERY_ROWS, KVCache, _gather_rows, _gathered, _group_by_length, _tensor
from drumline.parallel.context import Longs, Segments, held

Ints = npt.NDArray[Any]


class DCPGroup(Protocol):
    """What is needed of the decode context parallel group (``parallel.groups.GroupCoordinator``)."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def rank_in_group(self) -> int:
        """Place of this rank."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """All members' tensors along ``dim``."""


@dataclass(frozen=True)
class Member:
    """A rank of a DCP group."""

    pcp: int
    tp: int
    heads: int
    """Its query heads."""


@dataclass(frozen=True)
class QuerySet:
    """Queries of a step, [tokens, heads of all members, D]."""

    segments: Segments
    members: tuple[int, ...]
    """Places in the group of those whose query heads stand side by side."""
    common: bool
    """Every rank of the group computes these tokens, with heads of its own TP rank; else those of one PCP place do."""
    local: Longs | None
    """Places of the tokens among those that this rank computes; None if it does not."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.segments.lengths.sum())


@dataclass(frozen=True)
class _Piece:
    """Queries that see keys of one :class:`_Reading`: one of each of its rows, or several of its only row."""

    tokens: slice | torch.Tensor
    """Places in the set."""
    keys: int
    """So many of the keys are looked at."""
    seen: torch.Tensor
    """[rows, queries of each, keys] bool."""


@dataclass(frozen=True)
class _Reading:
    """Rows whose keys that lie here are gathered together."""

    gather: torch.Tensor
    """[rows x Hkv x blocks] rows of the cache seen as [blocks x Hkv, block x D]."""
    rows: int
    pieces: list[_Piece]


class Spread:
    """Attention of one step on one rank. Made once a step, used by every layer."""

    def __init__(
        self,
        group: DCPGroup,
        members: Sequence[Member],
        cache: KVCache,
        sets: Sequence[QuerySet],
        tables: Ints,
        num_computed: Ints,
        device: torch.device,
    ) -> None:
        """``sets``: the same on all ranks of the group, but for ``local``. ``tables`` [B, N], ``num_computed`` [B]: of
        the step's rows, which segments refer to."""
        self._group, self._members, self._cache, self._sets = group, members, cache, sets
        self._tables, self._computed, self._device = tables, num_computed, device
        self._me = members[group.rank_in_group]
        self._views: dict[int | None, list[list[_Reading]]] = {}
        self._sizes = [
            sum(sets[number].tokens for number in self._sent_by(place)) * member.heads
            for place, member in enumerate(members)
        ]
        mine = [_local(sets[number]) for number in self._sent_by(group.rank_in_group)]
        self._sends = _tensor(np.concatenate([np.empty(0, dtype=np.int64), *mine]), device)
        self._homes = [_tensor(_local(one), device) if self._at_home(one) else None for one in sets]
        self._picks = _tensor(self._own_rows(), device)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, Hq, Dv] for this rank's queries [T, Hq, D]; other arguments as of ``attention.attend``. A collective.

        ``sinks`` [Hq]: scores of no key, one more of each query in the softmax.
        """
        found = [
            self._partials(layer, queries, readings, scaling, softcap).flatten(0, 1)
            for queries, readings in zip(self._queries(q), self._view(window), strict=True)
        ]
        flat = found[0] if len(found) == 1 else torch.cat(found)
        everybodys = self._group.all_gather(flat, 0).view(self._group.size, *flat.shape)
        each = None if sinks is None else sinks.float().expand(q.shape[:2]).flatten()
        merged = merge(everybodys.index_select(1, self._picks), each)
        return merged.view(q.shape[0], q.shape[1], -1).to(q.dtype)

    # --- who has which queries ----------------------------------------------------------------------------------------

    def _at_home(self, one: QuerySet) -> bool:
        """Every rank of the group has these queries already."""
        return one.common and len(one.members) == 1

    def _sent_by(self, place: int) -> list[int]:
        """Sets whose queries a member sends to the others."""
        return [n for n, one in enumerate(self._sets) if place in one.members and not self._at_home(one)]

    def _own_rows(self) -> Longs:
        """Rows of this rank's own queries, token by token, among those of all sets, one set after the other."""
        tokens = sum(one.tokens for one in self._sets if one.local is not None)
        rows: Longs = np.empty((tokens, self._me.heads), dtype=np.int64)
        begin = 0
        for one in self._sets:
            heads = [self._members[place].heads for place in one.members]
            if one.local is not None:
                column = [self._members[place].tp for place in one.members].index(self._me.tp)
                first = begin + np.arange(one.tokens) * sum(heads) + sum(heads[:column])
                rows[one.local] = first[:, None] + np.arange(self._me.heads)
            begin += one.tokens * sum(heads)
        return rows.ravel()

    def _queries(self, q: torch.Tensor) -> list[torch.Tensor]:
        """Of each set [tokens, heads of all members, D]. A collective, if somebody lacks some."""
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        if any(self._sizes):
            sends = q.index_select(0, self._sends).reshape(-1, q.shape[2])
            gathered = torch.split_with_sizes(self._group.all_gather(sends, 0, self._sizes), self._sizes)
            for place, (member, piece) in enumerate(zip(self._members, gathered, strict=True)):
                sent = self._sent_by(place)
                counts = [self._sets[number].tokens for number in sent]
                parts = torch.split_with_sizes(piece.view(-1, member.heads, q.shape[2]), counts)
                pieces |= {(number, place): part for number, part in zip(sent, parts, strict=True)}
        return [
            q.index_select(0, home) if home is not None else torch.cat([pieces[n, place] for place in one.members], 1)
            for n, (one, home) in enumerate(zip(self._sets, self._homes, strict=True))
        ]

    # --- what lies here -----------------------------------------------------------------------------------------------

    def _partials(
        self, layer: int, q: torch.Tensor, readings: list[_Reading], scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """[tokens, heads, Dv + 1] for queries [tokens, heads, D] of a set (:func:`partial_attention`)."""
        out = None
        for reading in readings:
            keys = _gathered(self._cache.keys[layer], reading.gather, reading.rows)
            values = _gathered(self._cache.values[layer], reading.gather, reading.rows)
            for piece in reading.pieces:
                queries = q[piece.tokens].view(reading.rows, -1, *q.shape[1:])
                first = slice(piece.keys)
                found = partial_attention(queries, keys[:, :, first], values[:, :, first], piece.seen, scaling, softcap)
                if out is None:
                    out = found.new_empty((*q.shape[:2], found.shape[-1]))
                out[piece.tokens] = found.flatten(0, 1)
        assert out is not None
        return out

    def _view(self, window: int | None) -> list[list[_Reading]]:
        """What is read of each set by layers whose queries reach ``window`` tokens; None: all."""
        if window not in self._views:
            self._views[window] = [self._readings(one.segments, window) for one in self._sets]
        return self._views[window]

    def _readings(self, segments: Segments, window: int | None) -> list[_Reading]:
        first = self._computed[segments.rows].astype(np.int64) + segments.offsets
        rows = _Rows(
            self._cache, self._tables[segments.rows], first, segments.lengths, window, self._group, self._device
        )
        single = segments.lengths == 1
        groups = _group_by_length(np.flatnonzero(single), rows.num_blocks.astype(np.int32), self._cache.block_bytes)
        return [rows.together(group) for group in groups] + [rows.alone(int(row)) for row in np.flatnonzero(~single)]


class _Rows:
    """Segments of a set, and where their keys are that lie here. Arrays of [segments]."""

    def __init__(
        self,
        cache: KVCache,
        tables: Ints,
        first: Longs,
        lengths: Longs,
        window: int | None,
        group: DCPGroup,
        device: torch.device,
    ) -> None:
        self._cache, self._tables, self._first, self._lengths = cache, tables, first, lengths
        self._window, self._place, self._size, self._device = window, group.rank_in_group, group.size, device
        self._starts = np.cumsum(lengths) - lengths
        reach = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0)
        self._begin = reach // (cache.block_size * group.size)
        """First block that is read."""
        end = -(-held(first + lengths, self._place, self._size) // cache.block_size)
        self.num_blocks: Longs = np.maximum(end - self._begin, 1)
        """Blocks that are read; a row none of whose keys are here reads one for nothing."""

    def together(self, rows: Longs) -> _Reading:
        """Rows with one query each."""
        count, begin = self.num_blocks[rows], self._begin[rows]
        nth = np.arange(int(count.max()))
        columns = np.where(nth < count[:, None], nth, 0) + begin[:, None]  # padding: a row's own first block, not seen
        queries = self._first[rows]
        keys = self._keys(begin, queries + 1)
        piece = _Piece(_tensor(self._starts[rows], self._device), keys, self._seen(begin, queries[:, None], keys))
        return self._reading(self._tables[rows[:, None], columns], [piece])

    def alone(self, row: int) -> _Reading:
        """A row with several queries."""
        begin, count = int(self._begin[row]), int(self.num_blocks[row])
        pieces = []
        for start in range(0, int(self._lengths[row]), QUERY_ROWS):
            stop = min(start + QUERY_ROWS, int(self._lengths[row]))
            queries = self._first[row] + np.arange(start, stop)
            keys = self._keys(np.array([begin]), queries[-1:] + 1)
            tokens = slice(int(self._starts[row]) + start, int(self._starts[row]) + stop)
            pieces.append(_Piece(tokens, keys, self._seen(np.array([begin]), queries[None], keys)))
        return self._reading(self._tables[row : row + 1, begin : begin + count], pieces)

    def _reading(self, blocks: Ints, pieces: list[_Piece]) -> _Reading:
        return _Reading(_gather_rows(blocks, self._cache.num_kv_heads, self._device), len(blocks), pieces)

    def _keys(self, begin: Longs, ends: Longs) -> int:
        """Most keys that are read of a row, from its first block on, of positions below ``ends``."""
        return max(int((held(ends, self._place, self._size) - begin * self._cache.block_size).max()), 1)

    def _seen(self, begin: Longs, queries: Longs, keys: int) -> torch.Tensor:
        """[B, n, keys]: whether queries at positions [B, n] see the keys from the rows' first blocks [B] on."""
        numbers = begin[:, None] * self._cache.block_size + np.arange(keys)
        positions = (numbers * self._size + self._place)[:, None]
        seen = positions <= queries[:, :, None]
        if self._window is not None:
            seen &= positions > queries[:, :, None] - self._window
        return torch.from_numpy(seen).to(self._device)


def _local(one: QuerySet) -> Longs:
    assert one.local is not None
    return one.local


def partial_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """[B, n, Hq, Dv + 1] float32: attention over some of the keys, and behind it the log-sum-exp of its scores.

    ``q`` [B, n, Hq, D], ``keys`` [B, Hkv, S, D], ``values`` [B, Hkv, S, Dv], ``seen`` [B, n, S] bool. A query that sees
    none of the keys gets 0, and -inf.
    """
    rows, count, heads, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    packed = q.float().view(rows, count, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
    scores = ((packed * scaling) @ keys.float().transpose(-1, -2)).view(rows, kv_heads, -1, count, length)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~seen[:, None, None], float("-inf"))
    highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights.view(rows, kv_heads, -1, length) @ values.float()).view(rows, kv_heads, -1, count, values.shape[-1])
    out = out / total.clamp(min=torch.finfo(torch.float32).tiny)
    both = torch.cat([out, total.log() + highest], -1)
    return both.permute(0, 3, 1, 2, 4).reshape(rows, count, heads, -1)


def merge(partials: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """[N, Dv]: attention over all keys from that over parts of them, ``partials`` [parts, N, Dv + 1].

    With the log-sum-exp s_i of the scores in part i, the whole is the sum of exp(s_i) out_i over that of exp(s_i):
    Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; as "attention states" in Ye
    et al., "FlashInfer", arXiv:2501.01005, section 2.2. Each query must have seen a key in some part. ``sinks`` [N]: a
    score of each query that has no value.
    """
    sums = partials[..., -1]
    if sinks is not None:
        sums = torch.cat([sums, sinks[None]])
    weights = sums.softmax(0)[: len(partials)]
    return (partials[..., :-1] * weights[..., None]).sum(0)
