"""The writing end of a remote queue. See :mod:`drumline.transport.remote`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from drumline.errors import ChannelClosedError, ConfigError, MessageTooLargeError, TransportError
from drumline.transport import remote_wire as wire
from drumline.transport.gate import Gate, curve_keys
from drumline.transport.remote_options import RemoteHandle, RemoteOptions, configure
from drumline.transport.ring import Part
from drumline.transport.service import Service

log = logging.getLogger("drumline.transport")


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
        configure(self._router, self.options)
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
