"""A program without a main guard, as tests start it from all kinds of other programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from drumline.config import START_METHODS, EngineConfig, ParallelConfig, ProcessConfig
from drumline.executor import Executor


def open_executor(method: str, folder: str = "", world_size: int = 2, **more: Any) -> Executor:
    """Workers of a class without a model."""
    config = EngineConfig(
        platform="cpu",
        parallel=ParallelConfig(
            tensor_parallel_size=world_size, distributed_executor_backend="mp", distributed_timeout_s=30.0
        ),
        process=ProcessConfig(
            worker_cls=more.pop("worker_cls", "tests.executor.workers:Plain"),
            worker_start_method=method,
            log_level="warning",
            log_dir=folder,
            **more,
        ),
    )
    return Executor.get_class(config)(config)


def use(executor: Executor, method: str) -> str:
    """One call, and whose children the workers are; then the end."""
    with executor:
        places = executor.collective_rpc("place")
        parents = {parent == os.getpid() for parent in executor.collective_rpc(lambda worker: os.getppid())}
    return f"{method}: ranks {[place['rank'] for place in places]}, own children {sorted(parents)}"


def expected(methods: Sequence[str] = START_METHODS) -> str:
    """What :func:`run` says."""
    own = {"spawn": [True], "fork": [True], "forkserver": [False], "plain": [False]}
    return "".join(f"{method}: ranks [0, 1], own children {own[method]}\n" for method in methods)


def run(folder: str, methods: Sequence[str] = START_METHODS) -> str:
    """Each start method in turn."""
    return "".join(f"{use(open_executor(method, folder), method)}\n" for method in methods)
