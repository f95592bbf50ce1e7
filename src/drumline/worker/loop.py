"""The loop of a worker process: take a call, run it, answer if it is this rank's turn, note the progress.

::

    executor                      segment                     this process, main thread
    collective_rpc  --------->  broadcast ring  ---------->   poll -> decode -> release -> run
    CallTable.answer <--------  answer ring     <----------   encode (if this rank answers)
                                progress words  <----------   begin, end
                                                              (or the output thread: outputs.py)
    Supervisor      <-------------------------------------    CallFailed, over the control connection

It sleeps on one waiter, which every change rings: a call, room in the answer ring, the wish to end. The payload of a
call is garbage before the next one is waited for: everything that refers to it lives in frames that have returned.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drumline.errors import FailureReport, MessageTooLargeError, RPCTimeoutError
from drumline.processes.child import StopRequested
from drumline.processes.reports import span
from drumline.transport.broadcast import QueueWriter
from drumline.transport.codec import CodecRegistry
from drumline.transport.records import bytes_of
from drumline.transport.ring import RingReader
from drumline.transport.waiter import Waiter
from drumline.worker.garbage import Garbage
from drumline.worker.outputs import OutputThread, is_async
from drumline.worker.rehearse import rehearse_call
from drumline.worker.segment import RETURNED, SERIALISED, Progress
from drumline.worker.wire import ALL_RANKS, Buffer, CallDecoder, CallFailed, CallHead, Request, encode_answer, read_head
from drumline.worker.wrapper import bind, busy_ns, idle_work, init_output_thread, step_of

log = logging.getLogger(__name__)

OUTPUT_STOP_S = 1.0
"""How long a worker that ends waits for outputs that are not finished."""


WARM_UP = "compile_or_warm_up_model"
"""After this call nothing is made any more that lives long."""


class WorkerStop(BaseException):
    """Ends the loop: asked for by the owner or by SIGTERM. Nothing that a worker does may catch it."""


LEAVES = (WorkerStop, SystemExit, StopRequested)
"""What a call may raise to end the process; everything else is a failure of the call."""


class Interruptible(Protocol):
    """See ``ChildContext.in_call``."""

    in_call: bool


@dataclass(frozen=True, kw_only=True)
class Channels:
    """A worker's ends of everything that it shares with its executor."""

    calls: RingReader
    answers: QueueWriter
    progress: Progress
    waiter: Waiter
    codec: CodecRegistry
    measured: bool = False
    """What fits into the answer ring may be larger than an answer may be."""


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
        process: Interruptible,
        describe_owner: Callable[[], str] = lambda: "the executor",
        long_wait_s: float = 60.0,
    ) -> None:
        """Make the loop; :meth:`run` runs it.

        Args:
            worker: whatever has the methods that will be called.
            rank: of this worker.
            channels: its ends.
            stopping: whether it should end; whoever makes it true rings the waiter.
            make_report: report of an exception, the method it came from and the step.
            send_failure: sends over the control connection; any thread.
            process: what SIGTERM asks whether it may interrupt.
            describe_owner: the executor's process, for log lines.
            long_wait_s: a wait for room in the answer ring that takes longer is explained in the log.

        """
        self._worker = worker
        self._rank = rank
        self._calls = channels.calls
        self._answers = channels.answers
        self._progress = channels.progress
        self._waiter = channels.waiter
        self._codec = channels.codec
        self._measured = channels.measured
        self._decoder = CallDecoder(channels.codec, rank)
        self._stopping = stopping
        self._make_report = make_report
        self._send_failure = send_failure
        self._describe_owner = describe_owner
        self._long_wait_s = long_wait_s
        self._process = process
        self._fail_lock = threading.Lock()
        self._while_idle = idle_work(worker)
        self._busy_ns = busy_ns(worker)
        channels.waiter.rehearse(rehearse_call(channels.codec, rank))
        self._garbage = Garbage()
        self._outputs = OutputThread(lambda: init_output_thread(worker), channels.waiter.ring)

    def run(self) -> None:
        """Serve calls. Ends with WorkerStop when asked to."""
        try:
            while True:
                self._serve_next()
        finally:
            if not self._outputs.stop(OUTPUT_STOP_S):
                log.warning("an output does not get finished; it is left alone")

    def _serve_next(self) -> None:
        found = self._next()
        if found is None:
            self._garbage.between_steps()
        while found is None and self._while_idle():
            found = self._next()
        if found is None:
            found = self._waiter.wait(self._next)
        if found is None:
            return
        head, request = found[0]
        if isinstance(request, BaseException):
            self._fail(_Done(head, "decoding a call", None), request)
            self._end(head.call_id)
        else:
            self._run(head, request)

    def _next(self) -> tuple[tuple[CallHead, Request | BaseException]] | None:
        if self._stopping():
            raise WorkerStop
        return self._calls.receive(self._decode)

    def _decode(
        self, _: int, data: memoryview, buffers: Sequence[memoryview]
    ) -> tuple[CallHead, Request | BaseException]:
        """A call, or what was raised while it was decoded, which is a failure of it like any other."""
        head = read_head(data)
        self._progress.begin(self._rank, head[0])
        try:
            return head, self._decoder.decode(head, data, buffers)
        except LEAVES:
            raise
        except BaseException as exc:  # noqa: BLE001
            return head, exc

    def _run(self, head: CallHead, request: Request) -> None:
        """Run one call, answer if this rank is to, note its end."""
        method, args, kwargs = request
        call_id, reply_rank, *_ = head
        try:
            self._process.in_call = True
            try:
                value = bind(self._worker, method)(*args, **kwargs)
            finally:
                self._process.in_call = False
            if method == WARM_UP:
                self._garbage.freeze()
            self._progress.beat(self._rank, call_id, RETURNED)
            if self._busy_ns is not None:
                self._progress.set_busy(self._rank, self._busy_ns())
            if reply_rank != self._rank and reply_rank != ALL_RANKS:
                self._end(call_id)
            elif is_async(value):
                self._give(_Done(head, *name_and_step(method, args)), value)
            else:
                self._answer(head, request, value)
        except LEAVES:
            raise
        except BaseException as exc:  # noqa: BLE001  whatever else a call raises is reported, and the loop goes on
            self._fail(_Done(head, *name_and_step(method, args)), exc)
            self._end(call_id)

    def _answer(self, head: CallHead, request: Request, value: Any) -> None:
        """Encode and send here. If the output thread owes something, or there is no room, it gets a copy to send: the
        next call may change what was returned."""
        call_id = head[0]
        parts, buffers = encode_answer(self._codec, call_id, value)
        if self._measured and (size := bytes_of(parts) + bytes_of(buffers)) > self._answers.largest_message:
            largest = self._answers.largest_message
            raise MessageTooLargeError(f"an answer of {size} bytes, and the limit is {largest} (--mq-largest-bytes)")
        self._progress.beat(self._rank, call_id, SERIALISED)
        if self._outputs.idle and self._sent_in_one_piece(parts, buffers):
            self._progress.end(self._rank, call_id)
        else:
            copy = _Encoded([b"".join(parts)], [memoryview(bytes(buffer)) for buffer in buffers])
            self._give(_Done(head, *name_and_step(request.method, request.args)), copy)

    def _sent_in_one_piece(self, parts: Sequence[Buffer], buffers: Sequence[memoryview]) -> bool:
        try:
            return self._answers.try_write(parts, 0, buffers)
        except MessageTooLargeError:
            return False

    def _end(self, call_id: int) -> None:
        """The call has ended on this rank; said only once the calls before it have."""
        if self._outputs.idle:
            self._progress.end(self._rank, call_id)
        else:
            self._outputs.give(lambda error: self._progress.end(self._rank, call_id))

    # Outputs that the output thread finishes.

    def _give(self, done: _Done, value: Any) -> None:
        outputs = self._outputs
        if outputs.full:
            outputs.awaited = True
            self._waiter.wait(self._room_for_output)
            outputs.awaited = False
        outputs.give(lambda error: self._finish(done, value, error))

    def _room_for_output(self) -> bool | None:
        self._check_stop()
        return None if self._outputs.full else True

    def _finish(self, done: _Done, value: Any, error: BaseException | None) -> None:
        """In the output thread: finish, encode, send, note the end."""
        try:
            if error is not None:
                raise error
            if isinstance(value, _Encoded):
                parts, buffers = value.parts, value.buffers
            else:
                output = value.get_output()
                self._progress.beat_output(self._rank, done.head.call_id, RETURNED)
                parts, buffers = encode_answer(self._codec, done.head.call_id, output)
            self._progress.beat_output(self._rank, done.head.call_id, SERIALISED)
            self._send(parts, buffers, done)
        except WorkerStop:
            return
        except BaseException as exc:  # noqa: BLE001  a failure like any other
            with contextlib.suppress(WorkerStop):  # the owner is gone: the loop ends by itself
                self._fail(done, exc)
        self._progress.end(self._rank, done.head.call_id)

    def _send(self, parts: list[Any], buffers: Sequence[memoryview], done: _Done) -> None:
        """Wait for room as long as it takes: the executor may have reasons. A long wait is explained in the log."""
        began = time.monotonic()
        patience = self._long_wait_s
        while True:
            try:
                self._answers.enqueue(parts, self._waiter, began + patience, self._check_stop, buffers=buffers)
                return
            except RPCTimeoutError as exc:
                waited = time.monotonic() - began
                log.warning(
                    "rank %d: %s of waiting to send the answer to %s (call %d) to %s: %s",
                    *(self._rank, span(waited), done.name, done.head.call_id, self._describe_owner(), exc),
                )
                patience = 2 * waited

    def _check_stop(self) -> None:
        if self._stopping():
            raise WorkerStop

    def _fail(self, done: _Done, exc: BaseException) -> None:
        """Either thread."""
        head = done.head
        owed = head.reply_rank in (self._rank, ALL_RANKS)
        try:
            report = self._make_report(exc, done.name, done.step)
        except Exception as broken:  # noqa: BLE001  an exception's class can be as odd as it likes
            error = RuntimeError(f"no report can be made of what was raised: {type(broken).__name__}")
            report = self._make_report(error, done.name, done.step)
        with self._fail_lock:
            self._progress.count_failure(self._rank)
        self._send_failure(CallFailed(head.call_id, owed, report))


@dataclass(frozen=True, slots=True)
class _Done:
    """A call whose method has returned or raised, for its report."""

    head: CallHead
    name: str
    step: int | None


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An answer that was ready, and could not be sent at once."""

    parts: list[Any]
    buffers: Sequence[memoryview]


def name_and_step(method: str | Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, int | None]:
    """How reports name a call, and the step that it belongs to."""
    name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
    return name, step_of(name, args)
