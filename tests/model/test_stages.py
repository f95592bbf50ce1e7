"""Which layers a pipeline stage has: the best of all splits, by what layers, their KV and the head cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import ParallelConfig
from drumline.model.spec import ModelSpec
from drumline.model.stages import CONTEXT, SEQUENCES, layer_costs, stage_layers

SPEC = ModelSpec(
    model_type="llama",
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_positions=8192,
    tied=True,
    dtype="bfloat16",
)
"""SmolLM2."""


def split(spec: ModelSpec, stages: int) -> list[int]:
    return [part.size for part in stage_layers(spec, ParallelConfig(pipeline_parallel_size=stages))]


@given(
    st.integers(1, 9),
    st.integers(1, 64),
    st.integers(1, 4),
    st.integers(1, 50000),
    st.lists(st.sampled_from([None, 1, 100, 4096]), min_size=9, max_size=9),
    st.data(),
)
def test_the_slowest_stage_is_as_fast_as_can_be(
    layers: int, hidden: int, kv_heads: int, vocabulary: int, windows: list[int | None], data: st.DataObject
) -> None:
    spec = replace(
        SPEC,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=4 * kv_heads,
        num_kv_heads=kv_heads,
        vocab_size=vocabulary,
        windows=tuple(windows[:layers]),
    )
    stages = data.draw(st.integers(1, layers))
    weights = hidden * (2 * 5 * kv_heads * 64 + 3 * 1536)
    kv = [2 * kv_heads * 64 * SEQUENCES * min(window or CONTEXT, CONTEXT) for window in windows[:layers]]

    def slowest(cuts: tuple[int, ...]) -> int:
        ends = [0, *cuts, layers]
        costs = [sum(weights + one for one in kv[start:stop]) for start, stop in pairwise(ends)]
        costs[-1] += vocabulary * hidden
        return max(costs)

    found = stage_layers(spec, ParallelConfig(pipeline_parallel_size=stages))
    best = min(slowest(cuts) for cuts in combinations(range(1, layers), stages - 1))
    assert slowest(tuple(part.stop for part in found[:-1])) == pytest.approx(best, rel=1e-6)


def test_by_example() -> None:
    assert split(SPEC, 2) == [18, 12]  # the head is worth five and a half layers with their KV
    assert split(SPEC, 3) == [12, 12, 6]
    assert split(replace(SPEC, num_layers=7, vocab_size=307), 3) == [3, 2, 2]
    # Layers with a short window read fewer keys: the stage that has them gets more.
    spec = replace(SPEC, num_layers=8, vocab_size=1, hidden_size=8, windows=(None,) * 4 + (16,) * 4)
    assert split(spec, 2) == [2, 6]
    assert layer_costs(spec)[0] - layer_costs(spec)[7] == 2 * 3 * 64 * SEQUENCES * (CONTEXT - 16)
    assert stage_layers(SPEC, ParallelConfig(pipeline_parallel_size=2, pp_layer_partition=(1, 29)))[1] == (1, 30)
