"""Messages between the front end (API server, LLM) and the engine core, and the front end's view of an engine.

Requests and outputs are msgspec messages over a socketpair. Start, phases, failures and stop go over the
engine core's control connection.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from drumline.config import EngineConfig
from drumline.errors import FailureReport
from drumline.plan.sampling import MAX_LOGPROBS, SamplingParams
from drumline.plan.step import TokenLogprobs
from drumline.processes.live import LiveReport


class EngineRequest(msgspec.Struct, tag="add", kw_only=True):
    """One prompt, one output sequence (the front end splits ``n`` > 1)."""

    request_id: str
    """Unique among running requests of the engine."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """``max_tokens`` already resolved; ``stop`` strings are the front end's work, the core ignores them."""
    seed: int
    """Resolved 64-bit seed."""
    eos_token_ids: list[int] = []
    """Tokens that end the output, unless ``sampling.ignore_eos``. Not chosen before ``sampling.min_tokens`` in any
    case."""
    bad_words_ids: list[list[int]] = []
    """``sampling.bad_words`` as token ids, in all ways that are to be looked for."""
    output_token_ids: list[int] = []
    """What an engine before this one gave already: the output goes on after it. These tokens, their log-probabilities
    and those of the prompt are not given again."""
    priority: int = 0
    """Lower ones are served first."""
    cache_salt: str = ""
    """Requests share prefix blocks only with those of the same salt."""
    arrival: float = msgspec.field(default_factory=time.time)
    sent_again: bool = False
    """An engine before this one had it."""


class Abort(msgspec.Struct, tag="abort"):
    """End these requests; no output of theirs will follow."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, tag="call", kw_only=True):
    """Call a method of the engine core."""

    call_id: int
    method: str
    args: list[Any] = []


NO_TOKEN_LEFT = "bad_words"
"""``stop_reason`` of an output that ended because bad words left no token to choose."""


ENGINE_DIED = "engine_died"
"""``stop_reason`` of an output with finish_reason ``error``: engines died each time that they computed the request."""
OUT_OF_MEMORY = "out_of_memory"
"""The same: there was no memory for what the request asks for, even alone."""


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one request."""

    request_id: str
    first_index: int
    """Output index of the first of ``token_ids``; a client drops what it has already."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = []
    """One for each token, or empty if not asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """One for each token of the prompt but the first, if asked for: all of them, in the request's first output."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort``, ``error``, or None while it goes on."""
    stop_reason: int | str | None = None
    """Token id that stopped it, if it was not the end-of-sequence token; ``NO_TOKEN_LEFT``. With finish_reason
    ``error``: ``ENGINE_DIED`` or ``OUT_OF_MEMORY``; None if the request was refused."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    queued_s: float = 0.0
    """Seconds from its arrival to its first step; in its first output."""
    num_preemptions: int = 0
    """How often it was put back to be computed again, so far."""
    message: str = ""
    """What went wrong, with finish_reason ``error``."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of ``EngineStats.step_tokens``."""


class EngineStats(msgspec.Struct, kw_only=True):
    """State of the scheduler after a step; counters count from the start of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those found."""
    preemptions: int = 0
    steps: int = 0
    schedule_s: float = 0.0
    """Seconds that the engine core has spent on making plans."""
    dispatch_s: float = 0.0
    """On handing plans to the workers."""
    wait_s: float = 0.0
    """On waiting for workers while it had nothing else to do."""
    update_s: float = 0.0
    """On taking answers in: tokens to requests, what ends, prefix blocks."""
    output_s: float = 0.0
    """On handing outputs to the front end."""
    forward_s: float = 0.0
    """Seconds that the output rank has spent in forwards (see ``StepOutput``)."""
    sample_s: float = 0.0
    """On sampling."""
    step_tokens: list[int] = []
    """Steps by the tokens that they computed, of prompts and outputs: one for each of ``STEP_TOKENS``, and one over."""
    tokens: int = 0
    """Tokens of all steps."""
    sent_again: int = 0
    """Requests that an engine before this one had."""
    still_there: int = 0
    """Tokens of theirs whose keys and values were found as it had left them."""
    active_s: float = 0.0
    """With several pipeline stages: seconds with a step in flight (``engine.stage_meter``)."""
    stage_busy_s: list[float] = []
    """Seconds that each stage has computed; empty: there is one, or it is not known."""
    stage_busy: list[float] = []
    """Busy part of the active time of each stage lately, 0 to 1."""


class EngineOutputs(msgspec.Struct, tag="outputs", kw_only=True):
    """What one step gave."""

    outputs: list[RequestOutput]
    stats: EngineStats


class UtilityResult(msgspec.Struct, tag="result", kw_only=True):
    """Answer to a UtilityCall."""

    call_id: int
    value: Any = None
    error: FailureReport | None = None


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the engine core says when it is ready."""

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    dtype: str
    model_type: str = ""
    scheduling_policy: str = "fcfs"
    """``fcfs``: the priority of requests is not looked at; ``priority``."""
    max_logprobs: int = MAX_LOGPROBS
    """Most log-probabilities that a request may ask for at each position; -1: the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class CoreStart:
    """What the front end tells the engine core (pickled by cloudpickle: an executor class may be the user's own)."""

    config: EngineConfig
    """With ``model.path`` set."""
    incarnation: int = 0
    """Number of the engine that uses the kept memory whose descriptors come after the door; 0: none is kept."""


class ProcessState(msgspec.Struct, tag="process", kw_only=True):
    """One process, as ``/startupz`` and the process table show it."""

    name: str
    """``EngineCore_DP0``, ``Worker_TP1``, ``ForkServer`` ..."""
    pid: int = 0
    rank: int | None = None
    phase: str = "starting"
    """``starting``, ``imports``, ``init_device``, ``load_model 40%``, ``ready`` ..."""


PAUSES = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
"""Upper bounds of the buckets of ``Recoveries.pauses``, in seconds."""


@dataclass
class Recoveries:
    """What became of the deaths of an engine that is started again."""

    active: bool = False
    """It is being started again, or has not got all requests back yet: nobody new is served."""
    reason: str = ""
    """What it died of, in a line, while ``active``."""
    by_cause: Counter[str] = field(default_factory=Counter)
    """Restarts, by what it died of (``FailureReport.what``)."""
    pauses: list[int] = field(default_factory=lambda: [0] * (len(PAUSES) + 1))
    """Restarts that went well, by the seconds from the death to the first token after it: one for each of ``PAUSES``,
    and one over."""
    pause_s: float = 0.0
    """Seconds of all pauses."""
    poisonous: int = 0
    """Requests that were failed because the engine died under them."""

    def count(self, pause: float) -> None:
        """A pause is over."""
        self.pauses[bisect_left(PAUSES, pause)] += 1
        self.pause_s += pause


class Stalling(msgspec.Struct, tag="stalling"):
    """Ranks have made no progress for half of the stall timeout; an empty text: they do again."""

    text: str


class LiveRequest(msgspec.Struct, tag="live"):
    """From the front end over the control connection: say what your workers and you are doing."""

    number: int


class LiveAnswer(msgspec.Struct, tag="alive"):
    """The answer."""

    number: int
    doing: str
    """Of the engine core."""
    workers: LiveReport


class BeatRequest(msgspec.Struct, tag="beat?"):
    """From the front end over the control connection: does your loop turn?"""

    number: int


class Beat(msgspec.Struct, tag="beat"):
    """The answer, of the thread that reads the control connection."""

    number: int
    turns: int
    """Of the loop so far."""
    where: str
    """``waiting``, ``step`` or ``busy``."""


ToFront = ProcessState | Stalling | LiveAnswer | Beat
ToCore = LiveRequest | BeatRequest
"""What the engine core sends over its control connection."""


class OutputHandle(Protocol):
    """One request of :meth:`AsyncEngine.open`. Methods are called on the engine's loop."""

    def resume(self) -> None:
        """Ask again whether what waits is taken."""

    def close(self) -> None:
        """No call follows; a request that still runs is aborted. Idempotent."""


class AsyncEngine(Protocol):
    """An engine as the API server sees it. Methods are called on one asyncio loop."""

    async def start(self) -> EngineInfo:
        """Start all processes. StartupError if one fails; whatever did start is ended then."""

    def processes(self) -> Sequence[ProcessState]:
        """All processes of this engine, the caller's own included. Useful during the start too."""

    @property
    def info(self) -> EngineInfo | None:
        """None until it is ready."""

    @property
    def failure(self) -> FailureReport | None:
        """Root cause, once the engine is dead."""

    @property
    def recoveries(self) -> Recoveries | None:
        """None if its death is final (``failure``)."""

    @property
    def stalling(self) -> str:
        """Who makes no progress, while work is outstanding and half of the stall timeout is over; else empty."""

    def live_report(self, cause: str) -> LiveReport:
        """What every process is doing, with the stacks of all threads. Blocks for up to a few seconds; any thread."""

    @property
    def report_folder(self) -> Path | None:
        """Where this run's log files are; None before there are any."""

    def start_seconds(self) -> dict[str, float]:
        """Seconds of the last start by phase, once it is ready; they add up to all of it."""

    def stats(self) -> EngineStats:
        """Of the last step."""

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request. Closing the iterator aborts the request. EngineDeadError if the engine dies."""

    def open(
        self, request: EngineRequest, on_output: Callable[[RequestOutput], bool], on_dead: Callable[[], None]
    ) -> OutputHandle:
        """The same without a task switch for each token: calls on the loop, none of which may raise.

        ``on_output`` gets all that has come since it last took something, as one output, and says whether it takes
        it; what it leaves waits, and what comes meanwhile is added to it. ``on_dead`` is called if the engine dies
        before the last output. EngineDeadError if it is dead already.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their iterators end with finish_reason ``abort``."""

    async def call(self, method: str, *args: Any, timeout: float = 60.0) -> Any:  # noqa: ASYNC109
        """Call a method of the engine core. RemoteCallError if it raises."""

    async def wait_dead(self) -> FailureReport:
        """Wait until the engine dies; its root cause."""

    async def shutdown(self) -> None:
        """End all processes (ladder). Idempotent."""
