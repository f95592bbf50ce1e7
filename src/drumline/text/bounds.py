"""How few tokens a text can have, without tokenising it: what cannot fit into a model is refused before it costs much.

Each byte of a text is worth one divided by the length of the longest vocabulary entry that has this byte in it. A token
of n bytes is an entry of n bytes that has all of them in it, so they are worth 1/n each at most, and 1 together. So
a text has at least as many tokens as its bytes are worth. (The length of the longest entry of all, which is a row of
blanks or dashes as a rule, would allow three times as much English and a hundred times as many emoji.)

That holds if tokens make up the whole text, which is read off the tokenizer's parts. Two kinds are known, and nearly
all models have one of them:

- byte-level BPE: entries are spelled in GPT-2's alphabet of bytes;
- BPE over characters: there it is characters that are counted.

What is no entry by itself is dropped, or many of it make one unknown token: it is worth nothing. (A character is worth
a whole token if all bytes are there to spell it.) Normalisers that only put something in front or replace blanks by
another character are followed, and NFC is applied. Added tokens are entries too; where they swallow the blanks around
them, blanks are worth nothing. Of tokenizers that do anything else (drop characters, lowercase) nothing is said.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from drumline.text.spelling import byte_of_char

BLOCK = 1 << 16
"""Characters that are looked at together; between two blocks other threads have their turn."""
SEAM = 32.0
"""More than what is counted too much where two blocks meet. What is composed with characters of the next block (a base
with three marks) is worth 1 for each of four bytes at most, and half an added token less than that."""
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
"""Steps before the model that keep all characters, unless they are told to remove some."""
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_MERGED_BYTES = re.compile("(<0x[0-9A-F]{2}>){2,}")
_BLANKS = "".join(char for char in map(chr, range(0x10000)) if char.isspace())

Floats = npt.NDArray[np.float64]


class FewestTokens:
    """A lower bound of the number of tokens of texts, for one tokenizer. Thread-safe."""

    def __init__(self, worth: Floats, *, codec: str, composed: re.Pattern[str] | None = None) -> None:
        """``worth``: of each byte (codec ``utf-8``), or of each code point, the last one standing for all above
        (``utf-32-le``). ``composed``: texts are brought into NFC first, but not across what this matches."""
        self._worth = worth
        self._codec = codec
        self._unit = np.dtype(np.uint8 if codec == "utf-8" else "<u4")
        self._composed = composed

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> FewestTokens | None:
        """The bound; None if nothing is known of such a tokenizer."""
        steps = _Steps.of(backend)
        model = backend.model
        if (
            steps is None
            or type(model).__name__ != "BPE"
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
        ):
            return None
        added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
        composed = None
        if steps.composes:
            if any(token.single_word or unicodedata.combining(token.content[0]) for token in added):
                return None  # whether they match depends on what is around them
            composed = _any_of([token.content for token in added if not token.normalized])
        entries = set(backend.get_vocab(with_added_tokens=True)).difference(token.content for token in added)
        if steps.byte_level:
            return cls(_of_bytes(entries, added), codec="utf-8", composed=composed) if steps.blank == " " else None
        spelled = model.byte_fallback and entries.issuperset(_BYTES) and not any(map(_MERGED_BYTES.match, entries))
        worth = _of_characters(entries, added, steps.blank, unknown=1.0 if spelled else 0.0)
        return cls(worth, codec="utf-32-le", composed=composed)

    def exceed(self, text: str, limit: int) -> bool:
        """The text has more than ``limit`` tokens for certain."""
        if 4 * len(text) <= limit:
            return False
        total = 0.0
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            if self._composed is not None:
                total -= SEAM
                if not block.isascii():
                    if any(unicodedata.category(char) == "Cn" for char in set(block)):
                        return False  # a newer Unicode than Python's may compose these
                    parts = self._composed.split(block)
                    block = "".join(unicodedata.normalize("NFC", part) for part in parts)
            codes = np.frombuffer(block.encode(self._codec, "surrogatepass"), dtype=self._unit)
            total += float(self._worth[np.minimum(codes, len(self._worth) - 1)].sum())
            if total > limit + 0.01:  # sums are rounded
                return True
        return False


@dataclass
class _Steps:
    """What happens to a text before the model has it, if all of it is known."""

    byte_level: bool = False
    composes: bool = False
    """It is brought into NFC."""
    blank: str = " "
    """What blanks become."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _Steps | None:
        found = cls()
        known = all(map(found._normalizer, _flat(backend.normalizer, "normalizers")))
        known = known and all(map(found._pre_tokenizer, _flat(backend.pre_tokenizer, "pretokenizers")))
        return found if known else None

    def _normalizer(self, step: Mapping[str, Any]) -> bool:
        if step["type"] == "Replace" and step["pattern"] == {"String": " "}:
            return self._replaced(step["content"])
        self.composes |= step["type"] == "NFC"
        return step["type"] in ("NFC", "Prepend")

    def _pre_tokenizer(self, step: Mapping[str, Any]) -> bool:
        self.byte_level |= step["type"] == "ByteLevel"
        if step["type"] == "Metaspace":
            return self._replaced(step["replacement"])
        return step["type"] in _KEEPING and step.get("behavior") != "Removed"

    def _replaced(self, content: str) -> bool:
        if self.blank == " ":
            self.blank = content
        return len(content) == 1


def _flat(part: Any, inside: str) -> Iterator[Mapping[str, Any]]:
    """Steps of a normaliser or pre-tokenizer."""
    steps = [] if part is None else [json.loads(part.__getstate__())]
    while steps:
        step = steps.pop(0)
        if step["type"] == "Sequence":
            steps[:0] = step[inside]
        else:
            yield step


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of these; what it matches is a part of ``split``, too."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _longest(entries: Collection[str]) -> dict[str, int]:
    """For each character that is an entry, the length of the longest entry that has it in it."""
    single = {entry for entry in entries if len(entry) == 1}
    found: dict[str, int] = {}
    for entry in sorted(entries, key=len, reverse=True):
        for char in single.intersection(entry):
            found[char] = len(entry)
            single.discard(char)
    return found


def _of_bytes(entries: Collection[str], added: Iterable[tokenizers.AddedToken]) -> Floats:
    longest, worth = _longest(entries), np.zeros(256)
    for char, byte in byte_of_char().items():
        if char in longest:
            worth[byte] = 1 / longest[char]
    for token in added:
        for form in (token.content, unicodedata.normalize("NFC", token.content)):
            data = list(form.encode())
            worth[data] = np.minimum(worth[data], 1 / len(data))
        if token.lstrip or token.rstrip:
            worth[list(_BLANKS.encode())] = 0
    return worth


def _of_characters(
    entries: Collection[str], added: Iterable[tokenizers.AddedToken], blank: str, *, unknown: float
) -> Floats:
    worth = np.full(0x10001, unknown)

    def at_most(chars: str, length: int) -> None:
        places = [min(ord(char), 0x10000) for char in chars]
        worth[places] = np.minimum(worth[places], 1 / length)

    for char, length in _longest(entries).items():
        if ord(char) < 0x10000:
            worth[ord(char)] = 1 / length
        else:
            at_most(char, length)
    worth[ord(" ")] = worth[min(ord(blank), 0x10000)]
    for token in added:
        for form in (token.content, unicodedata.normalize("NFC", token.content)):
            at_most(form + (" " if blank in form else ""), len(form))
        if token.lstrip or token.rstrip:
            worth[list(map(ord, _BLANKS))] = 0
    return worth
