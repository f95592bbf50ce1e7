"""Paged attention against the plain formula, on random steps over a shuffled cache."""

from __future__ import annotations

import mmap
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drumline.model import attention
from drumline.model.attention import AttentionBatch, KVCache, dummy_batch, make_batch, paged_attention

CPU = torch.device("cpu")
DIM = 8
SCALE = 0.3


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, Hq, D] for q [Hq, T, D] over k, v [Hkv, context + T, D]."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * SCALE
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    key, query = torch.arange(k.shape[1])[None], context + torch.arange(q.shape[1])[:, None]
    mask = key > query
    if window is not None:
        mask |= key <= query - window
    scores = scores.masked_fill(mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def run_step(
    computed: list[int],
    counts: list[int],
    heads: int,
    group: int,
    block: int,
    seed: int = 0,
    variants: Sequence[tuple[int | None, float | None]] = ((None, None),),
    sinks: bool = False,
) -> None:
    """One step of rows with these lengths, compared row by row, for each (window, softcap)."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    ends = np.array(computed) + np.array(counts)
    widths = -(-ends // block)
    cache = KVCache(
        num_layers=2,
        num_blocks=int(widths.sum()) + 3,
        num_kv_heads=heads,
        block_size=block,
        head_dim=DIM,
        dtype=torch.float32,
        device=CPU,
    )
    cache.data.normal_()
    ids = rng.permutation(cache.num_blocks).astype(np.int32)
    tables = np.zeros((len(counts), int(widths.max())), dtype=np.int32)
    for row, width in enumerate(widths):
        tables[row, :width], ids = ids[:width], ids[width:]
    keys, values = ([torch.randn(heads, int(end), DIM) for end in ends] for _ in range(2))
    for row, context in enumerate(computed):
        for position in range(context):
            place = tables[row, position // block], slice(None), position % block
            cache.keys[1][place], cache.values[1][place] = keys[row][:, position], values[row][:, position]
    batch = make_batch(cache, tables, np.array(computed, np.int32), np.array(counts, np.int32), CPU)
    queries = [torch.randn(heads * group, count, DIM) for count in counts]
    new_keys, new_values = (
        torch.cat([whole[:, context:] for whole, context in zip(kind, computed, strict=True)], 1)
        for kind in (keys, values)
    )
    module = SimpleNamespace(layer_idx=1)
    more = torch.randn(heads * group) if sinks else None
    for window, softcap in variants:
        out, _ = paged_attention(
            module,  # type: ignore[arg-type]
            torch.cat(queries, 1)[None],
            new_keys[None],
            new_values[None],
            None,
            scaling=SCALE,
            ctx=batch,
            sliding_window=window,
            softcap=softcap,
            s_aux=more,
        )
        for row, (piece, query) in enumerate(zip(out[0].split(counts), queries, strict=True)):
            expected = plain(query, keys[row], values[row], computed[row], window, softcap, more)
            torch.testing.assert_close(piece, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 9))
    computed = [int(n) for n in rng.integers(0, 50, rows)]
    counts = [int(n) if n > 3 else 1 for n in rng.integers(1, 12, rows)]
    heads, group = [(1, 1), (1, 7), (2, 3), (3, 1)][seed % 4]
    run_step(computed, counts, heads, group, block=[1, 3, 4, 16][seed % 3], seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_windows_and_soft_caps_of_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 9))
    computed = [int(n) for n in rng.integers(0, 50, rows)]
    counts = [int(n) if n > 3 else 1 for n in rng.integers(1, 12, rows)]
    heads, group = [(1, 1), (1, 7), (2, 3), (3, 1)][seed % 4]
    variants = [(None, 2.0), (1, None), (2, 0.5), (5, None), (17, None), (17, 1.5), (49, None), (1000, 3.0)]
    run_step(computed, counts, heads, group, block=[1, 3, 4, 16][seed % 3], seed=seed, variants=variants)
    run_step(computed, counts, heads, group, block=4, seed=seed, variants=[*variants, (None, None)], sinks=True)


def test_windows_and_soft_caps_of_long_chunks() -> None:
    variants = [(None, 2.0), (100, None), (300, 1.0), (650, None)]
    lengths = [5, 700, 0, 30, 0, 900], [600, 257, 300, 2, 700, 1]
    run_step(*lengths, heads=2, group=2, block=16, variants=variants)
    run_step(*lengths, heads=2, group=2, block=16, variants=[(None, None), (100, None)], sinks=True)


def test_what_a_window_does_not_reach_is_not_gathered() -> None:
    cache = KVCache(
        num_layers=1, num_blocks=64, num_kv_heads=1, block_size=4, head_dim=DIM, dtype=torch.float32, device=CPU
    )
    tables = np.arange(64, dtype=np.int32).reshape(2, 32)
    batch = make_batch(cache, tables, np.array([100, 99], np.int32), np.array([1, 2], np.int32), CPU)
    view = batch.view(6)
    assert view.decodes[0].gather.tolist() == [23, 24, 25]  # keys 95 .. 100
    prefill = view.prefills[0]
    assert prefill.gather is not None
    assert prefill.gather.tolist() == [32 + 23, 32 + 24, 32 + 25]  # keys 94 .. 100
    assert prefill.skip == 2
    assert batch.view(6) is view
    assert batch.view(101) is batch.view(None)


def test_pieces_of_long_chunks_after_contexts_of_different_length() -> None:
    run_step([5, 700, 0, 30], [600, 257, 300, 2], heads=2, group=2, block=16)


def test_decode_rows_of_very_different_length_and_small_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    run_step([1, 1000, 3, 500, 490, 60, 2], [1] * 7, heads=2, group=3, block=4)
    monkeypatch.setattr(attention, "MAX_GATHER_BYTES", 1)
    run_step([1, 100, 3, 50], [1] * 4, heads=2, group=3, block=4)


def test_groups_pad_by_less_than_a_third() -> None:
    lengths = np.arange(1, 2000, 7).astype(np.int32)
    groups = attention._group_by_length(np.arange(len(lengths)), lengths, block_bytes=1)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        assert 3 * (lengths[group].min() + 2) >= 2 * lengths[group].max()
    assert len(groups) < 20


def test_a_dummy_batch_attends_to_itself() -> None:
    q, k, v = torch.randn(4, 3, DIM), torch.randn(2, 3, DIM), torch.randn(2, 3, DIM)
    batch: AttentionBatch = dummy_batch(3)
    module = SimpleNamespace(layer_idx=0)
    out, _ = paged_attention(module, q[None], k[None], v[None], None, scaling=SCALE, ctx=batch)  # type: ignore[arg-type]
    torch.testing.assert_close(out[0], plain(q, k, v, 0))


def test_unused_blocks_cost_no_memory() -> None:
    def resident() -> int:
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024  # type: ignore[union-attr]

    before = resident()
    cache = KVCache(
        num_layers=4,
        num_blocks=4096,
        num_kv_heads=4,
        block_size=16,
        head_dim=64,
        dtype=torch.float32,
        device=CPU,
    )
    assert cache.data.nbytes == 512 << 20
    assert resident() - before < 8 << 20
    cache.keys[3][7] = 1.0
    assert float(cache.data[:, :, 6:8].sum()) == 4 * 16 * 64
    assert resident() - before < 8 << 20
    assert hasattr(mmap, "MADV_NOHUGEPAGE")


@pytest.mark.parametrize("block", [4, 16, 48])
def test_blocks_are_touched_ahead(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Only so many as were promised, in small pieces, always in front of what is in use, without changing anything."""
    line = 4 * 3 * DIM * 4  # bytes of four tokens in one layer's keys
    ahead = 64 * 2 * 2 * line * block // 4
    monkeypatch.setattr(attention, "AHEAD_BYTES", ahead)
    cache = KVCache(
        num_layers=2, num_blocks=4000, num_kv_heads=3, block_size=block, head_dim=DIM, dtype=torch.float32, device=CPU
    )
    numbers = cache.data.numpy()

    def faults(first: int, stop: int) -> float:
        """Page faults of writing these blocks, as a share of their pages."""
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        numbers[:, :, first:stop] = 1
        found = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        return found / (numbers[:, :, first:stop].nbytes / mmap.PAGESIZE)

    def touch() -> int:
        times = 0
        while cache.touch_ahead():
            times += 1
        return times

    assert faults(3800, 3900) > 0.9  # this is how untouched ones look
    assert touch()
    assert faults(0, 40) < 0.1
    assert faults(100, 200) > 0.9
    assert touch() == 0
    cache.give_out(299)  # some of which nobody had touched
    assert touch()
    assert not numbers[:, :, 300:340].any()
    assert faults(300, 340) < 0.1
    assert faults(400, 500) > 0.9
    assert (numbers[:, :, 100:200] == 1).all()
    cache.give_out(3999)
    assert touch() == 0
    cache.give_out(5)
    assert touch() == 0
