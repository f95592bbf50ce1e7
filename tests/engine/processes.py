"""A tiny model and engines over it, for tests with real processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from drumline.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from drumline.engine.client import AsyncEngineClient
from drumline.engine.protocol import EngineRequest, RequestOutput
from drumline.engine.recovering import RecoveringEngineClient
from drumline.engine.recovery import Limits
from drumline.plan.sampling import SamplingParams

VOCAB = 307
"""Of tests.model.tiny's llama."""


def config_for(folder: Path, tp: int = 1, blocks: int | None = None, **scheduler: Any) -> EngineConfig:
    """``blocks`` of 4 tokens."""
    return EngineConfig(
        model=ModelConfig(model="tiny", path=str(folder)),
        parallel=ParallelConfig(tensor_parallel_size=tp),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=blocks),
        scheduler=SchedulerConfig(**scheduler),
    )


def greedy(name: str, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), sampling=params, seed=1)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


class Engine:
    """An asynchronous engine on a loop of its own, for tests that are plain functions."""

    def __init__(self, config: EngineConfig, recovery: Limits | None = None) -> None:
        self.runner = asyncio.Runner()
        self.client = self.runner.run(self._make(config, recovery))

    async def _make(self, config: EngineConfig, recovery: Limits | None) -> AsyncEngineClient:
        return AsyncEngineClient(config) if recovery is None else RecoveringEngineClient(config, recovery)

    def start(self) -> None:
        self.run(self.client.start())

    def run(self, coroutine: Coroutine[Any, Any, Any], limit_s: float = 60.0) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, limit_s))

    def pid(self, name: str) -> int:
        return next(process.pid for process in self.client.processes() if process.name == name)

    async def outputs(self, request: EngineRequest) -> list[RequestOutput]:
        return [output async for output in self.client.generate(request)]

    async def tokens(self, request: EngineRequest) -> list[int]:
        return [token for output in await self.outputs(request) for token in output.token_ids]

    async def until_idle(self) -> None:
        """Everything that this client sent has been taken in by the engine core, and nothing runs any more."""
        assert await self.client.call("request_ids") == []

    def close(self) -> None:
        self.run(self.client.shutdown())
        self.runner.close()


@contextmanager
def engine(config: EngineConfig, *, started: bool = True, recovery: Limits | None = None) -> Iterator[Engine]:
    made = Engine(config, recovery)
    try:
        if started:
            made.start()
        yield made
    finally:
        made.close()


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process in ns."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total


def wait_gone(pids: Sequence[int], limit_s: float = 5.0) -> None:
    """Wait until none of these processes runs."""
    deadline = time.monotonic() + limit_s
    left = list(pids)
    while left:
        left = [pid for pid in left if _runs(pid)]
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int, number: int) -> float:
    """Send a signal; the time at which it was sent."""
    os.kill(pid, number)
    return time.monotonic()
