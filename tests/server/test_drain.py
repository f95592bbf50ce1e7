"""SIGTERM: what is running may finish. Answers are tried with an engine of a few lines, the rest with all processes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from drumline.config import ServerConfig
from drumline.errors import ExitCode
from drumline.server.drain import WATCHED_LAG_S, drain, lag_of
from drumline.server.service import Service

from .command import COMPLETION, LONG, Serve, tiny_folder, wait_for
from .peer import Served, served

HELLO = {"prompt": [5, 6, 7], "max_tokens": 4}
HEALTH = ("/readyz", "/health", "/ping")


# --------------------------------------------------------------------------------------------------- states and answers


def ended(data: bytes) -> tuple[int, bool, str]:
    """Of a stream: tokens (by its usage, or events), whether [DONE] came, the message of its error."""
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    objects = [json.loads(event) for event in events if event != b"[DONE]"]
    error = next((event["error"]["message"] for event in objects if "error" in event), "")
    usage = next((event["usage"]["completion_tokens"] for event in objects if event.get("usage")), None)
    return usage or sum("choices" in event for event in objects), events[-1:] == [b"[DONE]"], error


async def begin(server: Served, web: httpx.AsyncClient, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    """A request that the engine has and does not answer yet."""
    running = len(server.engine.running)
    task = asyncio.create_task(web.post(COMPLETION, json=body))
    await server.engine.until(running + 1)
    return task


async def test_a_draining_server_says_so_serves_then_refuses(server: Served, web: httpx.AsyncClient) -> None:
    server.engine.gate.clear()
    stream = await begin(server, web, {**HELLO, "stream": True})
    service = server.service
    service.drain()
    for path in HEALTH:
        answer = await web.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.headers["connection"] == "close"
    assert (await web.get("/livez")).status_code == 200
    state = await web.get("/startupz")
    assert (state.status_code, state.json()["status"]) == (503, "draining")
    metrics = (await web.get("/metrics")).text.splitlines()
    assert next(line for line in metrics if line.startswith("drumline:ready{")).endswith(" 0.0")

    whole = await begin(server, web, HELLO)  # the lag: it is served
    service.refuse()
    for path, body in ((COMPLETION, HELLO), ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        refused = await web.post(path, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5"), path
        assert refused.json()["error"]["code"] == "service_unavailable"
    server.engine.gate.set()
    assert (await whole).status_code == 200
    assert ended((await stream).content) == (4, True, "")
    assert not service.admitted


async def test_a_request_whose_body_comes_too_late_is_refused_and_waited_for_by_nobody(server: Served) -> None:
    body = json.dumps(HELLO).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
    await until(lambda: bool(server.http.server_state.tasks))
    server.service.drain()
    server.service.refuse()
    await finish(server, 10.0, at_most=3.0)
    writer.write(body[5:])
    assert (await reader.readline()).split()[1] == b"503"
    writer.close()


async def test_a_client_that_still_sends_sees_its_refusal(server: Served) -> None:
    """Its connection is not closed before it has sent all: that would be a reset."""
    server.service.drain()
    server.service.refuse()
    size = 4 << 20
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {size}\r\n\r\n".encode())
    answer = await reader.readuntil(b"}}")
    assert b" 503 " in answer.partition(b"\r\n")[0]
    assert b"connection: close" not in answer.lower()
    writer.write(b" " * size + b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()  # to the end: now it is closed
    assert b" 503 " in answer.partition(b"\r\n")[0]
    assert b"connection: close" in answer.lower()
    writer.close()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def finish(server: Served, limit: float, *, at_least: float = 0.0, at_most: float) -> list[str]:
    """A drain without a lag; what it said."""
    said: list[str] = []
    dead = asyncio.create_task(server.engine.wait_dead())
    began = time.monotonic()
    config = ServerConfig(drain_lag_s=0, shutdown_timeout_s=limit)
    await drain(config, server.service, server.http, dead, said.append)
    assert at_least <= time.monotonic() - began <= at_most
    dead.cancel()
    return said


async def test_connections_do_not_hold_a_drain(server: Served, web: httpx.AsyncClient) -> None:
    assert (await web.get("/livez")).status_code == 200  # kept alive
    _, silent = await asyncio.open_connection("127.0.0.1", server.port)
    assert len(await finish(server, 10.0, at_most=3.0)) == 1
    silent.close()


@pytest.mark.parametrize("what", ["last answer", "limit", "death"])
async def test_a_drain_ends_with_the_last_answer_the_limit_or_the_engine(
    server: Served, web: httpx.AsyncClient, what: str
) -> None:
    server.engine.gate.clear()
    running = [await begin(server, web, HELLO), await begin(server, web, {**HELLO, "stream": True})]
    loop = asyncio.get_running_loop()
    if what == "last answer":
        loop.call_later(0.3, server.engine.gate.set)
    elif what == "death":
        loop.call_later(0.3, server.engine.die)
    said = await finish(server, 0.3 if what == "limit" else 10.0, at_least=0.3, at_most=4.0)
    assert len(said) == (2 if what == "limit" else 1)
    if what == "limit":
        assert "2 requests did not end within 0.3 s" in said[1]
        server.service.stop()
    answers = await asyncio.gather(*running)
    assert [answer.status_code for answer in answers] == [200 if what == "last answer" else 503] * 2


async def test_an_answer_that_its_client_has_not_read_is_waited_for(folder: Path) -> None:
    async with served(folder, send_buffer=4096) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            body = json.dumps({"prompt": [[5]] * 64, "max_tokens": 200}).encode()
            head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(server.http.unsent)
            client.settimeout(5)
            threading.Timer(0.5, read_all, [client]).start()
            await finish(server, 10.0, at_least=0.4, at_most=8.0)


def read_all(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while client.recv(1 << 16):
            pass


async def test_the_lag_without_a_flag_is_for_balancers(server: Served, web: httpx.AsyncClient) -> None:
    service, default = server.service, ServerConfig()
    assert lag_of(default, service) == 0
    await web.get("/readyz")  # a script that waits for it stops here
    assert lag_of(default, service) == 0
    await web.get("/health")
    assert lag_of(default, service) == WATCHED_LAG_S
    assert lag_of(ServerConfig(drain_lag_s=0), service) == 0
    service.last_probe -= 61
    assert lag_of(default, service) == 0
    unready = Service(["x"])
    assert lag_of(ServerConfig(drain_lag_s=2.5), unready) == 2.5


# ---------------------------------------------------------------------------------------------------- the whole command


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    runs: list[Serve] = []

    def start(*flags: str) -> Serve:
        runs.append(Serve(tiny, tmp_path / f"log{len(runs)}", *flags))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


class Client(threading.Thread):
    """One request, and what came."""

    def __init__(self, server: Serve, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._server, self._body = server, body
        self.data = b""
        self.status = 0
        self.parts = 0
        self.closed = 0.0
        self.start()

    def run(self) -> None:
        # What a broken connection gave is what the test gets to see.
        with (
            contextlib.suppress(http.client.HTTPException, OSError),
            self._server.open("POST", COMPLETION, self._body) as answer,
        ):
            self.status = answer.status
            while part := answer.read1(1 << 16):
                self.data += part
                self.parts += 1
        self.closed = time.monotonic()

    def begun(self) -> bool:
        return self.parts > 2

    def result(self, timeout_s: float = 30) -> tuple[int, bool, str]:
        self.join(timeout_s)
        assert not self.is_alive()
        return ended(self.data)


def kept_alive(server: Serve) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port(), timeout=10)
    connection.request("GET", "/livez")
    connection.getresponse().read()
    return connection


def refused(server: Serve, method: str, path: str, body: Any = None) -> bool:
    with server.open(method, path, body) as answer:
        answer.read()
        return (answer.status, answer.getheader("retry-after")) == (503, "5")


def test_sigterm_lets_running_requests_finish(serve: Callable[..., Serve]) -> None:
    """Without a lag new ones are refused at once. It ends with 0 as soon as the last answer is out."""
    server = serve().ready()
    processes = [row["pid"] for row in server.state()["processes"]]
    idle = kept_alive(server)
    body = {**LONG, "max_tokens": 1500}
    clients = [Client(server, {**body, "stream_options": {"include_usage": True}}) for _ in range(4)]
    clients.append(whole := Client(server, {**body, "stream": False}))
    wait_for(lambda: all(client.begun() for client in clients[:4]), 30, "tokens")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: draining" in server.text, 5, "note of the signal")
    assert refused(server, "GET", "/readyz")
    assert refused(server, "POST", COMPLETION, HELLO)
    assert server.request("GET", "/livez")[0] == 200
    assert whole.is_alive()  # else the rest shows nothing
    assert [client.result() for client in clients[:4]] == [(1500, True, "")] * 4
    whole.join(20)
    assert json.loads(whole.data)["usage"]["completion_tokens"] == 1500
    last = max(client.closed for client in clients)
    assert server.end(10) == ExitCode.OK
    assert time.monotonic() - last < 4  # the limit is far away
    idle.close()
    assert not [pid for pid in processes if psutil.pid_exists(pid)]
    assert "new requests are served for 0 s, then running ones have 20 s" in server.text
    assert "Traceback" not in server.text


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--worker-start-method", "spawn"), marks=pytest.mark.chaos)], ids=["forked", "spawned"]
)
def test_a_sigterm_for_all_processes_is_one_for_the_server(serve: Callable[..., Serve], flags: tuple[str, ...]) -> None:
    """``timeout``, systemd's default and ``killpg`` send it to each: nobody ends before the server says so."""
    server = serve("--recovery", "off", *flags).ready()
    processes = [row["pid"] for row in server.state()["processes"]]
    tree = psutil.Process(server.process.pid).children(recursive=True)
    stream = Client(server, {**LONG, "max_tokens": 1500, "stream_options": {"include_usage": True}})
    wait_for(stream.begun, 30, "tokens")
    for process in [*reversed(tree), psutil.Process(server.process.pid)]:
        process.terminate()
    wait_for(lambda: "SIGTERM: draining" in server.text, 5, "note of the signal")
    assert [row["pid"] for row in server.state()["processes"]] == processes
    assert stream.result() == (1500, True, "")
    assert server.end(10) == ExitCode.OK
    assert not [process for process in tree if process.is_running()]
    assert "Traceback" not in server.text
    assert "drumline failed" not in server.text


def test_new_requests_are_served_during_the_lag_and_nothing_is_waited_for_after_it(serve: Callable[..., Serve]) -> None:
    server = serve("--drain-lag", "3", "--shutdown-timeout", "60").ready()
    idle = kept_alive(server)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: draining" in server.text, 5, "note of the signal")
    assert refused(server, "GET", "/health")
    assert server.request("POST", COMPLETION, HELLO)[1]["usage"]["completion_tokens"] == 4
    assert server.end(10) == ExitCode.OK
    assert 3.0 <= time.monotonic() - began < 8.0
    idle.close()


def test_what_does_not_finish_in_time_gets_an_error(serve: Callable[..., Serve]) -> None:
    server = serve("--shutdown-timeout", "0.5").ready()
    stream = Client(server, LONG)
    whole = Client(server, {**LONG, "stream": False})
    wait_for(stream.begun, 30, "tokens")
    wait_for(lambda: server.gauge("num_requests_running") == 2, 10, "both requests")
    server.process.send_signal(signal.SIGTERM)
    tokens, done, error = stream.result()
    assert (tokens > 2, done, error) == (True, False, "The server is shutting down.")
    whole.join(10)
    assert (whole.status, json.loads(whole.data)["error"]["code"]) == (503, "service_unavailable")
    assert server.end(5) == ExitCode.OK
    assert "2 requests did not end within 0.5 s" in server.text


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.chaos)])
def test_a_second_signal_ends_a_drain_at_once(serve: Callable[..., Serve], number: int) -> None:
    server = serve().ready()
    stream = Client(server, LONG)
    wait_for(stream.begun, 30, "tokens")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: draining" in server.text, 5, "note of the signal")
    assert server.process.poll() is None
    server.process.send_signal(number)
    assert server.end(3) == ExitCode.INTERRUPTED  # the limit is 20 s
    assert stream.result()[1:] == (False, "The server is shutting down.")
