"""The engine core: what turns requests into plans and answers into outputs, in one loop on one thread.

::

    inbox (channel's thread)  --ring-->  +----------------------------------------------+
    answers (executor)        --ring-->  | one Waiter: the only thing this thread sleeps |
    failure (supervisor)      --ring-->  | on; idle, it sleeps                           |
    stop (control connection) --ring-->  +----------------------------------------------+
        take messages -> schedule -> execute_model(non_block) -> ... until the pipeline is full or nothing is left to
        schedule -> hand outputs of the last answer to the channel -> sleep -> update with the oldest answer

A step that runs in this thread (``uni`` on CPUs, ``Executor.run_steps_here``) has its answer when it is issued.
Otherwise, with look-ahead, the pipeline holds two plans: plan n + 1 is issued before the answer of plan n is known, so
workers find their next plan waiting when they have answered. Outputs go out after the next plan, since workers may be
idle and clients are not.

A request that cannot be handled gets an output with finish_reason ``error``; it never ends the loop. A step that fails
does: slots and caches of the workers cannot be trusted after it. The exception leaves :meth:`EngineCore.run` and the
process ends with a report.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import cloudpickle

from drumline.engine.channel import Incoming, Outgoing, Undecodable
from drumline.engine.protocol import (
    STEP_TOKENS,
    Abort,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    RequestOutput,
    UtilityCall,
    UtilityResult,
)
from drumline.engine.scheduler import Scheduler
from drumline.engine.stage_meter import StageMeter
from drumline.errors import (
    DrumlineError,
    ExecutorFailedError,
    FailureReport,
    RequestError,
    RPCTimeoutError,
    WorkerCallError,
)
from drumline.executor.base import Executor
from drumline.plan.step import StepOutput
from drumline.processes.reports import make_report
from drumline.transport import Waiter
from drumline.worker.garbage import Garbage

log = logging.getLogger(__name__)

MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError")
"""What workers raise that do not have the memory they are asked for: Python's, numpy's and torch's."""
CALLER_SLACK_S = 10.0
"""A call of the front end ends here so much later than there."""


class Future(Protocol):
    """What executors give for a call that is not waited for (``drumline.executor.calls.Call``)."""

    deadline: float | None

    def done(self) -> bool:
        """It has ended."""

    def result(self, timeout: float | None = None) -> Any:
        """What it gave."""


class Channel(Protocol):
    """Messages from and to the front end (``drumline.engine.channel.CoreChannel``)."""

    inbox: deque[Incoming | Undecodable]

    error: BaseException | None
    """What broke the channel."""

    def send(self, message: Outgoing) -> None:
        """Never blocks."""


@dataclass(slots=True)
class _Flight:
    """A plan whose answer has not been taken."""

    step: int
    future: Future
    sampling: bool = False
    """The future is that of sample_tokens."""


@dataclass(slots=True)
class _Phases:
    """Seconds spent in each phase since the start; ``EngineStats`` says what they are."""

    schedule: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    update: float = 0.0
    output: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


class _Pickled:
    """A future whose result is pickled."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self.deadline = future.deadline

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> bytes:
        pickled: bytes = cloudpickle.dumps(self._future.result(timeout), protocol=5)
        return pickled


class EngineCore:
    """See the module's text.

    Args:
        executor: ready, with its KV pool allocated; waits on ``waiter`` too.
        scheduler: owns the KV accounting.
        waiter: rung by the executor, the channel and :meth:`stop`.
        channel: where messages come from and go to.
        role: name in reports.
        steps_here: have steps run in this thread where the executor can (``Executor.run_steps_here``).
        stages: of the pipeline.

    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        waiter: Waiter,
        channel: Channel,
        *,
        role: str = "EngineCore",
        steps_here: bool = False,
        stages: int = 1,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._waiter = waiter
        self._channel = channel
        self._role = role
        self._steps_here = steps_here and executor.run_steps_here()
        self._depth = 1 if self._steps_here else executor.max_concurrent_batches
        self._flights: deque[_Flight] = deque()
        self._calls: list[tuple[int, str, Future]] = []
        self._reserving: tuple[str, int, Future] | None = None
        """A request that waits for memory, the bytes, and what the workers say of it."""
        self._unsent: list[RequestOutput] = []
        self._tell_stats = False
        self._arrivals: dict[str, float] = {}
        """Of requests that no plan has had."""
        self._queued: dict[str, float] = {}
        """Seconds that requests without output have waited before their first step."""
        self._phases = _Phases()
        self._meter = StageMeter(stages) if stages > 1 else None
        self._step_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._tokens = 0
        self.garbage = Garbage()
        self.turns = 0
        """Of the loop so far; and where it is: ``waiting``, ``step`` (in this thread), ``busy``."""
        self.where = "busy"
        self._stopping = False
        self._utilities: dict[str, Callable[..., Any]] = {
            "ping": lambda: "pong",
            "stats": self.stats,
            "reset_prefix_cache": scheduler.reset_prefix_cache,
            "request_ids": scheduler.request_ids,
            "collective_rpc": self._collective_rpc,
            "pickled_rpc": self._pickled_rpc,
        }
        executor.register_failure_callback(lambda report: waiter.ring())

    @property
    def step(self) -> int | None:
        """Number of the oldest step whose answer has not come; for reports."""
        return self._flights[0].step if self._flights else None

    def doing(self) -> str:
        """For reports; any thread."""
        stats = self._scheduler.stats()
        step = "no step in flight" if self.step is None else f"step {self.step} in flight"
        return f"{step}, {stats.num_running} requests running, {stats.num_waiting} waiting, {len(self._calls)} calls"

    def stats(self) -> EngineStats:
        """State of the scheduler, and where the time went."""
        stats, phases = self._scheduler.stats(), self._phases
        stats.schedule_s, stats.dispatch_s, stats.wait_s = phases.schedule, phases.dispatch, phases.wait
        stats.update_s, stats.output_s = phases.update, phases.output
        stats.forward_s, stats.sample_s = phases.forward, phases.sample
        stats.step_tokens, stats.tokens = self._step_tokens, self._tokens
        if self._meter is not None:
            load = self._meter.load(self._executor.busy_ns(), perf_counter())
            stats.active_s, stats.stage_busy_s, stats.stage_busy = load.active_s, [*load.busy_s], [*load.fractions]
        return stats

    def stop(self) -> None:
        """Make :meth:`run` return soon. Any thread, any signal handler."""
        self._stopping = True
        self._waiter.ring()

    def run(self) -> None:
        """Serve until :meth:`stop`. Raises what makes going on impossible: ExecutorFailedError, RemoteCallError ..."""
        while not self._stopping:
            self.turns += 1
            self._take_messages()
            issued = self._issue()
            if issued and self._steps_here:
                self._take_answers()
            self._send_outputs()
            if not issued:
                self._wait()
                self._take_answers()

    # waiting

    def _wait(self) -> None:
        """Sleep until there is something to do."""
        self.where = "waiting"
        self.garbage.between_steps()
        if not self._flights:
            while self._steps_here and self._something_to_do() is None and self._executor.while_idle():
                pass
            self._waiter.wait(self._something_to_do)
        else:
            began = perf_counter()
            self._waiter.wait(self._something_to_do, self._flights[0].future.deadline)
            self._phases.wait += perf_counter() - began
        self.where = "busy"

    def _something_to_do(self) -> bool | None:
        """What the waiter looks at. True ends the wait."""
        if self._executor.is_failed:
            assert self._executor.failure is not None
            raise ExecutorFailedError(self._executor.failure)
        if self._channel.error is not None:
            raise self._channel.error
        if self._stopping or self._channel.inbox:
            return True
        if self._flights and self._flights[0].future.done():
            return True
        if self._reserving is not None and self._reserving[2].done():
            return True
        return any(future.done() for _, _, future in self._calls) or None

    # the step

    def _issue(self) -> bool:
        """Send the next plan, if there is room and something to compute."""
        if len(self._flights) >= self._depth:
            return False
        began = perf_counter()
        plan = self._scheduler.schedule()
        made = perf_counter()
        self._phases.schedule += made - began
        if (wanted := self._scheduler.wanted) is not None and self._reserving is None:
            self._reserve(*wanted)
        if plan is None:
            return False
        tokens = sum(memoryview(plan.num_tokens).cast("i"))
        self._step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        self._tokens += tokens
        for start in plan.starts:
            if (arrival := self._arrivals.pop(start.request_id, None)) is not None:
                self._queued[start.request_id] = max(0.0, time.time() - arrival)
        if self._steps_here:
            self.where = "step"
        future: Future = self._executor.execute_model(plan, non_block=True)
        if plan.defer_sampling:
            future = self._executor.sample_tokens(plan.step, None, non_block=True)
        self.where = "busy"
        self._phases.dispatch += perf_counter() - made
        self._flights.append(_Flight(plan.step, future, plan.defer_sampling))
        if self._meter is not None:
            self._meter.flying(True, made)
        return True

    def _reserve(self, request_id: str, nbytes: int) -> None:
        """Ask the workers for the memory that a request waits for (``plan.memory``)."""
        future: Future = self._executor.collective_rpc("reserve_memory", (nbytes,), non_block=True)
        self._reserving = request_id, nbytes, future

    def _take_reserved(self) -> None:
        """Tell the scheduler what they say, once they have."""
        if self._reserving is None or not self._reserving[2].done():
            return
        (request_id, nbytes, future), self._reserving = self._reserving, None
        try:
            future.result(0.0)
        except WorkerCallError as error:
            if error.type_name.rpartition(".")[2] not in MEMORY_ERRORS:
                raise
            log.warning("request %s waits for %d bytes that are not there: %s", request_id, nbytes, error.message)
            self._unsent += self._scheduler.deny(request_id, nbytes, f"{error.report.role}: {error.message}")
        else:
            self._scheduler.grant(request_id, nbytes)

    def _take_answers(self) -> None:
        """Update the scheduler with the answers that have come, oldest first; answer calls that have ended."""
        self._take_reserved()
        while self._flights:
            flight = self._flights[0]
            if not flight.future.done() and not self._overdue(flight):
                break
            output = self._result(flight)
            if output is None:
                if flight.sampling:
                    raise DrumlineError(f"sample_tokens of step {flight.step} gave no output")
                flight.future, flight.sampling = self._executor.sample_tokens(flight.step, None, non_block=True), True
                continue
            self._flights.popleft()
            began = perf_counter()
            if self._meter is not None and not self._flights:
                self._meter.flying(False, began)
            new = self._scheduler.update(output)
            if self._queued:
                for one in new:
                    one.queued_s = self._queued.pop(one.request_id, 0.0)
            self._unsent += new
            self._phases.update += perf_counter() - began
            self._phases.forward += output.forward_s
            self._phases.sample += output.sample_s
            self._tell_stats = True
        for item in [item for item in self._calls if item[2].done()]:
            self._calls.remove(item)
            call_id, method, future = item
            self._answer(call_id, method, future.result, 0.0)

    def _result(self, flight: _Flight) -> StepOutput | None:
        """The answer. ExecutorFailedError if none came in time: then some rank hangs, for good."""
        try:
            output: StepOutput | None = flight.future.result(0.0)
        except RPCTimeoutError as error:
            raise ExecutorFailedError(self._hang_report(flight, error)) from error
        return output

    def _hang_report(self, flight: _Flight, error: RPCTimeoutError) -> FailureReport:
        seconds = self._executor.process.execute_timeout_s
        return FailureReport(
            role=self._role,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase="sample_tokens" if flight.sampling else "execute_model",
            step=flight.step,
            what="hang",
            message=f"the workers gave no answer within {seconds:g} s. {error}",
        )

    def _overdue(self, flight: _Flight) -> bool:
        """The deadline is over: its result() raises."""
        return flight.future.deadline is not None and time.monotonic() >= flight.future.deadline

    def _send_outputs(self) -> None:
        if self._unsent or self._tell_stats:
            began = perf_counter()
            self._channel.send(EngineOutputs(outputs=self._unsent, stats=self.stats()))
            self._phases.output += perf_counter() - began
            self._unsent, self._tell_stats = [], False

    # messages

    def _take_messages(self) -> None:
        inbox = self._channel.inbox
        while inbox:
            message = inbox.popleft()
            try:
                self._handle(message)
            except Exception as error:
                log.exception("a message of the front end could not be handled")
                self._refuse(getattr(message, "request_id", ""), f"internal error: {error}")

    def _handle(self, message: Incoming | Undecodable) -> None:
        match message:
            case EngineRequest():
                try:
                    self._scheduler.add(message)
                    self._arrivals[message.request_id] = message.arrival
                except RequestError as error:
                    self._refuse(message.request_id, str(error))
            case Abort():
                self._scheduler.abort(message.request_ids)
                for request_id in message.request_ids:
                    self._arrivals.pop(request_id, None)
                    self._queued.pop(request_id, None)
                self._tell_stats = True
            case UtilityCall():
                self._answer(message.call_id, message.method, self._call, message)
            case Undecodable():
                self._refuse(message.request_id, message.message)

    def _refuse(self, request_id: str, message: str) -> None:
        if request_id:
            self._unsent.append(
                RequestOutput(
                    request_id=request_id, first_index=0, token_ids=[], finish_reason="error", message=message
                )
            )

    # calls by name

    def _call(self, message: UtilityCall) -> Any:
        utility = self._utilities.get(message.method)
        if utility is None:
            raise ValueError(f"the engine core has no {message.method!r}; it has {', '.join(sorted(self._utilities))}")
        return utility(*message.args)

    def _collective_rpc(
        self, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Future:
        if method != "check_health":  # workers that were changed leave keys and values that new ones would not make
            self._scheduler.pool.leave_nothing()
        future: Future = self._executor.collective_rpc(method, tuple(args or ()), kwargs or {}, non_block=True)
        return future

    def _pickled_rpc(self, call: bytes, limit_s: float) -> Future:
        """``call``: pickled (method or function, args, kwargs), from the process that started this one.

        The answers go back pickled, since workers may give anything. ``limit_s``: how long the caller waits, who
        notices its end first; workers may take so long, it is no hang before.
        """
        method, args, kwargs = pickle.loads(call)
        self._scheduler.pool.leave_nothing()
        limit_s += CALLER_SLACK_S
        return _Pickled(self._executor.collective_rpc(method, tuple(args), kwargs, limit_s, non_block=True))

    def _answer(self, call_id: int, method: str, function: Callable[..., Any], *args: Any) -> None:
        """Send what a call gave, or what it raised. A future is answered when it is done."""
        try:
            value = function(*args)
            if hasattr(value, "done") and hasattr(value, "result"):
                self._calls.append((call_id, method, value))
                return
            self._channel.send(UtilityResult(call_id=call_id, value=value))
        except ExecutorFailedError:
            raise
        except Exception as error:  # noqa: BLE001 (it is the caller's)
            report = make_report(error, role=self._role, phase=method)
            self._channel.send(UtilityResult(call_id=call_id, error=report))
