"""The compiled forward gives the logits of transformers: every architecture, TP, stages, any kept rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.model.attention import make_batch
from drumline.model.compiled import CompiledForward, _late_requests
from drumline.parallel.shards import Range
from tests.model import test_architectures
from tests.model.equality import TIE
from tests.model.test_architectures import Split, check

Tiny = Callable[[str], tuple[Path, Any]]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_architectures, "ModuleForward", lambda model: CompiledForward(model, 256))


@pytest.mark.parametrize("tp", [1, 2])
def test_logits(tiny: Tiny, flat_shape: str, tp: int) -> None:
    folder, model = tiny(flat_shape)
    check(model, Split(folder, tp))


def test_stages(tiny: Tiny, flat_shape: str) -> None:
    folder, model = tiny(flat_shape)
    check(model, Split(folder, 2, [Range(0, 1), Range(1, 3)]))


@pytest.mark.parametrize("tp", [1, 2])
def test_kept_rows(tiny: Tiny, flat_shape: str, tp: int) -> None:
    """Whatever rows are kept of a step of several requests, their logits are those of a step that keeps all."""
    folder, model = tiny(flat_shape)
    split = Split(folder, tp)
    rng = np.random.default_rng(len(flat_shape))
    counts, computed = np.array([1, 9, 3, 1, 14]), np.zeros(5, dtype=np.int64)
    total, ends = int(counts.sum()), np.cumsum(counts) - 1
    ids = torch.from_numpy(rng.integers(3, model.config.vocab_size, total))
    positions = torch.from_numpy(np.concatenate([np.arange(count) for count in counts]))
    tables = split.tables[0, :20].reshape(5, 4)
    kept = [
        np.arange(total),
        ends,
        ends[[1, 4]],
        np.array([], dtype=np.int64),
        np.sort(rng.permutation(total)[: total // 2]),
        np.concatenate([ends, np.arange(1, 6)]),  # those that are sampled, then those of prompt logprobs
        np.arange(total - 1),
    ]

    def run(column: list[tuple[Any, Any]]) -> list[torch.Tensor]:
        (forward, cache), *_ = column
        batch = make_batch(cache, tables, computed, counts, torch.device("cpu"))
        with torch.inference_mode():
            return [forward(ids, positions, batch, torch.from_numpy(places)).clone() for places in kept]

    with ThreadPoolExecutor(tp) as pool:
        got = [torch.cat(parts, dim=1) for parts in zip(*pool.map(run, split.ranks), strict=True)]
    for places, logits in zip(kept, got, strict=True):
        assert logits.shape == (len(places), model.config.vocab_size)
        torch.testing.assert_close(logits, got[0][places], rtol=1e-4, atol=TIE * float(got[0].std()))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans(), st.data())
def test_late_requests(counts: list[int], only_last: bool, data: st.DataObject) -> None:
    """Each place is one row of one request, at the position that it has there."""
    count = np.array(counts)
    first, total = np.cumsum(count) - count, int(count.sum())
    computed = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(counts), max_size=len(counts))))
    tables = np.arange(len(counts), dtype=np.int32)[:, None]
    drawn = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))), dtype=np.int64)
    places = first + count - 1 if only_last else drawn
    wanted = [(place, computed[r] + place - first[r], r) for r in range(len(counts)) for place in places
              if first[r] <= place < first[r] + count[r]]  # fmt: skip
    late = _late_requests(places, first, count, computed, tables)
    rows = zip(*late[:3], late[3][:, 0], strict=True)
    assert [(f + i, c + i, table) for f, n, c, table in rows for i in range(n)] == wanted
    assert all(array.flags.c_contiguous for array in late)
    assert [array.dtype for array in late] == [np.int64] * 3 + [np.int32]
