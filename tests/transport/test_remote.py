"""The remote queue: connections that break, peers that die, strangers at the listener."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from drumline.errors import ChannelClosedError, ConfigError, MessageTooLargeError, TransportError
from drumline.transport import RemoteOptions, Waiter, addresses, gate
from drumline.transport import remote_wire as wire
from drumline.transport.remote import RemoteReader, RemoteWriter
from drumline.transport.remote_options import RemoteHandle
from tests.stopped import stop

from .procs import children
from .proxy import Proxy

LONG = 30.0
LOCALHOST = "127.0.0.1"


def soon() -> float:
    return time.monotonic() + LONG


class Pair:
    """A writer, and readers of this process, each with its waiter."""

    def __init__(self, readers: int = 1, host: str = LOCALHOST, through: Any = None, **options: Any) -> None:
        self.waiter = Waiter.create("writer")
        self.writer = RemoteWriter(host, readers, self.waiter.ring, RemoteOptions(**options))
        self.proxy = Proxy(self.port) if through == "proxy" else None
        self.reader_waiters = [Waiter.create("reader") for _ in range(readers)]
        self.readers: list[RemoteReader] = []

    @property
    def port(self) -> int:
        return int(self.writer.url.rpartition(":")[2])

    def handle(self, index: int = 0) -> RemoteHandle:
        handle = self.writer.handles[index]
        if self.proxy is None:
            return handle
        return msgspec.structs.replace(handle, url=addresses.tcp_url(LOCALHOST, self.proxy.port))

    def connect(self) -> list[RemoteReader]:
        self.readers = [RemoteReader(self.handle(i), waiter.ring) for i, waiter in enumerate(self.reader_waiters)]
        return self.readers

    def send(self, *parts: bytes, kind: int = 0, buffers: Any = ()) -> None:
        done = self.waiter.wait(lambda: self.writer.try_write(parts, kind, buffers) or None, soon())
        assert done, self.writer.laggards()

    def get(self, index: int = 0, deadline: float | None = None) -> bytes:
        message = self.reader_waiters[index].wait(self.readers[index].poll, deadline or soon())
        assert message is not None, "nothing came"
        with message:
            return bytes(message.data)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = soon()
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.005)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.writer.close(0)
        if self.proxy is not None:
            self.proxy.close()
        for waiter in (self.waiter, *self.reader_waiters):
            assert waiter.lost_wakes == 0
            waiter.close()


@contextmanager
def pair(*args: Any, connect: bool = True, **options: Any) -> Iterator[Pair]:
    made = Pair(*args, **options)
    try:
        if connect:
            made.connect()
        yield made
    finally:
        made.close()


# Messages.


@pytest.mark.parametrize("host", [LOCALHOST, "::1", "localhost"])
def test_messages_of_all_sizes_over_both_families(host: str) -> None:
    with pair(2, host=host) as p:
        for size in (0, 1, 1000, wire.CHUNK_BYTES, 3 * wire.CHUNK_BYTES + 17):
            data = random.Random(size).randbytes(size)
            p.send(b"head", data, kind=size % 1000, buffers=[memoryview(data), memoryview(b"tail")])
            for i in range(2):
                message = p.reader_waiters[i].wait(p.readers[i].poll, soon())
                assert message is not None
                assert (message.kind, bytes(message.data)) == (size % 1000, b"head" + data)
                assert message.buffers == [data, b"tail"]
                kept = message.buffers[0]
                message.release()
                message.release()
                assert kept == data


def test_only_the_named_address_is_bound() -> None:
    with pair(connect=False) as p, pair(host="::1", connect=False) as q:
        listeners = {LOCALHOST: p.port, "::1": q.port}
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                raw, port = bytes.fromhex(local.partition(":")[0]), int(local.partition(":")[2], 16)
                if state == "0A" and port in listeners.values():
                    raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                    assert listeners.pop(str(ipaddress.ip_address(raw))) == port
        assert not listeners


def test_a_slow_reader_stops_the_writer_and_nothing_is_dropped() -> None:
    with pair(2, window_bytes=20_000) as p:
        sent = 0
        while p.writer.try_write([b"%05d" % sent, bytes(900)]):
            sent += 1
        assert 10 < sent < 20
        for number in range(sent):
            assert p.get(0)[:5] == b"%05d" % number
        # there is no room, for reader 1 has read nothing, and it learns that it is waited for
        p.until(lambda: not p.writer.try_write([bytes(905)]) and p.readers[1]._wanted == sent, "that it is wanted")
        assert p.get(1)[:5] == b"00000"
        p.send(b"%05d" % sent, bytes(900))
        for number in range(1, sent + 1):
            assert p.get(1)[:5] == b"%05d" % number
        assert p.get(0)[:5] == b"%05d" % sent
        p.send(bytes(100_000))  # one over the window goes alone
        assert [len(p.get(i)) for i in range(2)] == [100_000, 100_000]


def test_the_limit_on_message_size() -> None:
    with pair(max_message_bytes=5000) as p:
        with pytest.raises(MessageTooLargeError, match="max_message_bytes of this queue is 5000"):
            p.writer.try_write([bytes(3000)], 0, [memoryview(bytes(2000))])
        p.send(bytes(4984))
        assert p.get() == bytes(4984)


def test_one_message_at_a_time() -> None:
    with pair() as p:
        p.send(b"one")
        p.send(b"two")
        first = p.reader_waiters[0].wait(p.readers[0].poll, soon())
        assert first is not None
        p.until(lambda: bool(p.readers[0]._ready), "the second message")
        with pytest.raises(TransportError, match="release a message"):
            p.readers[0].poll()
        first.release()
        assert p.get() == b"two"


# Connections that break.


def test_connections_that_break_all_the_time_lose_and_reorder_nothing() -> None:
    """Two readers behind a proxy that cuts every connection after some random number of bytes."""
    count = 300
    with pair(2, through="proxy", window_bytes=100_000) as p:
        assert p.proxy is not None
        p.proxy.cut_after = 20_000
        rng = random.Random(3)
        got: list[list[bytes]] = [[], []]

        def read(i: int) -> None:
            for _ in range(count):
                got[i].append(p.get(i))

        threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        sent = []
        for number in range(count):
            data = b"%06d" % number + rng.randbytes(rng.choice((10, 300, 3000)))
            sent.append(hashlib.md5(data).digest() + data)
            p.send(sent[-1])
        for thread in threads:
            thread.join(LONG)
        assert got == [sent, sent]
        assert p.proxy.connections > 6


def test_a_large_message_is_sent_again_after_a_cut_in_the_middle() -> None:
    data = random.Random(1).randbytes(6 * wire.CHUNK_BYTES)
    with pair(through="proxy") as p:
        assert p.proxy is not None
        p.send(b"first")
        assert p.get() == b"first"
        p.proxy.cut_after = 3 * wire.CHUNK_BYTES
        p.send(data)
        p.until(lambda: p.proxy is not None and p.proxy.connections > 1, "the cut")
        p.proxy.cut_after = None
        assert p.get() == data
        p.send(b"last")
        assert p.get() == b"last"


def test_a_peer_that_stays_away_is_gone() -> None:
    with pair(through="proxy", reconnect_s=0.3) as p:
        assert p.proxy is not None
        p.send(b"hello")
        assert p.get() == b"hello"
        p.proxy.accepting = False
        p.proxy.cut()
        begin = time.monotonic()
        with pytest.raises(ChannelClosedError, match=r"the writer at tcp://.* is gone: no connection for 0.[3-9]"):
            p.get()
        with pytest.raises(ChannelClosedError, match=r"remote reader 0 at 127.0.0.1 is gone: its connection ended"):
            p.waiter.wait(p.writer.check, soon())
        assert time.monotonic() - begin < 3
        with pytest.raises(ChannelClosedError, match=r"remote reader 0 .* is gone"):
            p.writer.try_write([b"x"])


def test_peers_that_never_come_are_gone_in_the_end() -> None:
    with pair(connect=False, connect_s=0.2) as p:
        with pytest.raises(ChannelClosedError, match="remote reader 0 has never connected"):
            p.waiter.wait(p.writer.check, soon())
        listener = socket.create_server((LOCALHOST, 0))  # accepts, and says nothing
        silent = addresses.tcp_url(LOCALHOST, listener.getsockname()[1])
        p.readers = [RemoteReader(msgspec.structs.replace(p.handle(), url=silent), p.reader_waiters[0].ring)]
        with pytest.raises(ChannelClosedError, match=r"does not answer: no connection for 0.2"):
            p.get()
        listener.close()


def test_a_silent_connection_is_noticed_by_its_heartbeat() -> None:
    with pair(through="proxy", heartbeat_s=0.1, reconnect_s=0.3) as p:
        assert p.proxy is not None
        p.send(b"hello")
        assert p.get() == b"hello"
        p.proxy.frozen = True  # like a cable that is pulled: nothing comes, nothing is closed
        begin = time.monotonic()
        with pytest.raises(ChannelClosedError, match=r"is gone"):
            p.get()
        with pytest.raises(ChannelClosedError, match=r"is gone"):
            p.waiter.wait(p.writer.check, soon())
        assert time.monotonic() - begin < 5


def serve_reader(handle: RemoteHandle, back: int) -> None:
    waiter = Waiter.create("reader")
    reader = RemoteReader(handle, waiter.ring)
    while True:
        message = waiter.wait(reader.poll)
        assert message is not None
        with message:
            os.write(back, bytes(message.data))


@pytest.mark.alone
def test_a_reader_that_is_stopped_goes_on_where_it_was_and_one_that_is_killed_is_gone() -> None:
    back, write_end = os.pipe()
    with pair(connect=False, heartbeat_s=0.1, reconnect_s=2.0) as p, children() as start:
        child = start(serve_reader, p.handle(), write_end)
        p.send(b"a")
        assert os.read(back, 10) == b"a"
        stop(child.pid)
        p.until(lambda: p.writer._peers[0].route is None, "away")
        p.send(b"b")
        os.kill(child.pid, signal.SIGCONT)
        assert os.read(back, 10) == b"b"
        assert p.writer._peers[0].route is not None
        child.kill()
        begin = time.monotonic()
        p.until(lambda: p.writer._peers[0].route is None, "away")
        assert time.monotonic() - begin < 0.1
        with pytest.raises(ChannelClosedError, match=r"remote reader 0 .* is gone"):
            p.waiter.wait(p.writer.check, soon())
        assert 1.9 < time.monotonic() - begin < 4
    os.close(back)
    os.close(write_end)


def test_a_handle_serves_one_reader() -> None:
    with pair() as p:
        p.send(b"hello")
        assert p.get() == b"hello"
        waiter = Waiter.create("second")
        second = RemoteReader(p.handle(), waiter.ring)
        with pytest.raises(ChannelClosedError, match="refuses this reader: this handle is in use by another reader"):
            waiter.wait(second.poll, soon())
        second.close()
        waiter.close()
        p.send(b"still")
        assert p.get() == b"still"


# Strangers.


def stranger(p: Pair, server_key: bytes, keys: tuple[bytes, bytes] | None) -> None:
    """A ZMQ client that tries to greet, with these keys or without CURVE, until the listener has refused it."""
    before = p.writer.refused
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.DEALER)
    if keys is not None:
        sock.curve_serverkey, (sock.curve_publickey, sock.curve_secretkey) = server_key, keys
    sock.connect(p.writer.url)
    sock.send(wire.Hello(bytes(16), 0, 0).pack())
    p.until(lambda: p.writer.refused > before, "a refusal")
    assert not sock.poll(0)
    context.destroy(linger=0)


def still_works(p: Pair) -> None:
    p.send(b"are you there?")
    assert p.get() == b"are you there?"


def test_wrong_keys_are_refused_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pair() as p:
        still_works(p)
        server_key = p.handle().server_key
        stranger(p, server_key, gate.curve_keys())
        stranger(p, gate.curve_keys()[0], (p.handle().public_key, p.handle().secret_key))
        stranger(p, server_key, None)
        still_works(p)
        lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert [r.getMessage() for r in lines] == [
            f"listener {p.writer.url}: 1 connection(s) refused that are not from this run (a key that is not on the "
            "list); more are counted and told in 60 s at the earliest"
        ]


def test_a_reader_with_the_wrong_keys_says_so() -> None:
    with pair(connect=False, connect_s=0.5) as p:
        public, secret = gate.curve_keys()
        wrong = msgspec.structs.replace(p.handle(), public_key=public, secret_key=secret)
        p.readers = [RemoteReader(wrong, p.reader_waiters[0].ring)]
        with pytest.raises(ChannelClosedError, match=r"does not answer.*the handshake failed: wrong keys"):
            p.get()


def test_refusals_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    refusals = gate.Refusals("listener x", lambda: now[0])
    for _ in range(50):
        refusals.add("why")
    now[0] += gate.LOG_EVERY_S
    refusals.add("why")
    refusals.add("why")
    assert [r.getMessage().partition(" conn")[0] for r in caplog.records] == ["listener x: 1", "listener x: 50"]
    assert refusals.count == 52


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
CURVE_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)


def noises(rng: random.Random) -> Iterator[bytes]:
    """What strangers send: noise, and more and more of the real thing before the noise."""
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x80\x04\x95" + bytes(50)  # a pickle
    yield b"\xff\xff\xff\xff\xff\xff\xff\xff\xff" * 20
    yield GREETING.replace(b"CURVE", b"NULL\x00") + b"\x04\x19\x05READY"
    yield GREETING + b"\x06" + struct.pack(">Q", 1 << 62) + b"huge"
    yield GREETING + b"\x02" + struct.pack(">Q", 1 << 30) + b"a message before the handshake"
    yield GREETING + CURVE_HELLO[:100]
    yield GREETING + CURVE_HELLO + bytes(120)
    for _ in range(60):
        whole = GREETING + CURVE_HELLO + bytes(120)
        good = whole[: rng.randrange(len(whole))]
        yield good + rng.randbytes(rng.choice((0, 1, 9, 64, 3000)))


def test_noise_at_the_listener_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Random bytes, huge length prefixes, halves of everything, each left in another way, while messages flow."""
    rng = random.Random(11)
    with pair() as p:
        still_works(p)
        left: list[socket.socket] = []
        for noise in noises(rng):
            sock = socket.create_connection((LOCALHOST, p.port))
            sock.settimeout(1)
            try:
                sock.sendall(noise)
                if rng.random() < 0.3:
                    sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused in the middle: as it should be
            if rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                sock.close()
            else:
                left.append(sock)
            still_works(p)
        assert len(left) > 20
        for sock in left:
            sock.close()
        p.until(lambda: p.writer.refused > 30, "refusals")
        still_works(p)
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        assert p.writer._outbox.next_seq > 60


def our_sockets() -> int:
    return sum(map(_is_socket, Path("/proc/self/fd").iterdir()))


def _is_socket(fd: Path) -> bool:
    try:
        return str(fd.readlink()).startswith("socket:")
    except OSError:
        return False


def test_a_flood_of_connections_takes_few_descriptors_and_passes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand connections that say nothing, from another process. The queue works on; a new reader gets in after."""
    monkeypatch.setattr(gate, "HANDSHAKE_S", 1.0)
    with pair(2) as p, children() as start:
        late = p.readers.pop()
        late.close()
        still_works(p)
        before = our_sockets()

        def flood() -> None:
            socks = []
            for _ in range(1000):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex((LOCALHOST, p.port))
                socks.append(sock)
            time.sleep(0.6)

        flooder = start(flood)
        most = 0
        while not select.select([flooder.pidfd], [], [], 0)[0]:
            still_works(p)
            most = max(most, our_sockets() - before)
        assert flooder.join() == 0
        assert gate.KNOCKING_MAX < most < 400
        p.until(lambda: our_sockets() <= before, "the flood to pass")
        p.until(lambda: not p.writer._gate._shut, "the gate to open again")
        still_works(p)
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_silent_connections_that_come_again_keep_no_reader_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hundred of them, each made anew as soon as it is ended, for as long as the test lasts; no limit helps."""
    monkeypatch.setattr(gate, "HANDSHAKE_S", 1000.0)
    with pair(1, connect=False) as p, children() as start:

        def hold() -> None:
            poller = select.poll()
            socks: dict[int, socket.socket] = {}

            def knock() -> None:
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex((LOCALHOST, p.port))
                socks[sock.fileno()] = sock
                poller.register(sock.fileno(), select.POLLRDHUP)

            for _ in range(500):
                knock()
            while True:
                for fd, _ in poller.poll():
                    poller.unregister(fd)
                    socks.pop(fd).close()
                    knock()

        flooder = start(hold)
        p.until(lambda: p.writer._gate.refusals.count > 100, "the flood")
        p.connect()
        for _ in range(3):
            still_works(p)
        assert not select.select([flooder.pidfd], [], [], 0)[0]
        os.kill(flooder.pid, signal.SIGKILL)


def test_where_the_kernel_has_no_filter_the_time_limit_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_SO_ATTACH_FILTER", 9999)
    monkeypatch.setattr(gate, "KNOCKING_MAX", 1000)
    monkeypatch.setattr(gate, "FLOOD_MAX", 64)
    monkeypatch.setattr(gate, "HANDSHAKE_S", 0.3)
    with pair() as p:
        still_works(p)
        before = our_sockets()
        socks = [socket.create_connection((LOCALHOST, p.port)) for _ in range(100)]
        p.until(lambda: p.writer.refused >= 100, "refusals")
        for sock in socks:
            sock.close()
        p.until(lambda: our_sockets() <= before, "their end")
        still_works(p)
        lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert sum("cannot hold back connections" in line for line in lines) == 1
        assert len(lines) == 2


def test_a_peer_of_ours_that_talks_nonsense_is_only_noted() -> None:
    with pair(2) as p:
        still_works(p)
        handle = p.handle(1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.curve_serverkey, sock.curve_publickey = handle.server_key, handle.public_key
        sock.curve_secretkey = handle.secret_key
        sock.connect(handle.url)
        hello = wire.Hello(bytes(16), 0, 0).pack()
        for frame in (b"", b"\x63", b"\x10" + bytes(40), hello[:-1], hello + b"x", bytes(900)):
            before = p.writer.refused
            sock.send(frame)
            p.until(lambda before=before: p.writer.refused > before, "a note")
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sock.send(bytes(100_000))  # over the limit: the connection ends
        assert monitor.poll(10_000)
        context.destroy(linger=0)
        still_works(p)


def test_a_writer_that_talks_nonsense_ends_the_reader() -> None:
    with pair() as p:
        still_works(p)
        with p.writer._lock:
            p.writer._send(p.writer._peers[0], wire._DATA.pack(wire.DATA, 99, 0, 16) + bytes(16))
        with pytest.raises(ChannelClosedError, match="sent what it may not: message 1 byte 0 is next"):
            p.get()


# End.


def test_closing_waits_until_all_have_received_everything() -> None:
    with pair(2, connect=False) as p:
        for number in range(20):
            p.send(b"%d" % number, bytes(10_000))
        threading.Timer(0.1, p.connect).start()
        p.writer.close(LONG)
        for i in range(2):
            assert [int(p.get(i)[:2].strip(b"\0")) for _ in range(20)] == list(range(20))
            with pytest.raises(ChannelClosedError, match="has closed the queue"):
                p.get(i)
        with pytest.raises(ChannelClosedError, match="this queue is closed"):
            p.writer.try_write([b"x"])


def test_a_reader_that_closes_is_known_at_once() -> None:
    with pair(2) as p:
        p.send(b"x")
        for i in range(2):
            p.get(i)
        p.readers[1].close()
        with pytest.raises(ChannelClosedError, match=r"remote reader 1 at 127.0.0.1 has closed its end"):
            p.waiter.wait(p.writer.check, time.monotonic() + 2)


def test_a_port_that_is_taken_and_wrong_numbers() -> None:
    with pair(connect=False) as p, pytest.raises(ConfigError, match=rf"cannot listen on tcp://127.0.0.1:{p.port}"):
        RemoteWriter(LOCALHOST, 1, lambda: None, port=p.port)
    with pytest.raises(ConfigError, match="at least one reader"):
        RemoteWriter(LOCALHOST, 0, lambda: None)
    with pytest.raises(ConfigError, match="window_bytes is more than 0"):
        RemoteOptions(window_bytes=0)


# Cost.


def idle_reader(handle: RemoteHandle, out: int, seconds: float) -> None:
    waiter = Waiter.create("reader")
    reader = RemoteReader(handle, waiter.ring)
    for _ in range(2):
        message = waiter.wait(reader.poll, soon())
        assert message is not None
        message.release()
    begin = time.process_time()
    assert waiter.wait(reader.poll, time.monotonic() + seconds) is None
    os.write(out, b"%12.9f" % (time.process_time() - begin))
    reader.close()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("seconds", "most_s"), [(4.0, 0.006), pytest.param(20.0, 0.010, marks=pytest.mark.soak)], ids=["short", "whole"]
)
def test_an_idle_queue_uses_no_cpu(seconds: float, most_s: float) -> None:
    """From the last message on, owner and reader, heartbeats included."""
    read_end, write_end = os.pipe()
    with pair(connect=False) as p, children() as start:
        child = start(idle_reader, p.handle(), write_end, seconds)
        p.send(b"one")
        p.send(b"two")
        p.until(lambda: p.writer._peers[0].route is not None, "connected")
        begin = time.process_time()
        assert p.waiter.wait(lambda: None, time.monotonic() + seconds - 0.5) is None
        mine = time.process_time() - begin
        theirs = float(os.read(read_end, 12))
        assert child.join() == 0
        assert mine < most_s, f"owner {mine * 1000:.1f} ms"
        assert theirs < most_s, f"reader {theirs * 1000:.1f} ms"
    os.close(read_end)
    os.close(write_end)
