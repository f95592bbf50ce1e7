"""What users of vLLM's LLM find here, and what they are told is not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drumline
from drumline import LLM, AsyncLLM, BeamSearchParams, EngineConfig, RequestOutput, SamplingParams
from drumline.errors import RemoteCallError, RequestError, UnsupportedError
from drumline.llm.options import make_config, options_of

from .conftest import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
VLLM_OPTIONS: dict[str, Any] = {
    "runner": "auto",
    "convert": "auto",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "chat_template": None,
    "seed": 0,
    "gpu_memory_utilization": 0.92,
    "cpu_offload_gb": 0,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": None,
    "enforce_eager": False,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "disable_custom_all_reduce": False,
    "hf_token": None,
    "hf_overrides": None,
    "mm_processor_kwargs": None,
    "pooler_config": None,
    "structured_outputs_config": None,
    "profiler_config": None,
    "attention_config": None,
    "kv_cache_memory_bytes": None,
    "compilation_config": None,
    "quantization_config": None,
    "logits_processors": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
}
"""Keyword arguments of vLLM 0.32's LLM with their defaults."""


@dataclasses.dataclass
class Args:
    """Engine arguments of somebody else's, who knows options that do not exist here."""

    model: str = ""
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    something_of_theirs: dict[str, int] = dataclasses.field(default_factory=dict)
    another: float = float("nan")


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, scheduling_policy="priority", **SMALL) as llm:
        yield llm


def test_every_option_of_vllm_is_known() -> None:
    assert make_config(platform="cpu", **VLLM_OPTIONS).cache.gpu_memory_utilization == 0.92


def test_engine_arguments_of_others() -> None:
    assert options_of(Args(model="m", max_num_seqs=3)) == {"model": "m", "max_num_seqs": 3}
    assert options_of({"model": "m"}) == {"model": "m"}
    config = make_config(model="m", tensor_parallel_size=2, max_num_seqs=7, platform="cpu")
    assert make_config(**options_of(config)) == config
    with pytest.raises(TypeError, match="something_of_theirs"):
        LLM.from_engine_args(Args(something_of_theirs={"a": 1}))
    with pytest.raises(TypeError, match="must be a mapping or a dataclass"):
        options_of(3)
    assert isinstance(AsyncLLM.from_engine_args({"model": "m"}).config, EngineConfig)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("encode", "no embeddings"),
        ("embed", "sentence-transformers"),
        ("classify", "generate text"),
        ("score", "prompt_logprobs"),
        ("reward", "generate text"),
        ("sleep", "close this object"),
        ("wake_up", "close this object"),
        ("start_profile", "py-spy"),
        ("stop_profile", "collective_rpc"),
        ("update_weights", "apply_model"),
        ("reset_mm_cache", "text only"),
    ],
)
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_what_is_not_here_says_what_to_use(name: str, words: str, kind: Any) -> None:
    bare = kind.__new__(kind)
    with pytest.raises(UnsupportedError, match=f"{kind.__name__}.{name}: .*{words}"):
        getattr(bare, name)("text", 1, option=True)


def test_internals_of_vllm_are_explained(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"has no 'llm_engine': .*get_metrics\(\)"):
        llm.llm_engine  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        llm.nonsense  # noqa: B018
    assert not hasattr(llm, "llm_engine")


def test_enqueue_and_wait(llm: LLM) -> None:
    alone = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    first = llm.enqueue(["a", "b"], GREEDY)
    other = llm.generate("other", GREEDY, use_tqdm=False)
    second = llm.enqueue("c", GREEDY, priority=0)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in outputs] == [*first, *second]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert len(other[0].outputs[0].token_ids) == 6
    assert llm.wait_for_completion(RequestOutput, use_tqdm=False) == []
    talk = [{"role": "user", "content": "Hello"}]
    llm.enqueue_chat(talk, GREEDY)
    [chat] = llm.wait_for_completion(use_tqdm=False)
    assert chat.outputs == llm.chat(talk, GREEDY, use_tqdm=False)[0].outputs
    with pytest.raises(TypeError, match="all outputs are RequestOutput"):
        llm.wait_for_completion(str)


def test_stop_strings_leave_nothing_behind(llm: LLM) -> None:
    [free] = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    stop = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, stop=free.outputs[0].text[:2])
    assert llm.generate([5, 6, 7], stop, use_tqdm=False)[0].outputs[0].finish_reason == "stop"
    assert not llm._owners
    assert llm.stats().num_running == 0


def test_priorities(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[5, -1])
    assert all(output.finished for output in outputs)
    with pytest.raises(RequestError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[5])


def test_beam_search(llm: LLM) -> None:
    """Beams are what they say, in their order, and the width finds at least what greedy finds."""
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    prompts: list[Any] = ["The quick", {"prompt_token_ids": [5, 6]}]
    [result, other] = llm.beam_search(prompts, params, concurrency_limit=1)
    prompt = llm.get_tokenizer().encode("The quick")
    scores = []
    for beam in result.sequences:
        own = beam.tokens[len(prompt) :]
        assert beam.tokens[: len(prompt)] == prompt
        assert len(own) == len(beam.logprobs) == 5
        assert beam.text == llm.get_tokenizer().decode(own)
        total = sum(row[token].logprob for token, row in zip(own, beam.logprobs, strict=True))
        assert beam.cum_logprob == pytest.approx(total)
        again = SamplingParams(max_tokens=1, temperature=0, logprobs=10)
        row = llm.generate([beam.tokens[:-1]], again, use_tqdm=False)[0].outputs[0].logprobs
        assert row is not None
        assert row[0][beam.tokens[-1]].logprob == pytest.approx(beam.logprobs[-1][beam.tokens[-1]].logprob, abs=1e-4)
        scores.append(beam.cum_logprob)
    assert scores == sorted(scores, reverse=True)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    [best] = llm.generate("The quick", greedy, use_tqdm=False)
    assert scores[0] >= (best.outputs[0].cumulative_logprob or 0) - 1e-4
    assert len(other.sequences) == 3
    with pytest.raises(RequestError, match="beam_width must be at most 10"):
        llm.beam_search("a", BeamSearchParams(beam_width=11, max_tokens=2))


def test_functions_on_the_model(llm: LLM) -> None:
    with pytest.raises(RemoteCallError, match="--model-impl transformers"):
        llm.apply_model(lambda model: None)


def test_weights_are_changed_by_functions_on_the_model(model_path: Path) -> None:
    def head_of_zeros(model: Any) -> int:
        model.get_output_embeddings().weight.zero_()
        return sum(p.numel() for p in model.parameters())

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model_path, model_impl="transformers", **SMALL) as llm:
        before = llm.generate("The quick", greedy, use_tqdm=False)[0].outputs[0].token_ids
        [count] = llm.apply_model(head_of_zeros)
        after = llm.generate("The quick", greedy, use_tqdm=False)[0].outputs[0].token_ids
    assert count > 10_000
    assert before != after == [0] * 4  # equal logits: the lowest id


def test_metrics(llm: LLM) -> None:
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    after = {metric.name: metric for metric in llm.get_metrics()}
    assert after["vllm:generation_tokens"].value - before["vllm:generation_tokens"] == 6
    assert after["vllm:prompt_tokens"].value - before["vllm:prompt_tokens"] == 3
    assert after["vllm:num_requests_running"].value == 0
    assert 0 <= after["vllm:kv_cache_usage_perc"].value <= 1
    assert after["vllm:prompt_tokens"].labels["model_name"]


def test_public_names() -> None:
    for name in drumline.__all__:
        assert getattr(drumline, name) is not None
