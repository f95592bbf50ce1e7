"""An idle server costs nothing: workers and engine core under 10 ms of CPU each in 30 s, all together under 1 %."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.tree import Tree

SECONDS = 30.0


def cpu_ms(pid: int) -> float:
    """CPU time of all threads so far, to the nanosecond (stat counts in ticks of 10 ms)."""
    return sum(int((task / "schedstat").read_text().split()[0]) / 1e6 for task in Path(f"/proc/{pid}/task").iterdir())


@pytest.mark.chaos
def test_idle(tree: Callable[..., Tree], record_property: Callable[[str, object], None]) -> None:
    run = tree("idle")
    time.sleep(1)  # what ends after the last answer
    before = {role: cpu_ms(pid) for role, pid in run.pids.items()}
    time.sleep(SECONDS)
    used = {role: cpu_ms(pid) - before[role] for role, pid in run.pids.items()}
    record_property("cpu_ms", used)
    assert max(used[role] for role in ("EngineCore_DP0", "Worker_0", "Worker_1")) < 10.0, used
    assert sum(used.values()) < SECONDS * 10, used
