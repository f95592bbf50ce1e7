"""The loop of a worker process: take a call, run it, answer if it is this rank's turn, note the progress.

::

    executor                      segment                     this process, main thread
    collective_rpc  --------->  broadcast ring  ---------->   poll -> decode -> release -> run
    CallTable.answer <--------  answer ring     <----------   encode (if this rank answers)
                                progress words  <----------   end
    Supervisor      <-------------------------------------    CallFailed, over the control connection

It sleeps on one waiter, which every change rings: a call, room in the answer ring, the wish to end. The payload of a
call is garbage before the next one is waited for: everything that refers to it lives in frames that have returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drumline.errors import FailureReport
from drumline.transport.broadcast import QueueWriter
from drumline.transport.codec import CodecRegistry
from drumline.transport.ring import Message, RingReader
from drumline.transport.waiter import Waiter
from drumline.worker.segment import Progress
from drumline.worker.wire import ALL_RANKS, CallDecoder, CallFailed, CallHead, encode_answer, read_head
from drumline.worker.wrapper import bind, step_of


class WorkerStop(BaseException):
    """Ends the loop: asked for by the owner or by SIGTERM. Nothing that a worker does may catch it."""


@dataclass(frozen=True, kw_only=True)
class Channels:
    """A worker's ends of everything that it shares with its executor."""

    calls: RingReader
    answers: QueueWriter
    progress: Progress
    waiter: Waiter
    codec: CodecRegistry


class WorkerLoop:
    """Runs calls on one worker object until it is asked to stop."""

    def __init__(
        self,
        worker: Any,
        rank: int,
        channels: Channels,
        *,
        stopping: Callable[[], bool],
        make_report: Callable[[BaseException, str, int | None], FailureReport],
        send_failure: Callable[[CallFailed], None],
    ) -> None:
        """Make the loop; :meth:`run` runs it.

        Args:
            worker: whatever has the methods that will be called.
            rank: of this worker.
            channels: its ends.
            stopping: whether it should end; whoever makes it true rings the waiter.
            make_report: report of an exception, the method it came from and the step.
            send_failure: sends over the control connection.

        """
        self._worker = worker
        self._rank = rank
        self._calls = channels.calls
        self._answers = channels.answers
        self._progress = channels.progress
        self._waiter = channels.waiter
        self._codec = channels.codec
        self._decoder = CallDecoder(channels.codec, rank)
        self._stopping = stopping
        self._make_report = make_report
        self._send_failure = send_failure

    def run(self) -> None:
        """Serve calls. Ends with WorkerStop when asked to."""
        while True:
            self._serve_next()

    def _serve_next(self) -> None:
        message = self._waiter.wait(self._next)
        if message is not None:
            self._serve(message)

    def _next(self) -> Message | None:
        if self._stopping():
            raise WorkerStop
        return self._calls.poll()

    def _serve(self, message: Message) -> None:
        head = read_head(message.data)
        owed = head.reply_rank in (self._rank, ALL_RANKS)
        try:
            self._run(head, message, owed)
        except Exception as exc:  # noqa: BLE001  whatever a call raises is reported, and the loop goes on
            self._fail(head, owed, exc, "decoding a call", None)
        self._progress.end(self._rank, head.call_id)

    def _run(self, head: CallHead, message: Message, owed: bool) -> None:
        """Run one call and answer. Raises only if the call cannot be decoded."""
        try:
            request = self._decoder.decode(head, message.data)
        finally:
            message.release()
        method, args, kwargs = request
        try:
            value = bind(self._worker, method)(*args, **kwargs)
            if owed:
                self._answer(encode_answer(self._codec, head.call_id, value))
        except Exception as exc:  # noqa: BLE001
            name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
            self._fail(head, owed, exc, name, step_of(name, args))

    def _answer(self, parts: list[Any]) -> None:
        self._answers.enqueue(parts, self._waiter, None, self._check_stop)

    def _check_stop(self) -> None:
        if self._stopping():
            raise WorkerStop

    def _fail(self, head: CallHead, owed: bool, exc: BaseException, name: str, step: int | None) -> None:
        report = self._make_report(exc, name, step)
        self._progress.count_failure(self._rank)
        self._send_failure(CallFailed(head.call_id, owed, report))
