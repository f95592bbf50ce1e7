from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from drumline.parallel.balance import LEAST_GAIN, moves, pack, rebalanced, replica_counts, transfer
from drumline.parallel.experts import Placement
from tests.parallel.test_experts import placements

Loads = st.floats(0, 1e6) | st.integers(0, 5).map(float)


@st.composite
def loaded(draw: st.DrawFn) -> tuple[Placement, list[float]]:
    """A placement that has come about somehow, and loads for its next change."""
    placement = draw(placements())
    for _ in range(draw(st.integers(0, 2))):
        placement = rebalanced(placement, draw(loads_of(placement)))
    return placement, draw(loads_of(placement))


def loads_of(placement: Placement) -> st.SearchStrategy[list[float]]:
    return st.lists(Loads, min_size=placement.num_experts, max_size=placement.num_experts)


@given(loaded())
def test_a_new_placement_holds_every_expert_and_is_better_or_the_same(given_: tuple[Placement, list[float]]) -> None:
    before, loads = given_
    after = rebalanced(before, loads)
    assert after.ranks == before.ranks
    assert all(after.replicas)
    for rank, slots in enumerate(after.ranks):
        assert len(set(after.of_rank(rank))) == slots.size
    busiest = max(before.rank_loads(loads))
    if after is before:
        assert moves(before, after) == []
    else:
        assert max(after.rank_loads(loads)) < (1 - LEAST_GAIN) * busiest
        assert rebalanced(after, loads) is after


@given(loaded())
def test_replicas_go_to_who_has_most_to_do(given_: tuple[Placement, list[float]]) -> None:
    placement, loads = given_
    ranks = len(placement.ranks)
    counts = replica_counts(loads, len(placement.experts), ranks)
    assert sum(counts) == len(placement.experts)
    assert all(1 <= count <= ranks for count in counts)
    for expert, count in enumerate(counts):
        if count > 1:  # nobody else had more to do when this one got its last replica, and could have had one more
            assert all(
                loads[other] / counts[other] <= loads[expert] / (count - 1) * (1 + 1e-9)
                for other in range(len(loads))
                if counts[other] < ranks
            )


@given(loaded())
def test_packing_keeps_to_grahams_bound(given_: tuple[Placement, list[float]]) -> None:
    """Without redundant experts and with equal room: no rank is above the mean and the largest expert together."""
    placement, loads = given_
    ranks, experts = len(placement.ranks), placement.num_experts
    room = [experts] * ranks
    packed = pack(loads, [1] * experts, room)
    busiest = max(sum(loads[expert] for expert in held) for held in packed)
    assert busiest <= (sum(loads) / ranks + max(loads)) * (1 + 1e-9)


@given(loaded())
def test_moves_are_what_the_change_needs(given_: tuple[Placement, list[float]]) -> None:
    before, loads = given_
    after = rebalanced(before, loads)
    found = moves(before, after)
    held = list(before.experts)
    for move in found:  # sources are read before any target is written
        assert before.owners[move.source] != before.owners[move.target]
        held[move.target] = before.experts[move.source]
    assert tuple(held) == after.experts
    assert len({move.target for move in found}) == len(found)
    kept = sum(len(set(before.of_rank(rank)) & set(after.of_rank(rank))) for rank in range(len(before.ranks)))
    assert len(found) == len(before.experts) - kept
    if len(before.ranks) <= 4 and after is not before:
        assert kept >= _most_kept(before, after) / 2


def _most_kept(before: Placement, after: Placement) -> int:
    """Slots that could stay at best, if the sets of experts were handed to other ranks of the same size."""
    ranks = range(len(before.ranks))
    return max(
        sum(
            len(set(before.of_rank(rank)) & set(after.of_rank(other))) for rank, other in zip(ranks, order, strict=True)
        )
        for order in permutations(ranks)
        if all(before.ranks[rank].size == after.ranks[other].size for rank, other in zip(ranks, order, strict=True))
    )


@given(loaded())
def test_transfers_bring_each_expert_to_its_slot(given_: tuple[Placement, list[float]]) -> None:
    before, loads = given_
    after = rebalanced(before, loads)
    found = moves(before, after)
    ranks = range(len(before.ranks))
    parts = [transfer(found, before, rank) for rank in ranks]
    for rank in ranks:
        assert parts[rank].receives == [parts[source].sends[rank] for source in ranks]
        came = []
        for source in ranks:
            start = sum(parts[source].sends[:rank])
            came += [before.of_rank(source)[slot] for slot in parts[source].send[start:][: parts[source].sends[rank]]]
        held = list(before.of_rank(rank))
        for slot, expert in zip(parts[rank].receive, came, strict=True):
            held[slot] = expert
        assert tuple(held) == after.of_rank(rank)


def test_a_hot_expert_is_replicated() -> None:
    before = Placement.linear(4, 2, 2)
    after = rebalanced(before, [1, 1, 10, 9])
    assert [len(slots) for slots in after.replicas] == [1, 1, 2, 2]
    assert after.rank_loads([1, 1, 10, 9]) == [10.5, 10.5]
    assert before.balancedness([1, 1, 10, 9]) < after.balancedness([1, 1, 10, 9]) == 1


def test_work_of_sending_is_shared() -> None:
    before = Placement((0, 1, 2, 0, 1, 3, 4, 5), Placement.linear(6, 2, 4).ranks)
    after = Placement((0, 1, 2, 0, 1, 3, 0, 1), before.ranks)
    assert [before.owners[move.source] for move in moves(before, after)] == [0, 2]
