"""Reading bodies, answering in full and answering as a stream, with an eye on the client all the time.

A web framework does not cancel a handler whose client has left, so every answer here races three things: the work,
the client's departure, and the end of the server. Whichever comes first ends the other two; ending the work closes
the engine's iterators, which frees the request's KV blocks at once. A half-closed connection counts as a departure.

Starlette's StreamingResponse is not used: it sends the headers before the first event exists, so that a request that
fails before its first token could no longer get a proper status, and it knows nothing of the server's end.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drumline.errors import shown
from drumline.server.errors import ApiError, as_api_error, bad_request, decode_error, internal
from drumline.server.service import Service

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
"""A prompt of a million tokens given as ids is about 8 MB."""
MAX_CONTAINERS = 1 << 17
"""Lists and objects of one body: ten million, which is what fits into it, take seconds in which nobody is served."""
SLICE_BYTES = 1 << 18
"""Of a body, looked at together."""
LAST_WORD_S = 0.5
"""How long a client that does not read may delay the end of its stream."""
EVENT_STREAM = "text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """The client left; nobody reads an answer."""


async def read_json(request: Request, type: type[T]) -> tuple[T, int]:
    """The body as a ``type``, and its size in bytes; ApiError 4xx if it is none."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page of anybody's may send any other type here, or none, without asking; JSON it may not.
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(
            415,
            "Content-Type must be application/json"
            + (f", not {content_type!r}." if content_type else "; it is missing."),
            code="unsupported_media_type",
        )
    body = await _read_body(request)
    if await _has_too_many_lists(body):
        raise bad_request(f"The body has more than {MAX_CONTAINERS} lists and objects in it.")
    try:
        return msgspec.json.decode(body, type=type), len(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise decode_error(e, body) from None


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


async def _has_too_many_lists(body: bytes) -> bool:
    """There are more than MAX_CONTAINERS lists and objects outside of texts. Others have their turn between slices."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return False
    found, at, inside = 0, 0, b""
    while at < len(body):
        end = at + SLICE_BYTES
        while body[end - 1 : end] == b"\\":  # what it escapes belongs to it
            end += 1
        outside, inside, _ = _TEXT.sub(b"", inside + body[at:end]).partition(b'"')  # a text that goes on
        found += outside.count(b"[") + outside.count(b"{")
        if found > MAX_CONTAINERS:
            return True
        at = end
        await asyncio.sleep(0)
    return False


async def _read_body(request: Request) -> bytes:
    """The whole body, if it is not over the limit."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    parts, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large() -> ApiError:
    # The connection stays open and uvicorn drops what still comes: closing it now would reset it, and the client, busy
    # sending, would never see this answer.
    return ApiError(413, f"The body is larger than {MAX_BODY_BYTES >> 20} MiB.", code="body_too_large")


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer; ``value`` is anything that msgspec encodes."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def gone(receive: Receive) -> None:
    """Return when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(service: Service, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``; cancelled with ClientGoneError if the client leaves, with ApiError if the server ends."""
    task = asyncio.ensure_future(work)
    leave = asyncio.ensure_future(gone(receive))
    watched: set[asyncio.Future[Any]] = {task, leave, service.ended()}
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if service.ended().done():
            raise service.ended().result()
        raise ClientGoneError
    finally:
        await _cancelled(task, leave)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel, and wait until what they held is released."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Source(Protocol):
    """What a stream sends."""

    def start(self, write: Callable[[bytes], None], busy: Callable[[], bool]) -> None:
        """Begin to call ``write`` with events, except while ``busy()``. What goes wrong is raised by :meth:`wait`."""

    def resume(self) -> None:
        """It is not busy any more."""

    async def wait(self) -> None:
        """Return when there are no more events; raises what went wrong."""

    def close(self) -> None:
        """End what still runs. Idempotent."""


class Direct(Protocol):
    """Where the server writes what follows an answer's beginning; see ``uvicorn_server``."""

    @property
    def paused(self) -> bool:
        """The client does not keep up. While this is false ASGI's ``send`` does not wait for anything."""

    @property
    def unread(self) -> bool:
        """The client still sends the body of its request."""

    def write(self, data: bytes) -> bool:
        """Send a part of the body. False: the client does not keep up; :meth:`drain` before the next."""

    async def drain(self) -> None:
        """Wait until the client has read enough."""

    def together(self) -> AbstractContextManager[None]:
        """What ASGI's ``send`` writes inside goes out at once, at the end."""


DIRECT = "drumline.direct"
"""Key of the ASGI scope with the request's :class:`Direct`."""


class EventStream(Response):
    """Server-sent events. The headers go out with the first event; an error before it has a status of its own.

    The first event goes the way of ASGI, and those that follow are written to the connection, all from the call that
    brought them, if the server has a :class:`Direct`: no task switch, no chain of ``send`` coroutines. A client that
    does not keep up makes the stream busy; its events wait, unmade, with the engine's client, and are one event later.
    """

    def __init__(self, service: Service, source: Source) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.status_code = 200
        self._service = service
        self._source = source
        self._started = False
        self._direct: Direct | None = None
        self._begin: Callable[[bytes], bool] = lambda data: False
        self._parts: list[bytes] = []
        """What the pump has to send."""
        self._busy = False
        self._wake = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the events end, the client leaves or the server ends."""
        direct: Direct | None = scope.get(DIRECT)
        if direct is not None:
            self._begin = partial(self._first, send, direct)
        try:
            # Before any task is made, so that the engine begins.
            self._source.start(self._write, lambda: self._busy)
            await until_gone(self._service, receive, self._stream(send, direct))
        except ClientGoneError:
            return
        except Exception as e:
            error = as_api_error(e)
            if error is None:
                log.exception("a stream failed")
                error = internal()
            await self._last_word(error, scope, receive, send)
        finally:
            self._source.close()

    async def _stream(self, send: Send, direct: Direct | None) -> None:
        ended = asyncio.ensure_future(self._source.wait())
        ended.add_done_callback(lambda _: self._wake.set())
        try:
            while not ended.done() or self._parts:
                await self._wake.wait()
                self._wake.clear()
                await self._pump(send, direct)
            await ended
        finally:
            await _cancelled(ended)
        await self._start(send)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _write(self, data: bytes) -> None:
        if self._direct is not None and not self._busy:
            if not self._direct.write(data):
                self._busy = True
                self._wake.set()
            return
        if not self._started and not self._parts and self._begin(data):
            return
        self._parts.append(data)
        self._wake.set()

    def _first(self, send: Send, direct: Direct, data: bytes) -> bool:
        """Send the first event from here, if that can be done without waiting."""
        if direct.paused:
            return False
        with direct.together():
            _run_now(self._start(send))
            _run_now(send({"type": "http.response.body", "body": data, "more_body": True}))
        self._direct = direct
        return True

    async def _pump(self, send: Send, direct: Direct | None) -> None:
        """Send what waits; after that, events need not come by here."""
        while self._parts or self._busy:
            self._busy = True
            if self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                with nullcontext() if self._started or direct is None else direct.together():
                    await self._start(send)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            if direct is not None:
                await direct.drain()
            self._busy = False
            self._direct = direct
            self._source.resume()

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            headers = [
                (name, value) for name, value in self.raw_headers if name not in (b"content-type", b"content-length")
            ]
            headers.append((b"content-type", EVENT_STREAM.encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _last_word(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """An error answer, or an error event and the end of the stream. No [DONE]: it did not end well."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if not self._started:
                    await error.response()(scope, receive, send)
                    return
                event = b"data: " + error.body() + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log.debug("a client did not read the end of its stream")


def _run_now(work: Awaitable[None]) -> None:
    """Run what does not wait for anything. RuntimeError if it does."""
    for _ in work.__await__():
        raise RuntimeError("ASGI's send waits although the connection takes more")


def whole_number(value: float | int | None, param: str, least: int, most: int) -> int | None:
    """An integer of a request (JSON writers of some languages send 16.0), within bounds."""
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise bad_request(f"{param} must be a whole number, not {shown(value)}.", param)
        value = int(value)
    if not least <= value <= most:
        raise bad_request(f"{param} must be between {least} and {most}, not {shown(value)}.", param)
    return value
