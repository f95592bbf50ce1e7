"""The Worker protocol: what the executor may call on a worker class.

The executor checks no interface: any class whose constructor takes :class:`WorkerContext` runs in the same loop, and
``collective_rpc`` calls whatever method it is told to. The methods below are those that the language-model engine
calls, in the order in which it calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from drumline.config import EngineConfig
from drumline.plan.kv import KVConfig, KVSpec
from drumline.plan.memory import StepCosts
from drumline.plan.step import StepOutput, StepPlan
from drumline.transport.codec import CodecRegistry
from drumline.worker.outputs import AsyncOutput


@dataclass(kw_only=True)
class WorkerContext:
    """What a worker is told when it is made."""

    config: EngineConfig
    rank: int
    """Rank in the executor's world."""
    local_rank: int
    """Rank among the workers of this machine; picks the device."""
    distributed_init_method: str
    """Rendezvous, such as ``file:///proc/self/fd/7?shm=8``; empty for world size 1."""
    is_driver: bool
    """TP place is 0."""
    set_phase: Callable[[str], None] = field(default=lambda phase: None)
    """Tells the owner what the worker is doing (``load_model 40%``); counts as progress."""
    set_name: Callable[[str], None] = field(default=lambda name: None)
    """Sets process title and log prefix; called when the groups exist (``Worker_TP1``)."""
    codec: CodecRegistry | None = None
    """Where a plug-in registers codecs for its own types, in ``__init__`` at the latest and as in ``Executor.codec``.
    None with ``uni``, which encodes nothing."""
    kv_fd: int = -1
    """Memory file for this rank's KV cache, which outlives the worker; -1: there is none, or the worker's device has
    memory of its own. A worker that uses it gives it exactly the size of its pool, which says that its blocks lie there
    as long as it lives; one that finds it of that size keeps what it holds."""


class Worker(Protocol):
    """Methods that the language-model engine calls."""

    def __init__(self, context: WorkerContext) -> None: ...

    def init_device(self) -> None:
        """Open the device, join the process groups."""

    def load_model(self) -> None:
        """Load this rank's share of the weights."""

    def get_kv_cache_spec(self) -> KVSpec:
        """What one block of KV costs on this rank."""

    def determine_available_memory(self) -> int:
        """Bytes that this rank's KV pool may take."""

    def initialize_from_config(self, kv_configs: list[KVConfig]) -> None:
        """Allocate the KV pool; ``kv_configs[rank]`` is this rank's."""

    def compile_or_warm_up_model(self) -> None:
        """Run what is slow the first time."""

    def step_costs(self) -> StepCosts:
        """What this rank asks for requests that need more than an ordinary step. May be missing, with the next one."""

    def reserve_memory(self, nbytes: int) -> None:
        """Between two steps: make sure that a step could have so much. MemoryError or torch.OutOfMemoryError, which
        fails one request at most. No collective may be in it."""

    def execute_model(self, plan: StepPlan) -> StepOutput | AsyncOutput | None:
        """Run one step. None if ``plan.defer_sampling``, or on a rank that does not sample. AsyncOutput: finished and
        sent by the output thread, while the next call runs."""

    def sample_tokens(self, step: int, grammar: Any) -> StepOutput | AsyncOutput | None:
        """Sample the step that execute_model left unsampled. None on a rank that does not sample."""

    def execute_dummy_batch(self) -> None:
        """An empty forward that joins the collectives of the others."""

    def while_idle(self) -> bool:
        """Do something useful that takes less than 0.1 ms, while no call waits; False if there is nothing left. May be
        missing. The place for what would cost the next call time. No collective may be in it; what it raises ends the
        worker."""

    def busy_ns(self) -> int:
        """For how long it has been busy since it was made, in ns, without waits for other pipeline stages. Asked after
        every call. May be missing."""

    def check_health(self) -> None:
        """Raise if the device does not work any more."""

    def init_output_thread(self) -> None:
        """Called once in the thread that finishes AsyncOutputs, before the first: set the device. May be missing."""

    def shutdown(self) -> None:
        """Free everything. Called once, also after a failed start."""
