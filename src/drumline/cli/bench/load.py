"""The load: each request at its time, at most so many at once, each answer kept with the times at which it came.

::

    pace: sleeps until a request is due, waits for a place (max_concurrency) -> a task a request -> Client.send

All requests are rendered before the first is sent, and answers are read after the last has ended (while the run lasts
only if what is kept grows beyond HELD_BYTES), so that between the two the client does little but wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from drumline.cli.bench.answers import complete, refusal
from drumline.cli.bench.connection import Client, Exchange
from drumline.cli.bench.stats import Outcome

HELD_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to be sent."""

    request: bytes
    asked_tokens: int
    prompt_tokens: int = 0
    """0: unknown."""
    whole: bool = False
    """Fewer tokens than asked for are an error."""


@dataclass(slots=True)
class Progress:
    """Of a run while it lasts."""

    total: int
    done: int = 0
    failed: int = 0
    running: int = 0
    events: int = 0
    """Pieces of answers that have ended."""


@dataclass(slots=True)
class Run:
    """What came of it."""

    outcomes: list[Outcome] = field(default_factory=list)
    unfinished: int = 0
    interrupted: bool = False


class Load:
    """One run."""

    def __init__(self, client: Client, jobs: Sequence[Job], due: Sequence[float], max_concurrency: int | None) -> None:
        """``due``: seconds after the start, one for each job, ascending."""
        self._client = client
        self._jobs = jobs
        self._due = due
        self._room = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
        self._held: list[tuple[Outcome, Exchange, Job]] = []
        self._held_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.progress = Progress(len(jobs))
        self._run = Run()
        self._bug: BaseException | None = None

    async def run(self) -> Run:
        """Run it to its end, then read what came; cancelled, it ends early, with ``interrupted`` set."""
        await self.drive()
        return self.read()

    async def drive(self) -> None:
        """Send everything and wait for all answers."""
        with _no_garbage_collection():
            try:
                await self._pace()
                while self._tasks:
                    await asyncio.wait(self._tasks)
                if self._bug is not None:
                    raise self._bug
            except asyncio.CancelledError:
                self._run.interrupted = True
                self._run.unfinished = len(self._tasks)
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def read(self) -> Run:
        """What came of it."""
        for outcome, exchange, job in self._held:
            self._read(outcome, exchange, job)
        self._run.outcomes.sort(key=lambda outcome: outcome.index)
        return self._run

    async def _pace(self) -> None:
        start = perf_counter()
        for index, (job, after) in enumerate(zip(self._jobs, self._due, strict=True)):
            left = start + after - perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            await self._room.acquire()
            task = asyncio.create_task(self._one(index, job, start + after))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()

    async def _one(self, index: int, job: Job, due: float) -> None:
        self.progress.running += 1
        try:
            exchange = await self._client.send(job.request)
        finally:
            self.progress.running -= 1
        outcome = Outcome(
            index=index,
            due=due,
            sent=exchange.sent,
            ended=exchange.ended,
            asked_tokens=job.asked_tokens,
            prompt_tokens=job.prompt_tokens,
        )
        self.progress.done += 1
        self.progress.events += len(exchange.pieces)
        self.progress.failed += bool(exchange.error) or exchange.status != 200
        self._held_bytes += sum(len(data) for _, data in exchange.pieces)
        if self._held_bytes <= HELD_BYTES:
            self._held.append((outcome, exchange, job))
        else:
            self._read(outcome, exchange, job)

    def _read(self, outcome: Outcome, exchange: Exchange, job: Job) -> None:
        self._run.outcomes.append(read(outcome, exchange, job))


def read(outcome: Outcome, exchange: Exchange, job: Job) -> Outcome:
    """Fill in what the answer says, or what went wrong."""
    if exchange.error:
        outcome.error, outcome.message = exchange.error, exchange.message
    elif exchange.status != 200:
        outcome.error, outcome.message = f"HTTP {exchange.status}", refusal(exchange.status, exchange.pieces)
    else:
        complete(outcome, exchange.pieces, whole=job.whole)
    exchange.pieces.clear()
    return outcome


async def run_load(
    client: Client,
    jobs: Sequence[Job],
    due: Sequence[float],
    max_concurrency: int | None = None,
    watch: Callable[[Progress], contextlib.AbstractAsyncContextManager[None]] | None = None,
) -> Run:
    """Make a load and run it; ``watch`` is around the run and may look at its progress."""
    load = Load(client, jobs, due, max_concurrency)
    if watch is None:
        return await load.run()
    async with watch(load.progress):
        return await load.run()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A full collection takes longer than a token."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
