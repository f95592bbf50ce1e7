"""The future of one call, and what folds the answers of all ranks into one.

A :class:`Call` ends once: with a value, with what its method raised, with its deadline, or cancelled. It can be waited
for (``result``), polled (``done``), awaited in any asyncio loop, and given callbacks; the last two are served by the
keeper's thread (:mod:`drumline.executor.keeper`), so that they work although nobody waits.

Rejected: ``concurrent.futures.Future`` (a condition variable each, and nobody would drain the rings while waiting).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Protocol

from drumline.errors import FailureReport

if TYPE_CHECKING:
    import asyncio

    from drumline.executor.calls import CallTable

log = logging.getLogger(__name__)


class Aggregator(Protocol):
    """Folds the answers of all ranks onto the output rank's.

    Called once for each call, in the order of the calls, with the call table's lock held: it must not block, and calls
    of the executor from it raise RuntimeError.
    """

    def aggregate(self, outputs: Sequence[Any], output_rank: int) -> Any:
        """The one value that the caller gets. ``outputs`` are in rank order; what earlier aggregators made of the
        output rank's is in its place."""

    def failed(self, outputs: Mapping[int, Any], report: FailureReport) -> None:
        """The call failed; ``outputs`` are the answers of the ranks that did answer."""


class Held:
    """Bytes of answers that nobody has taken yet; given back when the last reference goes."""

    __slots__ = ("_freed", "size")

    def __init__(self, freed: list[int], size: int) -> None:
        self._freed = freed
        self.size = size

    def __del__(self) -> None:
        self._freed.append(self.size)  # atomic: this may run anywhere, also where the table's lock is held


class Call:
    """The future of one call. Made by :meth:`CallTable.begin`."""

    __slots__ = (
        "_aggregators",
        "_answers",
        "_asked",
        "_broken",
        "_callbacks",
        "_done",
        "_error",
        "_failures",
        "_held",
        "_missing",
        "_single",
        "_table",
        "_value",
        "deadline",
        "expected_s",
        "id",
        "method",
        "ranks",
        "sent",
    )

    def __init__(
        self,
        table: CallTable,
        call_id: int,
        method: str,
        ranks: Sequence[int],
        single: bool,
        deadline: float | None,
        aggregators: Sequence[Aggregator],
        expected_s: float = 0.0,
    ) -> None:
        self.id = call_id
        self.method = method
        self.deadline = deadline
        """``time.monotonic()`` at which it ends with RPCTimeoutError; None: never."""
        self.ranks = ranks
        """Those that answer."""
        self.sent = True
        """It is on its way to the workers (else it waits for room)."""
        self.expected_s = expected_s
        """It may take so long, in seconds, before anybody says that it is late."""
        self._table = table
        self._single = single
        self._aggregators = aggregators
        self._missing = len(ranks)
        self._answers: dict[int, Any] = {}
        self._failures: Sequence[FailureReport] = ()
        self._callbacks: list[Callable[[Call], object]] | None = None
        self._broken: BaseException | None = None
        self._asked = False
        self._held: list[Held] | None = None
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not. Takes in what has arrived; never blocks."""
        return self._done or self._table.poll(self) is True

    @property
    def done_already(self) -> bool:
        """Whether it had ended when somebody last looked."""
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call's end and return what it gave, or raise what it failed with.

        Args:
            timeout: seconds to wait for it now. When they are over a plain TimeoutError is raised, the call goes on and
                may be asked again. The call's own deadline raises RPCTimeoutError and ends it; an answer that was late
                but here before anybody asked counts.

        """
        if not self._done:
            self._table.wait(self, timeout)
        self._held = None
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # else: error -> traceback -> this frame -> call -> error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like :meth:`result`, but returns the exception, or None. CancelledError is raised."""
        if not self._done:
            self._table.wait(self, timeout)
        if isinstance(self._error, CancelledError):
            raise self._error
        return self._error

    def cancel(self) -> bool:
        """Give the call up: it ends with ``concurrent.futures.CancelledError``. False if it has ended already.

        One that waits for room is never sent. One that was sent is run all the same, since every rank runs every call;
        its answer is dropped when it comes.
        """
        return not self._done and self._table.cancel(self)

    def cancelled(self) -> bool:
        """Whether :meth:`cancel` ended it."""
        return self._done and isinstance(self._error, CancelledError)

    def add_done_callback(self, callback: Callable[[Call], object]) -> None:
        """Call ``callback(call)`` exactly once, when the call has ended; at once, here, if it has ended already.

        Callbacks run in the order in which the calls end, in the keeper's thread, which holds no lock then: they may
        use the executor. What they raise is logged.
        """
        if not self._table.watch(self, callback):
            run_callback(callback, self)

    def __await__(self) -> Generator[Any, None, Any]:
        """``await call`` in any asyncio loop. Cancelling what awaits it cancels the call (``asyncio.shield`` not)."""
        import asyncio  # here: the layer alone has no use for it

        waiting = asyncio.get_running_loop().create_future()
        self.add_done_callback(_Teller(waiting))
        waiting.add_done_callback(self._cancel_with)
        return (yield from waiting)

    def _cancel_with(self, waiting: asyncio.Future[Any]) -> None:
        if waiting.cancelled():
            self.cancel()

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self._done else "running"
        return f"<Call {self.id} {self.method} {state}>"

    # For the table, with its lock held.

    def _hold(self, held: Held) -> None:
        if self._held is None:
            self._held = [held]
        else:
            self._held.append(held)

    def _complete(self) -> None:
        """All answers are here and nothing failed."""
        answers = self._answers
        if self._broken is not None:
            self._error = _raisable(self._broken)
            self._end()
            return
        try:
            if self._single and not self._aggregators:
                self._value = answers[self.ranks[0]]
            elif self._single:
                self._value = self._fold(answers)
            else:
                self._value = [answers[rank] for rank in self.ranks]
        except Exception as exc:  # noqa: BLE001  an aggregator's own mistake is its caller's to see
            self._error = _raisable(exc)
        except BaseException as exc:  # of a signal handler, say: it goes on, and the call must end all the same
            self._error = exc
            self._end()
            raise
        self._end()

    def _fold(self, answers: dict[int, Any]) -> Any:
        output_rank = self._table.output_rank
        with self._table.aggregating():
            for aggregator in self._aggregators:
                answers[output_rank] = aggregator.aggregate([answers[rank] for rank in self.ranks], output_rank)
        return answers[output_rank]

    def _fail(self, error: BaseException, report: FailureReport | None = None) -> None:
        self._error = error
        if report is not None:
            for aggregator in self._aggregators:
                try:
                    with self._table.aggregating():
                        aggregator.failed(self._answers, report)
                except Exception as exc:  # noqa: BLE001  must not hide the failure itself
                    error.add_note(f"{type(aggregator).__name__}.failed raised {exc!r}")
        self._held = None
        self._end()

    def _end(self) -> None:
        self._done = True
        self._answers = {}
        self._failures = ()
        self._aggregators = ()
        if self._callbacks is not None:
            self._table.callbacks_due(self)


def _raisable(error: BaseException) -> BaseException:
    """``error``, or what stands for it: an ``await`` takes no StopIteration, which would mean its own end."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} was raised where the answers were put together")
    wrapped.__cause__ = error
    return wrapped


def run_callback(callback: Callable[[Call], object], call: Call) -> None:
    """Call it; what it raises is logged."""
    try:
        callback(call)
    except Exception:
        log.exception("a callback of call %d (%s) failed", call.id, call.method)


class _Teller:
    """Tells an asyncio future, in its own loop, how a call has ended."""

    def __init__(self, waiting: asyncio.Future[Any]) -> None:
        self._waiting = waiting

    def __call__(self, call: Call) -> None:
        try:
            self._waiting.get_loop().call_soon_threadsafe(self._tell, call)
        except RuntimeError:  # the loop was closed meanwhile: nobody awaits it any more
            log.debug("call %d ended after the loop that awaited it", call.id)

    def _tell(self, call: Call) -> None:
        if self._waiting.done():
            return
        if call.cancelled():
            self._waiting.cancel()
            return
        error = call.exception(0.0)
        if error is not None:
            self._waiting.set_exception(error)
        else:
            self._waiting.set_result(call.result(0.0))
