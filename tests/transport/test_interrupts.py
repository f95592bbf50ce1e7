"""A signal handler that raises (KeyboardInterrupt) wherever Python lets it: nothing is left held, lost or wrong."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from drumline.errors import QueueTimeoutError, TransportError
from drumline.transport import MessageQueue
from drumline.transport.arena import ArenaWriter
from drumline.transport.ring import Message, Pieces

LONG = 30.0


class Interrupt(BaseException):
    """What the handler raises."""


def interrupt() -> None:
    """As a handler does that runs after the call that this is in."""
    raise Interrupt


@contextmanager
def interrupts(every_s: float) -> Iterator[None]:
    """SIGALRM raises Interrupt, again and again."""

    def handle(*_: Any) -> None:
        raise Interrupt

    old = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
        yield
    finally:
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, old)
                break
            except Interrupt:
                pass


class Turn:
    """The lock, with a handler that raises right after one of its methods."""

    def __init__(self, lock: Any, after: str) -> None:
        self.lock, self.after = lock, after

    def _call(self, name: str, *args: Any, **more: Any) -> Any:
        found = getattr(self.lock, name)(*args, **more)
        if self.after == name:
            self.after = ""
            interrupt()
        return found

    def acquire(self, *args: Any, **more: Any) -> Any:
        return self._call("acquire", *args, **more)

    def release(self) -> Any:
        return self._call("release")

    def __enter__(self) -> Any:
        return self.lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("after", ["acquire", "release"])
def test_the_turn_is_free_after_an_interrupt(after: str) -> None:
    with MessageQueue(1) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        queue._turn = Turn(queue._turn, after)  # type: ignore[assignment]
        with pytest.raises(Interrupt):
            queue.enqueue("interrupted")
        other = threading.Thread(target=queue.enqueue, args=("from another thread", 1.0))
        other.start()
        other.join()
        queue.enqueue("from this one", 1.0)
        got = [reader.dequeue(LONG)]
        while got[-1] != "from this one":
            got.append(reader.dequeue(LONG))
        assert got[-2:] == ["from another thread", "from this one"]


def test_a_turn_that_was_not_got_stays_another_threads() -> None:
    with MessageQueue(1, slot_bytes=64, slots=1) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        queue.enqueue(0)
        first = threading.Thread(target=queue.enqueue, args=(1, LONG))
        first.start()
        deadline = time.monotonic() + LONG
        while queue._turn.acquire(False):
            queue._turn.release()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for _ in range(2):
            with pytest.raises(QueueTimeoutError, match="another thread waits for room"):
                queue.enqueue("late", 0.01)
        assert [reader.dequeue(LONG), reader.dequeue(LONG)] == [0, 1]
        first.join()


def test_enqueue_inside_of_enqueue_says_so() -> None:
    with MessageQueue(1, slot_bytes=64, slots=1) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        queue.enqueue(0)
        raised: list[BaseException] = []

        def handle(*_: Any) -> None:
            try:
                queue.enqueue("inside")
            except TransportError as error:
                raised.append(error)

        old = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(QueueTimeoutError, match="no room"):
                queue.enqueue(1, 0.2)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert "enqueue inside of enqueue" in str(raised[0])
        assert reader.dequeue(LONG) == 0


def test_interrupts_at_any_place_leave_the_turn_free() -> None:
    with MessageQueue(1) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        thread = threading.Thread(target=lambda: [None for _ in reader])
        thread.start()
        count, end = 0, time.monotonic() + 1.5
        while count < 300 and time.monotonic() < end:
            try:
                with interrupts(0.002):
                    while True:
                        queue.enqueue("x", LONG)
            except Interrupt:
                count += 1
            assert not queue._has_turn()
        assert count > 20
        queue.enqueue("last", 5)
        queue.close()
        thread.join(LONG)


def arena_of(queue: MessageQueue) -> ArenaWriter:
    """Its arena, after what the readers have freed was collected."""
    assert queue._local is not None
    arena = queue._local._writer._ring.arena
    assert arena is not None
    arena._collect(len(arena._used))
    return arena


def after(function: Callable[..., Any], number: int = 1) -> Callable[..., Any]:
    """``function``, with a handler that raises right after its call ``number``."""
    calls = itertools.count(1)

    def call(*args: Any, **more: Any) -> Any:
        found = function(*args, **more)
        if next(calls) == number:
            interrupt()
        return found

    return call


@pytest.mark.parametrize("size", [50_000, 9_000_000], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    "where", ["allocate", "fill", "sent", "press", "_place_buffers", "goes", "_put", "start_with_arena", "advance"]
)
def test_interrupted_enqueues_leave_no_blocks(where: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageQueue(1, arena_bytes=1 << 20) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        arena = arena_of(queue)
        ring = queue._local._writer._ring  # type: ignore[union-attr]
        owner = next(o for o in (ring, arena, Pieces) if hasattr(o, where))
        array = np.full(size, 7, np.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, after(getattr(owner, where)))
            try:
                queue.enqueue(array, 0.05)
            except (Interrupt, QueueTimeoutError):
                pass
        next_one = threading.Thread(target=queue.enqueue, args=("next", LONG))
        next_one.start()
        got = reader.dequeue(LONG)
        if not isinstance(got, str):
            assert (got == 7).all()
            got = reader.dequeue(LONG)
        assert got == "next"
        next_one.join()
        assert arena_of(queue).used_bytes == 0
        assert arena._free.pieces() == [(0, arena.layout.data_bytes)]
        assert sorted(arena._indices) == list(range(arena.layout.blocks))


def test_interrupts_at_any_place_leave_no_blocks_and_a_ring_that_works() -> None:
    with MessageQueue(1, arena_bytes=1 << 20) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        wrong: list[str] = []

        def read() -> None:
            try:
                for number, array in reader:
                    if (array != number % 251).any():
                        wrong.append(f"{number}: {set(array.tolist())}")
                    del array
            except BaseException as error:  # noqa: BLE001  the test shows it
                wrong.append(repr(error))

        thread = threading.Thread(target=read)
        thread.start()
        count = number = 0
        end = time.monotonic() + 2
        while count < 200 and time.monotonic() < end:
            try:
                with interrupts(0.004):
                    while True:
                        number += 1
                        size = (20_000, 300_000, 1_500_000, 3000)[number % 4]
                        queue.enqueue((number, np.full(size, number % 251, np.uint8)), LONG)
            except Interrupt:
                count += 1
        assert count > 20
        queue.enqueue((0, np.zeros(3_000_000, np.uint8)), 10)
        arena = arena_of(queue)
        deadline = time.monotonic() + 5
        while arena_of(queue).used_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert arena.used_bytes == 0
        assert arena._free.pieces() == [(0, arena.layout.data_bytes)]
        queue.close()
        thread.join(LONG)
        assert wrong == []


@pytest.mark.parametrize("size", [50_000, 3_000_000], ids=["whole", "pieces"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "where", ["take", "_take_block", "_take_piece", "_advance", "_find_buffers", "release", "decode"]
)
def test_a_block_stays_taken_when_dequeue_is_interrupted(
    where: str, number: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MessageQueue(1, arena_bytes=1 << 20) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        ring = reader._reader
        assert ring._arena is not None
        thread = threading.Thread(
            target=lambda: [queue.enqueue((i, [np.full(size, i, np.uint8)] * 2), LONG) for i in range(12)]
        )
        thread.start()
        place: tuple[Any, str] = (ring, where)
        if where == "take":
            place = ring._arena, where
        elif where == "release":
            place = Message, where
        elif where == "decode":
            place = reader, "_decode"
        with monkeypatch.context() as patch:
            patch.setattr(*place, after(getattr(*place), number))
            got: list[Any] = []
            for _ in range(4):
                try:
                    got.append(reader.dequeue(LONG))
                except Interrupt:
                    continue
        kept = list(got)
        while not got or got[-1][0] != 11:
            got[-1:] = [reader.dequeue(LONG)]
            assert all((array == got[-1][0]).all() for array in got[-1][1])
        assert [i for i, _ in kept] in ([0, 1, 2], [0, 2, 3], [0, 1, 3], [1, 2, 3], [0, 1, 2, 3])
        for i, arrays in kept:
            assert all((array == i).all() for array in arrays)
        thread.join()
        del got, kept, arrays
        assert arena_of(queue).used_bytes == 0
