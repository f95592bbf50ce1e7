"""Calls and answers as bytes: what goes through the broadcast ring and the answer rings.

::

    call    header | method name or pickled function | lengths of the ranks' own arguments | arguments | own arguments
    answer  header | value

The header of a call says its id, which rank answers (-1: all), how the rest is encoded. A call with one positional
argument and nothing else (``execute_model(plan)``) is encoded as that argument alone, so that a StepPlan is one msgspec
encoding and nothing is pickled on the step path. Arguments of ranks' own are encoded apart, and a rank decodes its
own only. Large buffers (arrays, tensors) are buffers of the message: first those of the shared arguments, then those of
each rank's own, in rank order.

Failures do not travel here but over the control connection, as :class:`CallFailed`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import cloudpickle
import msgspec

from drumline.errors import FailureReport
from drumline.plan.step import StepOutput, StepPlan
from drumline.processes.messages import encode
from drumline.transport.codec import FIRST_CODEC, CodecRegistry

ALL_RANKS = -1

PLAN_KIND = FIRST_CODEC
OUTPUT_KIND = FIRST_CODEC + 1

_CALL = struct.Struct("<QiBBHI")
_LENGTH = struct.Struct("<BIQ")  # kind, buffers, bytes
_TOTAL = struct.Struct("<IQ")  # buffers, bytes
_ANSWER = struct.Struct("<QB")

_SINGLE = 1  # the arguments are one positional argument
_FUNCTION = 2  # the method is a pickled function
_OWN = 4  # ranks have arguments of their own

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

Buffer = bytes | bytearray | memoryview


class CallFailed(msgspec.Struct, array_like=True):
    """Control connection, worker to owner: this rank failed in a call."""

    call_id: int
    owed: bool
    """This rank was to answer, and now will not."""
    report: FailureReport


_failed_decoder = msgspec.msgpack.Decoder(CallFailed)


def encode_failure(failure: CallFailed) -> bytes:
    """msgpack bytes of a CallFailed."""
    return encode(failure)


def decode_failure(data: Buffer) -> CallFailed:
    """The CallFailed in ``data``; msgspec.DecodeError if it is none."""
    return _failed_decoder.decode(data)


class Request(NamedTuple):
    """A decoded call."""

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def make_codec() -> CodecRegistry:
    """The codec of calls and answers: plans and outputs by msgspec, everything else by pickle.

    A plug-in registers its own types, kinds 32 and up, on the executor's ``codec`` and in its worker
    (``WorkerContext.codec``).
    """
    codec = CodecRegistry()
    codec.register_struct(PLAN_KIND, StepPlan)
    codec.register_struct(OUTPUT_KIND, StepOutput)
    return codec


class CallEncoder:
    """The executor's side."""

    def __init__(self, codec: CodecRegistry) -> None:
        self._codec = codec
        self._names: dict[str, bytes] = {}

    def encode(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        rank_args: Sequence[Sequence[Any]] | None,
    ) -> EncodedCall:
        """Encode everything but the id. Raises what pickle raises. Safe from any thread."""
        if isinstance(method, str):
            flags = 0
            name = self._names.get(method)
            if name is None:
                name = self._names[method] = method.encode()
        else:
            name = cloudpickle.dumps(method, protocol=5)
            flags = _FUNCTION
        if len(args) == 1 and not kwargs:
            flags |= _SINGLE
            kind, parts, buffers = self._codec.encode(args[0])
        else:
            kind, parts, buffers = self._codec.encode((tuple(args), dict(kwargs) if kwargs else None))
        if rank_args is None:
            return flags, kind, 0, name, parts, buffers
        lengths: list[Buffer] = []
        own: list[Buffer] = []
        all_buffers = list(buffers)
        for mine in rank_args:
            own_kind, own_parts, own_buffers = self._codec.encode(tuple(mine))
            lengths.append(_LENGTH.pack(own_kind, len(own_buffers), sum(map(_size, own_parts))))
            own.extend(own_parts)
            all_buffers.extend(own_buffers)
        body = (*lengths, _TOTAL.pack(len(buffers), sum(map(_size, parts))), *parts, *own)
        return flags | _OWN, kind, len(lengths), name, body, all_buffers


EncodedCall = tuple[int, int, int, bytes, Sequence[Buffer], Sequence[memoryview]]
"""A call but for its id, which it gets when it is sent: flags, kind, ranks with own arguments, name, the rest of its
parts, its buffers."""


_pack_call = _CALL.pack


def call_parts(encoded: EncodedCall, call_id: int, reply_rank: int) -> list[Buffer]:
    """The message but for its buffers. ``reply_rank``: who answers, or ALL_RANKS."""
    flags, kind, ranks, name, body, _ = encoded
    return [_pack_call(call_id, reply_rank, flags, kind, ranks, len(name)), name, *body]


def _size(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


_new = tuple.__new__  # a third of what a NamedTuple's own constructor takes
_unpack_call = _CALL.unpack_from
_HEAD_BYTES = _CALL.size


class CallHead(NamedTuple):
    """The first words of a call: all that is needed to say that it could not be decoded."""

    call_id: int
    reply_rank: int
    flags: int
    kind: int
    ranks: int
    name_bytes: int


def read_head(data: Buffer) -> CallHead:
    """The header of a call."""
    return _new(CallHead, _unpack_call(data))


class CallDecoder:
    """The worker's side."""

    def __init__(self, codec: CodecRegistry, rank: int) -> None:
        self._codec = codec
        self._rank = rank
        self._names: dict[bytes, str] = {}

    def decode(self, head: CallHead, data: memoryview, buffers: Sequence[memoryview] = ()) -> Request:
        """Method and arguments of this rank, which may keep ``buffers``. Raises whatever unpickling raises."""
        _, _, flags, kind, _, name_bytes = head
        at = _HEAD_BYTES + name_bytes
        name = bytes(data[_HEAD_BYTES:at])
        method: str | Callable[..., Any]
        if flags == _SINGLE:  # a step
            found = self._names.get(name) or self._names.setdefault(name, name.decode())
            return _new(Request, (found, (self._codec.decode(kind, data[at:], buffers),), _NO_KWARGS))
        if flags & _FUNCTION:
            method = cloudpickle.loads(name)
        else:
            method = self._names.get(name) or self._names.setdefault(name, name.decode())
        if not flags & _OWN:
            args, kwargs = self._arguments(head, data[at:], buffers)
            return Request(method, args, kwargs)
        lengths = [_LENGTH.unpack_from(data, at + i * _LENGTH.size) for i in range(head.ranks)]
        at += head.ranks * _LENGTH.size
        n_shared, shared = _TOTAL.unpack_from(data, at)
        at += _TOTAL.size
        args, kwargs = self._arguments(head, data[at : at + shared], buffers[:n_shared])
        before = lengths[: self._rank]
        at += shared + sum(length for _, _, length in before)
        first = n_shared + sum(count for _, count, _ in before)
        kind, count, length = lengths[self._rank]
        own: tuple[Any, ...] = self._codec.decode(kind, data[at : at + length], buffers[first : first + count])
        return Request(method, (*args, *own), kwargs)

    def _arguments(
        self, head: CallHead, data: memoryview, buffers: Sequence[memoryview]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        found = self._codec.decode(head.kind, data, buffers)
        if head.flags & _SINGLE:
            return (found,), {}
        args, kwargs = found
        return args, kwargs or {}


_pack_answer = _ANSWER.pack


def encode_answer(codec: CodecRegistry, call_id: int, value: Any) -> tuple[list[Buffer], Sequence[memoryview]]:
    """Parts and buffers of an answer. Raises what pickle raises."""
    kind, parts, buffers = codec.encode(value)
    return [_pack_answer(call_id, kind), *parts], buffers


ANSWER_BYTES = _ANSWER.size
"""Where the value of an answer begins; ``codec.decode`` makes it of the rest of the bytes and of the buffers."""
_unpack_answer = _ANSWER.unpack_from


def read_answer(data: Buffer) -> tuple[int, int]:
    """Which call an answer belongs to, and the kind of its value."""
    call_id, kind = _unpack_answer(data)
    return call_id, kind
