"""uvicorn in an event loop and under signal handlers of ours, without its tick.

``uvicorn.Server`` wakes ten times a second to look at a flag and to format a date: 0.5 % of a core here, for ever, on
an idle server. ``main_loop`` waits for an event instead; the date header is written by our own application (app.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

KEEP_ALIVE_S = 60
"""Longer than what clients with connection pools keep (5 to 30 s), so that they close first and meet no closed one."""
GRACE_S = 1


_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 for those too who would like HTTP/2.

    Java's HTTP client sends ``Upgrade: h2c`` with every first request. A server may ignore that, but httptools stops
    reading behind such a head and the body is lost. So the header loses its name before it is parsed.
    """

    def data_received(self, data: bytes) -> None:
        """Bytes of the connection."""
        if self.cycle is None or self.cycle.response_complete:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        super().data_received(data)


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
