"""A client that leaves frees its request at once, however it leaves and whatever its request was doing."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from .peer import Served, served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


async def connect(server: Served) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
    return sock


async def request(server: Served, path: str, body: dict[str, Any]) -> socket.socket:
    sock = await connect(server)
    data = json.dumps(body).encode()
    kind = "content-type: application/json"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(sock, head.encode() + data)
    return sock


async def receive(sock: socket.socket) -> bytes:
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(sock, 65536)


def leave(sock: socket.socket, how: str) -> None:
    """Close, reset, or send FIN and stay."""
    if how == "half-close":
        sock.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    "chat stream": (CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    "n = 3": (COMPLETION, {"prompt": "x", "n": 3, "temperature": 1, "max_tokens": 250}),
    "batch stream": (COMPLETION, {"prompt": ["a", "b"], "max_tokens": 250, "stream": True}),
}
OUTPUTS = {"chat": 1, "chat stream": 1, "n = 3": 3, "batch stream": 2}


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_running(server: Served, how: str) -> None:
    server.engine.pause_s = 0.005
    for name, (path, body) in BODIES.items():
        with await request(server, path, body) as sock:
            await server.engine.until(OUTPUTS[name])
            if body.get("stream"):
                assert b"data: " in await receive(sock)
            leave(sock, how)
            await server.engine.until(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_waiting(server: Served, stream: bool) -> None:
    server.engine.gate.clear()
    sock = await request(server, COMPLETION, {"prompt": ["a", "b"], "stream": stream})
    await server.engine.until(2)
    leave(sock, "close")
    await server.engine.until(0)


async def test_before_the_body_is_whole(server: Served) -> None:
    sock = await connect(server)
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\ncontent-type: a/b+json\r\ncontent-length: 100\r\n\r\n"
    sock.send(head.encode() + b"{")
    await asyncio.sleep(0.05)
    (task,) = server.http.server_state.tasks
    leave(sock, "reset")
    await asyncio.wait_for(task, 5)
    assert not server.engine.seen


async def test_many_at_random_times(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.pause_s = 0.001

    async def one(place: int) -> None:
        path, body = list(BODIES.values())[place % len(BODIES)]
        with await request(server, path, body) as sock:
            await asyncio.sleep(place % 7 * 0.003)
            leave(sock, ("close", "reset", "half-close")[place % 3])
            await server.engine.until(0)

    await asyncio.gather(*map(one, range(60)))
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_a_client_that_does_not_read_does_not_delay_others_or_the_end(server: Served) -> None:
    with await request(
        server, COMPLETION, {"prompt": ["a"] * 400, "max_tokens": 250, "stream": True, "logprobs": 20}
    ) as sock:
        await server.engine.until(400)
        with await request(server, COMPLETION, {"prompt": "b", "max_tokens": 1}) as other:
            assert (await receive(other)).startswith(b"HTTP/1.1 200 OK")
        server.service.stop()
        await server.engine.until(0)
        assert sock.fileno() >= 0


async def test_a_slow_client_gets_several_tokens_in_one_event(folder: Path) -> None:
    body = {"prompt": [5, 6], "max_tokens": 250, "stream": True, "logprobs": 20, "return_token_ids": True, "n": 2}
    loop = asyncio.get_running_loop()
    async with served(folder, send_buffer=4096) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", server.port))
            data = json.dumps({**body, "temperature": 1}).encode()
            head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(sock, head.encode() + data)
            await server.engine.until(2)
            # The engine does not wait for anybody.
            await server.engine.until(0)
            answer = b""
            while part := await receive(sock):
                answer += part
    content = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", b"\r\n" + answer.partition(b"\r\n\r\n")[2])
    events = [json.loads(event[6:]) for event in content.split(b"\n\n") if event.startswith(b"data: {")]
    for index in range(2):
        mine = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == [5, 6] * 125
        assert sum(len(choice["logprobs"]["tokens"]) for choice in mine) == 250
        assert mine[-1]["finish_reason"] == "length"
        assert len(mine) < 200
    assert b"data: [DONE]" in content
