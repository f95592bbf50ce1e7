"""The client against servers with all kinds of framing, kind and unkind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.cli.bench import connection as http
from drumline.cli.bench.answers import read_answer
from drumline.cli.bench.connection import AddressError, Client, Exchange
from tests.cli.bench.raw import Answer, RawServer, Request, chunk, chunked_head, raw_server, tokens, whole

STREAM = tokens(3)


async def one(answer: Answer, silence_s: float = 5.0) -> Exchange:
    """The second of two requests on one client."""
    async with raw_server(answer) as server, Client(server.url, silence_s=silence_s) as client:
        await client.send(client.render("POST", "/v1/completions", b"{}"))
        return await client.send(client.render("POST", "/v1/completions", b"{}"))


def says(*pieces: bytes, close: bool = False, pause_s: float = 0.0) -> Answer:
    async def answer(request: Request) -> None:
        await request.send(*pieces, pause_s=pause_s)
        if close:
            request.writer.close()

    return answer


def every_byte(data: bytes) -> list[bytes]:
    return [data[place : place + 1] for place in range(len(data))]


@pytest.mark.parametrize(
    "answer",
    [
        says(whole(STREAM)),
        says(chunked_head(), chunk(STREAM), b"0\r\n\r\n"),
        says(chunked_head() + chunk(STREAM) + b"0\r\n\r\n"),
        says(chunked_head(), *(chunk(byte) for byte in every_byte(STREAM)), b"0\r\n\r\n"),
        says(chunked_head(), chunk(STREAM[:50], b";name=value"), chunk(STREAM[50:]), b"0\r\nX-Trailer: 1\r\n\r\n"),
        says(b"HTTP/1.1 100 Continue\r\n\r\n", chunked_head(), chunk(STREAM), b"0\r\n\r\n"),
        says(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + whole(STREAM)),
        says(b"HTTP/1.1 200 OK\r\n\r\n" + STREAM, close=True),
        says(b"HTTP/1.0 200 OK\r\n\r\n" + STREAM, close=True),
        says(whole(STREAM, extra="Connection: close\r\n")),
        says(whole(STREAM, extra="Connection: close\r\n"), close=True),
        says(b"HTTP/1.1 200\r\nContent-Length:%d\r\n\r\n" % len(STREAM) + STREAM),
        says(*every_byte(chunked_head() + chunk(STREAM) + b"0\r\n\r\n")),
    ],
    ids=[
        "length",
        "chunk",
        "one-write",
        "byte-chunks",
        "extension-trailer",
        "100",
        "103",
        "eof",
        "eof-1.0",
        "close-header",
        "close-both",
        "no-reason",
        "byte-writes",
    ],
)
async def test_good_answers(answer: Answer) -> None:
    exchange = await one(answer)
    assert (exchange.error, exchange.message) == ("", "")
    assert exchange.status == 200
    assert exchange.body() == STREAM
    assert read_answer(exchange.pieces).output_tokens == 3
    times = [time for time, _ in exchange.pieces]
    assert exchange.sent <= times[0] <= times[-1] <= exchange.ended
    assert times == sorted(times)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunks=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    writes=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    count=st.integers(1, 5),
)
async def test_chunks_and_writes_of_any_size(chunks: list[int], writes: list[int], count: int) -> None:
    body = tokens(count)
    framed = b"".join(chunk(part) for part in cut(body, chunks)) + b"0\r\n\r\n"
    exchange = await one(says(*cut(chunked_head() + framed, writes)))
    assert exchange.body() == body
    assert not exchange.error


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Pieces of these sizes, over and over."""
    found, place, turn = [], 0, 0
    while place < len(data):
        found.append(data[place : place + sizes[turn % len(sizes)]])
        place += len(found[-1])
        turn += 1
    return found


@pytest.mark.parametrize(
    ("answer", "kind", "status"),
    [
        (says(b"SSH-2.0-OpenSSH\r\n"), http.MALFORMED, 0),
        (says(chunked_head(), b"xyz\r\n"), http.MALFORMED, 200),
        (says(chunked_head(), b"3\r\nabcdef\r\n"), http.MALFORMED, 200),
        (says(close=True), http.CLOSED, 0),
        (says(b"HTTP/1.1 200 O", close=True), http.CLOSED, 0),
        (says(chunked_head(), chunk(STREAM), close=True), http.CLOSED, 200),
        (says(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + STREAM, close=True), http.CLOSED, 200),
        (says(whole(b"no", "503 Service Unavailable")), "", 503),
    ],
    ids=["ssh", "bad-size", "long-chunk", "nothing", "half-head", "no-last-chunk", "half-length", "503"],
)
async def test_bad_answers(answer: Answer, kind: str, status: int) -> None:
    exchange = await one(answer)
    assert exchange.error == kind
    assert exchange.status == status


async def test_silence() -> None:
    async def answer(request: Request) -> None:
        await request.send(chunked_head(), chunk(STREAM))
        await asyncio.Event().wait()

    async with raw_server(answer) as server, Client(server.url, silence_s=0.3) as client:
        exchange = await client.send(client.render("POST", "/x"))
    assert exchange.error == http.TIMEOUT
    assert exchange.body() == STREAM


async def test_slow_is_not_silent() -> None:
    answer = says(chunked_head(), *(chunk(part) for part in cut(STREAM, [20])), b"0\r\n\r\n", pause_s=0.05)
    async with raw_server(answer) as server, Client(server.url, silence_s=0.3) as client:
        exchange = await client.send(client.render("POST", "/x"))
    assert exchange.ended - exchange.sent > 0.3
    assert not exchange.error


async def test_refused_connection() -> None:
    async with raw_server(says()) as server:
        url = server.url
    async with Client(url) as client:
        exchange = await client.get("/v1/models")
    assert (exchange.error, exchange.status) == (http.CONNECTION, 0)


async def sends(server: RawServer, client: Client, count: int) -> list[Exchange]:
    return await asyncio.gather(*(client.send(client.render("POST", "/x", b"{}")) for _ in range(count)))


async def test_a_name_is_looked_up_once_and_the_address_that_works_is_kept() -> None:
    async with raw_server(says(whole(STREAM))) as server:
        url = f"http://localhost:{server.port}"
        async with Client(url) as client:
            assert [exchange.error for exchange in await sends(server, client, 4)] == [""] * 4
            assert client._addresses[0] == "127.0.0.1"
    async with Client("http://no.such.host.invalid:1") as client:
        assert (await client.get("/")).error == http.CONNECTION


async def test_connections_are_used_again() -> None:
    async with raw_server(says(whole(STREAM))) as server, Client(server.url) as client:
        for _ in range(5):
            await sends(server, client, 3)
        assert server.connections == 3
        assert len(server.requests) == 15


@pytest.mark.parametrize("extra", ["Connection: close\r\n", ""])
async def test_a_connection_that_the_server_closed_costs_no_request(extra: str) -> None:
    """After an answer the server closes, saying so or not; the next request goes over a new connection."""
    async with raw_server(says(whole(STREAM, extra=extra), close=True)) as server, Client(server.url) as client:
        for _ in range(5):
            exchange = await client.send(client.render("POST", "/x", b"{}"))
            assert (exchange.error, exchange.body()) == ("", STREAM)
        assert server.connections == 5


async def test_a_request_is_not_sent_twice_after_a_byte_of_an_answer() -> None:
    turn = 0

    async def answer(request: Request) -> None:
        nonlocal turn
        turn += 1
        if turn == 1:
            await request.send(whole(STREAM))
        else:
            await request.send(chunked_head())
            request.writer.close()

    async with raw_server(answer) as server, Client(server.url) as client:
        assert not (await client.send(client.render("POST", "/x"))).error
        assert (await client.send(client.render("POST", "/x"))).error == http.CLOSED
        assert len(server.requests) == 2


async def test_more_than_one_answer_is_not_taken_for_the_next() -> None:
    async with raw_server(says(whole(STREAM) + whole(b"surprise"))) as server, Client(server.url) as client:
        for _ in range(3):
            exchange = await client.send(client.render("POST", "/x"))
            assert exchange.body() == STREAM
        assert server.connections == 3


async def test_cancelling_closes_the_connection() -> None:
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    begun = asyncio.Event()

    async def answer(request: Request) -> None:
        await request.send(chunked_head())
        begun.set()
        try:
            while True:
                await request.send(chunk(b":\n\n"), pause_s=0.01)
        except ConnectionError:
            gone.set_result(None)

    async with raw_server(answer) as server, Client(server.url) as client:
        task = asyncio.create_task(client.send(client.render("POST", "/x")))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await gone


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(AddressError):
        Client(url)


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
async def test_names_that_no_host_has(host: str) -> None:
    async with Client(f"http://{host}:80") as client:
        exchange = await client.get("/v1/models")
    assert (exchange.error, exchange.status) == (http.CONNECTION, 0)


def test_headers_cannot_break_out() -> None:
    with pytest.raises(AddressError):
        Client("http://x", {"x": "a\r\nb: c"})


def test_a_request() -> None:
    client = Client("https://example.org/prefix/v1", {"Authorization": "Bearer k", "Host": "other"})
    assert client.render("POST", "/v1/completions", b"{}").decode() == (
        "POST /prefix/v1/completions HTTP/1.1\r\nhost: other\r\naccept-encoding: identity\r\n"
        "user-agent: drumline-bench\r\nauthorization: Bearer k\r\n"
        "content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert client.render("GET", "/v1/models").startswith(b"GET /prefix/v1/models HTTP/1.1\r\n")
