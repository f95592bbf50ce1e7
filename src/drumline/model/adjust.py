"""What requests ask to be done to their logits before anything is chosen: bans, biases, penalties.

In this order, which is vLLM's (``model.sampling`` has the rest of it):

1. ``allowed_ids``: all other tokens become -inf.
2. ``bad_words``: the last token of a sequence becomes -inf where the output, without the prompt, ends with the others.
3. ``min_tokens``: ``end_ids`` become -inf while the output is shorter.
4. ``bias_ids``: the bias is added.
5. ``repetition_penalty`` r, of tokens in the prompt or the output: logits over 0 are divided by r, others multiplied.
6. ``frequency_penalty``: taken off once for each time that the token is in the output.
7. ``presence_penalty``: taken off if the token is in the output.

A row whose tokens are all -inf gives the lowest id; the engine sees to it that nobody gets that (``plan.choices``).

Everything is about this rank's slice of the vocabulary, so nothing is communicated and any TP size gives the same.
Bans and biases are few tokens: they are packed index tensors for the whole batch, made again only when the batch
changes, and applied by one assignment each. Penalties touch many tokens: each slot that asks has a row of counts (or
one of the factors of tokens seen) on the device. Sampled tokens are added to them step by step; a slot that starts
again, after a preemption or a recovery, gets its rows from its tokens. So what is here is a function of the request and
its tokens.

Rejected: counting all tokens of all rows in every step, as vLLM does (linear in the length of the output); counts for
every slot (most requests ask for none: a row of a large vocabulary is a megabyte).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.model.noise import BLOCK, row_blocks
from drumline.parallel.shards import Range
from drumline.plan.sampling import SlotSampling

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

DEVICE_BLOCK = 1 << 24
"""Logits to which penalties are applied at once on devices other than CPUs: launches cost more than memory there."""

_Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Of logits, in place, by rows of a table and amounts."""

_NO_TOKEN = -1
_ANY = -2


@dataclass(frozen=True)
class _Tokens:
    """Tokens of this rank's slice for rows of the batch."""

    rows: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor | None = None


@dataclass(frozen=True)
class _Penalties:
    """One kind of penalty; all tensors are [rows that ask]."""

    rows: torch.Tensor
    """In the batch."""
    held: torch.Tensor
    """Rows of the table."""
    table: _Table
    amount: torch.Tensor

    def apply(self, logits: torch.Tensor, part: slice, change: _Change) -> None:
        """Change the rows of a part of those that ask."""
        rows, held, amount = self.rows[part], self.held[part], self.amount[part, None]
        if len(rows) == 1 and logits.device.type == "cpu":  # a row of a large vocabulary: without copies
            row, place = int(rows), int(held)
            change(logits[row : row + 1], self.table.data[place : place + 1], amount)
        else:
            changed = logits[rows]
            change(changed, self.table.data[held], amount)
            logits[rows] = changed


@dataclass(frozen=True)
class Adjustments:
    """What is to be done to the logits of one step."""

    allowed_rows: torch.Tensor | None = None
    allowed: _Tokens | None = None
    banned: _Tokens | None = None
    bias: _Tokens | None = None
    repetition_over_1: _Penalties | None = None
    repetition_under_1: _Penalties | None = None
    frequency: _Penalties | None = None
    presence: _Penalties | None = None

    def apply(self, logits: torch.Tensor) -> None:
        """Change ``logits`` [rows, size of the slice] float32 in place."""
        if self.allowed is not None and self.allowed_rows is not None:
            kept = logits[self.allowed.rows, self.allowed.places]
            logits[self.allowed_rows] = float("-inf")
            logits[self.allowed.rows, self.allowed.places] = kept
        if self.banned is not None:
            logits[self.banned.rows, self.banned.places] = float("-inf")
        if self.bias is not None and self.bias.values is not None:
            logits[self.bias.rows, self.bias.places] += self.bias.values
        block = BLOCK if logits.device.type == "cpu" else DEVICE_BLOCK
        for penalties, change in (
            (self.repetition_over_1, _repeat_less),
            (self.repetition_under_1, _repeat_more),
            (self.frequency, _take_counted),
            (self.presence, _take_once),
        ):
            if penalties is None:
                continue
            for part in row_blocks(len(penalties.rows), logits.shape[1], block):
                penalties.apply(logits, part, change)


def _repeat_less(logits: torch.Tensor, factors: torch.Tensor, amount: torch.Tensor) -> None:
    """For factors of 1 and above. The smaller one is the right one for either sign; torch.where takes ten times as
    long on a CPU."""
    torch.minimum(logits / factors, logits * factors, out=logits)


def _repeat_more(logits: torch.Tensor, factors: torch.Tensor, amount: torch.Tensor) -> None:
    """For factors of 1 and below."""
    torch.maximum(logits / factors, logits * factors, out=logits)


def _take_counted(logits: torch.Tensor, counts: torch.Tensor, amount: torch.Tensor) -> None:
    logits.sub_(counts * amount)


def _take_once(logits: torch.Tensor, counts: torch.Tensor, amount: torch.Tensor) -> None:
    logits.sub_(counts.clamp(max=1).mul_(amount))


class _Table:
    """Rows of float32 on the device for those slots that need one."""

    def __init__(self, width: int, blank: float, device: torch.device) -> None:
        self.data = torch.zeros((0, width), device=device)
        self._blank = blank
        self.row_of: Longs = np.full(1, -1, dtype=np.int64)
        """Row of each slot, -1 if it has none; the last entry stands for all further slots."""
        self._free: list[int] = []

    def take(self, slot: int) -> torch.Tensor:
        """The row of a slot that starts, blank."""
        if not self._free:
            held = len(self.data)
            self.data = torch.cat([self.data, self.data.new_zeros((max(held, 4), self.data.shape[1]))])
            self._free = list(range(len(self.data) - 1, held - 1, -1))
        self.row_of = _grown(self.row_of, slot)
        row = self.row_of[slot] = self._free.pop()
        return self.data[row].fill_(self._blank)

    def drop(self, slot: int) -> None:
        """A slot ends; nothing if it has no row."""
        if slot < len(self.row_of) and self.row_of[slot] >= 0:
            self._free.append(int(self.row_of[slot]))
            self.row_of[slot] = -1

    def rows(self, slots: npt.NDArray[Any]) -> Longs:
        """Row of each slot, or -1."""
        found: Longs = self.row_of[np.minimum(slots, len(self.row_of) - 1)]
        return found


def _grown(values: npt.NDArray[Any], slot: int) -> npt.NDArray[Any]:
    """With a place for ``slot``, and one behind it that is never used: new ones are -1."""
    if slot < len(values) - 1:
        return values
    return np.concatenate([values, np.full(max(slot + 2 - len(values), len(values)), -1, dtype=values.dtype)])


@dataclass(frozen=True)
class _Asked:
    """What one slot asks for, with tokens as places in the slice."""

    sampling: SlotSampling
    allowed: Longs | None
    banned: Longs
    """By bad words of one token."""
    ends: Longs
    bias: Longs
    bias_values: npt.NDArray[np.float32]
    words: list[tuple[list[int], int]]
    """Bad words of several tokens: those before the last, and the last one's place."""


def asks(sampling: SlotSampling) -> bool:
    """Something is to be done to its logits."""
    return bool(
        sampling.allowed_ids
        or sampling.bad_words
        or sampling.bias_ids
        or (sampling.min_tokens and sampling.end_ids)
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


class Adjuster:
    """Keeps what slots ask for, on one rank. Only slots that ask cost anything."""

    def __init__(self, ids: Range, device: torch.device) -> None:
        self._ids = ids
        self._device = device
        self._asked: dict[int, _Asked] = {}
        self._min_tokens: npt.NDArray[Any] = np.full(1, -1, dtype=np.int64)
        """Of each slot; -1 if it asks for nothing at all. The last entry stands for all further slots."""
        self._counts = _Table(ids.size, 0.0, device)
        """How often each token is in the output."""
        self._factors = _Table(ids.size, 1.0, device)
        """The repetition penalty of tokens that were seen, else 1."""
        self._made_for: tuple[bytes, bytes] = (b"", b"")
        self._made = (Adjustments(), _Words.of([], 1))

    def start(self, slot: int, sampling: SlotSampling, tokens: Ints, num_prompt: int) -> None:
        """A slot starts with ``tokens``, of which ``num_prompt`` are the prompt."""
        if not asks(sampling):
            return
        self._made_for = (b"", b"")
        self._asked[slot] = self._places_of(sampling)
        self._min_tokens = _grown(self._min_tokens, slot)
        self._min_tokens[slot] = sampling.min_tokens
        if sampling.repetition_penalty != 1:
            self._factors.take(slot)[self._tensor(self._mine(tokens))] = sampling.repetition_penalty
        if sampling.frequency_penalty or sampling.presence_penalty:
            counted = np.bincount(self._mine(tokens[num_prompt:]), minlength=self._ids.size)
            self._counts.take(slot).copy_(torch.from_numpy(counted.astype(np.float32)))

    def free(self, slots: Ints) -> None:
        """Slots end."""
        if not self._asked:
            return
        for slot in slots.tolist():
            if self._asked.pop(slot, None) is not None:
                self._made_for = (b"", b"")
                self._min_tokens[slot] = -1
                self._counts.drop(slot)
                self._factors.drop(slot)

    def sampled(self, slots: Ints, tokens: Ints) -> None:
        """A token was sampled for each of these slots."""
        if not self._asked:
            return
        inside = (tokens >= self._ids.start) & (tokens < self._ids.stop)
        for table in (self._counts, self._factors):
            rows = table.rows(slots)
            held = inside & (rows >= 0)
            if held.any():
                where = self._tensor(rows[held]), self._tensor(tokens[held] - self._ids.start)
                table.data[where] = table.data[where] + 1 if table is self._counts else self._repetition(slots[held])

    def _repetition(self, slots: Ints) -> torch.Tensor:
        amounts = [self._asked[slot].sampling.repetition_penalty for slot in slots.tolist()]
        return torch.tensor(amounts, dtype=torch.float32, device=self._device)

    @property
    def idle(self) -> bool:
        """No slot asks for anything."""
        return not self._asked

    def concerns(self, slots: Ints) -> bool:
        """Some of these slots ask for something."""
        return any(slot in self._asked for slot in slots.tolist()) if self._asked else False

    def adjustments(self, slots: Ints, tokens: Ints, num_tokens: Ints, num_prompt: Ints) -> Adjustments | None:
        """For a batch of ``slots`` [rows], whose tokens are ``tokens[slot, :num_tokens[slot]]``. None: nothing to do.

        What it gives must be applied before tokens of a later batch with these slots are sampled.
        """
        if not self._asked:
            return None
        least = self._min_tokens[np.minimum(slots, len(self._min_tokens) - 1)]
        if (least < 0).all():
            return None
        short = (num_tokens[slots] - num_prompt[slots] < least).tobytes()
        if self._made_for != (slots.tobytes(), short):
            self._made = self._make(slots.tolist(), short)
            self._made_for = (slots.tobytes(), short)
        made, words = self._made
        hit = words.completed(slots, tokens, num_tokens, num_prompt)
        if hit is None:
            return made
        rows, places = hit
        more = _Tokens(self._tensor(rows), self._tensor(places))
        if made.banned is not None:
            more = _Tokens(torch.cat([made.banned.rows, more.rows]), torch.cat([made.banned.places, more.places]))
        return Adjustments(**{**vars(made), "banned": more})

    # making

    def _make(self, slots: list[int], short: bytes) -> tuple[Adjustments, _Words]:
        rows = [(row, self._asked[slot]) for row, slot in enumerate(slots) if slot in self._asked]
        allowed = [(row, item.allowed) for row, item in rows if item.allowed is not None]
        banned = [(row, item.banned) for row, item in rows]
        banned += [(row, item.ends) for row, item in rows if short[row]]
        values = np.concatenate([item.bias_values for _, item in rows])
        return Adjustments(
            allowed_rows=self._tensor([row for row, _ in allowed]) if allowed else None,
            allowed=self._packed(allowed, empty=True) if allowed else None,
            banned=self._packed(banned),
            bias=self._packed([(row, item.bias) for row, item in rows], values),
            repetition_over_1=self._penalties(slots, rows, "repetition_penalty", lambda x: x > 1, self._factors),
            repetition_under_1=self._penalties(slots, rows, "repetition_penalty", lambda x: x < 1, self._factors),
            frequency=self._penalties(slots, rows, "frequency_penalty", bool, self._counts),
            presence=self._penalties(slots, rows, "presence_penalty", bool, self._counts),
        ), _Words.of([(row, *word) for row, item in rows for word in item.words], len(slots))

    def _packed(
        self,
        lists: Sequence[tuple[int, Longs]],
        values: npt.NDArray[np.float32] | None = None,
        *,
        empty: bool = False,
    ) -> _Tokens | None:
        places = np.concatenate([items for _, items in lists]) if lists else np.zeros(0, dtype=np.int64)
        if not len(places) and not empty:
            return None
        rows = np.repeat([row for row, _ in lists], [len(items) for _, items in lists])
        return _Tokens(
            self._tensor(rows),
            self._tensor(places),
            None if values is None else torch.from_numpy(values).to(self._device),
        )

    def _penalties(
        self,
        slots: list[int],
        rows: Sequence[tuple[int, _Asked]],
        name: str,
        on: Callable[[float], bool],
        table: _Table,
    ) -> _Penalties | None:
        found = [(row, amount) for row, item in rows if on(amount := getattr(item.sampling, name))]
        if not found:
            return None
        return _Penalties(
            rows=self._tensor([row for row, _ in found]),
            held=self._tensor(table.rows(np.array([slots[row] for row, _ in found]))),
            table=table,
            amount=torch.tensor([amount for _, amount in found], dtype=torch.float32, device=self._device),
        )

    def _places_of(self, sampling: SlotSampling) -> _Asked:
        ids, values = np.array(sampling.bias_ids, dtype=np.int64), np.array(sampling.bias_values, dtype=np.float32)
        inside = (ids >= self._ids.start) & (ids < self._ids.stop)
        words = [word for word in sampling.bad_words if word]
        return _Asked(
            sampling=sampling,
            allowed=self._mine(sampling.allowed_ids) if sampling.allowed_ids else None,
            banned=self._mine([word[0] for word in words if len(word) == 1]),
            ends=self._mine(sampling.end_ids),
            bias=ids[inside] - self._ids.start,
            bias_values=values[inside],
            words=[
                (list(word[:-1]), word[-1] - self._ids.start)
                for word in words
                if len(word) > 1 and self._ids.start <= word[-1] < self._ids.stop
            ],
        )

    def _mine(self, tokens: Sequence[int] | Ints) -> Longs:
        """Places of those that are in this rank's slice."""
        ids = np.asarray(tokens, dtype=np.int64)
        return ids[(ids >= self._ids.start) & (ids < self._ids.stop)] - self._ids.start

    def _tensor(self, values: Sequence[int] | npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)


@dataclass(frozen=True)
class _Words:
    """Bad words of several tokens in a batch, to be compared with the ends of the outputs all at once."""

    rows: Longs
    """[words] Row of the batch."""
    before: Ints
    """[words, longest] The tokens before the last, at the right; _ANY where a word has fewer."""
    places: Longs
    """[words] The last token."""

    @classmethod
    def of(cls, words: Sequence[tuple[int, list[int], int]], num_rows: int) -> _Words:
        """Words as (row, tokens before the last, place of the last)."""
        longest = max((len(tokens) for _, tokens, _ in words), default=0)
        before = np.full((len(words), longest), _ANY, dtype=np.int32)
        for line, (_, tokens, _) in zip(before, words, strict=True):
            line[longest - len(tokens) :] = tokens
        rows, places = ([word[index] for word in words] for index in (0, 2))
        return cls(np.array(rows, dtype=np.int64), before, np.array(places, dtype=np.int64))

    def completed(self, slots: Ints, tokens: Ints, num_tokens: Ints, num_prompt: Ints) -> tuple[Longs, Longs] | None:
        """Rows, and last tokens of the words that these would complete; None if there is none."""
        if not len(self.rows):
            return None
        slot = slots[self.rows]
        at = num_tokens[slot][:, None] - self.before.shape[1] + np.arange(self.before.shape[1])
        ends = np.where(at >= num_prompt[slot][:, None], tokens[slot[:, None], np.maximum(at, 0)], _NO_TOKEN)
        hit = ((ends == self.before) | (self.before == _ANY)).all(axis=1)
        return (self.rows[hit], self.places[hit]) if hit.any() else None
