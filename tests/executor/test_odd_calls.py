"""Texts, timeouts and arguments that nobody would write on purpose: a clear error, and the executor goes on."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from drumline.errors import DrumlineError, FailureReport, RemoteCallError, WorkerCallError
from drumline.executor import Executor
from tests.executor.workers import Plain

LONE = "\ud800"


def in_message(worker: Plain) -> None:
    raise ValueError(f"{LONE} in a message")


def in_class_name(worker: Plain) -> None:
    class OddError(Exception): ...

    OddError.__qualname__ = f"Odd{LONE}"
    raise OddError


def in_cause(worker: Plain) -> None:
    raise ValueError("plain") from KeyError(LONE)


def in_traceback(worker: Plain) -> None:
    code = compile("raise ValueError('plain')", f"{LONE}.py".encode(errors="backslashreplace").decode(), "exec")
    exec(code.replace(co_filename=f"{LONE}.py"))


def huge(worker: Plain) -> None:
    raise ValueError("h" * (20 << 20))


@pytest.mark.parametrize("function", [in_message, in_class_name, in_cause, in_traceback], ids=lambda f: f.__name__)
def test_lone_surrogates(executor: Executor, function: Callable[[Plain], None]) -> None:
    with pytest.raises(RemoteCallError) as caught:
        executor.collective_rpc(function, timeout=20)
    assert "d800" in ascii(str(caught.value)) or "UnicodeEncodeError" in str(caught.value)  # Python cannot format it
    assert len(executor.collective_rpc("echo", timeout=20)) == executor.world_size


def test_lone_surrogate_in_the_name_of_a_function(executor: Executor) -> None:
    def function(worker: Plain) -> None:
        raise ValueError("plain")

    function.__qualname__ = LONE
    with pytest.raises(RemoteCallError, match="plain"):
        executor.collective_rpc(function, timeout=20)


def test_a_huge_message_is_cut(executor: Executor) -> None:
    with pytest.raises(RemoteCallError) as caught:
        executor.collective_rpc(huge, timeout=60)
    assert len(str(caught.value)) < 100_000 * (1 + executor.world_size)
    assert "characters left out" in caught.value.report.message


@pytest.mark.parametrize("timeout", [math.inf, 1e12, 10**400])
def test_endless_timeouts(executor: Executor, timeout: float) -> None:
    assert len(executor.collective_rpc("echo", timeout=timeout)) == executor.world_size
    future = executor.collective_rpc("sleep", (0.05,), non_block=True, timeout=timeout)
    assert len(future.result(timeout)) == executor.world_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"timeout": math.nan}, "number of seconds"),
        ({"timeout": "5"}, "number of seconds"),
        ({"reply_rank": 0.0}, "reply_rank"),
        ({"reply_rank": False}, "reply_rank"),
        ({"reply_rank": -1}, "reply_rank"),
        ({"reply_rank": 255}, "reply_rank"),
        ({"args": 5}, "args"),
        ({"args": "ab"}, "args"),
        ({"kwargs": [1]}, "kwargs"),
        ({"expected_s": "60"}, "expected_s"),
        ({"expected_s": None}, "expected_s"),
        ({"expected_s": math.nan}, "expected_s"),
        ({"expected_s": -1}, "expected_s"),
        ({"expected_s": 10**400}, "expected_s"),
        ({"expected_s": True}, "expected_s"),
        ({"aggregators": 5}, "aggregators"),
        ({"aggregators": [5]}, "aggregators"),
        ({"aggregators": "ab"}, "aggregators"),
        ({"aggregators": None}, "aggregators"),
    ],
)
def test_arguments_that_are_none(executor: Executor, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        executor.collective_rpc("echo", **arguments)
    assert len(executor.collective_rpc("echo")) == executor.world_size


class Folding:
    """Calls something while it folds."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def aggregate(self, outputs: Sequence[Any], output_rank: int) -> Any:
        return self.act()

    def failed(self, outputs: Mapping[int, Any], report: FailureReport) -> None: ...


class OwnError(BaseException): ...


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, StopIteration, OwnError],
    ids=lambda e: e.__name__,
)
def test_whatever_a_method_raises_is_its_calls_failure(executor: Executor, error: type[BaseException]) -> None:
    def function(worker: Plain) -> None:
        raise error("odd")

    with pytest.raises(WorkerCallError, match="odd") as caught:
        executor.collective_rpc(function, timeout=20)
    assert error.__name__ in caught.value.type_name
    assert len(executor.collective_rpc("echo", timeout=20)) == executor.world_size


class Unloadable:
    """Raises no Exception where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise KeyboardInterrupt('unpickled')",)


def test_arguments_that_raise_where_they_are_decoded(make: Callable[..., Executor]) -> None:
    executor = make("mp", 2)
    with pytest.raises(WorkerCallError, match="unpickled"):
        executor.collective_rpc("echo", (Unloadable(),), timeout=20)
    assert len(executor.collective_rpc("echo", timeout=20)) == 2


def text_of_an_odd_class(worker: Plain) -> None:
    class OddText(str):
        def __len__(self) -> int:
            raise KeyError("len")

        def __getitem__(self, key: Any) -> str:
            return self

        def encode(self, *args: Any) -> bytes:
            raise OSError

    class OddError(Exception):
        def __str__(self) -> str:
            return OddText("odd text")

    raise OddError


def name_of_an_odd_class(worker: Plain) -> None:
    class Odd(type):
        def __getattribute__(cls, name: str) -> Any:
            if name == "__qualname__":
                raise OSError
            return super().__getattribute__(name)

    class OddError(Exception, metaclass=Odd): ...

    raise OddError


@pytest.mark.parametrize(("function", "said"), [(text_of_an_odd_class, "odd text"), (name_of_an_odd_class, "OSError")])
def test_exceptions_of_odd_classes(make: Callable[..., Executor], function: Any, said: str) -> None:
    executor = make("mp", 2)
    with pytest.raises(WorkerCallError, match=said):
        executor.collective_rpc(function, timeout=20)
    assert len(executor.collective_rpc("echo", timeout=20)) == 2


def test_one_aggregator_instead_of_several(executor: Executor) -> None:
    one: Any = Folding(lambda: None)
    for method in ("echo", "raise_on"):
        with pytest.raises(ValueError, match="aggregators"):
            executor.collective_rpc(method, (0,), aggregators=one, timeout=5)
    with pytest.raises(RemoteCallError, match="boom"):
        executor.collective_rpc("raise_on", (0,), timeout=10)
    assert len(executor.collective_rpc("echo", expected_s=60, timeout=10)) == executor.world_size


def test_awaiting_a_call_whose_aggregator_raises_stop_iteration(executor: Executor) -> None:
    def stop() -> None:
        raise StopIteration(5)

    async def awaiting() -> Any:
        return await executor.collective_rpc("echo", aggregators=[Folding(stop)], timeout=20, non_block=True)

    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        asyncio.run(awaiting())
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_failure_that_cannot_be_settled(make: Callable[..., Executor], caplog: pytest.LogCaptureFixture) -> None:
    executor = make("mp", 2)
    grace: Any = executor._grace  # type: ignore[attr-defined]
    settle, left = grace._settle, [None]

    def broken(call: Any) -> None:
        if left:
            left.pop()
            raise TypeError("odd")
        settle(call)

    grace._settle = broken
    lost = executor.collective_rpc("raise_on", (0,), non_block=True)
    with pytest.raises(TimeoutError):
        lost.result(1)
    assert "could not be settled" in caplog.text
    lost.cancel()
    with pytest.raises(RemoteCallError, match="boom"):
        executor.collective_rpc("raise_on", (0,), timeout=10)
    assert len(executor.collective_rpc("echo", timeout=10)) == executor.world_size


def test_an_aggregator_that_calls_its_executor_is_told(executor: Executor) -> None:
    call = executor.collective_rpc("echo", non_block=True)
    for act in (lambda: executor.collective_rpc("echo"), lambda: executor.collective_rpc("echo", timeout=1)):
        with pytest.raises(RuntimeError, match="aggregator"):
            executor.collective_rpc("echo", aggregators=[Folding(act)], timeout=20)
    assert len(call.result(20)) == executor.world_size
    assert len(executor.collective_rpc("echo")) == executor.world_size


def test_shutdown_while_an_aggregator_does_not_return(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Executor], backend: str
) -> None:
    for module in ("calls", "mp", "uni"):
        monkeypatch.setattr(f"drumline.executor.{module}.CLOSE_WAIT_S", 0.2)
    executor = make(backend, 1 if backend == "uni" else 2)
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        leave.wait(60)

    def call() -> None:
        try:
            executor.collective_rpc("echo", aggregators=[Folding(stay)])
        except DrumlineError:
            pass

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert entered.wait(20)
        start = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - start < 20
    finally:
        leave.set()
        thread.join(20)
    assert not thread.is_alive()
