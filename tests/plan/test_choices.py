"""What leaves no token to choose is known at once, or noticed where it comes; compared with the plain rule."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import RequestError
from drumline.plan.choices import DeadEnds, check_choice
from drumline.plan.sampling import SlotSampling

from .rule import Forbidding, choosable

TOKENS = range(4)


def check(sampling: SlotSampling, vocab_size: int = len(TOKENS)) -> None:
    banned = [word[0] for word in sampling.bad_words if len(word) == 1]
    check_choice(sampling.allowed_ids, banned, sampling.end_ids, sampling.min_tokens, vocab_size)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_every_request(seed: int) -> None:
    """All outputs of up to four tokens: a dead end is seen exactly where no token may follow."""
    sampling = Forbidding(TOKENS).make(random.Random(seed))
    if not choosable(sampling, (), TOKENS):
        with pytest.raises(RequestError, match="left to choose"):
            check(sampling)
        return
    check(sampling)
    ends = DeadEnds.of(sampling, len(TOKENS))
    dead = 0
    for length in range(1, 5):
        for output in itertools.product(TOKENS, repeat=length):
            none = not choosable(sampling, output, TOKENS)
            dead += none
            assert none == (ends is not None and ends.at([3, 0, 1, *output], 3)), (sampling, output)
    if ends is None:
        assert not dead


def test_the_kinds_are_all_met() -> None:
    """The requests above are refused, come to dead ends, or cannot: each often."""
    kinds = [0, 0, 0]
    for seed in range(400):
        sampling = Forbidding(TOKENS).make(random.Random(seed))
        refused = not choosable(sampling, (), TOKENS)
        kinds[0 if refused else 1 if DeadEnds.of(sampling, len(TOKENS)) else 2] += 1
    assert min(kinds) > 40, kinds


def test_an_unknown_vocabulary_is_taken_for_endless() -> None:
    sampling = SlotSampling(bad_words=((0,), (1, 1), (1, 0)), min_tokens=1, end_ids=(0, 1))
    check(sampling, 0)
    assert DeadEnds.of(sampling, 0) is None
    with pytest.raises(RequestError, match="allowed_token_ids"):
        check_choice([1], [1], [], 0, 0)


@pytest.mark.parametrize(
    ("sampling", "param", "words"),
    [
        (
            SlotSampling(allowed_ids=(1, 2), bad_words=((1,), (2,))),
            "allowed_token_ids",
            ["allowed_token_ids (1, 2)", "bad_words forbid 1, 2.", "allow another token, or change bad_words"],
        ),
        (
            SlotSampling(allowed_ids=(1, 2), min_tokens=3, end_ids=(1, 2, 3)),
            "allowed_token_ids",
            ["min_tokens = 3 forbids 1, 2, which end", "allow another token, or set min_tokens to 0"],
        ),
        (
            SlotSampling(allowed_ids=(1, 2), bad_words=((1,),), min_tokens=3, end_ids=(1, 2)),
            "allowed_token_ids",
            ["bad_words forbid 1, and min_tokens = 3 forbids 2,", "change bad_words, or set min_tokens to 0"],
        ),
        (
            SlotSampling(min_tokens=1, end_ids=tuple(range(20))),
            "min_tokens",
            ["the 20 tokens of the vocabulary", "0, 1, 2, 3, 4, 5, 6, 7 and 12 more", "set min_tokens to 0"],
        ),
        (
            SlotSampling(bad_words=tuple((token,) for token in range(20))),
            "bad_words",
            ["the 20 tokens of the vocabulary", "bad_words forbid 0, 1,", "To change that, change bad_words."],
        ),
    ],
)
def test_the_message_says_what_to_change(sampling: SlotSampling, param: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check(sampling, 20)
    assert caught.value.param == param
    for part in words:
        assert part in str(caught.value)
