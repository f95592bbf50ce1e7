"""What the client of `drumline bench serve` costs for each event: CPU microseconds, beside httpx's.

    python bench/client_cost.py [--events 20000] [--streams 8] [--pause-ms 2]

A server process of its own writes streams of prepared events, one event a write, at a steady pace; the CPU time of
this process (user and system, waking up included) over the events is what is printed. Reading the answers afterwards
is shown apart: it runs when the load is over. A machine that is busy changes little in CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time

import httpx
import uvloop

from drumline.cli.bench.connection import Client
from drumline.cli.bench.load import Job, Load

EVENT = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "m",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    "usage": None,
}


def serve(listener: socket.socket, events: int, pause_s: float) -> None:
    """Answer every request with a stream, until killed."""
    data = b"data: " + json.dumps(EVENT).encode() + b"\n\n"
    chunk = b"%x\r\n%s\r\n" % (len(data), data)
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": %d}}\n\n' % events
    last = usage + b"data: [DONE]\n\n"
    end = b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(f.split(b":")[1]) for f in head.lower().split(b"\r\n") if f[:14] == b"content-length")
                await reader.readexactly(length)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for _ in range(events):
                    writer.write(chunk)
                    await asyncio.sleep(pause_s)  # an event a write, streams by turns
                writer.write(end)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async def main() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        await server.serve_forever()

    uvloop.run(main())


async def ours(url: str, streams: int) -> tuple[float, float]:
    """CPU seconds of the load, and of the reading."""
    async with Client(url) as client:
        jobs = [Job(client.render("POST", "/v1/completions", b"{}"), 1) for _ in range(streams)]
        load = Load(client, jobs, [0.0] * streams, None)
        began = time.process_time()
        await load.drive()
        loaded = time.process_time() - began
        began = time.process_time()
        run = load.read()
        assert all(outcome.ok for outcome in run.outcomes), run.outcomes[0]
        return loaded, time.process_time() - began


async def by_httpx(url: str, streams: int) -> float:
    async def one(client: httpx.AsyncClient) -> int:
        times = []
        async with client.stream("POST", f"{url}/v1/completions", json={}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append((time.perf_counter(), json.loads(line[6:])))
        return len(times)

    async with httpx.AsyncClient(timeout=None) as client:
        began = time.process_time()
        await asyncio.gather(*(one(client) for _ in range(streams)))
        return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=20_000, help="in all")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--pause-ms", type=float, default=2.0, help="between the events of a stream; 0: at once")
    args = parser.parse_args()
    each = args.events // args.streams
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    pid = os.fork()
    if pid == 0:
        try:
            serve(listener, each, args.pause_ms / 1e3)
        finally:
            os._exit(1)
    listener.close()
    try:
        total = each * args.streams
        uvloop.run(ours(url, args.streams))
        load, reading = uvloop.run(ours(url, args.streams))
        peer = uvloop.run(by_httpx(url, args.streams))
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    print(f"{args.streams} streams, {total} events; CPU us an event:")
    us = 1e6 / total
    print(f"  drumline bench serve  {load * us:.1f} under load, and {reading * us:.1f} to read the answers afterwards")
    print(f"  httpx and json        {peer * us:.1f} ({peer / load:.1f} times ours under load)")


if __name__ == "__main__":
    main()
