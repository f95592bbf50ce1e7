"""Executors over made-up workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from drumline.config import EngineConfig, ParallelConfig, ProcessConfig
from drumline.executor import Executor

BACKENDS = {"uni": 1, "mp": 3}
"""Backends that one suite runs over, and the world size of each."""

Make = Callable[..., Executor]


def configure(
    backend: Any = "mp", world_size: int = 3, worker: str = "Plain", extension: str = "", **process: Any
) -> EngineConfig:
    """A configuration of ``world_size`` TP ranks of a class of workers.py."""
    module = "tests.executor.workers"
    process.setdefault("stop_timeout_s", 1.0)
    return EngineConfig(
        platform="cpu",
        parallel=ParallelConfig(
            tensor_parallel_size=world_size, distributed_executor_backend=backend, distributed_timeout_s=60.0
        ),
        process=ProcessConfig(
            worker_cls=worker if ":" in worker else f"{module}:{worker}",
            worker_extension_cls=f"{module}:{extension}" if extension else "",
            **process,
        ),
    )


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    name: str = request.param
    return name


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes executors that end with the test."""
    with ExitStack() as stack:

        def start(backend: Any = "mp", world_size: int | None = None, **more: Any) -> Executor:
            size = world_size if world_size is not None else BACKENDS[backend]
            config = configure(backend, size, **more)
            executor = Executor.get_class(config)(config)
            stack.callback(executor.shutdown)
            return executor

        yield start


@pytest.fixture(scope="module")
def _shared() -> Iterator[dict[str, Executor]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Executor.get_class(config)(config))
            for name, size in BACKENDS.items()
            if (config := configure(name, size))
        }


@pytest.fixture
def executor(_shared: dict[str, Executor], backend: str) -> Executor:
    """One executor of each backend for all tests of a module: for what leaves it usable."""
    return _shared[backend]
