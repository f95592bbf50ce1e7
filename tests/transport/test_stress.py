"""Many messages of all sizes between real processes: nothing lost, reordered, damaged, or woken by the safety net."""

from __future__ import annotations

import os

import pytest

from .stress import Outcome, run


def check(outcome: Outcome) -> None:
    assert outcome.lost_wakes == 0
    assert outcome.resident <= outcome.shared + 65536  # pages are rounded up


def cores(count: int) -> list[int]:
    have = sorted(os.sched_getaffinity(0))
    if len(have) < count:
        pytest.skip(f"this machine has {len(have)} cores, not {count}")
    return have[:count]


@pytest.mark.parametrize(("n_cores", "load", "count"), [(1, 1, 1500), (2, 0, 3000), (2, 2, 2000)])
def test_short_stress(n_cores: int, load: int, count: int) -> None:
    check(run(count, cores(n_cores), load=load))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("n_cores", "load"), [(1, 1), (2, 2)])
def test_a_hundred_thousand_messages(n_cores: int, load: int) -> None:
    check(run(100_000, cores(n_cores), load=load))
