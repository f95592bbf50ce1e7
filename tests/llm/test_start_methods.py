"""A whole engine by every start method: the same tokens, and threads and NUMA as planned in every process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline.config import START_METHODS
from drumline.llm import LLM, SamplingParams
from drumline.platforms import host, numa

from .conftest import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def look(worker: Any) -> dict[str, Any]:
    """What a worker is like from inside."""
    torch = sys.modules["torch"]
    return {
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "parent": os.getppid(),
        "outer": os.environ.get("MASTER_ADDR"),
        "cpus": sorted(os.sched_getaffinity(0)),
    }


@pytest.fixture(scope="module")
def tokens(model_path: Path) -> list[int]:
    with LLM(model_path, **SMALL) as llm:
        return llm.generate("The quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=pytest.mark.chaos if one in ("spawn", "plain") else ()) for one in START_METHODS]
)
def test_every_start_method(model_path: Path, tokens: list[int], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    with LLM(model_path, tensor_parallel_size=2, worker_start_method=method, **SMALL) as llm:
        assert llm.generate("The quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == tokens
        seen = llm.collective_rpc(look)
        pids = {process.name: process.pid for process in llm.processes()}
    count = max(1, host.cores() // 2)
    assert [one["threads"] for one in seen] == [count, count]
    assert [one["omp"] for one in seen] == [str(count)] * 2
    assert [one["outer"] for one in seen] == [None, None]
    parent = "EngineCore_DP0" if method in ("spawn", "fork") else "ForkServer"
    assert [one["parent"] for one in seen] == [pids[parent]] * 2
    assert "OMP_NUM_THREADS" not in os.environ  # the program's own is not touched


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.chaos)])
def test_a_worker_inside_the_engine_core(
    model_path: Path, tokens: list[int], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uni: the engine core is what computes, so it gets threads and place of a worker."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    bind = bool(numa.nodes())
    with LLM(model_path, worker_start_method=method, numa_bind=bind, **SMALL) as llm:
        assert llm.generate("The quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == tokens
        [seen] = llm.collective_rpc(look)
        pids = {process.name: process.pid for process in llm.processes()}
    assert (seen["threads"], seen["omp"]) == (host.cores(), str(host.cores()))
    assert seen["parent"] == pids["ForkServer"]
    if bind:
        assert set(seen["cpus"]) == set(numa.nodes()[0]) & set(host.allowed_cpus())


@pytest.mark.skipif(not numa.nodes(), reason="this kernel has no NUMA")
def test_an_engine_core_beside_its_workers(model_path: Path, tokens: list[int]) -> None:
    with LLM(model_path, tensor_parallel_size=2, numa_bind=True, **SMALL) as llm:
        assert llm.generate("The quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == tokens
        workers = [one["cpus"] for one in llm.collective_rpc(look)]
        core = next(process.pid for process in llm.processes() if process.name.startswith("EngineCore"))
        assert sorted(psutil.Process(core).cpu_affinity()) == sorted({cpu for cpus in workers for cpu in cpus})
