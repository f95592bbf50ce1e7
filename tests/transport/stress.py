"""One writer, n readers, messages of all sizes with numbers and checksums, random sleeps, load beside it.

Everything is small on purpose (slots of 4 KiB, 24 of them, an arena of 1 MiB), so that records wrap, messages go in
pieces, the arena fills up, and both ends sleep and are woken all the time.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

from drumline.transport import BroadcastQueue, Doorbell, Waiter

from .procs import children

HEAD = struct.Struct("=QIB")
POOL = random.Random(1).randbytes(1 << 22)
LARGEST = 8 << 20
DEADLINE_S = 120.0
MOST_HELD = 12


@dataclass
class Outcome:
    """What a run has shown, beside the checks inside it."""

    lost_wakes: int
    resident: int
    """Bytes of the ring's and the arena's memory that were ever touched."""
    shared: int
    """And that they have."""


def _piece(rng: random.Random, most: int) -> memoryview:
    length = rng.randrange(most)
    at = rng.randrange(len(POOL) - length)
    return memoryview(POOL)[at : at + length]


def _message(rng: random.Random, number: int) -> tuple[list[bytes | memoryview], list[memoryview]]:
    draw = rng.random()
    if draw < 0.80:
        body, buffers = _piece(rng, 800), []
    elif draw < 0.93:
        body, buffers = _piece(rng, 20_000), [_piece(rng, 3_000)]
    elif draw < 0.985:
        body, buffers = _piece(rng, 300), [_piece(rng, 120_000) for _ in range(rng.randrange(1, 4))]
    elif draw < 0.998:
        body, buffers = _piece(rng, 200_000), []
    else:
        body, buffers = _piece(rng, 300_000), [_piece(rng, 2_500_000)]
    checksum = crc32(body)
    for buffer in buffers:
        checksum = crc32(buffer, checksum)
    return [HEAD.pack(number, checksum, len(buffers)), body], buffers


def _doze(rng: random.Random) -> None:
    draw = rng.random()
    if draw < 0.002:
        time.sleep(rng.random() * 0.01)
    elif draw < 0.02:
        time.sleep(rng.random() * 0.0003)


def _read(queue: BroadcastQueue, waiters: list[Waiter], index: int, count: int) -> None:
    rng = random.Random(100 + index)
    me = Waiter.attach(waiters[1 + index].fd)
    reader = BroadcastQueue.attach(queue.fd, queue.arena_fd).reader(index, Doorbell.attach(waiters[0].fd, 1 + index))
    held: list[tuple[memoryview, int]] = []
    before = _own_bytes()
    for number in range(count):
        message = me.wait(reader.poll, time.monotonic() + DEADLINE_S)
        assert message is not None, f"message {number} never came"
        got, checksum, n_buffers = HEAD.unpack_from(message.data)
        assert got == number, f"message {got} in the place of {number}"
        assert message.kind == number % 1000
        sum_ = crc32(message.data[HEAD.size :])
        buffers = message.buffers
        message.release()
        assert len(buffers) == n_buffers
        for buffer in buffers:
            sum_ = crc32(buffer, sum_)
            if len(buffer) > 10_000 and rng.random() < 0.3:
                held.append((buffer, crc32(buffer)))
        assert sum_ == checksum, f"message {number} is damaged"
        while len(held) > MOST_HELD or (held and rng.random() < 0.1):
            view, sum_ = held.pop(rng.randrange(len(held)))
            assert crc32(view) == sum_, "a view has changed while it was held"
            del view
        _doze(rng)
    assert me.lost_wakes == 0, f"{me.lost_wakes} wakes were lost"
    assert reader.rereads == 0, f"{reader.rereads} records had to be read again"
    assert _own_bytes() - before < 64 << 20, "memory grows"


def _own_bytes() -> int:
    """Anonymous memory of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _burn() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(20_000))


def run(count: int, cores: Iterable[int], *, n_readers: int = 3, load: int = 0) -> Outcome:
    """Send ``count`` messages on these cores, with ``load`` processes that compute beside it. Fails by assertion."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    queue = BroadcastQueue.create("stress", 4096, 24, n_readers, arena_bytes=1 << 20)
    waiters = [Waiter.create(f"stress-{i}") for i in range(1 + n_readers)]
    try:
        with children() as start:
            for _ in range(load):
                start(_burn)
            readers = [start(_read, queue, waiters, index, count) for index in range(n_readers)]
            _write(queue, waiters, count)
            codes = [reader.join(DEADLINE_S) for reader in readers]
        assert codes == [0] * n_readers
        resident = sum(os.fstat(fd).st_blocks * 512 for fd in (queue.fd, queue.arena_fd))
        shared = sum(os.fstat(fd).st_size for fd in (queue.fd, queue.arena_fd))
        return Outcome(waiters[0].lost_wakes, resident, shared)
    finally:
        for thing in (queue, *waiters):
            thing.close()
        os.sched_setaffinity(0, before)


def _write(queue: BroadcastQueue, waiters: list[Waiter], count: int) -> None:
    rng = random.Random(7)
    writer = queue.writer([waiter.ringer(1) for waiter in waiters[1:]], largest=LARGEST)
    for number in range(count):
        parts, buffers = _message(rng, number)
        writer.enqueue(parts, waiters[0], time.monotonic() + DEADLINE_S, None, number % 1000, buffers)
        _doze(rng)
    writer.close()
