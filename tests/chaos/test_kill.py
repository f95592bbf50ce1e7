"""``kill -9`` of every process in the phases that the matrix does not have: just ready, and while it ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from drumline.errors import ExitCode
from tests.chaos.conftest import figures
from tests.chaos.tree import ALL, Tree, code_of

pytestmark = pytest.mark.alone

CELLS = [
    pytest.param(phase, victim, marks=() if (phase, victim) == ("stopping", "EngineCore_DP0") else pytest.mark.chaos)
    for phase in ("ready", "stopping")
    for victim in ALL
]


@pytest.mark.parametrize(("phase", "victim"), CELLS)
def test_kill(tree: Callable[..., Tree], phase: str, victim: str) -> None:
    run = tree(phase, victim)
    pid = run.pids[victim]
    began = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        assert phase == "stopping"
    told = None if phase == "stopping" else run.seconds_to_report(began, 2.0)
    gone = run.seconds_to_end(began, 5.0)
    figures.append((phase, f"kill {victim}", told, gone))
    if phase == "stopping":
        _check_stopped(run, victim)
    else:
        _check_report(run, victim, pid)
    run.nothing_is_left()


def _check_stopped(run: Tree, victim: str) -> None:
    """It was asked to end and ends; what dies on the way is no news, except for the death of the root."""
    codes = {-signal.SIGKILL, ExitCode.INTERRUPTED} if victim == "APIServer_0" else {ExitCode.INTERRUPTED}
    assert run.process.returncode in codes, run.text
    assert run.text.count("drumline failed") <= (victim == "APIServer_0"), run.text
    assert "Traceback" not in run.text


def _check_report(run: Tree, victim: str, pid: int) -> None:
    report = run.report()
    headline = report.strip().splitlines()[0]
    name = {"Worker_0": "Worker_(TP)?0 rank 0", "Worker_1": "Worker_(TP)?1 rank 1"}.get(victim, victim)
    assert re.search(rf"{name} \(pid {pid}\)", headline), run.text
    assert "was killed by SIGKILL" in headline, run.text
    if victim == "APIServer_0":
        assert run.process.returncode == -signal.SIGKILL
        return
    assert re.search(r"SIGKILL (while ready|during \w+)", headline), run.text
    assert "log file: " in report, run.text
    assert run.process.returncode == code_of(run.phase), run.text
    if run.stream is not None:
        assert f"(pid {pid})" in run.stream.end()["error"]["message"]
