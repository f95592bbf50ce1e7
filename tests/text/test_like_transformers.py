"""Tokens, texts and rendered chats are those of transformers, which is asked once, in a process of its own."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import RequestError
from drumline.text.tokenizer import Tokenizer

from .reference import ask
from .vocab import CHATML, CHATS, MACRO_TEMPLATE, STRICT_TEMPLATE, TEXTS, TOOL, TOOLS_TEMPLATE

SAMPLES = [
    *TEXTS,
    "",
    " ",
    "  a  b ",
    "<|im_start|>user\nhi<|im_end|>",
    "</s> <s>",
    "fox<tool> dog<x y>!<done>",
    "\u200d🎉\x00",
    "a" * 500,
]
RENDER_CASES: list[tuple[Any, dict[str, Any]]] = [
    (chat, {"tools": tools, "add_generation_prompt": prompt, "chat_template": template, "enable_thinking": False})
    for chat, template, prompt, tools in itertools.product(
        CHATS, (CHATML, TOOLS_TEMPLATE, STRICT_TEMPLATE, MACRO_TEMPLATE), (True, False), (None, [TOOL])
    )
]
CONTINUE_CASES: list[tuple[Any, dict[str, Any]]] = [
    (
        [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": ending}],
        {"add_generation_prompt": False, "continue_final_message": True, "chat_template": template},
    )
    for ending in ("Sure, ", "Sure,", "  Sure,\n")
    for template in (CHATML, TOOLS_TEMPLATE, STRICT_TEMPLATE)
]


@pytest.fixture(scope="module")
def added_path(byte_level_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose configuration adds tokens that tokenizer.json does not have."""
    folder = shutil.copytree(byte_level_path, tmp_path_factory.mktemp("added") / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    size = Tokenizer.from_folder(folder).vocab_size
    added = {str(size): {"content": "<tool>", "special": True}, str(size + 1): {"content": "<x y>", "special": False}}
    config |= {"added_tokens_decoder": added, "eos_token": "<done>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def answers(byte_level_path: Path, byte_fallback_path: Path, added_path: Path) -> dict[str, list[Any]]:
    """What transformers says, by group of questions."""
    jobs: list[tuple[str, dict[str, Any]]] = []
    for folder in (byte_level_path, byte_fallback_path, added_path):
        jobs.append(("texts", {"folder": str(folder), "call": "texts", "arguments": {"samples": SAMPLES}}))
        jobs.append(("facts", {"folder": str(folder), "call": "facts"}))
    for group, cases in (("render", RENDER_CASES), ("continue", CONTINUE_CASES)):
        for conversation, keywords in cases:
            arguments = {"conversation": conversation, "keywords": keywords}
            jobs.append((group, {"folder": str(byte_level_path), "call": "chat", "arguments": arguments}))
    found: dict[str, list[Any]] = {}
    for (group, _), answer in zip(jobs, ask([job for _, job in jobs]), strict=True):
        found.setdefault(group, []).append(answer)
    return found


def test_tokens_and_texts(
    byte_level_path: Path, byte_fallback_path: Path, added_path: Path, answers: dict[str, list[Any]]
) -> None:
    for folder, rows in zip((byte_level_path, byte_fallback_path, added_path), answers["texts"], strict=True):
        ours = Tokenizer.from_folder(folder)
        for row in rows:
            assert ours.encode(row["text"], add_special_tokens=row["special"]) == row["ids"], row
            for skip in (True, False):
                assert ours.decode(row["ids"], skip_special_tokens=skip) == row["decoded"][str(skip)], row


def test_special_tokens(
    byte_level_path: Path, byte_fallback_path: Path, added_path: Path, answers: dict[str, list[Any]]
) -> None:
    for folder, facts in zip((byte_level_path, byte_fallback_path, added_path), answers["facts"], strict=True):
        ours = Tokenizer.from_folder(folder)
        assert ours.vocab_size == facts["vocab_size"]
        assert ours.special_tokens == facts["special_tokens"]
        assert [ours.bos_token_id, ours.eos_token_id, ours.pad_token_id] == facts["ids"]
        assert set(facts["special_ids"]) <= ours.special_token_ids  # transformers lists only those with a name


def test_rendered_chats(byte_level: Tokenizer, answers: dict[str, list[Any]]) -> None:
    refused = 0
    for (conversation, keywords), expected in zip(RENDER_CASES, answers["render"], strict=True):
        if "error" in expected:
            refused += 1
            with pytest.raises(RequestError, match=expected["error"].split(".")[0][:20]):
                byte_level.render_chat(conversation, **keywords)
            continue
        assert byte_level.render_chat(conversation, **keywords) == expected["text"], keywords
        assert byte_level.encode_chat(conversation, **keywords) == expected["ids"], keywords
        assert byte_level.apply_chat_template(conversation, tokenize=False, **keywords) == expected["text"]
        assert byte_level.apply_chat_template(conversation, **keywords) == expected["ids"]
    assert 0 < refused < len(RENDER_CASES) / 3


def test_continued_messages(byte_level: Tokenizer, answers: dict[str, list[Any]]) -> None:
    for (conversation, keywords), expected in zip(CONTINUE_CASES, answers["continue"], strict=True):
        before = conversation[-1]["content"]
        assert byte_level.render_chat(conversation, **keywords) == expected["text"], keywords
        assert conversation[-1]["content"] == before
