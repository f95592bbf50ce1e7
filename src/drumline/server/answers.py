"""How pieces and results look on the wire: chats and completions, whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from drumline.server.generation import Generation
from drumline.server.logprobs import Spelling, chat_logprobs, completion_logprobs
from drumline.server.schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    StreamOptions,
    Usage,
)
from drumline.text.results import CompletionOutput

_encode = msgspec.json.Encoder().encode


class Writer(Protocol):
    """Shapes of one route."""

    def first(self, index: int) -> Any | None:
        """Chunk before the first piece of an output; None if the route has none."""

    def chunk(self, index: int, new: CompletionOutput) -> Any:
        """Chunk of what is new."""

    def last(self) -> Any:
        """Chunk without a choice, for the usage."""

    def whole(self, results: list[CompletionOutput], usage: Usage) -> Any:
        """Answer that is no stream."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a request asks of its answer."""

    id: str
    model: str
    fingerprint: str | None = None
    num_top: int | None = None
    """Likeliest tokens to report at each position; None: no log-probabilities."""
    spelling: Spelling
    prompts: Sequence[list[int]]
    """Token ids of the prompts."""
    n: int = 1
    """Outputs of each prompt."""
    echo: Sequence[str] = ()
    """For each prompt: what to put in front of its outputs."""
    token_ids: bool = False
    """Report token ids."""
    created: int = field(default_factory=lambda: int(time.time()))

    def prefix(self, index: int) -> str:
        """What stands in front of the output of this index."""
        return self.echo[index // self.n] if self.echo else ""

    def ids(self, ids: list[int]) -> list[int] | UnsetType:
        """``ids``, if they were asked for."""
        return ids if self.token_ids else UNSET

    def prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Token ids of the prompt that the output of this index belongs to, if they were asked for."""
        return self.ids(self.prompts[index // self.n])


class ChatWriter:
    """``/v1/chat/completions``."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._begun = False

    def first(self, index: int) -> ChatChunk:
        """OpenAI's first chunk: the role and no text yet, or that which the answer continues."""
        delta = ChatDelta(role="assistant", content=self._shape.prefix(index))
        chunk = self._chunk([ChatChunkChoice(index=index, delta=delta)])
        if not self._begun:
            self._begun = True
            chunk.prompt_token_ids = self._shape.prompt_ids(0)
        return chunk

    def chunk(self, index: int, new: CompletionOutput) -> ChatChunk:
        """Text that is new; the reason in the last one."""
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=new.text) if new.text or new.finish_reason is None else ChatDelta(),
            logprobs=self._logprobs(new),
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason if new.finish_reason is not None else UNSET,
            token_ids=self._shape.ids(new.token_ids),
        )
        return self._chunk([choice])

    def last(self) -> ChatChunk:
        """For the usage."""
        return self._chunk([])

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        shape = self._shape
        return ChatChunk(
            id=shape.id,
            created=shape.created,
            model=shape.model,
            choices=choices,
            system_fingerprint=shape.fingerprint,
        )

    def _logprobs(self, new: CompletionOutput) -> ChatLogprobs | None:
        if self._shape.num_top is None:
            return None
        return chat_logprobs(new.token_ids, new.logprobs or (), self._shape.num_top, self._shape.spelling)

    def whole(self, results: list[CompletionOutput], usage: Usage) -> ChatCompletion:
        """All answers."""
        shape = self._shape
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=shape.prefix(index) + result.text),
                logprobs=self._logprobs(result),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
                token_ids=shape.ids(result.token_ids),
            )
            for index, result in enumerate(results)
        ]
        return ChatCompletion(
            id=shape.id,
            created=shape.created,
            model=shape.model,
            choices=choices,
            usage=usage,
            system_fingerprint=shape.fingerprint,
            prompt_token_ids=shape.prompt_ids(0),
        )


class CompletionWriter:
    """``/v1/completions``."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def first(self, index: int) -> None:
        """Completions have no such chunk."""
        return

    def chunk(self, index: int, new: CompletionOutput) -> Completion:
        """Text that is new."""
        offset = self._offsets.get(index, 0)
        logprobs = self._logprobs(new, offset)
        if logprobs is not None:
            self._offsets[index] = offset + sum(len(token) for token in logprobs.tokens)
        choice = CompletionChoice(
            index=index,
            text=new.text,
            logprobs=logprobs,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            token_ids=self._shape.ids(new.token_ids),
        )
        if index not in self._begun:
            self._begun.add(index)
            choice.text = self._shape.prefix(index) + choice.text
            choice.prompt_token_ids = self._shape.prompt_ids(index)
        return self._completion([choice])

    def last(self) -> Completion:
        """For the usage."""
        return self._completion([])

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType = UNSET) -> Completion:
        shape = self._shape
        return Completion(
            id=shape.id,
            created=shape.created,
            model=shape.model,
            choices=choices,
            usage=usage,
            system_fingerprint=shape.fingerprint,
        )

    def _logprobs(self, new: CompletionOutput, offset: int) -> CompletionLogprobs | None:
        shape = self._shape
        if shape.num_top is None:
            return None
        return completion_logprobs(new.token_ids, new.logprobs or (), shape.num_top, shape.spelling, offset)

    def whole(self, results: list[CompletionOutput], usage: Usage) -> Completion:
        """All outputs."""
        choices = [
            CompletionChoice(
                index=index,
                text=self._shape.prefix(index) + result.text,
                logprobs=self._logprobs(result, 0),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
                token_ids=self._shape.ids(result.token_ids),
                prompt_token_ids=self._shape.prompt_ids(index),
            )
            for index, result in enumerate(results)
        ]
        return self._completion(choices, usage)


async def whole(generation: Generation, writer: Writer) -> bytes:
    """JSON of the whole answer."""
    results = await generation.results()
    return _encode(writer.whole(results, generation.usage()))


async def events(
    generation: Generation, writer: Writer, options: StreamOptions | None, *, with_ids: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, without the final ``[DONE]``. ``with_ids``: tokens without text matter too."""
    with_usage = bool(options and options.include_usage)
    always = bool(options and options.continuous_usage_stats)

    def event(chunk: Any) -> bytes:
        if always:
            chunk.usage = generation.usage()
        elif with_usage:
            chunk.usage = None
        return b"data: " + _encode(chunk) + b"\n\n"

    begun: set[int] = set()
    async with aclosing(generation.pieces()) as pieces:
        async for index, new in pieces:
            data = b""
            if index not in begun:
                begun.add(index)
                first = writer.first(index)
                data = event(first) if first is not None else b""
            # A token that is only part of a character gives no text yet.
            if new.text or new.logprobs or new.finish_reason is not None or (with_ids and new.token_ids):
                data += event(writer.chunk(index, new))
            if data:
                yield data
    if with_usage:
        chunk = writer.last()
        chunk.usage = generation.usage()
        yield b"data: " + _encode(chunk) + b"\n\n"
