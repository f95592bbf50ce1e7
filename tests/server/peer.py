"""An engine of a few lines behind the real HTTP server: says what a script says, and dies when told to.

It is a peer of ``engine.protocol.AsyncEngine`` for tests of HTTP shapes; the real engine has its own tests, and
``test_processes`` runs the whole command.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from drumline.config import EngineConfig, ModelConfig
from drumline.engine.front import Stream
from drumline.engine.protocol import EngineInfo, EngineRequest, EngineStats, ProcessState, Recoveries, RequestOutput
from drumline.errors import EngineDeadError, FailureReport
from drumline.plan.step import TokenLogprobs
from drumline.processes.live import LiveReport, ProcessReport
from drumline.server.app import create_app
from drumline.server.prompts import TextFiles, TextRoom
from drumline.server.service import Service
from drumline.server.sockets import bind, url
from drumline.server.uvicorn_server import HttpServer

Script = Callable[[EngineRequest], Sequence[int]]


def echo(request: EngineRequest) -> Sequence[int]:
    """Say the prompt again and again."""
    return request.prompt_token_ids


class ScriptedEngine:
    """Gives ``script(request)`` token by token, over and over, up to max_tokens or an end-of-sequence token."""

    def __init__(self, script: Script = echo, max_model_len: int = 256, vocab_size: int = 420) -> None:
        self.script = script
        self.info: EngineInfo | None = EngineInfo(
            max_model_len=max_model_len,
            num_blocks=64,
            block_size=16,
            vocab_size=vocab_size,
            dtype="float32",
            scheduling_policy="priority",
        )
        self.failure: FailureReport | None = None
        self.recoveries: Recoveries | None = None
        self.stalling = ""
        self.report_folder: Path | None = None
        self.running: dict[str, EngineRequest] = {}
        self.seen: list[EngineRequest] = []
        self.gate = asyncio.Event()
        """Closed: requests wait."""
        self.gate.set()
        self.changed = asyncio.Event()
        self.pause_s = 0.0
        self.at_once = 1
        """Tokens of one output; more than one is what an engine gives whose front end was busy."""
        self.fails = ""
        """Why requests fail; with ignore_eos after their first token."""
        self._dead = asyncio.Event()

    async def start(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    def processes(self) -> Sequence[ProcessState]:
        return [
            ProcessState(name="APIServer_0", pid=os.getpid()),
            ProcessState(name="Worker_TP0", rank=0, phase="ready"),
        ]

    def live_report(self, cause: str) -> LiveReport:
        return LiveReport(cause=cause, processes=[ProcessReport(name="Worker_TP0", pid=7, rank=0, stacks="in here")])

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            kv_blocks_used=16,
            kv_blocks_total=64,
            preemptions=3,
            forward_s=0.5,
            active_s=4.0,
            stage_busy_s=[3.0, 2.0],
            stage_busy=[0.75, 0.5],
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        name = request.request_id
        assert name not in self.running
        self.running[name] = request
        self.seen.append(request)
        self.changed.set()
        tokens = self.script(request)
        limit = request.sampling.max_tokens or 1
        try:
            given: list[int] = []
            for index in range(limit):
                await self._turn()
                token = tokens[index % len(tokens)]
                given.append(token)
                reason = "length" if index == limit - 1 else None
                if self.fails and index == int(request.sampling.ignore_eos):
                    yield RequestOutput(
                        request_id=name, first_index=index, token_ids=[], finish_reason="error", message=self.fails
                    )
                    return
                if token in request.eos_token_ids or token in (request.sampling.stop_token_ids or ()):
                    reason = "stop"
                if reason is None and len(given) < self.at_once:
                    continue
                yield RequestOutput(
                    request_id=name,
                    first_index=index + 1 - len(given),
                    token_ids=given,
                    logprobs=[row for one in given for row in self._logprobs(request, one)],
                    finish_reason=reason,
                    stop_reason=token if reason == "stop" and token not in request.eos_token_ids else None,
                    num_cached_tokens=2 if index < self.at_once else 0,
                    prompt_logprobs=self._prompt_logprobs(request) if index < self.at_once else [],
                )
                given = []
                if reason is not None:
                    return
        finally:
            del self.running[name]
            self.changed.set()

    def open(
        self, request: EngineRequest, on_output: Callable[[RequestOutput], bool], on_dead: Callable[[], None]
    ) -> Handle:
        self.script(request)  # a script that fails is a fault of the server's own
        return Handle(self, request, on_output, on_dead)

    async def _turn(self) -> None:
        if self.gate.is_set() and not self.pause_s and self.failure is None:
            await asyncio.sleep(0)
            return
        waits = [asyncio.create_task(self._dead.wait()), asyncio.create_task(self.gate.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(self.pause_s)
        finally:
            for wait in waits:
                wait.cancel()
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def _prompt_logprobs(self, request: EngineRequest) -> list[TokenLogprobs]:
        top = request.sampling.prompt_logprobs
        if top is None:
            return []
        return [
            TokenLogprobs(logprob=-2.0, rank=2, top_ids=[7, token][:top], top_logprobs=[-1.0, -2.0][:top])
            for token in request.prompt_token_ids[1:]
        ]

    def _logprobs(self, request: EngineRequest, token: int) -> list[TokenLogprobs | None]:
        top = request.sampling.logprobs
        if top is None:
            return []
        # The sampled token is the second of a made-up ranking.
        ids = [token + 1, token, token + 2, token + 3][:top]
        values = [-0.5, -1.0, float("-inf"), -4.0][:top]
        return [TokenLogprobs(logprob=-1.0, rank=2, top_ids=ids, top_logprobs=values)]

    async def abort(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError

    async def call(self, method: str, *args: Any, timeout: float = 60.0) -> Any:  # noqa: ASYNC109
        raise NotImplementedError

    def die(self) -> None:
        self.failure = FailureReport(role="Worker_TP1", rank=1, pid=7, what="signal", type="SIGKILL", phase="execute")
        self._dead.set()

    async def wait_dead(self) -> FailureReport:
        await self._dead.wait()
        assert self.failure is not None
        return self.failure

    async def shutdown(self) -> None:
        return

    async def until(self, running: int) -> None:
        """Wait until so many requests run."""
        async with asyncio.timeout(5):
            while len(self.running) != running:
                self.changed.clear()
                await self.changed.wait()


class Handle:
    """Calls, as the real client makes them, of an iterator's outputs."""

    def __init__(
        self,
        engine: ScriptedEngine,
        request: EngineRequest,
        on_output: Callable[[RequestOutput], bool],
        on_dead: Callable[[], None],
    ) -> None:
        self._on_output = on_output
        self._on_dead = on_dead
        self._stream = Stream()
        self._closed = False
        self._task = asyncio.create_task(self._run(engine.generate(request)))

    async def _run(self, outputs: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    self._stream.put(output)
                    self.resume()
                    if self._closed:
                        return
        except EngineDeadError:
            self.close()
            self._on_dead()

    def resume(self) -> None:
        output = self._stream.take()
        if output is None or self._closed:
            return
        if not self._on_output(output):
            self._stream._pending = output  # it is as if it had never been taken
        elif self._stream.finished:
            self._closed = True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._task is not asyncio.current_task():
                self._task.cancel()


class Served:
    """A server on a free port."""

    def __init__(self, service: Service, engine: ScriptedEngine, http: HttpServer, address: str) -> None:
        self.service = service
        self.engine = engine
        self.http = http
        self.url = address
        self.port = int(address.rpartition(":")[2])


@asynccontextmanager
async def served(
    folder: Path | None,
    *,
    keys: Sequence[str] = (),
    ready: bool = True,
    engine: ScriptedEngine | None = None,
    send_buffer: int = 0,
) -> AsyncIterator[Served]:
    """Real uvicorn, the real application, the tokenizer of ``folder`` (None: no tokenizer).

    ``send_buffer``: bytes that wait in the kernel for a client to read; 0: as many as it likes.
    """
    engine = engine or ScriptedEngine()
    service = Service(["tiny", "alias/of-tiny"], root="/models/tiny", api_keys=keys)
    http = HttpServer(create_app(service))
    sockets = bind("127.0.0.1", 0)
    if send_buffer:
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    serving = asyncio.create_task(http.run_on(sockets))
    service.local = "127.0.0.1"
    try:
        if ready:
            make_ready(service, engine, folder)
        yield Served(service, engine, http, url(sockets[0]))
    finally:
        http.stop()
        await serving


def make_ready(service: Service, engine: ScriptedEngine, folder: Path | None) -> None:
    model = ModelConfig(path=str(folder or "/nonexistent"), skip_tokenizer_init=folder is None)
    assert engine.info is not None
    service.ready(engine, TextRoom(TextFiles.read(EngineConfig(model=model)), engine.info))
