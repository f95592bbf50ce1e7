"""What a worker process runs: make the worker, say READY, serve calls, shut the worker down whatever happens.

Ways to end::

    owner asks, or SIGTERM      during the start: raised in the main thread, wherever Python code is (processes room)
                                afterwards: flag + ring, the loop ends before the next call
    SIGTERM during a call       raised in it, too: the ladder's second rung ends a call that blocks
    owner gone                  as asked, and the process ends within a grace
    exception during the start  failure report over the control connection, exit code 1
    SystemExit out of a call    the process ends with that code; the owner is told of it as a death
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from typing import Any

from drumline.config import EngineConfig
from drumline.errors import ChannelClosedError, FailureReport
from drumline.parallel.layout import Layout
from drumline.parallel.rendezvous import init_method_for
from drumline.processes.child import ChildContext
from drumline.processes.linux import process_state
from drumline.processes.reports import make_report
from drumline.transport import ArenaReader, Doorbell, QueueWriter, RingReader, RingWriter, SharedMemory, Waiter
from drumline.worker.loop import Channels, WorkerLoop, WorkerStop
from drumline.worker.protocol import WorkerContext
from drumline.worker.segment import SegmentLayout
from drumline.worker.wire import CallFailed, encode_failure, make_codec
from drumline.worker.wrapper import name_of, start_worker, stop_worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """What a worker process is told. Its descriptors: segment, executor's doorbell, own doorbell, arena if there is
    one, kept ones (KV memory, life), rendezvous."""

    config: EngineConfig
    rank: int
    local_rank: int
    device: str
    """Which physical device it has, for its log."""
    owner_pid: int = 0
    """The executor's process."""
    kept: int = 0
    """Number of kept descriptors (``engine.kept``). They are held as long as the process lives."""


def main(child: ChildContext, payload: bytes) -> None:
    """Run one worker until it is asked to end."""
    task: WorkerTask = pickle.loads(payload)
    WorkerProcess(child, task).run()


class WorkerProcess:
    """One worker process."""

    def __init__(self, child: ChildContext, task: WorkerTask) -> None:
        self._child = child
        self._task = task
        self._parallel = task.config.parallel
        self._worker: Any = None
        self._channels, rest = self._attach(child.fds)
        kept, self._rendezvous = rest[: task.kept], rest[task.kept :]
        self._kv_fd = kept[0] if kept else -1
        child.on_stop(self._channels.waiter.ring)

    def _attach(self, fds: tuple[int, ...]) -> tuple[Channels, tuple[int, ...]]:
        segment_fd, executor_bell_fd, own_bell_fd, *rest = fds
        rank, world_size = self._task.rank, self._parallel.world_size
        layout = SegmentLayout.of(world_size, self._task.config.process)
        buf = SharedMemory.attach(segment_fd).buf
        executor_bell = Doorbell.attach(executor_bell_fd, 1 + rank)
        arena = ArenaReader(rest.pop(0), rank, executor_bell.ring) if layout.arena is not None else None
        hint = "--mq-answer-slots or --mq-answer-slot-bytes"
        channels = Channels(
            calls=RingReader(layout.calls_of(buf), rank, executor_bell.ring, arena),
            answers=QueueWriter(
                RingWriter(layout.answers_of(buf, rank), hint),
                (executor_bell,),
                self._task.config.process.mq_largest_bytes,
            ),
            progress=layout.progress_of(buf),
            waiter=Waiter.attach(own_bell_fd),
            codec=make_codec(),
            measured=self._task.config.process.mq_largest_bytes < layout.answers.total_bytes,
        )
        channels.calls.on_due = channels.waiter.expect
        return channels, tuple(rest)

    def run(self) -> None:
        """The whole life of the process."""
        try:
            self._start()
            self._serve()
        except WorkerStop:
            log.debug("asked to end")
        finally:
            self._shut_down()

    def _start(self) -> None:
        try:
            start_worker(self._context(), device=self._task.device, made=self._keep, joined=self._joined)
        except Exception as exc:  # noqa: BLE001  the owner is told before the worker is shut down, which may take long
            self._child.fail(exc)
            raise SystemExit(1) from None

    def _serve(self) -> None:
        loop = WorkerLoop(
            self._worker,
            self._task.rank,
            self._channels,
            stopping=lambda: self._child.stopping,
            make_report=self._report,
            send_failure=self._send_failure,
            describe_owner=self._describe_owner,
            long_wait_s=self._task.config.process.long_wait_s,
            process=self._child,
        )
        self._child.ready()
        loop.run()

    def _context(self) -> WorkerContext:
        rank = self._task.rank
        return WorkerContext(
            config=self._task.config,
            rank=rank,
            local_rank=self._task.local_rank,
            distributed_init_method=init_method_for(self._parallel, self._rendezvous),
            is_driver=Layout.of(self._parallel).is_driver(rank),
            set_phase=self._set_phase,
            set_name=self._child.set_name,
            codec=self._channels.codec,
            kv_fd=self._kv_fd,
        )

    def _set_phase(self, phase: str) -> None:
        self._channels.progress.beat_phase(self._task.rank)
        self._child.set_phase(phase)

    def _keep(self, worker: Any) -> None:
        self._worker = worker

    def _joined(self) -> None:
        """The groups exist: the worker has its name."""
        self._child.set_name(name_of(self._parallel, self._task.rank))

    # Failures.

    def _report(self, exc: BaseException, phase: str, step: int | None) -> FailureReport:
        child = self._child
        return make_report(exc, role=child.role, rank=self._task.rank, phase=phase, step=step, log_file=child.log_file)

    def _send_failure(self, failure: CallFailed) -> None:
        # Not on the console: the caller is told, and where a rank has died this is only a consequence of it.
        self._child.note(f"call {failure.call_id} failed: {failure.report.text()}")
        try:
            self._child.send(encode_failure(failure))
        except ChannelClosedError:
            raise WorkerStop from None

    def _describe_owner(self) -> str:
        pid = self._task.owner_pid
        return f"the executor (pid {pid}, state {process_state(pid) or 'gone'})"

    def _shut_down(self) -> None:
        self._child.begin_clean_up()
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            stop_worker(worker)
        except Exception:
            log.exception("the worker's shutdown failed")
