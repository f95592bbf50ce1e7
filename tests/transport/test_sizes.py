"""Messages of any size: in pieces, through the arena, in one record; order between all of them; no step in the cost."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from drumline.errors import ChannelClosedError, MessageTooLargeError, RPCTimeoutError, TransportError
from drumline.transport import BroadcastQueue, Doorbell, QueueWriter, RingLayout, RingReader, RingWriter, Waiter
from drumline.transport import broadcast as broadcast_module

from .procs import children

NEAR_WRAP = 2**32 - 3
MIB = 1 << 20


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def pattern(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


class PiecesMachine(RuleBasedStateMachine):
    """Long messages piece by piece, short ones between them, some given up on; readers at their own pace."""

    @initialize(slots=st.integers(1, 9), n_readers=st.integers(1, 3), start=st.sampled_from([0, NEAR_WRAP, 2**31 - 2]))
    def begin(self, slots: int, n_readers: int, start: int) -> None:
        layout = RingLayout(64, slots, n_readers)
        buf = memoryview(bytearray(layout.total_bytes))
        layout.init(buf, start)
        self.writer = RingWriter(buf)
        self.readers = [RingReader(buf, i) for i in range(n_readers)]
        self.queues: list[deque[tuple[int, bytes, list[bytes]]]] = [deque() for _ in range(n_readers)]
        self.pieces = None
        self.count = 0

    def message(self, length: int) -> tuple[int, bytes, list[bytes]]:
        self.count += 1
        data = pattern(length, self.count)
        buffers = [data[:7], b"", data[::-1]] if self.count % 3 == 0 else []
        return self.count, data, buffers

    def arrived(self, message: tuple[int, bytes, list[bytes]]) -> None:
        for queue in self.queues:
            queue.append(message)

    @precondition(lambda self: self.pieces is None)
    @rule(length=st.integers(0, 60))
    def write_short(self, length: int) -> None:
        kind, data, buffers = message = self.message(length)
        try:
            if self.writer.try_write([data], kind, buffers):
                self.arrived(message)
        except MessageTooLargeError:
            assert self.writer.layout.slots < 6

    @precondition(lambda self: self.pieces is None)
    @rule(length=st.integers(0, 3000))
    def begin_long(self, length: int) -> None:
        self.long = self.message(length)
        kind, data, buffers = self.long
        self.pieces = self.writer.start([data[:50], memoryview(data)[50:]], kind, buffers)

    @precondition(lambda self: self.pieces is not None)
    @rule(most=st.integers(1, 5))
    def go_on(self, most: int) -> None:
        while most and self.pieces.advance():
            most -= 1
            if not self.pieces.rest:
                assert self.pieces.done
                self.pieces.close()
                self.pieces = None
                self.arrived(self.long)
                return

    @precondition(lambda self: self.pieces is not None)
    @rule()
    def give_up(self) -> None:
        self.pieces.close()
        self.pieces = None

    @rule(pick=st.integers(0, 2))
    def read(self, pick: int) -> None:
        index = pick % len(self.readers)
        message = self.readers[index].poll()
        if message is None:
            assert not self.queues[index]
            return
        kind, data, buffers = self.queues[index].popleft()
        assert (message.kind, bytes(message.data)) == (kind, data)
        assert [bytes(buffer) for buffer in message.buffers] == buffers
        held = list(message.buffers)
        message.release()
        message.release()
        assert [bytes(buffer) for buffer in held] == buffers
        assert self.readers[index].rereads == 0


PiecesMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestPiecesAgainstModel = PiecesMachine.TestCase


class Queue:
    """A queue with its waiters; the writer here, readers in threads or processes."""

    def __init__(self, slot_bytes: int, slots: int, n: int = 1, arena: int = 0, largest: int | None = 64 * MIB) -> None:
        self.waiter = Waiter.create("writer")
        self.waiters = [Waiter.create(f"reader-{i}") for i in range(n)]
        self.queue = BroadcastQueue.create("sizes", slot_bytes, slots, n, arena)
        self.largest = largest

    def writer(self) -> QueueWriter:
        return self.queue.writer([waiter.ringer(1) for waiter in self.waiters], largest=self.largest)

    def reader(self, index: int = 0) -> tuple[Waiter, RingReader]:
        """For another process."""
        bell = Doorbell.attach(self.waiter.fd, 1 + index)
        queue = BroadcastQueue.attach(self.queue.fd, self.queue.arena_fd)
        return Waiter.attach(self.waiters[index].fd), queue.reader(index, bell)

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        for thing in (self.queue, self.waiter, *self.waiters):
            thing.close()


SIZES = [0, 1, 4000, 4064, 4065, 16383, 16384, 30_000, 70_000, 200_000, 1_000_000, 5_000_000]


@pytest.mark.parametrize("arena", [0, 100_000, 3 * MIB])
def test_all_sizes_arrive_whole_and_in_order(arena: int) -> None:
    """Parts and buffers of every size, one after another, through a ring of 40 KiB to two readers."""
    sizes = [*SIZES, *reversed(SIZES), *(size for pair in zip(SIZES, reversed(SIZES), strict=True) for size in pair)]

    def read(q: Queue, index: int) -> None:
        me, reader = q.reader(index)
        for number, size in enumerate(sizes):
            message = me.wait(reader.poll, soon())
            assert message is not None
            part, buffer = pattern(size // 3, number), pattern(size - size // 3, -number - 1)
            assert message.kind == number
            assert message.data == part
            assert message.buffers[0] == buffer
            assert message.buffers[1] == b"last"
            message.release()
        assert me.lost_wakes == reader.rereads == 0

    with Queue(4096, 10, 2, arena) as q, children() as start:
        readers = [start(read, q, index) for index in range(2)]
        writer = q.writer()
        for number, size in enumerate(sizes):
            part, buffer = bytearray(pattern(size // 3, number)), bytearray(pattern(size - size // 3, -number - 1))
            writer.enqueue([part], q.waiter, soon(), None, number, [buffer, b"last"])
            part[:] = bytes(len(part))  # the caller may change them at once
            buffer[:] = bytes(len(buffer))
        assert [reader.join() for reader in readers] == [0, 0]
        assert q.waiter.lost_wakes == 0
        writer.close()


def test_the_limit_is_the_declared_one() -> None:
    with Queue(64, 4, largest=10_000) as q:
        writer = q.writer()
        assert writer.largest_message == 10_000
        with pytest.raises(MessageTooLargeError, match="of 10001 bytes, and the limit is 10000"):
            writer.enqueue([bytes(5000)], q.waiter, buffers=[bytes(5001)])
        reader = q.queue.reader(0, q.waiter.ringer(1))
        got: list[int] = []

        def read() -> None:
            message = q.waiters[0].wait(reader.poll, soon())
            assert message is not None
            got.append(len(message.data))
            message.release()

        thread = threading.Thread(target=read)
        thread.start()
        writer.enqueue([bytes(10_000)], q.waiter, soon())
        thread.join(10)
        assert got == [10_000]
        writer.close()
        reader.close()


def test_a_deadline_in_the_middle_of_a_message_leaves_nothing_of_it() -> None:
    with Queue(64, 8, arena=MIB) as q:
        writer = q.writer()
        reader = q.queue.reader()
        for _ in range(3):
            with pytest.raises(
                RPCTimeoutError, match=r"reader 0 is the slowest \(slots not read yet, by reader: \[8\]"
            ):
                writer.enqueue([bytes(5000)], q.waiter, time.monotonic() + 0.02, buffers=[b"b" * 100_000])
            while writer.backlog() != [0]:
                assert reader.poll() is None
        writer.enqueue([b"next"], q.waiter, soon())
        message = reader.poll()
        assert message is not None
        assert bytes(message.data) == b"next"
        message.release()
        arena = writer._ring.arena
        assert arena is not None
        assert arena.used_bytes == 0
        writer.close()
        reader.close()


def test_a_full_arena_is_waited_for_and_then_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lets go in time is waited for; one that does not gets the message through the ring all the same."""
    monkeypatch.setattr(broadcast_module, "PATIENCE_S", 5.0)
    data = [pattern(800_000, 1), pattern(900_000, 2), pattern(700_000, 3)]

    def read(q: Queue) -> None:
        me, reader = q.reader()
        held = []
        for number in range(3):
            message = me.wait(reader.poll, soon())
            assert message is not None
            if number == 0:
                held = list(message.buffers)
                message.release()
                time.sleep(0.05)
                assert held.pop() == data[0]
                continue
            held += message.buffers
            in_arena = type(held[-1].obj).__name__.startswith("c_char")
            assert in_arena == (number == 1), f"message {number}"
            message.release()
        assert [bytes(view) for view in held] == data[1:]
        assert me.lost_wakes == 0

    with Queue(4096, 16, arena=MIB) as q, children() as start:
        reader = start(read, q)
        writer = q.writer()
        writer.enqueue([], q.waiter, soon(), buffers=[data[0]])
        begin = time.monotonic()
        writer.enqueue([], q.waiter, soon(), buffers=[data[1]])
        assert time.monotonic() - begin < 4, "rung by the end of the view, not by the end of patience"
        writer._patience_s = 0.05
        writer.enqueue([], q.waiter, soon(), buffers=[data[2]])
        assert reader.join() == 0
        assert q.waiter.lost_wakes == 0
        writer.close()


def test_sending_without_waiting() -> None:
    """For who has other things to wait for: any size, nothing but calls of ``go_on``; also of no bytes at all."""
    with Queue(64, 4, arena=MIB) as q:
        writer, reader = q.writer(), q.queue.reader()
        for parts, buffers in (
            ([], []),
            ([b"x" * 2000], []),
            ([], [b"y" * 700_000]),
            ([b"z" * 500], [b"", b"w" * 20_000]),
        ):
            sending = writer.start(parts, 3, buffers)
            message = None
            for _ in range(100):
                done = sending.go_on()
                message = reader.poll()
                if message is not None:
                    break
            assert done
            assert message is not None
            assert bytes(message.data) == b"".join(parts)
            assert [bytes(buffer) for buffer in message.buffers] == buffers
            message.release()
            sending.close()
            del message
        writer.close()
        reader.close()


def test_a_death_in_the_middle_of_a_message_ends_the_wait() -> None:
    with Queue(64, 8) as q:
        writer = q.writer()
        dead = threading.Event()

        def alive() -> None:
            if dead.is_set():
                raise ChannelClosedError("reader 0 is gone")

        thread = threading.Timer(0.05, lambda: (dead.set(), q.waiter.ring()))
        thread.start()
        with pytest.raises(ChannelClosedError, match="reader 0"):
            writer.enqueue([bytes(5000)], q.waiter, soon(), alive)
        thread.join()
        writer.close()


def test_a_piece_without_its_beginning_is_refused() -> None:
    layout = RingLayout(64, 8, 1)
    buf = memoryview(bytearray(layout.total_bytes))
    layout.init(buf)
    writer, reader = RingWriter(buf), RingReader(buf)
    writer._put([b"tail"], 4, 1, 0, 0, 1 << 31, 0)
    with pytest.raises(TransportError, match="without the one before it"):
        reader.poll()


@given(cut=st.lists(st.integers(0, 700), max_size=6), slots=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_pieces_of_any_parts_join_to_the_same_bytes(cut: list[int], slots: int) -> None:
    layout = RingLayout(100, slots, 1)
    buf = memoryview(bytearray(layout.total_bytes))
    layout.init(buf, NEAR_WRAP)
    writer, reader = RingWriter(buf), RingReader(buf)
    parts = [pattern(length, index) for index, length in enumerate(cut)]
    pieces = writer.start(parts, 9)
    message = None
    for _ in range(1000):
        moved = pieces.advance()
        message = reader.poll()
        if message is not None:
            break
        assert moved or pieces.rest
    assert message is not None
    assert bytes(message.data) == b"".join(parts)
    assert message.kind == 9
    message.release()


def _echo(q: Queue, up: Queue, index: int) -> None:
    me, reader = q.reader(index)
    writer = up.queue.writer([Doorbell.attach(up.waiters[0].fd, 1 + index)]) if index == 0 else None
    while True:
        message = me.wait(reader.poll, soon())
        assert message is not None
        kind, total = message.kind, sum(view[-1] for view in message.buffers)
        message.release()
        if writer is not None:
            writer.enqueue([bytes(1)], me, soon(), kind=total)
        if kind:
            return


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.alone
def test_no_size_costs_out_of_proportion(n: int) -> None:
    """Round trips of growing buffers, geometry of an executor: where the way changes no step larger than twice the
    ratio of the sizes, and no cliff past the arena. Least of several, since the machine does other things too."""
    sizes = [
        1024,
        4096,
        15_000,
        17_000,
        60_000,
        70_000,
        250_000,
        MIB,
        3_900_000,
        4_400_000,
        10 * MIB,
        35 * MIB,
        45 * MIB,
    ]
    with Queue(65536, 64, n, 40 * MIB) as q, Queue(16384, 32) as up, children() as start:
        echoes = [start(_echo, q, up, index) for index in range(n)]
        writer = q.writer()
        answers = up.queue.reader(0, q.waiters[0].ringer(2))
        costs = []
        for size in sizes:
            data = b"\x01" * size
            times = []
            for _ in range(12 if size < MIB else 6):
                begin = time.perf_counter_ns()
                writer.enqueue([b"head"], q.waiter, soon(), buffers=[data])
                message = up.waiters[0].wait(answers.poll, soon())
                assert message is not None
                assert message.kind == 1
                message.release()
                times.append(time.perf_counter_ns() - begin)
            costs.append(min(*times[2:], int(statistics.median(times))) / 1000)
        writer.enqueue([], q.waiter, soon(), kind=1)
        assert [child.join() for child in echoes] == [0] * n
        writer.close()
        answers.close()
    floor = 300.0  # below this many us it is the wake-ups that are measured
    for (small, before), (large, after) in itertools.pairwise(zip(sizes, costs, strict=True)):
        # Sizes on both sides of a boundary lie close together. Between others lie the caches of the machine; past the
        # arena everything is copied twice, the second time into fresh memory.
        most = 12 if large > 40 * MIB else 2 if large < 1.4 * small else 5
        limit = most * max(before, floor) * max(large / small, 1.0)
        assert after <= limit, f"{small} bytes cost {before:.0f} us, {large} bytes {after:.0f} us: {costs}"
