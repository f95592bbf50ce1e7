"""What becomes of an engine that dies and is started again: journal, decisions, tally. Both recovering clients own one.

::

    client (its loop, or whoever holds its lock)                 a thread of the client
    lost(report) --> Recovery (pure) decides --> host.renew ---> old processes gone, back-off, new ones ready
    renewed()    <---------------------------------------------- or a report of what failed
      journal: every request that is not over is sent again, with the tokens that came

The journal is the prompt, the parameters and the resolved seed of each running request (its ``EngineRequest``) and all
output token ids that came. A token is drawn by a pure function of seed, output index and vocabulary id, and penalties
and the like count the known tokens, so what follows is what would have followed. What was on its way when the engine
died is computed again; what came already is not asked for, and would be dropped (``first_index``).

On CPUs the old engine's keys and values are still there (``engine.kept``), so of a request's known tokens only those
are computed again that were not finished. They are used if the death says nothing against them (:func:`_trusted`), and
once: an engine that dies before a token came, or while some request is suspect, may have died of them, so the next one
starts empty.

Not carried over: counters of the old engine, calls (they fail), and what calls changed in the workers.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from drumline.engine.protocol import ENGINE_DIED, Abort, EngineRequest, EngineStats, Recoveries, RequestOutput
from drumline.engine.recovery import Fail, GiveUp, Instruction, Limits, Recovery, Restart, Send, Withdraw
from drumline.errors import FailureReport, RequestFailedError

log = logging.getLogger(__name__)

CLEAN_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})
"""Sent by somebody. Others are what a process brings upon itself, which may have written anywhere before."""


@dataclass(slots=True)
class _Entry:
    """One request of the journal."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    """Output tokens that came."""
    sent: bool = False
    """Some engine has had it."""


class Restarting:
    """One restart, for the log and the metrics."""

    def __init__(self, report: FailureReport, before: Restarting | None, *, trusted: bool) -> None:
        """``before``: one that gave no token before this death, so that the pause goes on. ``trusted``: the old
        engine's keys and values may be used."""
        self.report = report
        self.trusted = trusted
        self.began = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}
        if before is not None:
            self.began = before.began
            self.seconds["starts before"] = self._last - self.began
        self.requests = 0
        self.sent = 0
        """Requests that the new engine was sent before the first token ..."""
        self.tokens = 0
        """... and the known tokens of these."""

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


class Host(Protocol):
    """The client that a :class:`Healing` works for. It calls these where it was called itself, and none may block."""

    def resend(self, message: EngineRequest | Abort) -> None:
        """Send something to the engine that serves now."""

    def end_failed(self, output: RequestOutput) -> None:
        """Give a request's consumer this last output."""

    def renew(self, restart: Restarting, after_s: float) -> None:
        """Have a thread end the old processes, wait, and start new ones; then call :meth:`Healing.renewed`."""

    def is_over(self) -> None:
        """No engine comes any more: tell everybody, and end what is left, in a thread."""

    def stats(self) -> EngineStats:
        """What the engine that serves said last."""


class Healing:
    """See the module's text. Not thread-safe: called by its client, which sees to that."""

    def __init__(self, host: Host, limits: Limits) -> None:
        self._host = host
        self._decision = Recovery(limits)
        self._journal: dict[str, _Entry] = {}
        self.serving = False
        """The engine is ready, and no death of it is known."""
        self.started = False
        """It was ready once."""
        self.end = threading.Event()
        """It is being shut down. Set by any thread."""
        self.final: FailureReport | None = None
        """Root cause of the last death, once it has given up."""
        self.restart: Restarting | None = None
        """The one under way, until the first token after it."""
        self._untold: tuple[Restarting, str] | None = None
        """One whose pause is over, and what else is to be said of it, until it is known what was still there."""
        self._poison: dict[bytes, float] = {}
        """When requests were found poisonous, by what makes them the same (:func:`_likeness`)."""
        self.tally = Recoveries()

    def _note_state(self) -> None:
        """Tell others whether the engine serves all requests; the reason, if not."""
        recovering = self.started and not self.end.is_set() and self.final is None and not self._open
        self.tally.active = recovering
        if recovering and self.restart is not None:
            self.tally.reason = self.restart.report.headline()

    @property
    def _open(self) -> bool:
        return self.serving and self._decision.settled

    def began(self) -> None:
        """The first start went well."""
        self.started = self.serving = True

    def renounce(self, why: str) -> None:
        """The next death is final; ``why`` in words for the log. Any thread."""
        self._decision.renounce(why)

    # requests

    def submit(self, request: EngineRequest) -> bool:
        """A new request. True: send it now; False: it is sent later. RequestFailedError if engines die of it."""
        self._refuse_poison(request)
        now = self._decision.added(request.request_id)
        self._journal[request.request_id] = _Entry(request, sent=now)
        return now

    def _refuse_poison(self, request: EngineRequest) -> None:
        """Clients try again what ended with an error."""
        if not self._poison:
            return
        since = time.monotonic() - self._decision.limits.window_s
        self._poison = {key: found for key, found in self._poison.items() if found > since}
        if _likeness(request) in self._poison:
            raise RequestFailedError(
                f"the engine died each time it computed this prompt with these parameters; it is not tried again "
                f"within {self._decision.limits.window_s:g} s",
                reason=ENGINE_DIED,
            )

    def has(self, request_id: str) -> bool:
        """It is not over."""
        return request_id in self._journal

    def forget(self, request_ids: Iterable[str]) -> bool:
        """Nobody wants these requests any more. Whether one of them was known."""
        known = [name for name in request_ids if self._journal.pop(name, None) is not None]
        for name in known:
            self._obey(self._decision.ended(name))
        if known:
            self._nobody_waits()
        return bool(known)

    def _nobody_waits(self) -> None:
        """If requests that were to go on are all over, the pause is."""
        if self._journal:
            return
        if self.restart is not None and self.serving:
            self._told(self.restart)
        self._tell(at_once=True)

    def note(self, output: RequestOutput) -> None:
        """An output came, and nobody has changed it yet."""
        name = output.request_id
        entry = self._journal.get(name)
        if entry is None:
            return
        new = output.token_ids
        known = len(entry.tokens) - output.first_index
        if known > 0:
            new = new[known:]
        entry.tokens += new
        if self.restart is not None and self.serving and new:
            self._told(self.restart)
        elif self._untold is not None:
            self._tell()
        if output.finish_reason is not None:
            del self._journal[name]
            self._obey(self._decision.ended(name, well=output.finish_reason != "error"))
            self._nobody_waits()
        elif new and self._decision.trial == name:
            self._obey(self._decision.advanced(name, len(new)))

    # death

    def lost(self, report: FailureReport) -> None:
        """The engine, or the start of one, is lost; what it said before was noted."""
        self.serving = False
        now = time.monotonic()
        self._tell(at_once=True)
        first = self.restart is None and not self._decision.seeking
        steps = self._decision.died(now)
        trusted = first and not self._decision.seeking and _trusted(report)
        restart = self.restart = Restarting(report, self.restart, trusted=trusted)
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

    def renewed(self, report: FailureReport | None) -> None:
        """The engine is ready again and its client listens to it; or the start failed, with this report."""
        if self.end.is_set():
            return
        if report is not None:
            self.lost(report)
            return
        assert self.restart is not None
        self.serving = True
        self.restart.requests = len(self._journal)
        self._obey(self._decision.ready())
        self._nobody_waits()
        self._note_state()

    def _obey(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    self._replay(instruction.request_ids)
                case Withdraw():
                    self._host.resend(Abort(request_ids=[instruction.request_id]))
                case Fail():
                    self._fail(instruction)
                case Restart():
                    assert self.restart is not None
                    self.tally.by_cause[self.restart.report.what] += 1
                    self._host.renew(self.restart, instruction.after_s)
                case GiveUp():
                    assert self.restart is not None
                    log.error("the engine is not started again: %s", instruction.why)
                    self.final = self.restart.report
                    self._host.is_over()
        if instructions:
            self._note_state()

    def _replay(self, request_ids: Sequence[str]) -> None:
        """Send requests of the journal, with what they have."""
        for name in request_ids:
            entry = self._journal[name]
            again, entry.sent = entry.sent, True
            self._host.resend(msgspec.structs.replace(entry.request, output_token_ids=entry.tokens, sent_again=again))
            if self.restart is not None and again:
                self.restart.sent += 1
                self.restart.tokens += len(entry.request.prompt_token_ids) + len(entry.tokens)

    def _fail(self, poison: Fail) -> None:
        name = poison.request_id
        self.tally.poisonous += 1
        log.error(
            "request %s is failed: %d engines in a row died while they had it, the last one while it had nothing else",
            name,
            poison.deaths,
        )
        entry = self._journal.pop(name, None)
        if entry is not None:
            self._poison[_likeness(entry.request)] = time.monotonic()
        self._host.end_failed(
            RequestOutput(
                request_id=name,
                first_index=0 if entry is None else len(entry.tokens),
                token_ids=[],
                finish_reason="error",
                stop_reason=ENGINE_DIED,
                message=f"the engine died {poison.deaths} times in a row while it computed this request, the last "
                "time while it had no other; it is not tried again",
            )
        )

    def _told(self, restart: Restarting) -> None:
        """The pause is over: a token came, or nobody waits for one."""
        if restart.tokens:
            restart.phase("first token")
        self.restart = None
        self.tally.count(restart.pause)
        trial = self._decision.trial
        self._untold = restart, "" if trial is None else "; those that were there at two deaths are first tried alone"
        self._tell()

    def _tell(self, *, at_once: bool = False) -> None:
        """Log a restart, once the engine has looked at all that it was sent, so that it knows what it must compute."""
        if self._untold is None:
            return
        (restart, more), stats = self._untold, self._host.stats()
        if stats.sent_again < restart.sent and not at_once:
            return
        self._untold = None
        log.warning(
            "the engine was started again in %.2f s (%s): %s, %d tokens of theirs are computed again, %d are there%s",
            restart.pause,
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in restart.seconds.items()),
            _go_on(restart.requests),
            restart.tokens - stats.still_there,
            stats.still_there,
            more,
        )


def _trusted(report: FailureReport) -> bool:
    """Whether keys and values that were finished before this failure are what they were. An exception, an exit or a
    kill leaves them alone; a process that crashed may have written anywhere, and what hangs is not understood."""
    return all(
        one.what in ("exception", "exit", "oom") or (one.what == "signal" and one.type in CLEAN_SIGNALS)
        for one in (report, *report.folded)
    )


def _likeness(request: EngineRequest) -> bytes:
    """Equal for requests that ask for the same, whatever their seeds."""
    same = (request.prompt_token_ids, request.sampling, request.eos_token_ids, request.bad_words_ids)
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()


def _go_on(requests: int) -> str:
    return f"{requests} requests go on" if requests != 1 else "1 request goes on"
