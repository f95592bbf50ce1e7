"""One HTTP request as engine requests: what they give, merged as it comes.

A request has one or more prompts and each prompt n outputs; the choice with index i is output i % n of prompt i // n.
A request with one choice (nearly all of them) is read in place; several get a task each and one queue. Closing the
generator closes every engine iterator, which aborts what still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from drumline.engine.protocol import AsyncEngine, EngineRequest
from drumline.errors import DrumlineError
from drumline.server.metrics import Metrics
from drumline.server.schema import PromptTokensDetails, Usage
from drumline.text.requests import PreparedRequest
from drumline.text.results import CompletionOutput, OutputAssembler
from drumline.text.tokenizer import Tokenizer


class Choice:
    """One output while it is made."""

    def __init__(self, index: int, request: EngineRequest, assembler: OutputAssembler) -> None:
        self.index = index
        self.request = request
        self.assembler = assembler
        self.tokens = 0
        """Output tokens so far."""
        self.last = 0.0
        """time.monotonic() of the last one."""


class Generation:
    """All outputs of one HTTP request."""

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        prepared: Sequence[PreparedRequest],
        arrival: float,
    ) -> None:
        """``arrival``: time.monotonic() of the request."""
        self._engine = engine
        self._metrics = metrics
        self._arrival = arrival
        self._assemblers = [OutputAssembler(tokenizer, one) for one in prepared]
        self._choices: list[Choice] = []
        for one, assembler in zip(prepared, self._assemblers, strict=True):
            self._choices += [
                Choice(len(self._choices) + place, child, assembler) for place, child in enumerate(one.children)
            ]
        lengths = [len(one.prompt_token_ids) for one in prepared]
        self._prompt_tokens = sum(lengths)
        metrics.prompt_tokens.inc(self._prompt_tokens)
        for length in lengths:
            metrics.prompt_length.observe(length)

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

    async def results(self) -> list[CompletionOutput]:
        """All outputs, whole, in the order of their index."""
        async with aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                pass
        return [output for assembler in self._assemblers for output in assembler.result().outputs]

    async def pieces(self) -> AsyncGenerator[tuple[int, CompletionOutput], None]:
        """(index, what is new) of all outputs as it comes. Close it to abort what still runs."""
        single = len(self._choices) == 1
        try:
            async with aclosing(self._one(self._choices[0]) if single else self._several()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._metrics.request.observe(time.monotonic() - self._arrival)

    async def _several(self) -> AsyncGenerator[tuple[int, CompletionOutput], None]:
        queue: asyncio.Queue[tuple[int, CompletionOutput] | Exception | None] = asyncio.Queue()

        async def feed(choice: Choice) -> None:
            try:
                async with aclosing(self._one(choice)) as pieces:
                    async for piece in pieces:
                        queue.put_nowait(piece)
                queue.put_nowait(None)
            except Exception as e:  # noqa: BLE001 - raised again by the reader of the queue
                queue.put_nowait(e)

        tasks = [asyncio.create_task(feed(choice)) for choice in self._choices]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, choice: Choice) -> AsyncGenerator[tuple[int, CompletionOutput], None]:
        outputs: Any = self._engine.generate(choice.request)
        reason = "abort"
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    new = choice.assembler.push(output)
                    if new is None:
                        continue
                    if new.token_ids:
                        self._count(choice, len(new.token_ids))
                    if new.finish_reason is not None:
                        reason = new.finish_reason
                        # A stop string is found here, not by the engine: leaving the iterator aborts the request.
                        yield choice.index, new
                        return
                    yield choice.index, new
            raise DrumlineError(f"The engine ended request {choice.request.request_id} without a reason.")
        finally:
            self._metrics.output_ended(reason, choice.tokens)

    def _count(self, choice: Choice, tokens: int) -> None:
        now = time.monotonic()
        if not choice.tokens:
            self._metrics.first_token.observe(now - self._arrival)
        else:
            self._metrics.next_token.observe((now - choice.last) / tokens)
        choice.tokens += tokens
        choice.last = now
        self._metrics.output_tokens.inc(tokens)
