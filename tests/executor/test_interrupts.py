"""A signal handler that raises (Ctrl-C) costs the call that it interrupts, and no other."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from drumline.executor import Executor
from drumline.executor.mp import MultiprocExecutor
from drumline.executor.outbox import Unsent

Make = Callable[..., Executor]


def good(executor: Executor) -> bool:
    """Calls are answered, each with its own answer."""
    for number in range(4):
        answers = executor.collective_rpc("echo", (number,), timeout=10)
        assert answers == [(rank, (number,), {}) for rank in range(executor.world_size)]
    return not executor.is_failed


def once(act: Callable[..., Any], *, before: bool = False) -> Callable[..., Any]:
    """``act``, interrupted before or after its first time."""
    left = [None]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if before and left:
            left.pop()
            raise KeyboardInterrupt
        found = act(*args, **kwargs)
        if left and found is not None:
            left.pop()
            raise KeyboardInterrupt
        return found

    return interrupted


@pytest.mark.parametrize("reply_rank", [None, 1])
@pytest.mark.parametrize("before", [True, False])
def test_while_a_call_is_written(make: Make, reply_rank: int | None, before: bool) -> None:
    executor = make("mp", 2)
    assert isinstance(executor, MultiprocExecutor)
    queue = executor._calls
    queue.write_small = once(queue.write_small, before=before)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc("note", (1,), reply_rank=reply_rank)
    assert good(executor)
    assert executor.collective_rpc("get_seen", timeout=10) == ([[], []] if before else [[1], [1]])


class Queue:
    """Notes what is written."""

    largest_message = 1 << 20
    written = 0

    def try_write(self, parts: Any, kind: int, buffers: Any) -> bool:
        self.written += 1
        return True


@pytest.mark.parametrize("before", [True, False])
def test_while_a_call_that_waited_for_room_is_written(before: bool) -> None:
    queue: Any = Queue()
    queue.try_write = once(queue.try_write, before=before)
    unsent = Unsent(None, (b"call",), (), 4)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        unsent.go_on(queue, 0, 0.0)
    assert unsent.go_on(queue, 0, 0.0)
    assert queue.written == 1


@pytest.mark.parametrize("where", ["begin", "arm"])
def test_while_a_call_is_begun(monkeypatch: pytest.MonkeyPatch, make: Make, backend: str, where: str) -> None:
    executor = make(backend)
    table: Any = executor._table  # type: ignore[attr-defined]
    if where == "begin":
        monkeypatch.setattr(table, "begin", once(table.begin))
    else:
        table.keeper.armed = False
        monkeypatch.setattr(table.keeper, "arm", once(table.keeper.arm, before=True))
    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc("note", (1,), non_block=True)
    monkeypatch.undo()
    assert good(executor)
    assert executor.collective_rpc("get_seen", timeout=10) == [[]] * executor.world_size


def test_while_an_answer_is_taken_in(make: Make) -> None:
    executor = make("mp", 2)
    assert isinstance(executor, MultiprocExecutor)
    earlier = executor.collective_rpc("echo", ("earlier",), non_block=True)
    time.sleep(0.2)
    reader = executor._answers[0]
    reader.receive = once(reader.receive)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc("echo", ("later",))
    assert good(executor)
    assert "lost" in str(earlier.exception(10))


def test_while_an_aggregator_folds(make: Make, backend: str) -> None:
    executor = make(backend)

    class Interrupted:
        def aggregate(self, outputs: Any, output_rank: int) -> Any:
            raise KeyboardInterrupt

        def failed(self, outputs: Any, report: Any) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc("echo", aggregators=[Interrupted()], timeout=10)
    assert good(executor)


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_real_signals(make: Make, seconds: float) -> None:
    executor = make("mp", 2)
    chance = random.Random(7)
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.002, 0.008))
                while True:
                    executor.collective_rpc("sleep", (seconds,))
            except KeyboardInterrupt:
                pass
            assert executor.collective_rpc("echo", timeout=5) == [(rank, (), {}) for rank in range(2)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert good(executor)
