"""From the bytes of an answer, each piece with the time at which it came, to tokens and times. Pure.

It runs after the load, not during it: the client shares the machine with the server as a rule, and what it does for
each event would be taken from the server.

An event has a token if it brings text, a tool call's piece or token ids, or if it has a choice that says nothing at
all: a token that is only part of a character. Not the first event of a chat (the role), nor a last one that brings
only the reason. Who counts the tokens:

* ``usage``: the server's usage at the end (``stream_options.include_usage``). It does not say which event had how many.
* ``stream``: the usage in every event (``continuous_usage_stats``; vLLM and drumline have it).
* ``ids``: token ids in every event (``return_token_ids``; vLLM and drumline have it). Then tokens without text get
  an event too.
* ``events``: nobody; an event is taken for a token.

Where usage says as many tokens as there were events, each event had one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from drumline.cli.bench.sse import EventReader, EventTooLargeError
from drumline.cli.bench.stats import Outcome

_decode = msgspec.json.Decoder().decode

_TEXTS = ("content", "reasoning_content", "reasoning")
_MOST_TOKENS = 2**53

MALFORMED = "malformed stream"
BROKEN = "broken stream"
IN_STREAM = "error event"
SHORT = "short answer"


class AnswerError(Exception):
    """The answer is no good. ``kind`` is one of the above."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(printable(message))
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """What a stream said."""

    times: list[float] = field(default_factory=list)
    """Of events with tokens."""
    ids: list[int] = field(default_factory=list)
    """Token ids in each of these events."""
    totals: list[int] = field(default_factory=list)
    """Usage's number of output tokens in each of these events, if every event has it."""
    texts: list[str] = field(default_factory=list)
    output_tokens: int | None = None
    """By usage."""
    prompt_tokens: int | None = None
    finish_reason: str = ""

    def count(self) -> tuple[int, str, list[int] | None]:
        """Output tokens, who counted them, and those of each event if known."""
        events = len(self.times)
        if self.ids and sum(self.ids):
            return sum(self.ids), "ids", self.ids
        if self.totals and len(self.totals) == events:
            each = [now - before for before, now in zip([0, *self.totals], self.totals, strict=False)]
            if all(tokens > 0 for tokens in each):
                return max(self.totals[-1], self.output_tokens or 0), "stream", each
        if self.output_tokens is not None:
            return self.output_tokens, "usage", [1] * events if self.output_tokens == events else None
        return events, "events", [1] * events


def read_events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(time, data) of every event. AnswerError if the stream is cut off in one."""
    reader = EventReader()
    try:
        for time, data in pieces:
            for event in reader.feed(data):
                yield time, event
    except EventTooLargeError as e:
        raise AnswerError(MALFORMED, str(e)) from None
    if reader.unfinished:
        raise AnswerError(BROKEN, f"the stream ends within an event: {_shown(reader.unfinished)}")


def read_answer(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    """What the stream says. AnswerError if it is malformed, breaks off, or says that something went wrong."""
    answer = Answer()
    for time, data in read_events(pieces):
        if data == b"[DONE]":
            return answer
        try:
            event = _decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise AnswerError(MALFORMED, f"an event is not JSON: {_shown(data)}") from None
        if not isinstance(event, dict):
            raise AnswerError(MALFORMED, f"an event is not an object: {_shown(data)}")
        if event.get("error"):
            raise AnswerError(IN_STREAM, error_message(event) or _shown(data))
        try:
            _take(answer, time, event)
        except (TypeError, ValueError, AttributeError, KeyError):
            raise AnswerError(MALFORMED, f"an event has another shape than OpenAI's: {_shown(data)}") from None
    if answer.finish_reason:  # transformers' server writes no [DONE]
        return answer
    raise AnswerError(BROKEN, "the stream ends without [DONE]")


def _take(answer: Answer, time: float, event: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        answer.output_tokens = _count(usage["completion_tokens"])
        if usage.get("prompt_tokens") is not None:
            answer.prompt_tokens = _count(usage["prompt_tokens"])
    choices = event.get("choices")
    if not choices:
        return
    choice = choices[0]
    reason = choice.get("finish_reason")
    if reason:
        answer.finish_reason = _text(reason)
    ids = choice.get("token_ids")
    if not isinstance(ids, list | None):
        raise TypeError("token_ids must be a list")
    text, has_token = _said(choice, begun=bool(answer.times))
    if ids is not None:
        has_token = bool(ids)
    if not has_token:
        return
    if text:
        answer.texts.append(text)
    answer.times.append(time)
    answer.ids.append(len(ids or ()))
    if usage:
        answer.totals.append(answer.output_tokens or 0)


def _said(choice: dict[str, Any], *, begun: bool) -> tuple[str, bool]:
    """The text of a choice, and whether there is a token in it."""
    if "text" in choice:  # a completion
        text = _text(choice["text"])
        return text, bool(text) or not choice.get("finish_reason")
    delta = choice.get("delta") or {}
    text = next((text for name in _TEXTS if (text := _text(delta.get(name)))), "")
    if text or delta.get("tool_calls") or delta.get("function_call"):
        return text, True
    return "", "content" in delta and "role" not in delta and not choice.get("finish_reason")


def _text(value: Any) -> str:
    """A text, or none. TypeError for anything else: parts of a content, which no answer has."""
    if not isinstance(value, str | None):
        raise TypeError(f"{value!r} is no text")
    return value or ""


def _count(value: Any) -> int:
    """A number of tokens. TypeError or ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number of tokens")
    if not 0 <= value <= _MOST_TOKENS or value != int(value):
        raise ValueError(f"{value!r} is no number of tokens")
    return int(value)


def complete(outcome: Outcome, pieces: Sequence[tuple[float, bytes]], *, whole: bool) -> Outcome:
    """Fill in what the answer says. ``whole``: fewer tokens than asked for are an error."""
    try:
        answer = read_answer(pieces)
    except AnswerError as e:
        outcome.error, outcome.message = e.kind, str(e)
        return outcome
    outcome.times = answer.times
    outcome.output_tokens, outcome.counted, outcome.counts = answer.count()
    outcome.prompt_tokens = answer.prompt_tokens if answer.prompt_tokens is not None else outcome.prompt_tokens
    outcome.finish_reason = answer.finish_reason
    outcome.text = "".join(answer.texts)
    # Events alone cannot tell: tokens may have come together, or had no text.
    short = whole and outcome.counted != "events" and outcome.output_tokens < outcome.asked_tokens
    if short or not outcome.output_tokens:
        outcome.error = SHORT
        outcome.message = f"{outcome.output_tokens} tokens of {outcome.asked_tokens}"
    return outcome


def error_message(body: Any) -> str:
    """The message of an error as OpenAI and others write it."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body.get("detail", body.get("message", "")))
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error
    return printable(error if isinstance(error, str) else str(error))


def refusal(status: int, pieces: Sequence[tuple[float, bytes]]) -> str:
    """What an answer with another status than 200 says."""
    body = b"".join(data for _, data in pieces)
    try:
        said = error_message(_decode(body))
    except (msgspec.DecodeError, RecursionError):
        said = ""
    return printable(said[:300] or _shown(body)) or f"HTTP {status}"


def printable(text: str) -> str:
    """What a server said, on one line and without characters that would steer the terminal it is shown on."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _shown(data: bytes) -> str:
    return data[:120].decode("utf-8", "replace")
