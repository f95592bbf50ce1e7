"""SIGTERM: what is running may finish.

::

    SIGTERM                       lag over                     all answered, or the limit
    |--- drain lag ---------------|--- shutdown timeout -------|--- ladder (server.run) ---> exit code 0
    readyz, health, ping: 503 from here on
    new requests are served       new requests: 503, Retry-After
    running ones go on            running ones go on           what is left gets an error and ends

The lag is for load balancers, which send requests until they have seen that this server is not ready any more. Where
nobody has probed it there is none to wait for (``ServerConfig.drain_lag_s``). Connections are not waited for, only
requests: an idle one is closed at the end, and every answer of a draining server tells its client to close.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from drumline.config import ServerConfig
from drumline.server.service import Service
from drumline.server.uvicorn_server import HttpServer

WATCHED_LAG_S = 5.0
"""Lag if a load balancer watches."""
WATCHED_PROBES = 2
"""Answered with 200: a script that waits for the server to be ready asks until the first one."""
WATCHED_WITHIN_S = 60.0
"""The longest usual time between two probes is half of that."""
FLUSH_LOOK_S = 0.05


def lag_of(server: ServerConfig, service: Service) -> float:
    """Seconds for which new requests are still served."""
    if server.drain_lag_s is not None:
        return server.drain_lag_s
    watched = service.probes >= WATCHED_PROBES and time.monotonic() - service.last_probe <= WATCHED_WITHIN_S
    return WATCHED_LAG_S if watched else 0.0


async def drain(
    server: ServerConfig, service: Service, http: HttpServer, dead: asyncio.Future[Any], say: Callable[[str], None]
) -> None:
    """Return when every request was answered, at the limit, or when ``dead`` is done."""
    lag, limit = lag_of(server, service), server.shutdown_timeout_s
    service.drain()
    say(
        f"SIGTERM: draining: new requests are served for {lag:g} s, then running ones have {limit:g} s "
        "(once more: at once)"
    )
    if lag:
        await asyncio.wait({dead}, timeout=lag)
    service.refuse()
    deadline = time.monotonic() + limit
    # Nobody is added from here on.
    waiting: set[asyncio.Future[Any]] = {asyncio.ensure_future(_all_answered(service, http)), dead}
    await asyncio.wait(waiting, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
    waiting.discard(dead)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    if (left := len(service.admitted)) and not dead.done():
        say(f"{left} request{'s' * (left > 1)} did not end within {limit:g} s and will get an error")


async def _all_answered(service: Service, http: HttpServer) -> None:
    """Return when all answers are made, and out."""
    if service.admitted:
        await asyncio.wait(service.admitted)
    while http.unsent():  # noqa: ASYNC110 - transports tell nobody but their protocol
        await asyncio.sleep(FLUSH_LOOK_S)
