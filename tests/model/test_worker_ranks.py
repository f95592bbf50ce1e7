"""ModelWorker over real processes and gloo: every TP size gives the tokens of transformers, on all ranks alike."""

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
from tests.model.tiny import SECOND_SHAPES, SHAPES

Tiny = Callable[[str], tuple[Path, Any]]

SAMPLINGS = [
    SlotSampling(),
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.7, top_p=0.8, seed=12),
    SlotSampling(temperature=1.2, top_k=7, seed=13, logprobs=2),
    SlotSampling(logprobs=0),
    SlotSampling(repetition_penalty=1.5, presence_penalty=0.5, prompt_logprobs=2),
    SlotSampling(
        temperature=1.3,
        seed=14,
        min_p=0.01,
        top_p=0.9,
        frequency_penalty=-1.0,
        bias_ids=(3, 200),
        bias_values=(2.0, 5.0),
        bad_words=((200, 3), (7,)),
        min_tokens=3,
        end_ids=(3, 100, 250),
    ),
    SlotSampling(temperature=0.9, seed=15, allowed_ids=tuple(range(0, 250, 3)), repetition_penalty=0.7),
]


def run(host: RankHost, tp: int, vocab_size: int) -> list[Running]:
    def execute(plan: StepPlan) -> StepOutput:
        outputs: list[StepOutput] = host.call("execute_model", plan)
        assert len(outputs) == tp
        assert all(output.tokens == outputs[0].tokens for output in outputs)
        assert all(not output.logprobs for output in outputs[1:])
        assert all(not entry.rows for output in outputs[1:] for entry in output.prompt_logprobs)
        return outputs[0]

    driver = Driver(execute, max_chunk=11, seed=tp)
    requests = [driver.add(p, s, 8) for p, s in zip(prompts(len(SAMPLINGS), vocab_size, 40), SAMPLINGS, strict=True)]
    for _ in range(4):
        driver.step()
    driver.preempt(requests[1])
    driver.preempt(requests[6])
    driver.run()
    return requests


def check(model: Any, requests: list[Running], tally: Tally) -> None:
    for request in requests:
        tally.add(compare_sampled(model, request.prompt, request.outputs, request.sampling), request.sampling)
        check_prompt_logprobs(model, request)


CASES = [(shape, 2) for shape in SHAPES if shape not in SECOND_SHAPES] + [
    ("llama", 3),
    ("llama", 5),
    ("llama-tied", 5),
    ("qwen2", 3),
    ("olmo2", 5),
]


@pytest.mark.parametrize(("shape", "tp"), CASES)
def test_tensor_parallel(rank_host: RankHost, tiny: Tiny, shape: str, tp: int) -> None:
    folder, model = tiny(shape)
    rank_host_start(rank_host, folder, tp, max_model_len=256)
    requests = run(rank_host, tp, model.config.vocab_size)
    tally = Tally()
    check(model, requests, tally)
    tally.check()


def rank_host_start(host: RankHost, folder: Path, tp: int, **model: Any) -> None:
    names = host.start(engine_config(folder, tp, **model), num_blocks=128, block_size=4)
    assert names == [f"Worker_TP{rank}" for rank in range(tp)]


def test_a_rank_holds_its_share(rank_host: RankHost, tiny: Tiny) -> None:
    folder, model = tiny("llama")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    replicated = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name or "o_proj.bias" in name)
    replicated += sum(p.nbytes for name, p in model.named_parameters() if "down_proj.bias" in name)
    rank_host_start(rank_host, folder, 3, model_impl="transformers")
    assert sum(rank_host.call("parameter_bytes")) == whole + 2 * replicated
    heads = [spec.num_kv_heads for spec in rank_host.call("get_kv_cache_spec")]
    assert heads == [1, 1, 1]
    rank_host_start(rank_host, folder, 2)
    assert [spec.num_kv_heads for spec in rank_host.call("get_kv_cache_spec")] == [2, 1]


def test_dummy_weights_are_the_same_model_at_every_size(rank_host: RankHost, tiny: Tiny) -> None:
    folder, _ = tiny("qwen2")
    outputs = []
    for tp in (2, 7):
        rank_host_start(rank_host, folder, tp, load_format="dummy", seed=5)
        outputs.append([request.outputs for request in run(rank_host, tp, 301)])
    assert outputs[0] == outputs[1]


def test_too_many_ranks_are_refused_by_each(rank_host: RankHost, tiny: Tiny) -> None:
    folder, _ = tiny("llama-tied")
    with pytest.raises(RuntimeError, match="more than the model's 5 query heads"):
        rank_host.start(engine_config(folder, 6), num_blocks=8, block_size=4)
