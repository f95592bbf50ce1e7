"""A long text keeps nobody waiting: the loop goes on while it is tokenised, or refused, or made of ids."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from drumline.server.http import _has_too_many_lists

from .peer import ScriptedEngine, served

LENGTH = 8192
TEXT = "".join(random.Random(0).choices("abcdefgh", k=800_000))
IDS = [5 + place % 400 for place in range(1_000_000)]
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "tokenize": ("/tokenize", {"prompt": TEXT}, 200),
    "truncate": ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 5, "max_tokens": 1}, 200),
    "many prompts": ("/v1/completions", {"prompt": [TEXT[:8000]] * 90, "max_tokens": 1}, 200),
    "too long": ("/v1/completions", {"prompt": TEXT * 3, "max_tokens": 1}, 400),
    "too long a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 3}]}, 400),
    "brackets in a text": ("/v1/completions", {"prompt": "[{" * 200_000, "max_tokens": 1}, 400),
    "lists": ("/v1/completions", {"prompt": [[]] * 3_000_000}, 400),
    "objects": ("/v1/chat/completions", {"messages": [{"a": '[\\"['}] * 500_000}, 400),
    "detokenize": ("/detokenize", {"tokens": IDS}, 200),
}


@pytest_asyncio.fixture
async def web(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine = ScriptedEngine(max_model_len=LENGTH)
    async with served(folder, engine=engine) as server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.alone
@pytest.mark.parametrize("name", CASES)
async def test_others_go_on(web: httpx.AsyncClient, name: str) -> None:
    """The longest pause is what cannot be divided: a list of a million ids is made, or JSON of it."""
    path, body, status = CASES[name]
    data = json.dumps(body).encode()
    pauses = [0.0]

    async def watch() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    watching = asyncio.create_task(watch())
    began = time.monotonic()
    answer = await web.post(path, content=data, headers={"content-type": "application/json"})
    took = time.monotonic() - began
    watching.cancel()
    assert answer.status_code == status, answer.text[:300]
    assert max(pauses) < max(0.15, took / 2), (took, sorted(pauses)[-3:])


async def test_a_text_that_becomes_too_many_tokens_is_refused(web: httpx.AsyncClient) -> None:
    for text, words in (
        ("ꙮ" * 400_000, "has more than 1000000 tokens, which"),
        ("abc" * 690_000, "tokens; at most 1000000"),
    ):
        answer = await web.post("/tokenize", json={"prompt": text})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 1 << 18])
def test_lists_and_objects_are_counted_outside_of_texts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever slices end."""
    monkeypatch.setattr("drumline.server.http.SLICE_BYTES", size)
    rng = random.Random(size)
    for _ in range(200):
        text = "".join(rng.choices('[{"\\]}ab\n', k=rng.randint(0, 40)))
        lists = rng.randint(1, 9)
        body = json.dumps({text: [text, [[] for _ in range(lists)], {text: text}]}).encode()
        count = lists + 4
        for most in (count - 1, count):
            monkeypatch.setattr("drumline.server.http.MAX_CONTAINERS", most)
            assert asyncio.run(_has_too_many_lists(body)) == (count > most), body


async def test_too_many_lists_are_refused(web: httpx.AsyncClient) -> None:
    answer = await web.post("/tokenize", json={"prompt": "[{" * 200_000, "tools": [[]] * 100_000})
    assert "lists" not in answer.json()["error"]["message"]
    answer = await web.post("/tokenize", json={"prompt": "[{" * 200_000, "tools": [[]] * 131_072})
    assert answer.json()["error"]["message"] == "The body has more than 131072 lists and objects in it."
