"""Real processes over gloo. Each test starts one Python that imports torch once and forks the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.platforms import resolve_platform

ROOT = Path(__file__).parents[2]


def run(function: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """What ``function`` of ranks.py returned on each rank; {} for one that died. The console must stay silent."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.ranks", function, str(size), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    files = [folder / str(rank) for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def test_collectives_of_three_ranks(tmp_path: Path) -> None:
    for rank, got in enumerate(run("collectives", 3, tmp_path)):
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
            "broadcast": [10],
            "object": {"rank": 0},
            "objects": ["", "x", "xx"],
            "ring": (rank - 1) % 3,
            "listeners": ["127.0.0.1"],
            "sizes": {"world": 3, "tp": 3, "pcp": 1, "pp": 1, "dp": 1, "dcp": 1, "etp": 1},
            "default_group": False,
        }, rank


def test_pipeline_stages_send_and_receive(tmp_path: Path) -> None:
    first, last = run("stages", 2, tmp_path)
    assert first == {"value": 0.0, "tp": True, "last": False}
    assert last == {"value": 42.0, "tp": True, "last": True}


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    assert run("two_worlds", 2, tmp_path) == [{"a": 2.0, "b": 20.0, "after": 4.0}] * 2


def test_a_killed_peer_fails_the_others_at_once(tmp_path: Path) -> None:
    first, second, dead = run("killed", 3, tmp_path)
    assert dead == {}
    for rank, got in enumerate((first, second)):
        assert got == {"notes": [f"in all_reduce (sum) of tp group (0, 1, 2) on rank {rank}"], "fast": True}


def test_a_peer_that_does_not_come_is_a_timeout(tmp_path: Path) -> None:
    assert run("late", 2, tmp_path)[0] == {"notes": ["in barrier of tp group (0, 1) on rank 0"]}


def test_a_rank_that_never_joins_is_a_timeout(tmp_path: Path) -> None:
    assert "error" in run("absent", 2, tmp_path)[0]


@pytest.mark.skipif(len(resolve_platform().device_table().devices) < 2, reason="no two GPUs on this machine")
def test_two_gpus(tmp_path: Path) -> None:
    for rank, got in enumerate(run("gpus", 2, tmp_path)):
        assert got == {
            "sum": [3.0] * 3,
            "cpu_sum": 2.0,
            "uneven": [0.0, 1.0, 1.0],
            "broadcast": 1,
            "object": "hello",
            "received": 7.0 * rank,
            "graph": [4.0] * 4,
            "contexts": [rank],
            "listeners": ["127.0.0.1"],
        }, rank


def test_world_of_one_needs_no_process_group() -> None:
    script = """
import os, sys, threading
import torch
from drumline.errors import ConfigError
from drumline.parallel.groups import init_groups
from drumline.parallel.layout import GroupKind, Layout
groups = init_groups(Layout(), 0, "")
t = torch.tensor([[1.0, 2.0]])
assert groups.tp.all_reduce(t) is t and groups.tp.all_gather(t) is t and groups.tp.broadcast(t) is t
assert groups.tp.broadcast_object("x") == "x" and groups.tp.all_gather_object("x") == ["x"]
groups.tp.barrier()
out = torch.empty(1, 1, 2)
groups.tp.all_gather_into(out, t)
assert out[0].equal(t) and groups.world.device_group is None and groups.tp.is_first and groups.tp.is_last
for call in (groups.tp.send, groups.tp.recv):
    try: call(t)
    except ValueError as error: assert "itself" in str(error)
    else: raise AssertionError
groups.close()
try: init_groups(Layout(tp=2), 0, "")
except ConfigError as error: assert "init method" in str(error)
else: raise AssertionError
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
