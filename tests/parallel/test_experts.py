from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.parallel.experts import WAYS, Placement, choose_way, exchange, rows_sent


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any number of ranks, experts and redundant ones that may be."""
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 12))
    redundant = draw(st.integers(max(0, ranks - experts), experts * (ranks - 1)))
    return Placement.linear(experts, redundant, ranks)


@given(placements())
def test_every_expert_is_held_and_none_twice_on_a_rank(placement: Placement) -> None:
    assert set(placement.experts) == set(range(placement.num_experts))
    sizes = [slots.size for slots in placement.ranks]
    assert sum(sizes) == len(placement.experts)
    assert 0 <= max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    for rank, slots in enumerate(placement.ranks):
        held = placement.of_rank(rank)
        assert len(set(held)) == len(held) == slots.size
        assert all(placement.owners[slot] == rank for slot in range(*slots))
    for expert, slots_ in enumerate(placement.replicas):
        assert slots_
        assert all(placement.experts[slot] == expert for slot in slots_)


def test_the_order_is_the_models() -> None:
    placement = Placement.linear(5, 2, 3)
    assert placement.experts == (0, 1, 2, 3, 4, 0, 1)
    assert [placement.of_rank(rank) for rank in range(3)] == [(0, 1, 2), (3, 4), (0, 1)]
    assert placement.rank_loads([4, 2, 1, 1, 1]) == [4, 2, 3]
    assert placement.balancedness([4, 2, 1, 1, 1]) == 0.75


@pytest.mark.parametrize(
    ("experts", "redundant", "ranks", "message"),
    [
        (4, 0, 5, "over 5 ranks .* more than the model's 4 experts, so some ranks would have none: use at most 4"),
        (4, 1, 6, "4 experts and 1 redundant ones.* use at most 5"),
        (4, 5, 2, "num_redundant_experts 5 .* more than 4, with which each of 2 ranks holds all 4"),
    ],
)
def test_what_cannot_be_is_refused(experts: int, redundant: int, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement.linear(experts, redundant, ranks)


@given(placements(), st.data())
def test_rows_find_their_slots(placement: Placement, data: st.DataObject) -> None:
    """Rows are sent as an all-to-all does; afterwards each rank has those of its slots, sorted by slot."""
    ranks, slots = len(placement.ranks), len(placement.experts)
    row = st.lists(st.integers(0, 3), min_size=slots, max_size=slots)
    counts = np.array(data.draw(st.lists(row, min_size=ranks, max_size=ranks)), dtype=np.int64)
    sent = [[(slot, source) for slot in range(slots) for _ in range(counts[source, slot])] for source in range(ranks)]
    plans = [exchange(counts, placement, rank) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        assert sum(plan.sends) == len(sent[rank])
        assert plan.receives == [plans[source].sends[rank] for source in range(ranks)]
        came = []
        for source in range(ranks):
            start = sum(plans[source].sends[:rank])
            came += sent[source][start : start + plans[source].sends[rank]]
        ordered = [came[place] for place in plan.order]
        assert ordered == sorted(came)
        held = range(*placement.ranks[rank])
        assert [slot for slot, _ in ordered] == [
            slot for slot, count in zip(held, plan.per_slot, strict=True) for _ in range(count)
        ]


@given(st.integers(1, 64), st.integers(1, 64), st.booleans())
def test_the_way_that_is_chosen_sends_least(top_k: int, ranks: int, shared: bool) -> None:
    way = choose_way(top_k, ranks, shared=shared)
    ways = [other for other in WAYS if shared or other != "sum"]
    least = min(rows_sent(other, 1000, top_k, ranks, shared=shared) for other in ways)
    assert rows_sent(way, 1000, top_k, ranks, shared=shared) <= least * (1 + 1e-9)
    assert (way == "sum") == shared


@pytest.mark.parametrize(("experts", "redundant", "ranks", "top_k"), [(64, 0, 4, 2), (60, 4, 8, 6), (7, 3, 5, 1)])
def test_rows_that_are_sent(experts: int, redundant: int, ranks: int, top_k: int) -> None:
    """Even routing of tokens: what ranks send to others, there and back, is what the formula says."""
    random, placement, tokens = np.random.default_rng(1), Placement.linear(experts, redundant, ranks), 500 * ranks
    counts = np.zeros((ranks, len(placement.experts)), dtype=np.int64)
    for source in range(ranks):
        chosen = random.permuted(np.tile(np.arange(len(placement.experts)), (tokens // ranks, 1)), axis=1)[:, :top_k]
        counts[source] = np.bincount(chosen.reshape(-1), minlength=len(placement.experts))
    plans = [exchange(counts, placement, rank) for rank in range(ranks)]
    sent = sum(
        sum(plan.sends) - plan.sends[rank] + sum(plan.receives) - plan.receives[rank] for rank, plan in enumerate(plans)
    )
    expected = rows_sent("all_to_all", tokens, top_k, ranks, shared=False)
    assert sent / ranks == pytest.approx(expected, rel=0.05)
