"""Log-probabilities in OpenAI's two shapes: a list of objects for chats, four parallel lists for completions."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from drumline.server.schema import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob
from drumline.text.results import Logprob

TokenBytes = Callable[[int], bytes]
"""Bytes that a token stands for in the output text."""
LEAST = -9999.0
"""Stands for a probability of zero, which JSON cannot write as a logarithm."""


def finite(value: float) -> float:
    """``value`` as JSON can carry it."""
    return value if math.isfinite(value) else LEAST


@dataclass(frozen=True)
class Spelling:
    """How tokens are named."""

    bytes: TokenBytes
    as_ids: bool = False
    """``token_id:<id>`` instead of the text."""

    def text(self, token: int) -> str:
        """Name of a token; a part of a character becomes U+FFFD."""
        return f"token_id:{token}" if self.as_ids else self.bytes(token).decode(errors="replace")


class TextOffsets:
    """Where tokens that follow each other begin in the text: a character of several tokens begins with the first, and
    the others are behind nothing more than what came before it."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def next(self, token: int) -> int:
        """Characters of the text before this token."""
        before = self._count
        spelling = self._spelling
        self._count += len(spelling.text(token) if spelling.as_ids else self._decoder.decode(spelling.bytes(token)))
        return before


def _top(row: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of a position, the likeliest first."""
    ranked = sorted(row.items(), key=lambda item: item[1].rank or 0)
    return [item for item in ranked if (item[1].rank or 0) <= num_top]


def chat_logprobs(
    ids: Sequence[int], rows: Sequence[Mapping[int, Logprob]], num_top: int, spelling: Spelling
) -> ChatLogprobs:
    """One object for each token, with its ``num_top`` likeliest rivals."""
    content = []
    for token, row in zip(ids, rows, strict=False):
        if token not in row:
            continue
        top = []
        for other, entry in _top(row, num_top):
            raw = list(spelling.bytes(other))
            top.append(TopLogprob(token=spelling.text(other), logprob=finite(entry.logprob), bytes=raw))
        raw = list(spelling.bytes(token))
        content.append(
            TokenLogprob(token=spelling.text(token), logprob=finite(row[token].logprob), bytes=raw, top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    ids: Sequence[int],
    rows: Sequence[Mapping[int, Logprob] | None],
    num_top: int,
    spelling: Spelling,
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """Four lists, an entry for each token. ``offsets`` has seen the tokens of this output before these.

    A row is None for the first token of a prompt, which has a text but no log-probability.
    """
    lists = CompletionLogprobs(top_logprobs=[] if num_top else None)
    for token, row in zip(ids, rows, strict=False):
        if row is not None and token not in row:
            continue
        text = spelling.text(token)
        lists.tokens.append(text)
        lists.text_offset.append(offsets.next(token))
        if row is None:
            lists.token_logprobs.append(None)
            if lists.top_logprobs is not None:
                lists.top_logprobs.append(None)
            continue
        logprob = finite(row[token].logprob)
        lists.token_logprobs.append(logprob)
        if lists.top_logprobs is not None:
            top = {text: logprob}
            for other, entry in _top(row, num_top):
                # Different tokens may have the same text (pieces of a character); the likeliest keeps it.
                top.setdefault(spelling.text(other), finite(entry.logprob))
            lists.top_logprobs.append(top)
    return lists


def prompt_logprobs(rows: Sequence[Mapping[int, Logprob] | None] | None) -> PromptLogprobs | UnsetType:
    """Those of a prompt as JSON can carry them; UNSET if there are none."""
    if rows is None:
        return UNSET
    return [
        None
        if row is None
        else {token: Logprob(finite(one.logprob), one.rank, one.decoded_token) for token, one in row.items()}
        for row in rows
    ]
