"""drumline runs one model on many worker processes as if it were one.

``LLM`` runs a model offline, ``AsyncLLM`` for an asyncio loop. ``Executor`` and ``Worker`` are the execution layer
alone, for any worker class. The public names are loaded when they are first used, so that importing drumline costs
nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""True for type checkers. typing's own would cost 20 ms in which the command could not yet take care of ctrl-C."""
if TYPE_CHECKING:
    from typing import Any

    from drumline import errors as errors
    from drumline.config import CacheConfig as CacheConfig
    from drumline.config import EngineConfig as EngineConfig
    from drumline.config import ModelConfig as ModelConfig
    from drumline.config import ParallelConfig as ParallelConfig
    from drumline.config import ProcessConfig as ProcessConfig
    from drumline.config import SchedulerConfig as SchedulerConfig
    from drumline.errors import ConfigError as ConfigError
    from drumline.errors import DrumlineError as DrumlineError
    from drumline.executor import Executor as Executor
    from drumline.llm import LLM as LLM
    from drumline.llm import AsyncLLM as AsyncLLM
    from drumline.llm import BeamSearchParams as BeamSearchParams
    from drumline.llm import warm_start as warm_start
    from drumline.plan.sampling import RequestOutputKind as RequestOutputKind
    from drumline.plan.sampling import SamplingParams as SamplingParams
    from drumline.text.results import CompletionOutput as CompletionOutput
    from drumline.text.results import RequestOutput as RequestOutput
    from drumline.transport.queue import MessageQueue as MessageQueue
    from drumline.worker import Worker as Worker
    from drumline.worker import WorkerContext as WorkerContext

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CacheConfig",
    "CompletionOutput",
    "ConfigError",
    "DrumlineError",
    "EngineConfig",
    "Executor",
    "MessageQueue",
    "ModelConfig",
    "ParallelConfig",
    "ProcessConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerConfig",
    "Worker",
    "WorkerContext",
    "__version__",
    "errors",
    "warm_start",
]

_HOMES = {
    "LLM": "drumline.llm",
    "AsyncLLM": "drumline.llm",
    "BeamSearchParams": "drumline.llm",
    "warm_start": "drumline.llm",
    "CacheConfig": "drumline.config",
    "CompletionOutput": "drumline.text.results",
    "ConfigError": "drumline.errors",
    "DrumlineError": "drumline.errors",
    "EngineConfig": "drumline.config",
    "Executor": "drumline.executor",
    "MessageQueue": "drumline.transport.queue",
    "ModelConfig": "drumline.config",
    "ParallelConfig": "drumline.config",
    "ProcessConfig": "drumline.config",
    "RequestOutput": "drumline.text.results",
    "RequestOutputKind": "drumline.plan.sampling",
    "SamplingParams": "drumline.plan.sampling",
    "SchedulerConfig": "drumline.config",
    "Worker": "drumline.worker",
    "WorkerContext": "drumline.worker",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        value: Any = _version()
    elif name == "errors":
        value = importlib.import_module("drumline.errors")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("drumline")
    except metadata.PackageNotFoundError:  # run from its sources
        return "0.0.0"
