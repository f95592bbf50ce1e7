"""Every way in which the official client calls these endpoints: helpers, raw answers, both kinds of client, errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai as api
import pytest
from openai import AsyncOpenAI, OpenAI

from .peer import Served, make_ready, served
from .test_openai import MESSAGES, say

TEXT = "The quick brown fox"


async def test_stream_helper(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, TEXT)
    kinds: dict[str, Any] = {}
    async with openai.chat.completions.stream(
        model="tiny", messages=MESSAGES, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        async for event in stream:
            kinds[event.type] = event
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= set(kinds)
    assert kinds["content.done"].content == TEXT
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert final.usage is not None
    ids = server.engine.script(server.engine.seen[0])
    assert final.usage.completion_tokens == len(ids)
    assert len(final.choices[0].logprobs.content or []) == len(ids)


async def test_parse(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, TEXT)
    answer = await openai.chat.completions.parse(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT


async def test_raw_and_streamed_answers(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, TEXT)
    raw = await openai.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == TEXT
    raw_text = await openai.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=99)
    assert raw_text.parse().choices[0].text == TEXT
    async with openai.chat.completions.with_streaming_response.create(
        model="tiny", messages=MESSAGES, stream=True
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    listed = await openai.models.with_raw_response.list()
    assert [model.id for model in listed.parse().data] == ["tiny", "alias/of-tiny"]


def sync_calls(address: str) -> None:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content == TEXT
        chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
            stream.until_done()
            assert stream.get_final_completion().choices[0].message.content == TEXT
        pieces = list(client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=99, stream=True, echo=True))
        for index, prompt in enumerate("ab"):
            mine = [choice.text for piece in pieces for choice in piece.choices if choice.index == index]
            assert "".join(mine) == prompt + TEXT
        assert [model.id for model in client.models.list()] == ["tiny", "alias/of-tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with client.completions.create(model="tiny", prompt="a", max_tokens=99, stream=True) as broken_off:
            next(iter(broken_off))


async def test_sync_client(server: Served, folder: Path) -> None:
    say(server, folder, TEXT)
    await asyncio.to_thread(sync_calls, server.url)
    await server.engine.until(0)


async def test_completions_with_everything(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, TEXT, end=False)
    answer = await openai.completions.create(
        model="tiny",
        prompt=[[5, 6], [7, 8]],
        best_of=3,
        n=2,
        echo=True,
        logprobs=2,
        max_tokens=4,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"9": 1},
        seed=1,
        stop=["\n\n"],
        user="me",
        extra_body={"min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "top_k": 40},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens or []) == 6 for choice in answer.choices if choice.logprobs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    sampling = server.engine.seen[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (0.1, 0.2, {9: 1.0})


async def test_chat_with_everything(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, TEXT)
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history: list[Any] = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "what is it?"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    answer = await openai.chat.completions.create(
        model="tiny",
        messages=history,
        n=2,
        temperature=1,
        max_completion_tokens=30,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"9": -1},
        presence_penalty=0.5,
        frequency_penalty=0.5,
        seed=3,
        stop="zzz",
        response_format={"type": "text"},
        user="me",
        store=False,
        metadata={"a": "b"},
        parallel_tool_calls=True,
        service_tier="auto",
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert server.engine.seen[0].sampling.max_tokens == 30


async def test_error_classes(server: Served, openai: AsyncOpenAI) -> None:
    for kind, status, call in (
        (api.BadRequestError, 400, openai.completions.create(model="tiny", prompt="x", temperature=3)),
        (api.NotFoundError, 404, openai.completions.create(model="gpt-5", prompt="x")),
        (api.NotFoundError, 404, openai.chat.completions.retrieve("chatcmpl-1")),
        (api.NotFoundError, 404, openai.embeddings.create(model="tiny", input="x")),
        (api.NotFoundError, 404, openai.responses.create(model="tiny", input="x")),
        (api.APIStatusError, 405, openai.models.delete("tiny")),
    ):
        with pytest.raises(kind) as found:
            await call
        assert found.value.status_code == status
        assert found.value.body["message"]  # type: ignore[index]
        assert found.value.type == "invalid_request_error"
    response_format: Any = {"type": "json_object"}
    with pytest.raises(api.BadRequestError) as refused:
        await openai.chat.completions.create(model="tiny", messages=MESSAGES, response_format=response_format)
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_parameter")
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(api.BadRequestError) as refused:
        await openai.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools)
    assert refused.value.param == "tools"


async def test_timeouts_free_the_request(server: Served, openai: AsyncOpenAI) -> None:
    server.engine.gate.clear()
    for stream in (False, True):
        with pytest.raises(api.APITimeoutError):
            await openai.completions.create(model="tiny", prompt="x", stream=stream, timeout=0.2)  # type: ignore[call-overload]
        await server.engine.until(0)


async def test_a_client_that_tries_again_gets_through_the_start(folder: Path) -> None:
    async with (
        served(folder, ready=False) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client,
    ):
        waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="x", max_tokens=2))
        async with httpx.AsyncClient() as web:
            while '"/v1/completions",method="POST",status="503"' not in (await web.get(f"{server.url}/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        make_ready(server.service, server.engine, folder)
        assert (await waiting).usage.completion_tokens == 2  # type: ignore[union-attr]


async def test_an_engine_that_fails_on_a_request(server: Served, openai: AsyncOpenAI) -> None:
    server.engine.fails = "it does not like the prompt"
    with pytest.raises(api.InternalServerError, match="does not like") as whole:
        await openai.completions.create(model="tiny", prompt="x")
    assert whole.value.status_code == 500
    stream = await openai.completions.create(model="tiny", prompt="x", stream=True, extra_body={"ignore_eos": True})
    with pytest.raises(api.APIError, match="does not like"):
        async for _ in stream:
            pass
