"""The pages' scripts, run by node where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from drumline.text.tokenizer import Tokenizer

from .peer import Served, served

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


async def run(address: str, script: str, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "node", str(Path(__file__).with_name("page.mjs")), address, script, *words, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_a_conversation(server: Served, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = [*tokenizer.encode("The lazy dog 🎉"), tokenizer.eos_token_ids[0]]
    server.engine.script = lambda request: ids
    server.engine.pause_s = 0.002
    first, second = map(json.loads, (await run(server.url, "chat.js", "hello", "again")).splitlines())
    for text, meta in (first, second):
        assert text == "The lazy dog 🎉"
        assert re.fullmatch(rf"first token \d+ ms · [\d.]+ tokens/s · {len(ids)} tokens", meta)
    prompt = tokenizer.decode(server.engine.seen[1].prompt_token_ids, skip_special_tokens=False)
    assert "user\nhello<|im_end|>\n<|im_start|>assistant\nThe lazy dog 🎉<|im_end|>\n<|im_start|>user\nagain" in prompt


async def test_the_stop_button_frees_the_request(server: Served) -> None:
    server.engine.pause_s = 0.01
    text, meta = json.loads(await run(server.url, "chat.js", "stop:hello"))
    assert text
    assert meta.endswith("stopped")
    assert not server.engine.running


async def test_errors_are_shown(server: Served) -> None:
    # refused before the engine sees it
    text, error, _ = json.loads(await run(server.url, "chat.js", "word " * 400))
    assert text == ""
    assert "at most 256 tokens" in error


async def test_docs(folder: Path) -> None:
    async with served(folder) as server:
        text = await run(server.url, "docs.js")
    assert "/v1/chat/completions" in text
    assert "max_tokens" in text
