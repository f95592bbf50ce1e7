"""The client that outlives its engine: when processes die, all are started again and the requests go on.

::

    supervisor's thread         the loop
    death  --call_soon-->  what the engine said last is taken in; Recovery (pure) decides
                           old processes gone (thread) -> back-off -> new processes ready (thread)
                           journal: every request that is not over is sent again, with the tokens that came
    tokens go on: consumers see a pause

The journal is the prompt, the parameters and the resolved seed of each running request (its ``EngineRequest``) and all
output token ids that came. A token is drawn by a pure function of seed, output index and vocabulary id, and penalties
and the like count the known tokens, so what follows is what would have followed. What was on its way when the engine
died is computed again; what came already is not asked for, and would be dropped (``first_index``).

Not carried over: prefix cache and counters of the old engine, calls (they fail), and what calls changed in the workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from drumline.config import EngineConfig
from drumline.engine.client import AsyncEngineClient
from drumline.engine.front import FrontChannel
from drumline.engine.launch import EngineProcesses
from drumline.engine.protocol import Abort, EngineInfo, EngineRequest, Recoveries, RequestOutput
from drumline.engine.recovery import Fail, GiveUp, Instruction, Limits, Recovery, Restart, Send, Withdraw
from drumline.errors import DrumlineError, EngineDeadError, FailureReport, StartupError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """One request of the journal."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    """Output tokens that came."""


class _Restart:
    """One restart, for the log and the metrics."""

    def __init__(self, report: FailureReport, before: _Restart | None) -> None:
        """``before``: one that gave no token before this death, so that the pause goes on."""
        self.report = report
        self.began = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}
        if before is not None:
            self.began = before.began
            self.seconds["starts before"] = self._last - self.began
        self.requests = 0
        self.tokens = 0

    def phase(self, name: str) -> None:
        """A phase ends now."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now

    def add(self, seconds: dict[str, float]) -> None:
        """Phases that were measured elsewhere, up to now."""
        self.seconds.update(seconds)
        self._last = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds from the death to the end of the last phase."""
        return self._last - self.began


class RecoveringEngineClient(AsyncEngineClient):
    """See the module's text. ``failure`` is None until it gives up; :meth:`wait_dead` waits for that.

    While it recovers, new requests are taken and wait, and calls raise EngineDeadError.
    """

    def __init__(self, config: EngineConfig, limits: Limits, *, role: str = "APIServer_0") -> None:
        super().__init__(config, role=role)
        self._processes = EngineProcesses(config, role=role, on_failure=self._on_failure, keep=True, waits=self._waits)
        self._role = role
        self._decision = Recovery(limits)
        self._journal: dict[str, _Entry] = {}
        self._serving = False
        """The engine is ready, and no death of it is known."""
        self._started = False
        self._end = threading.Event()
        """It is being shut down."""
        self._final: FailureReport | None = None
        self._task: asyncio.Task[None] | None = None
        self._restart: _Restart | None = None
        """The one under way, until the first token after it."""
        self._poison: dict[bytes, float] = {}
        """When requests were found poisonous, by what makes them the same (:func:`_likeness`)."""
        self.recoveries = self._tally = Recoveries()

    # state

    @property
    def failure(self) -> FailureReport | None:
        """Root cause of the last death, once it has given up (or the first start failed)."""
        return self._final or (None if self._started else self._processes.failure)

    def _note_state(self) -> None:
        """Tell others whether the engine serves all requests; the reason, if not."""
        recovering = self._started and not self._end.is_set() and self._final is None and not self._open
        self._tally.active = recovering
        if recovering and self._restart is not None:
            self._tally.reason = self._restart.report.headline()

    @property
    def _open(self) -> bool:
        return self._serving and self._decision.settled

    # life

    async def start(self) -> EngineInfo:
        """Start all processes. StartupError if one fails: only an engine that was ready is started again."""
        info = await super().start()
        self._started = True
        self._serving = True
        self._look_again()
        return info

    async def shutdown(self) -> None:
        """End all processes (ladder), also those of a restart that is under way. Idempotent."""
        self._end.set()
        await asyncio.to_thread(self._end_processes)
        if self._task is not None:
            await asyncio.wait({self._task})  # it finds that all is over
        self._let_go()

    def shutdown_now(self) -> None:
        """The same from any thread and outside of the loop, which may be closed. Blocks."""
        self._end.set()
        self._end_processes()
        super().shutdown_now()

    def _end_processes(self) -> None:
        while True:
            processes = self._processes
            processes.close()
            if processes is self._processes:  # a restart looks at _end after it has set them
                return

    def _let_go(self) -> None:
        if self._task is None or self._task.done():
            super()._let_go()
        else:  # the channel belongs to the thread that starts
            self._unwatch()
            self._end_all()

    # requests

    def _submit(self, request: EngineRequest) -> None:
        if not self._started or self._final is not None or self._end.is_set():
            self._ready_channel()  # says why not
            raise EngineDeadError(FailureReport(role=self._role, what="was shut down"))
        self._refuse_poison(request)
        self._journal[request.request_id] = _Entry(request)
        if self._decision.added(request.request_id):
            self._send(request)

    def _refuse_poison(self, request: EngineRequest) -> None:
        """DrumlineError for one that was found to kill engines: clients try again what ended with an error."""
        if not self._poison:
            return
        since = time.monotonic() - self._decision.limits.window_s
        self._poison = {key: found for key, found in self._poison.items() if found > since}
        if _likeness(request) in self._poison:
            raise DrumlineError(
                f"the engine died each time it computed this prompt with these parameters; it is not tried again "
                f"within {self._decision.limits.window_s:g} s"
            )

    def _withdraw(self, request_ids: Sequence[str]) -> None:
        known = [name for name in request_ids if self._journal.pop(name, None) is not None]
        if self._serving:
            self._send(Abort(request_ids=list(request_ids)))
        for name in known:
            self._obey(self._decision.ended(name))
        self._nobody_waits()

    def _drop(self, request_id: str) -> None:
        if self._journal.pop(request_id, None) is not None:
            super()._drop(request_id)
            self._obey(self._decision.ended(request_id))
            self._nobody_waits()

    def _nobody_waits(self) -> None:
        """If requests that were to go on are all over, the pause is."""
        if self._restart is not None and self._serving and not self._journal:
            self._told(self._restart)

    def _note(self, output: RequestOutput) -> None:
        name = output.request_id
        entry = self._journal.get(name)
        if entry is None:
            return
        new = output.token_ids
        known = len(entry.tokens) - output.first_index
        if known > 0:
            new = new[known:]
        entry.tokens += new
        if self._restart is not None and self._serving and new:
            self._told(self._restart)
        if output.finish_reason is not None:
            del self._journal[name]
            self._obey(self._decision.ended(name, well=output.finish_reason != "error"))
            self._nobody_waits()
        elif new and self._decision.trial == name:
            self._obey(self._decision.advanced(name, len(new)))

    def _ready_channel(self) -> FrontChannel:
        if self._serving and self._channel is not None and not self._end.is_set():
            return self._channel  # also while its death is not known on the loop: what goes into it now is sent again
        if self._restart is not None and self._final is None and not self._end.is_set():
            raise EngineDeadError(self._restart.report)
        return super()._ready_channel()

    # death

    def _on_dead(self) -> None:
        self._look_again()  # a start that fails is told by its exception

    def _look_again(self) -> None:
        """If the engine that serves is dead, recover."""
        report = self._processes.failure
        if report is None or not self._serving or self._end.is_set():
            return
        self._take_in()  # what the engine said before it died is true
        self._serving = False
        self._unwatch()
        self._end_calls()
        self._died(report)

    def _died(self, report: FailureReport) -> None:
        """The engine, or the start of one, is lost."""
        now = time.monotonic()
        restart = self._restart = _Restart(report, self._restart)
        steps = self._decision.died(now)
        if not isinstance(steps[-1], GiveUp):
            limits = self._decision.limits
            restart.requests = len(self._journal) - sum(isinstance(step, Fail) for step in steps)
            log.error(
                "the engine failed; all its processes are started again and %s (%d of at most %d restarts in %g s)\n%s",
                _go_on(restart.requests),
                self._decision.counted(now),
                limits.restarts,
                limits.window_s,
                report.text(),
            )
        self._obey(steps)

    def _obey(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    self._replay(instruction.request_ids)
                case Withdraw():
                    self._send(Abort(request_ids=[instruction.request_id]))
                case Fail():
                    self._fail(instruction)
                case Restart():
                    assert self._loop is not None
                    assert self._restart is not None
                    self._tally.by_cause[self._restart.report.what] += 1
                    self._task = self._loop.create_task(self._start_again(instruction.after_s))
                case GiveUp():
                    self._give_up(instruction)
        if instructions:
            self._note_state()

    def _replay(self, request_ids: Sequence[str]) -> None:
        """Send requests of the journal, with what they have."""
        for name in request_ids:
            entry = self._journal[name]
            self._send(msgspec.structs.replace(entry.request, output_token_ids=entry.tokens))
            if self._restart is not None:
                self._restart.tokens += len(entry.request.prompt_token_ids) + len(entry.tokens)

    def _fail(self, poison: Fail) -> None:
        name = poison.request_id
        self._tally.poisonous += 1
        log.error(
            "request %s is failed: %d engines in a row died while they had it, the last one while it had nothing else",
            name,
            poison.deaths,
        )
        if (entry := self._journal.pop(name, None)) is not None:
            self._poison[_likeness(entry.request)] = time.monotonic()
        self._end_stream(
            name,
            "error",
            f"the engine died {poison.deaths} times in a row while it computed this request, the last time while it "
            "had no other; it is not tried again",
        )

    def _give_up(self, end: GiveUp) -> None:
        assert self._restart is not None
        log.error("the engine is not started again: %s", end.why)
        self._final = self._restart.report
        self._dead.set()
        self._end_all()
        threading.Thread(target=self._end_processes, name="drumline-cleanup", daemon=True).start()

    # restart

    async def _start_again(self, after_s: float) -> None:
        restart = self._restart
        assert restart is not None
        await asyncio.to_thread(self._processes.shutdown)
        if self._channel is not None:
            self._channel.close()
        restart.phase("old processes gone")
        if after_s:
            await asyncio.sleep(after_s)
            restart.phase("back-off")
        self._channel = None
        self._processes = EngineProcesses(
            self.config,
            role=self._role,
            on_failure=self._on_failure,
            keep=True,
            before=self._processes,
            waits=self._waits,
        )
        if self._end.is_set():
            return
        try:
            await asyncio.to_thread(self._start)
        except StartupError as error:
            if not self._end.is_set():
                self._died(error.report)
            return
        except Exception as error:
            log.exception("the engine could not be started again")
            if not self._end.is_set():
                self._died(FailureReport(role=self._role, phase="restart", what="exception", message=str(error)))
            return
        if self._end.is_set():
            return
        restart.add(self._processes.start_seconds())
        self._serve_again(restart)

    def _serve_again(self, restart: _Restart) -> None:
        assert self._channel is not None
        assert self._loop is not None
        self._watched_fd = self._channel.fd
        self._loop.add_reader(self._watched_fd, self._take_in)
        self._serving = True
        restart.requests = len(self._journal)
        self._obey(self._decision.ready())
        self._nobody_waits()
        self._note_state()
        self._look_again()  # it may have died before anybody watched

    def _told(self, restart: _Restart) -> None:
        """The pause is over: a token came, or nobody waits for one."""
        if restart.tokens:
            restart.phase("first token")
        self._restart = None
        self._tally.count(restart.pause)
        log.warning(
            "the engine was started again in %.2f s (%s): %s, %d tokens of theirs are computed again%s",
            restart.pause,
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in restart.seconds.items()),
            _go_on(restart.requests),
            restart.tokens,
            "" if self._decision.trial is None else "; those that were there at two deaths are first tried alone",
        )


def _likeness(request: EngineRequest) -> bytes:
    """Equal for requests that ask for the same, whatever their seeds."""
    same = (request.prompt_token_ids, request.sampling, request.eos_token_ids, request.bad_words_ids)
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()


def _go_on(requests: int) -> str:
    return f"{requests} requests go on" if requests != 1 else "1 request goes on"


__all__ = ["RecoveringEngineClient"]
