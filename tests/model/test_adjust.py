"""Bans, biases and penalties over the lives of slots, on any number of ranks, against the rule in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.sampling import Sampler
from drumline.model.slots import SlotTable
from drumline.parallel.shards import Range, vocab_shards
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import SlotStart, pack
from tests.model import rule
from tests.model.test_sampling import on_ranks

VOCAB = 23
"""So few that everything happens: words are completed, tokens come again."""


def some_kind(rng: np.random.Generator) -> SlotSampling:
    """What a request may ask for, each thing or not."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.permutation(VOCAB)[: rng.integers(1, most)])

    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.4 else off

    bias = ids(6)
    words = tuple(tuple(int(t) for t in rng.integers(0, 4, rng.integers(1, 4))) for _ in range(rng.integers(1, 5)))
    return SlotSampling(
        temperature=float(rng.choice([0.0, 1.0])),
        seed=int(rng.integers(0, 2**63)),
        top_k=int(maybe(7, 0)),  # type: ignore[call-overload]
        presence_penalty=float(maybe(1.5, 0.0)),  # type: ignore[arg-type]
        frequency_penalty=float(maybe(-0.7, 0.0)),  # type: ignore[arg-type]
        repetition_penalty=float(maybe(rng.choice([1.3, 0.7]), 1.0)),  # type: ignore[arg-type]
        bias_ids=bias,
        bias_values=tuple(float(value) for value in rng.normal(size=len(bias)) * 3),
        allowed_ids=maybe(ids(VOCAB), ()),  # type: ignore[arg-type]
        bad_words=maybe(words, ()),  # type: ignore[arg-type]
        min_tokens=int(rng.integers(0, 6)),
        end_ids=ids(4),
    )


def start(slot: int, tokens: list[int], num_prompt: int, kind: SlotSampling) -> SlotStart:
    return SlotStart(slot, "r", pack(tokens), num_prompt, kind)


class Slots:
    """A few requests in slots, started, sampled for, preempted and ended at random on one rank."""

    def __init__(self, seed: int, table: SlotTable, sampler: Sampler) -> None:
        self.rng = np.random.default_rng(seed)
        self.table, self.sampler = table, sampler
        self.live: dict[int, tuple[list[int], list[int], SlotSampling]] = {}

    def start(self) -> None:
        slot = int(self.rng.choice([slot for slot in range(130) if slot not in self.live]))
        prompt = self.rng.integers(0, VOCAB, self.rng.integers(1, 6)).tolist()
        kind = some_kind(self.rng) if self.rng.random() < 0.8 else SlotSampling()
        self.live[slot] = (prompt, [], kind)
        self.table.start(start(slot, prompt, len(prompt), kind))

    def preempt(self) -> None:
        slot = int(self.rng.choice(list(self.live)))
        prompt, output, kind = self.live[slot]
        self.table.free(np.array([slot], dtype=np.int32))
        self.table.start(start(slot, [*prompt, *output], len(prompt), kind))

    def end(self) -> None:
        slot = int(self.rng.choice(list(self.live)))
        self.table.free(np.array([slot], dtype=np.int32))
        del self.live[slot]

    def step(self) -> list[tuple[int, np.ndarray, float]]:
        """Sample for some slots: each token with the scores of the rule."""
        slots = [slot for slot in self.live if self.rng.random() < 0.8 or len(self.live) == 1]
        if not slots:
            return []
        batch = np.array(slots, dtype=np.int32)
        logits = torch.from_numpy(self.rng.normal(size=(len(slots), VOCAB)).astype(np.float32) * 2)
        rows = self.table.sampling_rows(batch)
        part = logits[:, self.sampler.ids.as_slice()].clone()
        if rows.adjustments is not None:
            rows.adjustments.apply(part)
        tokens, _ = self.sampler.sample(logits[:, self.sampler.ids.as_slice()].clone(), rows)
        self.table.append_tokens(batch, tokens, 0)
        seen = []
        for row, slot in enumerate(slots):
            prompt, output, kind = self.live[slot]
            expected = rule.adjusted(logits[row].numpy(), prompt, output, kind)
            np.testing.assert_allclose(part[row], expected[self.sampler.ids.as_slice()], rtol=1e-5, atol=1e-5)
            seen.append((int(tokens[row]), *rule.perturbed(expected, kind, len(output))))
            output.append(int(tokens[row]))
        return seen


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]))
def test_any_lives_of_slots_follow_the_rule(seed: int, size: int) -> None:
    def run(sampler: Sampler) -> list[int]:
        slots = Slots(seed, SlotTable(40, 4, 2, ids=sampler.ids), sampler)
        slots.start()
        tokens = []
        for _ in range(12):
            action = slots.rng.random()
            if action < 0.3 and len(slots.live) < 8:
                slots.start()
            elif action < 0.5:
                slots.preempt()
            elif action < 0.6 and len(slots.live) > 1:
                slots.end()
            for token, scores, on_edge in slots.step():
                if not on_edge:
                    assert scores[token] == pytest.approx(scores.max(), abs=1e-4)
                tokens.append(token)
        return tokens

    everyone = on_ranks(VOCAB, size, run)
    assert all(tokens == everyone[0] for tokens in everyone)


def test_slots_that_ask_for_nothing_cost_nothing() -> None:
    table = SlotTable(40, 4, ids=Range(0, VOCAB))
    table.start(start(0, [1, 2], 2, SlotSampling(temperature=1, top_k=3, end_ids=(3,))))
    table.start(start(1, [1, 2], 2, SlotSampling(bias_ids=(3,), bias_values=(1.0,))))
    assert table.sampling_rows(np.array([0], dtype=np.int32)).adjustments is None
    assert table.sampling_rows(np.array([1], dtype=np.int32)).adjustments is not None
    table.free(np.array([1], dtype=np.int32))
    assert table.sampling_rows(np.array([0], dtype=np.int32)).adjustments is None


def test_indices_are_made_once_for_a_batch_that_stays() -> None:
    table = SlotTable(40, 4, ids=Range(0, VOCAB))
    kind = SlotSampling(bias_ids=(3,), bias_values=(1.0,), min_tokens=2, end_ids=(5,), bad_words=((7, 8),))
    table.start(start(0, [1, 2], 2, kind))
    slots = np.array([0], dtype=np.int32)
    made = []
    for token in (6, 7, 9, 9):
        made.append(table.sampling_rows(slots).adjustments)
        table.append_tokens(slots, np.array([token], dtype=np.int32), 0)
    banned = [[] if one.banned is None else one.banned.places.tolist() for one in made if one is not None]
    assert banned == [[5], [5], [8], []]
    assert made[0] is made[1]
    assert made[3].bias is made[2].bias  # type: ignore[union-attr]


def test_ranks_without_a_token_of_a_kind() -> None:
    """All allowed tokens, biases and ends are in the other rank's slice."""
    first, second = vocab_shards(VOCAB, 2)
    kind = SlotSampling(allowed_ids=(1, 2), bias_ids=(1,), bias_values=(-9.0,), min_tokens=1, end_ids=(0,))
    slots = np.array([0], dtype=np.int32)
    for part, expected in ((first, [1.0, 2.0]), (second, [])):
        table = SlotTable(40, 4, ids=part)
        table.start(start(0, [1, 2], 2, kind))
        logits = torch.full((1, part.size), 1.0)
        adjustments = table.sampling_rows(slots).adjustments
        assert adjustments is not None
        adjustments.apply(logits)
        assert torch.isfinite(logits).nonzero()[:, 1].tolist() == expected
