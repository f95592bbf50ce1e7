"""Clients of one engine: :class:`AsyncEngineClient` for an event loop, :class:`SyncEngineClient` for plain programs.

::

    this process                                    engine core
    client -- FrontChannel (one end of a socketpair) -- CoreChannel -- EngineCore loop
           -- control connection, pidfd (supervisor's thread) -- phases, ready, failure, stop

Both start everything (fork server, engine core, through it the workers) and end everything. Neither needs a main guard,
both may live in any thread, and there may be several, one after the other or at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from drumline.config import EngineConfig
from drumline.engine.front import FrontChannel, Stream, result_value
from drumline.engine.launch import EngineProcesses
from drumline.engine.protocol import (
    Abort,
    EngineInfo,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    OutputHandle,
    ProcessState,
    Recoveries,
    RequestOutput,
    UtilityCall,
    UtilityResult,
)
from drumline.errors import EngineDeadError, FailureReport, RequestError, RPCTimeoutError, TransportError
from drumline.processes.live import LiveReport
from drumline.processes.reports import make_report
from drumline.transport import deadline_after

log = logging.getLogger(__name__)

_LONGEST_POLL_S = 1.0
"""Of a thread that waits alone. Nobody waits here while nothing is asked of the engine, so this costs no idle CPU."""
_SHARED_POLL_S = 0.05
"""While several threads wait."""


class EngineClient:
    """What both clients share: processes, channel, last stats."""

    def __init__(self, config: EngineConfig, *, role: str) -> None:
        self.config = config
        self._role = role
        self._processes = self._make_processes()
        self.recoveries: Recoveries | None = None
        """See ``engine.recovering``."""
        self._channel: FrontChannel | None = None
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._call_ids = itertools.count(1)

    def _make_processes(self, before: EngineProcesses | None = None) -> EngineProcesses:
        return EngineProcesses(self.config, role=self._role, on_failure=self._on_failure, waits=self._waits)

    @property
    def info(self) -> EngineInfo | None:
        """None until it is ready."""
        return self._info

    @property
    def failure(self) -> FailureReport | None:
        """Root cause, once the engine is dead."""
        return self._processes.failure

    @property
    def stalling(self) -> str:
        """Who makes no progress, while work is outstanding and half of the stall timeout is over; else empty."""
        return self._processes.stalling

    def live_report(self, cause: str) -> LiveReport:
        """What every process is doing, with the stacks of all threads. Blocks for up to a few seconds; any thread."""
        return self._processes.live_report(cause)

    @property
    def report_folder(self) -> Path | None:
        """Where this run's log files are; None before there are any."""
        return self._processes.report_folder

    def processes(self) -> list[ProcessState]:
        """All processes of this engine, this one included. Useful during the start too."""
        return self._processes.processes()

    def start_seconds(self) -> dict[str, float]:
        """Seconds of the last start by phase (``engine.starts``), once it is ready; they add up to all of it."""
        return self._processes.start_seconds()

    def stats(self) -> EngineStats:
        """Of the last step."""
        return self._stats

    def renounce_recovery(self, why: str) -> None:
        """The next death is final, as every death is here; ``why`` in words for the log."""

    def _on_failure(self, report: FailureReport) -> None:
        raise NotImplementedError

    def _waits(self) -> bool:
        """Whether somebody waits for something of the engine. Any thread."""
        raise NotImplementedError

    def _receive(self, channel: FrontChannel) -> list[EngineOutputs | UtilityResult]:
        """What has come. The engine is given up if it cannot be read: where the next message begins is not known."""
        try:
            return channel.receive()
        except (TransportError, msgspec.MsgspecError) as error:
            if self._processes.failure is None:
                report = make_report(error, role=self._role, phase="serving")
                threading.Thread(
                    target=self._processes.give_up, args=(report,), name="drumline-torn", daemon=True
                ).start()
            return []

    def _start(self) -> EngineInfo:
        """Start all processes and wait until they are ready; blocks."""
        if self._channel is not None:
            raise RuntimeError("an engine client is started once")
        channel = self._channel = FrontChannel()
        try:
            self._processes.start(channel.door)
            channel.close_door()
            info = self._processes.wait_ready()
        except BaseException:
            self._processes.shutdown()
            channel.close()
            raise
        self._stats = EngineStats(kv_blocks_total=info.num_blocks)
        self._info = info
        return info

    def _ready_channel(self) -> FrontChannel:
        self._processes.raise_if_dead()
        if self._channel is None or self._info is None:
            raise RuntimeError("the engine is not started")
        return self._channel


class SyncEngineClient(EngineClient):
    """An engine for plain programs. Methods may be called from any thread; ``poll`` by one at a time.

    What the engine does not take at once goes out with the next call.

    ctrl-C raises KeyboardInterrupt between any two instructions of the main thread. Nearly always that is while it
    waits, which does no harm. In the middle of a message it does: the rest of the stream cannot be read any more. Then
    the engine is given up (and started again, with recovery). Rejected: a signal handler of our own, which belongs to
    the program; a thread that reads, which costs each step a switch.
    """

    def __init__(self, config: EngineConfig, *, role: str = "LLM") -> None:
        super().__init__(config, role=role)
        # One that its thread may take twice: a garbage collection in here may be what ends this client.
        self._lock = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._outputs: list[RequestOutput] = []
        self._results: dict[int, UtilityResult | FailureReport] = {}
        """Of calls: what they gave, or what the engine died of meanwhile."""
        self._torn = False
        """Somebody is at a message, or was interrupted there."""
        self._received: deque[EngineOutputs | UtilityResult] = deque()
        self._waiting_threads = 0
        self._waiting_calls: set[int] = set()
        self._closed = False

    def start(self) -> EngineInfo:
        """Start all processes and wait until they are ready. StartupError with the root cause."""
        return self._start()

    def add(self, request: EngineRequest) -> None:
        """Send a request. EngineDeadError."""
        with self._lock:
            self._give_up_torn()
            self._submit(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; outputs that are on their way may still come. EngineDeadError."""
        with self._lock:
            self._give_up_torn()
            self._withdraw(request_ids)

    def poll(self, timeout: float | None = None) -> list[RequestOutput]:
        """Outputs that have come; waits for the first up to ``timeout`` seconds (None: until there is one).

        EngineDeadError with the root cause if the engine is dead.
        """
        self._wait(lambda: bool(self._outputs), timeout)
        with self._lock:
            outputs, self._outputs = self._outputs, []
        return outputs

    def call(self, method: str, *args: Any, timeout: float = 60.0) -> Any:
        """Call a method of the engine core. RemoteCallError if it raises, RPCTimeoutError, EngineDeadError."""
        call_id = next(self._call_ids)
        self._waiting_calls.add(call_id)
        try:
            with self._lock:
                self._give_up_torn()
                self._send(UtilityCall(call_id=call_id, method=method, args=list(args)))
            if not self._wait(lambda: call_id in self._results, timeout):
                raise RPCTimeoutError(f"RPC call to {method} timed out.")
            result = self._results[call_id]
            if isinstance(result, FailureReport):
                raise EngineDeadError(result)
            return result_value(result)
        finally:
            self._waiting_calls.discard(call_id)
            self._results.pop(call_id, None)

    def shutdown(self) -> None:
        """End all processes (ladder). Idempotent."""
        self._processes.shutdown()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ring()  # whoever polls now finds that it is over
            if self._channel is not None:
                self._channel.close()
            os.close(self._wake)
            self._wake = -1

    def __enter__(self) -> SyncEngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # the lock is held

    def _submit(self, request: EngineRequest) -> None:
        self._send(request)

    def _withdraw(self, request_ids: Sequence[str]) -> None:
        self._send(Abort(request_ids=list(request_ids)))

    def _note(self, output: RequestOutput) -> None:
        """Called with each output that comes."""

    def _open_channel(self) -> FrontChannel | None:
        """What to listen to; None: nothing for now, but there will be. EngineDeadError."""
        return self._ready_channel()

    def _send(self, message: EngineRequest | Abort | UtilityCall) -> None:
        channel = self._ready_channel()
        data = channel.encode(message)
        if self._torn:
            return  # as if the engine were gone, which it soon is
        self._torn = True
        channel.send_encoded(data)
        self._torn = False
        if channel.waiting and self._waiting_threads:  # it waits for room from now on
            self._ring()

    def _give_up_torn(self) -> None:
        """The engine, if somebody was interrupted at a message. In a thread, which no further interrupt reaches."""
        if self._torn and self._processes.failure is None:
            said = "this process was interrupted in the middle of a message from or to the engine core"
            report = FailureReport(role=self._role, pid=os.getpid(), phase="serving", type="Interrupted", message=said)
            threading.Thread(target=self._processes.give_up, args=(report,), name="drumline-torn", daemon=True).start()

    def _lose_calls(self, report: FailureReport) -> None:
        """The engine died: nobody answers the calls that wait."""
        for call_id in self._waiting_calls:
            self._results.setdefault(call_id, report)

    def _ring(self) -> None:
        """Wake whoever waits."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # waiting

    def _wait(self, enough: Callable[[], bool], timeout: float | None) -> bool:
        """Take in what comes until ``enough()``; False after ``timeout`` seconds.

        Several threads may be here (one polls, others call). Whoever takes in messages may take another's; so while
        there are several, none sleeps long.
        """
        with self._lock:
            self._waiting_threads += 1
            self._processes.expect()
            if self._waiting_threads > 1:
                self._ring()
        try:
            return self._wait_turns(enough, deadline_after(timeout))
        finally:
            with self._lock:
                self._waiting_threads -= 1

    def _wait_turns(self, enough: Callable[[], bool], deadline: float | None) -> bool:
        while True:
            with self._lock:
                self._give_up_torn()
                channel = self._open_channel()
                if channel is not None:
                    self._take_in(channel)
                if enough():
                    return True
                wake = self._wake
                poller = select.poll()
                poller.register(wake, select.POLLIN)
                if channel is not None and not channel.ended:
                    poller.register(channel.fd, select.POLLIN | (select.POLLOUT if channel.waiting else 0))
                longest = _LONGEST_POLL_S if self._waiting_threads == 1 else _SHARED_POLL_S
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            poller.poll((longest if left is None else min(left, longest)) * 1000)  # a death writes to the eventfd
            try:
                os.eventfd_read(wake)
            except OSError:
                pass  # nothing was written, or it was shut down: then the next turn raises

    def _take_in(self, channel: FrontChannel) -> None:
        """What has come. A message counts as taken once it is: one that is taken again does no harm."""
        if not self._torn:
            self._torn = True
            channel.flush()
            self._received += self._receive(channel)
            self._torn = False
        while self._received:
            message = self._received[0]
            if isinstance(message, EngineOutputs):
                self._stats = message.stats
                for output in message.outputs:
                    self._outputs.append(output)
                    self._note(output)
            elif message.call_id in self._waiting_calls:
                self._results[message.call_id] = message
            self._received.popleft()

    def _waits(self) -> bool:
        return self._waiting_threads > 0

    def _on_failure(self, report: FailureReport) -> None:
        with self._lock:
            self._ring()


class AsyncEngineClient(EngineClient):
    """An engine for one asyncio loop (``engine.protocol.AsyncEngine``)."""

    def __init__(self, config: EngineConfig, *, role: str = "APIServer_0") -> None:
        super().__init__(config, role=role)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, _AsyncStream | _PushStream] = {}
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._dead: asyncio.Event = asyncio.Event()
        self._watched_fd = -1

    async def start(self) -> EngineInfo:
        """Start all processes. StartupError if one fails; whatever did start is ended then."""
        loop = self._loop = asyncio.get_running_loop()
        try:
            info = await asyncio.to_thread(self._start)
        except asyncio.CancelledError:
            await self.shutdown()  # the thread ends too: what it waits for is gone
            raise
        assert self._channel is not None
        self._watched_fd = self._channel.fd
        loop.add_reader(self._watched_fd, self._take_in)
        self._take_in()
        return info

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request. Closing the iterator aborts the request. EngineDeadError if the engine dies.

        RequestError if the id is in use.
        """
        self._check_id(request.request_id)
        stream = self._streams[request.request_id] = _AsyncStream()
        try:
            self._submit(request)
            while True:
                output = await stream.next()
                if output is None:
                    self._processes.raise_if_dead()
                    raise AssertionError("a stream ended without output and without a failure")
                yield output
                if stream.ended:
                    return
        finally:
            del self._streams[request.request_id]
            if not stream.finished:
                self._drop(request.request_id)

    def open(
        self, request: EngineRequest, on_output: Callable[[RequestOutput], bool], on_dead: Callable[[], None]
    ) -> OutputHandle:
        """See ``AsyncEngine.open``. RequestError if the id is in use."""
        self._check_id(request.request_id)
        stream = _PushStream(request.request_id, self._forget, on_output, on_dead)
        self._streams[request.request_id] = stream
        try:
            self._submit(request)
        except BaseException:
            stream.close()
            raise
        return stream

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their iterators end with finish_reason ``abort``."""
        self._withdraw(request_ids)
        for request_id in request_ids:
            self._end_stream(request_id, "abort")

    async def call(self, method: str, *args: Any, timeout: float = 60.0) -> Any:  # noqa: ASYNC109
        """Call a method of the engine core. RemoteCallError if it raises, RPCTimeoutError, EngineDeadError."""
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(UtilityCall(call_id=call_id, method=method, args=list(args)))
            return result_value(await asyncio.wait_for(future, timeout))
        except TimeoutError as error:
            raise RPCTimeoutError(f"RPC call to {method} timed out.") from error
        finally:
            del self._calls[call_id]

    async def wait_dead(self) -> FailureReport:
        """Wait until the engine dies; its root cause."""
        await self._dead.wait()
        assert self.failure is not None
        return self.failure

    async def shutdown(self) -> None:
        """End all processes (ladder). Idempotent."""
        await asyncio.to_thread(self._processes.shutdown)
        self._let_go()

    def shutdown_now(self) -> None:
        """The same from any thread and outside of the loop, which may be closed. Blocks."""
        self._processes.shutdown()
        loop = self._loop
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if loop is not None and loop.is_running() and loop is not here:
            loop.call_soon_threadsafe(self._let_go)
        else:
            self._let_go()

    def _let_go(self) -> None:
        self._unwatch()
        self._end_all()
        if self._channel is not None and self._info is not None:
            self._channel.close()  # before that it belongs to the thread that starts

    # the loop's thread

    def _check_id(self, request_id: str) -> None:
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _forget(self, stream: _PushStream) -> None:
        """Its consumer wants no more of it, or has had all."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            if not stream.finished:
                self._drop(stream.request_id)

    def _end_stream(
        self, request_id: str, reason: str, message: str = "", stop_reason: int | str | None = None
    ) -> None:
        """End a request on this side, if it is there."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.end(request_id, reason, message, stop_reason)
            if isinstance(stream, _PushStream):
                stream.resume()

    def _submit(self, request: EngineRequest) -> None:
        """A new request, whose stream is there already."""
        self._send(request)

    def _withdraw(self, request_ids: Sequence[str]) -> None:
        self._send(Abort(request_ids=list(request_ids)))

    def _note(self, output: RequestOutput) -> None:
        """Called with each output before its stream gets it, which may change it."""

    def _drop(self, request_id: str) -> None:
        """Nobody wants a request any more. If the engine is dead or being shut down it has none."""
        if self.failure is None and self._watched_fd >= 0:
            with contextlib.suppress(EngineDeadError):
                self._send(Abort(request_ids=[request_id]))

    def _waits(self) -> bool:
        return bool(self._streams or self._calls)

    def _send(self, message: EngineRequest | Abort | UtilityCall) -> None:
        channel = self._ready_channel()
        channel.send(message)
        self._processes.expect()
        if channel.waiting and self._watched_fd >= 0:
            assert self._loop is not None
            self._loop.add_writer(self._watched_fd, self._flush)

    def _flush(self) -> None:
        """There is room for what waits."""
        channel = self._channel
        if channel is not None:
            channel.flush()
        if (channel is None or not channel.waiting) and self._watched_fd >= 0 and self._loop is not None:
            self._loop.remove_writer(self._watched_fd)

    def _take_in(self) -> None:
        """Hand out what has come: one call for each request, however many steps this loop was behind."""
        channel = self._channel
        if channel is None or self._watched_fd < 0:
            return
        touched: dict[str, _PushStream] = {}
        note = self._note
        for message in self._receive(channel):
            if isinstance(message, EngineOutputs):
                self._stats = message.stats
                for output in message.outputs:
                    if (stream := self._streams.get(output.request_id)) is not None:
                        note(output)
                        stream.put(output)
                        if isinstance(stream, _PushStream):
                            touched[output.request_id] = stream
            elif (future := self._calls.get(message.call_id)) is not None and not future.done():
                future.set_result(message)
        for push in touched.values():
            push.resume()
        if channel.ended and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(channel.fd)

    def _on_failure(self, report: FailureReport) -> None:
        """The supervisor's thread."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._on_dead)
            except RuntimeError:
                pass  # the loop is closed; nobody waits

    def _on_dead(self) -> None:
        self._take_in()  # what the engine said before it died is true
        self._unwatch()
        self._dead.set()
        self._end_all()

    def _unwatch(self) -> None:
        if self._watched_fd >= 0 and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._watched_fd)
                self._loop.remove_writer(self._watched_fd)
            self._watched_fd = -1

    def _end_all(self) -> None:
        """Wake everyone who waits; they find the failure."""
        for stream in list(self._streams.values()):
            stream.wake()
        self._end_calls()

    def _end_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                try:
                    self._processes.raise_if_dead()
                except EngineDeadError as error:
                    future.set_exception(error)


class _AsyncStream(Stream):
    """A stream with one consumer on the loop."""

    __slots__ = ("_event", "_over")

    def __init__(self) -> None:
        super().__init__()
        self._event = asyncio.Event()
        self._over = False

    @property
    def ended(self) -> bool:
        """The last output was put in, and taken."""
        return self.finished and self._pending is None

    def put(self, output: RequestOutput) -> None:
        """Add an output and wake the consumer."""
        super().put(output)
        self._event.set()

    def wake(self) -> None:
        """Nothing more will come."""
        self._over = True
        self._event.set()

    async def next(self) -> RequestOutput | None:
        """The next output; None if nothing more will come."""
        while (output := self.take()) is None:
            if self._over:
                return None
            self._event.clear()
            await self._event.wait()
        return output


class _PushStream(Stream):
    """A stream whose consumer is called."""

    __slots__ = ("_forget", "_on_dead", "_on_output", "request_id")

    def __init__(
        self,
        request_id: str,
        forget: Callable[[_PushStream], None],
        on_output: Callable[[RequestOutput], bool],
        on_dead: Callable[[], None],
    ) -> None:
        super().__init__()
        self.request_id = request_id
        self._forget: Callable[[_PushStream], None] | None = forget
        self._on_output = on_output
        self._on_dead = on_dead

    def resume(self) -> None:
        """Offer what waits."""
        if self._pending is None or self._forget is None or not self._on_output(self._pending):
            return
        self._pending = None
        if self.finished:
            self.close()

    def wake(self) -> None:
        """Nothing more will come."""
        self.resume()
        if self._forget is not None:
            self.close()
            self._on_dead()

    def close(self) -> None:
        """No call follows."""
        forget, self._forget = self._forget, None
        if forget is not None:
            self._pending = None
            forget(self)
