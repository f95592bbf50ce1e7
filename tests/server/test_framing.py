"""Where messages end, whatever the pieces they come in; what is ambiguous, too large or too slow is refused."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from drumline.server import framing, uvicorn_server
from drumline.server.errors import ApiError
from drumline.server.framing import Chunked, HeadCollector, parse_head

from .peer import Served

COMPLETION = "/v1/completions"


def post(prompt: str = "x", *headers: str, body: bytes | None = None, length: bool = True) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode() if body is None else body
    lines = [f"POST {COMPLETION} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes, piece: int = 0) -> None:
        for at in range(0, len(data), piece or len(data)):
            self.writer.write(data[at : at + (piece or len(data))])
            await self.writer.drain()
            # The server reads in the same event loop: three turns and it has this piece alone.
            for _ in range(3 if piece else 1):
                await asyncio.sleep(0)

    async def answer(self) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(5):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            return int(head.split()[1]), json.loads(await self.reader.readexactly(length))

    async def all(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(5):
            return await self.reader.read()


@asynccontextmanager
async def client(server: Served) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        await asyncio.wait({asyncio.ensure_future(writer.wait_closed())})


async def refused(server: Served, data: bytes, status: int, code: str) -> None:
    """One answer, of this kind, and the connection is closed."""
    async with client(server) as peer:
        await peer.send(data)
        got = await peer.all()
    assert len(re.findall(rb"HTTP/1\.1 \d", got)) == 1, (data[:200], got)
    assert got.startswith(b"HTTP/1.1 %d " % status), (data[:200], got)
    assert b"connection: close" in got
    error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")


@pytest.mark.parametrize("headers", [(), H2C, ("UPGRADE:websocket", "connection: uPgRaDe,keep-alive")])
async def test_any_pieces(server: Served, headers: tuple[str, ...]) -> None:
    data = post("fox", *headers)
    async with client(server) as peer:
        for piece in (1, 2, 3, 7, len(data) - 3, 0):
            await peer.send(data, piece)
            status, body = await peer.answer()
            assert status == 200
            assert body["usage"]["completion_tokens"] == 2
        for at in range(1, len(data), 5):
            await peer.send(data[:at])
            await asyncio.sleep(0.001)
            await peer.send(data[at:])
            assert (await peer.answer())[0] == 200


async def test_pipelined(server: Served) -> None:
    prompts = ["a", "bb", "ccc", "dddd"]
    for piece in (0, 1, 50):
        async with client(server) as peer:
            await peer.send(b"".join(GET + post(prompt) for prompt in prompts) + b"\r\n" + GET, piece)
            lengths = []
            for _ in prompts:
                assert (await peer.answer())[1] == {"status": "alive"}
                lengths.append((await peer.answer())[1]["usage"]["prompt_tokens"])
            assert lengths == sorted(lengths)
            assert len(set(lengths)) == len(prompts)
            assert (await peer.answer())[0] == 200


async def test_a_pipelined_request_waits_and_departure_ends_the_running_one(server: Served) -> None:
    server.engine.gate.clear()
    async with client(server) as peer:
        await peer.send(post("first") + post("second") + post("x", body=b" " * 200_000))
        await server.engine.until(running=1)
        assert len(server.engine.seen) == 1
        peer.writer.transport.abort()
        await server.engine.until(running=0)
    assert len(server.engine.seen) == 1


async def test_a_body_is_never_taken_for_a_head(server: Served) -> None:
    """Its route has answered before it came; it looks like a request, and like something to edit."""
    evil = post("evil")
    for body in (evil, b"\r\nupgrade:" * 60 + b"\r\n\r\n" + evil, b"a" + b"\r\nupgrade:x\r\n\r\n" * 9 + GET):
        for path in ("/livez", "/nowhere"):
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            async with client(server) as peer:
                await peer.send(head)
                first = await peer.answer()
                assert first[0] in (200, 404)
                await peer.send(body, 40)
                await peer.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                rest = await peer.all()
            assert rest.count(b"HTTP/1.1 ") == 1
            assert b'"version"' in rest
    assert not server.engine.seen


async def test_ambiguous_requests_get_one_answer(server: Served) -> None:
    def raw(*lines: str, end: str = "\r\n") -> bytes:
        return end.join([f"POST {COMPLETION} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()

    smuggled = b"0\r\n\r\n" + GET
    for head in (
        raw("Content-Length: 4", "Transfer-Encoding: chunked"),
        raw("Transfer-Encoding: chunked", "Content-Length: 4"),
        raw("Content-Length: 4", "Content-Length: 4"),
        raw("Content-Length: 4, 4"),
        raw("Content-Length: +4"),
        raw("Content-Length: -4"),
        raw("Content-Length: 0x4"),
        raw("Content-Length: "),
        raw("Content-Length: " + "9" * 30),
        raw("Content-Length : 4"),
        raw("Transfer-Encoding: xchunked"),
        raw("Transfer-Encoding: gzip, chunked"),
        raw("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        raw("Transfer-Encoding:\x0bchunked"),
        raw("X: a", " Transfer-Encoding: chunked"),
        raw("X: a\rTransfer-Encoding: chunked"),
        raw("X: a\nContent-Length: 5"),
        raw("X: a\0b"),
        raw("Host: evil"),
        raw("no colon"),
        raw("Content-Length: 0", end="\n"),
        b"GET /livez HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /livez HTTP/2.0\r\n\r\n",
        b"GET  /livez HTTP/1.1\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    ):
        await refused(server, head + smuggled, 400, "invalid_request")
    assert not server.engine.seen


async def test_too_large(server: Served) -> None:
    await refused(server, b"GET /livez HTTP/1.1\r\nX: " + b"a" * (1 << 20), 431, "headers_too_large")
    await refused(server, b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 201 + b"\r\n", 431, "headers_too_large")
    await refused(server, b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 100_000, 431, "headers_too_large")
    await refused(server, b"GET /" + b"a" * (1 << 20), 414, "uri_too_long")
    await refused(server, b"GET /" + b"a" * (17 << 10) + b" HTTP/1.1\r\n\r\n", 414, "uri_too_long")
    async with client(server) as peer:
        await peer.send(b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 199 + b"X: " + b"a" * 60_000 + b"\r\n\r\n")
        assert (await peer.answer())[0] == 200


def test_cost_is_linear() -> None:
    """Byte by byte, the largest head and 20000 chunks take a moment."""
    began = time.process_time()
    data, collector = bytearray(), HeadCollector()
    for byte in b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000:
        data.append(byte)
        assert collector.take(data) is None
    data += b"\r\n\r\nrest"
    assert collector.take(data) is not None
    assert data == b"rest"
    chunked, data = Chunked(), bytearray()
    for byte in b"1\r\na\r\n" * 20_000:
        data.append(byte)
        chunked.take(data)
    assert time.process_time() - began < 5


def split(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]


def test_chunks_in_any_pieces() -> None:
    whole = b"5\r\nhello\r\nA;x=y\r\n0123456789\r\n00001 \r\n!\r\n0\r\n\r\n"
    for pieces in split(whole + b"GET"):
        body, data, got = Chunked(), bytearray(), b""
        for piece in pieces:
            data += piece
            if not body.done:
                got += body.take(data)
        assert body.done
        assert got == b"hello0123456789!"
        assert data == b"GET"


@pytest.mark.parametrize(
    "wrong",
    [
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\rX",
        b"-1\r\n",
        b"0x5\r\nhello",
        b"\r\n",
        b"5\nhello\r\n",
        b"5;\nx\r\nhello\r\n",
        b"fffffffff\r\n",
        b"0\r\nTrailer: x\r\n\r\n",
        b"5;" + b"a" * 300,
    ],
)
def test_wrong_chunks(wrong: bytes) -> None:
    for pieces in ([wrong], [wrong[at : at + 1] for at in range(len(wrong))]):
        body, data = Chunked(), bytearray()

        def take(pieces: list[bytes] = pieces, body: Chunked = body, data: bytearray = data) -> None:
            for piece in pieces:
                data.extend(piece)
                body.take(data)

        with pytest.raises(ApiError) as e:
            take()
        assert e.value.status == 400


def test_too_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_CHUNKS", 10)
    with pytest.raises(ApiError, match="more than 10 chunks"):
        Chunked().take(bytearray(b"1\r\na\r\n" * 11))


async def test_chunked_bodies(server: Served) -> None:
    content = json.dumps({"prompt": "fox", "max_tokens": 2}).encode()
    head = post("", "Transfer-Encoding: chunked", body=b"", length=False)
    body = b"".join(b"%x\r\n%b\r\n" % (len(content[at : at + 4]), content[at : at + 4]) for at in range(0, 40, 4))
    body = re.sub(rb"0\r\n\r\n", b"", body) + b"0\r\n\r\n"
    async with client(server) as peer:
        for piece in (0, 1, 9):
            await peer.send(head + body + GET, piece)
            assert (await peer.answer())[0] == 200
            assert (await peer.answer())[1] == {"status": "alive"}
    await refused(server, head + b"4\r\nabcdX\r\n" + GET, 400, "invalid_request")


def test_only_the_wish_for_another_protocol_is_edited() -> None:
    def lines(*given: str) -> list[bytes]:
        return parse_head("\r\n".join(["GET / HTTP/1.1", *given]).encode()).data.split(b"\r\n")[1:-2]

    assert lines("UpGrade: h2c", "Connection:upgrade") == [b"connection: "]
    assert lines("Connection: close, Upgrade", "X-Upgrade: 1") == [b"connection: close", b"X-Upgrade: 1"]
    assert lines("X: upgrade: y", "Y:") == [b"X: upgrade: y", b"Y:"]


# --------------------------------------------------------------------------------------------------------- time limits


async def test_slow_heads(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "HEAD_S", 0.1)
    async with client(server) as silent, client(server) as slow, client(server) as second:
        await slow.send(GET[:20])
        await second.send(GET)
        assert (await second.answer())[0] == 200
        await second.send(GET[:-1])
        assert await silent.all() == b""
        assert (await slow.all()).startswith(b"HTTP/1.1 408 ")
        assert (await second.all()).startswith(b"HTTP/1.1 408 ")


async def test_slow_bodies(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "BODY_S", 0.2)
    data = post("fox")
    async with client(server) as stuck, client(server) as answered, client(server) as steady:
        await stuck.send(data[:-3])
        await answered.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        for at in range(0, len(data), 40):
            await steady.send(data[at : at + 40])
            await asyncio.sleep(0.08)
        assert (await steady.answer())[0] == 200
        assert (await stuck.all()).startswith(b"HTTP/1.1 408 ")
        assert (await answered.all()).count(b"HTTP/1.1 ") == 1
    assert not server.http.server_state.connections
    if server.http.server_state.tasks:
        await asyncio.wait(server.http.server_state.tasks, timeout=5)
    assert not server.http.server_state.tasks


async def test_idle_after_a_late_body(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.http.config, "timeout_keep_alive", 0.1)
    async with client(server) as peer:
        await peer.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n")
        await peer.answer()
        await peer.send(b"abc")
        assert await peer.all() == b""


async def test_too_many_connections(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "max_connections", lambda: 1)
    async with client(server) as first:
        await first.send(GET)
        assert (await first.answer())[0] == 200
        async with client(server) as second:
            assert (await second.all()).startswith(b"HTTP/1.1 503 ")
        await first.send(GET)
        assert (await first.answer())[0] == 200


# ----------------------------------------------------------------------------------------------------- other web pages


async def test_other_web_pages(web: httpx.AsyncClient, server: Served) -> None:
    own = f"127.0.0.1:{server.port}"
    body = {"prompt": "x", "max_tokens": 1}
    for host, origin, status in (
        (own, None, 200),
        ("localhost", None, 200),
        ("LOCALHOST:1", None, 200),
        ("127.8.8.8:80", None, 200),
        ("[::1]:8000", None, 200),
        (own, f"http://{own}", 200),
        ("localhost", "https://localhost", 200),
        ("evil.example", None, 403),
        ("evil.example", "http://evil.example", 403),
        ("localhost.evil.example", None, 403),
        ("127.0.0.1.evil.example:80", None, 403),
        ("evil@localhost", None, 403),
        ("10.0.0.1", None, 403),
        ("", None, 403),
        (own, "http://evil.example", 403),
        (own, f"http://{own}.evil.example", 403),
        (own, "http://127.0.0.1:1", 403),
        (own, "null", 403),
    ):
        headers = {"host": host, **({"origin": origin} if origin is not None else {})}
        answer = await web.post(COMPLETION, json=body, headers=headers)
        assert answer.status_code == status, (host, origin)
        if status == 403:
            assert answer.json()["error"]["code"] in ("host_not_allowed", "origin_not_allowed")
        if origin is None:
            assert (await web.get("/version", headers=headers)).status_code == status
    # Others cannot read the answer to this; it changes nothing.
    assert (await web.get("/version", headers={"origin": "http://evil.example"})).status_code == 200
    no_type = await web.post(COMPLETION, content=b'{"prompt": "x"}')
    assert no_type.status_code == 415
    server.service.local = None
    assert (await web.post(COMPLETION, json=body, headers={"host": "public.example"})).status_code == 200


async def test_more_messages_than_tokens_are_refused_at_once(web: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}] * 100_000}
    began = time.process_time()
    answer = await web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert time.process_time() - began < 2
