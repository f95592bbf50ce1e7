"""The compiled attention against the formula in float64, on random steps over a shuffled cache."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drumline.model.kernels.attention import attend, scratch_floats
from drumline.model.kernels.jit import FASTMATH


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def run(
    q, q_stride, num_rows, first, count, computed, tables, table_stride, keys, values, block, kv_heads, group, dim,
    scaling, window, softcap, out, out_stride, scratch,
):  # fmt: skip
    attend(
        q, q_stride, num_rows, first, count, computed, tables, table_stride, keys, values, block, kv_heads, group, dim,
        scaling, window, softcap, out, out_stride, scratch,
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    dim: int = 32
    block: int = 16
    kv_heads: int = 2
    group: int = 2
    window: int = 0
    softcap: float = 0.0
    spread: float = 1.0
    """How far apart scores are."""


def formula(q, k, v, context: int, shape: Shape, scaling: float) -> np.ndarray:
    """[T, Hq, D] for q [T, Hq, D] over k, v [S, Hkv, D]."""
    k, v = (x.astype(np.float64).repeat(shape.group, 1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), k) * scaling
    if shape.softcap:
        scores = np.tanh(scores / shape.softcap) * shape.softcap
    key, query = np.arange(len(k))[None], context + np.arange(len(q))[:, None]
    seen = key <= query
    if shape.window:
        seen &= key > query - shape.window
    scores[:, ~seen] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def check(rows: list[tuple[int, int]], shape: Shape, seed: int = 0) -> None:
    """One step of rows that have (computed, new) tokens."""
    rng = np.random.default_rng(seed)
    computed, count = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    first = np.cumsum(count) - count
    ends = computed + count
    widths = -(-ends // shape.block)
    tables = np.full((len(rows), int(widths.max()) + 2), -(1 << 30), dtype=np.int32)
    num_blocks = int(widths.sum()) + 2
    blocks = rng.permutation(num_blocks)
    for row, width in enumerate(widths):
        tables[row, :width], blocks = blocks[:width], blocks[width:]
    keys, values = np.full((2, num_blocks, shape.kv_heads, shape.block, shape.dim), np.nan, dtype=np.float32)
    heads, tokens = shape.kv_heads * shape.group, int(count.sum())
    scaling = shape.dim**-0.5 * shape.spread
    q = np.full((tokens, heads * shape.dim + 5), np.nan, dtype=np.float32)
    q[:, : heads * shape.dim] = rng.standard_normal((tokens, heads * shape.dim))
    expected = np.full((tokens, heads * shape.dim + 3), 7, dtype=np.float32)
    out = expected.copy()
    for row in range(len(rows)):
        k, v = rng.standard_normal((2, ends[row], shape.kv_heads, shape.dim)).astype(np.float32)
        places = np.arange(ends[row])
        where = tables[row, places // shape.block], slice(None), places % shape.block
        keys[where], values[where] = k, v
        mine = slice(first[row], first[row] + count[row])
        queries = q[mine, : heads * shape.dim].reshape(-1, heads, shape.dim)
        result = formula(queries, k, v, int(computed[row]), shape, scaling)
        expected[mine, : heads * shape.dim] = result.reshape(len(result), -1)
    size = scratch_floats(shape.kv_heads, shape.group, shape.dim)
    scratch = np.full(size + 16, np.nan, dtype=np.float32)
    run(
        q.ctypes.data, q.shape[1], len(rows), first.ctypes.data, count.ctypes.data, computed.ctypes.data,
        tables.ctypes.data, tables.shape[1], keys.ctypes.data, values.ctypes.data, shape.block, shape.kv_heads,
        shape.group, shape.dim, scaling, shape.window, shape.softcap, out.ctypes.data, out.shape[1],
        scratch.ctypes.data,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=3e-5, atol=1e-5 * max(shape.spread, 1))
    assert np.isnan(scratch[size:]).all()


shapes = st.builds(
    Shape,
    dim=st.sampled_from([8, 10, 12, 32, 64, 80, 128]),
    block=st.integers(1, 32),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 8),
    window=st.one_of(st.just(0), st.integers(1, 40)),
    softcap=st.sampled_from([0.0, 0.7, 30.0]),
    spread=st.sampled_from([0.1, 1.0, 20.0]),
)
decoding = st.tuples(st.integers(0, 90), st.just(1))
prompts = st.tuples(st.sampled_from([0, 0, 1, 17, 64]), st.integers(1, 70))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(decoding, prompts), min_size=1, max_size=4), shapes, st.integers(0, 9))
@example([(4, 1)], Shape(dim=10, block=3, group=3), 0)
def test_any_step(rows: list[tuple[int, int]], shape: Shape, seed: int) -> None:
    check(rows, shape, seed)


@pytest.mark.parametrize("rows", [[(1500, 1), (3, 1)], [(0, 1300)], [(700, 2)], [(900, 500), (40, 1)]])
@pytest.mark.parametrize("shape", [Shape(), Shape(dim=64, group=3, window=600), Shape(dim=80, block=7, softcap=5.0)])
def test_long_rows(rows: list[tuple[int, int]], shape: Shape) -> None:
    check(rows, shape)
