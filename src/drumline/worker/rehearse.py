"""Rehearsals of a step's call and answer, for both ends of an executor's rings. See transport/rehearsal.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.plan.step import StepOutput, StepPlan, pack
from drumline.transport.codec import CodecRegistry
from drumline.transport.rehearsal import Decode, Rehearsal
from drumline.worker.wire import ALL_RANKS, CallDecoder, CallEncoder, call_parts, encode_answer, read_head

_ONE = pack([1])
PLAN = StepPlan(
    step=1,
    slots=_ONE,
    num_tokens=_ONE,
    num_computed=_ONE,
    token_source=_ONE,
    block_counts=_ONE,
    blocks=_ONE,
    sample=_ONE,
)
OUTPUT = StepOutput(step=1, slots=_ONE, tokens=_ONE)


def rehearse_call(codec: CodecRegistry, rank: int) -> Rehearsal:
    """What a worker does with a step: decode the call, encode the answer."""
    encoded = CallEncoder(codec).encode("execute_model", (PLAN,), None, None)
    call = b"".join(call_parts(encoded, 1, ALL_RANKS))
    decoder = CallDecoder(codec, rank)

    def encode() -> tuple[int, bytes]:
        parts, _ = encode_answer(codec, 1, OUTPUT)
        b"".join(parts)
        return 0, call

    def decode(_: int, data: memoryview, buffers: Sequence[memoryview]) -> Any:
        return decoder.decode(read_head(data), data, buffers)

    return Rehearsal(encode, decode)


def rehearse_answer(codec: CodecRegistry, decode: Decode) -> Rehearsal:
    """What the executor does with an answer: decode it."""
    parts, _ = encode_answer(codec, 1, OUTPUT)
    answer = b"".join(parts)
    return Rehearsal(lambda: (0, answer), decode)
