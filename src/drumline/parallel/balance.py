"""Expert load balancing (EPLB): where experts shall be, from how much each had to do. Pure, deterministic, no torch.

The algorithm is the one of DeepSeek-V3 (technical report, arXiv:2412.19437, section 3.4, "redundant experts"; published
as deepseek-ai/EPLB, its global policy):

1. *Replicate*: each redundant slot goes to the expert whose replicas have most to do each.
2. *Pack*: experts, largest first, go to the rank that has least so far and still has room: Graham's rule of the longest
   processing time (1969), with a number of slots for each rank.

What is different here. Ranks may have unlike numbers of slots. Replicas of one expert are on different ranks: they are
packed before all others, each time onto the ranks with most room, so that this is always possible (Gale and Ryser,
1957). The packed sets are then handed to the ranks that hold most of each already, so that few weights move, and an
expert that stays on a rank stays in its slot. If the busiest rank would not have clearly less to do than now, nothing
moves.

All ranks compute the same from the same loads, so no placement is ever sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from drumline.parallel.experts import Placement

LEAST_GAIN = 0.02
"""The busiest rank must have so much less to do, as a part of what it has, or nothing moves."""


class Move(NamedTuple):
    """A slot gets the weights that are in another one, of another rank."""

    source: int
    target: int


def rebalanced(current: Placement, loads: Sequence[float], least_gain: float = LEAST_GAIN) -> Placement:
    """The placement for these loads, one for each logical expert; the same object if it is not worth while."""
    counts = replica_counts(loads, len(current.experts), len(current.ranks))
    packed = pack(loads, counts, [slots.size for slots in current.ranks])
    placed = _in_place(packed, current)
    if max(placed.rank_loads(loads)) < (1 - least_gain) * max(current.rank_loads(loads)):
        return placed
    return current


def replica_counts(loads: Sequence[float], slots: int, ranks: int) -> list[int]:
    """How many replicas each expert gets: at least one, at most one on each rank, ``slots`` in all."""
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / counts[expert], expert))
    return counts


def pack(loads: Sequence[float], counts: Sequence[int], room: Sequence[int]) -> list[set[int]]:
    """Experts of each rank: ``counts`` replicas of each, which are on different ranks; ``room`` slots on each rank."""
    each = [load / count for load, count in zip(loads, counts, strict=True)]
    left, busy = list(room), [0.0] * len(room)
    packed: list[set[int]] = [set() for _ in room]
    ranks = range(len(room))
    for expert in sorted(range(len(loads)), key=lambda expert: (counts[expert] == 1, -each[expert], expert)):
        if counts[expert] > 1:
            chosen = sorted(ranks, key=lambda rank: (-left[rank], busy[rank], rank))[: counts[expert]]
        else:
            chosen = [min((rank for rank in ranks if left[rank]), key=lambda rank: (busy[rank], -left[rank], rank))]
        for rank in chosen:
            packed[rank].add(expert)
            left[rank] -= 1
            busy[rank] += each[expert]
    return packed


def _in_place(packed: Sequence[set[int]], current: Placement) -> Placement:
    """Hand each set to a rank with as many slots, those first that agree most; what stays, stays in its slot.

    Taking the largest overlap first keeps at least half of what could be kept at best (greedy weighted matching).
    """
    held = [set(current.of_rank(rank)) for rank in range(len(current.ranks))]
    pairs = [
        (-len(experts & held[rank]), number, rank)
        for number, experts in enumerate(packed)
        for rank, slots in enumerate(current.ranks)
        if slots.size == len(experts)
    ]
    set_of: dict[int, set[int]] = {}
    handed: set[int] = set()
    for _, number, rank in sorted(pairs):
        if rank not in set_of and number not in handed:
            set_of[rank] = packed[number]
            handed.add(number)
    experts: list[int] = []
    for rank in range(len(current.ranks)):
        experts += _slots_of(set_of[rank], current.of_rank(rank))
    return Placement(tuple(experts), current.ranks)


def _slots_of(wanted: set[int], now: Sequence[int]) -> list[int]:
    new = iter(sorted(wanted - set(now)))
    return [expert if expert in wanted else next(new) for expert in now]


def moves(before: Placement, after: Placement) -> list[Move]:
    """What must be copied for the change, by target. Sources share the work; all are as they were *before*."""
    sent = [0] * len(before.ranks)
    found = []
    for target, (old, new) in enumerate(zip(before.experts, after.experts, strict=True)):
        if old == new:
            continue
        source = min(before.replicas[new], key=lambda slot: (sent[before.owners[slot]], slot))
        sent[before.owners[source]] += 1
        found.append(Move(source, target))
    return found


class Transfer(NamedTuple):
    """One rank's part in an all-to-all that moves experts."""

    send: list[int]
    """Own slots (from 0) whose weights go out, by the rank that they go to."""
    sends: list[int]
    """How many go to each rank."""
    receive: list[int]
    """Own slots (from 0) for what comes, as it comes."""
    receives: list[int]
    """How many come from each rank."""


def transfer(found: Sequence[Move], placement: Placement, rank: int) -> Transfer:
    """What a rank sends and receives for these moves."""
    owners, first = placement.owners, placement.ranks[rank].start
    going = sorted((owners[move.target], move.target, move.source) for move in found if owners[move.source] == rank)
    coming = sorted((owners[move.source], move.target) for move in found if owners[move.target] == rank)
    ranks = range(len(placement.ranks))
    return Transfer(
        send=[source - first for _, _, source in going],
        sends=[sum(owner == other for owner, _, _ in going) for other in ranks],
        receive=[target - first for _, target in coming],
        receives=[sum(owner == other for owner, _ in coming) for other in ranks],
    )
