"""Objects to parts and back."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import TransportError
from drumline.transport.codec import PICKLE, PICKLE_BUFFERS, CodecRegistry


class Point(msgspec.Struct, array_like=True):
    x: int
    data: bytes


def round_trip(obj: Any, registry: CodecRegistry | None = None) -> Any:
    registry = registry or CodecRegistry()
    kind, parts = registry.encode(obj)
    payload = bytearray(b"".join(parts))
    view = memoryview(payload)
    result = registry.decode(kind, view)
    view.release()  # BufferError if the result still refers to it
    payload[:] = bytes(len(payload))
    return result


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
    kind, _ = registry.encode(Point(3, b"abc"))
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


def test_large_buffers_are_parts_and_arrive_writable_and_apart() -> None:
    registry = CodecRegistry()
    big, small = np.arange(10_000, dtype=np.int32), np.arange(3)
    kind, parts = registry.encode({"big": big, "small": small, "again": big})
    assert kind == PICKLE_BUFFERS
    assert sum(memoryview(part).nbytes == big.nbytes for part in parts) >= 1
    result = round_trip({"big": big, "small": small, "frozen": np.frombuffer(bytes(5000), np.uint8)})
    assert (result["big"] == big).all()
    assert (result["small"] == small).all()
    result["big"][0] = 5
    assert not result["frozen"].flags.writeable


def test_arrays_that_are_not_contiguous() -> None:
    array = np.arange(10_000, dtype=np.float32).reshape(100, 100)[::2, ::3]
    assert (round_trip(array) == array).all()
    assert (round_trip(np.asfortranarray(array)) == array).all()


def test_small_buffers_stay_in_the_pickle() -> None:
    assert CodecRegistry().encode(np.arange(10))[0] == PICKLE


def test_functions_by_value() -> None:
    base = 10

    def add(x: int) -> int:
        return x + base

    assert round_trip(add)(5) == 15
    assert round_trip(lambda worker: worker * 2)(4) == 8
    assert round_trip(functools.partial(add, 7))() == 17
    assert round_trip(("call", (lambda x: x + 1,), {}))[1][0](1) == 2


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
    kind, parts = registry.encode(("method", (main_module.Job(4),), {"f": main_module.helper}))
    payload = b"".join(parts)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # the reader's own, without Job
    name, (job,), kwargs = registry.decode(kind, payload)
    assert (name, job.run(), kwargs["f"]()) == ("method", 12, 3)
    assert dataclasses.asdict(job) == {"n": 4}


def test_what_cannot_be_sent_says_so() -> None:
    with pytest.raises(TypeError, match="pickle"):
        CodecRegistry().encode(sys._getframe())
