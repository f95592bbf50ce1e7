"""Attention in parts: what lies on several places, merged, is attention over all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.model.attention import KVCache, _gathered
from drumline.model.spread import _Rows, merge, partial_attention


def whole(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, n, Hq, D] in float64, head by head."""
    out = torch.zeros(*q.shape[:3], values.shape[-1], dtype=torch.float64)
    group = q.shape[2] // keys.shape[1]
    for head in range(q.shape[2]):
        scores = 0.3 * q[:, :, head].double() @ keys[:, head // group].double().transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(*scores.shape[:2], 1)], -1)
        out[:, :, head] = scores.softmax(-1)[..., : keys.shape[2]] @ values[:, head // group].double()
    return out


@given(
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    count=st.integers(1, 4),
    length=st.integers(1, 20),
    parts=st.integers(1, 5),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_merged_parts_are_the_whole(
    kv: int, group: int, count: int, length: int, parts: int, softcap: float | None, with_sinks: bool, seed: int
) -> None:
    """Also where a query sees nothing of a part, and where scores are large."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    q, keys, values = 9 * tensor(2, count, kv * group, 8), 9 * tensor(2, kv, length, 8), tensor(2, kv, length, 6)
    seen = tensor(2, count, length) > 0
    seen[:, :, int(torch.randint(length, (), generator=random))] = True
    found = []
    for part in range(parts):
        mine = slice(part, None, parts)
        if part < length:
            found.append(partial_attention(q, keys[:, :, mine], values[:, :, mine], seen[:, :, mine], 0.3, softcap))
            assert found[-1].isfinite()[..., :-1].all()
    sinks = 5 * tensor(kv * group) if with_sinks else None
    each = None if sinks is None else sinks.expand(q.shape[:3]).flatten()
    merged = merge(torch.stack(found).flatten(1, -2), each).view(2, count, kv * group, 6)
    torch.testing.assert_close(merged.double(), whole(q, keys, values, seen, softcap, sinks), atol=1e-4, rtol=1e-4)


MOST = 3 * 40 // 2 + 6  # positions of a row in the test below: blocks of one position on one place need as many


@given(
    first=st.integers(0, 40),
    length=st.integers(1, 6),
    size=st.integers(1, 4),
    block=st.integers(1, 5),
    window=st.none() | st.integers(1, 30),
    single=st.booleans(),
)
def test_rows_read_what_their_queries_see(
    first: int, length: int, size: int, block: int, window: int | None, single: bool
) -> None:
    """Keys that hold their position say which ones are read at each place: together all that the query sees, once."""
    tables = np.random.default_rng(first).permutation(2 * MOST).reshape(2, MOST).astype(np.int32)
    firsts = np.array([first, 3 * first // 2], dtype=np.int64)
    lengths = np.array([1 if single else length] * 2, dtype=np.int64)
    found: dict[tuple[int, int], list[int]] = {}
    for place in range(size):
        cache = KVCache(
            num_layers=1,
            num_blocks=2 * MOST,
            num_kv_heads=1,
            block_size=block,
            head_dim=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            ranks=size,
        )
        assert cache.span == block * size
        for row in range(2):
            for number, position in enumerate(range(place, int(firsts[row] + lengths[row]), size)):
                cache.keys[0][tables[row, number // block], 0, number % block] = position
        group = _Place(place, size)
        rows = _Rows(cache, tables, firsts, lengths, window, group, torch.device("cpu"))
        readings = [rows.together(np.arange(2))] if single else [rows.alone(0), rows.alone(1)]
        for number, reading in enumerate(readings):
            keys = _gathered(cache.keys[0], reading.gather, reading.rows)[:, 0, :, 0]
            for piece in reading.pieces:
                for (row, query), seen in zip(np.ndindex(*piece.seen.shape[:2]), piece.seen.flatten(0, 1), strict=True):
                    which = row if single else number
                    read = keys[row, : piece.keys][seen].int().tolist()
                    found.setdefault((which, int(firsts[which]) + query), []).extend(read)
    assert len(found) == int(lengths.sum())
    for (_, position), positions in found.items():
        least = 0 if window is None else max(position - window + 1, 0)
        assert sorted(positions) == list(range(least, position + 1))


class _Place:
    """A place in a group, for arithmetic alone."""

    def __init__(self, place: int, size: int) -> None:
        self.rank_in_group, self.size = place, size

    def all_gather(self, *_: object) -> torch.Tensor:
        raise AssertionError("nothing is gathered here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_counts_for_nothing(dtype: torch.dtype) -> None:
    ones = torch.ones(1, 1, 2, 4, dtype=dtype)
    q = torch.ones(1, 2, 1, 4, dtype=dtype)
    seen = torch.tensor([[[False, False], [True, False]]])
    found = partial_attention(q, ones, ones, seen, 0.5)
    assert found[0, 0, 0].tolist() == [0, 0, 0, 0, float("-inf")]
    assert found[0, 1, 0].tolist() == [1, 1, 1, 1, 2]
