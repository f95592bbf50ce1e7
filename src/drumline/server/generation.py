"""One HTTP request as engine requests: what they give, handed on as it comes.

A request has one or more prompts and each prompt n outputs; the choice with index i is output i % n of prompt i // n.

Tokens come by calls, not by iterators: at thousands of tokens a second a task switch and a chain of generators for
each token cost several times what the token's text costs. The engine's client wakes the loop once for all that one
step (or several, if the loop was busy) gave, and calls :meth:`Generation._on_output` once for each request in it.
Whoever reads the pieces may be busy (its client's socket is full): then outputs are left with the engine's client,
which merges them, and come as one piece later. Answers that are no stream take their tokens by the dozen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from drumline.engine.protocol import AsyncEngine, EngineRequest, OutputHandle
from drumline.engine.protocol import RequestOutput as EngineOutput
from drumline.errors import DrumlineError, EngineDeadError
from drumline.server.metrics import Metrics
from drumline.server.schema import PromptTokensDetails, Usage
from drumline.text.requests import PreparedRequest
from drumline.text.results import CompletionOutput, Logprob, OutputAssembler, RequestOutput
from drumline.text.tokenizer import Tokenizer

AT_ONCE = 64
"""Tokens that an answer which is no stream takes together; a thousand would keep the loop from other streams."""

Take = Callable[[int, CompletionOutput], None]


def never() -> bool:
    """For readers that are never busy."""
    return False


class Choice:
    """One output while it is made."""

    def __init__(self, index: int, request: EngineRequest, assembler: OutputAssembler) -> None:
        self.index = index
        self.request = request
        self.assembler = assembler
        self.handle: OutputHandle | None = None
        self.over = False
        self.came = 0
        """Output tokens that the engine gave."""
        self.tokens = 0
        """Of these, what belongs to the output (not what is behind a stop string), as far as it was read."""
        self.first = 0.0
        """time.monotonic() of the first one."""
        self.last = 0.0
        self.queued_s = 0.0
        """Until its first step."""
        self.cached = 0
        """Tokens of its prompt that were found in the prefix cache."""
        self.preemptions = 0


def _emptied(output: CompletionOutput) -> CompletionOutput:
    rows: list[dict[int, Logprob]] | None = None if output.logprobs is None else []
    return CompletionOutput(index=output.index, text="", token_ids=[], logprobs=rows, finish_reason="length")


class Generation:
    """All outputs of one HTTP request."""

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        prepared: Sequence[PreparedRequest],
        arrival: float,
        *,
        prompt_only: bool = False,
        interval: int = 1,
    ) -> None:
        """``arrival``: time.monotonic() of the request.

        ``prompt_only``: outputs are empty, whatever the engine gives (it gives a token at least). ``interval``: tokens
        that a stream takes at once, the first and the last of an output aside.
        """
        self._engine = engine
        self._metrics = metrics
        self._arrival = arrival
        self._assemblers = [OutputAssembler(tokenizer, one) for one in prepared]
        self._choices: list[Choice] = []
        for one, assembler in zip(prepared, self._assemblers, strict=True):
            self._choices += [
                Choice(len(self._choices) + place, child, assembler) for place, child in enumerate(one.children)
            ]
        self._prompt_tokens = sum(len(one.prompt_token_ids) for one in prepared)
        self._running = len(self._choices)
        self._error: Exception | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take: Take | None = None
        self._busy = never
        # A stop string must end the request at once; without one, text is needed only when it is looked at.
        self._prompt_only = prompt_only
        self._interval = interval
        self._at_once = 1 if any(one.params.stop for one in prepared) else AT_ONCE
        metrics.load += 1
        for one in prepared:
            metrics.request_began(one)

    @property
    def ended(self) -> bool:
        """No more pieces will come."""
        return self._ended.done()

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many outputs it has."""
        output = sum(choice.tokens for choice in self._choices)
        cached = sum(assembler.result().num_cached_tokens or 0 for assembler in self._assemblers)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=output,
            total_tokens=self._prompt_tokens + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def start(self, take: Take | None = None, busy: Callable[[], bool] = never) -> None:
        """Send the requests. ``take`` gets (index, what is new) as it comes, except while ``busy()``.

        Call :meth:`resume` when that is over, and :meth:`close` in the end, whatever happens.
        """
        self._take, self._busy = take, busy
        try:
            for choice in self._choices:
                choice.handle = self._engine.open(choice.request, partial(self._on_output, choice), self._on_dead)
            for assembler in self._assemblers:
                assembler.get_ready()
        except Exception as e:  # noqa: BLE001 - raised again by wait()
            self._fail(e)

    def resume(self) -> None:
        """The reader is not busy any more."""
        for choice in self._choices:
            if choice.handle is not None and not choice.over:
                choice.handle.resume()

    async def wait(self) -> None:
        """Wait until every output has ended. Raises what went wrong."""
        # Cancelling whoever waits must not cancel the future.
        await asyncio.shield(self._ended)
        if self._error is not None:
            raise self._error

    async def results(self) -> list[RequestOutput]:
        """All outputs, whole, one entry for each prompt."""
        try:
            self.start()
            await self.wait()
        finally:
            self.close()
        results = [assembler.result() for assembler in self._assemblers]
        if self._prompt_only:
            for result in results:
                result.outputs = [_emptied(output) for output in result.outputs]
        return results

    def prompt_logprobs_of(self, index: int) -> list[dict[int, Logprob] | None] | None:
        """Those of the prompt that the output of this index belongs to, once they have come."""
        return self._choices[index].assembler.result().prompt_logprobs

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        for choice in self._choices:
            self._over(choice, "error" if self._error is not None else "abort")
        if not self._ended.done():
            self._ended.set_result(None)

    # ------------------------------------------------------------------------------------------- calls of the engine

    def _on_output(self, choice: Choice, output: EngineOutput) -> bool:
        try:
            self._count(choice, output)
            last = output.finish_reason is not None
            if self._take is None:
                if not last and len(output.token_ids) < self._at_once:
                    return False
            elif self._busy() or (not last and choice.tokens and len(output.token_ids) < self._interval):
                return False
            self._push(choice, output)
        except Exception as e:  # noqa: BLE001 - raised again by wait()
            self._fail(e)
        return True

    def _push(self, choice: Choice, output: EngineOutput) -> None:
        new = choice.assembler.push(output)
        if new is None:
            return
        if self._prompt_only:
            new = _emptied(new)
        choice.tokens += len(new.token_ids)
        if new.finish_reason is not None:
            # A stop string is found here, not by the engine: closing aborts the request.
            self._over(choice, new.finish_reason)
        if self._take is not None:
            self._take(choice.index, new)
        if not self._running and not self._ended.done():
            self._ended.set_result(None)

    def _count(self, choice: Choice, output: EngineOutput) -> None:
        """Latencies are of tokens as they come, not as they are read."""
        tokens = output.first_index + len(output.token_ids) - choice.came
        if tokens <= 0:
            return
        now = time.monotonic()
        choice.preemptions = max(choice.preemptions, output.num_preemptions)
        if not choice.came:
            choice.first, choice.queued_s, choice.cached = now, output.queued_s, output.num_cached_tokens
            self._metrics.prompt_done(len(choice.request.prompt_token_ids), choice.cached)
            self._metrics.first_token.observe(now - self._arrival)
        else:
            self._metrics.next_token.observe((now - choice.last) / tokens, tokens)
        choice.came += tokens
        choice.last = now
        self._metrics.output_tokens += tokens

    def _over(self, choice: Choice, reason: str) -> None:
        if choice.over:
            return
        choice.over = True
        self._running -= 1
        if choice.handle is not None:
            choice.handle.close()
        self._metrics.output_ended(reason, choice, self._arrival)
        if not self._running:
            self._metrics.request_ended(self._arrival, max(one.came for one in self._choices))

    def _on_dead(self) -> None:
        failure = self._engine.failure
        self._fail(EngineDeadError(failure) if failure else DrumlineError("The engine ended without a reason."))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self.close()
