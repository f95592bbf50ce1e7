"""The judge of the soaks: what it calls growth and what it lets pass."""

from __future__ import annotations

import random

import pytest

from tests.soak.watch import BYTES_PER_REQUEST, SLACK, Process

PORTIONS, REQUESTS = 20, 20_000
MIB = 1 << 20


def judged(memory: list[int]) -> bool:
    """Whether this memory is called flat."""
    process = Process("worker", 1, memory, [5] * len(memory), [2] * len(memory))
    return not process.faults(REQUESTS // 2, SLACK)


@pytest.mark.parametrize("noise", [0, 300 << 10])
def test_a_leak_is_found(noise: int) -> None:
    rng = random.Random(1)
    per_request = 3 * max(BYTES_PER_REQUEST, SLACK // (REQUESTS // 2))
    leak = [60 * MIB + per_request * REQUESTS * i // PORTIONS + rng.randint(0, noise) for i in range(PORTIONS)]
    assert not judged(leak)


def test_a_leak_in_steps_is_found() -> None:
    assert not judged([60 * MIB + 3 * MIB * (i // 2) for i in range(PORTIONS)])


@pytest.mark.parametrize("at", range(PORTIONS))
def test_one_step_is_none(at: int) -> None:
    assert judged([60 * MIB + (8 * MIB if i >= at else 0) for i in range(PORTIONS)])


def test_what_fills_up_in_the_first_half_is_none() -> None:
    assert judged([60 * MIB + min(i, 9) * 5 * MIB for i in range(PORTIONS)])


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_one_more_of_anything_is_found(what: str) -> None:
    process = Process("worker", 1, [MIB] * PORTIONS, [5] * PORTIONS, [2] * PORTIONS)
    getattr(process, what)[-1] += 1
    assert [fault for fault in process.faults(10, SLACK) if what in fault]
