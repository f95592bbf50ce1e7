"""Context parallelism on one rank: which part of a step it computes, and what it exchanges with others.

``parallel.context`` says who keeps and who computes what. One layer of a step::

    k, v of this rank's tokens
      |  PCP: tokens that one place alone computes: all-gather of their k, v over the PCP group
      v  written: of all tokens of the step those that lie at this rank's DCP place (all, without DCP)
    q of this rank's tokens
      |  without DCP: each segment of its tokens is a row of its own for attention, with all before it in the cache
      v  with DCP: ``model.spread``

All else in a forward is done token by token, so it needs nothing but the rank's own tokens; the TP ranks of one PCP
place have the same. Place 0 samples, as the output rank is one of its TP ranks, and tells the others the tokens: ranks
whose sums differ in the last bit must not go on with different tokens.

The forwards that attend by torch's operations are used: the compiled kernels find the keys of a row by themselves, all
of them in one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from drumline.model.attention import QUERY_ROWS, AttentionBatch, KVCache, _tensor
from drumline.model.forward import Forward
from drumline.model.logprobs import GatherGroup
from drumline.model.sampling import Sampler, SamplingRows
from drumline.model.slots import Ints
from drumline.model.spread import DCPGroup, Member, QuerySet, Spread
from drumline.parallel.context import Longs, Segments, held, is_shared_out, segments
from drumline.parallel.layout import Layout
from drumline.parallel.shards import HeadShard, Range
from drumline.plan.step import TokenLogprobs


class PCPGroup(Protocol):
    """What is needed of the prefill context parallel group (``parallel.groups.GroupCoordinator``)."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def rank_in_group(self) -> int:
        """Place of this rank."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """All members' tensors along ``dim``."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Member ``src``'s values, in place."""


@dataclass(frozen=True)
class Exchange:
    """Keys and values of a step: from those that this rank computed to those that it keeps."""

    group: PCPGroup
    sizes: list[int]
    """Tokens that each PCP place alone computes; empty: there are none."""
    common: torch.Tensor | None
    """Among this rank's tokens those that every place computes; None: all."""
    alone: torch.Tensor | None
    """Among this rank's tokens those that it alone computes."""
    kept: torch.Tensor | None
    """Of the common ones and then everybody's own ones: those that this rank keeps; None: all."""

    def written(self, keys_values: torch.Tensor) -> torch.Tensor:
        """[tokens that this rank keeps, ...] of [T, ...]. A collective where PCP places compute parts."""
        found = keys_values if self.common is None else keys_values.index_select(0, self.common)
        if self.alone is not None:
            gathered = self.group.all_gather(keys_values.index_select(0, self.alone), 0, self.sizes)
            found = torch.cat([found, gathered])
        return found if self.kept is None else found.index_select(0, self.kept)


@dataclass(frozen=True)
class Owners:
    """Who computes the tokens of a step, where PCP places compute parts of it."""

    own: Longs
    """Places among the step's tokens of those that this rank computes, ascending."""
    places: Longs
    """[T] PCP place of each token; 0 for those that every place computes."""


class ContextParallel:
    """One rank's view of its PCP and DCP groups; makes the attention side of its steps."""

    def __init__(
        self, layout: Layout, pcp: PCPGroup, dcp: DCPGroup, dcp_ranks: Sequence[int], heads: Sequence[HeadShard]
    ) -> None:
        """``heads``: of each TP rank."""
        self._pcp, self._dcp = pcp, dcp
        where = [layout.coordinates(rank) for rank in dcp_ranks]
        self._members = [Member(one.pcp, one.tp, heads[one.tp].q.size) for one in where]

    def step_bytes(self, tokens: int, length: int, head_dim: int) -> int:
        """About what attention of the largest step takes beyond a forward without a cache, for sequences of ``length``:
        partial outputs of so many tokens, here and as they are gathered, and the scores of a piece of them."""
        if self._dcp.size == 1:
            return 0
        heads = sum(member.heads for member in self._members)
        partials = tokens * heads * (head_dim + 1) * (self._dcp.size + 3)
        scores = 3 * QUERY_ROWS * heads * held(length, 0, self._dcp.size)
        return 4 * (partials + scores)

    def batch(self, cache: KVCache, tables: Ints, computed: Ints, count: Ints, device: torch.device) -> AttentionBatch:
        """The attention side of this rank's part of a step (arguments as of ``attention.make_batch``).

        Its rows are this rank's segments; ``owners`` is None if it computes all tokens.
        """
        place, places = self._pcp.rank_in_group, self._pcp.size
        starts: Longs = np.cumsum(count, dtype=np.int64) - count
        shared_out = is_shared_out(count, places)
        parts = [segments(count, other, places).of(shared_out) for other in range(places)] if shared_out.any() else []
        mine = segments(count, place, places)
        own = mine.places(starts)
        common = mine.of(~shared_out).places(starts)
        alone = [part.places(starts) for part in parts]
        written, kept = self._kept(np.concatenate([common, *alone]), starts, computed, count)
        rows = np.searchsorted(starts, written, side="right") - 1
        numbers = (computed[rows] + written - starts[rows]) // self._dcp.size
        batch = AttentionBatch(
            cache=cache,
            tables=tables[mine.rows],
            num_computed=(computed[mine.rows] + mine.offsets).astype(np.int32),
            num_tokens=mine.lengths.astype(np.int32),
            dtype=cache.data.dtype,
            device=device,
            write_blocks=_tensor(tables[rows, numbers // cache.block_size], device),
            write_offsets=_tensor(numbers % cache.block_size, device),
            exchange=Exchange(
                group=self._pcp,
                sizes=[len(part) for part in alone],
                common=_tensor(np.searchsorted(own, common), device) if parts else None,
                alone=_tensor(np.searchsorted(own, alone[place]), device) if parts else None,
                kept=None if kept is None else _tensor(kept, device),
            ),
        )
        if parts:
            owners: Longs = np.zeros(int(count.sum()), dtype=np.int64)
            for other, part in enumerate(alone):
                owners[part] = other
            batch.owners = Owners(own, owners)
        if self._dcp.size > 1:
            sets = self._query_sets(mine.of(~shared_out), parts, own, starts)
            batch.spread = Spread(self._dcp, self._members, cache, sets, tables, computed, device)
        return batch

    def _kept(self, tokens: Longs, starts: Longs, computed: Ints, count: Ints) -> tuple[Longs, Longs | None]:
        """Of these tokens of a step those that this rank keeps, and their places among them; None: all."""
        if self._dcp.size == 1:
            return tokens, None
        positions = np.arange(int(count.sum())) + np.repeat(computed - starts, count)
        kept = np.flatnonzero(positions[tokens] % self._dcp.size == self._dcp.rank_in_group)
        return tokens[kept], kept

    def _query_sets(self, common: Segments, parts: list[Segments], own: Longs, starts: Longs) -> list[QuerySet]:
        """What ``Spread`` takes: the common tokens, then those that one PCP place of the DCP group computes alone."""
        me = self._members[self._dcp.rank_in_group]
        sets = []
        if len(common.rows):
            tps = [member.tp for member in self._members]
            first = tuple(tps.index(tp) for tp in dict.fromkeys(tps))
            sets.append(QuerySet(common, first, True, np.searchsorted(own, common.places(starts))))
        for pcp in dict.fromkeys(member.pcp for member in self._members) if parts else ():
            part = parts[pcp]
            members = tuple(place for place, member in enumerate(self._members) if member.pcp == pcp)
            local = np.searchsorted(own, part.places(starts)) if pcp == me.pcp else None
            sets.append(QuerySet(part, members, False, local))
        return sets


class PartForward:
    """A forward over the tokens that a PCP place computes; logits come together on place 0."""

    gathers = True

    def __init__(self, forward: Forward, group: PCPGroup, has_head: bool) -> None:
        """``has_head``: the forward gives logits, not hidden states."""
        self.inner, self._group, self._has_head = forward, group, has_head

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`drumline.model.forward.Forward`; ``ids`` (or hidden states) are those of the rank's own tokens.

        Logits are right on place 0; elsewhere only their number is.
        """
        owners = batch.owners
        if owners is None:
            return self.inner(ids, positions, batch, keep)
        positions = positions.index_select(0, _tensor(owners.own, batch.device))
        if not self._has_head:
            return self.inner(ids, positions, batch, keep)
        kept: Longs = keep.cpu().numpy()
        return self._logits(ids, positions, batch, kept, owners)

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, kept: Longs, owners: Owners
    ) -> torch.Tensor:
        place, by = self._group.rank_in_group, owners.places[kept]
        mine = np.searchsorted(owners.own, kept[by == place])
        # Heads of no rows are nobody's business: who has none computes one.
        rows = mine if len(mine) else np.zeros(1, dtype=np.int64)
        logits = self.inner(ids, positions, batch, _tensor(rows, batch.device))[: len(mine)]
        sizes = np.bincount(by, minlength=self._group.size).tolist()
        if any(sizes[1:]):  # log-probabilities of prompts
            gathered = self._group.all_gather(logits, 0, sizes)
            logits = gathered.index_select(0, _tensor(np.argsort(np.argsort(by, kind="stable")), batch.device))
        return logits if place == 0 else logits.new_empty((len(kept), 0))


class LeadingSampler(Sampler):
    """The sampler of PCP place 0."""

    def __init__(
        self, ranges: Sequence[Range], group: GatherGroup, pcp: PCPGroup, *, wants_logprobs: bool = True
    ) -> None:
        super().__init__(ranges, group, wants_logprobs=wants_logprobs)
        self._pcp = pcp

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[Ints, list[TokenLogprobs | None]]:
        """See :class:`Sampler`. The tokens go to the other places."""
        tokens, logprobs = super().sample(logits, rows)
        self._pcp.broadcast(torch.from_numpy(np.array(tokens)))
        return tokens, logprobs


class FollowingSampler(Sampler):
    """The sampler of the other PCP places, which takes what place 0 has chosen."""

    def __init__(self, ranges: Sequence[Range], group: GatherGroup, pcp: PCPGroup) -> None:
        super().__init__(ranges, group, wants_logprobs=False)
        self._pcp = pcp

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[Ints, list[TokenLogprobs | None]]:
        """Tokens of all rows of ``logits``, which is not looked at."""
        tokens = np.zeros(len(logits), dtype=np.int32)
        self._pcp.broadcast(torch.from_numpy(tokens))
        return tokens, []

    def logprobs(self, logits: torch.Tensor, tokens: Any, counts: Any) -> list[TokenLogprobs]:
        """None here."""
        return []


def make_sampler(ranges: Sequence[Range], tp: GatherGroup, pcp: PCPGroup, *, wants_logprobs: bool) -> Sampler:
    """The sampler of a rank."""
    if pcp.size == 1:
        return Sampler(ranges, tp, wants_logprobs=wants_logprobs)
    if pcp.rank_in_group:
        return FollowingSampler(ranges, tp, pcp)
    return LeadingSampler(ranges, tp, pcp, wants_logprobs=wants_logprobs)
