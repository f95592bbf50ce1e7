"""Clients that outlive their engine: when processes die, all are started again and the requests go on.

::

    supervisor's thread    the loop (RecoveringEngineClient), or this thread, under the lock (RecoveringSyncClient)
    death  ------------->  what the engine said last is taken in; Healing decides
                           a thread: old processes gone -> back-off -> new processes ready
                           requests are sent again; tokens go on: consumers see a pause

What is decided, and the journal, are in ``engine.healing``; here is how each of the two clients waits. While it
recovers, new requests are taken and wait, and calls raise EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

from drumline.config import EngineConfig
from drumline.engine.client import AsyncEngineClient, EngineClient, SyncEngineClient
from drumline.engine.front import FrontChannel
from drumline.engine.healing import Healing, Restarting
from drumline.engine.launch import EngineProcesses
from drumline.engine.protocol import Abort, EngineInfo, EngineRequest, RequestOutput
from drumline.engine.recovery import Limits
from drumline.errors import EngineDeadError, FailureReport, RequestFailedError, StartupError

log = logging.getLogger(__name__)


class _Renewing(EngineClient):
    """What both have in common. ``failure`` is None until it gives up."""

    def __init__(self, config: EngineConfig, limits: Limits, *, role: str) -> None:
        super().__init__(config, role=role)
        self._healing = Healing(self, limits)
        self.recoveries = self._healing.tally

    def _make_processes(self, before: EngineProcesses | None = None, *, trusted: bool = False) -> EngineProcesses:
        return EngineProcesses(
            self.config,
            role=self._role,
            on_failure=self._on_failure,
            keep=True,
            before=before,
            trusted=trusted,
            waits=self._waits,
        )

    @property
    def failure(self) -> FailureReport | None:
        """Root cause of the last death, once it has given up (or the first start failed)."""
        return self._healing.final or (None if self._healing.started else self._processes.failure)

    def renounce_recovery(self, why: str) -> None:
        """The next death is final; ``why`` in words for the log."""
        self._healing.renounce(why)

    def resend(self, message: EngineRequest | Abort) -> None:
        """See ``Host``."""
        raise NotImplementedError

    def end_failed(self, output: RequestOutput) -> None:
        """See ``Host``."""
        raise NotImplementedError

    def renew(self, restart: Restarting, after_s: float) -> None:
        """See ``Host``."""
        raise NotImplementedError

    def is_over(self) -> None:
        """See ``Host``."""
        raise NotImplementedError

    def _end_processes(self) -> None:
        while True:
            processes = self._processes
            processes.close()
            if processes is self._processes:  # a restart looks at the end after it has set them
                return

    def _ready_channel(self) -> FrontChannel:
        healing = self._healing
        if healing.serving and self._channel is not None and not healing.end.is_set():
            return self._channel  # also while its death is not known yet: what goes into it now is sent again
        if healing.restart is not None and healing.final is None and not healing.end.is_set():
            raise EngineDeadError(healing.restart.report)
        return super()._ready_channel()

    def _check_open(self) -> None:
        """Raise if no request can be taken: not started, dead for good, shut down."""
        healing = self._healing
        if not healing.started or healing.final is not None or healing.end.is_set():
            self._ready_channel()  # says why not
            raise EngineDeadError(FailureReport(role=self._role, what="was shut down"))

    def _drop_channel(self) -> None:
        """The dead engine's. In the thread that renews, while nobody else uses it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _renew_now(self, restart: Restarting, after_s: float) -> FailureReport | None:
        """Old processes end, new ones start; blocks. A report of what failed, or None (also if it was shut down)."""
        try:
            self._start_anew(restart, after_s)
        except StartupError as error:
            return error.report
        except Exception as error:
            log.exception("the engine could not be started again")
            return FailureReport(role=self._role, phase="restart", what="exception", message=str(error))
        return None

    def _start_anew(self, restart: Restarting, after_s: float) -> None:
        end = self._healing.end
        self._processes.shutdown()
        self._drop_channel()
        restart.phase("old processes gone")
        if after_s:
            end.wait(after_s)
            restart.phase("back-off")
        self._processes = self._make_processes(self._processes, trusted=restart.trusted)
        if end.is_set():
            return
        self._start()
        restart.add(self._processes.start_seconds())


class RecoveringEngineClient(_Renewing, AsyncEngineClient):
    """For an event loop. :meth:`wait_dead` waits until it gives up."""

    def __init__(self, config: EngineConfig, limits: Limits, *, role: str = "APIServer_0") -> None:
        super().__init__(config, limits, role=role)
        self._task: asyncio.Task[None] | None = None

    # life

    async def start(self) -> EngineInfo:
        """Start all processes. StartupError if one fails: only an engine that was ready is started again."""
        info = await super().start()
        self._healing.began()
        self._look_again()
        return info

    async def shutdown(self) -> None:
        """End all processes (ladder), also those of a restart that is under way. Idempotent."""
        self._healing.end.set()
        await asyncio.to_thread(self._end_processes)
        if self._task is not None:
            await asyncio.wait({self._task})  # it finds that all is over
        self._let_go()

    def shutdown_now(self) -> None:
        """The same from any thread and outside of the loop, which may be closed. Blocks."""
        self._healing.end.set()
        self._end_processes()
        super().shutdown_now()

    def _let_go(self) -> None:
        if self._task is None or self._task.done():
            super()._let_go()
        else:  # the channel belongs to the thread that starts
            self._unwatch()
            self._end_all()

    # requests

    def _submit(self, request: EngineRequest) -> None:
        self._check_open()
        if self._healing.submit(request):
            self._send(request)

    def _withdraw(self, request_ids: Sequence[str]) -> None:
        if self._healing.serving:
            self._send(Abort(request_ids=list(request_ids)))
        self._healing.forget(request_ids)

    def _drop(self, request_id: str) -> None:
        if self._healing.has(request_id):
            super()._drop(request_id)
            self._healing.forget((request_id,))

    def _note(self, output: RequestOutput) -> None:
        self._healing.note(output)

    def resend(self, message: EngineRequest | Abort) -> None:
        """See ``Host``."""
        self._send(message)

    def end_failed(self, output: RequestOutput) -> None:
        """See ``Host``."""
        self._end_stream(output.request_id, "error", output.message, output.stop_reason)

    # death

    def _on_dead(self) -> None:
        self._look_again()  # a start that fails is told by its exception

    def _look_again(self) -> None:
        """If the engine that serves is dead, recover."""
        report = self._processes.failure
        if report is None or not self._healing.serving or self._healing.end.is_set():
            return
        self._take_in()  # what the engine said before it died is true
        self._healing.serving = False
        self._unwatch()
        self._end_calls()
        self._healing.lost(report)

    def is_over(self) -> None:
        """See ``Host``."""
        self._dead.set()
        self._end_all()
        threading.Thread(target=self._end_processes, name="drumline-cleanup", daemon=True).start()

    def renew(self, restart: Restarting, after_s: float) -> None:
        """See ``Host``."""
        assert self._loop is not None
        self._task = self._loop.create_task(self._start_again(restart, after_s))

    async def _start_again(self, restart: Restarting, after_s: float) -> None:
        report = await asyncio.to_thread(self._renew_now, restart, after_s)
        if self._healing.end.is_set():
            return
        if report is None:
            assert self._channel is not None
            assert self._loop is not None
            self._watched_fd = self._channel.fd
            self._loop.add_reader(self._watched_fd, self._take_in)
        self._healing.renewed(report)
        self._look_again()  # it may have died before anybody watched


class RecoveringSyncClient(_Renewing, SyncEngineClient):
    """For plain programs. It recovers also while no thread waits for anything."""

    def __init__(self, config: EngineConfig, limits: Limits, *, role: str = "LLM") -> None:
        super().__init__(config, limits, role=role)
        self._thread: threading.Thread | None = None

    # life

    def start(self) -> EngineInfo:
        """Start all processes and wait until they are ready. StartupError: only what was ready is started again."""
        info = super().start()
        with self._lock:
            self._healing.began()
            self._look_again()
        return info

    def shutdown(self) -> None:
        """End all processes (ladder), also those of a restart that is under way. Idempotent."""
        self._healing.end.set()
        self._end_processes()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()  # what it waits for is gone
        super().shutdown()

    # requests: the lock is held

    def _submit(self, request: EngineRequest) -> None:
        self._check_open()
        try:
            now = self._healing.submit(request)
        except RequestFailedError as error:  # alone: it is one of many that a program sends at once
            self.end_failed(
                RequestOutput(
                    request_id=request.request_id,
                    first_index=0,
                    token_ids=[],
                    finish_reason="error",
                    stop_reason=error.reason,
                    message=str(error),
                )
            )
            return
        if now:
            self._send(request)

    def _withdraw(self, request_ids: Sequence[str]) -> None:
        self._check_open()
        if self._healing.serving:
            self._send(Abort(request_ids=list(request_ids)))
        self._healing.forget(request_ids)

    def _note(self, output: RequestOutput) -> None:
        self._healing.note(output)

    def resend(self, message: EngineRequest | Abort) -> None:
        """See ``Host``."""
        self._send(message)

    def end_failed(self, output: RequestOutput) -> None:
        """See ``Host``."""
        self._outputs.append(output)
        self._ring()

    def _open_channel(self) -> FrontChannel | None:
        healing = self._healing
        if healing.started and not healing.serving and healing.final is None and not healing.end.is_set():
            return None
        return super()._open_channel()

    # death

    def _on_failure(self, report: FailureReport) -> None:
        with self._lock:
            self._look_again()
        super()._on_failure(report)

    def _look_again(self) -> None:
        """If the engine that serves is dead, recover."""
        report = self._processes.failure
        if report is None or not self._healing.serving or self._healing.end.is_set():
            return
        assert self._channel is not None
        self._take_in(self._channel)  # what the engine said before it died is true
        self._healing.serving = False
        self._lose_calls(report)
        self._healing.lost(report)

    def is_over(self) -> None:
        """See ``Host``."""
        self._ring()
        threading.Thread(target=self._end_processes, name="drumline-cleanup", daemon=True).start()

    def renew(self, restart: Restarting, after_s: float) -> None:
        """See ``Host``."""
        self._thread = threading.Thread(
            target=self._start_again, args=(restart, after_s), name="drumline-recovery", daemon=True
        )
        self._thread.start()

    def _start_again(self, restart: Restarting, after_s: float) -> None:
        report = self._renew_now(restart, after_s)
        with self._lock:
            if self._healing.end.is_set():
                return
            self._healing.renewed(report)
            if self._waiting_threads:
                self._processes.expect()
            self._look_again()  # it may have died before anybody listened
            self._ring()

    def _drop_channel(self) -> None:
        with self._lock:
            super()._drop_channel()
            self._torn = False


__all__ = ["RecoveringEngineClient", "RecoveringSyncClient"]
