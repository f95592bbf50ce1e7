"""How vocabularies spell bytes: from a token's spelling to what it stands for."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from typing import Any

import tokenizers


def byte_table(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """A function from a token's spelling to its bytes, as the tokenizer's decoder reads it."""
    kinds = _decoder_kinds(backend)
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    marks = [step.get("replacement") or "▁" for step in kinds.values() if step.get("type") == "Metaspace"]
    mark = "▁" if marks or "Replace" in kinds or "ByteFallback" in kinds else ""
    prefix = kinds.get("WordPiece", {}).get("prefix") or ""
    return functools.partial(_spelled_bytes, mark=(marks or [mark])[0], prefix=prefix, fallback="ByteFallback" in kinds)


def _decoder_kinds(backend: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    """Steps of the decoder by type."""
    if backend.decoder is None:
        return {}
    state = json.loads(backend.decoder.__getstate__())
    steps = state.get("decoders", [state])
    return {step["type"]: step for step in steps}


@functools.cache
def byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + place): byte for place, byte in enumerate(rest)}


def _byte_level_bytes(token: str) -> bytes:
    table = byte_of_char()
    try:
        return bytes(map(operator.getitem, [table] * len(token), token))
    except KeyError:
        return token.encode("utf-8")


def _spelled_bytes(token: str, *, mark: str, prefix: str, fallback: bool) -> bytes:
    if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    if prefix:
        token = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    return (token.replace(mark, " ") if mark else token).encode("utf-8")
