"""Messages between pipeline stages, by real processes: see mail_ranks.py, which runs all of them in one go."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.parallel.conftest import Ran
from tests.parallel.mail_ranks import RUNS


@pytest.fixture(scope="module")
def ran(run_program: Callable[..., Ran]) -> Ran:
    return run_program("tests.parallel.mail_ranks")


def test_the_console_stays_silent(ran: Ran) -> None:
    assert ran.console == ""


@pytest.mark.parametrize("function", [function.__name__ for function, _ in RUNS])
def test_all_ranks_end_well(ran: Ran, function: str) -> None:
    assert ran.codes(function) == [
        -signal.SIGKILL if (function, rank) == ("killed", 1) else 0 for rank in range(len(ran.codes(function)))
    ]


def test_a_stage_that_waits_sleeps(ran: Ran) -> None:
    """Four tenths of a second of waiting."""
    assert all(got["cpu_ms"] < 50 for got in ran["slow"]), ran["slow"]


def test_an_idle_pipeline_costs_nothing(ran: Ran) -> None:
    for got in ran["idle"]:
        assert got["wakes"] <= 5  # as of idle groups
        assert (got["threads"], got["sockets"]) == (1, 0)


def test_a_killed_stage_fails_its_neighbours(ran: Ran) -> None:
    first, _, last = ran["killed"]
    assert first == {"error": "send of pp group (0, 1, 2) on rank 0: rank 1 (pid N) has died"}
    assert last == {"error": "recv of pp group (0, 1, 2) on rank 2: rank 1 (pid N) has died"}


def test_what_was_sent_is_read_before_it_is_told_that_the_sender_left(ran: Ran) -> None:
    left, waiting = ran["leaver"]
    assert left == {"error": "send of pp group (0, 1) on rank 0: it is closed"}
    assert waiting == {
        "words": "last words",
        "error": "recv of pp group (0, 1) on rank 1: rank 0 has left the group",
        "fast": True,
    }


def test_deadlines(ran: Ran) -> None:
    error = "of pp group (0, 1) on rank {}: rank {} gave no sign within 0.3 s"
    assert ran["late"][1] == {"error": f"recv {error.format(1, 0)}"}
    assert ran["full"][0] == {"error": f"send {error.format(0, 1)}"}


def test_signal_handlers_end_a_wait(ran: Ran) -> None:
    assert ran["signals"][0] == {"stopped": True}


def test_misuse_is_refused_with_a_sentence(ran: Ran) -> None:
    for rank, got in enumerate(ran["misuse"]):
        where = f"of pp group (0, 1, 2) on rank {rank}"
        assert got["errors"] == [
            f"send {where}: a stage sends to the next one and receives from the last",
            f"recv {where}: a stage sends to the next one and receives from the last",
            f"send {where}: the tensor must be contiguous and on the CPU",
            f"GroupCoordinator(pp, ranks=(0, 1, 2), rank_in_group={rank}) cannot send to or receive from itself",
            f"recv {where}: 16 bytes are expected, but a message of 12 came",
        ]
