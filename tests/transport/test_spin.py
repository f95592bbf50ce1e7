"""The predictor without a clock: made-up arrivals go in, and what it watches and hits comes out."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.transport.spin import (
    FLOOR_NS,
    LONGEST_GAP_NS,
    SAVINGS_NS,
    SHARE,
    SHORT_NS,
    Pace,
    SpinPredictor,
    from_due,
    to_due,
)

US, MS, S = 1_000, 1_000_000, 1_000_000_000
WAKE = 60 * US
"""How long a sleep takes to end here."""


@dataclass
class Result:
    waits: int
    hits: int
    """Arrivals that were watched for when they came."""
    watched: int
    """ns"""
    time: int
    """ns"""
    rehearsed: int
    """Rehearsals."""


def play(
    predictor: SpinPredictor,
    gaps: Iterable[int],
    busy: int = 0,
    hints: int | None = None,
    start: int = 10 * S,
    rehearsal: int = 0,
) -> Result:
    """A reader that is busy for so long after each message, and messages with these gaps between them.

    ``hints``: each message says when the next one comes, wrong by up to so many ns. ``rehearsal``: how long one takes.
    """
    predictor.rehearses = rehearsal > 0
    rehearsed = 0
    rng = random.Random(3)
    arrival = seen = start
    waits = hits = watched = 0
    for gap in gaps:
        arrival += gap
        begin = seen + busy
        if arrival <= begin:
            seen = begin  # it is there already: no wait
            continue
        waits += 1
        if hints is not None:
            predictor.expect(arrival + rng.randint(-hints, hints))
        nap_until, watch_until = predictor.plan(begin)
        now, seen = begin, 0
        if watch_until:
            assert nap_until < watch_until
            assert nap_until == 0 or nap_until > begin
            if nap_until:
                now = nap_until + WAKE
                if arrival < now:
                    seen = max(now if arrival > nap_until else arrival + WAKE, arrival)
                else:
                    predictor.napped(nap_until, now)
            if predictor.rehearse and not seen:
                assert rehearsal
                rehearsed += 1
                predictor.rehearsed(rehearsal, overtaken=arrival < now + rehearsal)
                watched += rehearsal
                if arrival < now + rehearsal:
                    seen = now + rehearsal
                    predictor.watched(rehearsal, True)
                    hits += 1
                else:
                    now += rehearsal
                    predictor.watched(rehearsal, True)
            if not seen:
                hit = arrival <= max(watch_until, now)
                spent = max(0, (arrival if hit else watch_until) - now)
                predictor.watched(spent, hit)
                watched += spent
                hits += hit
                seen = arrival if hit else 0
        if not seen:
            seen = arrival + WAKE
        predictor.arrived(begin, seen)
    return Result(waits, hits, watched, arrival - start, rehearsed)


def steady(gap: int, count: int, jitter: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [max(1, gap + rng.randint(-jitter, jitter)) for _ in range(count)]


@pytest.mark.parametrize("busy", [0, 3 * MS])
@pytest.mark.parametrize(("gap", "jitter"), [(5 * MS, 20 * US), (10 * MS, 30 * US), (50 * MS, 100 * US)])
def test_steady_steps_are_met(gap: int, jitter: int, busy: int) -> None:
    result = play(SpinPredictor(), steady(gap, 500, jitter), busy)
    assert result.hits > 0.6 * result.waits
    assert result.watched < 0.013 * result.time


@pytest.mark.parametrize("rehearsal", [20 * US, 80 * US])
def test_there_is_time_for_rehearsals(rehearsal: int) -> None:
    """Most messages 10 ms apart are rehearsed and then met, for less than 2 % of a core."""
    result = play(SpinPredictor(), steady(10 * MS, 500, 20 * US), rehearsal=rehearsal)
    assert result.rehearsed > 0.7 * result.waits
    assert result.hits > 0.6 * result.waits
    assert result.watched < 0.02 * result.time


def test_a_rehearsal_that_is_too_long_is_left_out() -> None:
    result = play(SpinPredictor(), steady(10 * MS, 500, 20 * US), rehearsal=2 * MS)
    assert result.rehearsed < 20
    assert result.watched < 0.02 * result.time


def test_nothing_is_rehearsed_back_to_back() -> None:
    result = play(SpinPredictor(), steady(50 * US, 500, 5 * US), rehearsal=20 * US)
    assert result.rehearsed <= 1


@pytest.mark.parametrize("hints", [None, 20 * US])
@pytest.mark.parametrize("gap", [5 * MS, 10 * MS, 50 * MS])
def test_the_first_regular_gaps_are_enough(gap: int, hints: int | None) -> None:
    """After messages back to back: two gaps, and the next message is met, though all before were slept through."""
    predictor = SpinPredictor()
    play(predictor, steady(50 * US, 20, 5 * US), start=9 * S)
    play(predictor, steady(gap, 3, 30 * US), hints=hints)
    result = play(predictor, steady(gap, 12, 30 * US, seed=2), hints=hints, start=10 * S + 3 * gap)
    assert result.hits >= 9


def test_one_late_message_in_five_hides_no_pace() -> None:
    predictor = SpinPredictor()
    gaps = [gap + (3 * MS if number % 5 == 4 else 0) for number, gap in enumerate(steady(10 * MS, 200, 30 * US))]
    result = play(predictor, gaps)
    assert result.hits > 0.5 * result.waits
    assert result.watched < 0.02 * result.time


@given(gap=st.integers(400 * US, 90 * MS), jitter=st.floats(0, 0.04), burst=st.integers(1, 4), seed=st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_a_pace_is_told_from_the_second_gap_on(gap: int, jitter: float, burst: int, seed: int) -> None:
    """By the time, and also where each time several messages are sent."""
    pace, now = Pace(), 10 * S
    rng = random.Random(seed)
    for number in range(30):
        dues = [send(pace, now + 20 * US * copy) for copy in range(burst)]
        assert len(set(dues)) == 1
        if number > 2:
            assert abs(from_due(dues[0], now) - (now + gap)) <= jitter * gap + 1 * US
        now += int(gap * (1 + rng.uniform(-jitter, jitter)))


def send(pace: Pace, now: int) -> int:
    due = pace.sends(now)
    if pace.gap:
        pace.learn()
    return due


def test_no_pace_no_word() -> None:
    rng = random.Random(1)
    pace, now, told = Pace(), 10 * S, 0
    for _ in range(300):
        now += rng.choice((1 * MS, 3 * MS, 9 * MS, 200 * MS))
        told += send(pace, now) != 0
    assert told < 60


@given(now=st.integers(0, 2**62), ahead=st.integers(-(2**31) + 2, 2**31 - 2))
def test_due_times_survive_the_wrap(now: int, ahead: int) -> None:
    when = max(0, now + ahead * US)
    due = to_due(when)
    assert 0 < due < 2**32
    assert abs(from_due(due, now) - when) <= 2 * US


@pytest.mark.parametrize("gap", [3 * US, 20 * US, 70 * US])
def test_back_to_back_is_watched_for(gap: int) -> None:
    result = play(SpinPredictor(), steady(gap, 500, gap // 4))
    assert result.hits > 0.9 * result.waits


@given(
    gap=st.integers(8 * MS, 60 * MS),
    jitter=st.floats(0, 1),
    busy=st.floats(0, 0.9),
    hints=st.one_of(st.none(), st.integers(0, 5 * MS)),
    seed=st.integers(0, 100),
)
@settings(max_examples=150, deadline=None)
def test_never_more_than_two_percent_of_a_core_at_slow_steps(
    gap: int, jitter: float, busy: float, hints: int | None, seed: int
) -> None:
    gaps = steady(gap, 300, int(gap * jitter), seed)
    predictor = SpinPredictor()
    result = play(predictor, gaps, int(gap * busy), hints)
    assert result.watched <= 0.02 * result.time + SAVINGS_NS
    assert predictor.watched_ns == result.watched


@given(gaps=st.lists(st.integers(1, 200 * MS), min_size=1, max_size=200))
@settings(max_examples=150, deadline=None)
def test_the_budget_holds_for_any_arrivals(gaps: list[int]) -> None:
    result = play(SpinPredictor(), gaps)
    earned = sum(max(SHARE * min(gap + WAKE, LONGEST_GAP_NS), min(gap + WAKE, FLOOR_NS)) for gap in gaps)
    assert result.watched <= earned + SHORT_NS * 2


@given(before=st.lists(st.integers(1, 50 * MS), max_size=100), idle=st.integers(S, 10_000 * S))
@settings(max_examples=100, deadline=None)
def test_idle_is_one_watch_at_most_and_forgotten_afterwards(before: list[int], idle: int) -> None:
    """However long nothing comes: one plan, what it says is short, and the pace before is known after it."""
    predictor = SpinPredictor()
    play(predictor, before)
    begin = 10 * S + sum(before) + 10 * MS
    nap_until, watch_until = predictor.plan(begin)
    assert watch_until - max(begin, nap_until) < 2 * MS or not watch_until
    assert watch_until < begin + LONGEST_GAP_NS + 2 * MS
    gaps = sorted(predictor._gap._values)
    predictor.arrived(begin, begin + idle)
    if len(gaps) > 3:
        assert gaps[0] <= predictor._gap.guess()[0] <= gaps[-1]


def test_a_pause_does_not_spoil_the_pace() -> None:
    predictor = SpinPredictor()
    play(predictor, steady(10 * MS, 100, 20 * US))
    result = play(predictor, [60 * S, *steady(10 * MS, 50, 20 * US)], start=10 * S + 100 * 10 * MS)
    assert result.hits > 25


def test_a_new_pace_is_learnt() -> None:
    predictor = SpinPredictor()
    play(predictor, steady(5 * MS, 100, 10 * US))
    result = play(predictor, steady(30 * MS, 150, 50 * US), start=20 * S)
    assert result.hits > 75
    result = play(predictor, steady(2 * MS, 300, 10 * US), start=30 * S)
    assert result.hits > 75


def test_what_the_sender_says_is_better_than_a_guess() -> None:
    rng = random.Random(5)
    gaps = [rng.randint(5 * MS, 40 * MS) for _ in range(300)]
    guessed = play(SpinPredictor(), gaps)
    told = play(SpinPredictor(), gaps, hints=20 * US)
    assert guessed.hits < 30
    assert told.hits > 200
    lied = play(SpinPredictor(), gaps, hints=10 * MS)
    assert lied.watched <= 0.02 * lied.time


def test_vain_watches_become_rare() -> None:
    predictor = SpinPredictor()
    play(predictor, steady(50 * US, 50, 5 * US), start=9 * S)
    rng = random.Random(1)
    gaps = [rng.choice((1 * MS, 3 * MS, 9 * MS)) for _ in range(1000)]
    assert play(predictor, gaps).watched < 0.02 * sum(gaps)
