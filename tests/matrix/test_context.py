"""Token equality with transformers under context parallelism, over the whole road: LLM, engine core, workers.

As in ``test_equality``: requests at once, some alone, the first ones again; with prefix hits and preemptions where the
options are there for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from drumline import LLM, SamplingParams
from drumline.plan.sampling import SlotSampling
from tests.matrix.test_equality import (
    BLOCK,
    EXPERT_OPTIONS,
    OPTIONS,
    SAMPLED,
    Models,
    Record,
    count_in,
    make_prompts,
    tokens_of,
)
from tests.model.equality import Tally, compare_greedy, compare_sampled
from tests.model.test_context_ranks import Sizes, name_of

COUNT, LONGEST, MOST = 24, 100, 45
CELLS = [
    (model, sizes, options)
    for model, many in {
        "llama": [Sizes(pcp=2), Sizes(tp=2, pcp=2), Sizes(tp=2, pcp=2, dcp=2), Sizes(pp=2, pcp=2)],
        "qwen2": [
            Sizes(tp=2, dcp=2),
            Sizes(tp=4, dcp=2),
            Sizes(tp=2, pcp=2, dcp=2),
            Sizes(tp=2, pcp=2, dcp=4),
            Sizes(tp=2, pp=2, dcp=2),
            Sizes(tp=2, pp=2, pcp=2, dcp=4),
        ],
        "qwen3": [Sizes(tp=4, dcp=2), Sizes(pcp=2, dcp=2)],
        "gemma2": [Sizes(pcp=2, dcp=2)],
    }.items()
    for sizes in many
    for options in OPTIONS
] + [
    ("qwen3_moe", Sizes(pcp=2), "ep"),
    ("mixtral", Sizes(tp=2, pcp=2), "ep"),
    ("mixtral", Sizes(tp=2, pcp=2, dcp=2), "tight-eplb"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@contextmanager
def started(path: str, sizes: Sizes, options: dict[str, Any]) -> Iterator[LLM]:
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory_bytes": 2**25}
    split = {
        "tensor_parallel_size": sizes.tp,
        "pipeline_parallel_size": sizes.pp,
        "prefill_context_parallel_size": sizes.pcp,
        "decode_context_parallel_size": sizes.dcp,
    }
    if "num_gpu_blocks_override" in options:  # of longer blocks fewer, as few tokens as without
        options = options | {"num_gpu_blocks_override": options["num_gpu_blocks_override"] // sizes.dcp - 2}
    with LLM(path, block_size=BLOCK, **(split | defaults | options)) as llm:
        yield llm


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("model", "sizes", "options"), CELLS, ids=name_of)
def test_greedy(models: Models, model: str, sizes: Sizes, options: str, record_property: Record) -> None:
    path, reference = models.get(model)
    prompts = make_prompts(reference.config.vocab_size, COUNT, LONGEST)
    params = [SamplingParams(temperature=0, max_tokens=MOST - i % 9, ignore_eos=True) for i in range(COUNT)]
    tally, how = Tally(), (OPTIONS | EXPERT_OPTIONS)[options]
    with started(path, sizes, how) as llm:
        for i, got in enumerate(tokens_of(llm, prompts, params)):
            assert len(got) == params[i].max_tokens
            tally.add(compare_greedy(reference, prompts[i], got), f"together {i}")
        for i in range(0, COUNT, 8):
            tally.add(compare_greedy(reference, prompts[i], tokens_of(llm, [prompts[i]], params[i])[0]), f"alone {i}")
        for i, got in enumerate(tokens_of(llm, prompts[:6], params[:6])):
            tally.add(compare_greedy(reference, prompts[i], got), f"again {i}")
        stats = llm.stats()
    count_in(tally, record_property)
    assert stats.preemptions > 0 or not options.startswith("tight")
    assert (stats.prefix_hits > 0) == how.get("enable_prefix_caching", True)


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", [Sizes(pcp=2), Sizes(tp=2, dcp=2), Sizes(tp=2, pcp=2, dcp=4)], ids=name_of)
def test_sampled(models: Models, sizes: Sizes, record_property: Record) -> None:
    path, reference = models.get("qwen2")
    prompts = make_prompts(reference.config.vocab_size, 16, LONGEST, seed=1)
    params = [SamplingParams(seed=1000 + i, max_tokens=MOST, ignore_eos=True, **SAMPLED[i % 4]) for i in range(16)]
    with started(path, sizes, {}) as llm:
        got = tokens_of(llm, prompts, params)
    tally = Tally()
    for prompt, p, tokens in zip(prompts, params, got, strict=True):
        rule = SlotSampling(temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, seed=p.seed or 0)
        tally.add(compare_sampled(reference, prompt, tokens, rule), "sampled")
    count_in(tally, record_property)


@pytest.mark.matrix
def test_a_block_stands_for_more_tokens(models: Models) -> None:
    """Of the same memory on each rank, two ranks that share out sequences hold twice as many tokens."""
    path, _ = models.get("qwen2")
    tokens = {}
    for sizes in (Sizes(tp=2), Sizes(tp=2, dcp=2)):
        with started(path, sizes, {}) as llm:
            spans = [spec.block_size for spec in llm.collective_rpc("get_kv_cache_spec")]
            assert spans == [BLOCK * sizes.dcp] * 2
            tokens[sizes.dcp] = llm.stats().kv_blocks_total * spans[0]
    assert tokens[2] == 2 * tokens[1]
