"""How pieces and results look on the wire: chats and completions, whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from drumline.server.generation import Generation
from drumline.server.logprobs import TokenBytes, chat_logprobs, completion_logprobs
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
        """Chunk of a new."""

    def last(self) -> Any:
        """Chunk without a choice, for the usage."""

    def whole(self, results: list[CompletionOutput], usage: Usage) -> Any:
        """Answer that is no stream."""


class ChatWriter:
    """``/v1/chat/completions``."""

    def __init__(self, id: str, model: str, num_top: int | None, token_bytes: TokenBytes) -> None:
        self.id = id
        self._model = model
        self._created = int(time.time())
        self._num_top = num_top
        self._token_bytes = token_bytes

    def first(self, index: int) -> ChatChunk:
        """OpenAI's first chunk: the role and no text yet."""
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))])

    def chunk(self, index: int, new: CompletionOutput) -> ChatChunk:
        """Text that is new; the reason in the last one."""
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=new.text) if new.text or new.finish_reason is None else ChatDelta(),
            logprobs=self._logprobs(new),
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason if new.finish_reason is not None else UNSET,
        )
        return self._chunk([choice])

    def last(self) -> ChatChunk:
        """For the usage."""
        return self._chunk([])

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self.id, created=self._created, model=self._model, choices=choices)

    def _logprobs(self, new: CompletionOutput) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(new.token_ids, new.logprobs or (), self._num_top, self._token_bytes)

    def whole(self, results: list[CompletionOutput], usage: Usage) -> ChatCompletion:
        """All answers."""
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=result.text),
                logprobs=self._logprobs(result),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
            )
            for index, result in enumerate(results)
        ]
        return ChatCompletion(id=self.id, created=self._created, model=self._model, choices=choices, usage=usage)


class CompletionWriter:
    """``/v1/completions``."""

    def __init__(self, id: str, model: str, num_top: int | None, token_bytes: TokenBytes) -> None:
        self.id = id
        self._model = model
        self._created = int(time.time())
        self._num_top = num_top
        self._token_bytes = token_bytes
        self._offsets: dict[int, int] = {}

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
        )
        return self._completion([choice])

    def last(self) -> Completion:
        """For the usage."""
        return self._completion([])

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType = UNSET) -> Completion:
        return Completion(id=self.id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _logprobs(self, new: CompletionOutput, offset: int) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        return completion_logprobs(new.token_ids, new.logprobs or (), self._num_top, self._token_bytes, offset)

    def whole(self, results: list[CompletionOutput], usage: Usage) -> Completion:
        """All outputs."""
        choices = [
            CompletionChoice(
                index=index,
                text=result.text,
                logprobs=self._logprobs(result, 0),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
            )
            for index, result in enumerate(results)
        ]
        return self._completion(choices, usage)


async def whole(generation: Generation, writer: Writer) -> bytes:
    """JSON of the whole answer."""
    results = await generation.results()
    return _encode(writer.whole(results, generation.usage()))


async def events(generation: Generation, writer: Writer, options: StreamOptions | None) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, without the final ``[DONE]``."""
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
            if new.text or new.logprobs or new.finish_reason is not None:
                data += event(writer.chunk(index, new))
            if data:
                yield data
    if with_usage:
        chunk = writer.last()
        chunk.usage = generation.usage()
        yield b"data: " + _encode(chunk) + b"\n\n"
