"""Incremental text: nothing lost, nothing taken back, stop strings never leak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.plan.sampling import SamplingParams
from drumline.text.detokenize import Detokenizer, StopMatcher
from drumline.text.tokenizer import Tokenizer

TRICKY = "Hello 🎉 family 👨‍👩‍👧 東京 你好 世界 naïve café Привет\n\n  two spaces"


def stream(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **params: object
) -> tuple[list[str], str | None]:
    """All deltas, one token at a time, and the stop string."""
    detokenizer = Detokenizer(tokenizer, prompt or [], SamplingParams(**params))
    deltas = []
    for token in ids:
        text, stop = detokenizer.push([token])
        deltas.append(text)
        if stop is not None:
            return deltas, stop
    return [*deltas, detokenizer.finish()], None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_come_whole(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(TRICKY, add_special_tokens=False)
    assert len(ids) > len(TRICKY)  # several tokens a character: the case that matters
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == TRICKY
    assert not any("\ufffd" in delta for delta in deltas)


def test_half_a_character_at_the_end_is_said_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok🎉", add_special_tokens=False)
    deltas, _ = stream(byte_level, ids[:-1])
    assert "".join(deltas) == "ok\ufffd"
    assert deltas[-1] == "\ufffd"


def test_space_before_the_first_word_depends_on_the_prompt(byte_fallback: Tokenizer) -> None:
    prompt = byte_fallback.encode("the lazy")
    ids = byte_fallback.encode("dog", add_special_tokens=False)
    assert "".join(stream(byte_fallback, ids, prompt)[0]) == " dog"
    assert "".join(stream(byte_fallback, ids)[0]) == "dog"


def test_prompt_that_ends_within_a_character_does_not_leak(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode("secret 東", add_special_tokens=False)
    deltas, _ = stream(byte_level, byte_level.encode(" fox", add_special_tokens=False), prompt[:-1])
    assert "secret" not in "".join(deltas)
    assert "".join(deltas).endswith(" fox")


def test_special_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox<|im_start|>dog", add_special_tokens=False)
    assert "".join(stream(byte_level, ids)[0]) == "foxdog"
    assert "".join(stream(byte_level, ids, skip_special_tokens=False)[0]) == "fox<|im_start|>dog"


def test_token_that_ends_the_output_is_not_in_the_text(byte_level: Tokenizer) -> None:
    eos = byte_level.eos_token_ids[0]
    ids = byte_level.encode("fox", add_special_tokens=False)
    end = byte_level.encode("!", add_special_tokens=False)
    shown = {"skip_special_tokens": False}
    assert "".join(stream(byte_level, [*ids, eos], **shown)[0]) == "fox"
    assert "".join(stream(byte_level, [*ids, eos], include_stop_str_in_output=True, **shown)[0]) == "fox<|im_end|>"
    assert "".join(stream(byte_level, [*ids, eos, *ids], ignore_eos=True, **shown)[0]) == "fox<|im_end|>fox"
    assert "".join(stream(byte_level, [*ids, *end], stop_token_ids=end)[0]) == "fox"


def test_half_a_character_before_the_end_of_sequence(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é", add_special_tokens=False)[:1]
    assert "".join(stream(byte_level, [*ids, byte_level.eos_token_ids[0]])[0]) == "\ufffd"


def test_many_tokens_without_text_do_not_pile_up(byte_level: Tokenizer) -> None:
    im_start = byte_level.token_to_id("<|im_start|>")
    assert im_start is not None
    ids = [im_start] * 1000 + byte_level.encode("fox", add_special_tokens=False)
    assert "".join(stream(byte_level, ids)[0]) == "fox"


def test_bytes_that_are_no_text(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    wrong = [byte_fallback.token_to_id(f"<0x{byte:02X}>") for byte in (0xE4, 0xBD, 0xA0, 0xFF, 0x41, 0xFE)]
    assert None not in wrong
    ids = [token for token in wrong if token is not None] * 20
    text = "".join(stream(byte_fallback, ids)[0])
    assert "\ufffd" in text
    other = [token for byte in (0xE4, 0xFF) for token in [byte_level.token_to_id(chr(byte))] if token is not None]
    assert "\ufffd" in "".join(stream(byte_level, other * 40)[0])


def test_ids_outside_of_the_vocabulary_give_nothing(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox", add_special_tokens=False)
    assert "".join(stream(byte_level, [*ids, byte_level.vocab_size + 7, *ids])[0]) == "foxfox"


def test_no_text_wanted(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox", add_special_tokens=False)
    assert "".join(stream(byte_level, ids, detokenize=False)[0]) == ""
    detokenizer = Detokenizer(None, [], SamplingParams())
    assert detokenizer.push(ids) == ("", None)
    assert detokenizer.consumed == len(ids)
    assert detokenizer.finish() == ""


# ------------------------------------------------------------------------------------------------------ stop strings


def test_stop_string_across_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one two STOP three", add_special_tokens=False)
    deltas, stop = stream(byte_level, ids, stop=["STOP"])
    assert stop == "STOP"
    assert "".join(deltas) == "one two "
    deltas, stop = stream(byte_level, ids, stop=["STOP"], include_stop_str_in_output=True)
    assert stop == "STOP"
    assert "".join(deltas) == "one two STOP"


def test_only_what_may_begin_a_stop_string_waits(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [], SamplingParams(stop="\n\n\n"))
    newline = byte_level.encode("\n", add_special_tokens=False)
    fox = byte_level.encode("fox", add_special_tokens=False)
    assert detokenizer.push(fox) == ("fox", None)
    assert detokenizer.push(newline) == ("", None)
    assert detokenizer.push(newline) == ("", None)
    assert detokenizer.push(fox) == ("\n\nfox", None)
    assert detokenizer.push(newline) == ("", None)
    assert detokenizer.finish() == "\n"


def test_tokens_behind_a_stop_string_do_not_count(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab", add_special_tokens=False)
    assert len(ids) == 2
    detokenizer = Detokenizer(byte_level, [], SamplingParams(stop=["b"]))
    assert detokenizer.push([*ids, *ids]) == ("a", "b")
    assert detokenizer.consumed == 2
    assert detokenizer.push(ids) == ("", None)
    assert detokenizer.finish() == ""


def test_earliest_stop_string_wins_then_the_first_named(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("abcd", add_special_tokens=False)
    deltas, stop = stream(byte_level, ids, stop=["cd", "bc"])
    assert ("".join(deltas), stop) == ("a", "bc")
    deltas, stop = stream(byte_level, ids, stop=["c", "bc"])
    assert ("".join(deltas), stop) == ("ab", "c")
    deltas, stop = stream(byte_level, ids, stop=["bc", "c"])
    assert ("".join(deltas), stop) == ("a", "bc")


def test_stop_string_in_the_last_half_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🎉", add_special_tokens=False)[:-1]
    deltas, _ = stream(byte_level, ids, stop=["\ufffd"])
    assert "".join(deltas) == "a"


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What the text must become: read it character by character."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


words = st.text(alphabet="ab \n🎉é東x", max_size=30)


@settings(max_examples=300, deadline=None)
@given(
    text=words,
    prompt=words,
    stops=st.lists(st.text(alphabet="ab \n🎉é", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
)
def test_deltas_make_the_whole(
    byte_level: Tokenizer, text: str, prompt: str, stops: list[str], include: bool, sizes: list[int]
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    prompt_ids = byte_level.encode(prompt, add_special_tokens=False)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    detokenizer = Detokenizer(byte_level, prompt_ids, params)
    said, found, place, turn = "", None, 0, 0
    expected, expected_stop = cut(text, stops, include)
    while place < len(ids) and found is None:
        size = sizes[turn % len(sizes)]
        delta, found = detokenizer.push(ids[place : place + size])
        place, turn = place + size, turn + 1
        said += delta
        assert expected.startswith(said)  # nothing is said that must be taken back
    if found is None:
        said += detokenizer.finish()
    assert (said, found) == (expected, expected_stop)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(3, 419), max_size=24))
def test_any_tokens_make_what_the_whole_decodes_to(byte_level: Tokenizer, ids: list[int]) -> None:
    deltas, _ = stream(byte_level, ids, ignore_eos=True)
    assert "".join(deltas) == byte_level.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="fox dog🎉é東\n", max_size=30), prompt=st.sampled_from(["", "the", "東", "a "]))
def test_byte_fallback_makes_what_the_whole_decodes_to(byte_fallback: Tokenizer, text: str, prompt: str) -> None:
    prompt_ids = byte_fallback.encode(prompt, add_special_tokens=False)
    ids = byte_fallback.encode(text, add_special_tokens=False)
    deltas, _ = stream(byte_fallback, ids, prompt_ids)
    whole, before = byte_fallback.decode([*prompt_ids, *ids]), byte_fallback.decode(prompt_ids)
    assert "".join(deltas) == whole[len(before) :]


@settings(max_examples=200, deadline=None)
@given(stop=st.text(alphabet="ab", min_size=1, max_size=6), text=st.text(alphabet="abc", max_size=40))
def test_matcher_waits_for_the_longest_beginning(stop: str, text: str) -> None:
    matcher = StopMatcher(stop)
    for end in range(1, len(text) + 1):
        seen = text[:end]
        assert matcher.read(text[end - 1]) == seen.endswith(stop)
        longest = max(size for size in range(len(stop)) if seen.endswith(stop[:size]) or size == 0)
        assert matcher.matched == longest


def test_seams_of_an_emoji_sequence(byte_level: Tokenizer) -> None:
    """A family emoji is several characters with joiners: each may come by itself, none in halves."""
    text = "👨‍👩‍👧"
    deltas, _ = stream(byte_level, byte_level.encode(text, add_special_tokens=False))
    assert [delta for delta in deltas if delta] == list(text)


@pytest.mark.parametrize("together", [False, True])
def test_stop_strings_are_not_looked_for_before_min_tokens(byte_level: Tokenizer, together: bool) -> None:
    ids = byte_level.encode("abcabc", add_special_tokens=False)
    assert len(ids) == 6

    def run(min_tokens: int, stop: str, upto: int = 6) -> tuple[str, str | None]:
        detokenizer = Detokenizer(byte_level, [5], SamplingParams(stop=stop, min_tokens=min_tokens))
        said = ""
        for piece in [ids[:upto]] if together else [[token] for token in ids[:upto]]:
            text, found = detokenizer.push(piece)
            said += text
            if found is not None:
                return said, found
        return said + detokenizer.finish(), None

    assert run(0, "bc") == run(2, "bc") == ("a", "bc")  # it may begin before, but must end behind
    assert run(3, "bc") == ("abca", "bc")
    assert run(5, "bc") == ("abca", "bc")
    assert run(6, "bc") == ("abcabc", None)
    assert run(5, "bc", upto=3) == ("abc", None)
