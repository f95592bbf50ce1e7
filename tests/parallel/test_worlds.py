"""Several worlds of real processes, and what stands beside them: see world_ranks.py, which runs all in one go."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.parallel.conftest import Ran


@pytest.fixture(scope="module")
def ran(run_program: Callable[..., Ran]) -> Ran:
    return run_program("tests.parallel.world_ranks")


@pytest.fixture
def result(ran: Ran, request: pytest.FixtureRequest) -> Any:
    """Of the function of the test's name."""
    return ran[request.node.name.removeprefix("test_")][0]


def test_the_console_stays_silent(ran: Ran) -> None:
    assert ran.console == ""


def test_spanning(result: Any) -> None:
    """The rank among all engines is dp_rank x world_size + rank; TP stays inside one engine."""
    assert [one["rank"] for one in result] == [0, 1, 2, 3]
    for rank, one in enumerate(result):
        engine, place = divmod(rank, 2)
        assert one["sums"] == {
            "world": 15.0,
            "tp": [3.0, 12.0][engine],
            "dp": [5.0, 10.0][place],
            "ep": 15.0,
            "eplb": 15.0,
        }


def test_replicas(result: Any) -> None:
    """A dense replica is restarted alone."""
    assert result == {
        "lost": [True, -signal.SIGKILL],
        "restarted": [2.0, 2.0],
        "steady": [{"before": 2.0, "after": 2.0}] * 2,
    }


def test_stateless(result: Any) -> None:
    for rank, one in enumerate(result):
        assert one == {
            "any left": [1, 2],
            "objects": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "from 1": "one",
            "gloo": 3,
            "gloo from 2": [2],
            "world": 3.0,
            "text": f"StatelessGroup(rank {rank} of 3)",
            "closed": "ChannelClosedError",
            "world after": 3.0,
        }


def test_stateless_alone(result: Any) -> None:
    assert result == {
        "objects": ["x"],
        "rank": "rank 2 is not in 0..1",
        "method": "a group of 2 processes needs an init method",
        "late": "barrier of world group (0, 1) on rank 0: no sign of rank 1 within 0.2 s",
    }


def test_tcp_store(result: Any) -> None:
    loopback = [{"sum": 2.0, "listeners": ["127.0.0.1"]}] * 2
    assert result["one machine"] == loopback
    assert result["several"] == loopback
    assert result["method"].startswith("tcp://127.0.0.1:PORT?listen=")


def test_timeouts(result: Any) -> None:
    first, *others = result["ranks"]
    assert first["errors"] == [
        "barrier of tp group (0, 1) on rank 0: no sign of rank 1 within 0.2 s",
        "recv of pp group (0, 2) on rank 0: rank 2 gave no sign within 0.3 s",
    ]
    assert first["world"] == 4.0
    assert others == [{"errors": [], "world": 4.0}] * 3
    assert result["alone"] == [5, 5, 2]


def test_sources(result: Any) -> None:
    only = "broadcasts objects from its first member only, not from member 1"
    for rank, one in enumerate(result):
        assert [error.rpartition(") ")[2] for error in one["errors"][:3]] == [only, only, "has no member 2"]
        assert (one["world"], one["large"]) == ("from 1", True)
        assert len(one["errors"]) == 4 - rank
    assert "was given no values" in result[0]["errors"][3]


@pytest.mark.parametrize("name", ["memory", "gloo"])
def test_dicts(ran: Ran, name: str) -> None:
    for rank, one in enumerate(ran["dicts"][0][name]):
        assert one == {
            "seen": [None, [0], [0, 1]][rank],
            "hidden": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
            "half": ["torch.bfloat16", [1.0, 1.0, 1.0]],
            "rest": [7, [0, 4], 3],
            "spread": [1, None, [400_000], [1.0]],
        }


def test_numbers(result: Any) -> None:
    assert result["changed"] == [True] * 3
    assert result["texts"] == [
        [0, "has given all_reduce 5 of tp ranks 0, 1, 2 to its device", []],
        [1, "has given all_reduce 6 of tp ranks 0, 1, 2 to its device; behind: 0", [0]],
        [2, "has given all_reduce 6 of tp ranks 0, 1, 2 to its device; behind: 0", [0]],
    ]


def test_fast_choices(result: Any) -> None:
    """All agree; only the first asks the probe, and only when it matters; one that fails takes all to NCCL."""
    pairs = "GPUs 2 and 0 do not reach each other's memory: the driver says so"
    failed = "symmetric memory of rank 2 of the group cannot be set up: RuntimeError: CUDA driver error: 801"
    well = "4 GPUs, all pairs reach each other's memory"
    for rank, one in enumerate(result):
        kept = [[False], [False], [False] if rank == 2 else [False, True]]
        asked = [1, 2, 3, 3] if rank == 0 else [0] * 4
        assert one["found"] == [
            [True, well, asked[0], kept[0], 1],
            [False, pairs, asked[1], kept[1], 1],
            [False, failed, asked[2], kept[2], len(kept[2])],
            [False, "--disable-custom-all-reduce", asked[3], kept[2], len(kept[2])],
        ]
        assert (one["capacity"], one["shared"]) == (16 << 20, 1)
    start = "all-reduce on GPUs of ranks (0, 1, 2, 3):"
    assert result[0]["lines"] == [
        f"INFO {start} one_shot to 32 KiB, two_shot to 16384 KiB, nccl above ({well})",
        f"WARNING {start} nccl ({pairs})",
        f"WARNING {start} nccl ({failed})",
        f"INFO {start} nccl (--disable-custom-all-reduce)",
    ]
    assert [one["lines"] for one in result[1:]] == [[]] * 3
