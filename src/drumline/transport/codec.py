"""Objects to message parts and back, by type.

::

    encode(obj) -> kind, parts, buffers          decode(kind, data, buffers) -> obj
                   |      |      large, each placed by the transport (an arena, frames of its own)
                   |      small: one after the other they are ``data``, good until the message is released
                   how it was made, one byte

Kinds:

* 0: pickle protocol 5, for everything that has no codec.
* 1: the same with buffers apart (arrays, tensors, memoryviews, large bytes): see below.
* 2: kind 0 or 1 whose ``buffers`` were put into ``data`` too, for channels that carry nothing but bytes
  (:meth:`CodecRegistry.encode_inline`).
* 3: ``bytes`` of less than 256 KiB as they are.
* 4: None, bool, int and float by marshal, which does in a tenth of the time what pickle does. (Not what holds other
  objects: marshal takes everything that has a buffer for bytes.)
* 16 to 255: registered codecs. Both ends register the same kind for the same class.

**Buffers.** What pickle would copy is taken out of it. A numpy array or torch CPU tensor is rebuilt over the buffer
that the transport hands over, so a large one is never copied on the reading side and lives as long as anything refers
to it; a small one lies in ``data`` and is copied, which is cheaper. Either way it arrives **read-only**, whatever its
size: other readers share the memory. Writing to an array raises ValueError. Torch knows no read-only memory, so tensors
arrive as inference tensors: recording one for autograd raises RuntimeError and says to clone it, and so does writing to
one outside ``torch.inference_mode()``, but only after torch has written: to a copy where the tensor is small, and to
pages without the right to write where it is large, which ends the process (SIGSEGV). So a received tensor must not be
written to. Parameters arrive as copies, since they exist to be changed. Arrays that are not contiguous are made so. A
memoryview or ``pickle.PickleBuffer`` arrives as a read-only memoryview.

Large ``bytes`` and ``str`` are objects with memory of their own, so they are copied once, straight from the
transport's memory into the new object. Pickle writes one of 64 KiB or more to its file as it is: our "file" is a list
of pieces, so nothing is copied on the writing side either. (A ``bytes`` that shall not be copied goes as a
memoryview.)

**Torch is never imported here** unless a tensor arrives: its types are looked up in ``sys.modules``, so a process that
does not use torch stays without it.

**Functions**, and objects whose class or function lives in ``__main__`` (which is another module in the process that
reads), go by value (cloudpickle), and so does what plain pickle cannot do, such as lambdas; all of it is read by plain
pickle.

Pickle runs code of whoever wrote it. That is right between processes of one run that have authenticated each other
(memory that only they hold; CURVE keys made for the run), and only there.

What is decoded never refers to ``data``, so that the message can be released at once; it may refer to ``buffers``.

**Picklers are used again**, since to make one with a dispatch table takes longer than a small message. One that was
used for a large message is not kept: its memo would be cleared, at the size it has grown to, for every later one.

Rejected: ``pickle.Pickler.reducer_override`` (a Python call for each object; a dispatch table costs nothing for those
that are not in it); ``torch.frombuffer`` (warns about memory that is not writable, in every process); a thread-wide
``warnings.catch_warnings`` (not safe with threads); torch's own copy-on-write storage (not over foreign memory).
"""

from __future__ import annotations

import collections
import copyreg
import ctypes
import functools
import importlib
import marshal
import math
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from drumline.errors import TransportError
from drumline.transport.ring import Part

PICKLE = 0
PICKLE_BUFFERS = 1
INLINED = 2
BYTES = 3
SCALAR = 4
FIRST_CODEC = 16
"""First kind for registered codecs; smaller ones are this module's."""
BUFFER_MIN = 1 << 14
"""Bytes from which on a buffer is handed to the transport apart; smaller ones are copied into ``data``."""

Encoded = tuple[int, Sequence[Part], Sequence[memoryview]]
"""Kind, parts, buffers. They may refer to the object's own memory until they are written."""

_Encode = Callable[[Any], Sequence[Part]]
_Decode = Callable[[memoryview], Any]
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type)
_DATA = frozenset({dict, list, tuple, str})
_SCALARS = frozenset({int, float, bool, type(None)})
_HEAD = struct.Struct("=II")
_INLINED_HEAD = struct.Struct("=BI")
_PIECE_MIN = 1 << 18
"""Pieces of a pickle from this size on are single bytes or str objects: pickle's frames end at 64 KiB and hold no
object of 64 KiB, so they have less than 128 KiB."""
_GLOBAL = 0x93
_KEPT_MOST = 2048
"""A pickler that wrote more bytes than this is not used again."""
_Dispatch = dict[type, Callable[[Any], Any]]
_ITEMS: dict[str, Any] = {item._type_: item for item in (
    ctypes.c_bool, ctypes.c_char, ctypes.c_byte, ctypes.c_ubyte, ctypes.c_short, ctypes.c_ushort, ctypes.c_int,
    ctypes.c_uint, ctypes.c_long, ctypes.c_ulong, ctypes.c_float, ctypes.c_double, ctypes.c_void_p,
)} | {"q": ctypes.c_longlong, "Q": ctypes.c_ulonglong, "n": ctypes.c_ssize_t, "N": ctypes.c_size_t}  # fmt: skip
"""Items of memoryviews by their formats."""


class CodecRegistry:
    """Codecs by class (exact class, not subclasses) and kind. Register before use; then it may be shared by threads."""

    def __init__(self) -> None:
        self._encoders: dict[type, tuple[int, _Encode]] = {}
        self._decoders: dict[int, _Decode] = {PICKLE: pickle.loads, BYTES: bytes, SCALAR: marshal.loads}

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

    def encode(self, obj: Any) -> Encoded:
        """Kind, parts and large buffers (contiguous bytes) of ``obj``.

        They may refer to its memory: write them before anyone changes it. Raises what pickling raises (TypeError,
        AttributeError, pickle.PicklingError) for what cannot be sent.
        """
        found = self._encoders.get(type(obj))
        if found is not None:
            return found[0], found[1](obj), ()
        if type(obj) in _SCALARS:
            return SCALAR, (marshal.dumps(obj),), ()
        if type(obj) is bytes and len(obj) < _PIECE_MIN:
            return BYTES, (obj,), ()
        return _encode_pickle(obj)

    def encode_inline(self, obj: Any) -> tuple[int, Sequence[Part]]:
        """Like :meth:`encode`, for a channel that carries no buffers: they are parts, and copies when decoded."""
        return inline(self.encode(obj))

    def decode(self, kind: int, data: memoryview | bytes, buffers: Sequence[memoryview] = ()) -> Any:
        """The object; TransportError if nobody registered ``kind`` here.

        ``data`` is what the parts were, ``buffers`` those of the message, in order (read-only; the object may keep
        them). Raises what unpickling raises.
        """
        if type(data) is not memoryview:
            data = memoryview(data)
        decode = self._decoders.get(kind)
        if decode is not None:
            return decode(data)
        if kind == PICKLE_BUFFERS:
            return _decode_buffers(data, buffers)
        if kind == INLINED:
            return self.decode(*_take_inlined(data))
        raise TransportError(f"no codec for message kind {kind} in this process; both ends must register it")


def inline(encoded: Encoded) -> tuple[int, Sequence[Part]]:
    """Kind and parts of a message whose buffers are parts as well; without buffers it stays as it is."""
    kind, parts, buffers = encoded
    if not buffers:
        return kind, parts
    sizes = struct.pack(f"={len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
    return INLINED, (_INLINED_HEAD.pack(kind, len(buffers)), sizes, *parts, *buffers)


def _take_inlined(data: memoryview) -> tuple[int, memoryview, list[memoryview]]:
    kind, count = _INLINED_HEAD.unpack_from(data)
    sizes = struct.unpack_from(f"={count}Q", data, _INLINED_HEAD.size)
    at = data.nbytes - sum(sizes)
    body = data[_INLINED_HEAD.size + 8 * count : at]
    buffers = []
    for size in sizes:
        buffers.append(memoryview(bytes(data[at : at + size])))
        at += size
    return kind, body, buffers


# Pickle with buffers. ``data`` is the head (how many pieces of the pickle, how many buffers of it; for each its size,
# shifted left, and in the last bit whether it is apart), and then what is not apart, in that order.


def _encode_pickle(obj: Any) -> Encoded:
    if type(obj) not in _DATA and isinstance(obj, _FUNCTIONS):
        return _parts_of(*_dump_by_value(obj))
    try:
        kept = _kept.pop()
        if kept.key != (len(copyreg.dispatch_table), len(sys.modules)):
            kept = _Pickling()
    except IndexError:  # another thread, or what this thread is pickling, is inside
        kept = _Pickling()
    pieces, views = kept.pieces, kept.views
    try:
        kept.dump(obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _parts_of(*_dump_by_value(obj))
    if len(pieces) == 1 and not views:
        piece = pieces[0]
        if len(piece) <= _KEPT_MOST:
            pieces.clear()
            kept.clear_memo()
            _kept.append(kept)
        if _GLOBAL in piece and b"__main__" in piece:
            return _parts_of(*_dump_by_value(obj))
        return PICKLE, (piece,), ()
    if _names_main(pieces):
        return _parts_of(*_dump_by_value(obj))
    return _parts_of(pieces, views)


class _Pickling:
    """A pickler, where it writes to, and for which state of the process it was made. For one thread at a time."""

    __slots__ = ("clear_memo", "dump", "key", "pieces", "views")

    def __init__(self) -> None:
        key = (len(copyreg.dispatch_table), len(sys.modules))  # one look each, where a look for a name takes several
        table = _dispatch()
        self.key = key if table is _dispatch_table else None  # None: a module is just being imported
        self.pieces: list[Part] = []
        self.views: list[pickle.PickleBuffer] = []
        pickler = pickle.Pickler(_Sink(self.pieces.append), 5, buffer_callback=self.views.append)
        pickler.dispatch_table = table
        self.dump = pickler.dump
        self.clear_memo = pickler.clear_memo


_kept: list[_Pickling] = []
"""Picklers that nobody uses now. ``pop`` and ``append`` are atomic under the GIL."""


def _parts_of(pieces: list[Part], views: list[pickle.PickleBuffer]) -> Encoded:
    """The message of a pickle in pieces and the buffers that were taken out of it."""
    if not views and (len(pieces) == 1 or max(map(len, pieces)) < _PIECE_MIN):
        return PICKLE, pieces, ()
    sizes: list[int] = []
    apart: list[memoryview] = []
    parts: list[Part] = [b""]
    small = 0
    for piece in pieces:
        if len(piece) < _PIECE_MIN:
            parts.append(piece)
            small += len(piece)
            continue
        if small:
            sizes.append(small << 1)
            small = 0
        sizes.append(len(piece) << 1 | 1)
        apart.append(memoryview(piece))
    if small:
        sizes.append(small << 1)
    n_pieces = len(sizes)
    for buffer in views:
        raw = buffer.raw()
        is_apart = raw.nbytes >= BUFFER_MIN
        sizes.append(raw.nbytes << 1 | is_apart)
        (apart if is_apart else parts).append(raw)
    parts[0] = struct.pack(f"=II{len(sizes)}Q", n_pieces, len(sizes) - n_pieces, *sizes)
    return PICKLE_BUFFERS, parts, apart


def _decode_buffers(data: memoryview, buffers: Sequence[memoryview]) -> Any:
    n_pieces, n_views = _HEAD.unpack_from(data)
    count = n_pieces + n_views
    sizes = struct.unpack_from(f"={count}Q", data, _HEAD.size)
    at = _HEAD.size + 8 * count
    given = iter(buffers)
    pieces: list[memoryview] = []
    views: list[memoryview] = []
    for number, size in enumerate(sizes):
        size, apart = size >> 1, size & 1
        if apart:
            found = _next_buffer(given, size)
        else:
            found = data[at : at + size]
            at += size
        if number < n_pieces:
            pieces.append(found)
        else:
            views.append(found if apart else memoryview(bytes(found)))
    if n_pieces == 1:
        return pickle.loads(pieces[0], buffers=views)
    return pickle.Unpickler(_Pieces(pieces), buffers=views).load()


def _next_buffer(given: Iterator[memoryview], size: int) -> memoryview:
    buffer = next(given, None)
    if buffer is None or buffer.nbytes != size:
        there = "none is left" if buffer is None else f"the next one has {buffer.nbytes}"
        raise TransportError(f"this message needs a buffer of {size} bytes, and {there}: hand over all of its buffers")
    return buffer


class _Pieces:
    """A pickle that lies in several pieces, as the file that an unpickler reads: large objects are copied once."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = list(reversed(pieces))

    def readinto(self, target: memoryview) -> int:
        done, wanted = 0, len(target)
        while done < wanted and self._pieces:
            piece = self._pieces.pop()
            step = min(len(piece), wanted - done)
            target[done : done + step] = piece[:step]
            done += step
            if step < len(piece):
                self._pieces.append(piece[step:])
        return done

    def read(self, size: int) -> bytes:
        target = bytearray(size)
        return bytes(target[: self.readinto(memoryview(target))])

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
        return bytes(line)


class _Sink:
    """What a pickler takes for a file: ``write`` collects the pieces."""

    __slots__ = ("write",)

    def __init__(self, write: Callable[[Any], None]) -> None:
        self.write = write


def _dump_by_value(obj: Any) -> tuple[list[Part], list[pickle.PickleBuffer]]:
    """Pickle with code by value, since the reader may not have it: pieces and buffers."""
    import cloudpickle  # here, because it is rarely needed

    pieces: list[Part] = []
    views: list[pickle.PickleBuffer] = []
    by_value = cloudpickle.Pickler(_Sink(pieces.append), 5, buffer_callback=views.append)
    by_value.dispatch_table = collections.ChainMap(*by_value.dispatch_table.maps, _dispatch())
    by_value.dump(obj)
    return pieces, views


def _names_main(pieces: Sequence[Part]) -> bool:
    """Whether it names something of ``__main__``: only then has it the opcode that finds a name in a module, which
    is looked for first, since that is quick."""
    small = [piece for piece in pieces if len(pieces) == 1 or len(piece) < _PIECE_MIN]
    return any(_GLOBAL in piece for piece in small) and any(b"__main__" in piece for piece in small)


_dispatch_key: tuple[int, bool, bool] | None = None
_dispatch_table: _Dispatch = {}


def _dispatch() -> _Dispatch:
    """How objects of some types are taken apart: ours and those of ``copyreg``, which others may add to at any time."""
    global _dispatch_key, _dispatch_table
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    key = (len(copyreg.dispatch_table), numpy is not None, torch is not None)
    if key != _dispatch_key:
        table: _Dispatch = {memoryview: _reduce_view, **copyreg.dispatch_table}
        try:
            if numpy is not None:
                table.setdefault(numpy.ndarray, _reduce_array)
            if torch is not None:
                table.setdefault(torch.Tensor, _reduce_tensor)
                table.setdefault(torch.nn.Parameter, _reduce_parameter)
        except AttributeError:  # another thread is importing it: there are no objects of it yet
            return table
        _dispatch_table = table
        _dispatch_key = key
    return _dispatch_table


def _reduce_view(view: memoryview) -> Any:
    raw = pickle.PickleBuffer(view if view.contiguous else view.tobytes())
    return _rebuild_view, (raw, view.format, view.shape)


def _rebuild_view(buffer: Any, form: str, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(buffer)
    if form == "B" and len(shape) == 1:
        return view
    return view.cast(form, shape) if 0 not in shape else _empty_view(form, shape)  # type: ignore[call-overload]


def _empty_view(form: str, shape: tuple[int, ...]) -> memoryview:
    """A view without items, which ``cast`` refuses to make: a slice of one that has some, or an array of ctypes."""
    if 0 not in shape[1:]:
        one = memoryview(bytes(struct.calcsize(form) * math.prod(shape[1:])))
        return one.cast(form, (1, *shape[1:]))[:0]  # type: ignore[call-overload,no-any-return]
    kind: Any = _ITEMS[form[-1]]
    for length in reversed(shape):
        kind *= length
    return memoryview(kind()).toreadonly()


def _reduce_array(array: Any) -> Any:
    """Plain numbers as a call of numpy.ndarray, which takes half the time of numpy's way; all others numpy's way."""
    flags, dtype = array.flags, array.dtype
    if not flags.forc and not dtype.hasobject:
        array = array.copy(order="C")  # else pickle copies it twice, and the reader gets one that may be written to
        flags = array.flags
    if dtype.kind not in "biufc" or not dtype.isnative:
        return array.__reduce_ex__(5)
    order = "C" if flags.c_contiguous else "F"
    return type(array), (array.shape, dtype.str, pickle.PickleBuffer(array), 0, None, order)


def _reduce_tensor(tensor: Any) -> Any:
    """Plain CPU tensors by their bytes; all others (on devices, sparse, quantised, with autograd) by torch's pickle."""
    torch = sys.modules["torch"]
    plain = (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
        and not tensor.__dict__
    )
    if not plain:
        return tensor.__reduce_ex__(5)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _rebuild_tensor, (pickle.PickleBuffer(raw), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _reduce_parameter(parameter: Any) -> Any:
    """Parameters exist to be changed: they arrive as copies."""
    if parameter.__dict__ or parameter._backward_hooks:
        return parameter.__reduce_ex__(5)
    return _rebuild_parameter, (parameter.data, parameter.requires_grad)


def _rebuild_parameter(data: Any, requires_grad: bool) -> Any:
    return sys.modules["torch"].nn.Parameter(data.clone(), requires_grad)


class _Memory:
    """Memory as numpy takes it without asking whether it may be written; keeps what it belongs to."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, buffer: Any, numpy: Any) -> None:
        self.owner = numpy.frombuffer(buffer, numpy.uint8)
        self.__array_interface__ = self.owner.__array_interface__ | {"data": (self.owner.ctypes.data, False)}


def _rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """An inference tensor over ``buffer``, without torch's warning about memory that is not writable."""
    torch: Any = importlib.import_module("torch")  # whoever is sent a tensor has torch; nobody else comes here
    numpy: Any = importlib.import_module("numpy")
    with torch.inference_mode():
        if not memoryview(buffer).nbytes:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        flat = torch.from_numpy(numpy.asarray(_Memory(buffer, numpy)))
        return flat.view(getattr(torch, dtype)).view(shape)
