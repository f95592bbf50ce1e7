"""Beam search: the pure search against all sequences of a made-up model, and LLM.beam_search against its own scores."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from drumline.errors import RequestError
from drumline.llm.beams import BeamSearchParams, Search
from drumline.text.results import Logprob

END, TOKENS = 0, (1, 2, 3)


def table(seed: int) -> dict[tuple[int, ...], dict[int, float]]:
    """Log-probabilities of the next token after each sequence of up to three tokens."""
    made = random.Random(seed)
    found = {}
    for length in range(3):
        for start in itertools.product(TOKENS, repeat=length):
            weights = [made.random() + 0.01 for _ in range(4)]
            found[start] = {token: math.log(w / sum(weights)) for token, w in enumerate(weights)}
    return found


def run(seed: int, width: int, penalty: float = 1.0, *, ignore_eos: bool = False) -> list[tuple[list[int], float, str]]:
    model = table(seed)
    params = BeamSearchParams(beam_width=width, max_tokens=3, length_penalty=penalty, ignore_eos=ignore_eos)
    search = Search([9, 9], params, [END], room=100)
    while not search.over:
        rows = []
        for beam in search.live:
            row = model.get(tuple(beam.tokens[2:]), model[()])
            best = sorted(row.items(), key=lambda item: -item[1])[: 2 * width]
            rows.append({token: Logprob(value) for token, value in best})
        search.take(rows)
    return [(beam.tokens[2:], beam.cum_logprob, beam.finish_reason or "") for beam in search.best()]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_wide_search_finds_the_best_of_all(seed: int, penalty: float) -> None:
    model = table(seed)
    scored = []
    for length in range(4):
        for start in itertools.product(TOKENS, repeat=length):
            total = sum(model[start[:place]][token] for place, token in enumerate(start))
            if length == 3:
                scored.append((total / 5**penalty, list(start)))
            else:
                scored.append(((total + model[start][END]) / (2 + length) ** penalty, [*start, END]))
    best = [tokens for _, tokens in sorted(scored, reverse=True)]
    assert [tokens for tokens, _, _ in run(seed, 30, penalty)] == best[:30]


def test_width_one_is_greedy() -> None:
    model = table(3)
    [(tokens, total, reason)] = run(3, 1, penalty=0.0, ignore_eos=True)
    seen: tuple[int, ...] = ()
    for token in tokens:
        assert token == max(model.get(seen, model[()]), key=lambda t: model.get(seen, model[()])[t])
        seen += (token,)
        if END in seen:
            break
    assert len(tokens) == 3
    assert total < 0
    assert reason == "length"


def test_what_it_ends_with_is_told() -> None:
    found = run(0, 30)
    assert {reason for _, _, reason in found} == {"stop", "length"}
    assert all((tokens[-1] == END) == (reason == "stop") for tokens, _, reason in found)


def test_a_prompt_that_fills_the_context_is_not_searched() -> None:
    search = Search([1, 2], BeamSearchParams(beam_width=2, max_tokens=5), [END], room=1)
    search.take([{1: Logprob(-1.0), 2: Logprob(-2.0), 3: Logprob(-3.0)}])
    assert search.over
    assert [beam.tokens for beam in search.best()] == [[1, 2, 1], [1, 2, 2]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 1, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": True, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 1, "temperature": 0.5}, "temperature"),
    ],
)
def test_bad_parameters(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        BeamSearchParams(**arguments)  # type: ignore[arg-type]
