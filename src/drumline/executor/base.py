"""Executor: what stands between a scheduler and its workers, and how a backend is chosen.

``Executor.get_class(config)`` gives the class, ``Executor.get_class(config)(config)`` starts the workers. Whoever has
an executor needs only :meth:`Executor.collective_rpc` and what is built on it here; LoRA, sleep, profiling, weight
updates and whatever else a worker class can do are calls by name, never further methods of this class.

A backend of one's own is a subclass, named by ``distributed_executor_backend`` (the class, or its dotted name). It
has to write ``_start`` (which puts on ``_cleanup`` how to end things) and ``collective_rpc``, and calls
:meth:`Executor._fail` when it breaks.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, overload

from drumline.config import BACKENDS, DeviceTable, EngineConfig, choose_backend
from drumline.errors import ConfigError, DrumlineError, ExecutorFailedError, FailureReport
from drumline.executor.calls import broken
from drumline.executor.future import Aggregator, Call
from drumline.parallel.layout import Layout, device_index
from drumline.plan.kv import KVConfig
from drumline.plan.step import StepOutput, StepPlan
from drumline.platforms import device_table, resolve_platform
from drumline.processes.live import LiveReport, look_at
from drumline.transport import Waiter
from drumline.worker.wrapper import check_health, import_name

if TYPE_CHECKING:
    from drumline.processes import ForkServer

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 10.0
STEP_METHODS = frozenset({"execute_model", "sample_tokens", "take_draft_token_ids", "execute_dummy_batch"})
"""Their deadline (``execute_timeout_s``) says nothing about how long one may take without progress."""
START_METHODS = frozenset({"initialize_from_config", "compile_or_warm_up_model"})
"""Parts of the start, which have its patience."""
MOST_PATIENCE = 1024
"""Calls of which it is remembered that they may take long."""

Method = str | Callable[..., Any]

_running: weakref.WeakSet[Executor] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: its copies of executors are none. The workers, queues and threads are the parent's."""
    for executor in list(_running):
        executor._after_fork()
    _running.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """One worker, as the process table shows it."""

    rank: int
    name: str
    """``Worker_TP1``; until the groups exist ``Worker_1``."""
    pid: int
    phase: str
    """``starting``, ``init_device``, ``load_model 40%``, ``ready`` ..."""


WARM_UP = "warm-up"
"""Phase of workers that have their KV cache and run their first step."""


class Executor(ABC):
    """Runs calls on every worker of one engine. Safe to use from any thread.

    Args:
        config: of the whole engine; only ``parallel`` and ``process`` are read here, workers get all of it.
        waiter: what to sleep on while waiting for answers, if the caller sleeps on it too; by default an own one.
        forkserver: where workers come from (``mp``); by default an own one, started here and ended by ``shutdown``.
        on_phase: told whenever a worker enters another phase, from a thread that must not be held up.
        devices: what this machine has; by default the platform counts them (without torch).
        kept_fds: for each local rank, descriptors of memory for its KV cache that outlives this executor: the memory,
            and a pipe that whoever maps it holds. Only for classes with ``keeps_memory``. They stay the caller's.

    The constructor returns when every worker is ready. StartupError if one fails: all others have been ended then.

    """

    supports_pp: ClassVar[bool] = False
    """May run several pipeline stages."""
    supports_async_scheduling: ClassVar[bool] = False
    """May be handed plan n + 1 before the answer of plan n."""
    uses_ray: ClassVar[bool] = False
    worker_in_process: ClassVar[bool] = False
    """The only worker is an object in the executor's own process, which so needs compute threads and no fork server."""
    keeps_memory: ClassVar[bool] = False
    """Workers get the ``kept_fds``."""

    def __init__(
        self,
        config: EngineConfig,
        waiter: Waiter | None = None,
        forkserver: ForkServer | None = None,
        on_phase: Callable[[WorkerState], None] | None = None,
        devices: DeviceTable | None = None,
        kept_fds: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._kept_fds = kept_fds
        self.platform = resolve_platform(config.platform)
        self.devices = self.platform.device_table() if devices is None else devices
        self.config = config = config.checked(self.devices)
        self.parallel = config.parallel
        self.process = config.process
        self.layout = Layout.of(config.parallel)
        self.world_size = config.parallel.world_size
        self.output_rank = self.layout.output_rank
        self.output_aggregators: Sequence[Aggregator] = ()
        """Applied to the answers of execute_model and sample_tokens; empty: only the output rank answers."""
        self._owns_waiter = waiter is None
        self.waiter = waiter if waiter is not None else Waiter.create("executor")
        self._forkserver = forkserver
        self._on_phase = on_phase or (lambda state: None)
        self._failure: FailureReport | None = None
        self._error: Callable[[], DrumlineError] = self._ended
        self._failure_callbacks: list[Callable[[FailureReport], None]] = []
        self._stall_callbacks: list[Callable[[str], None]] = []
        self._stall = ""
        self.report_folder = self.process.log_dir
        """Where reports of hangs are written to; empty: beside the workers' log files, if they have any."""
        self._patience: dict[int, float] = {}
        self._state_lock = threading.Lock()
        self._stopping = False
        self._forked = False
        """This is a forked child's copy."""
        self._cleanup = ExitStack()
        self._closing = threading.Event()
        self._stopped = threading.Event()
        _running.add(self)
        try:
            self._check()
            self._start()
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def get_class(cls, config: EngineConfig, devices: DeviceTable | None = None) -> type[Executor]:
        """The executor class that a configuration means.

        Args:
            config: ``parallel.distributed_executor_backend`` and the sizes decide.
            devices: what this machine has, which the configuration is checked against; by default the platform
                counts them (without torch).

        Raises ConfigError (a ValueError) for an unknown name and if there are too few devices, TypeError for a thing
        that is no Executor.
        """
        if devices is None:
            devices = device_table(config.platform)
        config.checked(devices)
        return resolve(choose_backend(config.parallel, devices, in_ray_placement_group=in_ray_placement_group()))

    # What a backend writes.

    @abstractmethod
    def _start(self) -> None:
        """Start all workers and wait until they are ready."""

    def _stop(self) -> None:
        """End all workers. Called once, also after a failed start; takes bounded time.

        Runs what ``_start`` has put on ``_cleanup`` (an ExitStack), last first.
        """
        self._cleanup.close()

    def _check(self) -> None:
        """Raise ConfigError if this backend cannot do what is asked for. Nothing has been started yet."""
        if self.parallel.pipeline_parallel_size > 1 and not self.supports_pp:
            self._refuse("it cannot run pipeline stages: change --pipeline-parallel-size")
        if self.config.scheduler.async_scheduling and not self.supports_async_scheduling:
            self._refuse(
                "it does not declare supports_async_scheduling, so it may not be handed a plan before it has answered "
                "the last one: leave out --async-scheduling"
            )

    def _device_text(self, local_rank: int) -> str:
        """Which physical device a worker of this machine has, for its log."""
        index = device_index(self.parallel, local_rank)
        if index >= len(self.devices.devices):
            return self.devices.platform
        device = self.devices.devices[index]
        return f"{self.devices.platform}:{device.index} {device.name} {device.uuid}".strip()

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{type(self).__name__}: {reason}")

    @overload
    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | None = ...,
        reply_rank: int | None = ...,
        non_block: Literal[False] = ...,
        *,
        rank_args: Sequence[Sequence[Any]] | None = ...,
        aggregators: Sequence[Aggregator] = ...,
        expected_s: float = ...,
    ) -> Any: ...

    @overload
    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | None = ...,
        reply_rank: int | None = ...,
        *,
        non_block: Literal[True],
        rank_args: Sequence[Sequence[Any]] | None = ...,
        aggregators: Sequence[Aggregator] = ...,
        expected_s: float = ...,
    ) -> Call: ...

    @overload
    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | None = ...,
        reply_rank: int | None = ...,
        non_block: bool = ...,
        *,
        rank_args: Sequence[Sequence[Any]] | None = ...,
        aggregators: Sequence[Aggregator] = ...,
        expected_s: float = ...,
    ) -> Any: ...

    @abstractmethod
    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        reply_rank: int | None = None,
        non_block: bool = False,
        *,
        rank_args: Sequence[Sequence[Any]] | None = None,
        aggregators: Sequence[Aggregator] = (),
        expected_s: float = 0.0,
    ) -> Any:
        """Run a method on every worker.

        Args:
            method: name of a worker method, or a function that gets the worker as its first argument.
            args: positional arguments, the same for every rank.
            kwargs: keyword arguments, the same for every rank.
            timeout: seconds for the whole call, sending included; None or infinity: no limit.
            reply_rank: only this rank answers (all run the call, and a failure of any of them is raised).
            non_block: return a :class:`Call` at once, a future (``result(timeout)``, ``done()``, ``cancel()``,
                ``add_done_callback(f)``, ``await``). A call for which there is no room yet waits for it in order.
            rank_args: for each rank, positional arguments of its own, put behind ``args``.
            aggregators: fold the answers of all ranks onto the output rank's, one after the other.
            expected_s: how long it may take, in seconds, before a log line says who is late (``math.inf``: never);
                at least ``ProcessConfig.long_wait_s`` in any case.

        Returns:
            With ``reply_rank`` or ``aggregators`` one value, else a list in rank order.

        Raises:
            WorkerCallError: a rank raised, all ranks ended the call; the executor goes on. A failure of a rank that
                was not to answer, noticed only after the call was answered, is raised by the oldest call in flight or
                else by the next one: its own caller has gone on.
            RPCTimeoutError: "RPC call to {method} timed out." and who has not answered; a late answer is dropped.
            RPCBacklogError: with ``non_block``, if earlier calls hold more than ``ProcessConfig.rpc_backlog_bytes``.
            ValueError: an argument of this method is not what it takes; nothing was sent.
            ExecutorFailedError: a worker is gone, or the ranks did not end the call within the grace; for good.

        """

    def workers(self) -> list[WorkerState]:
        """All workers in rank order."""
        return []

    # Built on it.

    def execute_model(self, plan: StepPlan, non_block: bool = False) -> Any:
        """Run one step; the output rank's StepOutput, or None if its sampling is deferred. A future if non_block."""
        return self._step("execute_model", (plan,), non_block)

    def sample_tokens(self, step: int, grammar: Any = None, non_block: bool = False) -> Any:
        """Sample a step whose sampling was deferred; the output rank's StepOutput. A future if non_block."""
        return self._step("sample_tokens", (step, grammar), non_block)

    def _step(self, method: str, args: tuple[Any, ...], non_block: bool) -> StepOutput | Call | None:
        result: StepOutput | Call | None = self.collective_rpc(
            method,
            args,
            None,
            self.process.execute_timeout_s,
            self.output_rank,
            non_block,
            aggregators=self.output_aggregators,
        )
        return result

    def take_draft_token_ids(self, non_block: bool = False) -> Any:
        """What the drafter proposes for the next step; the output rank's. A future if non_block."""
        return self._step("take_draft_token_ids", (), non_block)

    def execute_dummy_batch(self) -> None:
        """An empty step on every rank."""
        self.collective_rpc("execute_dummy_batch", timeout=self.process.execute_timeout_s)

    def initialize_from_config(self, kv_cache_configs: Sequence[KVConfig]) -> None:
        """Give every rank its KV cache (``kv_cache_configs[rank]``), then warm up.

        Both are parts of the start, and have its patience: ``start_timeout_s`` without progress of a rank.
        """
        patience_s = self.process.start_timeout_s
        self.collective_rpc("initialize_from_config", (list(kv_cache_configs),), expected_s=patience_s)
        for state in self.workers():
            self._on_phase(replace(state, phase=WARM_UP))
        self.collective_rpc("compile_or_warm_up_model", expected_s=patience_s)
        for state in self.workers():
            self._on_phase(state)

    def check_health(self, timeout: float = HEALTH_TIMEOUT_S) -> None:
        """Ask every worker. ExecutorFailedError, WorkerCallError or RPCTimeoutError if one is not well."""
        self._raise_if_failed()
        self.collective_rpc(check_health, timeout=timeout)

    def run_steps_here(self) -> bool:
        """Ask that steps which are not waited for run in the thread that calls, before it gets its (ended) future.

        For a loop that has nothing to do beside a step. False where workers are elsewhere, or where a step goes on
        beside the thread that started it (a GPU's).
        """
        return False

    def while_idle(self) -> bool:
        """For the thread of :meth:`run_steps_here`, while it has nothing to do: the worker's ``while_idle``. Elsewhere
        workers see to it themselves: False."""
        return False

    @property
    def max_concurrent_batches(self) -> int:
        """How many plans may be in flight at once: one in each pipeline stage, and one more with look-ahead."""
        look_ahead = self.config.scheduler.async_scheduling is not False and self.supports_async_scheduling
        return self.parallel.pipeline_parallel_size + (1 if look_ahead else 0)

    def busy_ns(self) -> list[int]:
        """For each rank how long its worker has been busy (``Worker.busy_ns``), in ns; no call. Empty: unknown."""
        return []

    # Failure and end.

    @property
    def is_failed(self) -> bool:
        """Whether it has broken for good."""
        return self._failure is not None

    @property
    def failure(self) -> FailureReport | None:
        """The root cause, once it has broken."""
        return self._failure

    def register_failure_callback(self, callback: Callable[[FailureReport], None]) -> None:
        """Call this once, from any thread, when the executor breaks; at once if it has broken already."""
        with self._state_lock:
            if self._failure is None:
                self._failure_callbacks.append(callback)
                return
        callback(self._failure)

    # Hangs. A backend that can look at its workers calls _watch_for_stalls' parts; see executor/stalls.py.

    def register_stall_callback(self, callback: Callable[[str], None]) -> None:
        """Call this, from any thread, with who makes no progress once half of ``stall_timeout_s`` is over without any,
        and with an empty text when there is some again. It must not block."""
        with self._state_lock:
            self._stall_callbacks.append(callback)

    def live_report(self, cause: str = "asked for") -> LiveReport:
        """What every worker is doing now, with the stacks of all its threads. Disturbs nobody; takes up to a second.

        Any thread but a callback's. ExecutorFailedError after the shutdown (``mp``), and in a forked child.
        """
        return LiveReport(
            cause=cause,
            processes=[look_at(one.name, one.pid, rank=one.rank, doing=one.phase) for one in self.workers()],
        )

    def _tell_stall(self, text: str) -> None:
        """Tell the stall callbacks, if that is news."""
        if (text == "") == (self._stall == ""):
            return
        self._stall = text
        if text:
            log.warning("%s", text)
        for callback in list(self._stall_callbacks):
            try:
                callback(text)
            except Exception:
                log.exception("a stall callback failed")

    def _stall_limit(self, method: str) -> str:
        """The option that decides for how long a rank may be without progress in this call."""
        process = self.process
        if method in START_METHODS and process.start_timeout_s > process.stall_timeout_s:
            return f"--start-timeout {process.start_timeout_s:g}"
        return f"--stall-timeout {process.stall_timeout_s:g}"

    def _be_patient(self, call_id: int, method: str, timeout: float | None, expected_s: float) -> None:
        """Note a call that may take longer than ``stall_timeout_s``: it says so, or has a deadline of its own (steps
        share one, which is the last resort of all). Called by whoever sends it."""
        if timeout is not None and method not in STEP_METHODS:
            expected_s = max(expected_s, timeout)
        if expected_s > self.process.stall_timeout_s:
            self._patience[call_id] = expected_s
            while len(self._patience) > MOST_PATIENCE:
                del self._patience[next(iter(self._patience))]

    def _fail(self, report: FailureReport, message: str = "") -> None:
        """It has broken: end all calls, kill the workers, call the callbacks. Safe from any thread; never blocks.

        Nothing happens if that was known before, or if it is being shut down.
        """
        with self._state_lock:
            if self._failure is not None or self._stopping:
                return
            self._failure = report
            self._error = broken(report, message)
            callbacks, self._failure_callbacks = self._failure_callbacks, []
        self._close_calls(report, self._error)

        def finish() -> None:
            self._kill()
            for callback in callbacks:
                try:
                    callback(report)
                except Exception:  # the others are to be told all the same
                    log.exception("a failure callback failed")

        try:
            threading.Thread(target=finish, name="drumline-failure", daemon=True).start()
        except RuntimeError:  # no more threads may be made; nothing in it takes long
            finish()

    def _after_fork(self) -> None:
        """In a forked child: every call raises from now on, and ``shutdown`` does nothing. No lock of before may be
        taken: a thread that the child does not have may hold it."""
        self._forked = self._stopping = True
        self._failure = None
        self._state_lock = threading.Lock()
        self._closing, self._stopped = threading.Event(), threading.Event()
        self._closing.set()
        self._stopped.set()

    def _close_calls(self, report: FailureReport | None, error: Callable[[], DrumlineError]) -> None:  # noqa: B027
        """End all calls in flight, and later ones, with this error."""

    def _kill(self) -> None:  # noqa: B027
        """End all workers at once: they cannot work together any more."""

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._error()
        if self._stopping:
            raise self._ended()

    def _check_call(
        self,
        reply_rank: int | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        rank_args: Sequence[Sequence[Any]] | None,
        aggregators: Sequence[Aggregator] = (),
        expected_s: float = 0.0,
    ) -> int | None:
        """``reply_rank`` as an int; ValueError if anything is not what :meth:`collective_rpc` takes."""
        if type(expected_s) is not float or not expected_s >= 0.0:
            _check_expected(expected_s)
        if type(aggregators) is not tuple or aggregators:
            _check_aggregators(aggregators)
        if type(args) is not tuple and (not isinstance(args, Sequence) or isinstance(args, str)):
            raise ValueError(f"args must be a tuple or list of positional arguments, not {args!r}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ValueError(f"kwargs must be a mapping of keyword arguments, not {kwargs!r}")
        if rank_args is not None:
            if len(rank_args) != self.world_size:
                size = self.world_size
                raise ValueError(f"rank_args must have one entry for each of {size} ranks, not {len(rank_args)}")
            if not all(isinstance(own, Sequence) and not isinstance(own, str) for own in rank_args):
                raise ValueError("rank_args must have a tuple or list of positional arguments for each rank")
        if reply_rank is None:
            return None
        if type(reply_rank) is int and 0 <= reply_rank < self.world_size:
            return reply_rank
        if isinstance(reply_rank, bool) or not hasattr(reply_rank, "__index__"):
            raise ValueError(f"reply_rank must be a rank (an int), not {reply_rank!r}")
        if not 0 <= reply_rank < self.world_size:
            raise ValueError(f"reply_rank {reply_rank} is not in 0..{self.world_size - 1}")
        return int(reply_rank)

    def _ended(self) -> ExecutorFailedError:
        """What calls raise after shutdown, and in a forked child."""
        what = "was shut down"
        if self._forked:
            what = "is that of the parent process: a forked child has no executor, make a new one there"
        report = FailureReport(role="Executor", pid=os.getpid(), what=what, time=time.time())
        return ExecutorFailedError(report)

    def shutdown(self) -> None:
        """End all workers (a ladder of documented rungs). Any thread may call it, any number of times."""
        with self._state_lock:
            first, self._stopping = not self._stopping, True
        _running.discard(self)
        self._closing.set()
        if not first:
            self._stopped.wait(self._stop_limit_s)
            return
        try:
            self._stop()
        finally:
            if self._owns_waiter:
                self.waiter.close()
            self._stopped.set()

    @property
    def _stop_limit_s(self) -> float:
        """Longest time that the ladder may take in seconds."""
        return 3 * self.process.stop_timeout_s + 10.0

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


@atexit.register
def _shutdown_all() -> None:
    """A program that ends without shutting down: its workers are shut down all the same, which is no failure."""
    for executor in list(_running):
        executor.shutdown()


def in_ray_placement_group() -> bool:
    """Whether this process runs inside a Ray placement group. Ray is not imported for that: its workers have it."""
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.util.get_current_placement_group() is not None)


def resolve(backend: Any) -> type[Executor]:
    """The class that a backend's name, dotted name or class stands for."""
    if backend == "uni":
        from drumline.executor.uni import UniExecutor

        return UniExecutor
    if backend == "mp":
        from drumline.executor.mp import MultiprocExecutor

        return MultiprocExecutor
    if backend in ("ray", "external_launcher"):
        raise ConfigError(f"the {backend} backend is not built yet: use mp, or uni for one rank")
    return _check_class(_import_backend(backend) if isinstance(backend, str) else backend)


def _import_backend(name: str) -> Any:
    rule = (
        f"distributed_executor_backend must be one of {', '.join(BACKENDS)}, a subclass of Executor, or the dotted "
        f"name of one. Got {name!r}"
    )
    try:
        return import_name(name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"{rule}: {exc}" if "." in name or ":" in name else rule) from exc


def _check_class(found: Any) -> type[Executor]:
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise TypeError(f"distributed_executor_backend must be a subclass of Executor. Got {found!r}")
    return found


def _check_expected(expected_s: Any) -> None:
    """ValueError if it is no number of seconds."""
    try:
        good = not isinstance(expected_s, bool | str) and float(expected_s) >= 0.0
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ValueError(f"expected_s must be a number of seconds, 0 or more (math.inf: no limit), not {expected_s!r}")


def _check_aggregators(aggregators: Any) -> None:
    """ValueError if it is no sequence of aggregators."""
    if not isinstance(aggregators, Sequence) or isinstance(aggregators, str):
        raise ValueError(f"aggregators must be a tuple or list of objects with aggregate(), not {aggregators!r}")
    for one in aggregators:
        if not callable(getattr(one, "aggregate", None)):
            raise ValueError(f"aggregators must be objects with aggregate(outputs, output_rank), not {one!r}")


def method_name(method: Method) -> str:
    """How messages name what is called."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
