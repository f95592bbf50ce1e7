"""What libraries opened, or took, when they were imported, which was in the fork server.

A stream for their log lines (transformers' own logging keeps such a one) must lead to the child's log and console, and
a descriptor must not come to mean one of the child's own: text that went into such a number broke the connection
between engine core and front end.
"""

from __future__ import annotations

import os
import pty
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from drumline.processes import ForkServer, LogConfig, ProcessSpec, Supervisor
from drumline.processes.warm import WarmStart

LIBRARY = """
import logging
import socket

logger = logging.getLogger("some_library")
logger.propagate = False
logger.addHandler(logging.StreamHandler())

def main(context, payload):
    pairs = [one for _ in range(30) for one in socket.socketpair()]  # every number that others had is one of these
    logger.warning("said by a library")
    print("half a line", end="")
    stray = []
    for one in pairs:
        one.setblocking(False)
        try:
            stray.append(one.recv(100))
        except BlockingIOError:
            pass
    context.ready(repr(stray).encode())
    context.wait_stop(60)
"""


class Console:
    """Something to write to, and what came of it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.text = b""
        self._path = folder / "console"
        self._reader: int | None = None
        match kind:
            case "pipe":
                self._reader, self.fd = os.pipe()
            case "terminal":
                self._reader, self.fd = pty.openpty()
            case "socket":
                self._reader, self.fd = (one.detach() for one in socket.socketpair())
            case _:
                self.fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while self._reader is not None and (data := os.read(self._reader, 4096)):
                self.text += data
        except OSError:
            pass  # how a terminal ends

    def close(self) -> bytes:
        os.close(self.fd)
        self._thread.join(5)
        assert not self._thread.is_alive()
        if self._reader is None:
            return self._path.read_bytes()
        os.close(self._reader)
        return self.text


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    return "some_library"


@pytest.mark.parametrize("birth", ["executed", "copied"])
@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket", "file"])
def test_what_a_library_says(tmp_path: Path, library: str, kind: str, birth: str) -> None:
    console = Console(kind, tmp_path)
    with ExitStack() as stack:
        numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]  # the copy's console has another number
        log = LogConfig.create(dir=str(tmp_path / "warm"), console_fd=console.fd)
        if birth == "copied":
            stack.enter_context(WarmStart((library,), log)).wait_ready()
        for number in numbers:
            os.close(number)
        log = LogConfig.create(dir=str(tmp_path / "log"), console_fd=console.fd)
        server = stack.enter_context(ForkServer.start((library,), log=log))
        supervisor = stack.enter_context(Supervisor(server))
        members = [server.spawn(ProcessSpec(role=f"Worker_{i}", target=f"{library}:main")) for i in range(2)]
        for member in members:
            supervisor.add(member)
        supervisor.wait_all_ready(members, 30)
        assert [member.info for member in members] == [b"[]", b"[]"]
        logs = [Path(member.log_file) for member in members]
        pids = [member.pid for member in members]
    shown = console.close().decode().replace("\r\n", "\n").splitlines()
    for number, (path, pid) in enumerate(zip(logs, pids, strict=True)):
        assert path.read_text().splitlines() == ["said by a library", "half a line"]
        assert f"(Worker_{number} pid={pid}) said by a library" in shown
    assert len([line for line in shown if "said by" in line]) == 2


HOLDER = """
import os
import socket

log = open({path!r}, "a", buffering=1)
one, other = socket.socketpair()
closed = os.open("/dev/null", os.O_RDONLY)

def main(context, payload):
    pairs = [one for _ in range(30) for one in socket.socketpair()]
    numbers = [pair.fileno() for pair in pairs]
    assert log.fileno() not in numbers and one.fileno() not in numbers
    log.write(f"{{os.getpid()}}\\n")
    try:
        one.send(b"to nobody")
        context.fail(AssertionError("all processes have this socket"))
    except OSError:
        pass
    stray = []
    for each in pairs:
        each.setblocking(False)
        try:
            stray.append(each.recv(100))
        except BlockingIOError:
            pass
    context.ready(repr(stray).encode())
    context.wait_stop(60)
"""


@pytest.mark.parametrize("birth", ["executed", "copied", "spare"])
def test_what_a_library_has_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, birth: str) -> None:
    """Files stay open, as they do in any fork; of sockets and the like only the number is kept."""
    (tmp_path / "holding_library.py").write_text(HOLDER.format(path=str(tmp_path / "library.log")))
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as stack:
        if birth == "copied":
            log = LogConfig.create(dir=str(tmp_path / "warm"), console_fd=-1)
            stack.enter_context(WarmStart(("holding_library",), log)).wait_ready()
        log = LogConfig.create(dir=str(tmp_path / "log"), console_fd=-1)
        server = stack.enter_context(ForkServer.start(("holding_library",), log=log))
        supervisor = stack.enter_context(Supervisor(server))
        pids = []

        def ask() -> None:
            member = server.spawn(ProcessSpec(role="Worker_0", target="holding_library:main"))
            supervisor.add(member)
            supervisor.wait_all_ready([member], 30)
            assert member.info == b"[]"
            pids.append(member.pid)

        ask()
        if birth == "spare":
            spare = server.spare()
            assert spare is not None
            stack.callback(spare.close)
            assert spare.meet(10)
            supervisor.close()
            server.close()
            server = spare
            supervisor = stack.enter_context(Supervisor(server))
        ask()
        assert (tmp_path / "library.log").read_text().split() == [str(pid) for pid in pids]
