"""How much of a device the KV cache gets: sums of what was measured, whatever neighbours do."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from drumline.model.memory import FIXED_GUESS, FIXED_MOST, GIB, GROWTH_MOST, Use, kv_room

TOTAL = 80 * GIB
sizes = st.integers(0, 30 * GIB)


def measured(
    *, fixed: int, weights: int, others: tuple[int, int, int] = (0, 0, 0), told: bool = True, growth: int = 0
) -> tuple[int, Use, Use]:
    """What is measured of a process with so much beside torch's allocator (``growth`` of it after the snapshot), and
    neighbours with so much before, at the snapshot, and at the end."""
    warm = Use(TOTAL - fixed - others[1], TOTAL, 0, fixed if told else None)
    in_all = fixed + growth + weights
    after = Use(TOTAL - in_all - others[2], TOTAL, weights, in_all if told else None)
    return TOTAL - others[0], warm, after


def test_by_example() -> None:
    opened, warm, after = measured(fixed=GIB, weights=16 * GIB, others=(10 * GIB,) * 3)
    room = kv_room(opened, warm, after, peak=18 * GIB, utilization=0.5)
    assert room == (21 * GIB, 40 * GIB, 18 * GIB, GIB, 10 * GIB)
    assert str(room) == (
        "21.00 GiB of 40.00 GiB for the KV cache (18.00 GiB weights and the largest step, 1.00 GiB context and "
        "communicators; others 10.00 GiB)"
    )
    full = kv_room(opened, warm, after, peak=18 * GIB, utilization=1.0)
    assert full.kv == 80 * GIB - (10 + 1 + 18) * GIB
    assert "10.00 GiB less than its share, which others use" in str(full)
    assert kv_room(opened, warm, after, peak=18 * GIB, utilization=0.1).kv == 0


@given(sizes, sizes, st.integers(0, 8 * GIB), st.tuples(sizes, sizes, sizes), st.floats(0.05, 1.0))
def test_where_the_driver_tells_neighbours_change_nothing_but_what_is_free(
    fixed: int, weights: int, step: int, others: tuple[int, int, int], share: float
) -> None:
    assume(max(others) + fixed + weights + step < TOTAL)
    alone = kv_room(*measured(fixed=fixed, weights=weights), weights + step, share)
    beside = kv_room(*measured(fixed=fixed, weights=weights, others=others), weights + step, share)
    assert beside.fixed == alone.fixed == fixed
    free = TOTAL - others[2] - fixed - weights - step
    assert beside.kv == min(alone.kv, free)
    assert beside.others == others[2]


@given(
    st.integers(0, FIXED_MOST), sizes, st.integers(0, GROWTH_MOST), st.tuples(sizes, sizes, sizes), st.floats(0.05, 1.0)
)
def test_where_it_does_not_their_effect_is_bounded(
    fixed: int, weights: int, growth: int, others: tuple[int, int, int], share: float
) -> None:
    assume(max(others) + fixed + growth + weights < TOTAL)
    steady = measured(fixed=fixed, weights=weights, growth=growth, others=(others[0],) * 3, told=False)
    assert kv_room(*steady, weights, share).fixed == fixed + growth
    moving = kv_room(*measured(fixed=fixed, weights=weights, growth=growth, others=others, told=False), weights, share)
    assert 0 <= moving.fixed <= FIXED_MOST + GROWTH_MOST
    assert 0 <= moving.kv <= max(TOTAL - others[2] - fixed - growth - weights, 0)


def test_a_device_of_which_nothing_was_known_before() -> None:
    _, warm, after = measured(fixed=2 * GIB, weights=GIB, told=False)
    assert kv_room(0, warm, after, GIB, 0.5).fixed == FIXED_GUESS
