"""What a body asks for reaches the engine, and what the engine says of it reaches the client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from drumline.text.tokenizer import Tokenizer

from .peer import Served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"5": -200, "6": 1.5},
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["dog"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "max_tokens": 3,
}
EXPECTED = {**SAMPLING, "logit_bias": {5: -100, 6: 1.5}}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_sampling_parameters(server: Served, web: httpx.AsyncClient, folder: Path, path: str) -> None:
    body = HELLO if path == CHAT else {"prompt": "x"}
    more = {"seed": -5, "priority": -3, "cache_salt": "salt", "request_id": "mine"}
    answer = await web.post(path, json={**body, **SAMPLING, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == ("chatcmpl-mine" if path == CHAT else "cmpl-mine")
    (request,) = server.engine.seen
    found = {name: getattr(request.sampling, name) for name in EXPECTED}
    assert found == EXPECTED
    assert request.bad_words_ids[0] == Tokenizer.from_folder(folder).encode("dog", add_special_tokens=False)
    assert (request.seed, request.priority, request.cache_salt) == (2**64 - 5, -3, "salt")


async def events(web: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await web.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    parts = answer.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def choices(web: httpx.AsyncClient, body: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """Whole choices of a completion, put together if they came in pieces."""
    if not stream:
        answer = await web.post(COMPLETION, json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"])
    whole: dict[int, dict[str, Any]] = {}
    for event in await events(web, COMPLETION, body):
        for piece in event["choices"]:
            found = whole.setdefault(piece["index"], piece)
            if found is not piece:
                found["text"] += piece["text"]
                found["finish_reason"] = piece["finish_reason"]
                for name, values in (piece["logprobs"] or {}).items():
                    if values is not None:
                        found["logprobs"][name] += values
    return [whole[index] for index in sorted(whole)]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_log_probabilities(server: Served, web: httpx.AsyncClient, folder: Path, stream: bool) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("the lazy dog")
    body = {"prompt": ["the lazy dog", "fox"], "echo": True, "logprobs": 1, "n": 2, "max_tokens": 2, "temperature": 1}
    found = await choices(web, body, stream=stream)
    assert len(found) == 4
    for choice in found[:2]:
        assert choice["text"] == "the lazy dog" + tokenizer.decode(ids[:2])
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["token_logprobs"] == [None, *[-2.0] * (len(ids) - 1), -1.0, -1.0]
        assert logprobs["top_logprobs"][0] is None
        assert all(logprobs["top_logprobs"][1:])
        assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(ids) + 2)]
    assert found[2]["text"].startswith("fox")
    # one output of each prompt is enough
    assert [request.sampling.prompt_logprobs for request in server.engine.seen] == [1, None, 1, None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0])
async def test_echo_alone(web: httpx.AsyncClient, folder: Path, stream: bool, logprobs: int | None) -> None:
    ids = Tokenizer.from_folder(folder).encode("the lazy dog")
    body = {"prompt": "the lazy dog", "echo": True, "max_tokens": 0, "logprobs": logprobs, "stream_options": None}
    (choice,) = await choices(web, body, stream=stream)
    assert choice["text"] == "the lazy dog"
    assert choice["finish_reason"] == "length"
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, *[-2.0] * (len(ids) - 1)]
    if not stream:
        usage = (await web.post(COMPLETION, json=body)).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 0)


async def test_prompt_log_probabilities(web: httpx.AsyncClient) -> None:
    answer = await web.post(COMPLETION, json={"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 1})
    rows = answer.json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1] == {
        "6": {"logprob": -2.0, "rank": 2, "decoded_token": rows[1]["6"]["decoded_token"]},
        "7": {"logprob": -1.0, "rank": 1, "decoded_token": rows[1]["7"]["decoded_token"]},
    }
    assert len(rows) == 3
    answer = await web.post(CHAT, json={**HELLO, "prompt_logprobs": 0, "max_tokens": 1})
    rows = answer.json()["prompt_logprobs"]
    assert rows[0] is None
    assert all(len(row) == 1 for row in rows[1:])
    plain = await web.post(COMPLETION, json={"prompt": [5, 6, 7], "max_tokens": 1})
    assert "prompt_logprobs" not in plain.text


async def test_best_of(server: Served, web: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "n": 2, "best_of": 4, "temperature": 1, "max_tokens": 3}
    answer = (await web.post(COMPLETION, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert len(server.engine.seen) == 4
    # what was made is paid for, as OpenAI does it
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": -1}, slice(-253, None)),
    ],
)
async def test_truncated_prompts(
    server: Served, web: httpx.AsyncClient, folder: Path, asked: dict[str, Any], kept: slice
) -> None:
    text = "the lazy dog " * 200
    ids = Tokenizer.from_folder(folder).encode(text)
    for prompt in (text, ids):
        answer = await web.post(COMPLETION, json={"prompt": prompt, "max_tokens": 3, **asked})
        assert answer.status_code == 200, answer.text
        assert server.engine.seen[-1].prompt_token_ids == ids[kept]


async def test_stream_interval(server: Served, web: httpx.AsyncClient) -> None:
    body = {"prompt": [5, 6], "max_tokens": 10, "return_token_ids": True, "stream_interval": 4}
    sizes = [len(event["choices"][0]["token_ids"]) for event in await events(web, COMPLETION, body)]
    assert sizes == [1, 4, 4, 1]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_usage_in_each_event(web: httpx.AsyncClient, path: str) -> None:
    body = {**(HELLO if path == CHAT else {"prompt": "x"}), "max_tokens": 3}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [event["usage"]["completion_tokens"] for event in await events(web, path, {**body, **options})]
    assert counts[-2:] == [3, 3]
    assert counts == sorted(counts)


async def test_tokenizer_routes(web: httpx.AsyncClient, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("the lazy dog")
    answer = (await web.post("/tokenize", json={"prompt": "the lazy dog", "return_token_strs": True})).json()
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == 256
    assert answer["token_strs"] == [tokenizer.id_to_token(token) for token in ids]
    assert (await web.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "the lazy dog"}
    chat = (await web.post("/tokenize", json=HELLO)).json()
    text = (await web.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    # more than fits into the model is no error here
    assert (await web.post("/tokenize", json={"prompt": "x " * 999})).json()["count"] > 256


async def test_ping_and_load(server: Served, web: httpx.AsyncClient) -> None:
    assert (await web.get("/ping")).status_code == (await web.post("/ping")).status_code == 200
    assert (await web.get("/load")).json() == {"server_load": 0}
    server.engine.gate.clear()
    waiting = asyncio.create_task(web.post(COMPLETION, json={"prompt": "x", "max_tokens": 1}))
    await server.engine.until(1)
    assert (await web.get("/load")).json() == {"server_load": 1}
    server.engine.gate.set()
    await waiting
    assert (await web.get("/load")).json() == {"server_load": 0}
