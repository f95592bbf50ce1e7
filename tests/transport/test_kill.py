"""kill -9 at either end of a queue: the other knows within 100 ms, whatever it was doing."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from drumline.errors import ChannelClosedError
from drumline.transport import BroadcastQueue, DeathWatch, Doorbell, Waiter

from .procs import children

pytestmark = pytest.mark.alone

WITHIN_S = 0.1
N = 3


def soon() -> float:
    return time.monotonic() + 30


@contextmanager
def queue() -> Iterator[tuple[BroadcastQueue, list[Waiter]]]:
    made = BroadcastQueue.create("kill", 64, 4, N, arena_bytes=1 << 16)
    waiters = [Waiter.create(f"kill-{i}") for i in range(1 + N)]
    try:
        yield made, waiters
    finally:
        for thing in (made, *waiters):
            thing.close()


@pytest.mark.parametrize("what", ["full ring", "in pieces", "idle"])
def test_writer_learns_of_a_readers_death(what: str) -> None:
    """The ring is full, or half of a long message is in it, or nothing is; reader 1 sleeps and does not read."""

    def sleep(made: BroadcastQueue, waiters: list[Waiter], index: int) -> None:
        Waiter.attach(waiters[1 + index].fd).wait(lambda: None)

    with queue() as (made, waiters), children() as start:
        readers = [start(sleep, made, waiters, index) for index in range(N)]
        writer = made.writer([waiter.ringer(1) for waiter in waiters[1:]], largest=1 << 20)
        for reader in readers:
            reader.asleep(soon())
        with DeathWatch(waiters[0], {f"reader {i}": reader.pidfd for i, reader in enumerate(readers)}) as watch:
            if what == "full ring":
                for _ in range(4):
                    writer.enqueue([b"x"], waiters[0], soon(), watch.alive)
            killed: list[float] = []

            def kill() -> None:
                killed.append(time.monotonic())
                os.kill(readers[1].pid, 9)

            timer = threading.Timer(0.05, kill)
            timer.start()
            data = [bytes(5000 if what == "in pieces" else 1)]
            with pytest.raises(ChannelClosedError, match="reader 1 is gone"):  # noqa: PT012  two ways to wait
                if what == "idle":
                    waiters[0].wait(watch.alive, soon())
                else:
                    writer.enqueue(data, waiters[0], soon(), watch.alive)
            knew = time.monotonic()
            timer.join()
            assert knew - killed[0] < WITHIN_S
            assert watch.gone == ("reader 1",)
        assert waiters[0].lost_wakes == 0
        writer.close()


@pytest.mark.parametrize("what", ["asleep", "in pieces", "holding views"])
def test_readers_learn_of_the_writers_death(what: str) -> None:
    read_end, write_end = os.pipe()

    def read(made: BroadcastQueue, waiters: list[Waiter], index: int, writer_fd: int) -> None:
        me = Waiter.attach(waiters[1 + index].fd)
        reader = BroadcastQueue.attach(made.fd, made.arena_fd).reader(index, Doorbell.attach(waiters[0].fd, 1 + index))
        held: list[memoryview] = []
        with DeathWatch(me, {"the writer": writer_fd}) as watch:

            def check() -> None:
                message = reader.poll()
                if message is not None:
                    held.extend(message.buffers)
                    message.release()
                watch.alive()

            try:
                me.wait(check, soon())
            except ChannelClosedError:
                knew = time.monotonic()
        assert [bytes(view) for view in held] == ([b"v" * 20_000] if what == "holding views" else [])
        assert me.lost_wakes == 0
        os.write(write_end, f"{knew}\n".encode())

    def write(made: BroadcastQueue, waiters: list[Waiter]) -> None:
        me = Waiter.attach(waiters[0].fd)
        writer = made.writer([Doorbell.attach(waiter.fd, 1) for waiter in waiters[1:]], largest=1 << 20)
        if what == "in pieces":
            pieces = writer.start([bytes(1000)])
            pieces._pieces = writer._ring.start([bytes(1000)])
            pieces._pieces.advance()
        if what == "holding views":
            writer.enqueue([], me, soon(), buffers=[b"v" * 20_000])
        me.wait(lambda: None)

    with queue() as (made, waiters), children() as start:
        writer = start(write, made, waiters)
        readers = [start(read, made, waiters, index, writer.pidfd) for index in range(N)]
        for child in (writer, *readers):
            child.asleep(soon())
        killed = time.monotonic()
        os.kill(writer.pid, 9)
        assert [reader.join() for reader in readers] == [0] * N
        knew = [float(line) for line in os.read(read_end, 1000).decode().split()]
        assert len(knew) == N
        assert statistics.fmean(knew) - killed < WITHIN_S
        assert max(knew) - killed < WITHIN_S
    os.close(read_end)
    os.close(write_end)


def test_a_pipe_is_a_death_source_too() -> None:
    """Where there are no pidfds: end of file."""
    read_end, write_end = os.pipe()
    waiter = Waiter.create("pipe")
    with DeathWatch(waiter, {"peer": read_end}) as watch:
        watch.alive()
        os.close(write_end)
        with pytest.raises(ChannelClosedError, match="peer is gone"):
            waiter.wait(watch.alive, soon())
    os.close(read_end)
    waiter.close()


def test_a_watch_that_saw_nothing_ends_at_once() -> None:
    read_end, write_end = os.pipe()
    waiter = Waiter.create("watch")
    watch = DeathWatch(waiter, {"peer": read_end})
    watch.close()
    watch.close()
    assert watch.gone == ()
    os.close(read_end)
    os.close(write_end)
    waiter.close()
