"""LLM with two workers on a tiny random model: what it takes and what it gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import ConfigError, RemoteCallError, RequestError, RPCTimeoutError
from drumline.llm import LLM, SamplingParams, make_config

from .conftest import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclass
class Place:
    """An answer that is no plain data."""

    number: int


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, tensor_parallel_size=2, worker_extension_cls="tests.llm.extension.Extension", **SMALL) as llm:
        yield llm


def test_prompts_in_every_form(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("The quick")
    forms: list[Any] = ["The quick", {"prompt": "The quick"}, ids, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["The quick", "The quick", None, None]
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    first = outputs[0].outputs[0]
    assert len(first.token_ids) == 12
    assert first.finish_reason == "length"
    whole = tokenizer.decode([*ids, *first.token_ids])
    assert first.text == whole[len("The quick") :]
    for single in forms:
        assert llm.generate(single, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == first.token_ids
    assert llm.generate([], use_tqdm=False) == []


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[token] for token in range(10, 30)]
    params = [SamplingParams(temperature=0, max_tokens=1 + place % 7, ignore_eos=True) for place in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    numbers = [int(o.request_id) for o in outputs]
    assert numbers == sorted(numbers)


def test_several_outputs_and_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, temperature=1.5, ignore_eos=True)
    (several,) = llm.generate("fox", params, use_tqdm=False)
    tokens = [output.token_ids for output in several.outputs]
    assert [output.index for output in several.outputs] == [0, 1, 2]
    assert len({tuple(t) for t in tokens}) == 3
    for place in range(3):
        alone = SamplingParams(seed=7 + place, max_tokens=8, temperature=1.5, ignore_eos=True)
        assert llm.generate("fox", alone, use_tqdm=False)[0].outputs[0].token_ids == tokens[place]


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    (free,) = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    text, tokens = free.outputs[0].text, free.outputs[0].token_ids
    stop = text[len(text) // 2 :][:2]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    stopped = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
    assert stopped.text == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == tokens[: len(stopped.token_ids)]
    token = tokens[4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    stopped = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
    assert stopped.token_ids == tokens[: tokens.index(token) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)


def test_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    output = llm.generate("dog", params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 4
    for token, row in zip(output.token_ids, output.logprobs, strict=True):
        assert len(row) == 3
        assert row[token].rank == 1
        assert row[token].logprob == max(entry.logprob for entry in row.values())
        assert row[token].decoded_token == llm.get_tokenizer().token_text(token)
    total = sum(row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_lengths(llm: LLM) -> None:
    (long,) = llm.generate([[5] * 250], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(long.outputs[0].token_ids) == 6
    assert long.outputs[0].finish_reason == "length"


def test_bad_requests_are_told_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().steps
    for prompts, params, problem in (
        (["fox", ""], None, "prompt is empty"),
        ([[5] * 256], None, "256 tokens; this model takes at most 256"),
        ([[448]], None, "outside of the model's vocabulary"),
        ([None], None, "list of integers, got None"),
        ([{"prompt": "x", "cache_salt": "\udc00"}], None, "cache_salt has a lone surrogate"),
        (["fox"], [GREEDY, GREEDY], "sampling_params has 2 entries for 1 prompts"),
        (["fox"], 3, "sampling_params must be one SamplingParams"),
        (["fox"], SamplingParams(logprobs=21), "at most 20"),
    ):
        with pytest.raises(RequestError, match=problem):
            llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert llm.stats().steps == before


def test_chat(llm: LLM) -> None:
    one = [{"role": "user", "content": "Hello"}]
    other = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    single = llm.chat(one, GREEDY, use_tqdm=False)
    both = llm.chat([one, other], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in single] == [both[0].outputs[0].token_ids]
    rendered = llm.get_tokenizer().render_chat(other)
    assert both[1].prompt == rendered
    assert rendered.endswith("<|im_start|>assistant\n")
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    keywords: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    assert llm.chat(one, GREEDY, use_tqdm=False, **keywords)[0].prompt == "[Hello]!"
    started = [*one, {"role": "assistant", "content": "I am"}]
    (gone_on,) = llm.chat(started, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert gone_on.prompt is not None
    assert gone_on.prompt.endswith("<|im_start|>assistant\nI am")
    with pytest.raises(RequestError, match="no role"):
        llm.chat([{"content": "x"}], use_tqdm=False)


def test_what_users_of_vllm_know(llm: LLM) -> None:
    (output,) = llm.generate("fox", GREEDY, use_tqdm=False, lora_request=None, priority=0)
    assert output.prompt_logprobs is None
    assert output.metrics is None
    assert output.encoder_prompt is None
    first = output.outputs[0]
    assert (first.index, first.cumulative_logprob, first.logprobs, first.stop_reason) == (0, None, None, None)
    assert llm.get_world_size() == 2
    plain = llm.generate("fox", GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert plain[0].prompt_token_ids == llm.get_tokenizer().encode("fox", add_special_tokens=False)
    talk = [{"role": "user", "content": "x"}]
    for arguments, name in (
        ({"lora_request": object()}, "lora_request"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"tokenization_kwargs": {"truncation": True}}, "truncation"),
        ({"priority": 3}, "scheduling_policy='priority'"),
    ):
        with pytest.raises(RequestError, match=name):
            llm.generate("fox", GREEDY, use_tqdm=False, **arguments)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=name):
            llm.chat(talk, GREEDY, use_tqdm=False, **arguments)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="chat_template_content_format"):
        llm.chat(talk, GREEDY, use_tqdm=False, chat_template_content_format="openai")


def test_defaults_of_the_model(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=40)
    assert len(llm.generate("fox", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_prefix_cache_is_told(llm: LLM) -> None:
    prompt = list(range(100, 140))
    llm.generate([prompt], GREEDY, use_tqdm=False)
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    salted = {"prompt_token_ids": prompt, "cache_salt": "other"}
    assert llm.generate(salted, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_progress_bars(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capfd.readouterr()
    assert "Processed prompts" in shown.err
    assert "2/2" in shown.err
    assert shown.out == ""
    calls: list[Any] = []

    class Bar:
        def __init__(self, **keywords: Any) -> None:
            calls.append(keywords["total"])

        def update(self, n: int) -> None:
            calls.append(n)

        def close(self) -> None:
            calls.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert calls == [2, 1, 1, "closed"]
    assert capfd.readouterr().err == ""


def test_calls_to_workers(llm: LLM) -> None:
    assert llm.collective_rpc("add_rank", args=(10,)) == [10, 11]
    assert llm.collective_rpc("add_rank", kwargs={"base": 20}, timeout=30) == [20, 21]
    with pytest.raises(RemoteCallError, match="no such luck"):
        llm.collective_rpc("fail")
    assert llm.generate("fox", GREEDY, use_tqdm=False)[0].finished


def test_functions_run_on_workers(llm: LLM) -> None:
    offset = 100

    def place(worker: Any, *, step: int) -> Place:
        return Place(worker.rank * step + offset)

    assert llm.collective_rpc(place, kwargs={"step": 5}) == [Place(100), Place(105)]
    assert llm.collective_rpc(lambda worker, text: {worker.rank: {text}}, args=("x",)) == [{0: {"x"}}, {1: {"x"}}]

    def refuse(worker: Any) -> None:
        raise LookupError(f"rank {worker.rank} says no")

    with pytest.raises(RemoteCallError, match="says no"):
        llm.collective_rpc(refuse)
    with pytest.raises(RemoteCallError, match="pickle"):
        llm.collective_rpc(lambda worker: threading.Lock())
    with pytest.raises(RPCTimeoutError):
        llm.collective_rpc(lambda worker: time.sleep(0.5), timeout=0.05)
    assert llm.generate("fox", GREEDY, use_tqdm=False)[0].finished


def test_an_exception_in_between_aborts_the_requests(llm: LLM) -> None:
    class Bar:
        def __init__(self, **_: Any) -> None:
            pass

        def update(self, n: int) -> None:
            raise ZeroDivisionError

        def close(self) -> None:
            pass

    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[5], [6]], [long, short], use_tqdm=Bar)
    assert (llm.stats().num_running, llm.stats().num_waiting) == (0, 0)  # asked, not what was last told
    llm.generate([7], GREEDY, use_tqdm=False)
    assert llm.stats().num_running == 0


def test_processes_and_repr(llm: LLM) -> None:
    names = [process.name for process in llm.processes()]
    assert names == ["LLM", "ForkServer", "EngineCore_DP0", "Worker_TP0", "Worker_TP1"]
    assert "tensor_parallel_size=2" in repr(llm)


# ------------------------------------------------------------------------------------------------------------- options


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'tensor_parallel_sise'. Did you mean 'tensor_parallel_size'\?"):
        LLM("m", tensor_parallel_sise=2)
    with pytest.raises(TypeError, match=r"'xyzzy'$"):
        LLM("m", xyzzy=2)


def test_options_of_vllm_that_ask_for_nothing() -> None:
    config = make_config(device="cpu", quantization=None, runner="generate", cpu_offload_gb=0, compilation_config=0)
    assert config == make_config(platform="cpu")
    for name, value in (("quantization", "awq"), ("enable_lora", True), ("runner", "pooling")):
        with pytest.raises(ConfigError, match=f"{name}={value!r} is not built yet"):
            make_config(**{name: value})


def test_options_reach_their_section(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(
        tensor_parallel_size=3,
        tp_weights="2,1,1",
        max_num_seqs=5,
        block_size=None,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 20,
        served_model_name="name",
        distributed_executor_backend="mp",
        dtype=FakeDtype(),
        trust_remote_code=True,
        platform="cpu",
    )
    assert config.parallel.tensor_parallel_size == 3
    assert config.parallel.tp_weights == (2, 1, 1)
    assert config.parallel.distributed_executor_backend == "mp"
    assert config.scheduler.max_num_seqs == 5
    assert config.cache.block_size == 16
    assert not config.cache.enable_prefix_caching
    assert config.cache.kv_cache_memory_bytes == 1 << 20
    assert config.model.served_model_name == ("name",)
    assert config.model.dtype == "bfloat16"
    assert config.platform == "cpu"
    assert "has no effect" in caplog.text
    assert not config.model.trust_remote_code


class FakeDtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


def test_what_cannot_work_starts_nothing(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not built yet: data_parallel_size"):
        LLM(model_path, data_parallel_size=2, **SMALL)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(model_path, tensor_parallel_size=0, **SMALL)
    with pytest.raises(ConfigError, match="there is no such folder"):
        LLM(tmp_path / "missing", **SMALL)
    (tmp_path / "config.json").write_text((model_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        LLM(tmp_path, load_format="dummy", **SMALL)
    with pytest.raises(ConfigError, match="line 1"):
        LLM(model_path, chat_template="{% if %}", **SMALL)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"tensor_parallel_size": 7}, ValueError, "--tensor-parallel-size 7 is more than the model's 6 query heads"),
        ({"max_model_len": 100000}, ValueError, "--max-model-len 100000 must be between 2 and the model's 512"),
        ({"max_model_len": 1}, ValueError, "leaves no room for any request"),
        ({"worker_cls": "nope:No"}, ValueError, "--worker-cls nope:No: there is no module 'nope'"),
        ({"worker_extension_cls": "json:No"}, ValueError, "--worker-extension-cls json:No: "),
        ({"distributed_executor_backend": "foo"}, ValueError, "must be one of uni, mp"),
        ({"distributed_executor_backend": "json.JSONDecoder"}, TypeError, "must be a subclass of Executor"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, ValueError, "uni runs one worker"),
    ],
)
def test_what_cannot_work_is_refused_before_any_process(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("processes were about to be started")

    monkeypatch.setattr("drumline.llm.offline.SyncEngineClient", start)
    with pytest.raises(kind, match=words):
        LLM(model_path, **options)


def test_the_smallest_engine_answers(model_path: Path) -> None:
    least = {"max_model_len": 2, "num_gpu_blocks_override": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1}
    with LLM(model_path, block_size=1, log_level="warning", **least) as llm:
        outputs = llm.generate([[5], [6]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1]
        with pytest.raises(RequestError, match="at least one must be left for the output"):
            llm.generate([[5, 6]], use_tqdm=False)
