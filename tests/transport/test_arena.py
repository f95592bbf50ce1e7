"""The arena: its free list against a model, lives of blocks, what closing leaves, who holds blocks for too long."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.errors import MessageTooLargeError, TransportError
from drumline.transport import arena as arena_module
from drumline.transport.arena import LEAST_BYTES, PAGE, ArenaLayout, ArenaReader, ArenaWriter, FreeList
from drumline.transport.broadcast import create_arena
from drumline.transport.ring import Message, RingLayout, RingReader, RingWriter

from .procs import children


def pattern(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


class Ends:
    """Ring and arena with both ends in this process."""

    def __init__(self, pages: int, n_readers: int = 1, slot_bytes: int = 256, slots: int = 8, generation: int = 0):
        layout = RingLayout(slot_bytes, slots, n_readers)
        buf = memoryview(bytearray(layout.total_bytes))
        layout.init(buf, 2**32 - 3)
        self.memory = create_arena("test", pages * PAGE, n_readers)
        self.arena = ArenaWriter(self.memory, generation=generation)
        self.writer = RingWriter(buf, arena=self.arena)
        self.rings = 0
        arenas = [ArenaReader(self.memory.fd, i, self.on_wanted) for i in range(n_readers)]
        self.readers = [RingReader(buf, i, self.on_wanted, arenas[i]) for i in range(n_readers)]

    def on_wanted(self) -> None:
        self.rings += 1

    def take(self, index: int = 0) -> list[memoryview]:
        """Buffers of the next message, which is released."""
        message = self.readers[index].poll()
        assert message is not None
        buffers = list(message.buffers)
        message.release()
        return buffers

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.memory.close()


@contextmanager
def ends(pages: int, n_readers: int = 1, **options: int) -> Iterator[Ends]:
    made = Ends(pages, n_readers, **options)
    try:
        yield made
    finally:
        made.close()


class FreeListMachine(RuleBasedStateMachine):
    """Against a set of free units."""

    @initialize(size=st.integers(1, 60))
    def begin(self, size: int) -> None:
        self.size = size
        self.list = FreeList(size)
        self.free = set(range(size))
        self.taken: list[tuple[int, int]] = []

    @rule(size=st.integers(1, 20))
    def allocate(self, size: int) -> None:
        first = next((at for at in range(self.size) if all(at + i in self.free for i in range(size))), None)
        assert self.list.allocate(size) == first
        if first is not None:
            self.free -= set(range(first, first + size))
            self.taken.append((first, size))

    @precondition(lambda self: self.taken)
    @rule(pick=st.integers(0, 100))
    def give_back(self, pick: int) -> None:
        start, size = self.taken.pop(pick % len(self.taken))
        self.list.free(start, size)
        self.free |= set(range(start, start + size))

    @invariant()
    def pieces_are_the_free_units_joined(self) -> None:
        pieces = self.list.pieces()
        assert {unit for start, end in pieces for unit in range(start, end)} == self.free
        assert all(pieces[i][1] < pieces[i + 1][0] for i in range(len(pieces) - 1))


FreeListMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFreeList = FreeListMachine.TestCase


class ArenaMachine(RuleBasedStateMachine):
    """Messages with buffers of all sizes to readers that hold views for as long as they like; all stay right."""

    @initialize(n_readers=st.integers(1, 3), pages=st.integers(4, 40), generation=st.sampled_from([0, 2**32 - 3]))
    def begin(self, n_readers: int, pages: int, generation: int) -> None:
        self.ends = Ends(pages, n_readers, slot_bytes=4096, slots=12, generation=generation)
        self.sent: list[list[list[bytes]]] = [[] for _ in range(n_readers)]
        self.held: list[tuple[memoryview, bytes]] = []
        self.count = 0

    @rule(sizes=st.lists(st.sampled_from([0, 1, 100, 16000, LEAST_BYTES, 20000, 50000, 90000]), max_size=4))
    def write(self, sizes: list[int]) -> None:
        self.count += 1
        buffers = [pattern(size, self.count + i) for i, size in enumerate(sizes)]
        try:
            written = self.ends.writer.try_write(
                [b"x" * (self.count % 50)], self.count, [bytearray(b) for b in buffers]
            )
        except MessageTooLargeError:
            assert sum(sizes) > self.ends.writer.layout.largest_message - 200
            return
        if written:
            for queue in self.sent:
                queue.append(buffers)

    @precondition(lambda self: any(self.sent))
    @rule(pick=st.integers(0, 2), keep=st.booleans())
    def read(self, pick: int, keep: bool) -> None:
        index = pick % len(self.ends.readers)
        if not self.sent[index]:
            assert self.ends.readers[index].poll() is None
            return
        expected = self.sent[index].pop(0)
        buffers = self.ends.take(index)
        assert [bytes(buffer) for buffer in buffers] == expected
        assert all(buffer.readonly for buffer in buffers)
        if keep:
            self.held += [(buffer[3:], data[3:]) for buffer, data in zip(buffers, expected, strict=True)]

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 100))
    def let_go(self, pick: int) -> None:
        del self.held[pick % len(self.held)]

    @invariant()
    def what_is_held_never_changes(self) -> None:
        for view, data in self.held:
            assert view == data

    def teardown(self) -> None:
        if not hasattr(self, "ends"):
            return
        self.held.clear()
        for index in range(len(self.sent)):
            while self.sent[index]:
                self.ends.take(index)
                self.sent[index].pop(0)
        assert self.ends.arena.allocate(self.ends.arena.layout.data_bytes), "nothing is held, so all of it is free"
        self.ends.close()


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestArenaAgainstModel = ArenaMachine.TestCase


def test_a_block_is_free_when_the_last_view_of_the_last_reader_is_collected() -> None:
    with ends(10, n_readers=2) as e:
        data = pattern(10 * PAGE, 1)
        assert e.writer.try_write([b"head"], 5, [data])
        first, second = e.take(0)[0], e.take(1)[0]
        assert first == second == data
        part = first[100:200]
        del first
        del second
        assert not e.writer.try_write([], 0, [data])
        assert e.rings == 0
        tail = part[50:]
        del part
        assert not e.writer.try_write([], 0, [data])
        assert tail == data[150:200]
        del tail
        assert e.rings == 1  # the writer was refused, so the end of the last view rings
        assert e.writer.try_write([], 0, [data])
        assert len(e.take(0)) == len(e.take(1)) == 1


def test_a_numpy_array_and_what_is_made_of_it_hold_the_block() -> None:
    numpy = pytest.importorskip("numpy")
    with ends(10) as e:
        array = numpy.arange(5000, dtype=numpy.int64)
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps({"a": array}, protocol=5, buffer_callback=buffers.append)
        assert e.writer.try_write([head], 0, [buffer.raw() for buffer in buffers])
        message = e.readers[0].poll()
        assert message is not None
        found = pickle.loads(bytes(message.data), buffers=message.buffers)["a"]
        message.release()
        row = found.reshape(50, 100)[7]
        del found, message
        assert not row.flags.writeable
        gc.collect()
        assert e.arena.allocate(10 * PAGE) is None
        assert row.tolist() == list(range(700, 800))
        del row
        assert e.arena.allocate(10 * PAGE) is not None


def test_views_may_be_let_go_in_any_thread_and_in_a_collection_of_cycles() -> None:
    with ends(10) as e:
        assert e.writer.try_write([], 0, [bytes(LEAST_BYTES)])
        held = e.take()
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert e.arena.allocate(10 * PAGE) is not None
    with ends(10) as e:
        assert e.writer.try_write([], 0, [bytes(LEAST_BYTES)])
        cycle: list[object] = [e.take()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert e.arena.allocate(10 * PAGE) is not None


def test_a_forked_child_frees_nothing() -> None:
    with ends(10) as e, children() as start:
        assert e.writer.try_write([], 0, [b"y" * LEAST_BYTES])
        held = e.take()
        assert start(held.clear).join() == 0
        assert e.arena.allocate(10 * PAGE) is None
        assert bytes(held[0][:1]) == b"y"
        del held


def test_nobody_can_write_into_what_others_read() -> None:
    """Not through Python, and not around it."""
    with ends(10) as e, children() as start:
        assert e.writer.try_write([], 0, [b"y" * LEAST_BYTES])
        (view,) = e.take()
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        address = ctypes.addressof(view.obj)

        def scribble() -> None:
            faulthandler.disable()
            ctypes.memset(address, 0, 1)

        assert start(scribble).join() == -signal.SIGSEGV
        assert view[0] == ord("y")
        del view


def test_closing_with_views_alive_is_safe() -> None:
    e = Ends(10)
    data = pattern(5 * PAGE + 7, 3)
    assert e.writer.try_write([], 0, [data, b"small"])
    kept, small = e.take()
    assert not e.writer.try_write([], 0, [bytes(9 * PAGE)])
    e.close()
    e.close()
    gc.collect()
    assert kept == data
    assert small == b"small"
    with pytest.raises(TransportError, match="closed"):
        e.readers[0]._arena.take(0, 1, 0, 1)
    del e, kept  # and the descriptor, which the check for leaks looks at
    gc.collect()


def test_pages_are_taken_only_as_they_are_used() -> None:
    def resident(fd: int) -> int:
        return os.fstat(fd).st_blocks * 512

    with ends(10_000) as e:
        assert resident(e.memory.fd) <= 4 * PAGE
        for number in range(200):  # one after another they lie in the same place
            assert e.writer.try_write([], 0, [bytes([number]) * 100_000])
            e.take()
        assert resident(e.memory.fd) < 1_000_000


def test_full_arena_small_enough_goes_inline_else_it_waits() -> None:
    with ends(10, slot_bytes=4096, slots=10) as e:
        assert e.writer.try_write([], 0, [bytes(10 * PAGE)])
        held = e.take()
        assert e.writer.try_write([b"p"], 0, [b"i" * LEAST_BYTES])
        (inline,) = e.take()
        assert inline == b"i" * LEAST_BYTES
        assert not e.writer.try_write([b"p"], 0, [bytes(10 * PAGE), bytes(9 * PAGE)])  # later, when there is room
        before = e.rings
        held.clear()
        assert e.rings == before + 1
        assert e.writer.try_write([b"p"], 0, [bytes(10 * PAGE), bytes(9 * PAGE)])
        assert [len(buffer) for buffer in e.take()] == [10 * PAGE, 9 * PAGE]
        with pytest.raises(MessageTooLargeError):  # never in one piece
            e.writer.try_write([], 0, [bytes(30 * PAGE)])


def test_a_buffer_that_fits_does_not_take_back_the_wish_of_one_that_does_not() -> None:
    with ends(10) as e:
        assert e.writer.try_write([], 0, [bytes(5 * PAGE)])
        held = e.take()
        assert not e.writer.try_write([], 0, [bytes(6 * PAGE), bytes(4 * PAGE)])
        held.clear()
        assert e.rings == 1
        assert e.writer.try_write([], 0, [bytes(6 * PAGE), bytes(4 * PAGE)])
        assert len(e.take()) == 2
        assert e.rings == 1  # and nobody is rung any more


def test_refused_messages_leave_no_blocks() -> None:
    with ends(10, slot_bytes=64, slots=2) as e:
        assert e.writer.try_write([b"x" * 90])
        for _ in range(3):
            assert not e.writer.try_write([], 0, [bytes(LEAST_BYTES)])
            with pytest.raises(MessageTooLargeError):
                e.writer.try_write([b"x" * 900], 0, [bytes(LEAST_BYTES)])
        assert e.arena.used_bytes == 0


def test_blocks_run_out_before_bytes() -> None:
    with ends(arena_module.BLOCKS * 5, slot_bytes=65536, slots=4) as e:
        held: list[memoryview] = []
        for number in range(arena_module.BLOCKS + 3):
            assert e.writer.try_write([], 0, [bytes([number % 256]) * LEAST_BYTES])
            held += e.take()
        assert [view[-1] for view in held] == [number % 256 for number in range(arena_module.BLOCKS + 3)]
        held.clear()
        assert e.arena.allocate(LEAST_BYTES) is not None


def test_who_holds_blocks_for_long_is_named_once_and_gets_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(arena_module.time, "monotonic", lambda: now[0])
    with ends(10, n_readers=3, slot_bytes=4096, slots=30) as e, caplog.at_level(logging.WARNING):
        assert e.writer.try_write([], 0, [b"a" * 9 * PAGE])
        held = e.take(1)
        e.take(0)  # lets go; reader 2 has not come to it yet: neither holds anything
        now[0] += 0.5
        assert e.writer.try_write([], 0, [b"b" * 5 * PAGE])  # inline; not long enough yet
        assert not caplog.records
        now[0] += 1.0
        assert e.writer.try_write([], 0, [b"c" * 5 * PAGE])
        now[0] += 1.0
        assert e.writer.try_write([], 0, [b"d" * 5 * PAGE])
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert lines[0].startswith("reader 1 still holds 1 blocks (0.0 of 0.0 MiB) of a full arena, some for 1.5 s")
        assert held[0] == b"a" * 9 * PAGE  # what it holds it keeps
        for index in range(3):
            while (message := e.readers[index].poll()) is not None:
                message.release()
        held.clear()
        assert e.writer.try_write([], 0, [b"e" * 9 * PAGE])
        copies, views = e.take(1), e.take(0)
        assert copies == views
        e.take(2)
        views.clear()
        assert e.arena.allocate(10 * PAGE) is not None, "the copies hold no block"
        assert copies[0] == b"e" * 9 * PAGE


def test_a_block_of_another_generation_is_refused() -> None:
    with ends(10) as e:
        assert e.writer.try_write([], 0, [bytes(LEAST_BYTES)])
        at = e.arena.layout.stamps_at + next(iter(e.arena._used))
        e.arena._words[at] += 1
        with pytest.raises(TransportError, match=r"arena out of step: block .* has generation 2, the message means 1"):
            e.readers[0].poll()


@given(offset=st.integers(0, 2**40), length=st.integers(1, 2**40), index=st.integers(0, 2**32 - 2))
@settings(max_examples=30, deadline=None)
def test_no_entry_reaches_outside(offset: int, length: int, index: int) -> None:
    if offset + length <= 10 * PAGE and index < arena_module.BLOCKS:
        return
    with ends(10) as e, pytest.raises(TransportError, match="no such block"):
        e.readers[0]._arena.take(offset, length, index, 1)


def test_an_arena_message_needs_an_arena() -> None:
    with ends(10) as e:
        assert e.writer.try_write([], 0, [bytes(LEAST_BYTES)])
        e.readers[0]._arena.close()
        e.readers[0]._arena = None
        with pytest.raises(TransportError, match="this reader has none"):
            e.readers[0].poll()


def test_foreign_memory_is_no_arena() -> None:
    with pytest.raises(TransportError, match="no arena"):
        ArenaLayout.of(memoryview(bytearray(10)))
    with pytest.raises(TransportError, match="no arena of this version"):
        ArenaLayout.of(memoryview(bytearray(1000)))
    with pytest.raises(ValueError, match="an arena has at least"):
        ArenaLayout(0, 1)
    memory = create_arena("test", 100, 2)
    with pytest.raises(ValueError, match="readers 0 to 1, not 2"):
        ArenaReader(memory.fd, 2)
    memory.close()


def test_words_of_two_writers_share_no_cache_line() -> None:
    layout = ArenaLayout(1, 5)
    starts = [0, 64, 128, layout.stamps_at * 4, *(layout.freed_at(i) * 4 for i in range(5)), layout.control_bytes]
    assert starts == sorted(starts)
    assert all(start % 64 == 0 for start in starts)
    assert layout.freed_at(4) * 4 + layout.blocks * 4 <= layout.control_bytes
    assert layout.control_bytes % PAGE == layout.data_bytes % PAGE == 0


@pytest.mark.alone
def test_nothing_has_a_name() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    with ends(10) as e:
        assert e.writer.try_write([], 0, [bytes(LEAST_BYTES)])
        kept: Message | None = e.readers[0].poll()
        assert sorted(Path("/dev/shm").iterdir()) == before
        assert kept is not None
        kept.release()
