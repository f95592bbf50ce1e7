"""Copies of decoding rows: attention over random steps of starting, decoding and ending slots, within a budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from drumline.model import attention, rows
from drumline.model.attention import AttentionBatch, KVCache, attend, make_batch, write
from drumline.model.rows import RowCopies
from tests.model.test_attention import SCALE, plain

CPU = torch.device("cpu")
TOKEN = 2 * 2 * 2 * 8 * 4
"""Bytes of a token; a page has 128 tokens of one head."""
BLOCK, HEADS, GROUP, DIM, SLOTS, LONGEST = 4, 2, 3, 8, 6, 150


@dataclass
class Request:
    """A slot's own keys and values [Hkv, tokens, D], and its blocks."""

    keys: torch.Tensor = field(default_factory=lambda: torch.zeros(HEADS, 0, DIM))
    values: torch.Tensor = field(default_factory=lambda: torch.zeros(HEADS, 0, DIM))
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keys.shape[1]


class Model:
    """One layer's cache, with slots that come and go."""

    def __init__(self, seed: int, budget: int | None = None) -> None:
        torch.manual_seed(seed)
        self.cache = KVCache(
            num_layers=2,
            num_blocks=SLOTS * LONGEST // BLOCK + SLOTS,
            num_kv_heads=HEADS,
            block_size=BLOCK,
            head_dim=DIM,
            dtype=torch.float32,
            device=CPU,
        )
        self.cache.data.fill_(float("nan"))
        self.cache.copies = RowCopies(self.cache.data, SLOTS, LONGEST, budget or 1 << 30)
        self.free = list(np.random.default_rng(seed).permutation(self.cache.num_blocks))
        self.lives = np.zeros(SLOTS, dtype=np.int64)
        self.requests: dict[int, Request] = {}

    @property
    def copies(self) -> RowCopies:
        assert self.cache.copies is not None
        return self.cache.copies

    def start(self, slot: int) -> None:
        self.lives[slot] += 1
        self.requests[slot] = Request()

    def end(self, slot: int) -> None:
        self.lives[slot] += 1
        self.free += self.requests.pop(slot).blocks

    def step(self, counts: dict[int, int], window: int | None = None, softcap: float | None = None) -> AttentionBatch:
        """So many tokens for each of these slots, compared with the plain formula."""
        slots = np.array(list(counts), dtype=np.int32)
        computed = np.array([self.requests[slot].length for slot in counts], dtype=np.int32)
        tables = np.zeros((len(slots), -(-LONGEST // BLOCK) + 1), dtype=np.int32)
        for row, (slot, count) in enumerate(counts.items()):
            request = self.requests[slot]
            while len(request.blocks) * BLOCK < request.length + count:
                request.blocks.append(int(self.free.pop(0)))
                self.cache.clear(torch.tensor(request.blocks[-1:]))
            tables[row, : len(request.blocks)] = request.blocks
            request.keys = torch.cat([request.keys, torch.randn(HEADS, count, DIM)], 1)
            request.values = torch.cat([request.values, torch.randn(HEADS, count, DIM)], 1)
        numbers = np.array(list(counts.values()), dtype=np.int32)
        batch = make_batch(self.cache, tables, computed, numbers, CPU, decoding=(slots, self.lives, computed > 0))
        queries = torch.randn(int(numbers.sum()), HEADS * GROUP, DIM)
        new = [
            torch.cat([getattr(self.requests[slot], kind)[:, -count:] for slot, count in counts.items()], 1)
            for kind in ("keys", "values")
        ]
        keys_values = torch.stack([part.transpose(0, 1) for part in new], 1)
        write(batch, 1, keys_values)
        out = attend(batch, 1, queries, keys_values, scaling=SCALE, window=window, softcap=softcap)
        for slot, before, query, got in zip(
            counts, computed, queries.split(numbers.tolist()), out.split(numbers.tolist()), strict=True
        ):
            request = self.requests[slot]
            expected = plain(query.transpose(0, 1), request.keys, request.values, int(before), window, softcap)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
        return batch


@pytest.mark.parametrize("seed", range(8))
def test_random_lives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    # All fit; one row or so; three or so; none.
    page = 128 * TOKEN
    budget = [1 << 30, 2 * page, 5 * page, page - 1][seed % 4]
    monkeypatch.setattr(rows, "ROOM", [20, 300][seed % 2])
    model = Model(seed, budget)
    placed = 0
    for _ in range(60):
        for slot in range(SLOTS):
            if slot not in model.requests and rng.random() < 0.2:
                model.start(slot)
            elif slot in model.requests and (rng.random() < 0.02 or model.requests[slot].length > LONGEST - 20):
                model.end(slot)
        slots = [slot for slot in rng.permutation(list(model.requests)).tolist() if rng.random() < 0.9]
        if not slots:
            continue
        counts = {}
        for slot in slots:
            fresh = model.requests[slot].length == 0
            counts[slot] = int(rng.integers(1, 18)) if fresh or rng.random() < 0.03 else 1
        window, softcap = [(None, None), (7, None), (40, 1.0)][int(rng.integers(3))]
        batch = model.step(counts, window, softcap)
        placed += len(batch.view(window).placed)
        assert model.copies.nbytes <= budget
    assert (placed > 0) == (budget > page)


def test_rows_that_fit_are_not_gathered_and_keep_their_places() -> None:
    model = Model(0)
    for slot in range(3):
        model.start(slot)
    model.step({0: 9, 1: 12, 2: 7})
    for _ in range(4):
        view = model.step({0: 1, 1: 1, 2: 1}).view(None)
        assert not view.decodes
        [group] = view.placed
        assert group.tokens is None
        assert group.places == slice(0, 3)
    model.end(1)
    view = model.step({0: 1, 2: 1}).view(None)
    assert [group.places for group in view.placed] == [slice(0, 1), slice(2, 3)]
    model.start(1)
    model.step({0: 1, 1: 5, 2: 1})
    [group] = model.step({2: 1, 1: 1, 0: 1}).view(None).placed  # the free place is taken again
    assert group.tokens is not None
    assert group.tokens.tolist() == [2, 1, 0]


def test_only_rows_that_continue_get_a_place() -> None:
    """A row of one token may share blocks that an earlier row of the same step fills: nothing can be copied yet."""
    model = Model(0)
    model.start(0)
    batch = model.step({0: 1})
    assert batch.places is None
    assert model.copies.nbytes == 0


def test_memory_of_ended_rows_is_given_back_for_others() -> None:
    model = Model(0, budget=128 * TOKEN)
    for slot in (0, 1):
        model.start(slot)
    model.step({0: 50, 1: 40})
    assert len(model.step({0: 1, 1: 1}).view(None).placed) == 1
    model.end(0)
    assert [group.places for group in model.step({1: 1}).view(None).placed] == [slice(0, 1)]
    assert model.copies.nbytes == 128 * TOKEN


def test_rows_of_very_different_length_are_not_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PADDING", 1)
    model = Model(0)
    for slot in (0, 1, 2):
        model.start(slot)
    model.step({0: 2, 1: 140, 2: 3})
    view = model.step({0: 1, 1: 1, 2: 1}).view(None)
    assert [(group.places, group.reach) for group in view.placed] == [
        (slice(0, 1), slice(0, 3)),
        (slice(1, 2), slice(0, 141)),
        (slice(2, 3), slice(0, 4)),
    ]
