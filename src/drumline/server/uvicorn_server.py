"""uvicorn in an event loop and under signal handlers of ours, without its tick.

``uvicorn.Server`` wakes ten times a second to look at a flag and to format a date: 0.5 % of a core here, for ever, on
an idle server. ``main_loop`` waits for an event instead; the date header is written by our own application (app.py).

uvicorn limits neither the size of a head nor the time that a client takes, and leaves framing to httptools;
``Protocol`` puts framing.py in front of that. What it rests on in uvicorn: ``on_headers_complete``, ``on_body``,
``on_message_complete`` and ``on_response_complete`` of HttpToolsProtocol, the flags of its request cycle, its flow
control, its keep-alive timer, that a request cycle writes to its ``transport``, and that its ``send`` waits for
nothing but flow control.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from drumline.server.errors import ApiError, bad_request, unavailable
from drumline.server.framing import MAX_HEAD_BYTES, Body, HeadCollector
from drumline.server.http import DIRECT

KEEP_ALIVE_S = 60
"""Longer than what clients with connection pools keep (5 to 30 s), so that they close first and meet no closed one."""
GRACE_S = 1
HEAD_S = 30.0
"""From the accept, or from a head's first byte, to its last one."""
BODY_S = 60.0
"""How long a body may make no progress."""
LINGER_S = 1.0
"""How long a refused client, which may still be sending, has to read why before the connection is reset."""
RESERVED_FDS = 128
"""File descriptors that connections must leave to the rest of this process."""


def max_connections() -> int:
    """How many connections this process has file descriptors for."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FDS)


class Protocol(HttpToolsProtocol):
    """One connection: framing, time limits, and answers to what never becomes a request.

    Of uvicorn's class it keeps the ASGI side: heads are fed to a fresh httptools parser, which calls ``on_url`` and
    its like as ever, and bodies are handed to ``on_body`` and ``on_message_complete`` from here. A head is taken only
    when the answer before it is complete, so uvicorn's own pipeline stays empty, and ``self.cycle`` is always the
    request that the client waits for: its departure reaches the right one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._data = bytearray()
        self._heads = HeadCollector()
        self._body: Body | None = None
        """Of the current request; None between requests."""
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._progress = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            self._refuse(unavailable("Too many connections.", retry_after=1), linger=False)
            return
        self._watch(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._unwatch()
        self._data.clear()
        self._refused = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._progress = self.loop.time()
        self._data += data
        self._advance()

    def on_headers_complete(self) -> None:
        """A request begins."""
        super().on_headers_complete()
        # The task that handles it has been made and has not run yet.
        self.scope[DIRECT] = DirectBody(self.cycle)  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        """The answer is out: what was sent meanwhile has its turn."""
        super().on_response_complete()
        if self._data:
            self.loop.call_soon(self._advance)

    def _advance(self) -> None:
        """Use the bytes that are there."""
        try:
            while self._data and not self._refused and not self.transport.is_closing():
                if self._body is not None:
                    self._take_body(self._body)
                    if self._body is not None:
                        return
                elif self.cycle is not None and not self.cycle.response_complete:
                    # A pipelined request. Reading goes on for a while, since that is how a departure is noticed.
                    if len(self._data) > MAX_HEAD_BYTES:
                        self.flow.pause_reading()
                    return
                elif not self._take_head():
                    return
        except ApiError as e:
            self._refuse(e)

    def _take_head(self) -> bool:
        """Start a request if its head is complete."""
        self._unset_keepalive_if_required()
        head = self._heads.take(self._data)
        if head is None:
            if self._timer is None:
                self._watch(HEAD_S)
            return False
        self._unwatch()
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(head.data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise bad_request("This is not a request of HTTP/1.1.", code="invalid_request") from None
        if not head.body.done:
            self._body = head.body
            self._watch(BODY_S)
        return True

    def _take_body(self, body: Body) -> None:
        content = body.take(self._data)
        if content:
            self.on_body(content)
        if not body.done:
            return
        self._body = None
        self._unwatch()
        self.on_message_complete()
        if self.cycle.response_complete and not self._data:
            # It was answered before it was complete, and the timer that was set then is gone.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # ------------------------------------------------------------------------------------------------- time limits

    def _watch(self, seconds: float) -> None:
        self._unwatch()
        self._progress = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """A head or a body takes too long."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self._body is not None:
            idle = self.loop.time() - self._progress
            if self.flow.read_paused:
                # It is the application that does not read.
                idle, self._progress = 0.0, self.loop.time()
            if idle < BODY_S:
                self._timer = self.loop.call_later(BODY_S - idle, self._late)
                return
        elif not self._data:
            self.transport.close()
            return
        self._refuse(ApiError(408, "The rest of the request did not come in time.", code="request_timeout"))

    # ---------------------------------------------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        """What uvicorn would answer, in OpenAI's shape."""
        self._refuse(bad_request(msg, code="invalid_request"))

    def _refuse(self, error: ApiError, *, linger: bool = True) -> None:
        """Answer, unless an answer has begun, and close; nothing that still comes is looked at."""
        self._refused = True
        self._unwatch()
        self._unset_keepalive_if_required()
        self._data.clear()
        cycle = self.cycle
        if cycle is not None and (cycle.response_started if self._body is not None else not cycle.response_complete):
            self.transport.close()
            return
        if cycle is not None:
            # To the application it is as if the client had left.
            cycle.disconnected = True
            cycle.message_event.set()
        body = error.body()
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        headers = {**error.headers, "content-type": "application/json", "content-length": str(len(body))}
        lines += [f"{name}: {value}" for name, value in {**headers, "connection": "close"}.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        if not linger:
            self.transport.close()
            return
        # Closing now would reset the connection if the client is still sending, and it would not see the answer.
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)


class DirectBody:
    """Writes to the body of an answer that has begun (``http.Direct``); the end of the answer goes through ASGI."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write

    @property
    def paused(self) -> bool:
        """See ``http.Direct``."""
        return self._cycle.flow.write_paused

    @property
    def unread(self) -> bool:
        """See ``http.Direct``."""
        return self._cycle.more_body

    def write(self, data: bytes) -> bool:
        """A part of the body, as one chunk. False: the client does not keep up."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return True
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)
        return not cycle.flow.write_paused

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See ``http.Direct``."""
        cycle, parts = self._cycle, _Parts(self._cycle.transport)
        cycle.transport = parts  # type: ignore[assignment]
        try:
            yield
        finally:
            cycle.transport = parts.transport
            if parts.data and not cycle.disconnected:
                self._write(b"".join(parts.data))

    async def drain(self) -> None:
        """Wait until the client has read enough, or is gone."""
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()


class _Parts:
    """Stands for a transport, and keeps what is written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.data: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.data.append(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class HttpServer(uvicorn.Server):
    """Serves an application on sockets that listen already, until :meth:`stop`."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            proxy_headers=False,  # nothing here asks who the client is, or whether it came by TLS
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        # Clients that send garbage would fill the log with warnings.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(config)
        self._stop = asyncio.Event()

    async def run_on(self, sockets: Sequence[socket.socket]) -> None:
        """Serve until :meth:`stop`, then let answers in flight end for at most a second."""
        await self.serve(sockets=list(sockets))

    def unsent(self) -> bool:
        """Is there a client that has not taken all that was written for it?"""
        # uvicorn's set of protocols, whose class is ours
        connections: Any = self.server_state.connections
        return any(one.transport.get_write_buffer_size() for one in connections)

    def stop(self) -> None:
        """End :meth:`run_on`."""
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        """Nothing to do but wait."""
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not uvicorn's here."""
        yield
