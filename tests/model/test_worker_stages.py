"""Pipeline stages over real processes: the tokens of transformers at any PP x TP, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.plan.sampling import SlotSampling
from drumline.plan.step import StepOutput, StepPlan
from tests.model.conftest import engine_config
from tests.model.driver import Driver, Running, prompts
from tests.model.equality import Tally, check_prompt_logprobs, compare_sampled
from tests.model.ranks import RankHost

Tiny = Callable[[str], tuple[Path, Any]]

SAMPLINGS = [
    SlotSampling(),
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.7, top_p=0.8, seed=12),
    SlotSampling(temperature=1.2, top_k=7, seed=13, logprobs=2),
    SlotSampling(logprobs=0, prompt_logprobs=1, repetition_penalty=1.3),
    SlotSampling(temperature=0.8, min_p=0.05, frequency_penalty=0.5, bad_words=((5,), (6, 7)), seed=14),
]


def start(host: RankHost, folder: Path, tp: int, pp: int) -> None:
    names = host.start(engine_config(folder, tp, pp), num_blocks=128, block_size=4)
    tps = [f"_TP{rank}" for rank in range(tp)] if tp > 1 else [""]
    assert names == [f"Worker_PP{stage}{name}" for stage in range(pp) for name in tps]


def executor(host: RankHost, tp: int) -> Callable[[StepPlan], StepOutput]:
    """Runs a plan on all ranks, deferred or not; only the last stage answers."""

    def execute(plan: StepPlan) -> StepOutput:
        outputs = host.call("execute_model", plan)
        if plan.defer_sampling:
            assert outputs == [None] * len(outputs)
            outputs = host.call("sample_tokens", plan.step)
        assert outputs[:-tp] == [None] * (len(outputs) - tp)
        assert len({output.tokens for output in outputs[-tp:]}) == 1
        assert all(not output.logprobs for output in outputs[-tp + 1 :] if tp > 1)
        answer: StepOutput = outputs[-tp]
        return answer

    return execute


def check(model: Any, requests: list[Running]) -> None:
    tally = Tally()
    for request in requests:
        assert request.done
        tally.add(compare_sampled(model, request.prompt, request.outputs, request.sampling), request.sampling)
        check_prompt_logprobs(model, request)
    tally.check()


@pytest.mark.parametrize(
    ("shape", "tp", "pp"),
    [("llama", 1, 2), ("llama", 1, 3), ("llama", 2, 2), ("llama-tied", 1, 3), ("qwen2", 2, 2), ("qwen3_moe", 2, 2)],
)
def test_stages_give_the_tokens_of_transformers(rank_host: RankHost, tiny: Tiny, shape: str, tp: int, pp: int) -> None:
    """With chunks, a preemption, slots that are freed and used again, and sampling that is deferred at times."""
    folder, model = tiny(shape)
    start(rank_host, folder, tp, pp)
    driver = Driver(executor(rank_host, tp), max_chunk=11, seed=tp)
    vocabulary = model.config.vocab_size
    requests = [driver.add(p, s, 8) for p, s in zip(prompts(len(SAMPLINGS), vocabulary, 25), SAMPLINGS, strict=True)]
    for step in range(4):
        driver.step(defer=step % 2 == 1)
    driver.preempt(requests[1])
    more = prompts(len(SAMPLINGS), vocabulary, 9, seed=5)
    requests += [driver.add(p, s, 5) for p, s in zip(more, SAMPLINGS, strict=True)]
    while driver.running:
        driver.step(defer=driver.step_number % 3 == 0)
    check(model, requests)
    rank_host.call("execute_dummy_batch")
    again = [driver.add(p, SlotSampling(), 4) for p in prompts(3, vocabulary, 9, seed=6)]
    driver.run()
    check(model, again)


def test_a_slot_that_is_freed_while_its_token_is_on_the_way(rank_host: RankHost, tiny: Tiny) -> None:
    """Freed before its step is sampled, and given to somebody else: the late token is dropped on every stage."""
    folder, model = tiny("llama")
    start(rank_host, folder, 1, 2)
    driver = Driver(executor(rank_host, 1), max_chunk=64)
    first = driver.add([5, 6, 7], max_tokens=4)
    other = driver.add([9, 8], max_tokens=6)
    driver.step()
    plan = driver.plan()  # both decode, deferred
    plan.defer_sampling = True
    rank_host.call("execute_model", plan)
    # `first` is aborted; its slot goes to a new request at once, in a plan that runs before the deferred sampling.
    slot = first.slot
    driver._release(first)
    driver.running.remove(first)
    driver.running.remove(other)
    driver.free_slots.remove(slot)
    driver.free_slots.insert(0, slot)
    new = driver.add([3, 1, 4, 1, 5], max_tokens=5)
    driver.step()
    late = rank_host.call("sample_tokens", plan.step)[-1]
    other.outputs.append(int.from_bytes(late.tokens[4:8], "little", signed=True))
    other.source = plan.step
    driver.running.append(other)
    driver.run()
    check(model, [new, other])
