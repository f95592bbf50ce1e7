"""The tokenizer of a folder is what transformers makes of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import ConfigError, RequestError
from drumline.text.tokenizer import Tokenizer, read_eos_token_ids, read_sampling_defaults

from .vocab import byte_level_folder


def test_special_tokens_map_of_older_folders(byte_level_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    shutil.copy(byte_level_path / "tokenizer.json", folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer.from_folder(folder).special_tokens == {"eos_token": "<|endoftext|>"}


def test_end_of_sequence_ids(byte_level_path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_level_path, tmp_path / "m")
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (2, 5)
    assert read_eos_token_ids(folder) == (2, 5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert read_eos_token_ids(folder) == (7,)
    assert read_eos_token_ids(tmp_path) == ()


def test_sampling_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    found: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 64, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(found | {"repetition_penalty": 1.1, "min_p": 0.05}))
    assert read_sampling_defaults(tmp_path) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "max_tokens": 64,
        "repetition_penalty": 1.1,
        "min_p": 0.05,
    }


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"temperature": math.nan}, {"top_p": 5}, {"max_new_tokens": -5}, {"top_k": 1.5}]
)
def test_sampling_defaults_that_cannot_work(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=r"generation_config\.json: "):
        read_sampling_defaults(tmp_path)


def test_bytes_of_tokens(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    text = "the 東 🎉 dog"
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = b"".join(tokenizer.token_bytes(token) for token in ids)
        assert whole.decode().lstrip() == text
    assert byte_level.token_text(byte_level.encode("🎉")[0]) == "\ufffd"
    assert byte_level.token_bytes(2) == b"<|im_end|>"
    assert byte_level.token_bytes(10**6) == b""


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*--tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"There is a tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    byte_level_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_what_is_no_text(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        byte_level.encode("a\ud800b")
    with pytest.raises(RequestError, match="must be a text"):
        byte_level.encode(b"abc")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="integers"):
        byte_level.decode([-1])


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "m")
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert 10 < len(Tokenizer.from_folder(folder).encode("a b c d e f g h i j k l m n")) < 64
