"""A small HTTP client on asyncio that can leave in the middle of an answer: one connection, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

PATH = "/v1/completions"


class Left(Exception):
    """The client closed its connection before the answer was whole, as it was told to."""


class Connection:
    """Opens itself when it is needed, and again after it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def close(self) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def post(self, body: dict[str, Any], leave_after: int | None = None) -> list[dict[str, Any]]:
        """The events of a stream, or the one answer. ``leave_after``: close after as many pieces, and raise Left."""
        reader, writer = await self._open()
        data = json.dumps(body).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        if leave_after == 0:
            await writer.drain()
            await asyncio.sleep(random.random() * 0.05)  # so long its patience lasts
            await self.close()
            raise Left
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "content-length: " in headers:
            answer = await reader.readexactly(int(headers.partition("content-length: ")[2].partition("\r\n")[0]))
            assert headers.startswith("http/1.1 200"), answer
            return [json.loads(answer)]
        return await self._events(reader, leave_after)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self._reader, self._writer

    async def _events(self, reader: asyncio.StreamReader, leave_after: int | None) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        text = b""
        pieces = 0
        while size := int(await reader.readuntil(b"\r\n"), 16):
            text += (await reader.readexactly(size + 2))[:-2]
            pieces += 1
            if leave_after is not None and pieces >= leave_after:
                await self.close()
                raise Left
        await reader.readexactly(2)
        for line in text.split(b"\n\n"):
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
        assert text.endswith(b"data: [DONE]\n\n"), text[-200:]
        return events
