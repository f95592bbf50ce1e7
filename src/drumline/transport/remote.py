"""The message queue between machines: one writer, readers over ZMQ on TCP, encrypted and authenticated by CURVE.

::

    writer's process                                     reader's process
    try_write, under the lock --> ROUTER --(IO thread)-- TCP --(IO thread)-- DEALER --> poll(), wait(): Inbox
      Outbox keeps a copy
    service thread <-- ROUTER <--------- HELLO, ACK, END_RECEIVED, BYE <------------- release(): ACK
      gate: who may come in                                                           service thread: the connection
      -> bell of the writer's waiter: there is room, or a reader is gone

The one who writes listens, on one address (see gate.py); readers connect. What they say to each other, credit and
retransmission are in remote_wire.py.

**Nothing is lost or reordered** by a connection that breaks: ZMQ connects again by itself, the reader's first frame on
every connection (HELLO) says what it has, the writer goes on there. Frames of the old connection that come late are
recognised by their numbers. A reader is known by its key, a connection by its descriptor, never by what a peer says.

**Death.** A connection that ends makes a peer *away*; one that stays away for ``reconnect_s`` is *gone*: the writer's
calls raise ChannelClosedError from then on, and so do those of a reader whose writer is gone. A connection that is
silent ends after ``heartbeat_s`` and twice that: ZMQ's IO threads send and answer heartbeats, without Python. Closing
is said (END, BYE), so it is known at once. Who has other news of a death (a process that it supervises) has its own
death source.

**Threads.** The application's threads send and receive themselves: a hand-over to another thread costs a wake-up (30
us) and the interpreter's lock, up to 5 ms while the application computes. So a socket is used by two threads, by one at
a time (a lock), and whoever used it takes what has come before it lets go, since ZMQ's descriptor does not wake again
for that. The service threads sleep until a connection comes or ends; the writer's takes what readers say, too, and the
reader's takes its turn twice a second while messages flow, lest a reader that computes for long leave the end of the
queue unanswered.

**What idleness costs**, measured over 20 s with a heartbeat every 5 s, on 2 cores: 1.3 ms of CPU for the writer and
0.8 ms for the reader (every 2 s: 2.0 and 1.6; none: 0.2 and 0.1), since no Python runs. TCP's keepalive would be free
but notices a peer that is stopped only when there is something to send.

Rejected: PUB/SUB and XPUB: they drop. A reader that acknowledges what it received: memory would fill behind a slow one.
ZMQ's own high-water marks as flow control: they count frames, not bytes, and ROUTER drops there. ``copy=False`` in
pyzmq: starts a thread and a context of its own that outlive the queue. Sockets with ``ssl``: pre-shared keys need
Python 3.13, certificates another library.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from drumline.errors import ChannelClosedError, ConfigError, MessageTooLargeError, TransportError
from drumline.transport import remote_wire as wire
from drumline.transport.gate import Gate, curve_keys, events
from drumline.transport.remote_options import RemoteHandle, RemoteOptions
from drumline.transport.ring import Part
from drumline.transport.service import Service, milliseconds

log = logging.getLogger("drumline.transport")

_BYE_LINGER_MS = 200
_TURN_S = 0.5  # how long a writer that closes may have to wait for a reader that computes

T = TypeVar("T")


def _configure(sock: zmq.Socket[bytes], options: RemoteOptions) -> None:
    sock.linger = 0
    sock.sndhwm = sock.rcvhwm = 0  # credit bounds what is under way; these would drop
    sock.heartbeat_ivl = max(1, int(options.heartbeat_s * 1000))
    sock.heartbeat_timeout = 2 * sock.heartbeat_ivl


class _Peer:
    """A reader, as the writer knows it."""

    def __init__(self, index: int, now: float) -> None:
        self.index = index
        self.session = b""
        self.route: bytes | None = None
        """Where ROUTER sends frames for it; None: away."""
        self.fd = -1
        self.where = ""
        self.since = now
        """When it went away (or was made)."""
        self.gone = ""
        """Why it will not come back."""
        self.wanted = -1
        self.has_all = False

    @property
    def name(self) -> str:
        return f"remote reader {self.index}" + (f" at {self.where}" if self.where else "")


class RemoteWriter:
    """The writing end. Thread-safe; messages of one thread keep their order.

    ``on_change`` is called, from any thread, when there may be room again or when a reader is gone.
    """

    def __init__(
        self,
        host: str,
        n_readers: int,
        on_change: Callable[[], None],
        options: RemoteOptions | None = None,
        port: int = 0,
    ) -> None:
        """Listen on ``host`` (an address or a name of this machine). ConfigError if that is not possible."""
        if n_readers < 1:
            raise ConfigError(f"a remote queue has at least one reader, not {n_readers}")
        self.options = options or RemoteOptions()
        self._on_change = on_change
        self._outbox = wire.Outbox(n_readers, self.options.window_bytes)
        now = time.monotonic()
        self._peers = [_Peer(index, now) for index in range(n_readers)]
        self._failure = ""
        self._ended = False
        self._closed = False
        self._lock = threading.Lock()
        self._all_told = threading.Condition(self._lock)
        keys = [curve_keys() for _ in range(n_readers)]
        server_key, server_secret = curve_keys()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        _configure(self._router, self.options)
        self._router.router_mandatory = True
        allowed = {public: str(index) for index, (public, _) in enumerate(keys)}
        try:
            self._gate = Gate(self._context, self._router, host, port, server_secret, allowed, self._connection_ended)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.url = self._gate.url
        self.handles = [
            RemoteHandle(
                url=self.url,
                index=index,
                server_key=server_key,
                public_key=public,
                secret_key=secret,
                options=self.options,
            )
            for index, (public, secret) in enumerate(keys)
        ]
        """One for each reader."""
        fds = (*self._gate.fds, int(self._router.get(zmq.FD)))
        self._service = Service("remote-writer", fds, self._serve, self._close_sockets)
        self._service.start()

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message."""
        return self.options.max_message_bytes

    @property
    def refused(self) -> int:
        """Connections that were refused so far."""
        return self._gate.refusals.count

    def check(self) -> None:
        """ChannelClosedError if a reader is gone or the queue is closed."""
        if self._failure:
            raise ChannelClosedError(self._failure)
        if self._closed or self._ended:
            raise ChannelClosedError("this queue is closed")

    def ready(self, parts: Sequence[Part], buffers: Sequence[memoryview] = ()) -> bool:
        """Would :meth:`write` find room now? If not, ``on_change`` is called when there may be some.

        MessageTooLargeError if it never can; ChannelClosedError like :meth:`check`.
        """
        body = wire.body_bytes(parts, buffers)
        if body > self.options.max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {body} bytes, where max_message_bytes of this queue is {self.options.max_message_bytes}"
            )
        with self._lock:
            self.check()
            if self._outbox.room(body):
                return True
            for peer in self._peers:
                if peer.route is not None and peer.wanted != self._outbox.next_seq and self._outbox.backlog(peer.index):
                    peer.wanted = self._outbox.next_seq
                    self._send(peer, wire.pack_number(wire.WANT, peer.wanted))
            self._take()
            return self._outbox.room(body)

    def write(self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[memoryview] = ()) -> None:
        """Send to all readers, whether there is room or not: ask :meth:`ready` first. All is copied."""
        with self._lock:
            self.check()
            message = self._outbox.add(kind, parts, buffers, time.monotonic())
            for peer in self._peers:
                if peer.route is not None:
                    self._send_message(peer, message)
            self._take()

    def try_write(self, parts: Sequence[Part], kind: int = 0, buffers: Sequence[memoryview] = ()) -> bool:
        """Send to all readers if there is room now; False if not, and ``on_change`` will be called.

        For one thread at a time. Raises like :meth:`ready`.
        """
        if not self.ready(parts, buffers):
            return False
        self.write(parts, kind, buffers)
        return True

    def backlog(self) -> list[int]:
        """For each reader the messages that it has not said to have read."""
        with self._lock:
            return [self._outbox.backlog(peer.index) for peer in self._peers]

    def laggards(self) -> list[str]:
        """A line for each reader that has not read everything: who, how much, since when, and whether it is there."""
        now = time.monotonic()
        lines = []
        with self._lock:
            for peer in self._peers:
                since = self._outbox.waiting_since(peer.index)
                if since is None:
                    continue
                state = ""
                if peer.route is None:
                    state = " and is away" if peer.session else " and has never connected"
                    state += f" for {now - peer.since:.1f} s"
                behind = self._outbox.backlog(peer.index)
                lines.append(f"{peer.name} has not read {behind} message(s) for {now - since:.1f} s{state}")
        return lines

    # Under the lock, in whichever thread.

    def _send(self, peer: _Peer, frame: bytes) -> None:
        """Send, or note that the connection has ended: then it gets everything again on the next one."""
        if peer.route is None:
            return
        try:
            self._router.send(peer.route, zmq.SNDMORE | zmq.NOBLOCK)
            self._router.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            self._away(peer)

    def _send_message(self, peer: _Peer, message: wire.Outgoing) -> None:
        for chunk in message.chunks:
            self._send(peer, chunk)

    def _take(self) -> None:
        """Take what readers said."""
        router = self._router
        while int(router.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            first = frames[-1]
            try:
                peer = self._peers[int(str(first.get("User-Id")))]
                self._heard(peer, frames[0].bytes, first)
            except (TransportError, ValueError) as exc:
                # a peer of ours that talks nonsense: a bug, or another version
                self._gate.refusals.add(f"nonsense from a peer with a good key: {exc}")
                self._refuse(frames[0].bytes, str(exc))

    def _heard(self, peer: _Peer, route: bytes, frame: zmq.Frame) -> None:
        body = frame.bytes
        type_ = body[0] if body else 0
        if type_ == wire.HELLO:
            self._greet(
                peer, route, int(str(frame.get("__fd"))), str(frame.get("Peer-Address")), wire.Hello.unpack(body)
            )
            return
        number = wire.unpack_number(body)
        if type_ == wire.ACK:
            if self._outbox.read(peer.index, number):
                self._on_change()
        elif type_ == wire.END_RECEIVED:
            peer.has_all = True
            self._all_told.notify_all()
        elif type_ == wire.BYE:
            self._lose(peer, "has closed its end")
        else:
            raise TransportError(f"a frame of type {type_}")

    def _greet(self, peer: _Peer, route: bytes, fd: int, where: str, hello: wire.Hello) -> None:
        self._gate.serve()  # the end of an older connection with the same number comes first
        self._gate.proved(fd)
        refusal = peer.gone
        if peer.session and peer.session != hello.session:
            refusal = "this handle is in use by another reader"
        messages: list[wire.Outgoing] = []
        if not refusal:
            try:
                messages = list(self._outbox.since(hello.next_seq))
            except TransportError as exc:
                refusal = str(exc)
        if refusal:
            self._refuse(route, refusal)
            return
        if peer.session:
            log.info("%s is back after %.1f s", peer.name, time.monotonic() - peer.since)
        peer.session, peer.route, peer.fd, peer.where, peer.wanted = hello.session, route, fd, where, -1
        self._outbox.read(peer.index, hello.read)
        self._send(peer, wire.pack_number(wire.WELCOME, hello.next_seq))
        for message in messages:
            self._send_message(peer, message)
        if self._ended:
            self._send(peer, wire.pack_number(wire.END, self._outbox.next_seq))
        self._on_change()

    def _refuse(self, route: bytes, why: str) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([route, bytes([wire.REFUSED]) + why.encode()], zmq.NOBLOCK)

    def _connection_ended(self, fd: int) -> None:
        for peer in self._peers:
            if peer.fd == fd:
                self._away(peer)

    def _away(self, peer: _Peer) -> None:
        """Its connection has ended."""
        if peer.route is not None and not (peer.has_all or self._ended):
            log.info("the connection of %s has ended; waiting %g s for it", peer.name, self.options.reconnect_s)
        peer.route, peer.fd, peer.since = None, -1, time.monotonic()

    def _lose(self, peer: _Peer, why: str) -> None:
        """It is gone for good."""
        peer.gone = why
        peer.route, peer.fd = None, -1
        self._outbox.drop(peer.index)
        if not self._ended and not self._failure:
            self._failure = f"{peer.name} {why}"
        self._all_told.notify_all()
        self._on_change()

    # The service thread.

    def _serve(self, _: Sequence[int]) -> float | None:
        """Everything that has come; when to look again."""
        with self._lock:
            self._gate.serve()
            self._take()
            now = time.monotonic()
            next_look: float | None = None
            for peer in self._peers:
                if peer.route is not None or peer.gone:
                    continue
                grace = self.options.reconnect_s if peer.session else self.options.connect_s
                if now >= peer.since + grace:
                    what = "is gone: its connection ended" if peer.session else "has never connected:"
                    self._lose(peer, f"{what} {now - peer.since:.1f} s ago")
                elif next_look is None or peer.since + grace < next_look:
                    next_look = peer.since + grace
            return next_look

    def _close_sockets(self) -> None:
        with self._lock:
            self._closed = True
            self._gate.close()
            self._router.close(0)

    def close(self, linger_s: float = 5.0) -> None:
        """Tell the readers that nothing more comes, and end. Idempotent.

        Waits up to ``linger_s`` until all of them have *received* everything; who has not by then loses the rest.
        """
        with self._lock:
            if self._closed:
                return
            if not self._ended:
                self._ended = True
                for peer in self._peers:
                    self._send(peer, wire.pack_number(wire.END, self._outbox.next_seq))
            self._all_told.wait_for(self._nothing_owed, linger_s)
        self._service.stop()
        self._context.term()

    def _nothing_owed(self) -> bool:
        """Everyone has everything, or is gone; who never came is not waited for if there is nothing to have."""
        return all(peer.has_all or peer.gone or not (peer.session or self._outbox.next_seq) for peer in self._peers)


class RemoteMessage:
    """One received message; like :class:`~drumline.transport.ring.Message`. ``buffers`` outlive :meth:`release`."""

    __slots__ = ("_cost", "_reader", "buffers", "data", "kind")

    def __init__(self, reader: RemoteReader, received: wire.Received) -> None:
        self._reader = reader
        self.kind, self.data, self._cost = received.kind, received.data, received.cost
        self.buffers: Sequence[memoryview] = received.buffers

    def release(self) -> None:
        """It was read: the writer may let go of it. Idempotent."""
        if self._cost:
            cost, self._cost = self._cost, 0
            self.data.release()
            self.buffers = ()
            self._reader._read(cost)

    def __enter__(self) -> RemoteMessage:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RemoteReader:
    """The reading end, for one thread.

    It is its own waiter (:meth:`wait`), unless ``on_message`` is given: that is then called, from another thread, when
    :meth:`poll` has news, for who has other things to wait for as well. It costs one more change of threads a message.
    """

    def __init__(self, handle: RemoteHandle, on_message: Callable[[], None] | None = None) -> None:
        """Connect, which goes on in the background: nothing is waited for."""
        self.index = handle.index
        self._handle = handle
        self._options = options = handle.options
        self._session = os.urandom(16)
        self._inbox = wire.Inbox(options.max_message_bytes)
        self._ready: deque[wire.Received] = deque()
        self._current: RemoteMessage | None = None
        self._messages_read = 0
        self._bytes_read = 0
        self._due = False
        self._told = 0
        self._wanted = -1
        self._failure = ""
        self._ended = False
        self._connected = False
        self._refusal = ""
        self._since = time.monotonic()
        self._grace = options.connect_s
        self._closed = False
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._setup(handle)
        self._monitor: zmq.Socket[bytes] = self._dealer.get_monitor_socket(_READER_EVENTS)
        self._dealer.connect(handle.url)
        self._direct = on_message is None
        self._on_message = on_message or self.ring
        self._waiting = False
        self._alone = False
        """The service thread leaves the socket to the one who waits."""
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        dealer_fd, monitor_fd = int(self._dealer.get(zmq.FD)), int(self._monitor.get(zmq.FD))
        self._poll = select.poll()
        self._poll.register(dealer_fd, select.POLLIN)
        self._poll.register(self._news, select.POLLIN)
        fds = (monitor_fd,) if self._direct else (monitor_fd, dealer_fd)
        self._service = Service("remote-reader", fds, self._serve, self._close_sockets)
        self._service.start()

    def _setup(self, handle: RemoteHandle) -> None:
        dealer = self._dealer
        _configure(dealer, self._options)
        dealer.ipv6 = "[" in handle.url
        dealer.curve_serverkey = handle.server_key
        dealer.curve_publickey = handle.public_key
        dealer.curve_secretkey = handle.secret_key
        dealer.maxmsgsize = wire.DATA_MAX
        dealer.reconnect_ivl = 50
        dealer.reconnect_ivl_max = 1000

    @property
    def name(self) -> str:
        """The other end, for messages."""
        return f"the writer at {self._handle.url}"

    @property
    def ended(self) -> bool:
        """The writer has closed the queue in good order."""
        return self._ended

    def poll(self) -> RemoteMessage | None:
        """The next message, or None. It must be released before the next call.

        ChannelClosedError once everything was read and nothing more will come: the writer closed the queue, or is gone.
        """
        if not self._ready:
            if self._direct and not self._closed:
                with self._lock:
                    self._take()
            over = self._ended or self._failure or self._closed
            if not self._ready:
                if not over:
                    return None
                raise ChannelClosedError(self._failure or f"{self.name} has closed the queue")
        if self._current is not None:
            raise TransportError("release a message before you take the next one")
        self._current = message = RemoteMessage(self, self._ready.popleft())
        return message

    def wait(self, check: Callable[[], T | None], deadline: float | None = None) -> T | None:
        """Like :meth:`Waiter.wait <drumline.transport.waiter.Waiter.wait>`; ``check`` calls :meth:`poll`.

        Only without ``on_message``. Who changes anything else that ``check`` looks at calls :meth:`ring`.
        """
        while True:
            result = check()
            if result is not None:
                return result
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._waiting = True
            woken = self._poll.poll(milliseconds(left))
            self._waiting = False
            if self._alone:
                self._alone = False
                self._service.wake()
            for fd, _ in woken:
                if fd == self._news:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)

    def ring(self) -> None:
        """Have :meth:`wait` look again. From any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._news, 1)

    def _read(self, cost: int) -> None:
        self._current = None
        self._messages_read += 1
        self._bytes_read += cost
        if self._bytes_read < self._options.window_bytes // 4 and self._messages_read > self._wanted:
            return
        self._bytes_read = 0
        self._due = True
        if self._direct:
            with self._lock:
                self._tell()
        else:
            self._service.wake()

    # Under the lock, in whichever thread.

    def _take(self) -> bool:
        """Take all that has come, and say what was read. True: there is something for the one who polls."""
        news = False
        with contextlib.suppress(zmq.Again):
            while True:
                frame = self._dealer.recv(zmq.NOBLOCK)
                try:
                    news = self._heard(frame) or news
                except TransportError as exc:
                    self._failure = self._failure or f"{self.name} sent what it may not: {exc}"
                    news = True
        self._tell()
        return news

    # The service thread.

    def _serve(self, _: Sequence[int]) -> float | None:
        with self._lock:
            self._look_at_connection()
            news = self._take()
            next_look = self._next_turn()
            if not (self._connected or self._failure or self._ended):
                next_look = self._since + self._grace
                now = time.monotonic()
                if now >= next_look:
                    what = "is gone" if self._messages_read or self._inbox.next_seq else "does not answer"
                    why = f" ({self._refusal})" if self._refusal else ""
                    self._failure = f"{self.name} {what}: no connection for {now - self._since:.1f} s{why}"
                    news, next_look = True, None
        if news:
            self._on_message()
        return next_look

    def _next_turn(self) -> float | None:
        """When to look again. The thread that waits in :meth:`wait` looks itself; one that computes does not."""
        if not self._direct or self._ended:
            return None
        self._alone = True  # set before the look, as the other one is: at least one of both sees the other
        if self._waiting:
            return None
        self._alone = False
        return time.monotonic() + _TURN_S

    def _look_at_connection(self) -> None:
        for event, _ in events(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._refusal = ""
                hello = wire.Hello(self._session, self._inbox.next_seq, self._messages_read)
                self._dealer.send(hello.pack(), zmq.NOBLOCK)
            elif event == zmq.EVENT_DISCONNECTED:
                if self._connected:
                    self._connected, self._since, self._grace = False, time.monotonic(), self._options.reconnect_s
            else:
                self._refusal = "the handshake failed: wrong keys, or no queue there"

    def _heard(self, frame: bytes) -> bool:
        """One frame; True if the one who polls must be woken."""
        type_ = frame[0] if frame else 0
        if self._failure:
            return False
        if type_ == wire.DATA:
            received = self._inbox.take(frame)
            if received is not None:
                self._ready.append(received)
            return received is not None
        if type_ == wire.REFUSED:
            why = frame[1:].decode(errors="replace")
            self._failure = f"{self.name} refuses this reader: {why}"
            return True
        number = wire.unpack_number(frame)
        if type_ == wire.WANT:
            self._wanted = number
        elif type_ == wire.END:
            if number != self._inbox.next_seq:
                raise TransportError(f"the end after {number} messages, where {self._inbox.next_seq} have come")
            self._ended = True
            self._dealer.send(wire.pack_number(wire.END_RECEIVED, number), zmq.NOBLOCK)
            return True
        elif type_ != wire.WELCOME:
            raise TransportError(f"a frame of type {type_}")
        return False

    def _tell(self) -> None:
        """Say what was read, if that is due.

        The reading thread counts first and then looks whether it is wanted; with ``on_message`` that is not under the
        lock, but here it is the other way round, so one of both sees it.
        """
        if not (self._due or self._told < min(self._messages_read, self._wanted)):
            return
        if self._connected and not self._ended:
            self._due = False
            self._told = self._messages_read
            self._dealer.send(wire.pack_number(wire.ACK, self._told), zmq.NOBLOCK)

    def _close_sockets(self) -> None:
        with self._lock:
            linger = 0
            if self._connected and not self._ended and not self._failure:
                with contextlib.suppress(zmq.ZMQError):
                    self._dealer.send(wire.pack_number(wire.BYE, 0), zmq.NOBLOCK)
                    linger = _BYE_LINGER_MS
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._dealer.close(linger)

    def close(self) -> None:
        """Say goodbye and end: the writer learns at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._service.stop()
        self._context.term()
        os.close(self._news)
        self._ready.clear()


_READER_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)

__all__ = ["RemoteMessage", "RemoteReader", "RemoteWriter"]
