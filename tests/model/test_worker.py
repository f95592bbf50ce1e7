"""ModelWorker with world size 1, driven by hand-made plans, against transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config import CacheConfig, SchedulerConfig
from drumline.errors import ConfigError
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import SlotStart, StepOutput, StepPlan, ints, pack
from drumline.platforms import host
from tests.model.conftest import engine_config, start_worker
from tests.model.driver import Driver, Running, prompts
from tests.model.equality import Tally, check_prompt_logprobs, compare_greedy, compare_sampled, reference_logits
from tests.model.tiny import make_tiny

Tiny = Callable[[str], tuple[Path, Any]]


def check_greedy(model: Any, requests: list[Running]) -> None:
    tally = Tally()
    for number, request in enumerate(requests):
        assert len(request.outputs) == request.max_tokens
        tally.add(compare_greedy(model, request.prompt, request.outputs), number)
    tally.check()


@pytest.mark.parametrize("shape", ["llama", "llama-tied", "qwen2", "gemma3"])  # all: test_architectures.py
def test_greedy_equals_generate(tiny: Tiny, shape: str) -> None:
    folder, model = tiny(shape)
    driver = Driver(start_worker(engine_config(folder)).execute_model)
    requests = [driver.add(prompt) for prompt in prompts(4, model.config.vocab_size, 20)]
    driver.run()
    check_greedy(model, requests)
    for request in requests:
        ids = torch.tensor([request.prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert request.outputs == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("shape", ["deepseek_v3", "deepseek_v3-wide"])
def test_latents_are_expanded(tiny: Tiny, shape: str, caplog: pytest.LogCaptureFixture) -> None:
    """The KV pool has the bytes that were planned, and the log says what it holds."""
    folder, _ = tiny(shape)
    with caplog.at_level(logging.INFO):
        worker = start_worker(engine_config(folder), num_blocks=10, block_size=16)
    assert worker.cache is not None
    assert worker.cache.data.nbytes == 10 * worker.get_kv_cache_spec().bytes_per_block
    numbers, keys, values = {"deepseek_v3": (5 * 32, 5 * 16, 5 * 9), "deepseek_v3-wide": (7 * 22, 7 * 9, 7 * 11)}[shape]
    text = f"{numbers} numbers for a token and layer ({keys} of keys, {values} of values, the rest padding)"
    assert text in caplog.text


@pytest.mark.parametrize("max_chunk", [1, 3, 7, 64])
def test_chunked_prefill_mixed_with_decoding(tiny: Tiny, max_chunk: int) -> None:
    folder, model = tiny("llama")
    driver = Driver(start_worker(engine_config(folder), 400).execute_model, max_chunk=max_chunk, num_blocks=400, seed=1)
    requests = [driver.add(prompt, max_tokens=10) for prompt in prompts(6, 307, 60, seed=2)]
    for _ in range(6):
        driver.step()
    requests += [driver.add(prompt, max_tokens=10) for prompt in prompts(6, 307, 40, seed=3)]
    driver.run()
    check_greedy(model, requests)


def test_slots_and_blocks_are_used_again(tiny: Tiny) -> None:
    folder, model = tiny("qwen2")
    driver = Driver(start_worker(engine_config(folder), num_blocks=24).execute_model, num_blocks=24)
    requests = []
    for wave in range(5):
        requests += [driver.add(prompt, max_tokens=6) for prompt in prompts(3, 301, 20, seed=wave)]
        driver.run()
    check_greedy(model, requests)


@pytest.mark.parametrize("sampling", [SlotSampling(), SlotSampling(temperature=0.8, top_p=0.9, top_k=40, seed=9)])
def test_preemption_changes_nothing(tiny: Tiny, sampling: SlotSampling) -> None:
    folder, model = tiny("llama")
    worker = start_worker(engine_config(folder))
    outputs = []
    for preempt in (False, True):
        driver = Driver(worker.execute_model, max_chunk=9, seed=4)
        worker.runner.set_cache(worker.cache)
        requests = [driver.add(prompt, sampling, max_tokens=14) for prompt in prompts(4, 307, 25, seed=4)]
        while driver.running:
            driver.step()
            if preempt and driver.step_number in (3, 8, 9):
                driver.preempt(driver.running[0])
        outputs.append([request.outputs for request in requests])
        tally = Tally()
        for request in requests:
            if sampling.temperature:
                tally.add(compare_sampled(model, request.prompt, request.outputs, sampling))
            else:
                tally.add(compare_greedy(model, request.prompt, request.outputs))
        tally.check()
    assert outputs[0] == outputs[1]


def test_long_contexts_of_different_lengths(tiny: Tiny) -> None:
    """Several decode groups, a chunk of more than one piece, and a context of more than one piece."""
    folder, model = tiny("llama-tied")
    driver = Driver(start_worker(engine_config(folder), num_blocks=300).execute_model, num_blocks=300, max_chunk=1000)
    short, middle = (driver.add(prompt, max_tokens=6) for prompt in ([5, 6], list(range(100))))
    long = driver.add([i % 263 for i in range(250)], max_tokens=6)
    driver.run()
    check_greedy(model, [short, middle, long])


def test_longrope_with_default_flags(tmp_path: Path) -> None:
    """Sequences of up to the first training's length, with the frequencies that transformers takes for these."""
    model = make_tiny(tmp_path, "phi3-longrope", original_max_position_embeddings=48)
    worker = start_worker(engine_config(tmp_path))
    assert worker.max_model_len == 48
    driver = Driver(worker.execute_model)
    requests = [driver.add(prompt, max_tokens=48 - len(prompt)) for prompt in prompts(4, 281, 36)]
    driver.run()
    check_greedy(model, requests)


@pytest.mark.parametrize("shape", ["llama", "qwen2", "gemma2"])
def test_sampling_follows_the_rule(tiny: Tiny, shape: str) -> None:
    folder, model = tiny(shape)
    worker = start_worker(engine_config(folder))
    driver = Driver(worker.execute_model, num_blocks=128)
    kinds = [
        SlotSampling(temperature=1.0, seed=1),
        SlotSampling(temperature=0.5, seed=2**64 - 1),
        SlotSampling(temperature=1.5, top_k=5, seed=2),
        SlotSampling(temperature=1.0, top_p=0.7, seed=3),
        SlotSampling(temperature=0.9, top_k=50, top_p=0.95, seed=4),
        SlotSampling(temperature=0.0, top_k=3, top_p=0.1, seed=5),
    ]
    requests = [driver.add(prompt, kind) for prompt, kind in zip(prompts(6, 250, 12), kinds, strict=True)]
    driver.run()
    tally = Tally()
    for request in requests:
        if request.sampling.temperature:
            tally.add(compare_sampled(model, request.prompt, request.outputs, request.sampling), request.sampling)
        else:
            tally.add(compare_greedy(model, request.prompt, request.outputs), request.sampling)
    tally.check()


def test_logprobs(tiny: Tiny) -> None:
    folder, model = tiny("llama")
    driver = Driver(start_worker(engine_config(folder)).execute_model)
    prompt = prompts(1, 307, 12)[0]
    asks = driver.add(prompt, SlotSampling(temperature=0.7, top_k=4, seed=1, logprobs=3), max_tokens=5)
    plain = driver.add(prompt, max_tokens=5)
    none = driver.add(prompt, SlotSampling(logprobs=0), max_tokens=5)
    driver.run()
    assert plain.logprobs == [None] * 5
    expected = reference_logits(model, prompt, asks.outputs).log_softmax(dim=1)
    for row, token, entry in zip(expected, asks.outputs, asks.logprobs, strict=True):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        top = row.topk(3)
        assert entry.top_ids == top.indices.tolist()
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
    assert all(entry is not None and entry.rank == 1 and entry.top_ids == [] for entry in none.logprobs)


@pytest.mark.parametrize("max_chunk", [1, 5, 64])
def test_log_probabilities_of_prompts(tiny: Tiny, max_chunk: int) -> None:
    """In chunks of any size, beside others, and again after a preemption."""
    folder, model = tiny("llama")
    driver = Driver(start_worker(engine_config(folder)).execute_model, max_chunk=max_chunk, seed=7)
    kinds = [SlotSampling(prompt_logprobs=count) for count in (0, 3, -1, 1)]
    requests = [driver.add(prompt, kind, 4) for prompt, kind in zip(prompts(4, 307, 20, seed=6), kinds, strict=True)]
    requests.append(driver.add([5], SlotSampling(prompt_logprobs=2), 4))
    driver.step()
    driver.preempt(requests[1])
    driver.run()
    check_greedy(model, requests)
    for request in requests:
        check_prompt_logprobs(model, request)


def test_everything_that_changes_logits(tiny: Tiny) -> None:
    """Greedy and sampled, with preemptions, against transformers and the rule in numpy."""
    folder, model = tiny("llama")
    driver = Driver(start_worker(engine_config(folder), 200).execute_model, num_blocks=200, max_chunk=9, seed=8)
    changes: list[dict[str, Any]] = [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.2},
        {"repetition_penalty": 3.0, "logprobs": 1},
        {"allowed_ids": (3, 4, 5, 6), "bad_words": ((3, 4), (4,), (6, 6, 5))},
        {"bias_ids": (7, 8), "bias_values": (100.0, 50.0), "min_tokens": 4, "end_ids": (7,)},
        {"min_p": 0.2, "frequency_penalty": -2.0},
    ]
    kinds = [SlotSampling(temperature=warm, seed=3, **change) for change in changes for warm in (0.0, 0.8)]
    requests = [driver.add(prompt, kind) for prompt, kind in zip(prompts(12, 307, 12), kinds, strict=True)]
    while driver.running:
        driver.step()
        if driver.step_number in (3, 7):
            driver.preempt(driver.running[0])
            driver.preempt(driver.running[-1])
    tally = Tally()
    for request in requests:
        tally.add(compare_sampled(model, request.prompt, request.outputs, request.sampling), request.sampling)
    tally.check()
    assert requests[8].outputs[:5] == [8, 8, 8, 8, 7]


def test_deferred_sampling(tiny: Tiny) -> None:
    folder, model = tiny("llama")
    worker = start_worker(engine_config(folder))

    def execute(plan: StepPlan) -> StepOutput:
        assert plan.defer_sampling
        assert worker.execute_model(plan) is None
        return worker.sample_tokens(plan.step, None)

    driver = Driver(execute, max_chunk=5)
    requests = [driver.add(prompt, max_tokens=5) for prompt in prompts(3, 307, 12)]
    while driver.running:
        driver.step(defer=True)
    check_greedy(model, requests)
    with pytest.raises(RuntimeError, match="waits for no sampling"):
        worker.sample_tokens(driver.step_number, None)


def start_plan(step: int, slot: int, tokens: list[int], given: list[int], **changes: Any) -> StepPlan:
    fields: dict[str, Any] = {
        "starts": [SlotStart(slot, "r", pack(tokens), len(tokens), SlotSampling())],
        "slots": pack([slot]),
        "num_tokens": pack([len(tokens)]),
        "num_computed": pack([0]),
        "token_source": pack([-1]),
        "block_counts": pack([len(given)]),
        "blocks": pack(given),
        "sample": pack([1]),
    }
    return StepPlan(step=step, **(fields | changes))


def test_a_slot_freed_before_its_sampling_gets_no_token(tiny: Tiny) -> None:
    """Look-ahead: step 1 was not sampled yet when its slot is given to somebody else."""
    folder, model = tiny("llama")
    worker = start_worker(engine_config(folder))
    worker.execute_model(start_plan(1, 0, [1, 2, 3], [0], defer_sampling=True))
    output = worker.execute_model(start_plan(2, 0, [9, 8], [1], freed=pack([0])))
    assert output is not None
    late = worker.sample_tokens(1, None)
    assert compare_greedy(model, [1, 2, 3], ints(late.tokens).tolist()).outcome == "equal"
    tokens = ints(output.tokens).tolist()
    following = StepPlan(
        step=3,
        slots=pack([0]),
        num_tokens=pack([1]),
        num_computed=pack([2]),
        token_source=pack([2]),
        block_counts=pack([0]),
        sample=pack([1]),
    )
    tokens += ints(worker.execute_model(following).tokens).tolist()
    assert compare_greedy(model, [9, 8], tokens).outcome == "equal"


def test_plans_that_contradict_the_state_are_refused(tiny: Tiny) -> None:
    worker = start_worker(engine_config(tiny("llama")[0]))
    worker.execute_model(start_plan(1, 0, [1, 2, 3], [0]))
    row = {"starts": [], "num_tokens": pack([1]), "num_computed": pack([3]), "block_counts": pack([0]), "blocks": b""}
    with pytest.raises(RuntimeError, match="does not fit slot 0"):
        worker.execute_model(start_plan(2, 0, [], [], **row, token_source=pack([0])))
    with pytest.raises(RuntimeError, match="does not fit slot 0"):
        worker.execute_model(start_plan(2, 0, [], [], **(row | {"num_computed": pack([4])})))
    with pytest.raises(RuntimeError, match="not in use"):
        worker.execute_model(start_plan(2, 5, [], [], **row))
    with pytest.raises(RuntimeError, match="still in use"):
        worker.execute_model(start_plan(2, 0, [4, 5], [1]))
    with pytest.raises(RuntimeError, match="does not fit slot 1"):
        worker.execute_model(start_plan(3, 1, [4, 5, 6, 7, 8], [1]))  # one block of 4 is too few
    assert worker.cache is not None
    for slot, block in ((2, worker.cache.num_blocks), (3, -1)):
        with pytest.raises(RuntimeError, match=f"names blocks.*has {worker.cache.num_blocks}"):
            worker.execute_model(start_plan(4, slot, [4], [block]))


def test_an_empty_plan_and_a_dummy_batch(tiny: Tiny) -> None:
    worker = start_worker(engine_config(tiny("qwen2")[0]))
    output = worker.execute_model(StepPlan(step=1))
    assert output is not None
    assert output.tokens == b""
    worker.execute_dummy_batch()
    worker.runner.run_dummy(8, 5)  # as memory is measured
    worker.check_health()
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(RuntimeError, match="not loaded"):
        worker.execute_dummy_batch()


def test_memory_for_a_step_is_there_or_it_says_so(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start_worker(engine_config(tiny("llama")[0]))
    costs = worker.step_costs()
    assert costs.row_bytes >= 4 * worker.spec.vocab_size
    worker.reserve_memory(256 * costs.row_bytes)
    with pytest.raises(MemoryError):
        worker.reserve_memory(1 << 62)
    monkeypatch.setattr(host, "memory_available", lambda: 1000)
    worker.reserve_memory(1000)
    with pytest.raises(MemoryError, match="are left on this machine"):
        worker.reserve_memory(1001)
    monkeypatch.setattr(host, "memory_available", lambda: 0)  # unknown: the allocator has the last word
    with pytest.raises(MemoryError, match="allocate"):
        worker.reserve_memory(1 << 62)
    worker.shutdown()


def test_a_former_owners_nan_does_not_spread(tiny: Tiny) -> None:
    folder, model = tiny("llama")
    worker = start_worker(engine_config(folder), num_blocks=40)
    driver = Driver(worker.execute_model, num_blocks=40)
    assert worker.cache is not None
    worker.cache.data.fill_(float("nan"))
    requests = [driver.add(prompt, max_tokens=6) for prompt in ([1, 2, 3], [4] * 13)]
    driver.run()
    check_greedy(model, requests)


def test_kv_memory(tiny: Tiny) -> None:
    folder, _ = tiny("llama")
    config = engine_config(folder)
    worker = start_worker(config)
    spec = worker.get_kv_cache_spec()
    assert spec.bytes_per_block == 16 * 3 * 2 * 3 * 8 * 4  # tokens, layers, K and V, heads, head dim, bytes
    assert worker.determine_available_memory() == 64 * 16 * spec.bytes_per_block  # 64 sequences of 256 tokens
    fewer = replace(config, scheduler=SchedulerConfig(max_num_seqs=2))
    assert start_worker(fewer).determine_available_memory() == 2 * 16 * spec.bytes_per_block
    told = replace(config, cache=CacheConfig(kv_cache_memory_bytes=12345))
    assert start_worker(told).determine_available_memory() == 12345


def test_bad_configurations(tiny: Tiny) -> None:
    folder, _ = tiny("llama")
    with pytest.raises(ConfigError, match="not resolved"):
        start_worker(replace(engine_config(folder), model=replace(engine_config(folder).model, path="")))
    with pytest.raises(ConfigError, match="max-model-len 999"):
        start_worker(engine_config(folder, max_model_len=999))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_run(tiny: Tiny, dtype: str) -> None:
    folder, model = tiny("llama")
    worker = start_worker(engine_config(folder, dtype=dtype))
    driver = Driver(worker.execute_model)
    request = driver.add([1, 2, 3, 4], max_tokens=3)
    driver.run()
    logits = reference_logits(model, request.prompt, request.outputs)
    assert all(
        float(row.max() - row[token]) < 0.5 * float(row.std())
        for row, token in zip(logits, request.outputs, strict=True)
    )
