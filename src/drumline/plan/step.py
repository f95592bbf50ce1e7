"""StepPlan: what the scheduler decided for one step, and StepOutput: what the output rank answers.

Requests are small integer slots. Workers keep the state of each slot (its tokens, its block table, its sampling
parameters); a plan says what changed. Per-request numbers are packed little-endian int32 arrays in ``bytes``, since
an msgspec struct of packed arrays costs a hundredth of a pickled dict. ``ints``/``pack`` convert.

Order inside one plan: first ``freed`` slots are dropped, then ``starts`` fill slots, then blocks are appended to the
tables of the batch, then the forward runs over the batch in the order of ``slots``. In each layer the keys and values
of the whole batch are written before any row reads: a row may share a block that an earlier row of the same plan fills.

The input token of a row is in the slot's own tokens (``SlotStart.tokens``) or was sampled by the step that
``token_source`` names, which is the last one that sampled for this slot; its value need never travel to the workers.
A request that was preempted starts anew, with what it had sampled as part of ``SlotStart.tokens``.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from drumline.plan.sampling import SlotSampling

Ints = npt.NDArray[np.int32]

_NATIVE = sys.byteorder == "little" and array("i").itemsize == 4

BY_VALUE = -1
"""``token_source`` of a row whose input tokens stand in the slot's token buffer already (prompt, or recomputed)."""

_INT32 = np.dtype("<i4")


def pack(values: Sequence[int] | Ints) -> bytes:
    """Pack integers as little-endian int32. OverflowError if one does not fit."""
    if _NATIVE and isinstance(values, list | tuple):
        return array("i", values).tobytes()  # a third of what numpy takes for 256 numbers
    if _NATIVE and isinstance(values, np.ndarray) and values.dtype == np.int32:
        return values.tobytes()
    return np.asarray(values, _INT32).tobytes()


def ints(data: bytes | memoryview) -> Ints:
    """A read-only int32 array over packed integers, without a copy."""
    return np.frombuffer(data, _INT32)


class SlotStart(msgspec.Struct, array_like=True, gc=False):
    """A request that enters a slot, or comes back to one after a preemption."""

    slot: int
    request_id: str
    """For logs and reports only."""
    tokens: bytes
    """All known tokens, packed int32: the prompt, then outputs so far (after a preemption)."""
    num_prompt: int
    """How many of ``tokens`` are the prompt; the first sampled token has output index ``len(tokens) - num_prompt``."""
    sampling: SlotSampling


class StepPlan(msgspec.Struct, array_like=True, gc=False):
    """One step. With B rows (requests) in the batch; all arrays are packed int32.

    The row of slot s computes the tokens at positions ``num_computed .. num_computed + num_tokens - 1`` of the slot.
    """

    step: int
    starts: list[SlotStart] = []
    freed: bytes = b""
    """Slots dropped before anything else of this plan. They, and their blocks, may be used again in this plan."""
    slots: bytes = b""
    """[B] slot of each row."""
    num_tokens: bytes = b""
    """[B] tokens computed in this step."""
    num_computed: bytes = b""
    """[B] tokens whose KV is in the cache before this step."""
    token_source: bytes = b""
    """[B] BY_VALUE, or the step that sampled this row's (only) input token."""
    block_counts: bytes = b""
    """[B] number of blocks appended to each row's table in this step."""
    blocks: bytes = b""
    """[sum of block_counts] ids of those blocks."""
    sample: bytes = b""
    """[B] 1 where the row's last token is the last known one, so that a token is sampled, else 0."""
    defer_sampling: bool = False
    """execute_model answers None; sample_tokens(step, grammar) gives the output."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.slots) // 4


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities (of the model's own distribution, before temperature) at one sampled position."""

    logprob: float
    """Of the sampled token."""
    rank: int
    """Place of the sampled token in the vocabulary, 1 the most likely."""
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of tokens of a slot's prompt. After a preemption the same ones come again."""

    slot: int
    first: int
    """Position in the prompt of the first token; at least 1, since nothing is before token 0."""
    rows: list[TokenLogprobs]
    """``logprob`` and ``rank`` are those of the prompt's own token."""


class StepOutput(msgspec.Struct, array_like=True, gc=False):
    """What the output rank answers: one token for each row with ``sample`` 1, in the order of the rows."""

    step: int
    slots: bytes
    """[S] packed int32."""
    tokens: bytes
    """[S] packed int32."""
    logprobs: list[TokenLogprobs | None] = []
    """[S], or empty if no row asked."""
    prompt_logprobs: list[PromptLogprobs] = []
    """One for each row that asked and computed tokens of its prompt, in the order of the rows."""
    forward_s: float = 0.0
    """Seconds that the output rank spent in the forward (on devices that work on by themselves: on starting it)."""
    sample_s: float = 0.0
    """Seconds that it spent on sampling, the wait for the device and for other ranks included."""


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_output_decoder = msgspec.msgpack.Decoder(StepOutput)


def encode(message: StepPlan | StepOutput) -> bytes:
    """msgpack bytes of a plan or output."""
    return _encoder.encode(message)


def decode_plan(data: bytes | memoryview) -> StepPlan:
    """The plan in ``data``; msgspec.DecodeError if it is none."""
    return _plan_decoder.decode(data)


def decode_output(data: bytes | memoryview) -> StepOutput:
    """The output in ``data``; msgspec.DecodeError if it is none."""
    return _output_decoder.decode(data)


Grammar = Any
"""Grammar masks of a step; None until structured output exists."""
