"""Mistakes whose cause a client would not guess are named."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from drumline.server.errors import decode_error

from .peer import served

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def test_half_a_surrogate_pair_is_named(web: httpx.AsyncClient) -> None:
    for text in (r"\ud83d", r"\ud83d and more", r"\udc00", r"\ud83dx", r"\\\ud83d\u0041", r"ok \ud83d\ude00 \ud83d"):
        answer = await web.post("/v1/completions", content=f'{{"prompt": "{text}"}}'.encode(), headers=JSON)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_json")
        assert "is half of a surrogate pair" in error["message"], text
    whole = rb'{"prompt": "\ud83d\ude00 \\ud83d", "max_tokens": 1}'
    assert (await web.post("/v1/completions", content=whole, headers=JSON)).status_code == 200
    assert "surrogate" not in str(decode_error(ValueError("x"), whole[:-1]))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": None}, "messages[1].content is missing or null"),
        ({"role": "system"}, "messages[1].content is missing or null"),
        ({"role": "wizard", "content": "x"}, "messages[1].role is 'wizard'; it must be one of system, developer, user"),
    ],
)
async def test_messages_without_content_and_with_unknown_roles(
    web: httpx.AsyncClient, message: dict[str, Any], words: str
) -> None:
    answer = await web.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}, message], "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert words in answer.json()["error"]["message"]


async def test_log_probabilities_without_a_tokenizer_name_tokens_by_their_ids() -> None:
    async with served(None) as server, httpx.AsyncClient(base_url=server.url) as client:
        body = {"prompt": [5, 6], "max_tokens": 3, "logprobs": 1}
        found = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:5", "token_id:6", "token_id:5"]
    assert all("token_id:" in name for row in found["top_logprobs"] for name in row)
