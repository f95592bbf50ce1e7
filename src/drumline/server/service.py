"""State that all routes share: which phase the server is in, the engine, the text room, and who is being served.

The HTTP port answers from the first moment, long before there is an engine: ``engine`` and ``text`` are None until
then and routes that need them say 503. States only go up: starting, ready, draining, stopping or failed; but for
``recovering``, which the engine's client knows of.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import drumline
from drumline.engine.protocol import AsyncEngine, EngineInfo, ProcessState
from drumline.processes.live import LiveReport, look_at, own_stacks
from drumline.server.errors import ApiError, unavailable
from drumline.server.metrics import Metrics
from drumline.server.schema import ProcessPhase, StartupState

if TYPE_CHECKING:
    from drumline.server.prompts import TextRoom

RETRY_S = 5
"""When to come back to a server that ends, in seconds: whatever runs it may have started another one by then."""
RECOVERY_RETRY_S = 2
"""``Retry-After`` while the engine is started again."""


@dataclass(frozen=True)
class Start:
    """How long the start took."""

    phases: dict[str, float]
    """Seconds by phase, in their order (``engine.starts``)."""
    whole_s: float
    """From the command to the first request that would be served, by the kernel's clock of processes."""


class Service:
    """One server. Everything here happens on one event loop."""

    def __init__(self, names: Sequence[str], *, root: str = "", api_keys: Sequence[str] = ()) -> None:
        self.names = list(names)
        """Names of the served model; the first is the one that answers carry."""
        self.root = root
        self.api_keys = tuple(api_keys)
        self.engine: AsyncEngine | None = None
        self.text: TextRoom | None = None
        self.local: str | None = None
        """Set if only this machine can reach the server: the host that it was bound to."""
        self.created = int(time.time())
        self.fingerprint: str | None = None
        """``system_fingerprint`` of answers: with the same one, the same seed gives the same tokens."""
        self.metrics = Metrics(self)
        self.probes = 0
        """How often the server was asked whether it serves, and does."""
        self.last_probe = 0.0
        """time.monotonic() of the last one."""
        self.admitted: set[asyncio.Task[object]] = set()
        """Requests that are being served: read in full, and not answered in full."""
        self.leaving = False
        """Clients had better close their connections: the server is about to end."""
        self.start: Start | None = None
        """Once it is ready."""
        self.phase = "starting"
        self.message = ""
        self._status = "starting"
        self._refusing = False
        self._ended: asyncio.Future[ApiError] | None = None
        self._began = time.monotonic() - age_of_process()
        self._live: asyncio.Future[LiveReport] | None = None
        self._seen: dict[str, tuple[str, float]] = {}

    @property
    def status(self) -> str:
        """``starting``, ``ready``, ``draining``, ``recovering``, ``failed`` or ``stopping``.

        An engine that died makes ``ready`` and ``draining`` ``recovering`` if it is started again, else ``failed``.
        """
        if self._status in ("ready", "draining") and self.engine is not None:
            if self.engine.failure is not None:
                return "failed"
            if self.engine.recoveries is not None and self.engine.recoveries.active:
                return "recovering"
        return self._status

    @property
    def draining(self) -> bool:
        """It ends when the running requests have, whatever :attr:`status` says of the engine meanwhile."""
        return self._status == "draining"

    @property
    def info(self) -> EngineInfo:
        """The ready engine's. ApiError 503 before that."""
        self.require_ready()
        assert self.engine is not None
        assert self.engine.info is not None
        return self.engine.info

    def ready(self, engine: AsyncEngine, text: TextRoom) -> None:
        """From now on requests are served."""
        self.engine, self.text = engine, text
        if engine.info is not None:
            self.fingerprint = f"drumline-{drumline.__version__}-{engine.info.dtype}"
        self.phase = self._status = "ready"

    def require_ready(self, *, admitted: bool = False) -> tuple[AsyncEngine, TextRoom]:
        """Engine and text room, or ApiError 503 that says why not. ``admitted``: for a request that is."""
        status = self.status
        if self.draining and self._refusing and not admitted and status != "failed":
            raise unavailable("The server is shutting down.", retry_after=RETRY_S)
        if status == "starting":
            raise unavailable(f"The model is not ready yet ({self.phase}); see /startupz.", retry_after=1)
        if status == "recovering" and not admitted:  # one that is waits with those that run
            raise unavailable(self.failure(), retry_after=RECOVERY_RETRY_S)
        if status == "stopping":
            raise unavailable("The server is shutting down.", retry_after=RETRY_S)
        if status == "failed" or self.engine is None or self.text is None:
            raise unavailable(self.failure() or "The server failed.")
        return self.engine, self.text

    def admit(self) -> None:
        """The request of this task was read in full: a drain waits for it. ApiError 503 if it comes too late."""
        self.require_ready()
        task = asyncio.current_task()
        assert task is not None
        self.admitted.add(task)
        task.add_done_callback(self.admitted.discard)

    def probe(self) -> None:
        """ApiError 503 if somebody who sends requests had better send them elsewhere."""
        self.require_ready()
        if self.draining:
            raise unavailable("The server is shutting down.", retry_after=RETRY_S)
        self.probes += 1
        self.last_probe = time.monotonic()

    def drain(self) -> None:
        """Not ready any more, but requests are served until :meth:`refuse`."""
        self.phase = self._status = "draining"
        self.leaving = True

    def refuse(self) -> None:
        """While draining: admit nobody any more."""
        self._refusing = True

    def require_progress(self) -> None:
        """ApiError 503 if requests would wait for ranks that make no progress."""
        if self.engine is not None and self.engine.stalling:
            raise unavailable(f"The engine stands still: {self.engine.stalling}", retry_after=1)

    async def live_report(self, cause: str) -> LiveReport:
        """What every process is doing. Who asks while one is being made gets that one."""
        if self._live is None:
            self._live = asyncio.ensure_future(asyncio.to_thread(self._look, cause))
            self._live.add_done_callback(lambda _: setattr(self, "_live", None))
        return await asyncio.shield(self._live)

    def _look(self, cause: str) -> LiveReport:
        engine = self.engine
        if engine is not None:
            return engine.live_report(cause)
        mine = look_at("APIServer_0", os.getpid(), doing=self.phase)
        mine.stacks = own_stacks()
        return LiveReport(cause=cause, processes=[mine])

    def failure(self) -> str:
        """One line on what broke; empty if nothing did."""
        if self.engine is not None and self.engine.failure is not None:
            return f"The engine died: {self.engine.failure.headline()}"
        if self.status == "recovering" and self.engine is not None and self.engine.recoveries is not None:
            return f"The engine died and is being started again: {self.engine.recoveries.reason}"
        return self.message

    def ended(self) -> asyncio.Future[ApiError]:
        """Completes when every request in flight has to end, with what to tell its client."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def stop(self, error: ApiError | None = None, *, failed: str = "") -> None:
        """Serve nobody any more: new requests get 503, those in flight end with ``error``."""
        self._status = "failed" if failed else "stopping"
        self.phase = self._status
        self.leaving = True
        self.message = failed
        if not self.ended().done():
            self.ended().set_result(error or unavailable(failed or "The server is shutting down."))

    def set_phase(self, phase: str) -> None:
        """What the command itself is doing, for ``/startupz``."""
        self.phase = phase

    def processes(self) -> Sequence[ProcessState]:
        """All processes of the server; before there is an engine this one alone."""
        if self.engine is None:
            return [ProcessState(name="APIServer_0", pid=os.getpid(), phase=self.phase)]
        return self.engine.processes()

    def startup_state(self) -> StartupState:
        """Answer of ``/startupz``."""
        now = time.monotonic()
        rows = []
        for process in self.processes():
            name, phase = process.name, process.phase
            # A rank's load percentage is progress inside one phase.
            if self._seen.get(name, ("", 0.0))[0] != phase.partition(" ")[0]:
                self._seen[name] = (phase.partition(" ")[0], now if self._seen else self._began)
            since = self._seen[name][1]
            seconds = round(now - since, 1)
            rows.append(ProcessPhase(name=name, pid=process.pid, rank=process.rank, phase=phase, seconds=seconds))
        seconds = round(now - self._began, 1)
        message = self.failure()
        return StartupState(status=self.status, phase=self.phase, seconds=seconds, processes=rows, message=message)


def age_of_process() -> float:
    """Seconds since this process was started by its parent."""
    try:
        with open("/proc/self/stat", "rb") as file:
            started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0
