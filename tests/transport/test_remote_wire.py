"""What the ends of a remote queue keep: every message arrives once and in order, whatever is cut off and sent again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drumline.errors import TransportError
from drumline.transport import remote_wire as wire

LIMIT = 1 << 30


def body(seed: int, size: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(min(size, 509))) * (size // 509 + 1)


def pieces_of(received: wire.Received) -> tuple[int, bytes, list[bytes]]:
    return received.kind, bytes(received.data), [bytes(buffer) for buffer in received.buffers]


sizes = st.sampled_from([0, 1, 15, 300, 70_000, wire.CHUNK_BYTES - 24, wire.CHUNK_BYTES + 5, 2 * wire.CHUNK_BYTES + 99])


@given(inline=st.lists(sizes, max_size=3), buffers=st.lists(sizes, max_size=3), kind=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_any_message_goes_in_chunks_and_comes_together(inline: list[int], buffers: list[int], kind: int) -> None:
    parts = [body(i, size)[:size] for i, size in enumerate(inline)]
    views = [memoryview(body(9 + i, size)[:size]) for i, size in enumerate(buffers)]
    outbox, inbox = wire.Outbox(1, LIMIT), wire.Inbox(LIMIT)
    message = outbox.add(kind, parts, views, 0.0)
    assert message.cost == wire.body_bytes(parts, views) + wire.OVERHEAD
    assert max(map(len, message.chunks)) < wire.DATA_MAX - 64
    results = [inbox.take(chunk) for chunk in message.chunks]
    assert results[:-1] == [None] * (len(results) - 1)
    assert results[-1] is not None
    assert pieces_of(results[-1]) == (kind, b"".join(parts), [bytes(view) for view in views])
    assert all(buffer.readonly for buffer in results[-1].buffers)


class Link(RuleBasedStateMachine):
    """A writer and two readers over links that break at any chunk, losing what is under way."""

    WINDOW = 6000
    LARGEST = 4096

    def __init__(self) -> None:
        super().__init__()
        self.outbox = wire.Outbox(2, self.WINDOW)
        self.inboxes = [wire.Inbox(self.LARGEST) for _ in range(2)]
        self.under_way: list[list[bytes]] = [[], []]
        self.connected = [False, False]
        self.sent: list[bytes] = []
        self.arrived: list[list[bytes]] = [[], []]
        self.read = [0, 0]
        self.told = [0, 0]
        self.clock = 0.0

    @rule(size=st.integers(0, 4000))
    def write(self, size: int) -> None:
        data = body(len(self.sent), size)[:size]
        length = wire.body_bytes([data], [])
        kept = len(self.sent) - min(self.told)
        assert self.outbox.room(length) or kept
        if not self.outbox.room(length):
            return
        self.clock += 1
        message = self.outbox.add(0, [data], [], self.clock)
        assert message.seq == len(self.sent)
        self.sent.append(data)
        for i in range(2):
            if self.connected[i]:
                self.under_way[i] += message.chunks

    @rule(i=st.integers(0, 1), lost=st.integers(0, 5), twice=st.booleans())
    def reconnect(self, i: int, lost: int, twice: bool) -> None:
        """The last frames under way are lost, and the reader says what it has; perhaps it says so twice."""
        del self.under_way[i][max(0, len(self.under_way[i]) - lost) :]
        late = self.under_way[i]
        wanted = self.inboxes[i].next_seq
        again = [chunk for message in self.outbox.since(wanted) for chunk in message.chunks]
        self.under_way[i] = late + again * (2 if twice else 1)
        self.connected[i] = True

    @precondition(lambda self: any(self.under_way))
    @rule(pick=st.integers(0, 1), count=st.integers(1, 9))
    def receive(self, pick: int, count: int) -> None:
        i = pick if self.under_way[pick] else 1 - pick
        for _ in range(min(count, len(self.under_way[i]))):
            received = self.inboxes[i].take(self.under_way[i].pop(0))
            if received is not None:
                self.arrived[i].append(bytes(received.data))

    @rule(i=st.integers(0, 1), tell=st.booleans())
    def use(self, i: int, tell: bool) -> None:
        if self.read[i] < len(self.arrived[i]):
            self.read[i] += 1
        if tell:
            self.told[i] = self.read[i]
        self.outbox.read(i, self.told[i])

    @invariant()
    def nothing_is_lost_or_reordered_and_memory_is_bounded(self) -> None:
        for i in range(2):
            assert self.arrived[i] == self.sent[: len(self.arrived[i])]
            assert self.outbox.backlog(i) == len(self.sent) - self.told[i]
            since = self.outbox.waiting_since(i)
            assert since == (None if self.told[i] == len(self.sent) else self.told[i] + 1)
        kept = self.sent[min(self.told) :]
        assert sum(len(data) + 16 + wire.OVERHEAD for data in kept) <= self.WINDOW

    def teardown(self) -> None:
        for i in range(2):
            self.reconnect(i, 0, False)
            while self.under_way[i]:
                self.receive(i, 1)
            assert self.arrived[i] == self.sent


Link.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLink = Link.TestCase


def test_a_message_over_the_window_goes_alone() -> None:
    outbox = wire.Outbox(1, 1000)
    assert outbox.room(10**6)
    outbox.add(0, [bytes(5000)], [], 0.0)
    assert not outbox.room(0)
    assert outbox.read(0, 1)
    assert outbox.room(10**6)


def test_a_reader_that_is_gone_holds_nothing() -> None:
    outbox = wire.Outbox(2, 5000)
    for _ in range(3):
        outbox.add(0, [bytes(100)], [], 7.0)
    assert not outbox.read(0, 3)
    assert (outbox.backlog(1), outbox.waiting_since(1)) == (3, 7.0)
    outbox.drop(1)
    assert (outbox.backlog(1), outbox.waiting_since(1)) == (0, None)
    assert outbox.room(4000)
    with pytest.raises(TransportError, match="messages 3 to 2 are there, and not 0"):
        outbox.since(0)
    with pytest.raises(TransportError, match="says it has read message 4, which was never sent"):
        outbox.read(0, 5)
    outbox.drop(0)
    assert outbox.add(0, [b""], [], 0.0).seq == 3


GOOD = wire.Outbox(1, LIMIT).add(1, [b"abc"], [memoryview(b"defg")], 0.0).chunks[0]


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (GOOD[:10], "half a header"),
        (GOOD[:-1], "a chunk of 30 bytes at 0 of 31"),
        (GOOD + b"x", "a chunk of 32 bytes at 0 of 31"),
        (wire._DATA.pack(wire.DATA, 0, 0, 1 << 62), "where 1073741824 is the limit"),
        (wire._DATA.pack(wire.DATA, 0, 0, 5) + bytes(5), "without a head"),
        (wire._DATA.pack(wire.DATA, 0, 0, 16) + wire._BODY.pack(0, 2**31, 0), "more than a chunk can name"),
        (wire._DATA.pack(wire.DATA, 0, 0, 16) + wire._BODY.pack(0, 0, 9), "whose pieces say 25"),
        (wire._DATA.pack(wire.DATA, 1, 0, 16) + wire._BODY.pack(0, 0, 0), "message 0 byte 0 is next, not message 1"),
        (wire._DATA.pack(wire.DATA, 0, 7, 16) + bytes(9), "not message 0 byte 7"),
    ],
)
def test_damaged_frames_are_refused(frame: bytes, match: str) -> None:
    with pytest.raises(TransportError, match=match):
        wire.Inbox(LIMIT).take(frame)


@given(st.binary(max_size=200), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_no_frame_does_anything_but_raise(noise: bytes, keep: int) -> None:
    for frame in (noise, GOOD[:keep] + noise, GOOD[: keep // 2] + noise[:4] + GOOD[keep // 2 + len(noise[:4]) :]):
        inbox = wire.Inbox(1 << 16)
        try:
            received = inbox.take(frame)
        except TransportError:
            assert inbox.next_seq == 0
        else:
            assert received is None or received.cost <= (1 << 16) + wire.OVERHEAD
        for parse in (wire.unpack_number, wire.Hello.unpack):
            try:
                parse(frame)
            except TransportError:
                continue
            assert len(frame) in (9, 41)


def test_greetings() -> None:
    hello = wire.Hello(bytes(range(16)), 7, 5)
    assert wire.Hello.unpack(hello.pack()) == hello
    other: Any = bytearray(hello.pack())
    other[5] = 9
    with pytest.raises(TransportError, match="speaks version 9 of the queue, this writer version 1"):
        wire.Hello.unpack(bytes(other))
