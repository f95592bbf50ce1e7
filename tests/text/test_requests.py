"""Prompts and parameters to engine requests: what is resolved, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, normalizers

from drumline.engine.protocol import EngineRequest
from drumline.errors import RequestError
from drumline.plan.sampling import SamplingParams
from drumline.text.requests import RequestBuilder, split_prompts
from drumline.text.tokenizer import Tokenizer


@pytest.fixture
def builder(byte_level: Tokenizer) -> RequestBuilder:
    return RequestBuilder(byte_level, max_model_len=64, vocab_size=byte_level.vocab_size + 8, seed=0)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("fox", "fox"),
        ({"prompt": "fox"}, "fox"),
        ({"prompt_token_ids": [5, 6]}, None),
        ({"prompt": "shown", "prompt_token_ids": [5, 6]}, "shown"),
        ({"prompt": "fox", "prompt_token_ids": None, "cache_salt": None}, "fox"),
        ({"prompt": "fox", "multi_modal_data": None, "mm_processor_kwargs": None}, "fox"),
        ([5, 6], None),
        ((5, 6), None),
        (np.array([5, 6]), None),
        ([np.int64(5), np.int64(6)], None),
    ],
)
def test_forms_of_a_prompt(builder: RequestBuilder, byte_level: Tokenizer, prompt: Any, text: str | None) -> None:
    prepared = builder.prepare("r", prompt)
    assert prepared.prompt == text
    assert prepared.prompt_token_ids == (byte_level.encode("fox") if text == "fox" else [5, 6])
    (child,) = prepared.children
    assert child.request_id == "r"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(child), type=EngineRequest) == child


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({}, "needs prompt or prompt_token_ids"),
        ({"prompt": 3}, "must be a text"),
        ({"prompt": "x", "multi_modal_data": {}}, "cannot have multi_modal_data"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt"),
        ({"prompt_token_ids": "abc"}, "list of integers"),
        (3, "list of integers"),
        (None, "list of integers, got None"),
        (b"x", "list of integers"),
        (1.5, "list of integers"),
        ({5, 6}, "list of integers"),
        ([None], "list of integers"),
        ([[5]], "list of integers"),
        ({"prompt": None}, "needs prompt or prompt_token_ids"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt has a lone surrogate"),
        ([1, "a"], "list of integers"),
        ([1, True], "list of integers"),
        ([1, 2.5], r"list of integers, but \[1\] is 2\.5"),
        ([10**5000], "token id an integer of 16610 bits is outside"),
        ([1, -1], "token id -1 is outside"),
        ([1, 100000], r"token id 100000 is outside of the model's vocabulary \(0 to 427\)"),
        ([1] * 64, "has 64 tokens; this model takes at most 64 tokens"),
        ("fox " * 100, "has .* tokens; this model takes at most 64 tokens"),
        ("x" * 100_000, "100000 characters"),
    ],
)
def test_prompts_that_cannot_work(builder: RequestBuilder, prompt: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        builder.prepare("r", prompt)


def test_a_text_of_any_length_that_fits_is_taken(byte_level_path: Path) -> None:
    """Characters are no measure of tokens: here a token has 300."""
    tokenizer = Tokenizer.from_folder(byte_level_path)
    tokenizer.backend.add_tokens([AddedToken("=" * 300, normalized=False)])
    builder = RequestBuilder(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    for count in (1, 20, 63):
        prepared = builder.prepare("r", "=" * 300 * count, SamplingParams(max_tokens=None))
        assert len(prepared.prompt_token_ids) == count
    with pytest.raises(RequestError, match=r"19200 characters; .* however they are divided, these are more") as caught:
        builder.prepare("r", "=" * 300 * 64)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=r"19500 characters; .* more than 16384 characters are not tokenised"):
        builder.check_text("=" * 300 * 65, cut=True)


def test_of_other_tokenizers_long_texts_are_not_tokenised(byte_level_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_path)
    tokenizer.backend.normalizer = normalizers.Strip()
    assert tokenizer.fewest_tokens is None
    builder = RequestBuilder(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    assert builder.prepare("r", "fox" + " " * 64 * 250).prompt_token_ids == tokenizer.encode("fox")
    with pytest.raises(RequestError, match="more than 16384 characters are not tokenised"):
        builder.prepare("r", "fox" + " " * 64 * 256)


def test_longest_prompt_leaves_one_token(builder: RequestBuilder) -> None:
    prepared = builder.prepare("r", [1] * 63, SamplingParams(max_tokens=None))
    assert prepared.children[0].sampling.max_tokens == 1


def test_max_tokens(builder: RequestBuilder) -> None:
    assert builder.prepare("r", [1] * 10, SamplingParams(max_tokens=None)).params.max_tokens == 54
    assert builder.prepare("r", [1] * 10, SamplingParams(max_tokens=7)).params.max_tokens == 7
    params = SamplingParams(max_tokens=500)
    assert builder.prepare("r", [1] * 10, params).params.max_tokens == 54
    assert params.max_tokens == 500  # the caller's object is the caller's
    with pytest.raises(RequestError, match="only 54 fit") as caught:
        builder.prepare("r", [1] * 10, params, strict_max_tokens=True)
    assert caught.value.param == "max_tokens"


def test_several_outputs_have_seeds_in_a_row(builder: RequestBuilder) -> None:
    prepared = builder.prepare("r", [1], SamplingParams(n=3, seed=2**64 - 1), cache_salt="s")
    assert [child.request_id for child in prepared.children] == ["0_r", "1_r", "2_r"]
    assert [child.seed for child in prepared.children] == [2**64 - 1, 0, 1]
    assert all(child.sampling.n == 1 for child in prepared.children)
    assert all(child.cache_salt == "s" for child in prepared.children)
    assert builder.prepare("r", [1], SamplingParams(seed=-5)).children[0].seed == 2**64 - 5


def test_best_of_makes_more_children(builder: RequestBuilder) -> None:
    prepared = builder.prepare("r", [1], SamplingParams(n=2, best_of=3, seed=5, prompt_logprobs=1))
    assert [child.request_id for child in prepared.children] == ["0_r", "1_r", "2_r"]
    assert [child.sampling.logprobs for child in prepared.children] == [0, 0, 0]
    assert [child.sampling.prompt_logprobs for child in prepared.children] == [1, None, None]
    assert [(child.sampling.n, child.sampling.best_of) for child in prepared.children] == [(1, None)] * 3
    assert builder.prepare("r", [1], SamplingParams(n=2, best_of=2)).children[0].sampling.logprobs is None


def test_priorities_pass_through(builder: RequestBuilder) -> None:
    assert builder.prepare("r", [1], priority=-2).children[0].priority == -2


def test_min_tokens(builder: RequestBuilder) -> None:
    with pytest.raises(RequestError, match="min_tokens is 60, but with a prompt of 10 tokens only 54 fit") as caught:
        builder.prepare("r", [1] * 10, SamplingParams(max_tokens=None, min_tokens=60))
    assert caught.value.param == "min_tokens"
    params = builder.prepare("r", [1] * 10, SamplingParams(max_tokens=100, min_tokens=60)).params
    assert (params.min_tokens, params.max_tokens) == (54, 54)


def test_bad_words_with_and_without_a_space(builder: RequestBuilder, byte_level: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return byte_level.encode(text, add_special_tokens=False)

    def found(*words: str) -> list[list[int]]:
        return builder.prepare("r", [1], SamplingParams(bad_words=list(words))).children[0].bad_words_ids

    assert len(ids("fox")) == len(ids(" fox"))
    assert found("fox", "  fox") == [ids("fox"), ids(" fox")] * 2
    assert len(ids("zq")) != len(ids(" zq"))
    assert found("zq") == [ids("zq")]
    assert found() == []
    for blank in (" ", "   ", "\n \t", "\u3000"):
        with pytest.raises(
            RequestError, match=re.escape(f"bad_words has {blank!r} in it, which gives no tokens")
        ) as caught:
            found("fox", blank)
        assert "Leave it out" in str(caught.value)
        assert caught.value.param == "bad_words"
    with pytest.raises(RequestError, match="at most 128"):
        found(*(f"fox{i}" for i in range(128)))
    with pytest.raises(RequestError, match="at most 128 texts of 262144 characters"):
        found(*(f"fox{i}" for i in range(129)))
    with pytest.raises(RequestError, match="got 1 of 300000"):
        found("x" * 300_000)
    with pytest.raises(RequestError, match="at most 128 of 1024"):
        found("\u6771" * 1025)


def test_all_log_probabilities(byte_level: Tokenizer) -> None:
    builder = RequestBuilder(byte_level, max_model_len=64, vocab_size=500, max_logprobs=-1)
    params = builder.prepare("r", [1], SamplingParams(logprobs=-1, prompt_logprobs=-1)).params
    assert (params.logprobs, params.prompt_logprobs) == (500, 500)
    builder = RequestBuilder(byte_level, max_model_len=64, vocab_size=500)
    for name in ("logprobs", "prompt_logprobs"):
        for value in (-1, 21):
            with pytest.raises(RequestError, match=f"^{name} must be at most 20, got {value}") as caught:
                builder.prepare("r", [1], SamplingParams(**{name: value}))
            assert caught.value.param == name


def test_biases_of_the_api_are_bounded(builder: RequestBuilder) -> None:
    assert builder.default_params(logit_bias={"5": 1000, "6": -1000.5}).logit_bias == {5: 100.0, 6: -100.0}
    assert SamplingParams(logit_bias={5: 1000}).logit_bias == {5: 1000.0}
    with pytest.raises(RequestError, match="logit_bias"):
        builder.default_params(logit_bias={"5": "x"})


def test_seeds_of_requests_without_one(byte_level: Tokenizer) -> None:
    def seeds(seed: int | None) -> list[int]:
        builder = RequestBuilder(byte_level, max_model_len=64, vocab_size=500, seed=seed)
        return [builder.prepare("r", [1]).children[0].seed for _ in range(3)]

    assert seeds(0) == seeds(0)
    assert seeds(0) != seeds(1)
    assert seeds(None) != seeds(None)
    assert len(set(seeds(0))) == 3


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bits", [31, 63, 64, 20_000])
@pytest.mark.parametrize(
    "name", ["n", "top_k", "seed", "max_tokens", "min_tokens", "best_of", "logprobs", "temperature"]
)
def test_numbers_of_any_size_are_refused_or_travel(builder: RequestBuilder, name: str, bits: int, strict: bool) -> None:
    try:
        params = SamplingParams(**{"max_tokens": None, name: 1 << bits})
        children = builder.prepare("r", [1], params, strict_max_tokens=strict).children
    except RequestError as error:
        children = []
        param, length = error.param, len(str(error))
    if children:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(children), type=list[EngineRequest]) == children
    else:
        assert param == name
        assert length < 300


def test_end_of_sequence(builder: RequestBuilder) -> None:
    assert builder.prepare("r", [1]).children[0].eos_token_ids == [2]
    assert builder.prepare("r", [1], SamplingParams(ignore_eos=True)).children[0].eos_token_ids == [2]


def test_defaults_of_the_model(byte_level: Tokenizer) -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    builder = RequestBuilder(byte_level, max_model_len=64, vocab_size=500, sampling_defaults=defaults)
    assert builder.default_params(top_k=None, top_p=0.5) == SamplingParams(temperature=0.6, top_k=20, top_p=0.5)
    assert builder.default_params(temperature=0.0).greedy
    assert builder.prepare("r", [1]).params.temperature == 0.6


def test_parameters_that_the_engine_cannot_meet(builder: RequestBuilder) -> None:
    with pytest.raises(RequestError, match="logprobs must be at most 20"):
        builder.prepare("r", [1], SamplingParams(logprobs=21))
    for name, value in (("stop_token_ids", [500]), ("allowed_token_ids", [1, 500]), ("logit_bias", {500: 1.0})):
        with pytest.raises(RequestError, match=f"^{name}: 500 is outside .* Leave it out") as caught:
            builder.prepare("r", [1], SamplingParams(**{name: value}))
        assert caught.value.param == name
    bare = RequestBuilder(None, max_model_len=64, vocab_size=500, eos_token_ids=[2, 600])
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        bare.prepare("r", "text")
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        bare.prepare("r", [1], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
        bare.prepare("r", [1], SamplingParams(bad_words=["x"]))
    assert bare.prepare("r", [1]).children[0].eos_token_ids == [2]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([{"prompt_token_ids": [1]}, "b"], [{"prompt_token_ids": [1]}, "b"]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        ([[np.int64(1)], [2]], [[1], [2]]),
        ([None], [None]),
        ([], []),
    ],
)
def test_one_prompt_or_several(prompts: Any, expected: list[Any]) -> None:
    assert split_prompts(prompts) == expected


def test_several_arrays_are_several_prompts() -> None:
    first, second = split_prompts([np.array([1, 2]), np.array([3])])
    assert (first.tolist(), second.tolist()) == ([1, 2], [3])


def test_prompts_of_another_kind() -> None:
    for prompts in (3, None, b"abc"):
        with pytest.raises(RequestError, match="prompts must be"):
            split_prompts(prompts)
