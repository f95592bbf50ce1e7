"""Objects to message parts and back, by type.

Each message has a kind (one byte) that says how its payload was made:

* 0, 1: pickle protocol 5, for everything that has no codec. Large buffers (numpy arrays and whatever else offers them)
  are parts of their own (kind 1), copied once into the ring and once out of it. Functions, and objects whose class or
  function lives in ``__main__`` (which is another module in the process that reads), go by value (cloudpickle), and so
  does what plain pickle cannot do, such as lambdas; all of it is read by plain pickle.
* 16 to 255: registered codecs. Both ends register the same kind for the same class.

Pickle runs code of whoever wrote it. That is right between processes of one program over memory that only they hold,
and only there: nothing from a network socket may come here.

What is decoded never refers to the message's memory, so that it can be released at once.
"""

from __future__ import annotations

import functools
import pickle
import struct
import types
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from drumline.errors import TransportError
from drumline.transport.ring import Part

PICKLE = 0
PICKLE_BUFFERS = 1
FIRST_CODEC = 16
"""First kind for registered codecs; smaller ones are this module's."""

_Encode = Callable[[Any], Sequence[Part]]
_Decode = Callable[[memoryview], Any]
_COUNT = struct.Struct("=I")
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type)
_BUFFER_MIN = 1024  # below, a part of its own costs more than copying


class CodecRegistry:
    """Codecs by class (exact class, not subclasses) and kind. Register before use; then it may be shared by threads."""

    def __init__(self) -> None:
        self._encoders: dict[type, tuple[int, _Encode]] = {}
        self._decoders: dict[int, _Decode] = {PICKLE: pickle.loads, PICKLE_BUFFERS: _decode_buffers}

    def register(self, kind: int, cls: type, encode: _Encode, decode: _Decode) -> None:
        """Use these two for objects whose class is ``cls``. ``decode`` gets a memoryview and must not keep it."""
        if not FIRST_CODEC <= kind <= 255:
            raise ValueError(f"codec kinds are {FIRST_CODEC} to 255, not {kind}")
        if kind in self._decoders or cls in self._encoders:
            raise ValueError(f"kind {kind} or class {cls.__name__} has a codec already")
        self._encoders[cls] = (kind, encode)
        self._decoders[kind] = decode

    def register_struct(self, kind: int, cls: type) -> None:
        """Use msgspec's msgpack for ``cls`` (a Struct, dataclass ...)."""
        encoder = msgspec.msgpack.Encoder()
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(cls)
        self.register(kind, cls, lambda obj: (encoder.encode(obj),), decoder.decode)

    def encode(self, obj: Any) -> tuple[int, Sequence[Part]]:
        """Kind and parts of ``obj``. The parts may refer to its buffers until they are written."""
        found = self._encoders.get(type(obj))
        if found is not None:
            return found[0], found[1](obj)
        return _encode_pickle(obj)

    def decode(self, kind: int, data: memoryview | bytes) -> Any:
        """The object; TransportError if nobody registered ``kind`` here."""
        decode = self._decoders.get(kind)
        if decode is None:
            raise TransportError(f"no codec for message kind {kind} in this process; both ends must register it")
        return decode(data if type(data) is memoryview else memoryview(data))


def _encode_pickle(obj: Any) -> tuple[int, Sequence[Part]]:
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < _BUFFER_MIN:
            return True
        buffers.append(raw)
        return False

    data = _dumps(obj, keep_in_band, buffers)
    if not buffers:
        return PICKLE, (data,)
    sizes = struct.pack(f"={len(buffers) + 2}I", len(buffers), len(data), *(b.nbytes for b in buffers))
    return PICKLE_BUFFERS, (sizes, data, *buffers)


def _dumps(obj: Any, callback: Callable[[pickle.PickleBuffer], bool], buffers: list[memoryview]) -> bytes:
    if not isinstance(obj, _FUNCTIONS):
        try:
            data = pickle.dumps(obj, protocol=5, buffer_callback=callback)
            if b"__main__" not in data:
                return data
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
        buffers.clear()
    import cloudpickle  # here, because it is rarely needed

    result: bytes = cloudpickle.dumps(obj, protocol=5, buffer_callback=callback)
    return result


def _decode_buffers(data: memoryview) -> Any:
    count = _COUNT.unpack_from(data)[0]
    sizes = struct.unpack_from(f"={count + 1}I", data, 4)
    at = 4 * (count + 2)
    pieces = []
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return pickle.loads(pieces[0], buffers=[bytearray(piece) for piece in pieces[1:]])
