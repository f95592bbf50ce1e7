"""Prompts for a load: random ones of exact lengths, or given ones.

Random prompts are token ids where the server takes them (completions): their number is exact whatever the tokenizer. As
text (chat, or servers that take no ids) they are made with the model's own tokenizer: random tokens, decoded, encoded
again, and cut or lengthened until the number fits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.errors import ConfigError
from drumline.text.tokenizer import Tokenizer

FALLBACK_IDS = range(32, 400)
"""Ordinary tokens in any vocabulary: special ones are at its very beginning or at its end."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks."""

    content: str | list[int]
    tokens: int
    """Length; 0: unknown."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of random prompts and their outputs, in tokens; each uniform in length * (1 - ratio) to length * (1 + ratio)."""

    input: int
    output: int
    ratio: float = 0.0
    prefix: int = 0
    """Tokens that all prompts begin with, besides."""

    def __post_init__(self) -> None:
        if self.input < 1 or self.output < 1 or self.prefix < 0 or not 0 <= self.ratio < 1:
            raise ConfigError("lengths must be at least 1, a prefix 0, and a range ratio from 0 to below 1.")

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """(input, output) of one request."""
        return tuple(  # type: ignore[return-value]
            max(1, chance.randint(round(n * (1 - self.ratio)), round(n * (1 + self.ratio))))
            for n in (self.input, self.output)
        )


def ordinary_ids(tokenizer: Tokenizer | None) -> Sequence[int]:
    """Token ids to draw from."""
    if tokenizer is None:
        return FALLBACK_IDS
    special = tokenizer.special_token_ids
    return [i for i in range(tokenizer.vocab_size) if i not in special and tokenizer.id_to_token(i) is not None]


def random_ids(count: int, lengths: Lengths, seed: int, ids: Sequence[int]) -> list[Prompt]:
    """Prompts of random token ids."""
    chance = random.Random(f"prompts {seed}")
    prefix = chance.choices(ids, k=lengths.prefix)
    found = []
    for _ in range(count):
        size, output = lengths.draw(chance)
        content = prefix + chance.choices(ids, k=size)
        found.append(Prompt(content, len(content), output))
    return found


def random_texts(
    count: int, lengths: Lengths, seed: int, tokenizer: Tokenizer, *, add_special_tokens: bool
) -> list[Prompt]:
    """Prompts of random text. ``add_special_tokens``: those that the server adds count too."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    extra = len(encode("")) if add_special_tokens else 0
    chance = random.Random(f"prompts {seed}")
    ids = _spelled_ids(tokenizer)
    prefix = chance.choices(ids, k=lengths.prefix)
    found = []
    for _ in range(count):
        size, output = lengths.draw(chance)
        text, tokens = _text_of(prefix, lengths.prefix + size, extra, chance, ids, tokenizer, encode)
        found.append(Prompt(text, tokens, output))
    return found


def _text_of(
    prefix: list[int],
    size: int,
    extra: int,
    chance: random.Random,
    ids: Sequence[int],
    tokenizer: Tokenizer,
    encode: Callable[[str], list[int]],
) -> tuple[str, int]:
    """Text of ``size`` tokens, as nearly as that can be had, and its real number."""
    drawn = prefix + chance.choices(ids, k=max(1, size - extra - len(prefix)))
    best = ("", 0)
    for _ in range(30):
        text = tokenizer.decode(drawn, skip_special_tokens=False)
        length = len(encode(text))
        if abs(length - size) < abs(best[1] - size):
            best = (text, length)
        if length == size:
            break
        if length > size:
            del drawn[-min(length - size, len(drawn) - 1) :]
        else:
            drawn += chance.choices(ids, k=size - length)
    return best


def _spelled_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """Tokens that are whole words or characters: others would not survive decoding."""
    ids = [i for i in ordinary_ids(tokenizer) if _survives(tokenizer.decode([i], skip_special_tokens=False))]
    if not ids:
        raise ConfigError("The tokenizer has no tokens that random text could be made of.")
    return ids


def _survives(text: str) -> bool:
    return bool(text.strip()) and "\ufffd" not in text and text.isprintable()


# ---------------------------------------------------------------------------------------------------------------- given


def read_prompts(
    path: Path, count: int | None, output_tokens: int | None, seed: int, tokenizer: Tokenizer | None
) -> list[Prompt]:
    """Prompts of a file: JSON lines, a JSON list (ShareGPT's conversations among them), or text with a prompt a line.

    An entry is a text, a list of token ids, or an object with ``prompt`` (or ``prompt_token_ids``, ``text``,
    ``question``, ``messages``, ``conversations``) and maybe ``output_len`` (or ``output_tokens``, ``max_tokens``,
    ``output``). Without it and without ``output_tokens`` (which wins), ShareGPT's answers tell the length, else 128.
    More are asked for than the file has: they are taken again. ConfigError if the file has none.
    """
    try:
        entries = list(_entries(path))
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: {e}") from None
    made = [one for entry in entries if (one := _prompt(entry, output_tokens, tokenizer)) is not None]
    if not made:
        raise ConfigError(f"{path} has no prompts.")
    random.Random(f"given {seed}").shuffle(made)
    wanted = len(made) if count is None else count
    return (made * (wanted // len(made) + 1))[:wanted]


def _entries(path: Path) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip()[:1] == "[":
        try:
            found = json.loads(text)
        except ValueError:
            pass
        else:
            yield from found
            return
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix not in (".jsonl", ".json", ".ndjson"):
            yield line
        elif line.strip():
            try:
                yield json.loads(line)
            except ValueError as e:
                raise ConfigError(f"{path}, line {number} is not JSON: {e}") from None


def _prompt(entry: Any, output_tokens: int | None, tokenizer: Tokenizer | None) -> Prompt | None:
    """None if the entry has no prompt."""
    content, answer, length = _parts(entry)
    if not content:
        return None
    if isinstance(content, list) and not all(type(i) is int for i in content):
        return None
    if output_tokens is None and length is None and answer and tokenizer is not None:
        length = len(tokenizer.encode(answer, add_special_tokens=False))
    tokens = len(content) if isinstance(content, list) else len(tokenizer.encode(content)) if tokenizer else 0
    return Prompt(content, tokens, max(1, output_tokens or length or 128))


def _parts(entry: Any) -> tuple[Any, str, int | None]:
    """(prompt, answer that the data has, length of the output that it asks for)."""
    if not isinstance(entry, dict):
        return (entry if isinstance(entry, str | list) else None), "", None
    sizes = (entry.get(name) for name in ("output_len", "output_tokens", "max_tokens", "output"))
    length = next((n for n in sizes if type(n) is int), None)
    turns = entry.get("conversations") or entry.get("conversation") or entry.get("messages")
    if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
        texts = [turn.get("value") or turn.get("content") for turn in turns]
        answer = texts[1] if len(texts) > 1 and isinstance(texts[1], str) else ""
        return (texts[0] if isinstance(texts[0], str) else None), answer, length
    for name in ("prompt", "prompt_token_ids", "text", "question", "content"):
        if isinstance(entry.get(name), str | list):
            return entry[name], "", length
    return None, "", length
