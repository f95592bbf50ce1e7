"""Many starts, each with ``kill -9`` of some process at a random moment, then one that works; nothing accumulates.

All have one folder for temporary files and logs, as starts on a user's machine do. CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.errors import ExitCode
from tests.chaos.conftest import figures
from tests.chaos.test_recovery import end_well
from tests.chaos.tree import SLOWDOWN, Tree

pytestmark = pytest.mark.alone

KEPT_RUNS = 20
"""Log folders that stay; what is older is removed."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("starts", [1, pytest.param(50, marks=pytest.mark.chaos)])
def test_starts(
    tree: Callable[..., Tree], tmp_path: Path, starts: int, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    record_property("seed", seed)
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    seconds = works(tree, tmp_path)
    before = Left(tmp_path)
    for number in range(starts):
        kill_one(tree("born", home=tmp_path), rng, seconds, f"start {number} of seed {seed}")
    works(tree, tmp_path)
    after = Left(tmp_path)
    assert after.descriptors == before.descriptors
    assert after.cache == before.cache
    assert after.sockets == before.sockets == []
    # Who is killed before it has made its folder leaves none.
    assert min(before.runs + 1, KEPT_RUNS) <= after.runs <= min(before.runs + starts + 1, KEPT_RUNS)
    assert set(after.home) - {"state"} == set(before.home) - {"state"}


def works(tree: Callable[..., Tree], home: Path) -> float:
    """A start that nobody disturbs, a request, an end; seconds until it was ready."""
    run = tree("idle", recovery=("off", "--drain-lag", "0"), home=home)
    seconds = time.monotonic() - run.began
    end_well(run, "(undisturbed)")
    run.close()
    return seconds


def kill_one(run: Tree, rng: random.Random, seconds: float, what: str) -> None:
    """Kill one of the processes that there are at a moment between the birth of the first and a little after ready."""
    moment = rng.uniform(0.0, 1.1 * seconds)
    time.sleep(max(0.0, run.began + moment - time.monotonic()))
    victim = rng.choice(sorted(run.members()))
    run.pids = {str(pid): pid for pid in run.members()}
    began = time.monotonic()
    try:
        os.kill(victim, signal.SIGKILL)
        gone = run.seconds_to_end(began, 5.0 * SLOWDOWN)
    except (AssertionError, ProcessLookupError) as error:
        raise AssertionError(f"{what}: pid {victim} at {moment:.2f} of {seconds:.2f} s: {error}") from error
    figures.append(("random", f"{what}, at {moment:.2f} s", None, gone))
    codes = {ExitCode.START_FAILED, ExitCode.WORKER_DIED} if victim != run.process.pid else {-signal.SIGKILL}
    assert run.process.returncode in codes, f"{what}\n{run.text}"
    run.nothing_is_left()
    run.close()


class Left:
    """What could accumulate: here, in the folder of all starts, in the user's cache, and sockets with a name."""

    def __init__(self, home: Path) -> None:
        self.descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "drumline")
        self.cache = sorted(str(path) for path in cache.glob("*/*"))
        self.home = sorted(path.name for path in home.iterdir())
        self.runs = len(list((home / "state/drumline/logs").iterdir()))
        self.sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if str(home) in line]
