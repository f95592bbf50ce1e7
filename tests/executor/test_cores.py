"""Which cores workers run on."""

from __future__ import annotations

import os

import pytest

from drumline.platforms import host
from tests.executor.conftest import Make


@pytest.mark.parametrize("bind", [True, False])
def test_workers_have_cores_of_their_own(make: Make, bind: bool) -> None:
    """Two workers on two or more cores: each its own part, and both count all of them; unless told otherwise."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    executor = make("mp", 2, cpu_bind=bind)
    seen = executor.collective_rpc(lambda worker: (sorted(os.sched_getaffinity(0)), host.cores()))
    parts = [cpus for cpus, _ in seen]
    if bind:
        assert sorted(parts[0] + parts[1]) == cores
    else:
        assert parts == [cores, cores]
    assert {count for _, count in seen} == {host.cores()}
