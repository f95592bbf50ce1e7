"""Which rank of an EP group holds which experts, and what a step sends where. Pure arithmetic, no torch.

Words. A *logical* expert is one of the model's. A *slot* is a place for the weights of one; an EP group has as many
slots as there are experts, and ``redundant`` more, numbered rank after rank. An expert in several slots has *replicas*;
which of them computes a row makes no difference to its result, so load may be spread over them. Counts need not divide:
the first ranks have one slot more than the others, as everywhere (``parallel.shards``).

**What crosses between ranks.** Let R ranks have T tokens of width H together, T / R each or all of them the same T, and
each token k experts. Rows of H that each rank sends, if routing is even, and meetings of all ranks:

================  ========================  ======================  ==========================================
way               tokens of its own         the same on all ranks   how
================  ========================  ======================  ==========================================
``sum``           cannot be                 2 T (R-1)/R, 1          each computes what its experts give for
                                                                    all tokens; an all-reduce adds
``all_to_all``    2 k T/R (R-1)/R, 3        that and 2 T (R-1)/R    rows travel to their experts and back,
                                                                    counts before them
``all_gather``    2 T (R-1)/R, 3            that twice              all ranks get all tokens, and results are
                                                                    reduced to where each token is
================  ========================  ======================  ==========================================

So where tokens are the same on all ranks (EP over TP) ``sum`` is taken: it is the all-reduce that a block has in any
case (shared experts are split by TP). Were that an all-gather of each rank's share, ``all_to_all`` would send less if
k < R/2, never less than half, for three meetings more. Where each rank has its own (EP over DP) it is ``all_to_all`` if
k < R; ``all_gather`` is the second choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.errors import ConfigError
from drumline.parallel.shards import Range, split

Counts = npt.NDArray[np.int64]

WAYS = ("sum", "all_to_all", "all_gather")
"""How rows come to their experts; see the module's docstring."""


def expert_slots(num_experts: int, redundant: int, ranks: int) -> tuple[Range, ...]:
    """Slots of each rank. ConfigError if a rank would have none, or if there were more slots than can be of use."""
    slots = num_experts + redundant
    if ranks > slots:
        raise ConfigError(
            f"--enable-expert-parallel over {ranks} ranks (data x prefill context x tensor parallel size) is more than "
            f"the model's {num_experts} experts{f' and {redundant} redundant ones' if redundant else ''}, so some "
            f"ranks would have none: use at most {slots} ranks"
        )
    most = num_experts * (ranks - 1)
    if redundant > most:
        raise ConfigError(
            f"num_redundant_experts {redundant} (--eplb-config) is more than {most}, with which each of {ranks} ranks "
            f"holds all {num_experts} experts"
        )
    return split(slots, ranks)


@dataclass(frozen=True)
class Placement:
    """Which expert is in which slot."""

    experts: tuple[int, ...]
    """The logical expert in each slot."""
    ranks: tuple[Range, ...]
    """Slots of each rank of the group."""

    @classmethod
    def linear(cls, num_experts: int, redundant: int, ranks: int) -> Placement:
        """In the model's order; redundant slots begin again at the first expert. No rank has an expert twice."""
        slots = expert_slots(num_experts, redundant, ranks)
        return cls(tuple(slot % num_experts for slot in range(slots[-1].stop)), slots)

    @cached_property
    def num_experts(self) -> int:
        """Logical experts."""
        return max(self.experts) + 1

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that has each slot."""
        return tuple(rank for rank, slots in enumerate(self.ranks) for _ in range(slots.size))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Slots of each logical expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Logical experts in the slots of a rank."""
        return self.experts[self.ranks[rank].as_slice()]

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Load of each rank, if replicas share the load of their expert (one number for each logical one)."""
        each = [load / len(slots) for load, slots in zip(loads, self.replicas, strict=True)]
        return [sum(each[expert] for expert in self.of_rank(rank)) for rank in range(len(self.ranks))]

    def balancedness(self, loads: Sequence[float]) -> float:
        """Mean load of a rank over that of the busiest one: 1 is even, 1 / ranks is all on one."""
        by_rank = self.rank_loads(loads)
        return sum(by_rank) / len(by_rank) / max(by_rank) if max(by_rank) > 0 else 1.0


class Exchange(NamedTuple):
    """What one rank sends and receives in a step, and in which order its experts want what has come."""

    sends: list[int]
    """Rows for each rank."""
    receives: list[int]
    """Rows from each rank."""
    order: Counts
    """[rows received] which of the rows, as they come, is the next one if they are sorted by slot."""
    per_slot: list[int]
    """Rows for each of this rank's slots."""


def exchange(counts: Counts, placement: Placement, rank: int) -> Exchange:
    """What follows from everybody's counts of rows: ``counts`` [ranks, slots]; each rank sends them sorted by slot."""
    mine = placement.ranks[rank].as_slice()
    arriving = counts[:, mine]
    starts = [slots.start for slots in placement.ranks]
    slot_of = np.repeat(np.tile(np.arange(arriving.shape[1]), len(counts)), arriving.reshape(-1))
    return Exchange(
        sends=np.add.reduceat(counts[rank], starts).tolist(),
        receives=arriving.sum(axis=1).tolist(),
        order=np.argsort(slot_of, kind="stable"),
        per_slot=arriving.sum(axis=0).tolist(),
    )


def rows_sent(way: str, tokens: int, top_k: int, ranks: int, *, shared: bool) -> float:
    """Rows of hidden states that each rank sends in a layer, on average over even routing (module's docstring).

    ``tokens``: all ranks' together; ``shared``: all ranks have all of them, before and after.
    """
    own = 2 * top_k * tokens / ranks if way == "all_to_all" else 2 * tokens
    return (own + (2 * tokens if shared and way != "sum" else 0)) * (ranks - 1) / ranks


def choose_way(top_k: int, ranks: int, *, shared: bool) -> str:
    """How rows come to their experts; ``shared``: the tokens are the same on all ranks."""
    if shared:
        return "sum"
    # As many rows either way: one collective less, and no counts that the host waits for.
    return "all_to_all" if top_k < ranks else "all_gather"
