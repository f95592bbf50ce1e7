"""Collectives through shared memory, by real processes: see shm_ranks.py, which runs all of them in one go."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drumline.parallel.meeting import CROWDED_SPIN_NS
from tests.parallel.conftest import Ran
from tests.parallel.shm_ranks import RUNS


@pytest.fixture(scope="module")
def ran(run_program: Callable[..., Ran]) -> Ran:
    return run_program("tests.parallel.shm_ranks")


def test_the_console_stays_silent(ran: Ran) -> None:
    assert ran.console == ""


@pytest.mark.parametrize("function", [function.__name__ for function, _ in RUNS])
def test_all_ranks_end_well(ran: Ran, function: str) -> None:
    assert set(ran.codes(function)) == {0}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_gets_the_same_bits(ran: Ran, size: int) -> None:
    """Each rank has compared with what it computed alone, too."""
    digests = {got["digest"] for got in ran[f"random_{size}"]}
    assert len(digests) == 1


def test_those_who_wait_sleep(ran: Ran) -> None:
    """Half a second of waiting for the last rank."""
    assert all(got["cpu_ms"] < 50 for got in ran["slow"]), ran["slow"]


def test_idle_groups_cost_nothing(ran: Ran) -> None:
    for got in ran["idle"]:
        assert got["wakes"] <= 5  # its own sleep, and a page or a file that it had to wait for; gloo: a hundred
        assert (got["threads"], got["sockets"]) == (1, 0)


def test_with_fewer_cores_than_ranks_nobody_watches_words(ran: Ran) -> None:
    assert ran["few_cores"] == [{"spin_ns": CROWDED_SPIN_NS}] * 2


def test_a_rank_that_leaves_is_told_of_at_once(ran: Ran) -> None:
    left, waiting = ran["leaver"]
    assert left == {"errors": ["ChannelClosedError"]}
    assert waiting == {
        "errors": ["all_reduce of tp group (0, 1) on rank 1: rank 0 has left the group"] * 2,
        "fast": True,
    }


def test_signal_handlers_run_in_the_middle_of_a_wait(ran: Ran) -> None:
    assert ran["signals"][0] == {"before": [10], "stopped": True}


def test_all_who_are_missing_are_named(ran: Ran) -> None:
    error = "all_gather of tp group (0, 1, 2, 3) on rank {}: no sign of ranks 1, 3 within 0.3 s"
    assert [got.get("error") for got in ran["missing"]] == [error.format(0), None, error.format(2), None]


def test_misuse_is_refused_with_a_sentence(ran: Ran) -> None:
    for got in ran["misuse"]:
        assert got["errors"][:3] == [
            "a rendezvous is good for one world only",
            "the memory of the rendezvous is not that of 4 ranks",
            "'product' is no reduction; there are sum, max, min",
        ]
        assert "do not fit GroupCoordinator(tp" in got["errors"][3]
        assert "only pipeline groups send" in got["errors"][4]
        assert "cannot cut 3 along dimension 0 into 2 equal parts: give sizes" in got["errors"][5]
        assert "sizes [1, 1] do not fit" in got["errors"][6]
        assert "has no member 2" in got["errors"][7]
        assert "do not fit GroupCoordinator(tp" in got["errors"][8]
        assert "sends itself 1 rows and receives others" in got["errors"][9]
        assert (got["value"], got["tracks"]) == ([4.0] * 4, False)
    assert [got["errors"][10:] for got in ran["misuse"]] == [
        [],
        ["all_to_all of tp group (0, 1) on rank 1: rank 0 sends 2 rows, not the 1 that are expected"],
    ]
