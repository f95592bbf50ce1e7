"""Frames over a socketpair."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from drumline.errors import TransportError
from drumline.transport.frames import Frames


@pytest.fixture
def ends() -> Iterator[tuple[Frames, Frames]]:
    made = tuple(Frames(sock) for sock in socket.socketpair())
    yield made[0], made[1]
    for end in made:
        end.close()


def test_messages_of_all_sizes_arrive_whole_and_in_order(ends: tuple[Frames, Frames]):
    one, other = ends
    draw = random.Random(1)
    sizes = [0, 1, 65527, 65528, 65529, 131072, 3_000_000, *(draw.randrange(200) for _ in range(3000))]
    draw.shuffle(sizes)
    sent = [draw.randbytes(size) for size in sizes]
    for message in sent:
        one.send(message)
    assert one.waiting
    got: list[bytes] = []
    while len(got) < len(sent):
        got += other.receive(bytes)
        one.flush()
    assert got == sent
    assert not one.waiting
    assert other.receive(bytes) == []


def test_bytes_in_single_pieces(ends: tuple[Frames, Frames]):
    one, other = ends
    got = []
    for byte in b"\x03\0\0\0\0\0\0\0abc" + b"\x00" * 8 + b"\x01\0\0\0\0\0\0\0z":
        one._sock.send(bytes([byte]))
        got += other.receive(bytes)
    assert got == [b"abc", b"", b"z"]


def test_what_was_said_before_the_end_is_received(ends: tuple[Frames, Frames]):
    one, other = ends
    one.send(b"last word")
    one.close()
    assert other.receive(bytes) + other.receive(bytes) == [b"last word"]
    assert other.eof
    other.send(b"nobody hears it")
    assert not other.waiting


def test_both_directions_in_two_threads(ends: tuple[Frames, Frames]):
    count = 2000

    def talk(end: Frames) -> None:
        heard = 0
        for number in range(count):
            end.send(number.to_bytes(4, "little") * 50)
            heard = check(end, heard)
        while heard < count or end.waiting:
            end.flush()
            heard = check(end, heard)

    def check(end: Frames, heard: int) -> int:
        for message in end.receive(bytes):
            assert message == heard.to_bytes(4, "little") * 50
            heard += 1
        return heard

    threads = [threading.Thread(target=talk, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_what_is_no_frame_is_an_error(ends: tuple[Frames, Frames]):
    """As when somebody else writes to the descriptor: whoever reads must not wait for the rest of a huge message."""
    one, other = ends
    one.send(b"first")
    one._sock.send(b"a line of text\n")
    with pytest.raises(TransportError, match="something else was written"):
        other.receive(bytes)
