"""Events, times, statistics, prompts: what needs no server."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cli.bench import prompts, report, sse
from drumline.cli.bench.answers import BROKEN, IN_STREAM, MALFORMED, SHORT, AnswerError, complete, read_answer, refusal
from drumline.cli.bench.schedule import arrivals
from drumline.cli.bench.sse import EventReader
from drumline.cli.bench.stats import Outcome, Spread, peak, percentile, summarise
from drumline.errors import ConfigError
from drumline.text.tokenizer import Tokenizer
from tests.text.vocab import byte_fallback_folder, byte_level_folder

# -------------------------------------------------------------------------------------------------------- events


def by_the_standard(stream: bytes) -> list[bytes]:
    """The HTML standard's algorithm, letter by letter, over a whole stream."""
    if stream.startswith(b"\xef\xbb\xbf"):
        stream = stream[3:]
    lines, line, place = [], b"", 0
    while place < len(stream):
        if stream[place : place + 2] == b"\r\n":
            lines.append(line)
            line, place = b"", place + 2
        elif stream[place] in b"\r\n":
            lines.append(line)
            line, place = b"", place + 1
        else:
            line += stream[place : place + 1]
            place += 1
    events, data = [], None
    for line in lines:
        if not line:
            if data is not None:
                events.append(data)
            data = None
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value[1:] if value.startswith(b" ") else value
            data = value if data is None else data + b"\n" + value
    return events


PIECE = st.sampled_from(
    [
        *(b"data: x", b"data:y", b"data", b"data: ", b": comment", b":", b"event: e", b"id: 1", b"retry:9", b""),
        *(b'data: {"a": 1}', b"data:  two", b"\xef\xbb\xbf", "data: ü€".encode(), b"data: [DONE]", b"datax: 1"),
    ]
)
END = st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])


@settings(max_examples=400, deadline=None)
@given(
    lines=st.lists(st.tuples(PIECE, END), max_size=12),
    mark=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_events_are_those_of_the_standard_wherever_reads_end(
    lines: list[tuple[bytes, bytes]], mark: bool, cuts: list[int]
) -> None:
    stream = (b"\xef\xbb\xbf" if mark else b"") + b"".join(itertools.chain.from_iterable(lines))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = EventReader()
    found = [event for a, b in itertools.pairwise(places) for event in reader.feed(stream[a:b])]
    assert found == by_the_standard(stream)


def test_events_byte_by_byte_come_as_soon_as_they_end() -> None:
    reader = EventReader()
    stream = b"data: a\r\n\r\ndata: b\r\rdata: c\n\n:x\n\n"
    came = {}
    for place in range(len(stream)):
        for event in reader.feed(stream[place : place + 1]):
            came[event] = stream[: place + 1]
    # A CR ends a line at once; the LF behind it is dropped.
    assert came == {
        b"a": b"data: a\r\n\r",
        b"b": b"data: a\r\n\r\ndata: b\r\r",
        b"c": b"data: a\r\n\r\ndata: b\r\rdata: c\n\n",
    }
    assert reader.unfinished == b""
    reader.feed(b"data: half")
    assert reader.unfinished == b"data: half"


def test_an_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    reader = EventReader()
    assert reader.feed(b"data: 0123456789\n" * 5) == []
    with pytest.raises(sse.EventTooLargeError):
        reader.feed(b"data: 0123456789\n")


# ------------------------------------------------------------------------------------------------------- answers


def stream(*events: object, done: bool = True) -> list[tuple[float, bytes]]:
    """Events at times 1, 2, 3 ..."""
    texts = [json.dumps(event).encode() if not isinstance(event, bytes) else event for event in events]
    pieces = [(float(time), b"data: " + text + b"\n\n") for time, text in enumerate(texts, 1)]
    return pieces + ([(pieces[-1][0] if pieces else 1.0, b"data: [DONE]\n\n")] if done else [])


def completion(text: str, reason: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}]}


def chat(reason: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(output: int, given: int = 5) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": given, "completion_tokens": output}}


def test_tokens_of_a_completion() -> None:
    answer = read_answer(stream(completion("a"), completion(""), completion("b"), completion("", "length"), usage(3)))
    assert answer.times == [1, 2, 3]  # one without text is part of a character; the last only has the reason
    assert answer.count() == (3, "usage", [1, 1, 1])
    assert (answer.prompt_tokens, answer.finish_reason, answer.texts) == (5, "length", ["a", "b"])


def test_tokens_of_a_chat() -> None:
    events = [chat(role="assistant", content=""), chat(content="a"), chat(reasoning_content="b"), chat(content="")]
    events += [chat(tool_calls=[{}]), chat("stop"), usage(9)]
    answer = read_answer(stream(*events))
    assert answer.times == [2, 3, 4, 5]
    assert answer.count() == (9, "usage", None)


def test_who_counts() -> None:
    ids = [completion("a", token_ids=[1, 2]), completion("", token_ids=[3]), completion("", "stop", token_ids=[])]
    answer = read_answer(stream(*ids, usage(3)))
    assert answer.times == [1, 2]
    assert answer.count() == (3, "ids", [2, 1])
    each = [
        completion("a") | {"usage": {"completion_tokens": 2}},
        completion("b") | {"usage": {"completion_tokens": 5}},
    ]
    assert read_answer(stream(*each)).count() == (5, "stream", [2, 3])
    # vLLM's null usage in every event.
    assert read_answer(stream(completion("a") | {"usage": None}, completion("b"))).count() == (2, "events", [1, 1])


@pytest.mark.parametrize(
    ("pieces", "kind", "said"),
    [
        (stream(completion("a"), done=False), BROKEN, "without [DONE]"),
        ([(1.0, b"data: {}\n\ndata: half")], BROKEN, "within an event"),
        (stream(b"{not json"), MALFORMED, "not JSON"),
        (stream(b"[" * 100_000), MALFORMED, "not JSON"),
        (stream(b"[1]"), MALFORMED, "not an object"),
        (stream({"choices": [3]}), MALFORMED, "another shape"),
        (stream({"choices": [], "usage": {"completion_tokens": "x"}}), MALFORMED, "another shape"),
        (stream(completion(5)), MALFORMED, "another shape"),  # type: ignore[arg-type]
        (stream(chat(content=[{"type": "text", "text": "Hi"}])), MALFORMED, "another shape"),
        (stream(completion("a", ["stop"])), MALFORMED, "another shape"),  # type: ignore[arg-type]
        (stream(completion("a", token_ids=5)), MALFORMED, "another shape"),
        (stream(usage(-1)), MALFORMED, "another shape"),
        (stream(usage(3, given=-5)), MALFORMED, "another shape"),
        (stream({"choices": [], "usage": {"completion_tokens": 1e300}}), MALFORMED, "another shape"),
        (stream({"choices": [], "usage": {"completion_tokens": True}}), MALFORMED, "another shape"),
        (stream({"error": "bo\x1b[31m\nom\x9b\u202e"}), IN_STREAM, "bo [31m om"),
        (stream(b"\x1b]0;title\x07"), MALFORMED, "not JSON: ]0;title"),
        (stream({"error": {"message": "the engine died", "type": "x"}}), IN_STREAM, "the engine died"),
        (stream({"error": "plain"}), IN_STREAM, "plain"),
        (stream({"object": "error", "error": {"code": 5}}), IN_STREAM, "5"),
        ([], BROKEN, "without [DONE]"),
        ([(1.0, b'{"choices": []}')], BROKEN, "within an event"),
    ],
)
def test_answers_that_are_no_good(pieces: list[tuple[float, bytes]], kind: str, said: str) -> None:
    with pytest.raises(AnswerError) as e:
        read_answer(pieces)
    assert e.value.kind == kind
    assert said in str(e.value)
    assert str(e.value).isprintable()


NAMES = ("text", "delta", "content", "reasoning", "token_ids", "finish_reason", "completion_tokens", "prompt_tokens")
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | FLOATS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=2), inner),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "choices": JSON
                | st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), min_size=1, max_size=1),
                "usage": JSON | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2),
                "error": JSON,
            },
        ),
        max_size=4,
    ),
    st.booleans(),
    st.booleans(),
)
def test_whatever_a_server_sends_is_an_answer_or_an_error(events: list[Any], done: bool, whole: bool) -> None:
    """Nothing else is raised, and what was read can be added up, shown and written."""
    found = complete(outcome(), stream(*events, done=done), whole=whole)
    summary = summarise([found])
    assert found.ok or (found.message and found.message.isprintable())
    assert found.prompt_tokens >= 0
    assert found.output_tokens >= 0
    assert "".join(report.table(summary, "t").split("\n")).isprintable()
    json.dumps(report.result(summary, {}, [found]), allow_nan=False)


def test_a_refusal_that_nobody_can_read() -> None:
    assert refusal(500, [(0.0, b'{"error":' + b"[" * 100_000)]).startswith('{"error":[[')


def test_what_a_server_refuses_with_cannot_steer_the_terminal() -> None:
    assert refusal(400, [(0.0, b'{"error": {"message": "\\u001b[2Jno\\u0007"}}')]) == "[2Jno"
    assert refusal(500, [(0.0, b"\x1b[2J<html>\r\n")]) == "[2J<html>"
    assert refusal(502, [(0.0, b"\x1b\x07")]) == "HTTP 502"


def test_a_reason_ends_an_answer_as_well_as_done_does() -> None:
    assert read_answer(stream(completion("a", "stop"), usage(1), done=False)).count() == (1, "usage", [1])


def outcome(**more: object) -> Outcome:
    given = {"index": 0, "due": 0.0, "sent": 0.0, "ended": 9.0, "asked_tokens": 4, **more}
    return Outcome(**given)  # type: ignore[arg-type]


def test_short_answers() -> None:
    short = stream(completion("a"), usage(3))
    assert complete(outcome(), short, whole=True).error == SHORT
    assert complete(outcome(), short, whole=False).ok
    assert complete(outcome(), stream(completion("", "abort"), usage(0)), whole=False).error == SHORT
    # Nobody counted: one event may have had them all.
    assert complete(outcome(), stream(completion("a")), whole=True).ok
    assert complete(outcome(), stream(usage(4)), whole=True).output_tokens == 4


# ------------------------------------------------------------------------------------------------------ schedule


def test_arrivals() -> None:
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]
    due = arrivals(20_000, 50.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert due[0] == 0
    assert due == sorted(due) == arrivals(20_000, 50.0, seed=1) != arrivals(20_000, 50.0, seed=2)
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # A Poisson process: the gaps' deviation is their mean, and a share of 1 - 1/e is below the mean.
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert sum(gap < 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(1 - 1 / math.e, abs=0.02)
    for burstiness in (0.25, 4.0):
        gaps = [b - a for a, b in itertools.pairwise(arrivals(20_000, 50.0, burstiness))]
        assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
        assert statistics.pstdev(gaps) == pytest.approx(1 / 50 / math.sqrt(burstiness), rel=0.1)
    for wrong in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="above 0"):
            arrivals(1, *wrong)


# ---------------------------------------------------------------------------------------------------- statistics


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), percent=st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_spread() -> None:
    spread = Spread.of([3.0, 1.0, 2.0])
    assert spread is not None
    assert (spread.count, spread.mean, spread.low, spread.high, spread.at[50]) == (3, 2, 1, 3, 2)
    assert spread.std == pytest.approx(statistics.pstdev([1, 2, 3]))
    assert Spread.of([]) is None


def test_a_summary() -> None:
    good = outcome(sent=10.0, ended=16.0, times=[11.0, 12.0, 15.0], counts=[1, 1, 3], output_tokens=5, prompt_tokens=7)
    other = outcome(
        index=1, due=10.5, sent=11.0, ended=20.0, times=[13.0], counts=[1], output_tokens=1, prompt_tokens=3
    )
    bad = outcome(index=2, sent=10.0, ended=11.0, error="HTTP 503", message="busy", output_tokens=99, times=[1.0])
    summary = summarise([good, other, bad], unfinished=4)
    assert (summary.completed, summary.failed, summary.unfinished) == (2, 1, 4)
    assert (summary.duration, summary.input_tokens, summary.output_tokens) == (10.0, 10, 6)
    assert (summary.output_throughput, summary.total_throughput, summary.request_throughput) == (0.6, 1.6, 0.2)
    assert summary.errors == {"HTTP 503": 1}
    assert summary.examples == {"HTTP 503": "busy"}
    assert summary.spreads["ttft"].mean == 1.5
    assert summary.spreads["itl"].mean == 2
    assert (summary.spreads["itl_token"].count, summary.spreads["itl_token"].mean) == (4, 1)
    assert summary.spreads["tpot"].mean == 1
    assert summary.spreads["e2el"].mean == 7.5
    found = summary.as_json()
    assert (found["median_ttft_ms"], found["p99_itl_ms"], found["output_throughput"]) == (
        1500,
        pytest.approx(2980),
        0.6,
    )
    assert json.loads(json.dumps(found)) == found
    text = report.table(summary, "title")
    assert "2 done, 1 failed, 4 not ended" in text
    assert "1 x HTTP 503: busy" in text


def test_per_token_latencies_need_the_count_of_every_request() -> None:
    known = outcome(times=[1.0, 2.0], counts=[1, 1], output_tokens=2)
    unknown = outcome(times=[1.0, 2.0], counts=None, output_tokens=5)
    assert "itl_token" in summarise([known]).spreads
    assert "itl_token" not in summarise([known, unknown]).spreads


def test_nothing_at_all() -> None:
    summary = summarise([])
    assert (summary.duration, summary.output_throughput, summary.spreads) == (0, 0, {})
    assert "0 done" in report.table(summary, "title")


def test_peak_concurrency() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.6)]
    assert peak([outcome(sent=a, ended=b) for a, b in spans]) == 3
    assert peak([]) == 0


def test_percentiles_of_the_flag() -> None:
    assert report.percentiles("99, 10") == (10, 50, 99)
    for wrong in ("x", "101", "-1"):
        with pytest.raises(ValueError):
            report.percentiles(wrong)


# ------------------------------------------------------------------------------------------------------- prompts


def test_random_ids_are_exact_and_repeatable() -> None:
    lengths = prompts.Lengths(10, 20, 0.5, prefix=3)
    made = prompts.random_ids(200, lengths, 1, range(100, 200))
    assert made == prompts.random_ids(200, lengths, 1, range(100, 200))
    assert made != prompts.random_ids(200, lengths, 2, range(100, 200))
    assert {one.tokens for one in made} == set(range(8, 19))
    assert {one.output_tokens for one in made} == set(range(10, 31))
    assert len({tuple(one.content[:3]) for one in made}) == 1
    assert len({tuple(one.content) for one in made}) == 200
    assert all(len(one.content) == one.tokens and set(one.content) <= set(range(100, 200)) for one in made)


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_random_texts_have_the_length_they_say(make: object, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make(tmp_path))  # type: ignore[operator]
    for special in (False, True):
        made = prompts.random_texts(30, prompts.Lengths(40, 8, 0.3), 0, tokenizer, add_special_tokens=special)
        for one in made:
            assert isinstance(one.content, str)
            assert len(tokenizer.encode(one.content, add_special_tokens=special)) == one.tokens
        wanted = [size for size in (len(range(one.tokens)) for one in made) if 28 <= size <= 52]
        assert len(wanted) == 30


def test_special_tokens_are_never_drawn(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    assert not set(prompts.ordinary_ids(tokenizer)) & tokenizer.special_token_ids
    assert prompts.ordinary_ids(None)[0] > 0


def test_prompts_of_a_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))

    def read(name: str, text: str, count: int | None = None, output: int | None = None) -> list[prompts.Prompt]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return prompts.read_prompts(tmp_path / name, count, output, 0, tokenizer)

    lines = '{"prompt": "one", "output_len": 3}\n\n{"prompt_token_ids": [4, 5]}\n"plain"\n{"nothing": 1}\n[7, 8, 9]\n'
    made = {str(one.content): one for one in read("a.jsonl", lines)}
    assert set(made) == {"one", "[4, 5]", "plain", "[7, 8, 9]"}
    assert (made["one"].output_tokens, made["plain"].output_tokens, made["[4, 5]"].tokens) == (3, 128, 2)
    assert len(read("a.jsonl", lines, count=9)) == 9
    assert {one.output_tokens for one in read("a.jsonl", lines, output=6)} == {6}
    assert sorted(str(one.content) for one in read("a.txt", "x\n\n[y\n")) == ["[y", "x"]
    share = [
        {"id": "1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "The lazy dog"}]},
        {"id": "2", "conversations": []},
    ]
    (one,) = read("share.json", json.dumps(share))
    assert one.content == "Hi"
    assert one.output_tokens == len(tokenizer.encode("The lazy dog"))
    for name, text in (("b.jsonl", "{bad"), ("c.txt", "\n"), ("d.json", "[]")):
        with pytest.raises(ConfigError, match=name):
            read(name, text)
    with pytest.raises(ConfigError, match=r"none\.txt"):
        prompts.read_prompts(tmp_path / "none.txt", None, None, 0, None)


def test_lengths_are_checked() -> None:
    for wrong in ({"input": 0}, {"output": 0}, {"ratio": 1.0}, {"prefix": -1}):
        with pytest.raises(ConfigError):
            prompts.Lengths(**{"input": 1, "output": 1, **wrong})
    assert prompts.Lengths(5, 6).draw(random.Random()) == (5, 6)
