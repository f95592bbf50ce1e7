from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.plan.kv import KVConfig, KVSpec
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import (
    BY_VALUE,
    SlotStart,
    StepOutput,
    StepPlan,
    TokenLogprobs,
    decode_output,
    decode_plan,
    encode,
    ints,
    pack,
)

int32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(int32))
def test_packed_integers_come_back(values: list[int]):
    assert ints(pack(values)).tolist() == values
    assert ints(memoryview(pack(np.array(values, dtype=np.int32)))).tolist() == values


def test_packing_refuses_what_is_too_large():
    with pytest.raises(OverflowError):
        pack([2**31])


def test_packed_integers_are_little_endian_and_read_only():
    assert pack([1]) == b"\x01\0\0\0"
    with pytest.raises(ValueError, match="read-only"):
        ints(pack([1]))[0] = 2


def test_plan_comes_back():
    plan = StepPlan(
        step=7,
        starts=[SlotStart(3, "request", pack([5, 6, 7]), 2, SlotSampling(temperature=0.5, seed=2**64 - 1, logprobs=2))],
        freed=pack([1]),
        slots=pack([3, 4]),
        num_tokens=pack([3, 1]),
        num_computed=pack([0, 9]),
        token_source=pack([BY_VALUE, 6]),
        block_counts=pack([1, 0]),
        blocks=pack([11]),
        sample=pack([1, 1]),
    )
    assert decode_plan(encode(plan)) == plan
    assert decode_plan(memoryview(encode(plan))) == plan
    assert plan.num_rows == 2


def test_output_comes_back():
    output = StepOutput(7, pack([3]), pack([42]), [TokenLogprobs(-0.5, 1, [42, 7], [-0.5, -1.5]), None])
    assert decode_output(encode(output)) == output


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\x01\x02\x03", encode(StepOutput(1, b"", b""))[:-2]])
def test_garbage_is_a_decode_error(garbage: bytes):
    with pytest.raises(msgspec.DecodeError):
        decode_plan(garbage)


def test_a_plan_of_256_rows_is_small():
    """Packed arrays, not dictionaries: dispatch of a decode step must cost microseconds."""
    numbers = pack(list(range(256)))
    plan = StepPlan(
        step=1,
        slots=numbers,
        num_tokens=numbers,
        num_computed=numbers,
        token_source=numbers,
        block_counts=numbers,
        sample=numbers,
    )
    assert len(encode(plan)) < 256 * 4 * 6 + 64


def test_kv_messages_come_back():
    spec = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16, bytes_per_block=2048)
    config = KVConfig(num_blocks=3, block_size=16)
    for message in (spec, config):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
