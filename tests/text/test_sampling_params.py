"""SamplingParams: ranges, one form for what can be said in several, and what comes later."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drumline.errors import RequestError, shown
from drumline.plan import sampling
from drumline.plan.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 1.5, "2", True, None, 20000]),
        ("temperature", [-0.1, 2.1, float("nan"), float("inf"), "1", None, True, 10**400]),
        ("top_p", [0, -0.1, 1.1, float("nan"), None]),
        ("top_k", [-2, 1.5, "3", None]),
        ("seed", ["1", 1.0, 2**64, -(2**63) - 1, True]),
        ("max_tokens", [0, -1, 2.0, "5"]),
        ("min_tokens", [-1, 17, 1.5, None]),
        ("best_of", [0, -1, 1.5, "2", True, 20000]),
        ("presence_penalty", [-2.1, 2.1, float("nan"), "1", None, True]),
        ("frequency_penalty", [-2.1, 2.1, float("inf"), "1", None, True]),
        ("repetition_penalty", [0, -1, float("nan"), float("inf"), "1", None]),
        ("min_p", [-0.1, 1.1, float("nan"), "0.1", None]),
        ("logprobs", [-2, 1.5, "1", False]),
        ("prompt_logprobs", [-2, 1.5, "1", False]),
        ("logit_bias", [[1], {"a": 1.0}, {-1: 1.0}, {"-1": 1}, {1.0: 1}, {None: 1}, {"9" * 11: 1.0}, {True: 1.0}]),
        ("logit_bias", [{1: "x"}, {1: float("nan")}, {1: None}, {1: True}, {1: 1e10}, {1: 10**400}, {7: 1, 8: [1]}]),
        ("bad_words", ["word", [""], [1], {"a": 1}, ["a", None], ["\ud800"]]),
        ("allowed_token_ids", [[], [-1], ["1"], 5, "12", [2**31]]),
        ("stop", ["", ["a", ""], [1], 5, {"a": 1}, ["a\udfff"]]),
        ("stop_token_ids", [[-1], ["1"], [True], 5, "12", [2**31]]),
        ("ignore_eos", [1, None, "yes"]),
        ("include_stop_str_in_output", [1]),
        ("skip_special_tokens", [None]),
        ("detokenize", [0]),
    ],
)
def test_values_that_cannot_work(name: str, values: list[Any]) -> None:
    """The message names the field, and what of the value is wrong."""
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert caught.value.param == name
        assert message.startswith(name)
        assert isinstance(caught.value, ValueError)
        assert len(message) < 250
        assert value in ([], [""], ["a", ""]) or any(shown(part) in message for part in parts(value)), message


def parts(value: Any) -> list[Any]:
    """The value, and what is in it."""
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value, *inside]


LARGE = [
    10**5000,
    -(10**5000),
    "x" * 10**6,
    ["x"] * 10**6,
    [[[[[1]]]]] * 10**5,
    dict.fromkeys(range(10**5), "x"),
    b"x" * 10**6,
]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_large_values_make_short_messages(name: str) -> None:
    """And no long waits; some fields take some of these."""
    for value in LARGE:
        began = time.process_time()
        error = error_of(**{name: value})
        assert time.process_time() - began < 1
        if error is not None:
            assert error.param == name
            assert len(str(error)) < 400


def error_of(**given: Any) -> RequestError | None:
    try:
        SamplingParams(**given)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("spaces_between_special_tokens", False, True),
        ("logprob_token_ids", [1], []),
        ("flat_logprobs", True, False),
        ("structured_outputs", {"regex": "a"}, None),
        ("thinking_token_budget", 5, None),
        ("stream_interval", 2, 1),
        ("skip_reading_prefix_cache", True, False),
        ("repetition_detection", {"max_pattern_size": 4}, None),
        ("repetition_detection", object(), None),
        ("watermarking", True, False),
        ("prompt_logprob_token_ids", [[1], [2]], []),
        ("prompt_logprob_token_ids", np.array([[1], [2]]), None),
        ("prompt_logprob_start", 3, 0),
        ("routed_experts_prompt_start", 1, 0),
        ("trace_decode_token_ids", [1], []),
    ],
)
def test_what_comes_later(name: str, value: Any, off: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is not supported yet") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    SamplingParams(**{name: off})
    params = SamplingParams(**{name: off}, stop_token_ids=[3])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_no_name_of_vllms_is_unknown() -> None:
    """Arguments of vLLM 0.32's ``SamplingParams.from_optional``."""
    theirs = """n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed
        stop stop_token_ids bad_words thinking_token_budget include_stop_str_in_output ignore_eos max_tokens min_tokens
        logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start detokenize skip_special_tokens
        spaces_between_special_tokens output_kind stream_interval structured_outputs logit_bias allowed_token_ids
        extra_args skip_reading_prefix_cache repetition_detection logprob_token_ids routed_experts_prompt_start
        trace_decode_token_ids flat_logprobs"""
    assert set(theirs.split()) <= {field.name for field in msgspec.structs.fields(SamplingParams)}


def test_token_ids_of_numpy() -> None:
    """Its whole numbers are taken, and become Python's, which can be sent; its truth values are no tokens."""
    three = np.int64(3)
    params = SamplingParams(stop_token_ids=[three, 1, 3], allowed_token_ids=(np.uint8(4), 4), logit_bias={three: 1})
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == ([3, 1], [4], {3: 1.0})
    assert {type(one) for ids in (params.stop_token_ids, params.logit_bias) for one in ids or ()} == {int}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    for wrong in (np.True_, np.float64(3), np.int64(-1), np.array([3])):
        with pytest.raises(RequestError, match=r"stop_token_ids\[0\]"):
            SamplingParams(stop_token_ids=[wrong])


def test_one_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3, 1, 3], logprobs=True, seed=-1, top_k=-1, temperature=1)
    assert params.stop == params.stop_strings == ["x"]
    assert params.stop_token_ids == [3, 1]
    assert (params.logprobs, params.seed, params.top_k) == (1, None, 0)
    assert SamplingParams().stop == SamplingParams().bad_words == []
    params = SamplingParams(
        prompt_logprobs=True,
        logit_bias={"7": 1, 8: -2.5},
        bad_words=["x", "y", "x"],
        allowed_token_ids=(4, 3, 4),
        presence_penalty=1,
        min_p=0,
    )
    assert (params.prompt_logprobs, params.logit_bias) == (1, {7: 1.0, 8: -2.5})
    assert (params.bad_words, params.allowed_token_ids) == (["x", "y"], [4, 3])
    assert isinstance(params.presence_penalty, float)
    assert isinstance(params.min_p, float)
    assert SamplingParams(logprobs=-1, prompt_logprobs=-1).logprobs == -1


def test_greedy() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.5, presence_penalty=0.5)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p, params.presence_penalty) == (1.0, 0, 0.0, 0.5)
    with pytest.raises(RequestError, match="n must be 1 with temperature 0"):
        SamplingParams(temperature=0, n=2)
    with pytest.raises(RequestError, match="best_of must be 1 with temperature 0"):
        SamplingParams(temperature=0, best_of=2)


@given(st.floats(min_value=0, max_value=2, allow_subnormal=True))
@example(1e-40)
@example(5e-324)
@example(0.01)
@example(-0.0)
def test_temperatures(asked: float) -> None:
    """0 is greedy; however small another one is, it is not, and the least is 0.01 (vLLM's rule)."""
    params = SamplingParams(temperature=asked, top_p=0.5)
    assert params.greedy == (asked == 0)
    assert params.temperature == (0.0 if asked == 0 else max(asked, 0.01))
    assert params.top_p == (1.0 if asked == 0 else 0.5)
    assert params.clone() == params


def test_a_temperature_that_is_raised_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sampling._say_raised.cache_clear()
    for temperature in (0, 0.01, 1.0):
        SamplingParams(temperature=temperature)
    assert not caplog.records
    for temperature in (1e-40, 1e-40, 0.005):
        SamplingParams(temperature=temperature)
    (record,) = caplog.records
    assert record.getMessage() == "a request has a temperature between 0 and 0.01: such are raised to 0.01"


def test_best_of() -> None:
    assert SamplingParams(n=2, best_of=3).best_of == 3
    with pytest.raises(RequestError, match=r"best_of must be at least n \(3\), got 2"):
        SamplingParams(n=3, best_of=2)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_unknown_name() -> None:
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=3)  # type: ignore[call-arg]


def test_travels() -> None:
    params = SamplingParams(n=2, stop=["x"], seed=2**64 - 1, logprobs=3, logit_bias={5: 1.5}, allowed_token_ids=[5])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    copy = params.clone()
    copy.n = 5
    assert params.n == 2


def test_the_first_five_may_come_without_their_names() -> None:
    params = SamplingParams(2, 0.0, 0.0, 1.0, 0.5)
    assert (params.n, params.temperature, params.top_p) == (2, 0.5, 1.0)
    assert SamplingParams(1, 0.5, -0.5, 1.1).repetition_penalty == 1.1
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1, 0.0, 0.0, 1.0, 0.5, 0.9)  # type: ignore[call-arg,misc]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
