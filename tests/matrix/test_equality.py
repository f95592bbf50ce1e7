"""Token equality with transformers (promise 6 of the design), over the whole road: LLM, engine core, workers.

One cell of the matrix is (model, TP size, PP size, engine options). In it one engine answers

* 32 requests at once, some of which share prefixes,
* a few of them alone, one after the other,
* the first ones again, so that they hit the prefix cache where there is one,

and every output is compared with the model's own greedy run under the tie rule (tests/model/equality.py). Each option
also proves that it did what it is there for: preemptions happened, prefixes were hit, prompts were longer than a step.
That the features of an architecture change its answers, so that a missing one would be seen, is held by
tests/model/test_architectures.py.

Seeded sampling: the same requests at several TP x PP, with and without preemption, against the sampling rule in numpy.

``make matrix`` runs all cells; ``make test`` those of SUBSET, and every architecture at TP 2 over real worker processes
without the engine (tests/model/test_worker_ranks.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from drumline import LLM, SamplingParams
from drumline.config import ModelConfig
from drumline.model.resolve import resolve
from drumline.plan.sampling import SlotSampling
from tests.model.equality import Tally, compare_greedy, compare_sampled
from tests.model.tiny import SHAPES, make_tiny

BLOCK = 16
OPTIONS: dict[str, dict[str, Any]] = {
    # look-ahead, prefix cache, chunks larger than any prompt
    "plain": {},
    # no look-ahead, no prefix cache, chunks of an odd size
    "chunks": {"max_num_batched_tokens": 37, "async_scheduling": False, "enable_prefix_caching": False},
    # look-ahead, prefix cache, odd chunks and a pool that cannot hold all: preemption by recomputation
    "tight": {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 24, "max_model_len": 160},
    # the same without look-ahead and without the prefix cache
    "tight-sync": {
        "num_gpu_blocks_override": 24,
        "max_model_len": 160,
        "async_scheduling": False,
        "enable_prefix_caching": False,
    },
}
EXPERT_OPTIONS: dict[str, dict[str, Any]] = {
    # whole experts on each rank, which takes all tokens
    "ep": {"enable_expert_parallel": True},
    # each rank sends its share of the tokens to their experts
    "ep-rows": {"enable_expert_parallel": True, "all2all_backend": "all_to_all", "max_num_batched_tokens": 37},
    # experts move every few steps, some of them copies, while requests are preempted
    "tight-eplb": OPTIONS["tight"]
    | {
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"step_interval": 5, "window_size": 8, "num_redundant_experts": 2},
    },
}
EXPERT_MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
EXPERT_SPLITS = [(2, 1), (3, 1), (2, 2)]
MODELS = [*SHAPES, "default"]
ALL_OPTIONS = {"llama", "llama-tied", "qwen2", "default"}
"""Models with which all options are tried; the engine does not know one architecture from another."""
SPLITS = [(1, 1), (2, 1), (3, 1), (5, 1), (1, 2), (1, 3), (2, 2)]
"""(TP size, PP size)."""
SUBSET = {
    ("llama", 2, 1, "plain"),
    ("llama", 3, 1, "tight"),
    ("llama-tied", 5, 1, "plain"),
    ("phi3", 1, 3, "chunks"),
    ("gemma2", 2, 2, "tight"),
    ("mixtral", 2, 1, "tight-eplb"),
}


def cells() -> list[Any]:
    return [
        pytest.param(
            model,
            tp,
            pp,
            options,
            marks=[] if (model, tp, pp, options) in SUBSET else [pytest.mark.matrix, pytest.mark.timeout(1200)],
        )
        for model, tp, pp, options in [
            (model, tp, pp, options)
            for model in MODELS
            for tp, pp in SPLITS
            for options in (OPTIONS if model in ALL_OPTIONS else ("chunks", "tight"))
        ]
        + [(model, *split, options) for model in EXPERT_MODELS for split in EXPERT_SPLITS for options in EXPERT_OPTIONS]
    ]


Record = Callable[[str, object], None]
"""pytest's ``record_property``."""


def count_in(tally: Tally, record: Record) -> None:
    """Check one cell, and record its counts: over all cells at most 1 % may be excused (scripts/equality_table.py)."""
    for outcome in ("equal", "excused"):
        record(outcome, tally.counts[outcome])
    tally.check()


class Models:
    """Folders and reference models, made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[str, Any]] = {}

    def get(self, name: str) -> tuple[str, Any]:
        if name not in self._made:
            if name == "default":
                path = resolve(ModelConfig()).path
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
                self._made[name] = str(path), model
            else:
                path = self._folder / name
                self._made[name] = str(path), make_tiny(path, name)
        return self._made[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def make_prompts(vocab_size: int, count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to ``longest`` tokens; every third starts like the first long one."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, vocab_size, longest // 2).tolist()
    prompts = []
    for i in range(count):
        length = int(random.integers(1, longest + 1))
        tail = random.integers(3, vocab_size, length).tolist()
        prompts.append((shared + tail)[:longest] if i % 3 == 0 else tail)
    return prompts


@contextmanager
def started(path: str, tp: int, pp: int, options: dict[str, Any]) -> Iterator[LLM]:
    """An engine over tp x pp workers."""
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory_bytes": 2**27}
    split = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with LLM(path, block_size=BLOCK, **(split | defaults | options)) as llm:
        versions = llm.collective_rpc(lambda worker: importlib.import_module("transformers").__version__)
        assert versions == [transformers.__version__] * (tp * pp)
        yield llm


def tokens_of(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def size_of(model: str) -> tuple[int, int, int]:
    """(requests at once, longest prompt, longest output): the default model is a thousand times dearer."""
    return (32, 60, 12) if model == "default" else (32, 100, 40)


@pytest.mark.parametrize(("model", "tp", "pp", "options"), cells())
def test_greedy(models: Models, model: str, tp: int, pp: int, options: str, record_property: Record) -> None:
    path, reference = models.get(model)
    how = (OPTIONS | EXPERT_OPTIONS)[options]
    count, longest, most = size_of(model)
    prompts = make_prompts(reference.config.vocab_size, count, longest)
    params = [SamplingParams(temperature=0, max_tokens=most - i % 9, ignore_eos=True) for i in range(count)]
    tally = Tally()
    with started(path, tp, pp, how) as llm:
        for i, got in enumerate(tokens_of(llm, prompts, params)):
            assert len(got) == params[i].max_tokens
            tally.add(compare_greedy(reference, prompts[i], got), f"together {i}")
        for i in range(0, count, 8):
            got = tokens_of(llm, [prompts[i]], params[i])[0]
            tally.add(compare_greedy(reference, prompts[i], got), f"alone {i}")
        for i, got in enumerate(tokens_of(llm, prompts[:6], params[:6])):
            tally.add(compare_greedy(reference, prompts[i], got), f"again {i}")
        stats = llm.stats()
        if how.get("enable_eplb"):
            assert min(llm.collective_rpc(lambda worker: worker._balancer.moved)) > 0
    count_in(tally, record_property)
    if options.startswith("tight") and model != "default":
        assert stats.preemptions > 0
    if how.get("enable_prefix_caching", True):
        assert stats.prefix_hits > 0
    else:
        assert stats.prefix_hits == 0


GREEDY_TO_THE_END = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8},
]


SAMPLED_SPLITS = {"plain": [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)], "tight": [(2, 1), (1, 2)]}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(
            m, o, marks=[] if (m, o) == ("llama", "tight") else [pytest.mark.matrix, pytest.mark.timeout(1800)]
        )
        for m in MODELS
        for o in ("plain", "tight")
        if o == "tight" or m in ALL_OPTIONS
    ],
)
def test_sampled(models: Models, model: str, options: str, record_property: Record) -> None:
    """The same seed gives the same tokens at any TP x PP: compared with the rule over the reference's logits."""
    path, reference = models.get(model)
    count, longest, most = size_of(model)
    count //= 2
    prompts = make_prompts(reference.config.vocab_size, count, longest, seed=1)
    params = [SamplingParams(seed=1000 + i, max_tokens=most, ignore_eos=True, **SAMPLED[i % 4]) for i in range(count)]
    tally = Tally()
    for tp, pp in SAMPLED_SPLITS[options]:
        with started(path, tp, pp, OPTIONS[options]) as llm:
            got = tokens_of(llm, prompts, params)
            preemptions = llm.stats().preemptions
        assert preemptions > 0 or options == "plain" or model == "default"
        for i, tokens in enumerate(got):
            p = params[i]
            rule = SlotSampling(temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, seed=p.seed or 0)
            tally.add(compare_sampled(reference, prompts[i], tokens, rule), f"TP {tp}, PP {pp}, {i}")
    count_in(tally, record_property)


@pytest.mark.parametrize(("blocks", "limit"), [(60, 96), pytest.param(4, 4 * BLOCK + 1, marks=pytest.mark.matrix)])
def test_longrope_with_default_flags(tmp_path: Path, blocks: int, limit: int) -> None:
    """The limit is the length of the first training, or what the pool holds of it: short frequencies for all."""
    reference = make_tiny(tmp_path, "phi3-longrope", original_max_position_embeddings=96)
    prompts = make_prompts(reference.config.vocab_size, 6, limit - 20)
    tally = Tally()
    with started(str(tmp_path), 1, 1, {"max_model_len": None, "num_gpu_blocks_override": blocks}) as llm:
        for prompt, got in zip(prompts, tokens_of(llm, prompts, GREEDY_TO_THE_END), strict=True):
            assert len(prompt) + len(got) == limit
            tally.add(compare_greedy(reference, prompt, got))
    tally.check()
