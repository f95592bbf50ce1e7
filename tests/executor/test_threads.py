"""How many threads compute, in every role, by every start method, in every phase."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drumline.config import START_METHODS
from drumline.executor import Executor
from drumline.platforms import host
from tests.executor.conftest import Make

PHASES = ["construct", "init_device", "load_model", "warm-up", "step"]


class Plan(NamedTuple):
    """Enough of one."""

    step: int = 0


def noted(executor: Executor) -> list[dict[str, Any]]:
    executor.collective_rpc("compile_or_warm_up_model")
    return executor.collective_rpc("execute_model", (Plan(),))  # type: ignore[no-any-return]


@pytest.fixture(params=[None, "1"], ids=["nothing said", "one"])
def said(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The user's OMP_NUM_THREADS."""
    if request.param is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", request.param)
    return request.param  # type: ignore[no-any-return]


def planned(said: str | None, workers: int) -> int:
    """The user's own value wins, else the workers share the cores."""
    return int(said) if said else max(1, host.cores() // workers)


@pytest.mark.parametrize("method", START_METHODS)
def test_workers(make: Make, method: str, said: str | None) -> None:
    """The environment has it before torch is imported, or torch is told first of all: every phase sees the same."""
    executor = make("mp", 1, worker="Threads", worker_start_method=method, preload=("torch",))
    [seen] = noted(executor)
    count = planned(said, 1)
    assert seen == dict.fromkeys(PHASES, (count, str(count)))


def test_the_fork_server_computes_with_one_thread_whatever_the_workers_get(make: Make, said: str | None) -> None:
    """It has the variables before it imports torch, and no parallel region was ever opened in it."""
    executor = make("mp", 1, worker="Threads", preload=("tests.executor.preloaded",))

    def look(worker: Any) -> Any:
        module = sys.modules["tests.executor.preloaded"]
        return module.BEFORE, module.AFTER, os.getppid()

    [(before, after, parent)] = executor.collective_rpc(look)
    assert (before, after) == ({"torch": False, "env": ["1", "1", "1"]}, 1)
    assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1
    [seen] = noted(executor)
    assert seen["step"] == (planned(said, 1), str(planned(said, 1)))


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_neighbours_share_the_cores(make: Make, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    executor = make("mp", 2, worker="Threads", worker_start_method=method, preload=("torch",))
    count = max(1, host.cores() // 2)
    for seen in noted(executor):
        assert {tuple(value) for value in seen.values()} == {(count, str(count))}


def test_a_number_that_is_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wins over the variable, in the worker's environment too."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(host.cores()))
    executor = make("mp", 1, worker="Threads", threads_per_worker=1, preload=("torch",))
    [seen] = noted(executor)
    assert {tuple(value) for value in seen.values()} == {(1, "1")}
    assert os.environ["OMP_NUM_THREADS"] == str(host.cores())  # the program's own stays the user's


def test_a_worker_in_the_programs_own_process(make: Make) -> None:
    """uni: torch has what the program gave it."""
    import torch

    [seen] = noted(make("uni", worker="Threads"))
    assert {value[0] for value in seen.values()} == {min(torch.get_num_threads(), host.cores())}
