"""Objects to parts and back."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import gc
import math
import pickle
import random
import subprocess
import sys
import types
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import TransportError
from drumline.transport.codec import PICKLE_BUFFERS, CodecRegistry


class Point(msgspec.Struct, array_like=True):
    x: int
    data: bytes


def round_trip(obj: Any, registry: CodecRegistry | None = None, *, inline: bool = True) -> Any:
    """As a channel does it. Buffers travel as parts (``inline``), or apart as read-only views of another's memory."""
    registry = registry or CodecRegistry()
    buffers: list[memoryview] = []
    if inline:
        kind, parts = registry.encode_inline(obj)
    else:
        kind, parts, apart = registry.encode(obj)
        buffers = [memoryview(bytes(buffer)) for buffer in apart]
    payload = bytearray(b"".join(parts))
    view = memoryview(payload)
    result = registry.decode(kind, view, buffers)
    view.release()  # BufferError if the result still refers to it
    payload[:] = bytes(len(payload))
    return result


both = pytest.mark.parametrize("inline", [True, False], ids=["inline", "apart"])


simple = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=20,
)


@given(simple)
@settings(max_examples=100, deadline=None)
def test_plain_objects(obj: Any) -> None:
    assert round_trip(obj) == obj


def test_registered_struct() -> None:
    registry = CodecRegistry()
    registry.register_struct(16, Point)
    kind, _, _ = registry.encode(Point(3, b"abc"))
    assert kind == 16
    assert round_trip(Point(3, b"abc"), registry) == Point(3, b"abc")


def test_registered_functions() -> None:
    registry = CodecRegistry()
    registry.register(200, complex, lambda c: (str(c).encode(),), lambda data: complex(bytes(data).decode()))
    assert registry.encode(1 + 2j)[0] == 200
    assert round_trip(1 + 2j, registry) == 1 + 2j


def test_wrong_registrations() -> None:
    registry = CodecRegistry()
    registry.register_struct(16, Point)
    with pytest.raises(ValueError, match="16 to 255"):
        registry.register_struct(3, complex)
    with pytest.raises(ValueError, match="already"):
        registry.register_struct(16, complex)
    with pytest.raises(ValueError, match="already"):
        registry.register_struct(17, Point)
    with pytest.raises(TransportError, match="no codec for message kind 99"):
        registry.decode(99, b"")


@both
def test_arrays_arrive_read_only_whatever_their_size(inline: bool) -> None:
    big, small = np.arange(10_000, dtype=np.int32), np.arange(3)
    result = round_trip({"big": big, "small": small, "again": big}, inline=inline)
    assert (result["big"] == big).all()
    assert (result["small"] == small).all()
    assert result["again"] is result["big"]
    for array in result.values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    assert result["big"].copy().flags.writeable


def test_large_buffers_are_handed_over_and_never_copied() -> None:
    registry = CodecRegistry()
    big, small = np.arange(100_000, dtype=np.int32), np.arange(3)
    kind, parts, buffers = registry.encode([big, small])
    assert kind == PICKLE_BUFFERS
    assert [buffer.nbytes for buffer in buffers] == [big.nbytes]
    assert sum(map(len, parts)) < 400
    assert np.shares_memory(np.frombuffer(buffers[0], np.int32), big)
    memory = bytearray(buffers[0])
    result = registry.decode(kind, b"".join(parts), [memoryview(memory).toreadonly()])
    assert np.shares_memory(result[0], np.frombuffer(memory, np.int32))
    with pytest.raises(TransportError, match="needs a buffer of 400000 bytes, and none is left"):
        registry.decode(kind, b"".join(parts))
    with pytest.raises(TransportError, match="needs a buffer of 400000 bytes, and the next one has 3"):
        registry.decode(kind, b"".join(parts), [memoryview(b"abc")])


def test_a_buffer_is_let_go_with_the_last_object_that_refers_to_it() -> None:
    class Owner(bytearray):
        pass

    registry = CodecRegistry()
    for obj, torch_too in ((np.zeros(100_000), False), (torch.zeros(100_000), True)):
        kind, parts, buffers = registry.encode({"a": obj})
        owner = Owner(buffers[0])
        gone = weakref.ref(owner)
        result = registry.decode(kind, b"".join(parts), [memoryview(owner).toreadonly()])
        kept = result["a"][5:7]
        del owner, result, obj, buffers, parts
        assert gone() is not None, torch_too
        assert (kept == 0).all()
        del kept
        assert gone() is None, torch_too


@both
def test_large_bytes_and_text_are_handed_over_too(inline: bool) -> None:
    data, text = bytes(range(256)) * 4096, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 300_000
    obj = [1, data, {"text": text}, bytearray(data), "end", data[:100_000]]
    kind, _parts, buffers = CodecRegistry().encode(obj)
    assert kind == PICKLE_BUFFERS
    assert [buffer.nbytes for buffer in buffers] == [len(data), 600_000, len(data)]
    assert buffers[0].obj is data
    result = round_trip(obj, inline=inline)
    assert result == obj
    result[3][0] = 7  # a bytearray stays one


@both
@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.array(5.0),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["a", "bb"]),
        np.array([1, "x", None], object),
        np.arange(3).astype(">i4"),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(60_000.0).reshape(300, 200)[::2, ::-3],
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_all_kinds(array: np.ndarray[Any, Any], inline: bool) -> None:
    result = round_trip(array, inline=inline)
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert (result == array).all()
    assert result.flags.f_contiguous == array.flags.f_contiguous


@both
def test_memoryviews_arrive_as_read_only_memoryviews(inline: bool) -> None:
    for obj in (b"abc", bytes(100_000), np.arange(12.0).reshape(3, 4), np.arange(99_999)[::2]):
        view = memoryview(obj)
        result = round_trip([view], inline=inline)[0]
        assert result.readonly
        assert (result.format, result.shape, result.tolist()) == (view.format, view.shape, view.tolist())


@both
@pytest.mark.parametrize("length", [0, 5, 50_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_tensors_are_views_that_cannot_be_written(length: int, dtype: str, inline: bool) -> None:
    tensor = torch.arange(length).to(getattr(torch, dtype))
    result = round_trip({"t": tensor}, inline=inline)["t"]
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(result.to(torch.complex64), tensor.to(torch.complex64))
    if length:
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            result.zero_()
        result.clone().zero_()


def test_tensors_of_all_kinds() -> None:
    grid = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(round_trip(grid.t()), grid.t())
    assert torch.equal(round_trip(grid[::2, 1:]), grid[::2, 1:])
    assert round_trip(torch.tensor(3.5)).item() == 3.5
    assert round_trip(torch.ones(3, requires_grad=True)).requires_grad
    assert torch.equal(round_trip(grid.to_sparse()).to_dense(), grid)
    assert torch.equal(round_trip(torch.tensor([1 + 2j]).conj()), torch.tensor([1 - 2j]))
    assert round_trip(torch.empty(4, device="meta")).device.type == "meta"


def test_parameters_arrive_as_copies_that_can_be_trained() -> None:
    linear = torch.nn.Linear(100, 100)
    result = round_trip(linear, inline=False)
    assert torch.equal(result.weight, linear.weight)
    result(torch.ones(1, 100)).sum().backward()
    torch.optim.SGD(result.parameters(), lr=0.1).step()
    assert not torch.equal(result.weight, linear.weight)
    frozen = round_trip(torch.nn.Parameter(torch.ones(3), requires_grad=False))
    assert not frozen.requires_grad
    with torch.no_grad():
        frozen.copy_(round_trip(torch.zeros(3)))


def test_tensors_inside_what_goes_by_value() -> None:
    weights = torch.ones(50_000)
    assert round_trip(lambda: weights.sum().item())() == 50_000
    assert not round_trip((lambda: 0, weights), inline=False)[1].requires_grad


class Sealed:
    """What pickle cannot do by itself."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("sealed")


def test_reducers_that_others_register_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="sealed"):
        CodecRegistry().encode(Sealed("x"))
    monkeypatch.setitem(copyreg.dispatch_table, Sealed, lambda sealed: (str, (sealed.text,)))
    assert round_trip([Sealed("early"), np.arange(3)])[0] == "early"
    assert round_trip([Sealed("by value"), lambda: 0])[0] == "by value"


def test_a_module_that_is_just_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.transport.codec._dispatch_key", None)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert round_trip({"a": memoryview(b"x"), "b": np.arange(9_000)})["a"] == b"x"
    monkeypatch.undo()
    assert isinstance(round_trip(torch.ones(3)), torch.Tensor)


def test_torch_is_not_imported_for_others() -> None:
    code = """if True:
        import sys
        from drumline.transport.codec import CodecRegistry
        codec = CodecRegistry()
        kind, parts, buffers = codec.encode({"a": bytes(300_000), "b": memoryview(b"x")})
        codec.decode(kind, b"".join(parts), buffers)
        assert not {"torch", "numpy"} & set(sys.modules), "imported"
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


leaves = (
    st.none()
    | st.integers()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.builds(lambda n, b: bytes([b]) * n, st.sampled_from([1000, 70_000, 270_000]), st.integers(0, 255))
    | st.builds(lambda n, d: np.arange(n).astype(d), st.integers(0, 9000), st.sampled_from(["i4", "f8", "u1", "?"]))
    | st.builds(lambda n: torch.arange(n, dtype=torch.float32), st.integers(0, 9000))
)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


@given(
    obj=st.recursive(leaves, lambda c: st.lists(c, max_size=4) | st.dictionaries(st.text(max_size=3), c, max_size=4)),
    inline=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_object(obj: Any, inline: bool) -> None:
    assert equal(obj, round_trip(obj, inline=inline))


def test_functions_by_value() -> None:
    base = 10

    def add(x: int) -> int:
        return x + base

    assert round_trip(add)(5) == 15
    assert round_trip(lambda worker: worker * 2)(4) == 8
    assert round_trip(functools.partial(add, 7))() == 17
    assert round_trip(("call", (lambda x: x + 1,), {}))[1][0](1) == 2


class Nested:
    """Encodes something else while it is pickled."""

    def __init__(self, codec: CodecRegistry, inner: Any) -> None:
        self.codec, self.inner = codec, inner

    def __reduce__(self) -> Any:
        kind, parts, _ = self.codec.encode(self.inner)
        return tuple, ([kind, b"".join(parts)],)


def test_a_pickler_that_is_used_again_remembers_nothing() -> None:
    """Objects that were sent before, at whatever length, in whatever way it ended, and while it was busy."""
    codec = CodecRegistry()
    shared = ["once", {"deep": [1, 2.5, None]}]
    watched = Sealed("x")
    for obj in (
        shared,
        (shared, shared),
        [shared] * 3000,
        ["fails", watched],
        {"nested": Nested(codec, shared)},
        shared,
    ):
        for _ in range(2):
            try:
                _, parts, buffers = codec.encode(obj)
            except TypeError:
                assert watched in obj
                continue
            assert not buffers
            found = pickle.loads(b"".join(parts))
            if type(obj) is dict:
                inner_kind, data = found["nested"]
                assert codec.decode(inner_kind, data) == shared
            else:
                assert found == obj
    alive = weakref.ref(watched)
    del obj, watched
    gc.collect()
    assert alive() is None


class Number(int):
    pass


@pytest.mark.parametrize("obj", [None, True, 0, -1, 2**70, 1.5, -0.0, math.inf, Number(3), [None, 1]], ids=repr)
def test_scalars_and_what_looks_like_them(obj: Any) -> None:
    for found in (round_trip(obj), round_trip(obj, inline=False)):
        assert type(found) is type(obj)
        assert repr(found) == repr(obj)


@pytest.mark.parametrize("size", [0, 1, 300, 20_000, (1 << 18) - 1, 1 << 18])
def test_bytes_of_any_size_stay_bytes(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert round_trip(data) == data
    assert type(round_trip(data)) is bytes


def test_a_failed_pickle_leaves_no_buffers_behind() -> None:
    big = np.arange(10_000)
    result = round_trip([big, lambda: big.sum(), np.zeros(5000)])
    assert (result[0] == big).all()
    assert result[1]() == big.sum()


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_what_lives_in_main_goes_by_value(main_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    exec(
        "import dataclasses\n"
        "@dataclasses.dataclass\nclass Job:\n    n: int\n    def run(self): return self.n * helper()\n"
        "def helper(): return 3\n",
        main_module.__dict__,
    )
    registry = CodecRegistry()
    kind, parts, _ = registry.encode(("method", (main_module.Job(4),), {"f": main_module.helper}))
    payload = b"".join(parts)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # the reader's own, without Job
    name, (job,), kwargs = registry.decode(kind, payload)
    assert (name, job.run(), kwargs["f"]()) == ("method", 12, 3)
    assert dataclasses.asdict(job) == {"n": 4}


def test_what_cannot_be_sent_says_so() -> None:
    with pytest.raises(TypeError, match="pickle"):
        CodecRegistry().encode(sys._getframe())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0)])
@pytest.mark.parametrize("kind", ["f8", "i4", "u1", "i8", "?"])
def test_empty_views_arrive(kind: str, shape: tuple[int, ...]) -> None:
    view = memoryview(np.empty(shape, kind))
    registry = CodecRegistry()
    code, parts, buffers = registry.encode([view, "after"])
    got, after = registry.decode(code, b"".join(parts), buffers)
    assert (got.shape, got.nbytes, got.itemsize, got.readonly, after) == (shape, 0, view.itemsize, True, "after")
    assert np.asarray(got).dtype == np.dtype(kind)
