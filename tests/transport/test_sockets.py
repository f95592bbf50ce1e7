"""Unix sockets of ZMQ: private, short, and gone."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from drumline.errors import RPCTimeoutError, TransportError
from drumline.transport import sockets as module
from drumline.transport.sockets import (
    Peers,
    SocketDir,
    bind,
    bind_nameless,
    connect,
    door_address,
    remove_stale,
)

from .procs import children


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A base folder that no other program on this machine uses; /tmp may have folders of theirs, live and stale."""
    base = Path(tempfile.mkdtemp())
    monkeypatch.setattr(module, "_bases", lambda: [base])
    yield base
    base.rmdir()  # fails if something is left in it


def soon() -> float:
    return time.monotonic() + 20


def test_folder_is_private_short_and_removed() -> None:
    with SocketDir.create() as sockets:
        assert stat.S_IMODE(sockets.path.stat().st_mode) == 0o700
        address = sockets.address("EngineCore_DP0-requests")
        assert address.startswith("ipc:///")
        assert len(address) - len("ipc://") <= 107
    assert not sockets.path.exists()
    sockets.close()


@pytest.mark.parametrize("name", ["", "a/b", "../x", "x" * 25, "ü", "a b"])
def test_names_that_are_no_names(name: str) -> None:
    with SocketDir.create() as sockets, pytest.raises(ValueError, match="not a name"):
        sockets.address(name)


def test_a_failed_start_removes_it() -> None:
    made: list[SocketDir] = []

    def start() -> None:
        with SocketDir.create() as sockets:
            made.append(sockets)
            (sockets.path / "core").touch()
            raise RuntimeError("start failed")

    with pytest.raises(RuntimeError, match="start failed"):
        start()
    assert not made[0].path.exists()


def test_a_long_tmpdir_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with SocketDir.create() as sockets:
        assert sockets.path.parent == Path("/tmp")


def test_no_place_at_all_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_bases", list)
    with pytest.raises(TransportError, match="no folder for unix sockets"):
        SocketDir.create()


def test_connections_survive_the_removal_of_their_names(context: zmq.Context[Any]) -> None:
    with SocketDir.create() as sockets:
        server = bind(context, zmq.PULL, sockets.address("core"))
        peers = Peers(server)
        clients = [connect(context, zmq.PUSH, sockets.address("core")) for _ in range(2)]
        peers.wait(2, soon())
        assert [path.name for path in sockets.path.iterdir()] == ["core"]
    for number, client in enumerate(clients):
        client.send(bytes([number]))
    assert sorted(server.recv() for _ in range(2)) == [b"\0", b"\1"]
    for socket in (server, *clients):
        socket.close()


def test_asyncio_sockets_can_be_counted_too() -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        with SocketDir.create() as sockets:
            server = bind(context, zmq.ROUTER, sockets.address("core"), router_mandatory=1, sndhwm=0)
            assert server.getsockopt(zmq.SNDHWM) == 0
            peers = Peers(server)
            client = connect(context, zmq.DEALER, sockets.address("core"))
            await asyncio.to_thread(peers.wait, 1, soon())
        await client.send(b"hello")
        assert (await server.recv_multipart())[1] == b"hello"
        client.close()
        server.close()
        context.term()

    asyncio.run(main())


def test_waiting_for_peers_has_a_deadline_and_a_death_source(context: zmq.Context[Any]) -> None:
    def alive() -> None:
        raise ChildProcessError("engine core is gone")

    with SocketDir.create() as sockets:
        for index, (check, expected) in enumerate(((None, RPCTimeoutError), (alive, ChildProcessError))):
            server = bind(context, zmq.PULL, sockets.address(f"core{index}"))
            with pytest.raises(expected):
                Peers(server).wait(1, time.monotonic() + 0.05, check)
            server.close()


def test_a_peer_that_goes_is_not_counted(context: zmq.Context[Any]) -> None:
    with SocketDir.create() as sockets:
        server = bind(context, zmq.PULL, sockets.address("core"))
        peers = Peers(server)
        client = connect(context, zmq.PUSH, sockets.address("core"))
        while peers.poll(0.1) != 1:
            pass
        client.close()
        while peers.poll(0.1) != 0:
            pass
        server.close()
        peers.close()
        peers.close()


def test_a_failed_bind_or_option_closes_the_socket(context: zmq.Context[Any]) -> None:
    with pytest.raises(zmq.ZMQError):
        bind(context, zmq.PULL, "ipc:///nowhere/at/all")
    with pytest.raises(AttributeError):
        bind(context, zmq.PULL, "inproc://x", no_such_option=1)
    context.term()  # would hang with an open socket


def test_what_a_killed_process_left_is_removed_by_the_next(alone: Path) -> None:
    read_end, write_end = os.pipe()

    def maker() -> None:
        sockets = SocketDir.create()
        (sockets.path / "core").touch()
        os.write(write_end, str(sockets.path).encode())
        time.sleep(60)

    with children() as start:
        child = start(maker)
        path = Path(os.read(read_end, 200).decode())
        with SocketDir.create():
            assert path.exists()  # its maker lives
        child.kill()
        with SocketDir.create() as mine:
            assert list(alone.iterdir()) == [mine.path]
            assert path != mine.path
            assert remove_stale() == []
            assert mine.path.exists()
    os.close(read_end)
    os.close(write_end)


def test_foreign_folders_are_left_alone(tmp_path: Path, alone: Path) -> None:
    open_to_all, link = alone / f"{module._prefix()}a", alone / f"{module._prefix()}b"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    link.symlink_to(tmp_path)
    assert remove_stale() == []
    assert tmp_path.exists()
    link.unlink()
    open_to_all.rmdir()


def test_many_at_once_never_take_each_others(alone: Path) -> None:
    def maker() -> None:
        for _ in range(40):
            with SocketDir.create() as sockets:
                (sockets.path / "core").touch()
                assert sockets.path.exists()

    with children() as start:
        assert [child.join() for child in [start(maker) for _ in range(3)]] == [0, 0, 0]
    assert list(alone.iterdir()) == []


def test_a_nameless_socket_is_found_by_descriptor_only(context: zmq.Context[Any], alone: Path) -> None:
    """Also by a peer that connects long after, and after a peer before it has gone."""
    server, door = bind_nameless(context, zmq.DEALER)
    assert list(alone.iterdir()) == []
    with server:
        for word in (b"first", b"second"):
            with connect(context, zmq.DEALER, door_address(door)) as client:
                client.send(word)
                assert server.poll(5000)
                assert server.recv() == word
    os.close(door)


@pytest.mark.parametrize("mask", [0o022, 0o777], ids=oct)
def test_a_temporary_folder_that_is_setgid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    with tempfile.TemporaryDirectory(prefix="sg", dir="/tmp") as folder:
        Path(folder).chmod(0o2777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = os.umask(mask)
        try:
            with SocketDir.create() as sockets:
                assert sockets.path.parent == Path(folder)
                assert sockets.path.stat().st_mode & 0o777 == 0o700
        finally:
            os.umask(before)
        assert list(Path(folder).iterdir()) == []
