"""Ctrl-C (130) and SIGTERM (0) in every phase: nothing is left 5 s later, and nothing is said that was not asked.

SIGTERM lets running requests finish; here they have 1 s for it, and never manage.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from drumline.errors import ExitCode
from tests.chaos.conftest import figures
from tests.chaos.tree import PHASES, Tree
from tests.stopped import stop

SOON_S = {"starting": 2.0, "draining": 2.0}
NUMBERS = [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.OK), (signal.SIGHUP, ExitCode.OK)]
ALL_PHASES = (*PHASES, "stuck in its end")


def send(run: Tree, number: int) -> None:
    """Ctrl-C goes to the whole terminal group; a service manager's SIGTERM to the main process."""
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)


def check_end(run: Tree, what: str, code: int, limit_s: float = 5.0) -> None:
    began = time.monotonic()
    gone = run.seconds_to_end(began, limit_s)
    figures.append((run.phase, what, None, gone))
    assert run.process.returncode == code, run.text
    assert "drumline failed" not in run.text
    assert "Traceback" not in run.text
    run.nothing_is_left()


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ALL_PHASES)
@pytest.mark.parametrize(("number", "code"), NUMBERS)
def test_signal(tree: Callable[..., Tree], phase: str, number: int, code: int) -> None:
    """In the phases of the end it is the second one, so it ends at once, and not well."""
    run = tree(phase)
    send(run, number)
    second = phase in ("draining", "stopping", "stuck in its end")
    check_end(run, signal.Signals(number).name, ExitCode.INTERRUPTED if second else code, SOON_S.get(phase, 5.0))


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_anything_runs(tree: Callable[..., Tree], number: int) -> None:
    run = tree("listening")
    send(run, number)
    check_end(run, signal.Signals(number).name, ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.OK, 2.0)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_at_every_moment_of_the_start(tree: Callable[..., Tree], number: int) -> None:
    """Every 100 ms from the birth of the process (250 after two seconds) until it was ready before the signal came."""
    code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.OK
    longest, ready = 0.0, 0
    for moment in range(100):
        run = tree("born")
        time.sleep(moment / 10 if moment < 20 else 2 + (moment - 20) / 4)
        ready += "Ready: http" in run.text
        send(run, number)
        began = time.monotonic()
        longest = max(longest, run.seconds_to_end(began, 3.0))
        # Before our first line runs, Python and the system have their way.
        codes = (code,) if run.text or moment > 1 else (code, -number, 1)
        assert run.process.returncode in codes, (moment, run.text)
        assert moment == 0 or "Traceback" not in run.text, (moment, run.text)
        assert "drumline failed" not in run.text
        run.nothing_is_left()
        run.close()
        if ready == 2:
            break
    figures.append(("every moment", signal.Signals(number).name, None, longest))
    assert ready == 2


@pytest.mark.chaos
def test_workers_that_are_stuck_in_their_end(tree: Callable[..., Tree]) -> None:
    run = tree("stuck in its end")
    check_end(run, "(ladder)", ExitCode.INTERRUPTED, 10.0)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        pytest.param(phase, victim, marks=() if (phase, victim) == ("mid-step", "Worker_1") else pytest.mark.chaos)
        for phase in ("idle", "mid-step", "draining")
        for victim in ("Worker_1", "EngineCore_DP0", "ForkServer")
    ],
)
def test_ctrl_c_with_a_stopped_process(tree: Callable[..., Tree], phase: str, victim: str) -> None:
    run = tree(phase)
    stop(run.pids[victim])
    send(run, signal.SIGINT)
    check_end(run, f"ctrl-C, stopped {victim}", ExitCode.INTERRUPTED)


@pytest.mark.parametrize(
    "victim", ["Worker_1", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("EngineCore_DP0", "ForkServer"))]
)
def test_sigterm_with_a_stopped_process(tree: Callable[..., Tree], victim: str) -> None:
    """What runs cannot finish: the limit of the drain (1 s here) comes first, then the ladder."""
    run = tree("mid-step")
    stop(run.pids[victim])
    send(run, signal.SIGTERM)
    check_end(run, f"SIGTERM, stopped {victim}", ExitCode.OK, 6.0)
    assert run.stream is not None
    assert run.stream.end()["error"]["message"] == "The server is shutting down."
