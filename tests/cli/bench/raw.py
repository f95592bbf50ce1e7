"""A server of bytes: says exactly what a test wants it to say, in the pieces in which the test wants them sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "root": "/nowhere"}, {"id": "n"}]}).encode()


class Request:
    """One request and the way to answer it."""

    def __init__(self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        self.line = line
        self.headers = headers
        self.body = body
        self.writer = writer

    @property
    def path(self) -> str:
        return self.line.split()[1]

    def json(self) -> dict[str, object]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found

    async def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(pause_s)


Answer = Callable[[Request], Awaitable[None]]


def whole(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def chunked_head(extra: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n{extra}\r\n".encode()


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


def tokens(count: int, given: int = 3, done: bool = True) -> bytes:
    """A stream of a completion."""
    events = [{"choices": [{"index": 0, "text": f"t{i}", "finish_reason": None}]} for i in range(count)]
    ends: list[dict[str, object]] = [{"choices": [], "usage": {"prompt_tokens": given, "completion_tokens": count}}]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in [*events, *ends])
    return data + (b"data: [DONE]\n\n" if done else b"")


class RawServer:
    """Counts connections and requests."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.connections = 0
        self.port = 0
        self.running = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *fields = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = Request(line, headers, body, writer)
                if request.path.endswith("/v1/models"):
                    await request.send(whole(MODELS))
                    continue
                self.requests.append(request)
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    await self.answer(request)
                finally:
                    self.running -= 1
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def raw_server(answer: Answer) -> AsyncIterator[RawServer]:
    made = RawServer(answer)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(made.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
