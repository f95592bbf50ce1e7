"""The ``uni`` backend: one worker, an object in this process.

The worker lives in a thread of its own, which makes it, runs every call and shuts it down::

    caller's thread                          worker thread
    collective_rpc -> CallTable.begin
                   -> SimpleQueue.put  --->  get, run the method
    result(): sleeps on the waiter <-------  CallTable.answer / failed, Waiter.ring

A thread, because the contract is that of ``mp``: futures, deadlines that end a call whose method does not return, calls
from several threads in one order, and look-ahead (a forward releases the GIL, and the scheduler runs meanwhile). It is
always the same thread, because torch's thread count, its inference mode and the current CUDA device belong to one.

**Steps in the caller's thread.** On CPUs a second thread gains a loop nothing that only waits for the step: the two
fight for the interpreter's lock, which a forward gives up in each of its hundreds of small operations (a third of a
step of a 5 M model). So such a loop asks for :meth:`UniExecutor.run_steps_here`: its ``execute_model`` and
``sample_tokens`` then run in its own thread while no other call is outstanding, and their futures have ended when they
are returned. What the worker thread was for is done by another that mostly sleeps: a step past its deadline breaks the
executor.

Differences from ``mp``: arguments and results are handed over as they are, not copied, so do not change them after the
call; a worker that does not return cannot be ended, only left.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from drumline.errors import DrumlineError, FailureReport, StartupError
from drumline.executor.base import STEP_METHODS, Executor, Method, WorkerState, method_name
from drumline.executor.calls import CLOSE_WAIT_S, CallTable
from drumline.executor.explain import Doing, current
from drumline.executor.future import Aggregator, Call
from drumline.executor.keeper import KeeperSettings
from drumline.executor.stalls import Seen, StallWatch
from drumline.platforms.host import cores
from drumline.processes.linux import process_state
from drumline.processes.live import LiveReport, look_at, own_stacks
from drumline.processes.reports import make_report, span
from drumline.transport import deadline_after
from drumline.worker.outputs import OutputThread, is_async
from drumline.worker.protocol import WorkerContext
from drumline.worker.wrapper import bind, idle_work, init_output_thread, name_of, start_worker, step_of, stop_worker

log = logging.getLogger(__name__)

WATCH_S = 30.0
"""Longest time in seconds between two looks at whether a step in the caller's thread is past its deadline."""

BUSY_SHARE = 0.05
"""A step that has the process compute for more than this share of its time is no hang before its deadline."""
BUSY_TICK_S = 0.05
"""Computing for so long is progress; what threads do that look around is less."""

_Job = tuple[Call, Method, tuple[Any, ...], Mapping[str, Any]]


class UniExecutor(Executor):
    """One worker in this process. World size 1 only."""

    supports_async_scheduling = True
    worker_in_process = True
    keeps_memory = True

    def _check(self) -> None:
        super()._check()
        if self.world_size != 1:
            self._refuse(f"uni runs one worker, the world size is {self.world_size}: use mp")

    def _start(self) -> None:
        self._table = CallTable(
            self.waiter,
            lambda: None,
            self.output_rank,
            1,
            look=self._look,
            keeper=KeeperSettings(long_wait_s=self.process.long_wait_s, patrol=self._patrol, rest=self._rest),
        )
        self._stalls = StallWatch(self.process.stall_timeout_s)
        self._phases = 0
        """Told so far: progress."""
        self._table.keeper.start()
        self._begun = (0, 0.0)
        """The last call that the worker has begun, and when."""
        self._ended_id = 0
        self._outputs = OutputThread(lambda: init_output_thread(self._made.object))
        self._send_lock = threading.Lock()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._state = WorkerState(rank=0, name=self._name, pid=os.getpid(), phase="starting")
        self._made = _Made()
        self._worker_lock = threading.Lock()
        """Held by the thread that runs a call."""
        self._steps_here = False
        self._step_here: _StepHere | None = None
        self._started = threading.Event()
        self._start_failure: tuple[FailureReport, BaseException] | None = None
        self._thread = threading.Thread(target=self._run, name="drumline-worker", daemon=True)
        self._cleanup.callback(self._end_thread)
        self._thread.start()
        self._started.wait()
        self._raise_start_failure()

    def _raise_start_failure(self) -> None:
        failure, self._start_failure = self._start_failure, None
        if failure is not None:
            report, error = failure
            raise StartupError(report) from error

    @property
    def _name(self) -> str:
        return name_of(self.parallel, 0)

    def workers(self) -> list[WorkerState]:
        """The one worker; it has this process's pid."""
        return [replace(self._state, phase="ended") if self._stopped.is_set() else self._state]

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
        """See :meth:`Executor.collective_rpc`."""
        self._raise_if_failed()
        self._table.refuse_aggregator()
        reply_rank = self._check_call(reply_rank, args, kwargs, rank_args, aggregators, expected_s)
        deadline = deadline_after(timeout)
        single = reply_rank is not None or bool(aggregators)
        own = rank_args[0] if rank_args is not None else ()
        with self._send_lock:
            call, call_id = None, self._table.next_id
            try:
                call = self._table.begin(
                    method_name(method),
                    (0,),
                    single=single,
                    deadline=deadline,
                    aggregators=aggregators,
                    expected_s=expected_s,
                )
                if expected_s or timeout is not None:
                    self._be_patient(call.id, call.method, timeout, expected_s)
                self._jobs.put((call, method, (*args, *own), kwargs or {}))
            except BaseException as exc:  # a signal handler may raise anywhere
                if call is None:
                    self._table.forget(call_id, exc)
                else:
                    self._table.abandon(call, exc)
                    self._jobs.put((call, _nothing, (), {}))  # it is owed an answer; skipped if it is queued already
                raise
        return call if non_block else call.result()

    # Steps in the caller's thread.

    def run_steps_here(self) -> bool:
        """See :meth:`Executor.run_steps_here`. Yes on CPUs."""
        if self.platform.device_type != "cpu":
            return False
        self._set_torch_threads()
        if not self._steps_here:
            self._steps_here = True
            over = threading.Event()
            self._cleanup.callback(over.set)
            threading.Thread(target=self._watch, args=(over,), name="drumline-watch", daemon=True).start()
        return True

    def _step(self, method: str, args: tuple[Any, ...], non_block: bool) -> Any:
        if not (self._steps_here and non_block and not self.output_aggregators):
            return super()._step(method, args, non_block)
        self._raise_if_failed()
        with self._send_lock:
            idle = self._table.idle()
            if idle:
                self._worker_lock.acquire()  # the worker thread has ended its last call
        if not idle:
            return super()._step(method, args, non_block)
        try:
            now = time.monotonic()
            self._step_here = step = _StepHere(method, now, now + self.process.execute_timeout_s)
            value = bind(self._made.object, method)(*args)
            step.value = value.get_output() if is_async(value) else value
        except BaseException as exc:  # noqa: BLE001  as in _call
            call = self._table.begin(method, (0,), single=True, deadline=None)
            self._call_failed(call, method, args, exc)
            return call
        finally:
            self._step_here = None
            self._worker_lock.release()
        return step

    def while_idle(self) -> bool:
        """See :meth:`Executor.while_idle`."""
        if not self._steps_here or self.is_failed or not self._worker_lock.acquire(blocking=False):
            return False
        try:
            return idle_work(self._made.object)()
        finally:
            self._worker_lock.release()

    def _watch(self, over: threading.Event) -> None:
        """Steps in the caller's thread. One that computes may take until its deadline, one that sleeps may not."""
        limit_s = self.process.stall_timeout_s
        longest = min(WATCH_S, self.process.execute_timeout_s / 4, limit_s / 4)
        first: tuple[_StepHere, float] | None = None
        """The step of the last look, and what the process had computed by then."""
        pause = longest
        while not over.wait(pause):
            step, pause, now = self._step_here, longest, time.monotonic()
            if step is None:
                self._tell_stall("")
                continue
            if now > step.deadline:
                self._fail(self._hang_report(step.method, f"within {self.process.execute_timeout_s:g} s"))
                return
            if first is None or first[0] is not step:
                first = step, time.process_time()
                self._tell_stall("")
            quiet = now - step.began
            if time.process_time() - first[1] > BUSY_SHARE * quiet:
                first = None  # it computes
            elif quiet >= limit_s:
                self._fail(self._hang_report(step.method, f"within {span(quiet)} (--stall-timeout {limit_s:g})"))
                return
            elif quiet >= limit_s / 2:
                self._tell_stall(f"no progress for {span(quiet)} with work outstanding: {step.method}")
            pause = max(0.0, min(longest, limit_s - quiet, step.deadline - now)) + 0.001

    def _patrol(self, now: float) -> None:
        """Calls of the worker thread: the keeper looks. A step that computes on CPUs makes progress, to its end."""
        begun, ended = self._begun[0], self._ended_id
        is_step = self.platform.device_type == "cpu" and self._table.name_of(begun) in STEP_METHODS
        sign = (begun, ended, self._phases, round(time.process_time() / BUSY_TICK_S) if is_step else 0)
        stall = self._stalls.look([Seen(begun, ended, sign)], self._table.last_sent(), self._patience, now)
        if stall is None:
            self._tell_stall("")
        elif not stall.over:
            self._tell_stall(f"no progress for {span(stall.seconds)} with work outstanding: {self._now_doing()}")
        else:
            method = self._table.name_of(begun)
            self._fail(self._hang_report(method, f"within {span(stall.seconds)} ({self._stall_limit(method)})"))

    def _rest(self) -> None:
        self._stalls.rest()
        self._tell_stall("")

    def _now_doing(self) -> str:
        step = self._step_here
        if step is not None:
            return f"running {step.method} for {span(time.monotonic() - step.began)}"
        if self._state.phase != "ready":
            return self._state.phase
        (doing,) = self._look((0,))
        return current(doing, self._table.name_of, time.monotonic())

    def live_report(self, cause: str = "asked for") -> LiveReport:
        """See :meth:`Executor.live_report`. The worker is a thread of this process."""
        if self._forked:
            raise self._ended()
        process = look_at(self._name, os.getpid(), rank=0, doing=self._now_doing())
        process.stacks = own_stacks()
        return LiveReport(cause=cause, processes=[process])

    def _hang_report(self, method: str, when: str) -> FailureReport:
        live = self.live_report(f"the worker has not ended {method} {when}")
        if self.report_folder:
            live.write(Path(self.report_folder), "hang")
        return FailureReport(
            role=self._name,
            rank=0,
            host=live.host,
            pid=os.getpid(),
            phase=method,
            what="hang",
            message=f"{live.cause}\n{live.summary()}",
            stacks=live.text(),
            stacks_file=live.file,
        )

    def _after_fork(self) -> None:
        super()._after_fork()
        if "_table" in self.__dict__:  # else the fork was in the middle of the start
            self._table.after_fork(self._ended)

    def _close_calls(self, report: FailureReport | None, error: Callable[[], DrumlineError]) -> None:
        self._table.close(report, error)

    # The worker thread.

    def _run(self) -> None:
        worker = self._made
        try:
            self._set_torch_threads()
            start_worker(self._context(), device=self._device_text(0), made=worker.keep)
            self._set_phase("ready")
        except BaseException as exc:  # noqa: BLE001  handed over to the thread that starts
            report = make_report(exc, role=self._name, rank=0, phase=self._state.phase)
            self._start_failure = (report, exc)
        else:
            self._started.set()
            while self._serve(worker.object):
                pass
        finally:
            worker.stop()
            self._started.set()

    def _serve(self, worker: Any) -> bool:
        """Run the next call, in a frame of its own: its payload is garbage before the next one is waited for."""
        job = self._jobs.get()
        if job is None:
            return False
        if job[0].id <= self._begun[0]:  # queued twice
            return True
        with self._worker_lock:
            self._call(worker, *job)
        return True

    def _call(self, worker: Any, call: Call, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._begun = call.id, time.monotonic()
        try:
            value = bind(worker, method)(*args, **kwargs)
        except BaseException as exc:  # noqa: BLE001  SystemExit too: the worker cannot leave this process
            self._call_failed(call, call.method, args, exc)
        else:
            if is_async(value) or not self._outputs.idle:
                self._outputs.give(lambda error: self._finish(call, args, value, error))
                return
            self._answer(call, value)
        self._ended_id = call.id

    def _answer(self, call: Call, value: Any) -> None:
        try:
            with self._table.lock:
                self._table.answer(0, call.id, value)
        except BaseException:  # an aggregator's SystemExit, say: its call has ended with it, this thread goes on
            log.exception("an aggregator of call %d (%s) failed", call.id, call.method)
        self.waiter.ring()

    def _finish(self, call: Call, args: tuple[Any, ...], value: Any, error: BaseException | None) -> None:
        """In the output thread."""
        try:
            if error is not None:
                raise error
            value = value.get_output() if is_async(value) else value
        except BaseException as exc:  # noqa: BLE001  as in _call
            self._call_failed(call, call.method, args, exc)
        else:
            self._answer(call, value)
        self._ended_id = call.id

    def _look(self, ranks: Iterable[int]) -> Sequence[Doing]:
        call_id, since = self._begun
        state = process_state(os.getpid())
        busy = call_id > self._ended_id
        pid, name = os.getpid(), self._name
        return [Doing(rank=0, name=name, pid=pid, state=state, call_id=call_id, since=since if busy else None)]

    def _call_failed(self, call: Call, method: str, args: tuple[Any, ...], exc: BaseException) -> None:
        report = make_report(exc, role=self._name, rank=0, phase=method, step=step_of(method, args))
        log.warning("call %d failed: %s", call.id, report.headline())  # its caller gets the traceback
        marked = self._table.failed(call.id, report, owed_by=0)
        if marked is not None:
            self._table.settle(marked)

    def _context(self) -> WorkerContext:
        return WorkerContext(
            config=self.config,
            rank=0,
            local_rank=0,
            distributed_init_method="",
            is_driver=True,
            set_phase=self._set_phase,
            kv_fd=self._kept_fds[0][0] if self._kept_fds else -1,
        )

    def _set_phase(self, phase: str) -> None:
        self._phases += 1
        self._state = WorkerState(rank=0, name=self._name, pid=os.getpid(), phase=phase)
        self._on_phase(self._state)

    def _set_torch_threads(self) -> None:
        """OpenMP's thread count is a property of each thread: take over that of this process."""
        torch = sys.modules.get("torch")
        if torch is not None:
            wanted = self.process.threads_per_worker or torch.get_num_threads()
            torch.set_num_threads(min(wanted, cores()))

    def _end_thread(self) -> None:
        self._jobs.put(None)
        self._table.close(None, self._ended)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * self.process.stop_timeout_s)
        if self._thread.is_alive():
            log.warning("the worker does not return from its call; it is left alone until this process ends")
        elif not self._outputs.stop(self.process.stop_timeout_s):
            log.warning("an output does not get finished; it is left alone until this process ends")
        self._table.keeper.join(CLOSE_WAIT_S)


def _nothing(worker: Any) -> None:
    """Run instead of a call that was interrupted before it was queued."""


class _StepHere:
    """A step in its caller's thread, and its future when it has ended."""

    __slots__ = ("began", "deadline", "method", "value")

    def __init__(self, method: str, began: float, deadline: float) -> None:
        self.method = method
        self.began = began
        self.deadline = deadline
        self.value: Any = None

    def done(self) -> bool:
        """It has."""
        return True

    def result(self, timeout: float | None = None) -> Any:
        """What it gave."""
        return self.value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """None: a step that failed has another future."""
        return None

    def cancel(self) -> bool:
        """It has ended already."""
        return False

    cancelled = cancel

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Called at once; what it raises is logged."""
        try:
            callback(self)
        except Exception:
            log.exception("a callback of %s failed", self.method)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.value


class _Made:
    """The worker, once there is one, so that it is shut down once whatever happens."""

    def __init__(self) -> None:
        self.object: Any = None
        self._shutdown: Callable[[], None] = lambda: None

    def keep(self, worker: Any) -> None:
        self.object = worker
        self._shutdown = lambda: stop_worker(worker)

    def stop(self) -> None:
        self.object = None
        try:
            self._shutdown()
        except Exception:
            log.exception("the worker's shutdown failed")
