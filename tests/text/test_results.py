"""Engine outputs of a prompt's children to one result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from drumline.engine.protocol import RequestOutput as EngineOutput
from drumline.errors import DrumlineError
from drumline.plan.sampling import SamplingParams
from drumline.plan.step import TokenLogprobs
from drumline.text.requests import RequestBuilder
from drumline.text.results import CompletionOutput, Logprob, OutputAssembler, RequestOutput
from drumline.text.tokenizer import Tokenizer


def assemble(tokenizer: Tokenizer | None, eos: Sequence[int] = (2,), **params: object) -> OutputAssembler:
    builder = RequestBuilder(tokenizer, max_model_len=64, vocab_size=500, eos_token_ids=eos)
    return OutputAssembler(tokenizer, builder.prepare("r", [5, 6], SamplingParams(**params)))


def out(request_id: str, first: int, ids: list[int], **more: object) -> EngineOutput:
    return EngineOutput(request_id=request_id, first_index=first, token_ids=ids, **more)


def test_one_output(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a fox", add_special_tokens=False)
    assembler = assemble(byte_level)
    first = assembler.push(out("r", 0, ids[:1], num_cached_tokens=1))
    assert first == CompletionOutput(index=0, text="a", token_ids=ids[:1])
    assert not assembler.finished
    assert assembler.running == ["r"]
    assembler.push(out("r", 1, [*ids[1:], 2], finish_reason="stop"))
    assert assembler.finished
    assert assembler.result() == RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[5, 6],
        outputs=[CompletionOutput(index=0, text="a fox", token_ids=[*ids, 2], finish_reason="stop")],
        finished=True,
        num_cached_tokens=1,
    )
    assert assembler.push(out("r", 9, [7])) is None


@pytest.mark.parametrize("at_once", [1, 9])
def test_the_token_that_ended_an_output_is_no_text_whoever_knows_it(byte_level: Tokenizer, at_once: int) -> None:
    """The tokenizer may be of another folder than the model, whose end tokens are plain text to it."""
    fox, end = (byte_level.encode(text, add_special_tokens=False) for text in ("a fox", "Z"))
    assert len(end) == 1
    assert end[0] not in byte_level.eos_token_ids

    def text(eos: Sequence[int], n: int = 1, **params: object) -> list[str]:
        assembler = assemble(byte_level, eos, n=n, **params)
        ids = [*fox, *end]
        for name in assembler.running:
            for place in range(0, len(ids), at_once):
                reason = "stop" if place + at_once >= len(ids) else None
                assembler.push(out(name, place, ids[place : place + at_once], finish_reason=reason))
        return [output.text for output in assembler.result().outputs]

    ends = [end, [*byte_level.eos_token_ids, *end]]
    for eos in ends:
        assert text(eos) == ["a fox"]
        assert text(eos, n=2) == ["a fox", "a fox"]
        assert text(eos, include_stop_str_in_output=True) == ["a foxZ"]
        assert text(eos, ignore_eos=True) == ["a foxZ"]
        assert text(eos, ignore_eos=True, stop_token_ids=end) == ["a fox"]
    assert text(byte_level.eos_token_ids) == ["a foxZ"]


def test_several_outputs_keep_their_places(byte_level: Tokenizer) -> None:
    a, b = (byte_level.encode(text, add_special_tokens=False) for text in ("a", "b"))
    assembler = assemble(byte_level, n=2)
    assembler.push(out("1_r", 0, b, finish_reason="length"))
    assert not assembler.finished
    assembler.push(out("0_r", 0, a, finish_reason="stop", stop_reason=a[0]))
    outputs = assembler.result().outputs
    assert [(o.index, o.text, o.finish_reason, o.stop_reason) for o in outputs] == [
        (0, "a", "stop", a[0]),
        (1, "b", "length", None),
    ]


def test_stop_string_ends_the_engine_request(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("abcd", add_special_tokens=False)
    assembler = assemble(byte_level, stop=["bc"], logprobs=0)
    rows = [TokenLogprobs(-0.5, 1)] * len(ids)
    delta = assembler.push(out("r", 0, ids, logprobs=rows))
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "bc")
    assert delta.token_ids == ids[:3]
    assert delta.logprobs is not None
    assert len(delta.logprobs) == 3
    assert delta.cumulative_logprob == -1.5
    assert assembler.take_aborts() == ["r"]
    assert assembler.take_aborts() == []
    assert assembler.finished


def test_stop_string_in_the_last_output_needs_no_abort(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("abc", add_special_tokens=False)
    assembler = assemble(byte_level, stop=["bc"])
    assembler.push(out("r", 0, ids, finish_reason="length"))
    assert assembler.result().outputs[0].finish_reason == "stop"
    assert assembler.take_aborts() == []


def test_text_held_back_comes_with_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab", add_special_tokens=False)
    assembler = assemble(byte_level, stop=["bc"])
    delta = assembler.push(out("r", 0, ids, finish_reason="length"))
    assert delta is not None
    assert delta.text == "ab"


def test_tokens_said_again_are_dropped_and_gaps_are_errors(byte_level: Tokenizer) -> None:
    assembler = assemble(None)
    assembler.push(out("r", 0, [7, 8]))
    assert assembler.push(out("r", 0, [7, 8])) is None
    delta = assembler.push(out("r", 1, [8, 9]))
    assert delta is not None
    assert delta.token_ids == [9]
    with pytest.raises(DrumlineError, match="missing"):
        assembler.push(out("r", 5, [1]))


def test_failure_of_the_engine_on_a_request() -> None:
    with pytest.raises(DrumlineError, match="too large for the cache"):
        assemble(None).push(out("r", 0, [], finish_reason="error", message="too large for the cache"))


def test_log_probabilities(byte_level: Tokenizer) -> None:
    a, b = byte_level.encode("ab", add_special_tokens=False)
    assembler = assemble(byte_level, logprobs=2)
    assembler.push(out("r", 0, [a], logprobs=[TokenLogprobs(-0.1, 1, [a, b], [-0.1, -3.0])]))
    assembler.push(out("r", 1, [b], logprobs=[TokenLogprobs(-4.0, 9, [a, 2], [-0.2, -0.3])], finish_reason="length"))
    output = assembler.result().outputs[0]
    assert output.logprobs == [
        {a: Logprob(-0.1, 1, "a"), b: Logprob(-3.0, 2, "b")},
        {b: Logprob(-4.0, 9, "b"), a: Logprob(-0.2, 1, "a"), 2: Logprob(-0.3, 2, "<|im_end|>")},
    ]
    assert output.cumulative_logprob is not None
    assert math.isclose(output.cumulative_logprob, -4.1)
    assert assemble(byte_level).result().outputs[0].cumulative_logprob is None


def test_without_a_tokenizer() -> None:
    assembler = assemble(None, logprobs=1)
    assembler.push(out("r", 0, [7], logprobs=[TokenLogprobs(-0.1, 1, [7], [-0.1])], finish_reason="length"))
    output = assembler.result().outputs[0]
    assert (output.text, output.token_ids) == ("", [7])
    assert output.logprobs == [{7: Logprob(-0.1, 1, None)}]


def test_log_probabilities_of_the_prompt(byte_level: Tokenizer) -> None:
    assembler = assemble(byte_level, prompt_logprobs=1)  # the prompt is [5, 6]
    assert assembler.result().prompt_logprobs is None
    assembler.push(out("r", 0, [7], prompt_logprobs=[TokenLogprobs(-2.0, 3, [8], [-0.5])]))
    expected = [None, {6: Logprob(-2.0, 3, byte_level.token_text(6)), 8: Logprob(-0.5, 1, byte_level.token_text(8))}]
    assert assembler.result().prompt_logprobs == expected
    # an engine that recovered says it again
    assembler.push(out("r", 0, [7, 9], prompt_logprobs=[TokenLogprobs(-2.0, 3, [8], [-0.5])], finish_reason="length"))
    assert assembler.result().prompt_logprobs == expected
    assert assembler.result().outputs[0].logprobs is None


def test_best_of() -> None:
    def run(**params: object) -> OutputAssembler:
        assembler = assemble(None, best_of=3, **params)
        for child, values in enumerate([[-1.0, -2.0], [-0.5], [-1.0, -0.5, -0.9]]):
            rows = [TokenLogprobs(value, 1) for value in values]
            assembler.push(out(f"{child}_r", 0, [10 + child] * len(rows), logprobs=rows, finish_reason="length"))
        assert assembler.finished
        return assembler

    assembler = run(n=2)
    outputs = assembler.result().outputs
    assert [(o.index, o.token_ids, o.logprobs, o.cumulative_logprob) for o in outputs] == [
        (0, [11], None, None),
        (1, [12] * 3, None, None),
    ]
    assert assembler.num_tokens == 6
    (best,) = run(n=1, logprobs=0).result().outputs
    assert (best.cumulative_logprob, best.logprobs) == (-0.5, [{11: Logprob(-0.5, 1, None)}])
