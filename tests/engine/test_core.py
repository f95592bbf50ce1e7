"""The core's loop over a real executor (``uni``) whose worker is the simulated one, and a channel in memory."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drumline.config import CacheConfig, EngineConfig, ProcessConfig, SchedulerConfig
from drumline.engine.admission import Limits
from drumline.engine.blocks import BlockPool
from drumline.engine.channel import Incoming, Outgoing, Undecodable
from drumline.engine.core import EngineCore
from drumline.engine.protocol import Abort, EngineOutputs, RequestOutput, UtilityCall, UtilityResult
from drumline.engine.scheduler import Scheduler
from drumline.errors import ExecutorFailedError, FailureReport, RemoteCallError
from drumline.executor.uni import UniExecutor
from drumline.transport import Waiter

from .rig import expected, request
from .simulated import SimulatedModelWorker


class MemoryChannel:
    def __init__(self, waiter: Waiter) -> None:
        self.inbox: deque[Incoming | Undecodable] = deque()
        self.error: BaseException | None = None
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.results: dict[int, UtilityResult] = {}
        self._waiter = waiter
        self._changed = threading.Condition()

    def put(self, *messages: Incoming | Undecodable) -> None:
        self.inbox.extend(messages)
        self._waiter.ring()

    def send(self, message: Outgoing) -> None:
        with self._changed:
            if isinstance(message, EngineOutputs):
                for output in message.outputs:
                    self.outputs.setdefault(output.request_id, []).append(output)
            else:
                self.results[message.call_id] = message
            self._changed.notify_all()

    def wait(self, enough: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(enough, 20)

    def wait_ends(self, *names: str) -> None:
        self.wait(lambda: all(name in self.outputs and self.outputs[name][-1].finish_reason for name in names))

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]


class Rig:
    def __init__(
        self,
        *,
        look_ahead: bool,
        micro_batches: int = 1,
        policy: str = "fcfs",
        steps_here: bool = False,
        **process: Any,
    ) -> None:
        self.config = EngineConfig(
            cache=CacheConfig(block_size=4, num_gpu_blocks_override=16),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=look_ahead),
            process=ProcessConfig(worker_cls=f"{SimulatedModelWorker.__module__}:SimulatedModelWorker", **process),
        )
        self.waiter = Waiter.create("test-core")
        self.executor = UniExecutor(self.config, waiter=self.waiter)
        self.worker = SimulatedModelWorker.current
        limits = Limits(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=48,
            vocab_size=11,
            num_micro_batches=micro_batches,
            policy=policy,
        )
        self.scheduler = Scheduler(limits, BlockPool(16, 4))
        self.channel = MemoryChannel(self.waiter)
        self.core = EngineCore(self.executor, self.scheduler, self.waiter, self.channel, steps_here=steps_here)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.core.run()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def close(self) -> None:
        self.worker.gate.set()
        self.core.stop()
        self.thread.join(10)
        self.executor.shutdown()
        self.waiter.close()


@pytest.fixture(params=["look-ahead", "in turns", "in the core's thread"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(look_ahead=request.param != "in turns", steps_here=request.param == "in the core's thread")
    yield made
    made.close()


@pytest.fixture(params=["look-ahead", "in turns"])
def beside(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Steps run beside the core's thread."""
    made = Rig(look_ahead=request.param == "look-ahead")
    yield made
    made.close()


def test_many_requests_over_few_slots_and_blocks(rig: Rig):
    requests = [request(str(i), [i % 5, i % 3, 1] * (1 + i % 4), 3 + i, eos=(2,)) for i in range(12)]
    rig.channel.put(*requests)
    rig.channel.wait_ends(*(r.request_id for r in requests))
    for r in requests:
        assert rig.channel.tokens(r.request_id) == expected(r, 48)[0]
    assert rig.scheduler.pool.num_free == 16
    assert rig.core.step is None


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("look_ahead", [True, False], ids=["look-ahead", "in turns"])
@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_and_aborts(seed: int, look_ahead: bool, micro_batches: int):
    """They come while steps run, so at moments of the threads' own choice."""
    draw = random.Random(seed)
    rig = Rig(look_ahead=look_ahead, micro_batches=micro_batches, policy="priority")
    try:
        requests, aborted = [], set()
        for number in range(60):
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
            one = request(str(number), prompt, draw.randrange(1, 16), eos=(2,), priority=draw.randrange(3))
            requests.append(one)
            rig.channel.put(one)
            if draw.random() < 0.2:
                aborted.add(name := str(draw.randrange(number + 1)))
                rig.channel.put(Abort(request_ids=[name]))
            if draw.random() < 0.2:
                rig.channel.wait_ends(*(r.request_id for r in requests if r.request_id not in aborted))
        rig.channel.wait_ends(*(r.request_id for r in requests if r.request_id not in aborted))
        rig.channel.put(UtilityCall(call_id=1, method="request_ids"))
        rig.channel.wait(lambda: 1 in rig.channel.results)
        assert rig.channel.results[1].value == []
        for one in requests:
            tokens, name = expected(one, 48)[0], one.request_id
            got = rig.channel.tokens(name) if name in rig.channel.outputs else []
            assert got == (tokens[: len(got)] if name in aborted else tokens)
        assert rig.scheduler.pool.num_free == 16
    finally:
        rig.close()
    rig.scheduler.check()


def test_with_look_ahead_two_steps_are_in_flight(beside: Rig):
    beside.worker.gate.clear()
    beside.channel.put(request("a", [1, 2, 3]))
    assert beside.worker.entered.wait(10)
    beside.channel.put(UtilityCall(call_id=1, method="stats"))
    beside.channel.wait(lambda: 1 in beside.channel.results)
    beside.channel.put(UtilityCall(call_id=2, method="stats"))
    beside.channel.wait(lambda: 2 in beside.channel.results)
    assert beside.channel.results[2].value.steps == (2 if beside.executor.max_concurrent_batches == 2 else 1)
    beside.worker.gate.set()
    beside.channel.wait_ends("a")


def test_abort_during_a_step_frees_at_once(beside: Rig):
    beside.worker.gate.clear()
    beside.channel.put(request("a", [1, 2, 3], 20))
    assert beside.worker.entered.wait(10)
    beside.channel.put(Abort(request_ids=["a", "unknown"]), UtilityCall(call_id=1, method="stats"))
    beside.channel.wait(lambda: 1 in beside.channel.results)
    assert beside.channel.results[1].value.kv_blocks_used == 0
    beside.worker.gate.set()
    beside.channel.put(request("b", [1], 3))
    beside.channel.wait_ends("b")
    assert "a" not in beside.channel.outputs


def test_abort_during_a_step_in_the_cores_thread_is_seen_after_it():
    rig = Rig(look_ahead=True, steps_here=True)
    try:
        rig.worker.gate.clear()
        rig.channel.put(request("a", [1, 2, 3], 20))
        assert rig.worker.entered.wait(10)
        rig.channel.put(Abort(request_ids=["a"]), UtilityCall(call_id=1, method="stats"))
        rig.worker.gate.set()
        rig.channel.wait(lambda: 1 in rig.channel.results)
        assert rig.channel.results[1].value.kv_blocks_used == 0
        assert rig.channel.tokens("a") == expected(request("a", [1, 2, 3], 20), 48)[0][:1]
    finally:
        rig.close()


def test_calls_and_steps_in_the_cores_thread_run_in_turn():
    """A call that is outstanding when a step is issued runs first, in the worker's thread."""
    rig = Rig(look_ahead=True, steps_here=True)
    try:
        for number in range(20):
            rig.channel.put(
                UtilityCall(call_id=number, method="collective_rpc", args=["double", [number]]),
                one := request(str(number), [1, 2, number % 3], 5),
            )
            rig.channel.wait_ends(one.request_id)
            rig.channel.wait(lambda number=number: number in rig.channel.results)
            assert rig.channel.tokens(one.request_id) == expected(one, 48)[0]
            assert rig.channel.results[number].error is None
    finally:
        rig.close()


def test_sampling_on_demand(rig: Rig):
    """Answers None: the core asks for the tokens."""
    rig.worker.defers = True
    rig.channel.put(r := request("a", [1, 2, 3], 5))
    rig.channel.wait_ends("a")
    assert rig.channel.tokens("a") == expected(r, 48)[0]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (request("x", []), "empty"),
        (request("x", [99]), "not in the vocabulary"),
        (request("x", [1] * 50), "at most 47"),
        (Undecodable(request_id="x", message="no such field"), "no such field"),
    ],
)
def test_a_bad_request_is_refused_and_harms_nobody(rig: Rig, wrong: Any, text: str):
    rig.channel.put(good := request("good", [1, 2], 4), wrong)
    rig.channel.wait_ends("good", "x")
    assert rig.channel.outputs["x"][0].finish_reason == "error"
    assert text in rig.channel.outputs["x"][0].message
    assert rig.channel.tokens("good") == expected(good, 48)[0]


def test_what_breaks_while_a_message_is_handled_harms_nobody(rig: Rig):
    broken = request("x", [1, 2], 4)
    broken.eos_token_ids = 7  # type: ignore[assignment]
    rig.channel.put(broken, Undecodable(request_id="", message="nobody to tell"), request("good", [1, 2], 4))
    rig.channel.wait_ends("good", "x")
    assert "internal error" in rig.channel.outputs["x"][0].message


def test_calls_by_name(rig: Rig):
    def call(number: int, method: str, *args: Any) -> UtilityResult:
        rig.channel.put(UtilityCall(call_id=number, method=method, args=list(args)))
        rig.channel.wait(lambda: number in rig.channel.results)
        return rig.channel.results[number]

    assert call(1, "ping").value == "pong"
    assert call(2, "collective_rpc", "double", [4]).value == [8]
    assert call(3, "reset_prefix_cache").error is None
    unknown = call(4, "__init__").error
    assert unknown is not None
    assert "has no '__init__'" in unknown.message
    raised = call(5, "collective_rpc", "complain").error
    assert raised is not None
    assert raised.type == "KeyError"
    assert call(6, "ping", "too", "many").error is not None
    assert call(7, "request_ids").value == []


def test_a_failed_step_ends_the_loop_with_its_cause(rig: Rig):
    rig.worker.fail_at = 2
    rig.channel.put(request("a", [1, 2, 3], 8))
    rig.thread.join(10)
    assert isinstance(rig.error, RemoteCallError | ExecutorFailedError)
    assert (rig.error.report.message, rig.error.report.step) == ("boom at step 2", 2)


def test_a_step_without_end_is_told_as_a_hang():
    rig = Rig(look_ahead=True, execute_timeout_s=0.2, stop_timeout_s=0.5)
    try:
        rig.worker.gate.clear()
        rig.channel.put(request("a", [1, 2, 3], 8))
        rig.thread.join(10)
        assert isinstance(rig.error, ExecutorFailedError)
        assert (rig.error.report.what, rig.error.report.step) == ("hang", 0)
        assert "no answer within 0.2 s" in str(rig.error)
    finally:
        rig.close()


def test_a_step_without_end_in_the_cores_thread_is_told_by_another():
    rig = Rig(look_ahead=True, steps_here=True, execute_timeout_s=0.2, stop_timeout_s=0.5)
    told: list[FailureReport] = []
    came = threading.Event()
    rig.executor.register_failure_callback(lambda report: (told.append(report), came.set()))
    try:
        rig.worker.gate.clear()
        rig.channel.put(request("a", [1, 2, 3], 8))
        assert came.wait(10)
        assert (told[0].what, told[0].phase) == ("hang", "execute_model")
        rig.worker.gate.set()  # in real life nobody does, and the process is ended
        rig.thread.join(10)
        assert isinstance(rig.error, ExecutorFailedError)
    finally:
        rig.close()


def test_a_broken_channel_ends_the_loop(rig: Rig):
    rig.channel.error = OSError("no more messages")
    rig.waiter.ring()
    rig.thread.join(10)
    assert rig.error is rig.channel.error
