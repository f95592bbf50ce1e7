"""The sampling rule against plain numpy, and over vocabulary slices."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.sampling import Sampler, SamplingRows, gumbel_noise, kept_tokens
from drumline.parallel.shards import Range, vocab_shards
from tests.model.equality import reference_kept, reference_noise

CPU = torch.device("cpu")


class ThreadGroup:
    """A group of threads: the one collective that sampling needs, over a barrier."""

    def __init__(self, size: int, rank: int, barrier: threading.Barrier, box: list[torch.Tensor | None]) -> None:
        self.size, self.rank_in_group, self._barrier, self._box = size, rank, barrier, box

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        assert sizes is None or list(sizes)[self.rank_in_group] == tensor.shape[dim]
        self._box[self.rank_in_group] = tensor
        self._barrier.wait(20)
        out = torch.cat([piece for piece in self._box if piece is not None], dim)
        self._barrier.wait(20)
        return out


def sample_split(logits: torch.Tensor, rows: SamplingRows, size: int) -> tuple[list[int], list[object]]:
    """Sample over ``size`` ranks; all must agree."""
    ranges = vocab_shards(logits.shape[1], size)
    barrier, box = threading.Barrier(size), [None] * size
    results: list[object] = [None] * size

    def work(rank: int) -> None:
        group = ThreadGroup(size, rank, barrier, box)
        results[rank] = Sampler(ranges, group).sample(logits[:, ranges[rank].as_slice()], rows)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    tokens = [result[0].tolist() for result in results]  # type: ignore[index]
    assert all(other == tokens[0] for other in tokens)
    return tokens[0], results[0][1]  # type: ignore[index]


def make_rows(count: int, **columns: object) -> SamplingRows:
    defaults: dict[str, object] = {
        "temperature": np.ones(count),
        "top_p": np.ones(count),
        "top_k": np.zeros(count, dtype=np.int32),
        "seed": np.arange(count, dtype=np.int64) * 7919 - 5,
        "output_index": np.zeros(count, dtype=np.int64),
        "logprobs": np.full(count, -1, dtype=np.int32),
    }
    return SamplingRows(**(defaults | columns))  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 200_000), st.integers(1, 50))
def test_noise_is_the_documented_function(seed: int, index: int, start: int, size: int) -> None:
    signed = np.array([seed - 2**64 if seed >= 2**63 else seed], dtype=np.int64)
    noise = gumbel_noise(signed, np.array([index], dtype=np.int64), Range(start, start + size), CPU)
    expected = reference_noise(seed, index, start + size)[start:]
    np.testing.assert_allclose(noise[0].numpy(), expected, rtol=1e-12, atol=1e-12)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(np.array([1, 2], dtype=np.int64), np.array([0, 0], dtype=np.int64), Range(0, 200_000), CPU)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.02)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.01
    following = gumbel_noise(np.array([1], dtype=np.int64), np.array([1], dtype=np.int64), Range(0, 200_000), CPU)
    assert abs(float(torch.corrcoef(torch.cat([noise[:1], following]))[0, 1])) < 0.01


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    draws = 20_000
    rows = make_rows(
        draws, output_index=np.arange(draws), seed=np.full(draws, 3, dtype=np.int64), temperature=np.full(draws, 0.7)
    )
    tokens, _ = sample_split(logits.expand(draws, 5), rows, 1)
    seen = np.bincount(tokens, minlength=5) / draws
    np.testing.assert_allclose(seen, (logits[0] / 0.7).softmax(0).numpy(), atol=0.015)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 12), st.floats(0.01, 1.0), st.floats(0.1, 3.0), st.booleans())
def test_top_k_and_top_p(seed: int, top_k: int, top_p: float, temperature: float, ties: bool) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)) * 2
    if ties:
        logits = logits.round()
    keep = kept_tokens(
        logits, np.array([temperature]), np.array([top_k], dtype=np.int32), np.array([top_p], dtype=np.float64)
    )
    expected, on_edge = reference_kept(logits[0].double().numpy() / temperature, top_k, top_p)
    assert on_edge or keep[0].tolist() == expected.tolist()
    assert keep[0, int(logits.argmax())]


def test_top_p_of_a_flat_distribution() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 0.01
    for top_p in (0.05, 0.5, 0.999):
        keep = kept_tokens(logits, np.array([1.0]), np.array([0], dtype=np.int32), np.array([top_p]))
        expected, on_edge = reference_kept(logits[0].double().numpy(), 0, top_p)
        assert on_edge or keep[0].tolist() == expected.tolist()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_slices_give_what_the_whole_gives(size: int) -> None:
    count = 12
    logits = torch.randn(count, 101, generator=torch.Generator().manual_seed(size)) * 3
    rows = make_rows(
        count,
        temperature=np.array([0.0, 0.5, 1.0, 2.0] * 3),
        top_k=np.array([0] * 4 + [5] * 4 + [0] * 4, dtype=np.int32),
        top_p=np.array([1.0] * 8 + [0.6] * 4),
        logprobs=np.array([-1, 2, 0] * 4, dtype=np.int32),
        output_index=np.arange(count),
    )
    assert sample_split(logits, rows, size) == sample_split(logits, rows, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_logits_give_the_lowest_id(size: int) -> None:
    logits = torch.zeros(3, 8)
    logits[1, [3, 6]] = 1.0
    logits[2, 7] = 1.0
    assert sample_split(logits, make_rows(3, temperature=np.zeros(3)), size)[0] == [0, 3, 7]
