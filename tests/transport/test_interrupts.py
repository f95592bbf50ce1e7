"""A signal handler that raises (KeyboardInterrupt) wherever Python lets it: nothing is left held, lost or wrong."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from drumline.errors import QueueTimeoutError, TransportError
from drumline.transport import MessageQueue

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
