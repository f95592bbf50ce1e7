"""Real processes over shared memory and gloo, and NCCL where there are two GPUs: see ranks.py, which does them all."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from drumline.platforms import resolve_platform
from tests.parallel.conftest import Ran

GPUS = len(resolve_platform().device_table().devices)


ONLY_PIPELINES = "on one machine only pipeline groups send CPU tensors from one member to another"


@pytest.fixture(scope="module")
def ran(run_program: Callable[..., Ran]) -> Ran:
    return run_program("tests.parallel.ranks", *(["gpus"] if GPUS >= 2 else []))


def test_the_console_stays_silent(ran: Ran) -> None:
    assert ran.console == ""


ENDING_WELL = [
    "collectives",
    "gloo_collectives",
    "strides",
    "gloo_strides",
    "refusals",
    "gloo_refusals",
    "gloo_leaver",
    "stages",
    "gloo_stages",
    "tcp",
    "two_worlds",
    "late",
    "absent",
    "alone",
]


@pytest.mark.parametrize("function", ENDING_WELL)
def test_all_ranks_end_well(ran: Ran, function: str) -> None:
    assert set(ran.codes(function)) == {0}


@pytest.mark.parametrize("function", ["collectives", "gloo_collectives"])
def test_collectives_of_three_ranks(ran: Ran, function: str) -> None:
    shm = function == "collectives"
    for rank, got in enumerate(ran[function]):
        assert got.pop("backend") == ("shm" if shm else "gloo")
        assert (len(got.pop("threads")) == 1) == shm
        assert got.pop("ring") == (ONLY_PIPELINES if shm else (rank - 1) % 3)
        assert got == {
            "sum": [6.0] * 3,
            "max": [2, 0],
            "min": [0, -2],
            "half": [3.0, 3.0],
            "empty": [0, 4],
            "uneven": True,
            "uneven_first": True,
            "even": [[0, 1, 2], [0, 1, 2]],
            "even_first": [[0, 7], [1, 7], [2, 7]],
            "middle": [2, 6, 5],
            "no_rows": [0, 6],
            "into": [0.0, 1.0, 2.0],
            "all_to_all": [[who, rank, number] for who in range(3) if who != rank for number in range(who)],
            "no_bytes": [3, 0],
            "scattered": [[[0.0, 6.0, 12.0]], [[18.0]], [[24.0, 30.0]]][rank],
            "scattered_evenly": [[[2]], [[5]], [[7]]][rank],
            "scattered_nothing": [0, 1],
            "scattered_half": [3.0],
            "gathered": [[0.0, 0.0, 0.0, 1.0, 2.0, 2.0]] * 2 if rank == 1 else None,
            "gathered_first": [0, 1, 2] if rank == 0 else None,
            "broadcast": [10],
            "object": {"rank": 0},
            "objects": ["", "x", "xx"],
            "listeners": [] if shm else ["127.0.0.1"],
            "sizes": {"world": 3, "tp": 3, "pcp": 1, "pp": 1, "dp": 1, "dcp": 1, "etp": 1},
            "default_group": False,
        }, rank


@pytest.mark.parametrize("function", ["strides", "gloo_strides"])
def test_tensors_that_are_not_contiguous(ran: Ran, function: str) -> None:
    for got in ran[function]:
        assert got == {
            "same": True,
            "sum": [[0, 2, 4], [6, 8, 10]],
            "broadcast": [[0, 1, 2], [3, 4, 5]],
            "source": [[0, 3], [1, 4], [2, 5]],
            "max": [1],
            "grad": [[2, 2], [2, 2]],
        }


GATHERED_INTO = [
    ("6 elements of torch.float32 into a contiguous tensor, from a", "[3] into [2, 2] of torch.float32"),
    ("6 elements of torch.float32 into a contiguous tensor, from a", "[3] into [2, 3] of torch.float64"),
    ("6 elements of torch.float32 into a contiguous tensor, from a", "[3] into [2, 3] of torch.float32"),
]


@pytest.mark.parametrize("function", ["refusals", "gloo_refusals"])
def test_arguments_that_do_not_fit(ran: Ran, function: str) -> None:
    for rank, got in enumerate(ran[function]):
        group = f"GroupCoordinator(tp, ranks=(0, 1), rank_in_group={rank})"
        asked = f"IndexError: {group} was asked for dimension"
        assert got["errors"] == [
            f"ValueError: {group} has no member -1",
            f"ValueError: {group} has no member 2",
            f"{asked} 2: a tensor of 2 dimensions has -2 to 1",
            f"{asked} -3: a tensor of 2 dimensions has -2 to 1",
            f"{asked} 5: a tensor of 2 dimensions has -2 to 1",
            f"{asked} -1: a scalar has none",
            f"ValueError: sends [1, -1] and receives [1, -1] of {group}: no number may be below 0",
            *["ValueError: 'avg' is no reduction; there are sum, max, min"] * 2,
            *(f"ValueError: {group} gathers {what} contiguous one, not {shapes}" for what, shapes in GATHERED_INTO),
        ]
        assert got["after"] == 2


def test_a_rank_that_leaves_closes_its_connections(ran: Ran) -> None:
    left, waiting = ran["gloo_leaver"]
    closed = "ChannelClosedError: world group (0, 1) on rank 0 is closed"
    assert left == {"error": closed, "fast": True, "connections": 0}
    assert waiting["error"]
    assert waiting["fast"]


def test_pipeline_stages_send_and_receive(ran: Ran) -> None:
    for rank, got in enumerate(ran["stages"]):
        ring = (rank - 1) % 3
        value = 42.0 if rank == 1 else 0.0
        threads = got.pop("threads")
        assert len(threads) == 1
        assert got.pop("sockets") == 0
        assert got == {"value": value, "tp": 1, "last": rank == 2, "ring": ring, "sum": 3.0, "world_ring": ring}
    assert ran["gloo_stages"] == [{"ring": ["", "tokens"]}] * 2


def test_groups_over_tcp(ran: Ran) -> None:
    assert ran["tcp"] == [{"value": 2.0, "gloo": ["127.0.0.1"]}] * 2


def test_two_engines_in_one_process(ran: Ran) -> None:
    assert ran["two_worlds"] == [{"a": 2.0, "b": 20.0, "after": 4.0}] * 2


@pytest.mark.parametrize("function", ["killed", "gloo_killed"])
def test_a_killed_peer_fails_the_others(ran: Ran, function: str) -> None:
    first, second, dead = ran[function]
    assert dead == {}
    assert ran.codes(function) == [0, 0, -signal.SIGKILL]
    for rank, got in enumerate((first, second)):
        assert got["fast"]
        if function == "killed":
            assert got["error"] == f"all_reduce of tp group (0, 1, 2) on rank {rank}: rank 2 (pid N) has died"
        else:
            assert got["error"].endswith(f"in all_reduce (sum) of world group (0, 1, 2) on rank {rank}")


def test_a_peer_that_does_not_come_is_a_timeout(ran: Ran) -> None:
    assert ran["late"][0] == {"error": "barrier of tp group (0, 1) on rank 0: no sign of rank 1 within 1 s"}


def test_a_rank_that_never_joins_is_a_timeout(ran: Ran) -> None:
    error = "barrier of world group (0, 1, 2) on rank {}: no sign of rank 1 within 1 s"
    assert [got.get("error") for got in ran["absent"]] == [error.format(0), None, error.format(2)]


@pytest.mark.skipif(GPUS < 2, reason="no two GPUs on this machine")
def test_two_gpus(ran: Ran) -> None:
    for rank, got in enumerate(ran["gpus"]):
        assert got == {
            "sum": [3.0] * 3,
            "cpu_sum": 2.0,
            "uneven": [0.0, 1.0, 1.0],
            "broadcast": 1,
            "scattered": [[0.0], [2.0, 4.0]][rank],
            "gathered": [0.0, 1.0, 1.0] if rank == 1 else None,
            "object": "hello",
            "received": 7.0 * rank,
            "fast": [[2.0]] * 3,
            "choice": True,
            "graph": [4.0] * 4,
            "contexts": [rank],
            "listeners": ["127.0.0.1"],
        }, rank


def test_world_of_one_needs_no_process_group(ran: Ran) -> None:
    assert ran["alone"] == [
        {
            "same": True,
            "traded": True,
            "objects": ["x", ["x"]],
            "into": True,
            "backend": "",
            "first_and_last": True,
            "refused": [True] * 4,
            "threads": 1,
            "opened": 0,
        }
    ]
