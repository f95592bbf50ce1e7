"""The sampling rule against plain numpy, and over vocabulary slices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.cut import kept_prefix, kept_tokens
from drumline.model.noise import CpuNoise, Noise, noise_at
from drumline.model.sampling import MORE, MOST, Sampler, SamplingRows
from drumline.model.slots import SlotTable
from drumline.parallel.shards import Range, vocab_shards
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import SlotStart, TokenLogprobs, pack
from tests.model import rule


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


def on_ranks(vocab_size: int, size: int, work: Callable[[Sampler], Any]) -> list[Any]:
    """What ``work`` gives on each of ``size`` ranks."""
    ranges = vocab_shards(vocab_size, size)
    barrier, box = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Sampler(ranges, ThreadGroup(size, rank, barrier, box)))
        except BaseException as error:  # noqa: BLE001  the test gets it
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def sample_split(logits: torch.Tensor, rows: SamplingRows, size: int) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Sample over ``size`` ranks; all must agree."""
    results = on_ranks(
        logits.shape[1], size, lambda sampler: sampler.sample(logits[:, sampler.ids.as_slice()].clone(), rows)
    )
    tokens = [result[0].tolist() for result in results]
    assert all(other == tokens[0] for other in tokens)
    return tokens[0], results[0][1]


def make_rows(count: int, **columns: object) -> SamplingRows:
    defaults: dict[str, object] = {
        "temperature": np.ones(count),
        "top_p": np.ones(count),
        "top_k": np.zeros(count, dtype=np.int32),
        "min_p": np.zeros(count),
        "seed": np.arange(count, dtype=np.int64) * 7919 - 5,
        "output_index": np.zeros(count, dtype=np.int64),
        "logprobs": np.full(count, -1, dtype=np.int32),
    }
    return SamplingRows(**(defaults | columns))  # type: ignore[arg-type]


def gumbel(seeds: list[int], indices: list[int], start: int, stop: int) -> torch.Tensor:
    ids, keys = torch.arange(start, stop)[None], (np.array(seeds), np.array(indices))
    noise: torch.Tensor = noise_at(*keys, ids)
    np.testing.assert_allclose(
        noise_at(*keys, ids.numpy()), noise, rtol=1e-14, atol=1e-14
    )  # where it is near zero, it is a logarithm near one
    return noise


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 200_000), st.integers(1, 50))
def test_noise_is_the_documented_function(seed: int, index: int, start: int, size: int) -> None:
    noise = gumbel([seed - 2**64 if seed >= 2**63 else seed], [index], start, start + size)
    expected = rule.noise(seed, index, start + size)[start:]
    np.testing.assert_allclose(noise[0].numpy(), expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32), st.sampled_from([1, 7, 300, 70_000]), st.sampled_from([0.01, 0.3, 1.0, 2.0]), st.booleans()
)
def test_drawing_on_a_cpu_is_drawing(seed: int, size: int, temperature: float, flat: bool) -> None:
    """By the bound on the noise, and by the noise of all ids: the same tokens."""
    rng = np.random.default_rng(seed)
    count, ids = int(rng.integers(1, 4)), Range(11, 11 + size)
    logits = rng.normal(size=(count, size)).astype(np.float32) * (0.1 if flat else 4)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[0, 0] = logits.max() if np.isfinite(logits.max()) else 0
    arguments = (
        torch.from_numpy(logits),
        np.full(count, temperature),
        rng.integers(-(2**63), 2**63 - 1, count),
        rng.integers(0, 1000, count),
    )
    values, places = CpuNoise(ids).draw(*arguments)
    expected_values, expected = Noise(ids).draw(*arguments)
    assert places.tolist() == expected.tolist()
    torch.testing.assert_close(values, expected_values, rtol=1e-12, atol=1e-12)


def test_drawing_where_nothing_is_left() -> None:
    logits = torch.full((2, 5), float("-inf"))
    logits[1, 3] = 0
    arguments = (logits, np.ones(2), np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64))
    assert CpuNoise(Range(0, 5)).draw(*arguments)[1].tolist() == [0, 3]


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel([1, 2], [0, 0], 0, 200_000)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.02)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.01
    following = gumbel([1], [1], 0, 200_000)
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


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 10**6),
    st.integers(0, 12),
    st.floats(0.01, 1.0),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    st.floats(0.1, 3.0),
    st.booleans(),
)
def test_min_p_top_k_and_top_p(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float, ties: bool
) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)) * 2
    if ties:
        logits = logits.round()
    rows = make_rows(
        1,
        temperature=np.array([temperature]),
        top_k=np.array([top_k], dtype=np.int32),
        top_p=np.array([top_p]),
        min_p=np.array([min_p]),
    )
    keep = kept_tokens(logits, rows)
    expected, on_edge = rule.kept(logits[0].double().numpy() / temperature, top_k, top_p, min_p)
    assert on_edge or keep[0].tolist() == expected.tolist()
    assert keep[0, int(logits.argmax())]


def test_top_p_of_a_flat_distribution() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 0.01
    for top_p in (0.05, 0.5, 0.999):
        keep = kept_tokens(logits, make_rows(1, top_p=np.array([top_p])))
        expected, on_edge = rule.kept(logits[0].double().numpy(), 0, top_p)
        assert on_edge or keep[0].tolist() == expected.tolist()


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32), st.sampled_from([3, 40, MOST]), st.booleans())
def test_what_stays_is_the_same_in_numpy_and_torch(seed: int, width: int, alone: bool) -> None:
    """CPUs have numpy's arrays, other devices torch's."""
    rng = np.random.default_rng(seed)
    values = -np.sort(-np.round(rng.normal(size=(5, width)) * 4, 1), axis=1)
    values[rng.random((5, width)).cumsum(axis=1) > width * 0.6] = -np.inf
    values[0] = -np.inf
    rows = make_rows(
        5,
        temperature=rng.choice([0.3, 1.0, 2.0], 5),
        top_p=rng.choice([0.2, 0.9], 5) if alone else rng.choice([0.2, 0.9, 1.0], 5),
        top_k=np.zeros(5, dtype=np.int32) if alone else rng.choice([1, 5, 400], 5).astype(np.int32),
        min_p=np.zeros(5) if alone else rng.choice([0.0, 0.1], 5),
    )
    total = rng.uniform(1, 50, 5)
    for complete in (False, True):
        with np.errstate(invalid="ignore"):
            count, undecided = kept_prefix(values, rows, total=total, complete=complete)
        again = kept_prefix(torch.from_numpy(values), rows, total=torch.from_numpy(total), complete=complete)
        assert count.tolist() == again[0].tolist()
        assert undecided.tolist() == again[1].tolist()
        assert complete is False or not undecided.any()


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[SlotSampling], int]:
    """Logits, what each row asks for, and a number of ranks: vocabularies below and above MOST, flat and steep ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocab_size = draw(st.sampled_from([40, MOST, 3 * MOST + 1, MORE + 300]))
    rows = draw(st.integers(1, 6))
    scale = rng.choice([0.01, 1.0, 4.0], size=(rows, 1))
    logits = (rng.normal(size=(rows, vocab_size)) * scale).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # many equal ones
    kinds = [
        SlotSampling(
            temperature=float(rng.choice([0.0, 0.01, 0.7, 1.0, 2.0])),
            top_p=float(rng.choice([1.0, 1.0, 0.1, 0.9, 0.999])),
            top_k=int(rng.choice([0, 0, 1, 5, MOST - 1, MOST, MOST + 1, MORE])),
            min_p=float(rng.choice([0.0, 0.0, 0.001, 0.3, 1.0])),
            seed=int(rng.integers(0, 2**63)),
        )
        for _ in range(rows)
    ]
    return torch.from_numpy(logits), kinds, draw(st.sampled_from([1, 2, 3, 5]))


def rows_of(kinds: list[SlotSampling], **more: object) -> SamplingRows:
    return make_rows(
        len(kinds),
        temperature=np.array([kind.temperature for kind in kinds]),
        top_p=np.array([kind.top_p for kind in kinds]),
        top_k=np.array([kind.top_k for kind in kinds], dtype=np.int32),
        min_p=np.array([kind.min_p for kind in kinds]),
        seed=np.array([kind.seed for kind in kinds], dtype=np.int64),
        **more,
    )


@settings(deadline=None, max_examples=150)
@given(batches())
def test_any_batch_on_any_number_of_ranks_follows_the_rule(
    batch: tuple[torch.Tensor, list[SlotSampling], int],
) -> None:
    logits, kinds, size = batch
    tokens, _ = sample_split(logits, rows_of(kinds), size)
    for row, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        scores, on_edge = rule.perturbed(logits[row].double().numpy(), kind, 0)
        assert on_edge or token == int(scores.argmax()), (row, kind)
        if size == 1:
            assert sample_split(logits[row : row + 1], rows_of([kind]), 1)[0] == [token]


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
    tokens, logprobs = sample_split(logits, rows, size)
    expected_tokens, expected = sample_split(logits, rows, 1)
    assert tokens == expected_tokens
    for entry, other in zip(logprobs, expected, strict=True):
        assert (entry is None) == (other is None)
        if entry is not None and other is not None:
            assert (entry.rank, entry.top_ids) == (other.rank, other.top_ids)
            assert [entry.logprob, *entry.top_logprobs] == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_logits_give_the_lowest_id(size: int) -> None:
    logits = torch.zeros(3, 8)
    logits[1, [3, 6]] = 1.0
    logits[2, 7] = 1.0
    assert sample_split(logits, make_rows(3, temperature=np.zeros(3)), size)[0] == [0, 3, 7]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("vocab_size", [100, 400])
def test_rows_whose_tokens_are_all_banned_give_the_lowest_id(size: int, vocab_size: int) -> None:
    kinds = [
        SlotSampling(),
        SlotSampling(temperature=1),
        SlotSampling(temperature=1, top_k=5),
        SlotSampling(temperature=1, top_p=0.5),
        SlotSampling(temperature=1, min_p=0.5),
        SlotSampling(temperature=1, min_p=0.5, top_k=3, top_p=0.5),
    ]
    logits = torch.full((len(kinds), vocab_size), float("-inf"))
    assert sample_split(logits, rows_of(kinds), size)[0] == [0] * len(kinds)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_log_probabilities(size: int) -> None:
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(3)) * 2
    logits[1] = logits[1].round()
    logits[2, 50:] = float("-inf")
    tokens, counts = np.array([3, 80, 7, 0, 89], dtype=np.int32), np.array([0, 4, 90, 1, 60], dtype=np.int32)
    found = on_ranks(90, size, lambda sampler: sampler.logprobs(logits[:, sampler.ids.as_slice()], tokens, counts))[-1]
    expected = logits.double().log_softmax(dim=1)
    for row, (entry, token, count) in enumerate(zip(found, tokens, counts, strict=True)):
        order = np.argsort(-logits[row].numpy(), kind="stable")[: min(count, 50 if row == 2 else 90)]
        assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert entry.rank == int((logits[row] > logits[row, token]).sum()) + 1
        assert entry.top_ids == order.tolist()
        assert entry.top_logprobs == pytest.approx(expected[row, order].tolist(), abs=1e-6)


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(5))
    expected = logits.log_softmax(dim=1)
    table = SlotTable(20, 4, ids=Range(0, 30))
    kind = SlotSampling(temperature=0.5, logprobs=2, bias_ids=(4,), bias_values=(100.0,))
    for slot in range(3):
        table.start(SlotStart(slot, "r", pack([1, 2]), 2, kind if slot else SlotSampling()))
    tokens, logprobs = sample_split(logits, table.sampling_rows(np.arange(3, dtype=np.int32)), 1)
    assert tokens[1:] == [4, 4]
    assert logprobs[0] is None
    for row in (1, 2):
        entry = logprobs[row]
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[row, 4]), abs=1e-5)
        assert entry.top_ids == expected[row].topk(2).indices.tolist()


KINDS = [
    SlotSampling(),
    SlotSampling(temperature=0.7),
    SlotSampling(logprobs=0),
    SlotSampling(bias_ids=(4,), bias_values=(2.0,)),
    SlotSampling(temperature=1, logprobs=1, repetition_penalty=1.5),
]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, len(KINDS) - 1)), max_size=40))
def test_plain_rows_are_told_by_the_slots_in_use(events: list[tuple[int, int]]) -> None:
    """Plain iff no slot in use asks for more than the largest logit."""
    table, used = SlotTable(20, 4, 2, ids=Range(0, 30)), dict[int, int]()
    for slot, kind in events:
        if slot in used:
            table.free(np.array([slot], dtype=np.int32))
            del used[slot]
        else:
            table.start(SlotStart(slot, "r", pack([1, 2]), 2, KINDS[kind]))
            used[slot] = kind
        if used:
            rows = table.sampling_rows(np.array(sorted(used), dtype=np.int32))
            assert rows.plain == (set(used.values()) == {0})
            assert rows.plain or len(rows.temperature) == len(used)
