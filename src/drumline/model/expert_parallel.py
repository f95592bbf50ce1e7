"""Experts of which each rank of an EP group has some whole ones, in place of a part of all (``experts.Experts``).

The EP group is DP x PCP x TP of one pipeline stage. Ranks of its TP groups have the same tokens; what a rank gives is
its part of the answer, which the block sums over TP, as everywhere. How rows come to their experts is one of three ways
(``parallel.experts`` counts what each sends, and says which is taken when):

``sum`` (EP group = TP group)
    Each rank computes what its experts give for all tokens. The block's sum does the rest.
``all_to_all``
    Of the tokens of a TP group each rank takes its share::

        top_k_index [t, k] -> slots; rows [t k, H] sorted by slot
          counts of all ranks [R, slots]        all_gather
          rows to the ranks of their slots      all_to_all
          sorted by slot, experts               (their owner)
          rows back                             all_to_all
        weighted and summed over k: the share's part of [T, H], zeros elsewhere
``all_gather``
    Each rank takes its share of the tokens, all ranks get all tokens, compute what their experts give for them, and a
    reduce-scatter brings each token's answer to where it came from.

An expert may be in several slots (replicas); which of them a row goes to follows from its place in the step. For the
balancing of load (``expert_balance``) each module counts the rows of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from drumline.model.expert_spec import ExpertsSpec
from drumline.model.experts import Experts, Gating
from drumline.parallel.experts import Counts, Placement, choose_way, exchange
from drumline.parallel.shards import Range, split

WAYS = {"all_to_all": "all_to_all", "allgather_reducescatter": "all_gather"}
"""By the value of ``--all2all-backend``; ``auto`` is chosen."""


class EPGroup(Protocol):
    """What experts need of their group (``parallel.groups.GroupCoordinator``)."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def rank_in_group(self) -> int:
        """Place of this rank."""

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """All members' tensors along ``dim``."""

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather equal tensors into ``output`` [size, ...]."""

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Rows to and from each member."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Sum over all members; this one's part along ``dim``."""


@dataclass(frozen=True, kw_only=True)
class ExpertSharing:
    """How the experts of all layers of a stage are shared, as one rank sees it."""

    group: EPGroup
    share: Range
    """``stop`` ranks of a TP group have the same tokens, of which this one's place is ``start``."""
    placement: Placement
    """Where the experts of each layer are at first."""
    way: str
    counts: bool = False
    """The rows of each expert are counted."""

    @classmethod
    def of(
        cls, spec: ExpertsSpec, group: EPGroup, tp_rank: int, tp_size: int, *, redundant: int, how: str, counts: bool
    ) -> ExpertSharing:
        """``how``: the value of ``--all2all-backend``. ConfigError if a rank would have no expert."""
        way = WAYS.get(how) or choose_way(spec.top_k, group.size, shared=group.size == tp_size)
        placement = Placement.linear(spec.num_experts, redundant, group.size)
        return cls(group=group, share=Range(tp_rank, tp_size), placement=placement, way=way, counts=counts)

    @property
    def slots(self) -> Range:
        """This rank's."""
        return self.placement.ranks[self.group.rank_in_group]

    def own(self, tokens: int) -> slice:
        """Which of its TP group's tokens this rank sends."""
        return split(tokens, self.share.stop)[self.share.start].as_slice()


class ParallelExperts(Experts):
    """This rank's slots of the experts of one layer. Parameters are those of :class:`Experts`, a row for each slot."""

    def __init__(
        self,
        sharing: ExpertSharing,
        num_experts: int,
        hidden_size: int,
        width: int,
        gating: Gating,
        dtype: torch.dtype,
        *,
        biases: bool = False,
    ) -> None:
        self._sharing = sharing
        self._group = sharing.group
        self._slots = sharing.slots
        super().__init__(self._slots.size, hidden_size, width, gating, dtype, biases=biases)
        self._run = {"sum": self._by_sum, "all_to_all": self._by_all_to_all, "all_gather": self._by_all_gather}[
            sharing.way
        ]
        self.counting = sharing.counts
        """Whether rows are counted in ``loads``."""
        self.loads = torch.zeros(num_experts, dtype=torch.int64)
        """Rows of each logical expert since it was last set to zero, of this rank's tokens."""
        self.place(sharing.placement)

    def place(self, placement: Placement) -> None:
        """Take a placement into use. The weights of its slots are here, or come before the next call."""
        self.placement = placement
        replicas = placement.replicas
        most = max(map(len, replicas))
        self._replicas = torch.tensor([[slots[i % len(slots)] for i in range(most)] for slots in replicas])
        self._counts = torch.tensor([len(slots) for slots in replicas])

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """See :class:`~drumline.model.experts.ExpertsModule`: this rank's part of the sum over TP."""
        if self._replicas.device != hidden.device:
            self._replicas, self._counts = self._replicas.to(hidden.device), self._counts.to(hidden.device)
            self.loads = self.loads.to(hidden.device)
        if self.counting:
            chosen = top_k_index.reshape(-1)
            self.loads.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))
        return self._run(hidden, self._slots_for(top_k_index), top_k_weights)

    def _slots_for(self, top_k_index: torch.Tensor) -> torch.Tensor:
        """[T, k] slots for [T, k] experts: tokens one after the other take the replicas in turn."""
        if self._replicas.shape[1] == 1:
            return self._replicas[:, 0][top_k_index]
        turn = torch.arange(len(top_k_index), device=top_k_index.device)[:, None]
        return self._replicas[top_k_index, turn % self._counts[top_k_index]]

    def _by_sum(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What this rank's slots give for all of these tokens, [T, H]."""
        tokens, choices = slots.shape
        chosen, order = slots.reshape(-1).sort(stable=True)
        start, *ends = torch.searchsorted(chosen, self._edges(chosen)).tolist()
        order = order[start : ends[-1]]
        per_slot = [end - begin for begin, end in zip([start, *ends], ends, strict=False)]
        out = self._computed(hidden.index_select(0, order // choices), per_slot)
        by_choice = out.new_zeros((tokens * choices, out.shape[1])).index_copy_(0, order, out)
        return _combined(by_choice, weights, hidden.dtype)

    def _edges(self, like: torch.Tensor) -> torch.Tensor:
        """This rank's slots and the one behind."""
        return torch.arange(self._slots.start, self._slots.stop + 1, device=like.device, dtype=like.dtype)

    def _by_all_to_all(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = self._sharing.own(len(hidden))
        chosen, order = slots[own].reshape(-1).sort(stable=True)
        plan = exchange(self._counts_of_all(chosen), self.placement, self._group.rank_in_group)
        arrived = self._group.all_to_all(
            hidden[own].index_select(0, order // slots.shape[1]), plan.sends, plan.receives
        )
        by_slot = torch.from_numpy(plan.order).to(hidden.device)
        computed = self._computed(arrived.index_select(0, by_slot), plan.per_slot)
        as_arrived = torch.empty_like(computed).index_copy_(0, by_slot, computed)
        back = self._group.all_to_all(as_arrived, plan.receives, plan.sends)
        by_choice = torch.empty_like(back).index_copy_(0, order, back)
        return _placed(_combined(by_choice, weights[own], hidden.dtype), own, hidden)

    def _counts_of_all(self, chosen: torch.Tensor) -> Counts:
        """[ranks, slots] how many rows each rank has for each slot."""
        slots = len(self.placement.experts)
        every = chosen.new_empty((self._group.size, slots))
        self._group.all_gather_into(every, torch.bincount(chosen, minlength=slots))
        return every.cpu().numpy()

    def _by_all_gather(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = self._sharing.own(len(hidden))
        here = torch.tensor([own.stop - own.start], device=hidden.device)
        sizes = self._group.all_gather(here, 0, [1] * self._group.size).tolist()
        every = [self._group.all_gather(part[own].contiguous(), 0, sizes) for part in (hidden, slots, weights)]
        part = self._by_sum(every[0], every[1], every[2])
        return _placed(self._group.reduce_scatter(part, 0, sizes), own, hidden)

    def _computed(self, rows: torch.Tensor, per_slot: list[int]) -> torch.Tensor:
        """What the experts give for rows [N, H] that are sorted by slot."""
        out = torch.empty_like(rows)
        parts = zip(torch.split_with_sizes(rows, per_slot), torch.split_with_sizes(out, per_slot), strict=True)
        for slot, (some, place) in enumerate(parts):
            if len(some):
                self._expert(slot, some, place)
        return out


def _combined(by_choice: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T k, H] weighted with [T, k] and summed over k."""
    tokens, choices = weights.shape
    return (by_choice.view(tokens, choices, by_choice.shape[1]) * weights[..., None]).sum(1).to(dtype)


def _placed(part: torch.Tensor, own: slice, whole: torch.Tensor) -> torch.Tensor:
    """``part`` in its place, zeros elsewhere."""
    if len(part) == len(whole):
        return part
    out = torch.zeros_like(whole)
    out[own] = part
    return out
