"""The ring without processes: against a model, at the wrap of the counters and of the ring, and what it refuses."""

from __future__ import annotations

import pickle
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.errors import MessageTooLargeError, TransportError
from drumline.transport.native import NO_NATIVE_VARIABLE
from drumline.transport.ring import HEAD_BYTES, Message, RingLayout, RingReader, RingWriter, ring_bytes

NEAR_WRAP = 2**32 - 3


def make(slot_bytes: int, slots: int, n_readers: int, start: int = NEAR_WRAP) -> memoryview:
    layout = RingLayout(slot_bytes, slots, n_readers)
    buf = memoryview(bytearray(layout.total_bytes))
    layout.init(buf, start)
    return buf


def pattern(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


class RingMachine(RuleBasedStateMachine):
    """One writer, n readers at their own pace; the model is a queue for each reader and a count of slots."""

    @initialize(
        slots=st.integers(1, 9),
        n_readers=st.integers(1, 4),
        start=st.sampled_from([0, 5, NEAR_WRAP, 2**32 - 1, 2**31 - 2]),
    )
    def begin(self, slots: int, n_readers: int, start: int) -> None:
        self.buf = make(64, slots, n_readers, start)
        self.wakes = 0
        self.writer = RingWriter(self.buf)
        self.readers = [RingReader(self.buf, i, self.on_wanted) for i in range(n_readers)]
        self.queues: list[deque[tuple[int, bytes]]] = [deque() for _ in range(n_readers)]
        self.open: list[Message | None] = [None] * n_readers
        self.refused: int | None = None
        self.count = 0

    def on_wanted(self) -> None:
        self.wakes += 1

    def slots_used(self) -> int:
        layout = self.writer.layout
        return max(sum(layout.slots_of(len(data)) for _, data in queue) for queue in self.queues)

    @rule(length=st.integers(0, 700), cut=st.integers(0, 700), kind=st.integers(0, 255))
    def write(self, length: int, cut: int, kind: int) -> None:
        layout = self.writer.layout
        data = pattern(length, self.count)
        parts = [data[:cut], memoryview(data)[cut:], b""]
        self.count += 1
        if length > layout.largest_message:
            with pytest.raises(MessageTooLargeError):
                self.writer.try_write(parts, kind)
            return
        needed = layout.slots_of(length)
        fits = needed <= layout.slots - self.slots_used()
        assert self.writer.try_write(parts, kind) is fits
        if fits:
            self.refused = None
            for queue in self.queues:
                queue.append((kind, data))
        else:
            self.refused = needed

    @precondition(lambda self: any(self.queues))
    @rule(pick=st.integers(0, 3), at_once=st.booleans())
    def read(self, pick: int, at_once: bool) -> None:
        index = pick % len(self.readers)
        before = self.wakes
        if at_once:
            found = self.readers[index].receive(lambda kind, data, buffers: (kind, bytes(data), buffers))
            assert found == (((*self.queues[index][0], ()),) if self.queues[index] else None)
            if found is None:
                return
        else:
            message = self.readers[index].poll()
            if not self.queues[index]:
                assert message is None
                return
            assert message is not None
            assert (message.kind, bytes(message.data)) == self.queues[index][0]
            message.release()
            message.release()
        self.queues[index].popleft()
        # a writer that was refused is told of every slot that comes free; one that was not may be told
        assert self.wakes <= before + 1
        if self.refused is not None:
            assert self.wakes == before + 1

    @invariant()
    def backlog(self) -> None:
        layout = self.writer.layout
        assert self.writer.backlog() == [sum(layout.slots_of(len(d)) for _, d in queue) for queue in self.queues]


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestRingAgainstModel = RingMachine.TestCase


@given(
    slot_bytes=st.integers(1, 300),
    slots=st.integers(1, 7),
    lengths=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    start=st.integers(2**32 - 9, 2**32 + 9),
)
@settings(max_examples=60, deadline=None)
def test_any_length_up_to_the_whole_ring_arrives(slot_bytes: int, slots: int, lengths: list[float], start: int) -> None:
    buf = make(slot_bytes, slots, 2, start % 2**32)
    writer, readers = RingWriter(buf), [RingReader(buf, i) for i in range(2)]
    for number, share in enumerate(lengths):
        data = pattern(round(share * writer.layout.largest_message), number)
        assert writer.try_write([data], number)
        for reader in readers:
            message = reader.poll()
            assert message is not None
            with message:
                assert bytes(message.data) == data
            assert reader.poll() is None


@pytest.mark.parametrize("moment", range(1, 5))
def test_a_slot_freed_at_any_moment_of_a_refusal_is_used_or_rung_for(
    monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The reader frees the only slot at the n-th fence that the writer passes: the writer must find it or be rung."""
    buf = make(64, 1, 1)
    rung: list[int] = []
    writer, reader = RingWriter(buf), RingReader(buf, 0, lambda: rung.append(1))
    assert writer.try_write([b"old"])
    message = reader.poll()
    assert message is not None
    passed = 0

    def fence_and_free() -> None:
        nonlocal passed
        passed += 1
        if passed == moment:
            message.release()

    monkeypatch.setattr("drumline.transport.ring.fence", fence_and_free)
    monkeypatch.setattr("drumline.transport.ring.order", fence_and_free)
    written = writer.try_write([b"new"])
    message.release()
    assert written or rung
    assert written or writer.try_write([b"new"])


@pytest.mark.parametrize("at_once", [False, True])
def test_fences_stand_where_the_memo_says(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """x86 hides a missing fence, so look where they are: data | written; decoded | read | wanted."""
    monkeypatch.setenv(NO_NATIVE_VARIABLE, "1")
    buf = make(64, 8, 1, start=100)
    writer, reader = RingWriter(buf), RingReader(buf)
    words = buf[: writer.layout.control_bytes].cast("I")
    at_fence: list[tuple[bytes, int, int]] = []

    def note() -> None:
        data = writer.layout.control_bytes + HEAD_BYTES
        at_fence.append((bytes(buf[data : data + 3]), words[16], words[32]))

    monkeypatch.setattr("drumline.transport.ring.fence", note)
    monkeypatch.setattr("drumline.transport.ring.order", note)
    writer.try_write([b"new"])
    assert at_fence == [(b"new", 100, 100)]
    if at_once:
        assert reader.receive(lambda kind, data, buffers: len(at_fence)) == (2,)
    else:
        message = reader.poll()
        assert message is not None
        assert len(at_fence) == 2  # between written and the data
        message.release()
    assert at_fence[2:] == [(b"new", 101, 100), (b"new", 101, 101)]


def test_message_over_the_ring_names_the_flags() -> None:
    buf = make(64, 4, 1)
    writer = RingWriter(buf)
    assert writer.try_write([bytes(writer.layout.largest_message)])
    with pytest.raises(MessageTooLargeError, match=r"--mq-slots or --mq-slot-bytes") as caught:
        writer.try_write([bytes(writer.layout.largest_message + 1)])
    assert f"whose largest is {writer.layout.largest_message} bytes" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_largest_message_counts_the_head() -> None:
    assert RingLayout(64, 1, 1).largest_message == 64 - HEAD_BYTES
    for slots in (1, 2, 3, 8):
        layout = RingLayout(64, slots, 1)
        assert layout.slots_of(layout.largest_message) == slots
        assert layout.slots_of(layout.largest_message + 1) == slots + 1


def test_sizes_are_whole_cache_lines_and_words_have_their_own() -> None:
    layout = RingLayout(65, 3, 5)
    assert layout.slot_bytes == 128
    assert layout.total_bytes == ring_bytes(65, 3, 5) == (2 + 5) * 64 + 3 * 128
    buf = make(64, 8, 3, start=1000)
    writer = RingWriter(buf)
    readers = [RingReader(buf, i) for i in range(3)]
    writer.try_write([b"x"])
    message = readers[1].poll()
    assert message is not None
    message.release()
    words = buf[: writer.layout.control_bytes].cast("I")
    assert [words[line * 16] for line in range(1, 5)] == [1001, 1000, 1001, 1000]


def test_parts_may_be_any_buffer_and_are_copied() -> None:
    buf = make(64, 8, 1)
    writer, reader = RingWriter(buf), RingReader(buf)
    numbers = memoryview(bytearray(32)).cast("I")
    numbers[3] = 77
    grid = memoryview(bytes(range(12))).cast("B", (3, 4))
    mutable = bytearray(b"before")
    assert writer.try_write([mutable, numbers, grid, b"", b"end"])
    mutable[:] = b"after!"
    numbers[3] = 0
    message = reader.poll()
    assert message is not None
    data = bytes(message.data)
    assert data == b"before" + bytes(12) + (77).to_bytes(4, "little") + bytes(16) + bytes(range(12)) + b"end"
    message.release()


def test_parts_of_other_items_also_wrap() -> None:
    buf = make(64, 4, 1)
    writer, reader = RingWriter(buf), RingReader(buf)
    for number in range(9):
        numbers = memoryview(bytearray(100)).cast("I")
        numbers[number] = number
        assert writer.try_write([numbers])
        message = reader.poll()
        assert message is not None
        assert message.data.cast("B").cast("I")[number] == number
        message.release()


def test_one_message_at_a_time() -> None:
    buf = make(64, 8, 1)
    writer, reader = RingWriter(buf), RingReader(buf)
    writer.try_write([b"one"])
    writer.try_write([b"two"])
    first = reader.poll()
    assert first is not None
    with pytest.raises(TransportError, match="release a message"):
        reader.poll()
    first.release()
    second = reader.poll()
    assert second is not None
    assert bytes(second.data) == b"two"


def test_released_data_cannot_be_read_and_kept_data_is_noticed() -> None:
    buf = make(64, 8, 1)
    writer, reader = RingWriter(buf), RingReader(buf)
    writer.try_write([b"hello"])
    message = reader.poll()
    assert message is not None
    data = message.data
    keeper = pickle.PickleBuffer(data)
    with pytest.raises(TransportError, match="copy it before the release"):
        message.release()
    keeper.release()
    message.release()
    with pytest.raises(ValueError, match="released"):
        data[0]


def test_a_slot_that_is_out_of_step_is_refused() -> None:
    buf = make(64, 4, 1, start=10)
    writer, reader = RingWriter(buf), RingReader(buf)
    writer.try_write([b"x"])
    buf[writer.layout.control_bytes : writer.layout.control_bytes + 4] = (9).to_bytes(4, "little")
    with pytest.raises(TransportError, match="found message 9 in the place of 10"):
        reader.poll()


@pytest.mark.parametrize("length", [1, 20, 100, 200])
@pytest.mark.parametrize("where", [4, 8, 12, 16, 20, 24, HEAD_BYTES, -1])
def test_a_changed_byte_anywhere_in_head_or_bytes_is_refused(length: int, where: int) -> None:
    buf = make(64, 4, 1, start=10)
    writer, reader = RingWriter(buf), RingReader(buf)
    writer.try_write([bytes(length)], kind=3)
    at = writer.layout.control_bytes + (where if where >= 0 else HEAD_BYTES + length - 1)
    buf[at] ^= 1
    with pytest.raises(TransportError, match=r"message 10 .*does not fit its checksum"):
        reader.poll()
    assert reader.rereads == 1
    buf[at] ^= 1
    message = reader.poll()  # the ring goes on if what was written meant to be there comes at last
    assert message is not None
    assert bytes(message.data) == bytes(length)


def test_what_a_decoder_raises_is_raised_and_the_message_is_gone() -> None:
    buf = make(64, 2, 1)
    writer, reader = RingWriter(buf), RingReader(buf)
    for length in (3, 90):  # in one slot, and in two that wrap
        assert writer.try_write([bytes(length)])
        with pytest.raises(ZeroDivisionError):
            reader.receive(lambda kind, data, buffers: 1 / 0)
        assert writer.backlog() == [0]
    assert reader.receive(lambda kind, data, buffers: 1) is None


def test_a_decoder_that_keeps_the_data_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_NATIVE_VARIABLE, "1")  # which hands out bytes that may be kept
    buf = make(64, 2, 1)
    writer, reader = RingWriter(buf), RingReader(buf)
    assert writer.try_write([b"new"])
    kept: list[object] = []
    for _ in range(2):
        assert writer.backlog() == [1]
        with pytest.raises(TransportError, match="still refers"):
            reader.receive(lambda kind, data, buffers: kept.append(pickle.PickleBuffer(data)))
        assert writer.backlog() == [0]  # it is gone, and the next one is read
        assert writer.try_write([b"newer"])
    assert reader.receive(lambda kind, data, buffers: bytes(data)) == (b"newer",)


@pytest.mark.parametrize("late", ["sequence", "bytes"])
@pytest.mark.parametrize("looks", [1, 5, 20])
def test_what_comes_late_is_found_by_looking_again(monkeypatch: pytest.MonkeyPatch, late: str, looks: int) -> None:
    """As if the store of the count had overtaken those before it, and they came at the n-th look."""
    buf = make(64, 4, 1, start=10)
    writer, reader = RingWriter(buf), RingReader(buf)
    writer.try_write([b"hello"])
    at = writer.layout.control_bytes + (0 if late == "sequence" else HEAD_BYTES)
    right = buf[at]
    buf[at] = 77
    passed = 0

    def arrive() -> None:
        nonlocal passed
        passed += 1
        if passed == looks:
            buf[at] = right

    monkeypatch.setattr("drumline.transport.ring.fence", arrive)
    message = reader.poll()
    assert message is not None
    assert bytes(message.data) == b"hello"
    assert reader.rereads == 1


def test_one_writer_one_reader_an_index_and_only_from_the_start() -> None:
    buf = make(64, 4, 2)
    writer, reader = RingWriter(buf), RingReader(buf, 1)
    with pytest.raises(ValueError, match="readers 0 to 1, not 2"):
        RingReader(buf, 2)
    writer.try_write([b"x"])
    message = reader.poll()
    assert message is not None
    message.release()
    with pytest.raises(TransportError, match="had a writer before"):
        RingWriter(buf)
    with pytest.raises(TransportError, match="had a reader 1 before"):
        RingReader(buf, 1)


@pytest.mark.parametrize("shape", [(0, 1, 1), (64, 0, 1), (64, 1, 0), (64, 2**31, 1)])
def test_impossible_shapes(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="ring"):
        RingLayout(*shape)


def test_foreign_memory_is_no_ring() -> None:
    with pytest.raises(TransportError, match="no ring"):
        RingLayout.of(memoryview(bytearray(10)))
    with pytest.raises(TransportError, match="no ring of this version"):
        RingLayout.of(memoryview(bytearray(1000)))
    buf = make(64, 4, 1)
    with pytest.raises(TransportError, match="the ring needs"):
        RingLayout.of(buf[:300])
