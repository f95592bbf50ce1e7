"""Machine code and Python write the same bytes, read each other's, and refuse the same things."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.errors import TransportError
from drumline.transport import (
    BroadcastQueue,
    CodecRegistry,
    Doorbell,
    MessageQueue,
    QueueWriter,
    RingReader,
    RingWriter,
    SharedMemory,
    Waiter,
)
from drumline.transport import native as machine
from drumline.transport.compiled import READY
from drumline.transport.doorbell import DOORBELL_BYTES
from drumline.transport.records import HEAD_BYTES, RingLayout

NEAR_WRAP = 2**32 - 3
Message = tuple[int, bytes]


def test_there_is_machine_code_here() -> None:
    assert READY
    assert machine.native() is machine.native()


@pytest.mark.parametrize(("value", "there"), [("", True), ("0", True), ("1", False), ("yes", False)])
def test_the_environment_can_do_without(monkeypatch: pytest.MonkeyPatch, value: str, there: bool) -> None:
    monkeypatch.setenv(machine.NO_NATIVE_VARIABLE, value)
    assert (machine.native() is not None) is there


def test_without_a_futex_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMLINE_NO_FUTEX", "1")
    assert machine.native() is None


def test_a_failing_compiler_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("no llvmlite here")

    machine._compiled.cache_clear()
    monkeypatch.setattr(machine, "_compile", fail)
    try:
        assert machine.native() is None
        sender, reader, _ = ends("native", "native", 64, 2, 5)
        assert sender.write_small(b"hello", 3)
        assert reader.receive(keep) == ((3, b"hello"),)
    finally:
        machine._compiled.cache_clear()


def keep(kind: int, data: memoryview, buffers: Any) -> Message:
    return kind, bytes(data)


def ends(
    writing: str, reading: str, slot_bytes: int, slots: int, start: int, bells: tuple[Doorbell, ...] = ()
) -> tuple[QueueWriter, RingReader, memoryview]:
    """Both ends of a ring in memory of this process, each with machine code or without."""
    layout = RingLayout(slot_bytes, slots, 1)
    buf = memoryview(bytearray(layout.total_bytes))
    layout.init(buf, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(machine.NO_NATIVE_VARIABLE, "0" if writing == "native" else "1")
        writer = QueueWriter(RingWriter(buf), bells)
        patch.setenv(machine.NO_NATIVE_VARIABLE, "0" if reading == "native" else "1")
        return writer, RingReader(buf), buf


messages = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=700)), max_size=12)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sent=messages,
    slots=st.integers(1, 5),
    slot_bytes=st.sampled_from([64, 128, 1024]),
    start=st.sampled_from([0, NEAR_WRAP, 2**31 - 2]),
)
def test_the_bytes_are_the_same_and_read_the_same(sent: list[Message], slots: int, slot_bytes: int, start: int) -> None:
    """Messages of all sizes up to several slots; whoever has no machine code understands who has, both ways."""
    kinds = [(writing, reading) for writing in ("native", "python") for reading in ("native", "python")]
    made = [ends(*kind, slot_bytes, slots, start) for kind in kinds]
    largest = made[0][0].largest_message
    for kind, data in sent:
        if len(data) > largest:
            continue
        for writer, _, _ in made:
            assert writer.try_write((data,), kind)
        first = bytes(made[0][2])
        assert all(bytes(buf) == first for _, _, buf in made)
        for _, reader, _ in made:
            assert reader.receive(keep) == ((kind, data),)
            assert reader.receive(keep) is None
            assert reader.rereads == 0
        first = bytes(made[0][2])
        assert all(bytes(buf) == first for _, _, buf in made)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 8191, 8192, 8193, 16352])
@pytest.mark.parametrize("byte", [0, 255])
def test_checksums_of_extreme_bytes(size: int, byte: int) -> None:
    """The sums are largest where all bytes are 255."""
    data = bytes([byte]) * size
    for writing, reading in (("native", "python"), ("python", "native")):
        writer, got, _ = ends(writing, reading, 16384, 2, 2**32 - 1)
        assert writer.try_write((data,), 7)
        assert got.receive(keep) == ((7, data),)
        assert got.rereads == 0


@pytest.mark.parametrize("place", [*range(8, 28), HEAD_BYTES, HEAD_BYTES + 4])
def test_a_wrong_byte_is_noticed(place: int) -> None:
    writer, reader, buf = ends("native", "native", 64, 2, 9)
    assert writer.write_small(b"hello", 3)
    buf[RingLayout(64, 2, 1).control_bytes + place] ^= 1
    with pytest.raises(TransportError, match="out of step"):
        reader.receive(keep)
    assert reader.rereads


def test_a_wrong_sequence_number_is_noticed() -> None:
    writer, reader, buf = ends("native", "native", 64, 2, 9)
    assert writer.write_small(b"hello", 3)
    buf[RingLayout(64, 2, 1).control_bytes] ^= 1
    with pytest.raises(TransportError, match="found message"):
        reader.receive(keep)


def test_no_room_goes_the_other_way_and_the_reader_says_when_there_is_some() -> None:
    layout = RingLayout(64, 2, 1)
    buf = memoryview(bytearray(layout.total_bytes))
    layout.init(buf, NEAR_WRAP)
    rung: list[int] = []
    writer, reader = QueueWriter(RingWriter(buf), ()), RingReader(buf, 0, lambda: rung.append(1))
    assert writer.write_small(b"one")
    assert writer.write_small(b"two")
    assert not writer.write_small(b"three")
    assert not rung
    assert reader.receive(keep) == ((0, b"one"),)
    assert rung == [1]
    assert writer.write_small(b"three")
    assert reader.receive(keep) == ((0, b"two"),)
    assert reader.receive(keep) == ((0, b"three"),)
    assert rung == [1]


def test_a_closed_ring_is_left_alone() -> None:
    writer, reader, buf = ends("native", "native", 64, 2, 9)
    before = bytes(buf)
    writer.close()
    reader.close()
    for use in (lambda: writer.write_small(b"hello"), lambda: reader.receive(keep)):
        with pytest.raises((ValueError, TypeError)):
            use()
    assert bytes(buf) == before


def test_bells_ring_with_values_that_python_never_takes() -> None:
    memory = SharedMemory.create(DOORBELL_BYTES)
    bell = Doorbell(memory, 7)
    writer, reader, _ = ends("native", "native", 64, 4, 9, (bell,))
    seen = [bell.value()]
    for number in range(600):
        if number % 3:
            assert writer.write_small(b"x")
            assert reader.receive(keep) is not None
        else:
            bell.ring()
        seen.append(bell.value())
    assert len(set(seen)) == len(seen)
    assert {value & 255 for value in seen[1:]} == {7}
    bell.close()
    assert writer.write_small(b"the bell is closed, the message is sent")
    memory.close()


def test_a_sleeper_is_woken() -> None:
    with_queue = BroadcastQueue.create("test", 256, 4)
    waiter = Waiter.create("test")
    bell = waiter.ringer(1)
    writer, reader = with_queue.writer([bell]), with_queue.reader()
    got: list[Message] = []

    def read() -> None:
        for _ in range(200):
            found = waiter.wait(lambda: reader.receive(keep))
            assert found is not None
            got.append(found[0])
            taken.release()

    taken = threading.Semaphore(0)
    thread = threading.Thread(target=read)
    thread.start()
    for number in range(200):
        assert writer.write_small(b"%d" % number)
        assert taken.acquire(timeout=4.5)  # sleepers look again after 5 s: a lost wake would be seen
    thread.join()
    assert got == [(0, b"%d" % number) for number in range(200)]
    assert waiter.lost_wakes == 0
    writer.close()
    reader.close()
    bell.close()
    waiter.close()
    with_queue.close()


def test_what_a_decoder_keeps_stays_as_it_was() -> None:
    """It must not keep anything, but here that does no harm: the bytes are its own."""
    writer, reader, _ = ends("native", "native", 64, 2, 9)
    assert writer.write_small(b"first")
    found = reader.receive(lambda kind, data, buffers: data)
    assert found is not None
    for _ in range(4):
        assert writer.write_small(b"other")
        assert reader.receive(keep) == ((0, b"other"),)
    assert found[0].readonly
    assert bytes(found[0]) == b"first"


def test_what_is_no_bytes_is_refused() -> None:
    writer, reader, _ = ends("native", "native", 64, 2, 9)
    code = machine.native()
    assert code is not None
    assert writer._send is not None
    with pytest.raises(TypeError):
        writer._send(bytearray(b"x"), 0, 0)  # type: ignore[arg-type]
    assert not writer._send(b"x", 0)  # type: ignore[call-arg]
    assert reader.receive(keep) is None


def test_nothing_is_held_by_calls() -> None:
    """References: what comes and goes leaves as many objects as there were."""
    writer, reader, _ = ends("native", "native", 1024, 2, 9)
    data, none = bytes(range(256)) * 3, sys.getrefcount(None)
    before = sys.getrefcount(data)
    tracemalloc.start()
    try:
        for number in range(2000):
            assert writer.write_small(data, 5)
            assert reader.receive(keep) == ((5, data),)
            assert reader.receive(keep) is None
            if number == 100:
                held = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] - held < 10_000
    finally:
        tracemalloc.stop()
    assert sys.getrefcount(data) == before
    assert abs(sys.getrefcount(None) - none) < 100


def test_a_receive_takes_sleeps_and_says_how_a_sleep_ended() -> None:
    sender, reader, _ = ends("native", "native", 64, 4, 2**32 - 2)
    waiter = Waiter.create()
    bell = waiter.ringer(1)
    receive = reader.receiver(waiter._bell)
    assert receive is not None
    seen = waiter.look()
    assert sender.write_small(b"one", 3)
    assert receive(seen, 0) == b"one"
    assert reader.taken(b"one", keep) == (3, b"one")
    assert receive(seen, 1_000_000) == machine.LATE
    bell.ring()
    assert receive(seen, 10**10) is None  # rung for something else: whoever waits looks at everything

    noted: list[int] = []

    def handle(number: int, _frame: object) -> None:
        assert sender.write_small(b"two", 4)  # and nobody rings
        noted.append(number)

    previous = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert receive(waiter.look(), 10**10) == machine.INTERRUPTED
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert noted
    assert receive(0, 0) == b"two"  # what came meanwhile is there for the next look

    def send() -> None:
        while not waiter._bell.sleepers:
            pass
        assert sender.write_small(b"three", 5)
        bell.ring()

    thread = threading.Thread(target=send)
    thread.start()
    assert receive(waiter.look(), 10**10) == b"three"
    thread.join()
    waiter.close()
    assert receive(seen, 10**10) == machine.CLOSED
    bell.close()


@pytest.mark.parametrize("way", ["native", "python"])
def test_a_queue_counts_what_it_finds_without_a_ring(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv(machine.NO_NATIVE_VARIABLE, "0" if way == "native" else "1")
    monkeypatch.setattr("drumline.transport.waiter.RECHECK_S", 0.2)
    with MessageQueue(1) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        reader._waiter.predictor = None
        assert (reader._sleep is not None) is (way == "native")
        local = queue._local
        assert local is not None

        def send() -> None:
            while not reader._waiter._bell.sleepers:
                pass
            kind, parts, _ = CodecRegistry().encode("silent")
            assert local._writer._ring.try_write(parts, kind)

        thread = threading.Thread(target=send)
        thread.start()
        assert reader.dequeue(timeout=20) == "silent"
        thread.join()
        assert reader._waiter.lost_wakes == 1
        queue.enqueue(1)
        assert reader.dequeue(timeout=20) == 1
        assert reader._waiter.lost_wakes == 1


ASLEEP_AT_THE_END = """
import threading, time
from drumline import MessageQueue

queue = MessageQueue(1)
reader = MessageQueue.attach(queue.handles[0])
reader._waiter.predictor = None
for sleep in (reader.dequeue, lambda: queue._waiter.wait(lambda: None)):
    threading.Thread(target=sleep, daemon=True).start()
while not (reader._waiter._bell.sleepers and queue._waiter._bell.sleepers):
    time.sleep(0.001)
print("bye")
"""


def test_a_program_may_end_while_its_daemon_threads_sleep() -> None:
    """They never come back from there: Python ends them when they ask for its lock."""
    done = subprocess.run([sys.executable, "-c", ASLEEP_AT_THE_END], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")
