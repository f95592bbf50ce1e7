"""A console that is full, gone, a file, a socket or a stopped terminal: the writer neither blocks nor fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import socket
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.processes.logs import FULL_WAIT_S, ConsoleStream, ConsoleWriter

PIPE_SIZE = 4096
MANY = b"".join(b"%03d %s\n" % (i, b"x" * 95) for i in range(300))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.fixture
def writer() -> Iterator[Callable[[int], ConsoleWriter]]:
    made: list[ConsoleWriter] = []

    def make(fd: int) -> ConsoleWriter:
        made.append(ConsoleWriter(fd))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.alone
def test_a_full_pipe_is_waited_for_once_and_lost_lines_are_counted(
    pipe: tuple[int, int], writer: Callable[[int], ConsoleWriter]
) -> None:
    read, write = pipe
    console = writer(write)
    assert not fcntl.fcntl(write, fcntl.F_GETFL) & os.O_NONBLOCK  # the user's own flags are as they were
    began = time.monotonic()
    for line in MANY.splitlines(keepends=True):
        console.write(line)
    assert time.monotonic() - began < FULL_WAIT_S + 0.3
    shown = os.read(read, PIPE_SIZE)
    assert MANY.startswith(shown)
    assert shown.endswith(b"\n")
    console.write(b"again\n")
    lost = 300 - shown.count(b"\n")
    notice = f"({lost} lines were not shown: the console was not read; they are in the log files)"
    assert os.read(read, PIPE_SIZE).decode() == f"{notice}\nagain\n"
    console.write(b"and again\n")
    assert os.read(read, PIPE_SIZE) == b"and again\n"


def test_a_reader_who_is_gone_is_given_up(pipe: tuple[int, int], writer: Callable[[int], ConsoleWriter]) -> None:
    console = writer(pipe[1])
    os.close(pipe[0])
    console.write(b"one\n")
    console.write(b"two\n")
    writer(pipe[1]).write(b"gone before it began\n")
    assert os.fstat(pipe[1])


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_devices_and_closed_descriptors(path: str, writer: Callable[[int], ConsoleWriter]) -> None:
    fd = os.open(path, os.O_WRONLY)
    console = writer(fd)
    os.close(fd)
    console.write(b"one\n")
    console.write(b"two\n")
    writer(fd).write(b"closed\n")
    writer(-1).write(b"none\n")


def test_a_file_has_one_offset_for_all_who_write(tmp_path: Path, writer: Callable[[int], ConsoleWriter]) -> None:
    fd = os.open(tmp_path / "console", os.O_WRONLY | os.O_CREAT)
    console = writer(fd)
    for text in (b"one\n", b"three\n"):
        console.write(text)
        os.write(fd, b"two\n")
    os.close(fd)
    assert (tmp_path / "console").read_bytes() == b"one\ntwo\nthree\ntwo\n"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_sockets(kind: int, writer: Callable[[int], ConsoleWriter]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        console = writer(ours.fileno())
        console.write(b"first\n")
        assert theirs.recv(100) == b"first\n"
        began = time.monotonic()
        for _ in range(40):
            console.write(MANY)
        assert time.monotonic() - began < FULL_WAIT_S + 1.0
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while theirs.recv(1 << 20):
                pass
        console.write(b"again\n")
        assert b"lines were not shown" in theirs.recv(1 << 16)
        assert ours.getblocking()


@pytest.mark.alone
def test_a_terminal_that_is_stopped(writer: Callable[[int], ConsoleWriter]) -> None:
    master, terminal = pty.openpty()
    try:
        console = writer(terminal)
        termios.tcflow(terminal, termios.TCOOFF)
        began = time.monotonic()
        for line in MANY.splitlines(keepends=True):
            console.write(line)
        assert time.monotonic() - began < FULL_WAIT_S + 0.3
        termios.tcflow(terminal, termios.TCOON)
        console.write(b"again\n")
        assert b"not shown" in os.read(master, 65536)
    finally:
        os.close(master)
        os.close(terminal)


def test_a_stream_shows_bars_at_once_and_lines_whole(pipe: tuple[int, int]) -> None:
    read, write = pipe
    with ConsoleStream(write) as stream:
        print("one", "two", file=stream)
        assert os.read(read, 100) == b"one two\n"
        stream.write("\r 10%")
        stream.flush()
        assert os.read(read, 100) == b"\r 10%"
        stream.write("\ud800 end")
    assert os.read(read, 100) == b"? end"
    assert ConsoleStream(-1).write("nobody\n") == 7
