"""Calls and answers as bytes, and the segment's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import ProcessConfig
from drumline.errors import FailureReport
from drumline.plan.step import StepOutput, StepPlan, pack
from drumline.transport.ring import RingReader, RingWriter
from drumline.worker.segment import SegmentLayout
from drumline.worker.wire import (
    ALL_RANKS,
    ANSWER_BYTES,
    CallDecoder,
    CallEncoder,
    CallFailed,
    Request,
    call_parts,
    decode_failure,
    encode_answer,
    encode_failure,
    make_codec,
    read_answer,
    read_head,
)

CODEC = make_codec()
PLAN = StepPlan(step=3, slots=pack([1]), num_tokens=pack([5]))

values = st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5) | st.lists(st.integers(), max_size=3)


class Sent(NamedTuple):
    """A call on its way."""

    data: memoryview
    buffers: Sequence[memoryview]


def message(
    method: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    own: Sequence[Sequence[Any]] | None = None,
) -> Sent:
    encoded = CallEncoder(CODEC).encode(method, args, kwargs, own)
    parts = call_parts(encoded, 12345678901, ALL_RANKS)
    return Sent(memoryview(b"".join(bytes(part) for part in parts)), encoded[-1])


def decode(sent: Sent, rank: int = 0) -> Request:
    head = read_head(sent.data)
    assert (head.call_id, head.reply_rank) == (12345678901, ALL_RANKS)
    return CallDecoder(CODEC, rank).decode(head, sent.data, sent.buffers)


@given(args=st.lists(values, max_size=3), kwargs=st.dictionaries(st.text(max_size=3), values, max_size=2))
def test_arguments(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert decode(message("name", args, kwargs)) == ("name", tuple(args), kwargs)


@given(args=st.lists(values, max_size=2), own=st.lists(st.lists(values, max_size=2), min_size=1, max_size=4))
def test_arguments_of_ranks_own(args: list[Any], own: list[list[Any]]) -> None:
    data = message("name", args, {"k": 1}, own)
    for rank, mine in enumerate(own):
        assert decode(data, rank) == ("name", (*args, *mine), {"k": 1})


def test_a_plan_is_one_msgspec_encoding() -> None:
    sent = message("execute_model", (PLAN,))
    assert decode(sent) == ("execute_model", (PLAN,), {})
    assert b"pickle" not in bytes(sent.data)
    assert len(sent.data) < 80
    assert not sent.buffers


def test_arrays_are_copied_out() -> None:
    array = np.arange(5000)
    sent = message("name", (array,), None, [(array * 2,)])
    args = decode(sent).args
    sent.data.release()
    np.testing.assert_array_equal(args[0], array)
    np.testing.assert_array_equal(args[1], array * 2)


def test_buffers_of_ranks_own() -> None:
    """Each rank takes those of the shared arguments and its own; none is copied on the way."""
    shared = np.arange(10_000)
    own = [tuple(np.full(10_000, 10 * rank + i) for i in range(rank)) for rank in range(4)]
    sent = message("name", (shared, "small"), {"k": np.zeros(9000)}, own)
    assert len(sent.buffers) == 2 + sum(range(4))
    for rank in range(4):
        _, args, kwargs = decode(sent, rank)
        np.testing.assert_array_equal(args[0], shared)
        assert args[1] == "small"
        assert [int(array[0]) for array in args[2:]] == [10 * rank + i for i in range(rank)]
        assert kwargs["k"].size == 9000
        assert np.shares_memory(args[0], shared)


def test_functions() -> None:
    offset = 5
    request = decode(message(lambda worker, x: worker + x + offset, (2,)))
    assert not isinstance(request.method, str)
    assert request.method(1, *request.args) == 8


def test_answers() -> None:
    for value in (None, StepOutput(step=3, slots=b"", tokens=pack([9])), {"a": [1]}):
        parts, buffers = encode_answer(CODEC, 77, value)
        assert not buffers
        data = memoryview(b"".join(bytes(part) for part in parts))
        call_id, kind = read_answer(data)
        assert call_id == 77
        assert CODEC.decode(kind, data[ANSWER_BYTES:]) == value


def test_failures() -> None:
    failure = CallFailed(7, True, FailureReport(role="Worker_TP1", rank=1, type="ValueError"))
    back = decode_failure(encode_failure(failure))
    assert back == failure


def test_what_cannot_be_pickled_is_the_callers_error() -> None:
    with pytest.raises(TypeError):
        CallEncoder(CODEC).encode("name", ((i for i in ()),), None, None)


def test_eight_workers_fit_in_64_megabytes() -> None:
    layout = SegmentLayout.of(8, ProcessConfig())
    assert layout.shared_bytes < 64_000_000
    assert layout.calls.largest_message > 4_000_000


@given(world_size=st.integers(1, 9), slots=st.integers(2, 5), slot_bytes=st.integers(64, 300))
def test_the_parts_of_a_segment_do_not_overlap(world_size: int, slots: int, slot_bytes: int) -> None:
    process = ProcessConfig(
        mq_slots=slots, mq_slot_bytes=slot_bytes, mq_answer_slots=slots + 1, mq_answer_slot_bytes=slot_bytes
    )
    layout = SegmentLayout.of(world_size, process)
    memory = memoryview(bytearray(layout.total_bytes))
    layout.init(memory)
    progress = layout.progress_of(memory)
    calls = RingWriter(layout.calls_of(memory))
    answers = [RingWriter(layout.answers_of(memory, rank)) for rank in range(world_size)]
    assert calls.try_write([b"c" * layout.calls.largest_message])
    for rank, ring in enumerate(answers):
        assert ring.try_write([bytes([rank]) * layout.answers.largest_message])
        progress.count_failure(rank)
        progress.end(rank, 2**40 + rank)
    assert progress.ended() == [2**40 + rank for rank in range(world_size)]
    assert progress.failures() == [1] * world_size
    for rank in range(world_size):
        call = RingReader(layout.calls_of(memory), rank).poll()
        answer = RingReader(layout.answers_of(memory, rank)).poll()
        assert call is not None
        assert answer is not None
        assert bytes(call.data) == b"c" * layout.calls.largest_message
        assert bytes(answer.data) == bytes([rank]) * layout.answers.largest_message
