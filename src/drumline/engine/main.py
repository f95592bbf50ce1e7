"""The engine core process, from its first line to its end. The fork server calls :func:`main` in a fresh child.

1. Executor: workers are started and load the model.
2. KV pool: what a block costs on each rank, what each rank has, the minimum of that; allocation; warm-up.
3. Scheduler and channel; ready, with an :class:`EngineInfo`.
4. The loop (``engine.core``), until the owner asks to stop or is gone, or something breaks.
5. Workers are stopped; the process ends.

A failure goes over the control connection (``child.fail``), never over the channel, and the exit code is not zero.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from drumline.config import EngineConfig
from drumline.engine.admission import Limits
from drumline.engine.blocks import BlockPool
from drumline.engine.capacity import Capacity, fit_max_model_len, pool_capacity
from drumline.engine.channel import CoreChannel
from drumline.engine.core import EngineCore
from drumline.engine.kept import KeptPrefixes
from drumline.engine.prefix_table import PrefixTable
from drumline.engine.protocol import (
    Beat,
    BeatRequest,
    CoreStart,
    EngineInfo,
    LiveAnswer,
    ProcessState,
    Stalling,
    ToCore,
    ToFront,
)
from drumline.engine.rings import with_rings
from drumline.engine.scheduler import Scheduler
from drumline.errors import ChannelClosedError, ExecutorFailedError, ExitCode, FailureReport, StartupError
from drumline.executor import Executor, WorkerState
from drumline.model.spec import ModelSpec, read_spec
from drumline.plan.kv import KVSpec
from drumline.plan.memory import StepCosts
from drumline.processes import ChildContext
from drumline.processes.live import LiveReport
from drumline.processes.messages import encode
from drumline.transport import Waiter
from drumline.worker.wrapper import step_costs

log = logging.getLogger(__name__)


def main(child: ChildContext, payload: bytes) -> None:
    """Entry point: ``drumline.engine.main:main``; ``payload`` is a pickled :class:`CoreStart`."""
    start: CoreStart = pickle.loads(payload)  # from the process that had us made, over a socketpair
    try:
        EngineProcess(child, start).run()
    except (ExecutorFailedError, StartupError) as error:
        report = child.fail(error)
        raise SystemExit(int(report.exit_code)) from error


class EngineProcess:
    """All parts of one engine core process."""

    def __init__(self, child: ChildContext, start: CoreStart) -> None:
        self._child = child
        self._config = start.config
        self._waiter = Waiter.create("engine")
        self._spec = read_spec(start.config.model.path)
        self._kept = KeptPrefixes(child.fds[1:], start.incarnation) if start.incarnation else None

    def run(self) -> None:
        """Start, serve, stop."""
        executor = self._start_executor()
        try:
            scheduler, info = self._prepare(executor)
            channel = CoreChannel(self._child.fds[0], self._waiter.ring)
            try:
                self._serve(executor, scheduler, info, channel)
            finally:
                channel.close()
        finally:
            executor.shutdown()

    def _serve(self, executor: Executor, scheduler: Scheduler, info: EngineInfo, channel: CoreChannel) -> None:
        stages = self._config.parallel.pipeline_parallel_size
        core = EngineCore(
            executor, scheduler, self._waiter, channel, role=self._child.role, steps_here=True, stages=stages
        )
        self._child.on_stop(core.stop)
        executor.register_failure_callback(self._end_if_stuck)
        executor.register_stall_callback(lambda text: self._tell(Stalling(text)))
        self._child.listen(lambda data: self._on_word(data, executor, core))
        core.garbage.freeze()
        self._child.ready(msgspec.msgpack.encode(info))
        try:
            core.run()
        except BaseException as error:
            if isinstance(error, ExecutorFailedError) and error.report.what == "hang" and error.report.step is None:
                error.report.step = core.step
            self._child.fail(error, phase="execute_model" if core.step is not None else "serving", step=core.step)
            raise

    def _tell(self, message: ToFront) -> None:
        with contextlib.suppress(ChannelClosedError, TimeoutError):  # who is gone, or does not read, needs no news
            self._child.send(encode(message), timeout_s=1.0)

    def _on_word(self, data: bytes, executor: Executor, core: EngineCore) -> None:
        """The front end asks what goes on here: the supervisor's thread, since the main thread may be what hangs.
        Looking at workers takes up to a second, so it has a thread of its own."""
        request: ToCore = msgspec.msgpack.decode(data, type=ToCore)
        if isinstance(request, BeatRequest):
            self._tell(Beat(request.number, core.turns, core.where))
            return

        def answer() -> None:
            try:
                workers = executor.live_report()
            except Exception as error:  # noqa: BLE001  whatever cannot be told is said
                workers = LiveReport(cause="", processes=[], remarks=[f"the executor cannot be looked at: {error}"])
            self._tell(LiveAnswer(request.number, core.doing(), workers))

        threading.Thread(target=answer, name="drumline-live", daemon=True).start()

    def _end_if_stuck(self, report: FailureReport) -> None:
        """The executor broke. If that is because the main thread hangs in a step, nobody else can end the process."""
        if report.what == "hang" and report.pid == os.getpid():
            self._child.fail(ExecutorFailedError(report))
            os._exit(int(ExitCode.STALLED))

    # the start

    def _start_executor(self) -> Executor:
        self._child.set_phase("starting workers")
        kind = Executor.get_class(self._config)
        forkserver = None if kind.worker_in_process else self._child.forkserver
        kept: dict[str, Any] = {} if self._kept is None else {"kept_fds": self._kept.of_workers()}
        executor = kind(
            with_rings(self._config, self._spec),
            waiter=self._waiter,
            forkserver=forkserver,
            on_phase=self._pass_on,
            **kept,
        )
        executor.report_folder = str(Path(self._child.log_file).parent)
        return executor

    def _pass_on(self, state: WorkerState) -> None:
        """A worker is in another phase. One that is an object in this process (``uni``) has no row of its own."""
        if state.pid == os.getpid():
            if state.phase != "ready":  # there is more to do before this process is
                self._child.set_phase(state.phase)
            return
        row = ProcessState(name=state.name, pid=state.pid, rank=state.rank, phase=state.phase)
        self._child.send(encode(row))

    def _capacity(self, executor: Executor, specs: list[KVSpec]) -> Capacity:
        """The pool: that of the engine before, if it is there, else what the ranks have room for."""
        blocks = self._kept.look(self._config, specs) if self._kept is not None else None
        if blocks is None:
            available: list[int] = executor.collective_rpc("determine_available_memory")
            return pool_capacity(specs, available, self._config.cache)
        reason = "that of the engine before this one"
        return Capacity(num_blocks=blocks, block_size=specs[0].block_size, limiting_rank=0, reason=reason)

    def _prepare(self, executor: Executor) -> tuple[Scheduler, EngineInfo]:
        """KV pool and warm-up."""
        config = self._config
        self._child.set_phase("KV cache")
        began = time.monotonic()
        specs: list[KVSpec] = executor.collective_rpc("get_kv_cache_spec")
        capacity = self._capacity(executor, specs)
        asked, spec = config.model.max_model_len, self._spec
        # Never above the workers' limit (it chose their rotary frequencies): the default, or what was asked for.
        longest = spec.max_positions if asked is not None else spec.default_max_model_len
        max_model_len, reason = fit_max_model_len(asked, longest, capacity, config.scheduler)
        if reason:
            log.warning("max_model_len is %d instead of %d: %s", max_model_len, longest, reason)
        elif longest < spec.max_positions:
            text = "max_model_len is %d, the length of the model's first training; --max-model-len takes up to %d"
            log.info(text, longest, spec.max_positions)
        executor.initialize_from_config(capacity.configs(executor.world_size))
        table = self._kept.open(config, capacity.num_blocks) if self._kept is not None else None
        log.info(
            "KV cache: %d blocks of %d tokens, %.1f requests of %d tokens (%s); %.2f s",
            capacity.num_blocks,
            capacity.block_size,
            capacity.num_tokens / max_model_len,
            max_model_len,
            capacity.reason,
            time.monotonic() - began,
        )
        if text := capacity.unused_text:
            log.info("KV cache: %s", text)
        costs = [one for one in executor.collective_rpc(step_costs) if one is not None]
        prices = StepCosts.highest(costs) if len(costs) == executor.world_size else None
        return make_scheduler(config, self._spec, capacity, max_model_len, prices, table), EngineInfo(
            max_model_len=max_model_len,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            vocab_size=self._spec.vocab_size,
            dtype=specs[0].dtype,
            model_type=self._spec.model_type,
            max_logprobs=config.model.max_logprobs,
            scheduling_policy=config.scheduler.scheduling_policy,
        )


def make_scheduler(
    config: EngineConfig,
    spec: ModelSpec,
    capacity: Capacity,
    max_model_len: int,
    costs: StepCosts | None = None,
    table: PrefixTable | None = None,
) -> Scheduler:
    """A scheduler over the pool. ``costs``: of the dearest rank; None: workers do not say. ``table``: of the blocks
    that outlive the engine."""
    caching = config.cache.enable_prefix_caching
    pool = BlockPool(capacity.num_blocks, capacity.block_size, enable_prefix_caching=caching, table=table)
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        vocab_size=spec.vocab_size,
        policy=config.scheduler.scheduling_policy,
        max_num_prefill_tokens=config.scheduler.prefill_tokens(config.platform),
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        num_micro_batches=config.parallel.pipeline_parallel_size,
    )
    identity = f"{config.model.path} {spec.model_type} {config.model.dtype}"
    return Scheduler(limits, pool, identity=identity, costs=costs)
