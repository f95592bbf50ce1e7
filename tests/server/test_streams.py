"""How events reach the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drumline.server.http import DIRECT, EventStream
from drumline.server.service import Service


class Connection:
    """A server's side of one request: what was sent, in which order, and whether the client keeps up."""

    def __init__(self, *, paused: bool, waits: bool = False) -> None:
        self.paused = paused
        self.waits = waits
        self.sent: list[bytes] = []
        self.room = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        if self.paused or self.waits:
            await self.room.wait()
        self.sent.append(b"head" if message["type"] == "http.response.start" else message["body"])

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError

    def write(self, data: bytes) -> bool:
        self.sent.append(data)
        return True

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        yield

    async def drain(self) -> None:
        if self.paused:
            await self.room.wait()


class Tokens:
    """Three events, two of them at once."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.write: Callable[[bytes], None] = lambda data: None
        self.error: Exception | None = None

    def start(self, write: Callable[[bytes], None], busy: Callable[[], bool]) -> None:
        self.write = write

    def put(self, data: bytes) -> None:
        try:
            self.write(data)
        except Exception as error:  # noqa: BLE001  as Generation does
            self.error = error
            self.over.set()

    def resume(self) -> None: ...

    async def wait(self) -> None:
        await self.over.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None: ...


def answer(connection: Connection, tokens: Tokens, *, direct: bool = True) -> asyncio.Task[None]:
    scope = {"type": "http", **({DIRECT: connection} if direct else {})}
    stream = EventStream(Service(["m"]), tokens)
    return asyncio.create_task(stream(scope, connection.receive, connection.send))  # type: ignore[arg-type]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("paused", [True, False])
async def test_events_in_order(paused: bool, direct: bool) -> None:
    """Whatever way they go; the first goes at once if the connection takes it."""
    connection, tokens = Connection(paused=paused), Tokens()
    task = answer(connection, tokens, direct=direct)
    await asyncio.sleep(0)
    tokens.put(b"one")
    assert connection.sent == ([b"head", b"one"] if direct and not paused else [])
    tokens.put(b"two")
    connection.paused = False
    connection.room.set()
    async with asyncio.timeout(5):
        tokens.put(b"three")
        tokens.over.set()
        await task
    assert b"".join(connection.sent) == b"headonetwothreedata: [DONE]\n\n"


async def test_a_send_that_waits_although_it_said_it_would_not() -> None:
    """The stream ends with an error, and loses no client in silence."""
    connection, tokens = Connection(paused=False, waits=True), Tokens()
    task = answer(connection, tokens)
    await asyncio.sleep(0)
    tokens.put(b"one")
    connection.room.set()
    async with asyncio.timeout(5):
        await task
    assert b"internal" in b"".join(connection.sent).lower()
    assert b"[DONE]" not in b"".join(connection.sent)
