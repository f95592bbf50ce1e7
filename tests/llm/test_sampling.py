"""All sampling parameters through LLM and its processes: two ranks, one rank, and pressed for memory, give the same."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import RequestError
from drumline.llm import LLM, RequestOutput, SamplingParams
from drumline.plan.sampling import SlotSampling
from tests.plan.rule import Forbidding, choosable

from .conftest import SMALL, VOCAB

PROMPTS = [[5 + (7 * number + place) % 300 for place in range(3 + 9 * number)] for number in range(8)]
KINDS: list[dict[str, Any]] = [
    {"prompt_logprobs": 2, "temperature": 0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0, "logprobs": 1},
    {"repetition_penalty": 1.4, "top_p": 0.8, "prompt_logprobs": 0},
    {"min_p": 0.1, "logit_bias": {9: 3.0, 10: -3.0}, "logprobs": 0},
    {"bad_words": ["the", " quick"], "top_k": 20},
    {"allowed_token_ids": [20, 21, 22, 23], "min_tokens": 5, "stop_token_ids": [20]},
    {"n": 3, "temperature": 1.2},
    {"n": 2, "best_of": 4, "frequency_penalty": -1.0},
]
PARAMS = [SamplingParams(**{"seed": 7, "max_tokens": 24, "ignore_eos": True, **kind}) for kind in KINDS]


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, tensor_parallel_size=2, max_logprobs=-1, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_one_rank_in_small_chunks_with_preemptions_gives_the_same(
    model_path: Path, outputs: list[RequestOutput]
) -> None:
    pressed = SMALL | {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 16, "max_model_len": 128}
    with LLM(model_path, **pressed) as llm:
        alone = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.stats().preemptions
    for left, right in zip(outputs, alone, strict=True):
        assert [o.token_ids for o in left.outputs] == [o.token_ids for o in right.outputs]
        assert [o.text for o in left.outputs] == [o.text for o in right.outputs]
        for one, other in zip(left.prompt_logprobs or [], right.prompt_logprobs or [], strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or list(one) == list(other)


def test_each_parameter_does_what_it_says(llm: LLM, outputs: list[RequestOutput]) -> None:
    scored = outputs[0].prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert [next(iter(row)) for row in scored[1:] if row is not None] == PROMPTS[0][1:]
    assert outputs[1].prompt_logprobs is None
    assert len(set(outputs[1].outputs[0].token_ids)) > 20  # nothing comes again and again
    assert outputs[1].outputs[0].logprobs is not None
    assert not {"the", " quick"} & {llm.get_tokenizer().decode([token]) for token in outputs[4].outputs[0].token_ids}
    allowed = outputs[5].outputs[0]
    assert set(allowed.token_ids) <= {20, 21, 22, 23}
    assert 20 not in allowed.token_ids[:5]
    assert (allowed.finish_reason, allowed.stop_reason) in [("stop", 20), ("length", None)]
    assert [o.index for o in outputs[6].outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outputs[6].outputs}) == 3


def test_best_of_gives_the_likeliest(llm: LLM, outputs: list[RequestOutput]) -> None:
    params = SamplingParams(n=4, frequency_penalty=-1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=0)
    (every,) = llm.generate([PROMPTS[7]], params, use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda o: -(o.cumulative_logprob or 0) / len(o.token_ids))
    assert [o.token_ids for o in outputs[7].outputs] == [o.token_ids for o in ranked[:2]]
    assert all(o.logprobs is None for o in outputs[7].outputs)


def test_log_probabilities_of_the_whole_vocabulary(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    rows = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]
    assert len(rows) == 4
    for row in rows:
        assert row is not None
        assert len(row) == VOCAB
        assert math.fsum(math.exp(entry.logprob) for entry in row.values()) == pytest.approx(1, abs=1e-5)


def forbidding(llm: LLM, number: int) -> tuple[SlotSampling, SamplingParams]:
    """A request that forbids much, as workers see it and as a user asks for it."""
    rng = random.Random(number)
    tokenizer = llm.get_tokenizer()
    letters = {tokenizer.encode(letter, add_special_tokens=False)[0]: letter for letter in "zqx"}
    sampling = Forbidding(tuple(letters), words=(2, 12)).make(rng)
    words = ["".join(letters[token] for token in word) for word in sampling.bad_words]
    assert [tuple(tokenizer.encode(word, add_special_tokens=False)) for word in words] == list(sampling.bad_words)
    if not sampling.allowed_ids:
        sampling = SlotSampling(**{**_fields(sampling), "allowed_ids": tuple(letters)})
    if sampling.min_tokens:
        sampling = SlotSampling(**{**_fields(sampling), "end_ids": (*sampling.end_ids, 2)})
    return sampling, SamplingParams(
        allowed_token_ids=list(sampling.allowed_ids),
        bad_words=words,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(sampling.end_ids),
        logit_bias={rng.choice(list(letters)): rng.choice((-1e9, -100, 1e9))},
        max_tokens=6,
        seed=number,
        repetition_penalty=rng.choice((1, 1e4)),
        **rng.choice(({"temperature": 0}, {"temperature": 1}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 1.0})),
    )


def _fields(sampling: SlotSampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def test_no_token_is_made_up(llm: LLM) -> None:
    """Whatever is forbidden: refused if there is no first token, else each token is one that may be chosen, and an
    output without a next one ends there."""
    cases = [forbidding(llm, number) for number in range(300)]
    hopeless = [params for sampling, params in cases if not choosable(sampling, (), ())]
    for params in hopeless:
        with pytest.raises(RequestError, match="left to choose"):
            llm.generate([[5]], params, use_tqdm=False)
    cases = [(sampling, params) for sampling, params in cases if choosable(sampling, (), ())]
    results = llm.generate([[5]] * len(cases), [params for _, params in cases], use_tqdm=False)
    dead = 0
    for (sampling, params), result in zip(cases, results, strict=True):
        (output,) = result.outputs
        ids = output.token_ids
        for place, token in enumerate(ids):
            assert token in choosable(sampling, ids[:place], ()), (params, ids)
        if output.stop_reason == "bad_words":
            dead += 1
            assert output.finish_reason == "stop"
            assert not choosable(sampling, ids, ())
        else:
            assert ids[-1] in sampling.end_ids or len(ids) == 6
    assert min(dead, len(hopeless), len(results) - dead) > 30


@pytest.mark.parametrize(
    ("name", "value"),
    [("allowed_token_ids", [VOCAB]), ("logit_bias", {VOCAB: 1.0}), ("stop_token_ids", [VOCAB]), ("bad_words", [" "])],
)
def test_what_the_vocabulary_has_not(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        llm.generate([[5]], SamplingParams(**{name: value}), use_tqdm=False)
    assert caught.value.param == name
