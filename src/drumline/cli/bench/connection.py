"""A light HTTP/1.1 client over asyncio: one protocol object a connection, httptools to parse, nothing for each event
but the time and the bytes.

::

    socket -> data_received -> httptools (chunks, keep-alive) -> on_body: exchange.pieces.append((time, bytes))

What a piece says is worked out later (answers.py). Connections are kept and used again, the last one first. One that
the server closed while it was idle gives its request a second try on a new connection, if no byte of an answer came.
Rejected: httpx and aiohttp, which cost some ten times as much for each event; asyncio's streams, which wake a task for
each.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httptools

CONNECTION = "connection"
TIMEOUT = "timeout"
MALFORMED = "malformed response"
CLOSED = "connection lost"
CONNECT_S = 30.0
"""Longest time to connect."""


class AddressError(ValueError):
    """Not a URL of a server."""


class Exchange:
    """One request and the answer to it."""

    __slots__ = ("done", "ended", "error", "message", "pieces", "sent", "status")

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done
        self.sent = 0.0
        """perf_counter() when sending began, connecting included."""
        self.ended = 0.0
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        """Body as it came."""
        self.error = ""
        """Kind; empty: the whole answer came."""
        self.message = ""

    def body(self) -> bytes:
        """All of the body."""
        return b"".join(data for _, data in self.pieces)

    def end(self, error: str = "", message: str = "") -> None:
        """The answer is over. Only the first call counts."""
        if not self.done.done():
            self.ended = perf_counter()
            self.error, self.message = error, message
            self.done.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection. httptools calls the ``on_`` methods."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: Any = None
        self._parser: Any = None
        self._append: Any = None
        self._now = 0.0
        self._framed = False
        """The answer's head tells where the body ends."""
        self.exchange: Exchange | None = None
        self.last = 0.0
        """perf_counter() of the last byte, or of the request."""
        self.open = True

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = self.last = perf_counter()
        if self.exchange is None:  # nobody asked
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            self._end(MALFORMED, f"the answer is not HTTP/1.1: {e}", reuse=False)

    def eof_received(self) -> None:
        """Connection is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._client.forget(self)
        exchange = self.exchange
        if exchange is None:
            return
        if exc is None and exchange.status and not self._framed:
            self._end("", "", reuse=False)  # such a body ends with the connection
            return
        what = "while it answered" if exchange.status else "before an answer"
        self._end(CLOSED, f"the server closed the connection {what}" + (f" ({exc})" if exc else ""), reuse=False)

    # httptools

    def on_message_begin(self) -> None:
        if self.exchange is None:  # more than one answer
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self.exchange is not None:
            self.exchange.status = status

    def on_body(self, body: bytes) -> None:
        self._append((self._now, body))

    def on_message_complete(self) -> None:
        if self.exchange is not None and self.exchange.status:  # else 100 Continue and its like
            self._end("", "", reuse=self._parser.should_keep_alive())

    # the client

    def begin(self, exchange: Exchange, request: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._append = exchange.pieces.append
        self._framed = False
        self.exchange = exchange
        self.last = perf_counter()
        self._transport.write(request)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: str, message: str, *, reuse: bool) -> None:
        exchange, self.exchange = self.exchange, None
        self._parser = self._append = None  # a cycle
        if exchange is not None:
            exchange.end(error, message)
        self._client.released(self, reuse=reuse and self.open)


class Client:
    """Sends requests to one server. ``async with``."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        silence_s: float = 600.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``silence_s``: longest time without a byte of an answer. AddressError if ``url`` is none."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise AddressError(f"{url}: not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AddressError(f"{url}: not a URL such as http://127.0.0.1:8000")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = port or (443 if self._tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        own = {"host": parts.netloc.rpartition("@")[2], "accept-encoding": "identity", "user-agent": "drumline-bench"}
        lines = {**own, **{name.lower(): value for name, value in (headers or {}).items()}}
        for name, value in lines.items():
            if not f"{name}{value}".isprintable():
                raise AddressError(f"header {name!r} has characters that a header cannot have")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()
        self._silence_s = silence_s
        self._addresses: list[str] = []
        """Of the host, the one that works first; looked up once, not for each connection."""
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Client:
        self._watch = asyncio.create_task(self._watch_silence())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        for connection in list(self._all):
            connection.abort()
        await asyncio.sleep(0)  # transports close in the next turn

    def render(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A whole request."""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n".encode() + self._head
        if method != "GET":
            head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        return head + b"\r\n" + body

    async def get(self, path: str) -> Exchange:
        """GET."""
        return await self.send(self.render("GET", path))

    async def send(self, request: bytes, exchange: Exchange | None = None) -> Exchange:
        """Send what :meth:`render` made. Never raises for what the server does: see the exchange's ``error``.

        Cancelled: the connection is closed.
        """
        if exchange is None:
            exchange = Exchange(asyncio.get_running_loop().create_future())
        exchange.sent = perf_counter()
        while True:
            connection = self._idle.pop() if self._idle else None
            fresh = connection is None
            if connection is None:
                connection = await self._connect(exchange)
                if connection is None:
                    return exchange
            connection.begin(exchange, request)
            try:
                await exchange.done
            except asyncio.CancelledError:
                connection.abort()
                raise
            if fresh or exchange.error != CLOSED or exchange.status or exchange.pieces:
                return exchange
            exchange.done = asyncio.get_running_loop().create_future()

    async def _connect(self, exchange: Exchange) -> _Connection | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._first_that_connects()
        except TimeoutError:
            exchange.end(TIMEOUT, f"no connection after {CONNECT_S:g} s")
        except (OSError, UnicodeError) as e:  # a name that cannot be one
            exchange.end(CONNECTION, getattr(e, "strerror", None) or str(e))
        else:
            self._all.add(connection)
            return connection
        return None

    async def _first_that_connects(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        failure: OSError = OSError(f"{self._host} has no address")
        for address in list(self._addresses):
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self),
                    address,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
            except OSError as e:
                failure = e
                continue
            if address != self._addresses[0]:
                self._addresses.sort(key=address.__ne__)
            return connection
        raise failure

    def released(self, connection: _Connection, *, reuse: bool) -> None:
        """An answer is over."""
        if reuse:
            self._idle.append(connection)
        else:
            connection.abort()

    def forget(self, connection: _Connection) -> None:
        """A connection is closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _watch_silence(self) -> None:
        """One timer for all, instead of one for each event."""
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4))
            now = perf_counter()
            for connection in list(self._all):
                exchange = connection.exchange
                if exchange is not None and now - connection.last > self._silence_s:
                    exchange.end(TIMEOUT, f"no byte for {self._silence_s:g} s")
                    connection.abort()
