"""Both ends of the channel, in one process: real sockets, real thread."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from drumline.engine.channel import Backlog, CoreChannel, Undecodable, merge
from drumline.engine.front import FrontChannel, Stream, result_value
from drumline.engine.protocol import (
    Abort,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    RequestOutput,
    UtilityCall,
    UtilityResult,
)
from drumline.errors import RemoteCallError
from drumline.plan.sampling import SamplingParams
from drumline.plan.step import TokenLogprobs


class Ends:
    def __init__(self) -> None:
        self.front = FrontChannel()
        self._came = threading.Condition()
        self.core = CoreChannel(self.front.door, self._ring)
        self.front.close_door()

    def _ring(self) -> None:
        with self._came:
            self._came.notify_all()

    def wait_inbox(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.core.inbox) >= count, 10)

    def receive(self) -> Iterator[EngineOutputs | UtilityResult]:
        while select.select([self.front.fd], [], [], 5.0)[0] and not self.front.ended:
            yield from self.front.receive()

    def close(self) -> None:
        self.core.close()
        self.front.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def out(name: str, first: int, tokens: list[int], reason: str | None = None) -> RequestOutput:
    return RequestOutput(request_id=name, first_index=first, token_ids=tokens, finish_reason=reason)


def test_messages_of_all_kinds_arrive_in_order(ends: Ends):
    request = EngineRequest(request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(), seed=2**63)
    sent = [request, Abort(request_ids=["a"]), UtilityCall(call_id=1, method="ping", args=[1, "x", None])]
    for message in sent:
        ends.front.send(message)
    ends.wait_inbox(3)
    assert list(ends.core.inbox) == sent
    outputs = EngineOutputs(outputs=[out("a", 0, [5])], stats=EngineStats(steps=1))
    result = UtilityResult(call_id=1, value=[1, {"x": 2}])
    ends.core.send(outputs)
    ends.core.send(result)
    incoming = ends.receive()
    assert [next(incoming), next(incoming)] == [outputs, result]


def test_the_core_has_the_only_copy_of_its_end(ends: Ends):
    assert ends.front.door == -1
    ends.core.send(UtilityResult(call_id=1, value="last word"))
    ends.core.close()
    assert [message.value for message in ends.receive() if isinstance(message, UtilityResult)] == ["last word"]
    assert ends.front.ended
    ends.front.send(Abort(request_ids=["a"]))  # goes nowhere, and that is no error
    assert not ends.front.waiting


def test_requests_wait_for_a_core_that_does_not_read():
    front = FrontChannel()
    requests = [
        EngineRequest(request_id=str(n), prompt_token_ids=[1000] * 50_000, sampling=SamplingParams(), seed=n)
        for n in range(8)
    ]
    for request in requests:
        front.send(request)
    assert front.waiting
    came = threading.Semaphore(0)
    core = CoreChannel(front.door, came.release)
    front.close_door()
    while front.waiting:
        assert select.select([], [front.fd], [], 5.0)[1]
        front.flush()
    while len(core.inbox) < len(requests):
        assert came.acquire(timeout=5)
    assert list(core.inbox) == requests
    core.close()
    front.close()


@pytest.mark.alone
def test_a_core_whose_front_end_is_gone_goes_on(ends: Ends):
    ends.front.close()
    for _ in range(3):
        ends.core.send(EngineOutputs(outputs=[out("a", 0, [1])], stats=EngineStats()))
    before = time.process_time_ns()
    time.sleep(0.1)
    assert time.process_time_ns() - before < 50_000_000  # its thread does not spin
    assert ends.core.error is None


def test_what_is_no_message_is_told_apart(ends: Ends):
    request = {"type": "add", "request_id": "a", "prompt_token_ids": "text", "sampling": {}, "seed": 1}
    wrong_value = {
        "type": "add",
        "request_id": "b",
        "prompt_token_ids": [1],
        "sampling": {"temperature": -1},
        "seed": 1,
    }
    for data in (msgspec.msgpack.encode(request), msgspec.msgpack.encode(wrong_value), b"\xc1", b"\xa2\xff\xff"):
        ends.front._frames.send(data)
    ends.wait_inbox(4)
    first, second, third, fourth = ends.core.inbox
    assert isinstance(first, Undecodable)
    assert first.request_id == "a"
    assert "prompt_token_ids" in first.message
    assert isinstance(second, Undecodable)
    assert second.request_id == "b"
    assert "temperature" in second.message
    assert isinstance(third, Undecodable)
    assert isinstance(fourth, Undecodable)


def test_a_front_end_that_does_not_read_gets_merged_outputs(ends: Ends):
    """Nothing blocks and nothing is lost; what waits is one output for each request, however many were sent."""
    count, each = 3_000, 400
    for index in range(count):
        outputs = [out(name, index * each, list(range(each)), "stop" if index == count - 1 else None) for name in "ab"]
        ends.core.send(EngineOutputs(outputs=outputs, stats=EngineStats(steps=index)))
    ends.core.send(UtilityResult(call_id=1, value="end"))
    got: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    messages = 0
    last = None
    for message in ends.receive():
        messages += 1
        if isinstance(message, UtilityResult):
            break
        last = message.stats.steps
        for output in message.outputs:
            got[output.request_id].append(output)
    assert messages < count / 2
    assert last == count - 1
    for outputs in got.values():
        assert [o.first_index for o in outputs] == [
            sum(len(p.token_ids) for p in outputs[:i]) for i in range(len(outputs))
        ]
        assert sum(len(o.token_ids) for o in outputs) == count * each
        assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["stop"]


def test_a_result_that_cannot_be_encoded_is_an_error_of_that_call(ends: Ends):
    ends.core.send(UtilityResult(call_id=1, value=object()))
    ends.core.send(UtilityResult(call_id=2, value="fine"))
    incoming = ends.receive()
    first, second = next(incoming), next(incoming)
    assert isinstance(first, UtilityResult)
    assert isinstance(second, UtilityResult)
    with pytest.raises(RemoteCallError, match="Encoding objects of type object"):
        result_value(first)
    assert result_value(second) == "fine"


def test_backlog_merges_each_request_and_keeps_results():
    backlog = Backlog()
    assert not backlog
    assert backlog.take() is None
    backlog.add(EngineOutputs(outputs=[out("a", 0, [1]), out("b", 4, [9])], stats=EngineStats(steps=1)))
    backlog.add(UtilityResult(call_id=1))
    backlog.add(EngineOutputs(outputs=[out("a", 1, [2, 3], "stop")], stats=EngineStats(steps=2)))
    assert backlog.take() == EngineOutputs(
        outputs=[out("a", 0, [1, 2, 3], "stop"), out("b", 4, [9])], stats=EngineStats(steps=2)
    )
    assert backlog.take() == UtilityResult(call_id=1)
    assert backlog.take() is None


def test_merge_keeps_what_both_say():
    first = out("a", 3, [1])
    first.logprobs = [TokenLogprobs(-1.0, 1)]
    first.num_cached_tokens = 16
    second = out("a", 4, [2], "stop")
    second.logprobs = [None]
    second.stop_reason = 2
    merge(first, second)
    both = first
    assert (both.first_index, both.token_ids, both.logprobs) == (3, [1, 2], [TokenLogprobs(-1.0, 1), None])
    assert (both.finish_reason, both.stop_reason, both.num_cached_tokens) == ("stop", 2, 16)


def test_stream_drops_tokens_that_it_has():
    stream = Stream()
    stream.put(out("a", 0, [1, 2, 3]))
    taken = stream.take()
    assert taken is not None
    assert taken.token_ids == [1, 2, 3]
    stream.put(out("a", 0, [1, 2, 3, 4]))
    stream.put(out("a", 4, [5]))
    taken = stream.take()
    assert taken is not None
    assert (taken.first_index, taken.token_ids, stream.finished) == (3, [4, 5], False)
    stream.end("a", "abort")
    taken = stream.take()
    assert taken is not None
    assert (taken.first_index, taken.token_ids, taken.finish_reason) == (5, [], "abort")
    stream.end("a", "abort")
    assert stream.take() is None
