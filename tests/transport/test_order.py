"""Builds whose stores come in the wrong order: the reader notices by sequence number, checksum or stamp.

x86 keeps stores in order, so a fence that is missing does no harm here. These writers, each in a process of its own, do
on purpose what a weaker machine would do without the fences: the count first, and what it stands for a little later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from drumline.errors import TransportError
from drumline.transport import BroadcastQueue, Doorbell, QueueWriter, RingWriter, Waiter
from drumline.transport.arena import ArenaWriter, Block
from drumline.transport.records import MASK, WRITTEN
from drumline.transport.ring import Part

from .procs import children

pytestmark = pytest.mark.usefixtures("way")

COUNT = 150


def body(number: int) -> tuple[bytes, bytes]:
    rng = random.Random(number)
    return rng.randbytes(rng.choice((20, 20, 1000))), rng.randbytes(rng.choice((0, 40, 20_000)))


class Swapped(RingWriter):
    """Publishes each record before it writes it."""

    pause_s = 0.0

    def sender(self, bells: Sequence[Doorbell]) -> None:
        """Machine code writes in the right order."""

    def try_write(self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[Part] = (), due: int = 0) -> bool:
        if not buffers and self.has_room(1):
            self.publish_early(sum(map(len, parts)))
        return super().try_write(parts, kind, buffers, due)

    def _put(self, parts: Sequence[Part], length: int, *more: Any) -> None:
        self.publish_early(length)
        super()._put(parts, length, *more)

    def publish_early(self, length: int) -> None:
        self._words[WRITTEN] = (self._written + self.layout.slots_of(length)) & MASK
        self.bell.ring()
        time.sleep(self.pause_s)

    bell: Doorbell


class SwappedArena(ArenaWriter):
    """Fills a block only after its message has gone out."""

    pause_s = 0.0

    def fill(self, block: Block, view: memoryview) -> None:
        self.late = view

    def sent(self, block: Block, position: int) -> None:
        super().sent(block, position)
        self.bell.ring()
        time.sleep(self.pause_s)
        super().fill(block, self.late)

    bell: Doorbell


def write(queue: BroadcastQueue, waiters: Sequence[Waiter], kind: str, pause_s: float) -> None:
    me, bell = Waiter.attach(waiters[0].fd), Doorbell.attach(waiters[1].fd, 1)
    plain = BroadcastQueue.attach(queue.fd, queue.arena_fd)
    assert plain._arena is not None
    arena = (SwappedArena if kind == "arena" else ArenaWriter)(plain._arena)
    ring = (Swapped if kind == "ring" else RingWriter)(plain._memory.buf, "", arena)
    for swapped in (arena, ring):
        swapped.bell, swapped.pause_s = bell, pause_s  # type: ignore[union-attr]
    writer = QueueWriter(ring, [bell])
    for number in range(COUNT):
        part, buffer = body(number)
        writer.enqueue([part], me, time.monotonic() + 20, kind=number, buffers=[buffer] if buffer else [])


def run(kind: str, pause_s: float) -> tuple[int, str, int]:
    """Number of messages read, all of them right; the error that ended it; how often the reader looked again."""
    queue = BroadcastQueue.create("order", 512, 16, arena_bytes=1 << 17)
    waiters = [Waiter.create("writer"), Waiter.create("reader")]
    reader = queue.reader(0, waiters[0].ringer(1))
    error = ""
    number = 0
    try:
        with children() as start:
            child = start(write, queue, waiters, kind, pause_s)
            while number < COUNT:
                message = waiters[1].wait(reader.poll, time.monotonic() + 20)
                assert message is not None
                part, buffer = body(number)
                assert message.kind == number
                assert message.data == part
                assert [bytes(found) for found in message.buffers] == ([buffer] if buffer else [])
                message.release()
                number += 1
            assert child.join() == 0
    except TransportError as raised:
        error = str(raised)
    finally:
        noticed = reader.rereads + (reader._arena.rereads if reader._arena is not None else 0)
        reader.close()
        for thing in (queue, *waiters):
            thing.close()
    return number, error, noticed


def test_the_right_order_needs_no_second_look() -> None:
    assert run("none", 0.0) == (COUNT, "", 0)


@pytest.mark.parametrize("kind", ["ring", "arena"])
def test_a_short_swap_is_noticed_and_repaired(kind: str) -> None:
    """What comes a little late is waited for; nothing wrong is ever delivered. The reader has to be awake in the few
    microseconds of a swap: on a busy machine it may miss all of one run."""
    for _ in range(20):
        number, error, noticed = run(kind, 0.0)
        assert number == COUNT or "out of step" in error
        if noticed or error:
            return
    pytest.fail("nobody noticed")


@pytest.mark.parametrize("kind", ["ring", "arena"])
def test_a_long_swap_is_refused(kind: str) -> None:
    number, error, _ = run(kind, 0.2)
    assert number < COUNT
    assert "out of step" in error
