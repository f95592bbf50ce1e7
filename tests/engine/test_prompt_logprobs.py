"""Log-probabilities of prompts through the scheduler: whole, once, in the first output, whatever happens meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from drumline.engine.admission import MAX_SCORED, MAX_SCORED_VALUES, MAX_START_BYTES
from drumline.engine.protocol import EngineRequest, RequestOutput
from drumline.errors import RequestError
from drumline.plan.sampling import SamplingParams
from drumline.plan.step import TokenLogprobs, encode, ints

from .rig import Rig, check_all, request


class ScoringRig(Rig):
    """A rig that keeps the outputs as they come."""

    def answer(self) -> None:
        update = self.scheduler.update

        def keep(output: object) -> list[RequestOutput]:
            results = update(output)  # type: ignore[arg-type]
            self.outputs += results
            return results

        self.scheduler.update = keep  # type: ignore[assignment,method-assign]
        try:
            super().answer()
        finally:
            self.scheduler.update = update  # type: ignore[method-assign]

    outputs: list[RequestOutput]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.outputs = []

    def check(self, *requests: EngineRequest) -> None:
        for req in requests:
            mine = [output for output in self.outputs if output.request_id == req.request_id]
            prompt = req.prompt_token_ids
            wanted = [TokenLogprobs(-float(place), prompt[place]) for place in range(1, len(prompt))]
            asked = req.sampling.prompt_logprobs is not None
            assert mine[0].prompt_logprobs == (wanted if asked else [])
            assert all(not output.prompt_logprobs for output in mine[1:])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [3, 7, 64])
def test_in_chunks_and_beside_others(depth: int, budget: int) -> None:
    rig = ScoringRig(max_num_batched_tokens=budget, depth=depth)
    requests = [
        request("a", [1, 2, 3] * 6, 3, prompt_logprobs=0),
        request("b", [4] * 9, 5),
        request("c", [5], 4, prompt_logprobs=1),
        request("d", [5, 6], 4, prompt_logprobs=1),
    ]
    rig.run(*requests)
    rig.check(*requests)


@pytest.mark.parametrize("depth", [1, 2])
def test_cached_prefixes_are_not_read(depth: int) -> None:
    rig = ScoringRig(depth=depth)
    requests = [request("a", [1, 2, 3, 4] * 4, 3), request("b", [1, 2, 3, 4] * 4, 3, prompt_logprobs=0)]
    requests.append(request("c", [1, 2, 3, 4] * 4, 3))
    for req in requests:
        rig.run(req)
    rig.check(*requests)
    assert [rig.ended[name].num_cached_tokens for name in "abc"] == [0, 0, 12]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [5, 64])
def test_preemptions_repeat_nothing(depth: int, budget: int) -> None:
    rig = ScoringRig(num_blocks=12, max_num_batched_tokens=budget, depth=depth)
    requests = [request(str(number), [number, 2, 3, 4, 5] * 2, 20, prompt_logprobs=0) for number in range(4)]
    rig.run(*requests)
    rig.check(*requests)
    assert rig.scheduler.stats().preemptions


def test_a_plan_scores_so_many_tokens_at_most() -> None:
    rig = ScoringRig(num_blocks=500, max_num_batched_tokens=3000, max_model_len=1500)
    requests = [request("a", [1] * 600, 3, prompt_logprobs=0), request("b", [2] * 300, 3, prompt_logprobs=0)]
    requests.append(request("c", [3] * 1000, 3))
    rig.run(*requests)
    rig.check(*requests)
    scored = [sum(count for count in ints(plan.num_tokens).tolist() if 1 < count <= MAX_SCORED) for plan in rig.plans]
    assert max(scored) <= MAX_SCORED + 1  # nothing is predicted by the last token of "a", computed beside others of "b"


def test_many_log_probabilities_of_a_token_count_for_more() -> None:
    rig = ScoringRig(num_blocks=500, max_num_batched_tokens=3000, max_model_len=1500)
    req = request("a", [1] * 50, 3, prompt_logprobs=0)
    rig.scheduler.add(req)
    (held,) = rig.scheduler._waiting
    held.sampling = msgspec.structs.replace(held.sampling, prompt_logprobs=MAX_SCORED_VALUES // 10 - 1)
    rig.run()
    rig.check(req)
    assert [ints(plan.num_tokens).tolist() for plan in rig.plans] == [[10]] * 5 + [[1]] * 2


def test_whole_prompts_are_scored_at_once_with_chunked_prefill_off() -> None:
    rig = ScoringRig(num_blocks=500, max_num_batched_tokens=1500, max_model_len=1500, chunked=False)
    requests = [request(name, [1] * 200, 3, prompt_logprobs=0) for name in "ab"]
    rig.run(*requests)
    rig.check(*requests)
    assert [ints(plan.num_tokens).tolist() for plan in rig.plans][:2] == [[200], [1, 200]]
    with pytest.raises(RequestError, match="computed for 256 tokens in a step") as caught:
        rig.scheduler.add(request("c", [1] * 258, 3, prompt_logprobs=0))
    assert caught.value.param == "prompt_logprobs"


def test_what_one_plan_says_of_requests_is_bounded() -> None:
    """Prompts that are in the cache cost a plan no tokens, but all of their tokens are in it."""
    rig = Rig(num_blocks=40000, block_size=64, max_num_batched_tokens=64000, max_model_len=70000)
    prompt = [1, 2, 3] * 20000
    rig.run(request("first", prompt, 1))
    before = len(rig.plans)
    requests = [request(str(number), [*prompt, number], 3) for number in range(8)]
    rig.run(*requests)
    check_all(rig, requests)
    starts = [len(plan.starts) for plan in rig.plans[before:]]
    assert sum(starts) == 8
    assert starts[:2] == [4, 4]
    assert all(len(encode(plan)) < MAX_START_BYTES * 1.1 for plan in rig.plans)


def test_numbers_of_a_request_are_brought_into_range() -> None:
    """What another front end may ask for must not break a step: ids are of the vocabulary, each once."""
    rig = ScoringRig()
    params = SamplingParams(
        max_tokens=3,
        logit_bias={5: 1.0, 99: 1.0},
        allowed_token_ids=[3, 99],
        logprobs=-1,
        prompt_logprobs=2**40,
        min_tokens=3,
        stop_token_ids=[4, 10, 11],
        top_k=2**40,
    )
    bad = [[1, 2], [1, 99], [99, 2], []]
    req = EngineRequest(
        request_id="a", prompt_token_ids=[1, 2], sampling=params, seed=-1, eos_token_ids=[10, 77], bad_words_ids=bad
    )
    rig.run(req)
    sampling = rig.plans[0].starts[0].sampling
    assert (sampling.bias_ids, sampling.bias_values, sampling.allowed_ids) == ((5,), (1.0,), (3,))
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.top_k, sampling.seed) == (11, 11, 0, 2**64 - 1)
    assert (sampling.min_tokens, sampling.end_ids, sampling.bad_words) == (3, (10, 4), ((1, 2), (99, 2)))
