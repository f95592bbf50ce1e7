from __future__ import annotations

import os
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import ChannelClosedError
from drumline.processes import messages as m
from drumline.processes.connection import Connection, socket_pair


def pair() -> tuple[Connection[m.ToChild], Connection[m.ToChild]]:
    a, b = socket_pair()
    return Connection(a, m.ToChild), Connection(b, m.ToChild)


def close(*conns: Connection[m.ToChild]) -> None:
    for conn in conns:
        conn.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=20), st.integers(1, 500))
def test_frames_arrive_however_the_stream_is_cut(payloads: list[bytes], chunk: int) -> None:
    raw, theirs = socket_pair()
    left, right = socket_pair()
    sender: Connection[m.ToChild] = Connection(left, m.ToChild)
    receiver: Connection[m.ToChild] = Connection(theirs, m.ToChild)
    for payload in payloads:
        sender.send(m.Data(payload))
    sender.close()
    stream = b"".join(iter(lambda: right.recv(65536), b""))
    got = []
    for at in range(0, len(stream), chunk):
        raw.sendall(stream[at : at + chunk])
        got += receiver.receive()
    raw.close()
    right.close()
    got += receiver.receive()
    receiver.close()
    assert [frame.message.data for frame in got if isinstance(frame.message, m.Data)] == payloads
    assert receiver.eof


def test_descriptors_stay_with_their_message() -> None:
    one, two = pair()
    pipes = [os.pipe() for _ in range(4)]
    one.send(m.Data(b"0"))
    one.send(m.Data(b"1"), fds=[pipes[0][0], pipes[1][0]])
    one.send(m.Data(b"2"), fds=[pipes[2][0]])
    frames = two.receive()
    assert [len(frame.fds) for frame in frames] == [0, 2, 1]
    inodes = [os.fstat(fd).st_ino for frame in frames for fd in frame.fds]
    assert inodes == [os.fstat(read).st_ino for read, _ in pipes[:3]]
    for fd in [fd for frame in frames for fd in frame.fds] + [fd for ends in pipes for fd in ends]:
        os.close(fd)
    close(one, two)


def test_what_does_not_fit_is_queued_whole_and_goes_later() -> None:
    one, two = pair()
    read, write = os.pipe()
    with pytest.raises(TimeoutError):
        one.send(m.Data(b"x" * 5_000_000), fds=[read], timeout_s=0)
    with pytest.raises(TimeoutError):
        one.send(m.Stop(), timeout_s=0)
    os.close(read)
    assert one.pending
    frames = []
    while len(frames) < 2:
        one.flush()
        frames += two.receive()
    assert isinstance(frames[0].message, m.Data)
    assert len(frames[0].message.data) == 5_000_000
    assert isinstance(frames[1].message, m.Stop)
    assert not one.pending
    os.close(frames[0].fds[0])
    os.close(write)
    close(one, two)


def test_many_threads_never_tear_a_frame() -> None:
    one, two = pair()
    threads = [
        threading.Thread(target=lambda i=i: [one.send(m.Data(bytes([i]) * 9999)) for _ in range(30)]) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    got: list[bytes] = []
    while len(got) < 120:
        frames = two.receive_wait(5.0)
        assert frames
        got += [frame.message.data for frame in frames if isinstance(frame.message, m.Data)]
    for thread in threads:
        thread.join()
    assert all(len(set(data)) == 1 and len(data) == 9999 for data in got)
    close(one, two)


def test_send_to_nobody_says_so() -> None:
    one, two = pair()
    two.close()
    with pytest.raises(ChannelClosedError):
        one.send(m.Stop())
    assert one.receive() == []
    assert one.eof
    one.close()
    with pytest.raises(ChannelClosedError):
        one.send(m.Stop())


def test_a_broken_stream_is_refused() -> None:
    a, b = socket_pair()
    conn: Connection[m.ToChild] = Connection(b, m.ToChild)
    a.sendall(b"\xff" * 64)
    with pytest.raises(ChannelClosedError, match="broken frame"):
        conn.receive()
    a.close()
    conn.close()
    assert isinstance(a, socket.socket)
