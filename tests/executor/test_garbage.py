"""Python looks for garbage between calls, not in them."""

from __future__ import annotations

import time

from tests.executor.conftest import Make


def test_garbage_is_found_between_steps(make: Make) -> None:
    executor = make("mp", 2, worker="Littering")
    executor.collective_rpc("compile_or_warm_up_model")
    frozen = [frozen for _, _, frozen in executor.collective_rpc("found")]
    assert min(frozen) > 10_000
    executor.collective_rpc("forget_looks")
    for _ in range(40):
        executor.collective_rpc("litter", (300,))
    deadline = time.monotonic() + 10
    while max(left for left, _, _ in executor.collective_rpc("found")) >= 2_000:  # of 12,000
        assert time.monotonic() < deadline
    for _, looks, now in executor.collective_rpc("found"):
        assert len(looks) >= 3
        assert not any(looks)
        assert now in frozen


def test_a_call_without_end_is_not_left_alone(make: Make) -> None:
    executor = make("mp", 2, worker="Littering")
    executor.collective_rpc("compile_or_warm_up_model")
    executor.collective_rpc("forget_looks")
    executor.collective_rpc("litter", (100_000,))
    for left, looks, _ in executor.collective_rpc("found"):
        assert any(looks)
        assert left < 60_000
