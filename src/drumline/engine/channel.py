"""The engine core's side of the ZMQ channel to its front end: one thread that owns the socket.

::

    front end (DEALER, bound)                   engine core
    requests, aborts, calls  ---- ipc ---->  engine-io thread: decode -> inbox (deque) -> waiter.ring()   main thread
    outputs, results         <--- ipc -----  engine-io thread: encode <- outbox (deque) <- eventfd write  main thread

A thread of its own, so that encoding and system calls happen while the main thread sleeps until the step's answer, and
because a ZMQ socket belongs to one thread. Python's deques are the hand-over: append and popleft are atomic.

**A front end that does not read.** The socket holds ``HIGH_WATER`` messages each way; then sending would block. What
comes then is merged: one output with all new tokens for each request. So the engine runs on, nothing is dropped or
reordered within a request, and the memory is bounded by what the requests in the engine can give (their max_tokens).
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from drumline.engine.protocol import (
    Abort,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    RequestOutput,
    UtilityCall,
    UtilityResult,
)
from drumline.processes.messages import encode
from drumline.processes.reports import make_report
from drumline.transport.sockets import connect, door_address

HIGH_WATER = 64
"""Messages that wait in the socket, on each side, before merging begins."""

Incoming = EngineRequest | Abort | UtilityCall
Outgoing = EngineOutputs | UtilityResult

log = logging.getLogger(__name__)


class Undecodable(msgspec.Struct, kw_only=True):
    """A request that is none, with what can be said to its sender."""

    request_id: str
    message: str


class _JustId(msgspec.Struct):
    request_id: str = ""


def merge(first: RequestOutput, second: RequestOutput) -> None:
    """Add an output of a request to the one before it, in place: appending to a long one must not copy it."""
    first.token_ids.extend(second.token_ids)
    first.logprobs.extend(second.logprobs)
    first.finish_reason, first.stop_reason = second.finish_reason, second.stop_reason
    first.num_cached_tokens = max(first.num_cached_tokens, second.num_cached_tokens)
    first.message = second.message


class Backlog:
    """Messages that could not be sent yet. Pure."""

    def __init__(self) -> None:
        self._outputs: dict[str, RequestOutput] = {}
        self._stats: EngineStats | None = None
        self._results: deque[UtilityResult] = deque()

    def __bool__(self) -> bool:
        return bool(self._results) or self._stats is not None

    def add(self, message: Outgoing) -> None:
        """Keep a message."""
        if isinstance(message, UtilityResult):
            self._results.append(message)
            return
        self._stats = message.stats
        for output in message.outputs:
            held = self._outputs.setdefault(output.request_id, output)
            if held is not output:
                merge(held, output)

    def take(self) -> Outgoing | None:
        """The next message to send; None if there is none."""
        if self._stats is not None:
            message = EngineOutputs(outputs=list(self._outputs.values()), stats=self._stats)
            self._outputs, self._stats = {}, None
            return message
        return self._results.popleft() if self._results else None


class CoreChannel:
    """See the module's text. ``on_message`` is called, in the channel's thread, after something came into ``inbox``."""

    def __init__(self, door: int, on_message: Callable[[], None]) -> None:
        """``door``: descriptor of the front end's socket (``FrontChannel.door``); stays open as long as this."""
        self.inbox: deque[Incoming | Undecodable] = deque()
        self.error: BaseException | None = None
        """What broke the channel; the main thread is woken then and should end."""
        self._outbox: deque[Outgoing] = deque()
        self._on_message = on_message
        self._address = door_address(door)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._decoder = msgspec.msgpack.Decoder(EngineRequest | Abort | UtilityCall)
        self._encoder = msgspec.msgpack.Encoder()
        self._backlog = Backlog()
        self._unsent: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)
        self._thread.start()

    def send(self, message: Outgoing) -> None:
        """Queue a message for the front end. Never blocks. Any thread."""
        self._outbox.append(message)
        os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; what was not sent is lost. Idempotent."""
        if self._wake < 0:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._wake)
            self._wake = -1

    # the thread

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context(io_threads=1)
        try:
            socket = connect(context, zmq.DEALER, self._address, sndhwm=HIGH_WATER, rcvhwm=HIGH_WATER)
            with socket:
                self._serve(socket)
        except Exception as error:
            if not self._closing:
                log.exception("the channel to the front end broke")
                self.error = error
                self._on_message()
        finally:
            context.destroy(linger=0)

    def _serve(self, socket: zmq.Socket[Any]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, select.POLLIN)
        while not self._closing:
            poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if self._unsent is not None else 0))
            poller.poll()  # the eventfd ends it: main thread, or close()
            try:
                os.eventfd_read(self._wake)
            except BlockingIOError:
                pass
            self._receive(socket)
            self._send_all(socket)

    def _receive(self, socket: zmq.Socket[Any]) -> None:
        """Take in all that has come."""
        came = False
        try:
            for _ in range(4 * HIGH_WATER):  # then outputs get a turn; poll comes back at once
                self.inbox.append(self._decode(socket.recv(zmq.NOBLOCK)))
                came = True
        except zmq.Again:
            pass
        if came:
            self._on_message()

    def _decode(self, data: bytes) -> Incoming | Undecodable:
        try:
            message: Incoming = self._decoder.decode(data)
            return message
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("a message of the front end cannot be read: %s", error)
            try:
                request_id = msgspec.msgpack.decode(data, type=_JustId).request_id
            except (msgspec.MsgspecError, UnicodeDecodeError):
                request_id = ""
            return Undecodable(request_id=request_id, message=str(error))

    def _send_all(self, socket: zmq.Socket[Any]) -> None:
        """Send what can be sent without blocking; merge the rest."""
        while True:
            if self._unsent is None:
                message = self._next()
                if message is None:
                    return
                self._unsent = self._encode(message)
            try:
                socket.send(self._unsent, zmq.NOBLOCK)
            except zmq.Again:
                while self._outbox:
                    self._backlog.add(self._outbox.popleft())
                return
            self._unsent = None

    def _encode(self, message: Outgoing) -> bytes:
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError:
            return encode(message)  # lone surrogates in the text of an exception, or in what a worker's method gave
        except Exception as error:
            if not isinstance(message, UtilityResult):
                raise
            # a worker's method may give anything; only this call's answer is spoilt
            report = make_report(error, role="EngineCore", phase="encoding the result of a call")
            return self._encoder.encode(UtilityResult(call_id=message.call_id, error=report))

    def _next(self) -> Outgoing | None:
        if self._backlog:
            return self._backlog.take()
        return self._outbox.popleft() if self._outbox else None
