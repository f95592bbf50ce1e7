"""The engine core's side of the channel to its front end.

::

    front end                                   engine core
    requests, aborts, calls  -- socketpair ->  engine-io thread: decode -> inbox (deque) -> waiter.ring()   main thread
    outputs, results         <- socketpair --  main thread: encode, send

The main thread sends by itself: handing outputs to another thread costs two switches and a fight for the interpreter's
lock in every step, more than encoding and sending take (a one-token step: 163 us of CPU in the other thread, 20 us
here). The engine-io thread is there to wake the main thread, which sleeps on its waiter, when something comes, and to
send what the socket did not take at first. It alone receives; whoever sends has the lock.

**A front end that does not read.** The socket's buffer holds some hundred outputs. What comes once it is full is
merged: one output with all new tokens for each request. So the engine runs on, nothing is dropped or reordered within a
request, and the memory is bounded by what the requests in the engine can give (their max_tokens).

**A front end that is gone** is noticed by the control connection; here, what is sent to it goes nowhere.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec

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
from drumline.transport.frames import Frames

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
    first.num_preemptions = max(first.num_preemptions, second.num_preemptions)
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
    """See the module's text. ``on_message`` is called, by any thread, after something came into ``inbox``."""

    def __init__(self, door: int, on_message: Callable[[], None]) -> None:
        """``door``: descriptor of this end of the connection (``FrontChannel.door``); stays the caller's."""
        self.inbox: deque[Incoming | Undecodable] = deque()
        self.error: BaseException | None = None
        """What broke the channel; the main thread is woken then and should end."""
        self._on_message = on_message
        self._closing = False
        self._decoder = msgspec.msgpack.Decoder(EngineRequest | Abort | UtilityCall)
        self._encoder = msgspec.msgpack.Encoder()
        self._backlog = Backlog()
        self._lock = threading.Lock()
        self._frames = Frames(socket.socket(fileno=os.dup(door)))
        self._wake = -1
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self._frames.close()
            raise
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)
        self._thread.start()

    def send(self, message: Outgoing) -> None:
        """Send a message to the front end, or keep it until that can be done. Never blocks. Any thread.

        Nothing happens after :meth:`close`.
        """
        with self._lock:
            if self._closing:
                return
            if self._frames.waiting:
                self._backlog.add(message)
                return
            if not self._frames.send(self._encode(message)):
                os.eventfd_write(self._wake, 1)  # from now on the thread waits for room, too

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; what was not sent is lost. Idempotent."""
        if self._wake < 0:
            return
        with self._lock:
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._wake)
            self._wake = -1
            self._frames.close()

    # the thread

    def _run(self) -> None:
        frames, wake = self._frames, self._wake
        try:
            poller = select.poll()
            poller.register(wake, select.POLLIN)
            poller.register(frames.fd, select.POLLIN)
            ended = False
            while not self._closing:
                for fd, events in poller.poll():
                    if fd == wake:
                        os.eventfd_read(wake)
                    elif events & ~select.POLLOUT:
                        self._receive()
                with self._lock:
                    self._send_waiting()
                    room = select.POLLOUT if frames.waiting else 0
                if not frames.eof:
                    poller.modify(frames.fd, select.POLLIN | room)
                elif not ended:
                    ended = True
                    poller.unregister(frames.fd)
        except Exception as error:
            log.exception("the channel to the front end broke")
            self.error = error
            self._on_message()

    def _receive(self) -> None:
        """Take in what has come."""
        self.inbox.extend(self._frames.receive(self._decode))
        self._on_message()

    def _send_waiting(self) -> None:
        """Send what waits, as far as the socket takes it."""
        self._frames.flush()
        while not self._frames.waiting and (message := self._backlog.take()) is not None:
            self._frames.send(self._encode(message))

    def _decode(self, data: bytes | memoryview) -> Incoming | Undecodable:
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
