"""``drumline serve`` from its first to its last moment.

::

    1  bind the port (a used one is a usage error), note signals
    2  HTTP answers: /livez, /startupz; everything else 503
    3  resolve the model to a folder (the embedded one is converted once, in a process of its own)
    4  start the engine; read the tokenizer meanwhile
    5  ready: tables, listeners, URL, curl line
    6  the end: a signal, or the engine's death, or a failed start; on SIGTERM what runs may finish (drain.py)
    7  requests in flight get an error and end, the engine's processes are ended, the port is closed
    8  the last word on the console, if something broke, and the exit code

Signal handlers only note. The first signal starts 6; the second one ends everything at once (clients of a drain are
told first). Nothing here runs periodically once the server is ready: an idle API server sleeps in epoll.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil
import uvloop

from drumline.config import EngineConfig, ServerConfig
from drumline.engine.checks import check_machine, check_model
from drumline.engine.protocol import AsyncEngine, EngineInfo
from drumline.engine.starts import FrontMarks
from drumline.errors import ConfigError, DrumlineError, ExitCode, FailedError, FailureReport, remedy
from drumline.platforms import device_table
from drumline.processes.logs import DATE_FORMAT, LOG_FORMAT, console_as_stderr
from drumline.processes.titles import api_server_name, set_title
from drumline.server import console
from drumline.server.app import create_app
from drumline.server.drain import drain
from drumline.server.errors import ApiError, unavailable
from drumline.server.prompts import TextFiles, TextRoom
from drumline.server.service import RETRY_S, Service, Start, age_of_process
from drumline.server.sockets import bind, is_loopback, listeners, url
from drumline.server.uvicorn_server import HttpServer

log = logging.getLogger(__name__)

PROGRESS_S = 0.2
LAST_ANSWERS_S = 1.0
"""How long requests in flight have to tell their clients that it is over."""
CUT_SHORT_S = 0.2
"""The same where a drain is cut short by a second signal."""
LADDER_SLACK_S = 3.0
THREADS = "drumline-work"
"""Names of threads that read files and tokenise begin with it."""
LAST_THREADS_S = 0.5
"""How long they may go on when all else has ended."""


def serve(config: EngineConfig, server: ServerConfig, began: float | None = None) -> int:
    """Serve until a signal or a failure; the exit code. ConfigError if it cannot even begin.

    ``began``: time.monotonic() when the command's first line ran, if this is a command.
    """
    with console_as_stderr():
        return _serve(config, server, began)


def _serve(config: EngineConfig, server: ServerConfig, began: float | None) -> int:
    now = time.monotonic()
    marks = FrontMarks(now - age_of_process(), began or now)
    marks.end("imports of the command", now)
    try:
        config = check_machine(config, device_table(config.platform))
    except TypeError as error:
        raise ConfigError(str(error)) from error
    signals = EarlySignals()
    reports = signal.signal(signal.SIGUSR1, lambda number, frame: None)  # which would end us before the loop takes it
    sockets = bind(server.host, server.port)
    try:
        # Tokenising runs in threads of ours; the library's own would only be more.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        set_title(api_server_name())
        _configure_logging(config.process.log_level)
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        threads = ThreadPoolExecutor(thread_name_prefix=THREADS)
        runner.get_loop().set_default_executor(threads)
        try:
            return runner.run(Command(config, server, sockets, signals, marks).run())
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            if not wait_for_threads(LAST_THREADS_S):
                runner.close()  # which would wait for them
    finally:
        for sock in sockets:
            sock.close()
        signals.restore()
        signal.signal(signal.SIGUSR1, reports)


def _configure_logging(level: str) -> None:
    """Our lines and everybody's warnings, on stderr with the prefix that all processes use."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"({api_server_name()} pid=%(process)d) {LOG_FORMAT}", DATE_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("drumline").setLevel(level.upper())


class EarlySignals:
    """Notes SIGINT, SIGTERM and SIGHUP from the first moment, until the event loop takes over."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            wanted.append(signal.SIGHUP)
        self.numbers = wanted
        self._before = {number: signal.signal(number, lambda got, _: self.seen.append(got)) for number in wanted}

    def restore(self) -> None:
        """Put back what was there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Why the command ends."""

    code: ExitCode
    failure: FailureReport | None = None
    message: str = ""
    """For errors without a report: what to print."""


class Command:
    """One run of ``drumline serve``."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        sockets: Sequence[socket.socket],
        signals: EarlySignals,
        marks: FrontMarks,
    ) -> None:
        self._config = config
        self._marks = marks
        self._server = server
        self._sockets = sockets
        self._early = signals
        names = config.model.served_model_name or (config.model.model or default_name(),)
        self.service = Service(names, root=config.model.model or names[0], api_keys=server.api_key)
        if all(is_loopback(sock.getsockname()[0]) for sock in sockets):
            self.service.local = server.host
        self._engine: AsyncEngine | None = None
        self._http = HttpServer(create_app(self.service))
        self._cut_short = False
        self._spared = children_of_this_process()
        """What a shell that became this process (``exec``) had started: not ours."""
        self._reports: set[asyncio.Future[None]] = set()

    async def run(self) -> int:
        """Steps 2 to 8; the exit code."""
        self._take_signals()
        serving = asyncio.create_task(self._http.run_on(self._sockets))
        self._marks.end("listening", time.monotonic())
        console.say(f"drumline listens on {url(self._sockets[0])} (not ready yet; /startupz tells the phase)")
        if not self._server.api_key and self.service.local is None:
            console.say("Everybody who reaches this port may use the model: there is no --api-key.")
        try:
            outcome = await self._until_the_end()
        except Exception as error:  # noqa: BLE001 - a fault of ours; the engine must be ended all the same
            outcome = Outcome(code=ExitCode.INTERNAL, message=traceback.format_exc())
            if advice := remedy(error):
                outcome = Outcome(code=ExitCode.START_FAILED, message=f"drumline serve: error: {error}: {advice}")
        await self._end(outcome)
        self._http.stop()
        await serving
        return self._last_word(outcome)

    # ------------------------------------------------------------------------------------------------------ signals

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        self._signal: asyncio.Future[int] = loop.create_future()
        for number in self._early.numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        for seen in self._early.seen:
            self._on_signal(seen)
        loop.add_signal_handler(signal.SIGUSR1, self._on_report_wanted)

    def _on_report_wanted(self) -> None:
        """SIGUSR1: what every process is doing, into a file beside the logs."""
        task = asyncio.ensure_future(self._report())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _report(self) -> None:
        try:
            live = await self.service.live_report("asked for by SIGUSR1")
            folder = self._engine.report_folder if self._engine is not None else None
            file = await asyncio.to_thread(live.write, folder, "report") if folder is not None else ""
        except Exception:
            log.exception("no report could be made")
            return
        console.say(f"{live.summary()}\nstacks of all threads: {file}" if file else live.text())

    def _on_signal(self, number: int) -> None:
        if self._signal.done():
            self._at_once()
            return
        self._signal.set_result(number)
        set_title(api_server_name(), ending=True)  # a signal for all processes is this one's to act upon
        if not self._drains():
            console.say(f"{signal.Signals(number).name}: ending (once more: at once)")

    def _drains(self) -> bool:
        """Whether the signal that came lets running requests finish."""
        return self._signal.result() == signal.SIGTERM and self.service.status in ("ready", "recovering")

    def _at_once(self) -> None:
        """The second signal, or a later one."""
        self._cut_short = True
        if not self.service.draining:
            kill_everything(self._spared)
        self.service.stop(unavailable("The server is shutting down.", retry_after=RETRY_S))
        asyncio.get_running_loop().call_later(CUT_SHORT_S, kill_everything, self._spared)

    # -------------------------------------------------------------------------------------------------------- start

    async def _until_the_end(self) -> Outcome:
        start = asyncio.create_task(self._start())
        try:
            await first(start, self._signal)
            if not start.done() and not self._drains():
                return self._signalled()
            engine = await start
        except ConfigError as e:
            if advice := remedy(e):
                return Outcome(code=ExitCode.START_FAILED, message=f"drumline serve: error: {e}; {advice}")
            return Outcome(code=ExitCode.USAGE, message=f"drumline serve: error: {e}")
        except FailedError as e:
            return Outcome(code=ExitCode.START_FAILED, failure=e.report)
        except DrumlineError as e:
            return Outcome(code=ExitCode.START_FAILED, message=f"drumline serve: error: {e}")
        finally:
            start.cancel()
            await asyncio.wait({start})
        dead = asyncio.create_task(engine.wait_dead())
        try:
            await first(dead, self._signal)
            if not dead.done() and self._drains():
                await drain(self._server, self.service, self._http, dead, console.say)
            if dead.done():
                return Outcome(code=dead.result().exit_code, failure=dead.result())
            return self._signalled()
        finally:
            dead.cancel()
            await asyncio.wait({dead})

    def _signalled(self) -> Outcome:
        interrupted = self._cut_short or self._signal.result() == signal.SIGINT
        return Outcome(code=ExitCode.INTERRUPTED if interrupted else ExitCode.OK)

    async def _start(self) -> AsyncEngine:
        """Steps 3 to 5."""
        from drumline.server.models import resolve

        self.service.set_phase("resolving the model")
        config = check_model(await resolve(self._config, self.service.set_phase))
        self.service.set_phase("starting the engine")
        self._engine = self.service.engine = make_engine(config, self._server)
        self._marks.end("model folder", time.monotonic())
        info, files = await self._start_engine(
            asyncio.create_task(self._engine.start()),
            asyncio.create_task(asyncio.to_thread(TextFiles.read, config)),
            asyncio.create_task(self._show_progress()),
        )
        self.service.ready(self._engine, TextRoom(files, info, seed=config.model.seed))
        phases = self._marks.ready(self._engine.start_seconds(), time.monotonic())
        self.service.start = Start(phases, age_of_process())
        await self._announce(info)
        gc.collect()
        gc.freeze()
        return self._engine

    async def _start_engine(
        self, starting: asyncio.Task[EngineInfo], reading: asyncio.Task[TextFiles], showing: asyncio.Task[None]
    ) -> tuple[EngineInfo, TextFiles]:
        """Both results; the first error ends the other too."""
        try:
            await asyncio.wait({starting, reading}, return_when=asyncio.FIRST_EXCEPTION)
            if reading.done():
                # A tokenizer that cannot be used is known long before the engine is ready.
                reading.result()
            return await starting, await reading
        finally:
            for task in (starting, reading, showing):
                task.cancel()
            await asyncio.gather(starting, reading, showing, return_exceptions=True)

    async def _show_progress(self) -> None:
        progress = console.Progress()
        while True:
            # Also lets /startupz know when a phase began.
            self.service.startup_state()
            progress.show(self.service.processes())
            await asyncio.sleep(PROGRESS_S)

    async def _announce(self, info: EngineInfo) -> None:
        processes = self.service.processes()
        memory, found = await asyncio.to_thread(
            lambda: (proportional_memory(row.pid for row in processes), listeners([(p.name, p.pid) for p in processes]))
        )
        console.tables(processes, memory, found, info)
        if self.service.start is not None:
            console.start(self.service.start.phases, self.service.start.whole_s)
        text = self.service.text
        chat = text is not None and text.can_chat
        speaks = text is not None and text.tokenizer is not None
        address = url(self._sockets[0])
        console.invitation(address, self.service.names[0], chat=chat, text=speaks, key=bool(self._server.api_key))

    # ---------------------------------------------------------------------------------------------------------- end

    async def _end(self, outcome: Outcome) -> None:
        """Step 7."""
        self.service.stop(self._farewell(outcome), failed=self._summary(outcome))
        running = {task for task in self._http.server_state.tasks if not task.done()}
        if running:
            await asyncio.wait(running, timeout=LAST_ANSWERS_S)
        if self._engine is None:
            return
        limit = 2 * self._config.process.stop_timeout_s + LADDER_SLACK_S
        try:
            async with asyncio.timeout(limit):
                await self._engine.shutdown()
        except Exception:
            log.exception("the engine could not be ended in %.0f s; its processes are killed", limit)
            kill_children(self._spared)

    def _farewell(self, outcome: Outcome) -> ApiError:
        if outcome.failure is not None:
            return unavailable(f"The engine died: {outcome.failure.headline()}")
        return unavailable("The server is shutting down.", retry_after=RETRY_S)

    def _summary(self, outcome: Outcome) -> str:
        if outcome.failure is not None:
            return outcome.failure.headline()
        return outcome.message.strip().rpartition("\n")[2]

    def _last_word(self, outcome: Outcome) -> int:
        if outcome.failure is not None:
            console.report(outcome.failure)
        elif outcome.message:
            console.last_word(outcome.message)
        return outcome.code


def make_engine(config: EngineConfig, server: ServerConfig) -> AsyncEngine:
    """The engine's client, with recovery if that is on."""
    # Late, so that the first answers of /startupz do not wait for these imports.
    from drumline.engine.client import AsyncEngineClient
    from drumline.engine.recovering import RecoveringEngineClient
    from drumline.engine.recovery import Limits

    if server.recovery == "off":
        return AsyncEngineClient(config)
    return RecoveringEngineClient(config, Limits.of(server))


def wait_for_threads(limit_s: float) -> bool:
    """Wait for threads that read files and tokenise; whether there still are some: a file may never come."""
    deadline = time.monotonic() + limit_s
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    return any(thread.is_alive() for thread in ours)


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def default_name() -> str:
    """Name of the embedded model."""
    from drumline.server.models import DEFAULT_NAME

    return DEFAULT_NAME


def proportional_memory(pids: Iterable[int]) -> dict[int, int]:
    """Proportional set size in bytes by pid; processes that cannot be looked at are left out."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            found[pid] = int(psutil.Process(pid).memory_full_info().pss)
    return found


def children_of_this_process() -> set[psutil.Process]:
    """Its children, but not theirs."""
    return set(psutil.Process().children())


def kill_children(spared: Set[psutil.Process]) -> None:
    """SIGKILL to everything below this process but what is below ``spared``."""
    for child in children_of_this_process() - spared:
        with contextlib.suppress(psutil.Error):
            below = child.children(recursive=True)
            for process in (child, *below):
                with contextlib.suppress(psutil.Error):
                    process.kill()


def kill_everything(spared: Set[psutil.Process]) -> NoReturn:
    """The second signal: no ladder, no last words, but nothing left behind either."""
    kill_children(spared)
    os._exit(ExitCode.INTERRUPTED)
