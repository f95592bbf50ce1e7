"""The output thread of a worker: outputs that are not finished when their method returns are finished and sent by it.

A method may return an object with ``get_output()`` (:class:`AsyncOutput`): on a GPU, say, one that waits for the copy
of the sampled tokens. The step loop then goes on to the next call at once, and the output thread calls
``get_output()``, encodes what it gives and sends it. Before its first output it has the worker set the device
(``init_output_thread``), which belongs to a thread.

**One writer at a time.** Answers and the ends of calls must leave in the order of the calls, and the answer ring has
one writer. So while the output thread owes anything, *everything* goes through it, ready answers too; when it owes
nothing the loop's thread writes the ring itself. Who owes what is two counters with one writer each: ``given`` (loop)
and ``finished`` (output thread, after its last touch of the ring). The loop may write iff it sees them equal, and then
only it can make them differ.

Why not always by the output thread: handing over costs two switches of threads, which for an answer that is there
already is more than encoding and sending it. Round trip of a call to 2 workers on 2 cores, a StepOutput of 256 rows,
median us: sent by the loop 80, sent by the output thread 134. An answer for which the ring has no room is handed over
all the same, so that the loop does not stand still because nobody takes answers. A ready answer is encoded by the loop
in any case, and copied if it is handed over: the next call may change what was returned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

log = logging.getLogger(__name__)

MOST_OWED = 256
"""How many outputs the thread may owe before the loop waits for it."""


@runtime_checkable
class AsyncOutput(Protocol):
    """What a worker method may return instead of its output."""

    def get_output(self) -> Any:
        """The output; waits for what it needs. Called once, in the output thread, in the order of the calls.

        What it raises is a failure of its call. Not called on ranks that are not to answer.
        """


def is_async(value: Any) -> bool:
    """Whether this is an :class:`AsyncOutput`."""
    return hasattr(value, "get_output")


class OutputThread:
    """Does what it is given, in order, in a thread of its own. Given by one thread only."""

    def __init__(self, prepare: Callable[[], None], told: Callable[[], None] = lambda: None) -> None:
        """Make one without a thread; the first :meth:`give` starts it.

        Args:
            prepare: called first in the thread; what it raises every :meth:`give`'s ``act`` is told.
            told: called after each output while :attr:`awaited`.

        """
        self._prepare = prepare
        self._told = told
        self.awaited = False
        """The caller waits for the thread to owe less."""
        self._given = 0
        self._finished = 0
        self._jobs: SimpleQueue[Callable[[BaseException | None], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """It owes nothing: the caller may write the ring. Only for the thread that gives."""
        return self._given == self._finished

    @property
    def full(self) -> bool:
        """It owes so much that the caller should wait (``told`` says when to look again)."""
        return self._given - self._finished >= MOST_OWED

    def give(self, act: Callable[[BaseException | None], None]) -> None:
        """Call ``act(error)`` in the thread; ``error``: why the thread could not be prepared, if so."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="drumline-output", daemon=True)
            thread.start()
            self._thread = thread
        self._given += 1
        self._jobs.put(act)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after what it owes. False if it does not within the time; it is left alone then."""
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._prepare()
        except BaseException as exc:  # noqa: BLE001  a failure of every call whose output comes here
            error = exc
        while self._next(error):
            pass

    def _next(self, error: BaseException | None) -> bool:
        """One job, in a frame of its own: its output is garbage before the next one is waited for."""
        act = self._jobs.get()
        if act is None:
            return False
        try:
            act(error)
        except BaseException:
            log.exception("the output thread failed")
        del act
        self._finished += 1
        if self.awaited:
            self._told()
        return True
