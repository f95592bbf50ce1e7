"""No text has fewer tokens than the bound says, whatever the tokenizer; and it is near enough to be of use."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from drumline.text import bounds
from drumline.text.bounds import FewestTokens
from tests.text.vocab import TEXTS

LONG = [
    "=" * 70,
    " " * 90,
    "\n" * 40,
    "x" * 33 + "y",
    "東京" * 9,
    "é" * 30,
    "🎉" * 11,
    "ab" * 20,
    "각" * 30,
    "\u0338" * 20,
]
Kind = Callable[[], tokenizers.Tokenizer]


def byte_level(*, nfc: bool = False, added: tuple[AddedToken, ...] = (), digits: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if nfc:
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*TEXTS, *LONG * 9], trainer)
    backend.add_tokens([*added])
    return backend


def byte_fallback(
    *, metaspace: bool = False, nfc: bool = False, added: tuple[AddedToken, ...] = ()
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    else:
        steps = [normalizers.NFC()] if nfc else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[*map(chr, range(0x20, 0x7F)), "▁", "é"],
        limit_alphabet=110,
        show_progress=False,
    )
    backend.train_from_iterator([text.replace(" ", "▁") for text in [*TEXTS, *LONG * 9]], trainer)
    # The trainer makes byte tokens added ones; in real vocabularies they are not.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_tokens([*added])
    return backend


def without_an_alphabet() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.train_from_iterator(TEXTS[:1], trainers.BpeTrainer(vocab_size=100, show_progress=False))
    return backend


def without_byte_fallback() -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.model.byte_fallback = False
    return backend


ADDED = (
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|a much longer token with blanks|>", special=False, normalized=True),
    AddedToken("ée\u0301>", special=True, normalized=False),
)
SWALLOWING = (AddedToken("<mask>", special=True, normalized=False, lstrip=True, rstrip=True),)
KINDS: dict[str, Kind] = {
    "byte level": byte_level,
    "byte level, NFC": lambda: byte_level(nfc=True),
    "byte level, digits, added": lambda: byte_level(digits=True, added=ADDED),
    "byte level, NFC, added": lambda: byte_level(nfc=True, added=ADDED),
    "byte level, swallowing": lambda: byte_level(added=SWALLOWING),
    "byte level, some bytes": without_an_alphabet,
    "byte fallback": byte_fallback,
    "characters": without_byte_fallback,
    "byte fallback, Metaspace": lambda: byte_fallback(metaspace=True, added=ADDED),
    "byte fallback, NFC, added": lambda: byte_fallback(nfc=True, added=ADDED),
    "byte fallback, swallowing": lambda: byte_fallback(added=SWALLOWING),
}


@cache
def made(name: str) -> tuple[tokenizers.Tokenizer, FewestTokens]:
    backend = KINDS[name]()
    bound = FewestTokens.of(backend)
    assert bound is not None
    return backend, bound


PIECES = st.one_of(
    st.sampled_from(LONG),
    st.sampled_from([token.content for token in (*ADDED, *SWALLOWING)]),
    st.text(max_size=30),
    st.text(alphabet="e\u0301\u0323\u0338>=\u1100\u1161\u11a8\uac00\u212b\u0958é ", max_size=30),
    st.text(alphabet=" \t\n\u3000\u00a0\u2028", max_size=200),
    st.sampled_from(["\u0378", "\ufdd0", "\U0001f9ff" * 20, "a" * 300, "7" * 100, "\x00"]),
)


def check(name: str, text: str) -> None:
    backend, bound = made(name)
    count = len(backend.encode(text, add_special_tokens=False))
    assert not bound.exceed(text, count), (name, count)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(PIECES, max_size=12), times=st.sampled_from([1, 1, 3]))
@example(parts=["<|im_start|>", "\u0338"], times=3)
def test_no_text_has_fewer(name: str, parts: list[str], times: int) -> None:
    check(name, "".join(parts) * times)


COMPOSED = ["e\u0301", "\u1100\u1161\u11a8", "e\u0301\u0323", "o\u0338", "\u212b", "\u0958"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [3, 1 << 16])
def test_no_text_has_fewer_where_characters_are_composed(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where added tokens keep them apart, nor across blocks: with small ones everything lies at a seam."""
    monkeypatch.setattr(bounds, "BLOCK", size)
    rng = random.Random(0)
    apart = [token.content + mark for token in ADDED for mark in ("\u0338", "\u0301")]
    for piece in (*LONG, *COMPOSED, *apart):
        check(name, piece * (400 if size > 3 else 50))
    for _ in range(10):
        check(name, "".join(rng.choices([*LONG, *COMPOSED, *apart, "<mask>   ", "x"], k=30)))


@pytest.mark.parametrize("name", KINDS)
def test_every_entry_makes_a_token_at_least(name: str) -> None:
    """Texts of the longest entries alone, which is where the bound is nearest."""
    backend, _ = made(name)
    for entry in backend.get_vocab():
        text = backend.decode([backend.token_to_id(entry)], skip_special_tokens=False) or entry
        for spelled in (entry, text, text.replace("▁", " ")):
            check(name, spelled * 20)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["prose", "digits", "emoji", "blanks", "letters", "other"])
def test_what_is_far_too_long_is_known(name: str, kind: str) -> None:
    """Two hundred characters for each token that the model takes are enough; of rare ones two."""
    rng = random.Random(1)
    text = {
        "prose": TEXTS[0],
        "digits": "0123456789",
        "emoji": "🦊🚀",
        "blanks": "    ",
        "letters": "".join(rng.choices("abcdefgh", k=50)),
        "other": "ꙮ֍",
    }[kind]
    _, bound = made(name)
    swallowed = kind == "blanks" and "swallowing" in name
    unknown = {"byte level, some bytes": ("digits", "emoji", "other"), "characters": ("emoji", "other")}
    if swallowed or kind in unknown.get(name, ()):
        assert not bound.exceed(text * 10**6, 1)
        return
    factor = 2 if kind == "other" else 200
    limit = 3000
    assert bound.exceed(text * (limit * factor // len(text)), limit)
    assert not bound.exceed(text * (limit // len(text) // 8), limit)


def test_characters_of_a_newer_unicode_prove_nothing() -> None:
    _, bound = made("byte level, NFC")
    assert unicodedata.category("\u0378") == "Cn"
    assert bound.exceed("x" * 10**5, 100)
    assert bound.exceed("x" * 10**5 + "\u0378", 100)  # what stands before them does
    assert not bound.exceed("\u0378" + "x" * 10**5, 100)


def word_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


def changed(change: Callable[[tokenizers.Tokenizer], object]) -> Kind:
    def make() -> tokenizers.Tokenizer:
        backend = byte_level()
        change(backend)
        return backend

    return make


def normalizer(value: normalizers.Normalizer) -> Kind:
    return changed(lambda backend: setattr(backend, "normalizer", value))


def pre_tokenizer(value: pre_tokenizers.PreTokenizer) -> Kind:
    steps = pre_tokenizers.Sequence([value, pre_tokenizers.ByteLevel(use_regex=False)])
    return changed(lambda backend: setattr(backend, "pre_tokenizer", steps))


@pytest.mark.parametrize(
    "kind",
    [
        word_level,
        normalizer(normalizers.Lowercase()),
        normalizer(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        normalizer(normalizers.NFKC()),
        normalizer(normalizers.Replace(Regex("x+"), "y")),
        normalizer(normalizers.Replace(" ", "")),
        normalizer(normalizers.Replace("ab", "c")),
        pre_tokenizer(pre_tokenizers.WhitespaceSplit()),
        pre_tokenizer(pre_tokenizers.BertPreTokenizer()),
        pre_tokenizer(pre_tokenizers.Split("x", "removed")),
        pre_tokenizer(pre_tokenizers.CharDelimiterSplit("x")),
    ],
)
def test_of_other_tokenizers_nothing_is_said(kind: Kind) -> None:
    """They drop characters, change them, or make one token of any number."""
    assert FewestTokens.of(kind()) is None
