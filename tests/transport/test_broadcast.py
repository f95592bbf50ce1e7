"""Queues between real processes: thousands of messages, full rings, slow and dead readers."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import MessageTooLargeError, RPCTimeoutError
from drumline.transport import BroadcastQueue, CodecRegistry, Doorbell, QueueWriter, RingReader, Waiter

from .procs import Child, children

pytestmark = pytest.mark.usefixtures("way")


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def digest_message(rng: random.Random, longest: int) -> bytes:
    """Random length (mostly short), random bytes, their digest in front."""
    length = rng.choice((rng.randrange(40), rng.randrange(40), rng.randrange(longest - 16)))
    body = rng.randbytes(length)
    return hashlib.md5(body).digest() + body


@dataclass
class Pair:
    """An owner with one broadcast queue to n workers and one answer queue from each."""

    n: int
    slot_bytes: int
    slots: int
    waiter: Waiter = field(init=False)
    worker_waiters: list[Waiter] = field(init=False)
    down: BroadcastQueue = field(init=False)
    up: list[BroadcastQueue] = field(init=False)

    def __post_init__(self) -> None:
        self.waiter = Waiter.create("owner")
        self.worker_waiters = [Waiter.create(f"worker-{i}") for i in range(self.n)]
        self.down = BroadcastQueue.create("down", self.slot_bytes, self.slots, self.n)
        self.up = [BroadcastQueue.create(f"up-{i}", self.slot_bytes, self.slots) for i in range(self.n)]

    def owner_ends(self) -> tuple[QueueWriter, list[RingReader]]:
        bells = [waiter.ringer(1) for waiter in self.worker_waiters]
        return self.down.writer(bells), [q.reader(0, bell) for q, bell in zip(self.up, bells, strict=True)]

    def worker_ends(self, i: int) -> tuple[Waiter, RingReader, QueueWriter]:
        bell = Doorbell.attach(self.waiter.fd, 1 + i)
        me = Waiter.attach(self.worker_waiters[i].fd)
        down, up = BroadcastQueue.attach(self.down.fd), BroadcastQueue.attach(self.up[i].fd)
        return me, down.reader(i, bell), up.writer([bell], "--mq-answer-slots")

    def close(self) -> None:
        for thing in (self.waiter, *self.worker_waiters, self.down, *self.up):
            thing.close()


@contextmanager
def pair(n: int, slot_bytes: int, slots: int) -> Iterator[Pair]:
    made = Pair(n, slot_bytes, slots)
    try:
        yield made
    finally:
        made.close()


def echo(p: Pair, i: int, count: int) -> None:
    me, reader, writer = p.worker_ends(i)
    for _ in range(count):
        message = me.wait(reader.poll, soon())
        assert message is not None
        kind, data = message.kind, bytes(message.data)
        message.release()
        writer.enqueue([i.to_bytes(1, "little"), data], me, soon(), kind=kind)
    assert me.lost_wakes == 0


def test_thousands_of_round_trips() -> None:
    count = 3000
    with pair(1, 4096, 8) as p, children() as start:
        child = start(echo, p, 0, count)
        writer, (reader,) = p.owner_ends()
        registry = CodecRegistry()
        for number in range(count):
            kind, parts = registry.encode_inline((number, "execute_model", {"a": b"x" * (number % 5000)}))
            writer.enqueue(parts, p.waiter, soon(), kind=kind)
            message = p.waiter.wait(reader.poll, soon())
            assert message is not None
            assert registry.decode(message.kind, message.data[1:])[0] == number
            message.release()
        assert child.join() == 0
        assert p.waiter.lost_wakes == 0


@pytest.mark.parametrize(("n", "slots"), [(1, 3), (3, 5), (4, 64)])
def test_flood_through_a_full_ring(n: int, slots: int) -> None:
    """The owner writes as fast as it can and reads answers in between; rings overflow all the time; nothing is lost,
    nothing is torn (each message has a digest), the order holds."""
    count, longest = 1500, 128 * slots - 100
    with pair(n, 128, slots) as p, children() as start:
        workers = [start(echo, p, i, count) for i in range(n)]
        writer, readers = p.owner_ends()
        rng = random.Random(7)
        sent: list[bytes] = []
        got = [0] * n
        pending: bytes | None = None

        def step() -> bool | None:
            nonlocal pending
            moved = False
            for i, reader in enumerate(readers):
                while (message := reader.poll()) is not None:
                    with message:
                        data = bytes(message.data)
                    assert data[0] == i
                    assert data[1:] == sent[got[i]]
                    assert hashlib.md5(data[17:]).digest() == data[1:17]
                    got[i] += 1
                    moved = True
            while len(sent) < count or pending is not None:
                if pending is None:
                    pending = digest_message(rng, longest)
                    sent.append(pending)
                if not writer.try_write([pending[:16], pending[16:]]):
                    break
                pending = None
                moved = True
            return moved or None

        while sum(got) < n * count:
            assert p.waiter.wait(step, soon()), f"stuck: sent {len(sent)}, got {got}, backlog {writer.backlog()}"
        assert [worker.join() for worker in workers] == [0] * n
        assert p.waiter.lost_wakes == 0


def test_enqueue_waits_for_a_slow_reader_and_is_rung() -> None:
    def slow(p: Pair) -> None:
        me, reader, _ = p.worker_ends(0)
        for number in range(40):
            message = me.wait(reader.poll, soon())
            assert message is not None
            with message:
                assert bytes(message.data) == bytes([number])
            if number % 10 == 0:
                time.sleep(0.02)

    with pair(1, 64, 2) as p, children() as start:
        child = start(slow, p)
        writer, _ = p.owner_ends()
        begin = time.monotonic()
        for number in range(40):
            writer.enqueue([bytes([number])], p.waiter, soon())
        assert child.join() == 0
        assert p.waiter.lost_wakes == 0
        assert time.monotonic() - begin < 4  # and not by looking again after 5 s


def test_deadline_of_a_full_queue_names_the_slow_reader() -> None:
    with pair(3, 64, 4) as p:
        writer, _ = p.owner_ends()
        readers = [p.down.reader(i) for i in range(3)]
        for _ in range(4):
            writer.enqueue([b"x"], p.waiter, soon())
        for reader in (readers[0], readers[2]):
            for _ in range(3):
                message = reader.poll()
                assert message is not None
                message.release()
        with pytest.raises(RPCTimeoutError, match=r"reader 1 is the slowest .*\[1, 4, 1\], of 4"):
            writer.enqueue([b"y"], p.waiter, time.monotonic() + 0.05)
        for _ in range(4):  # nothing of the refused message is there
            message = readers[1].poll()
            assert message is not None
            assert bytes(message.data) == b"x"
            message.release()
        assert readers[1].poll() is None


def test_a_dead_reader_ends_the_wait_for_room() -> None:
    def never_reads(p: Pair) -> None:
        me, _, _ = p.worker_ends(0)
        me.wait(lambda: None)

    with pair(1, 64, 2) as p, children() as start:
        child = start(never_reads, p)
        writer, _ = p.owner_ends()
        dead = threading.Event()

        def alive() -> None:
            if dead.is_set():
                raise ChildProcessError("worker 0 was killed by SIGKILL")

        def supervise() -> None:
            child.kill()
            dead.set()
            p.waiter.ring()

        thread = threading.Timer(0.05, supervise)
        thread.start()
        for _ in range(2):
            writer.enqueue([b"x"], p.waiter, soon(), alive)
        with pytest.raises(ChildProcessError, match="SIGKILL"):
            writer.enqueue([b"x"], p.waiter, soon(), alive)
        thread.join()


def test_a_message_over_the_ring_is_refused_and_the_queue_goes_on() -> None:
    with pair(1, 64, 4) as p:
        writer, _ = p.owner_ends()
        reader = p.down.reader()
        with pytest.raises(MessageTooLargeError, match="--mq-slots or --mq-slot-bytes"):
            writer.enqueue([bytes(writer.largest_message + 1)], p.waiter, soon())
        writer.enqueue([bytes(writer.largest_message)], p.waiter, soon())
        message = reader.poll()
        assert message is not None
        assert len(message.data) == writer.largest_message
        message.release()
        answers = p.up[0].writer([], "--mq-answer-slots")
        with pytest.raises(MessageTooLargeError, match="raise --mq-answer-slots"):
            answers.try_write([bytes(1000)])


def test_serialised_once_and_seen_by_every_reader() -> None:
    with pair(4, 64, 8) as p:
        writer, _ = p.owner_ends()
        registry = CodecRegistry()
        kind, parts = registry.encode_inline({"a": [1, 2]})
        writer.enqueue(parts, p.waiter, kind=kind)
        for i in range(4):
            reader = p.down.reader(i)
            message = reader.poll()
            assert message is not None
            with message:
                assert registry.decode(message.kind, message.data) == {"a": [1, 2]}


def test_a_message_may_outlive_the_queue() -> None:
    with pair(1, 64, 8) as p:
        writer, _ = p.owner_ends()
        reader = p.down.reader()
        writer.enqueue([b"hello"], p.waiter)
        message = reader.poll()
        assert message is not None
        reader.close()
        writer.close()
    assert bytes(message.data) == b"hello"
    del message, reader


def test_reading_does_not_wake_a_writer_that_has_room() -> None:
    with pair(1, 64, 8) as p:
        writer, _ = p.owner_ends()
        reader = p.down.reader(0, p.waiter.ringer(5))
        before = p.waiter._bell.value()
        for _ in range(50):
            writer.enqueue([b"x"], p.waiter)
            message: Any = reader.poll()
            message.release()
        assert p.waiter._bell.value() == before


PROGRAM = """
import sys
from drumline.transport import BroadcastQueue, Doorbell, Waiter
bell_fd, my_fd, down_fd, up_fd = map(int, sys.argv[1:])
me, bell = Waiter.attach(my_fd), Doorbell.attach(bell_fd, 1)
reader, writer = BroadcastQueue.attach(down_fd).reader(0, bell), BroadcastQueue.attach(up_fd).writer([bell])
for _ in range(50):
    with me.wait(reader.poll) as message:
        data = bytes(message.data)
    writer.enqueue([data[::-1]], me)
heavy = {"torch", "numpy", "transformers", "zmq"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else me.lost_wakes)
"""


def test_an_executed_process_attaches_and_imports_nothing_heavy() -> None:
    with pair(1, 64, 4) as p:
        fds = (p.waiter.fd, p.worker_waiters[0].fd, p.down.fd, p.up[0].fd)
        program = subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, fds)], pass_fds=fds)
        try:
            writer, (reader,) = p.owner_ends()
            for number in range(50):
                writer.enqueue([b"number", bytes([number])], p.waiter, soon())
                message = p.waiter.wait(reader.poll, soon())
                assert message is not None
                with message:
                    assert bytes(message.data) == bytes([number]) + b"rebmun"
            assert program.wait(20) == 0
        finally:
            program.kill()
            program.wait()


@pytest.mark.alone
def test_nothing_has_a_name() -> None:
    def idle(p: Pair, i: int) -> None:
        me, _, _ = p.worker_ends(i)
        me.wait(lambda: None)

    before = sorted(Path("/dev/shm").iterdir())
    with pair(2, 4096, 8) as p, children() as start:
        workers: list[Child] = [start(idle, p, i) for i in range(2)]
        assert sorted(Path("/dev/shm").iterdir()) == before
        for worker in workers:
            worker.kill()
    assert sorted(Path("/dev/shm").iterdir()) == before
