"""The reading end of a remote queue. See :mod:`drumline.transport.remote`."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from drumline.errors import ChannelClosedError, TransportError
from drumline.transport import remote_wire as wire
from drumline.transport.gate import events
from drumline.transport.remote_options import RemoteHandle, configure
from drumline.transport.service import Service, milliseconds

_BYE_LINGER_MS = 200
_TURN_S = 0.5  # how long a writer that closes may have to wait for a reader that computes

T = TypeVar("T")


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
        configure(dealer, self._options)
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
