"""How pieces and results look on the wire: chats and completions, whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from drumline.server.generation import Generation
from drumline.server.logprobs import Spelling, TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
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
from drumline.text.results import CompletionOutput, Logprob, RequestOutput

_encode = msgspec.json.Encoder().encode


PromptRows = Sequence[Mapping[int, Logprob] | None]


class Writer(Protocol):
    """Shapes of one route."""

    text_field: bytes
    """JSON of the name before the text in a chunk."""

    def first(self, index: int) -> Any | None:
        """Chunk before the first piece of an output; None if the route has none."""

    def wants_prompt(self, index: int) -> bool:
        """The next chunk of this output has the log-probabilities of its prompt in it."""

    def chunk(self, index: int, new: CompletionOutput, prompt: PromptRows | None = None) -> Any:
        """Chunk of what is new. ``prompt``: log-probabilities of the prompt, if they are wanted."""

    def last(self) -> Any:
        """Chunk without a choice, for the usage."""

    def whole(self, results: list[RequestOutput], usage: Usage) -> Any:
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
    role: str = "assistant"
    """Who speaks in a chat's answer."""
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

    text_field = b'"content":'

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._begun = False

    def first(self, index: int) -> ChatChunk:
        """OpenAI's first chunk: the role and no text yet, or that which the answer continues."""
        delta = ChatDelta(role=self._shape.role, content=self._shape.prefix(index))
        chunk = self._chunk([ChatChunkChoice(index=index, delta=delta)])
        if not self._begun:
            self._begun = True
            chunk.prompt_token_ids = self._shape.prompt_ids(0)
        return chunk

    def wants_prompt(self, index: int) -> bool:
        """Never: what is echoed here is a message, not a prompt."""
        return False

    def chunk(self, index: int, new: CompletionOutput, prompt: PromptRows | None = None) -> ChatChunk:
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

    def whole(self, results: list[RequestOutput], usage: Usage) -> ChatCompletion:
        """All answers."""
        shape = self._shape
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(role=shape.role, content=shape.prefix(index) + result.text),
                logprobs=self._logprobs(result),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
                token_ids=shape.ids(result.token_ids),
            )
            for index, result in enumerate(results[0].outputs)
        ]
        return ChatCompletion(
            id=shape.id,
            created=shape.created,
            model=shape.model,
            choices=choices,
            usage=usage,
            system_fingerprint=shape.fingerprint,
            prompt_logprobs=prompt_logprobs(results[0].prompt_logprobs),
            prompt_token_ids=shape.prompt_ids(0),
        )


class CompletionWriter:
    """``/v1/completions``."""

    text_field = b'"text":'

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()

    def first(self, index: int) -> None:
        """Completions have no such chunk."""
        return

    def wants_prompt(self, index: int) -> bool:
        """In front of an echo's first piece."""
        return bool(self._shape.echo) and self._shape.num_top is not None and index not in self._begun

    def chunk(self, index: int, new: CompletionOutput, prompt: PromptRows | None = None) -> Completion:
        """Text that is new."""
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._shape.spelling)
        logprobs = self._logprobs(new, self._offsets[index], prompt, index)
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

    def _logprobs(
        self, new: CompletionOutput, offsets: TextOffsets, prompt: PromptRows | None, index: int
    ) -> CompletionLogprobs | None:
        shape = self._shape
        if shape.num_top is None:
            return None
        ids, rows = new.token_ids, list[Mapping[int, Logprob] | None](new.logprobs or ())
        if prompt is not None:
            ids, rows = [*shape.prompts[index // shape.n], *ids], [*prompt, *rows]
        return completion_logprobs(ids, rows, shape.num_top, shape.spelling, offsets)

    def whole(self, results: list[RequestOutput], usage: Usage) -> Completion:
        """All outputs."""
        choices: list[CompletionChoice] = []
        for result in results:
            for output in result.outputs:
                index = len(choices)
                echoed = result.prompt_logprobs if self._shape.echo else None
                choices.append(
                    CompletionChoice(
                        index=index,
                        text=self._shape.prefix(index) + output.text,
                        logprobs=self._logprobs(output, TextOffsets(self._shape.spelling), echoed, index),
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                        token_ids=self._shape.ids(output.token_ids),
                        prompt_token_ids=self._shape.prompt_ids(index),
                        prompt_logprobs=prompt_logprobs(result.prompt_logprobs),
                    )
                )
        return self._completion(choices, usage)


async def whole(generation: Generation, writer: Writer) -> bytes:
    """JSON of the whole answer."""
    results = await generation.results()
    return _encode(writer.whole(results, generation.usage()))


class Events:
    """The answer as server-sent events (``http.Source``), without the final ``[DONE]``."""

    def __init__(
        self, generation: Generation, writer: Writer, options: StreamOptions | None, *, with_ids: bool
    ) -> None:
        """``with_ids``: tokens without text matter too."""
        self._generation = generation
        self._writer = writer
        self._with_usage = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._with_ids = with_ids
        self._begun: set[int] = set()
        self._early: list[tuple[int, CompletionOutput]] = []
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        self._write: Callable[[bytes], None] = _nowhere

    def start(self, write: Callable[[bytes], None], busy: Callable[[], bool]) -> None:
        """Begin."""
        self._write = write
        self._generation.start(self._take, busy)

    def resume(self) -> None:
        """Go on after ``busy()``."""
        self._generation.resume()

    def close(self) -> None:
        """End what still runs."""
        self._generation.close()

    async def wait(self) -> None:
        """Wait for the end, and send the usage."""
        await self._generation.wait()
        if self._with_usage:
            chunk = self._writer.last()
            chunk.usage = self._generation.usage()
            self._write(b"data: " + _encode(chunk) + b"\n\n")

    def _take(self, index: int, new: CompletionOutput) -> None:
        data = b""
        if index not in self._begun:
            prompt = None
            if self._writer.wants_prompt(index):
                prompt = self._generation.prompt_logprobs_of(index)
                if prompt is None:
                    # It comes with the first of the prompt's outputs.
                    self._early.append((index, new))
                    return
            self._begun.add(index)
            first = self._writer.first(index)
            data = self._event(first) if first is not None else b""
            if self._tells(new) or prompt is not None:
                data += self._event(self._writer.chunk(index, new, prompt))
        elif self._always or self._with_ids or new.logprobs or new.finish_reason is not None:
            data = self._event(self._writer.chunk(index, new)) if self._tells(new) else b""
        elif new.text:
            data = self._text(index, new.text)
        if data:
            self._write(data)
        if self._early:
            early, self._early = self._early, []
            for waiting in early:
                self._take(*waiting)

    def _tells(self, new: CompletionOutput) -> bool:
        """A token that is only part of a character gives no text yet."""
        return bool(new.text or new.logprobs or new.finish_reason is not None or (self._with_ids and new.token_ids))

    def _event(self, chunk: Any) -> bytes:
        if self._always:
            chunk.usage = self._generation.usage()
        elif self._with_usage:
            chunk.usage = None
        return b"data: " + _encode(chunk) + b"\n\n"

    def _text(self, index: int, text: str) -> bytes:
        """Event with nothing but text: all but the text is the same each time."""
        around = self._plain.get(index)
        if around is None:
            new = CompletionOutput(index=index, text="", token_ids=[])
            event = self._event(self._writer.chunk(index, new))
            # Quotes inside of texts are escaped, so this can only be the field.
            name = self._writer.text_field
            before, _, after = event.partition(name + b'""')
            around = self._plain[index] = (before + name, after)
        return around[0] + _encode(text) + around[1]


def _nowhere(_: bytes) -> None:
    """Before the start."""
