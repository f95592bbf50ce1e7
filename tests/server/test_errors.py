"""Nothing that a client sends gives a 500 or takes the server down; each mistake is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .peer import Served, served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 2, **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({**HELLO, "max_tokens": 2, **fields}).encode()


BAD: list[tuple[str, bytes, int, str | None, str | None]] = [
    (COMPLETION, b"", 400, None, "invalid_json"),
    (COMPLETION, b"{", 400, None, "invalid_json"),
    (COMPLETION, b'{"prompt": "x"} trailing', 400, None, "invalid_json"),
    (COMPLETION, b'{"prompt": "\xff"}', 400, None, "invalid_json"),
    (COMPLETION, b'{"prompt": "\\ud800"}', 400, None, "invalid_json"),
    (COMPLETION, b'{"prompt": "x", "temperature": NaN}', 400, None, "invalid_json"),
    (COMPLETION, DEEP, 400, None, "invalid_json"),
    (COMPLETION, b'{"prompt": "x", "temperature": 1e999}', 400, "temperature", None),
    (COMPLETION, b"[]", 400, None, None),
    (COMPLETION, b"{}", 400, "prompt", None),
    (CHAT, b"{}", 400, "messages", None),
    (COMPLETION, completion(model="gpt-4"), 404, "model", "model_not_found"),
    (COMPLETION, completion(model=3), 400, "model", None),
    (COMPLETION, completion(prompt=""), 400, "prompt", None),
    (COMPLETION, completion(prompt=[]), 400, "prompt", None),
    (COMPLETION, completion(prompt=[[]]), 400, "prompt", None),
    (COMPLETION, completion(prompt=None), 400, "prompt", None),
    (COMPLETION, completion(prompt={"a": 1}), 400, "prompt", None),
    (COMPLETION, completion(prompt=[1, "x"]), 400, "prompt", None),
    (COMPLETION, completion(prompt=[True]), 400, "prompt", None),
    (COMPLETION, completion(prompt=[-1]), 400, "prompt", None),
    (COMPLETION, completion(prompt=[10**30]), 400, "prompt", None),
    (COMPLETION, completion(prompt=[420]), 400, "prompt", None),
    (COMPLETION, completion(prompt=["x"] * 5000), 400, "prompt", None),
    (COMPLETION, completion(prompt=["x"] * 100, n=100), 400, "prompt", None),
    (COMPLETION, completion(prompt=[5] * 256), 400, "prompt", "context_length_exceeded"),
    (COMPLETION, completion(prompt="x" * 100_000), 400, "prompt", "context_length_exceeded"),
    # what would keep the server from its other clients for seconds
    (TOKENIZE, json.dumps({"prompt": "a" * 3_000_000}).encode(), 400, "prompt", "context_length_exceeded"),
    (
        COMPLETION,
        completion(prompt="a" * 3_000_000, truncate_prompt_tokens=5),
        400,
        "prompt",
        "context_length_exceeded",
    ),
    (DETOKENIZE, json.dumps({"tokens": [5] * 1_000_001}).encode(), 400, "tokens", None),
    (COMPLETION, completion(stop="a" * 65_537), 400, "stop", None),
    (CHAT, chat(stop=[f"{i}{'a' * 2000}" for i in range(60)]), 400, "stop", None),
    (COMPLETION, completion(logit_bias={str(i): 1 for i in range(421)}), 400, "logit_bias", None),
    (COMPLETION, completion(prompt=[[5] * 250] * 200, prompt_logprobs=20), 400, "prompt", None),
    (COMPLETION, completion(max_tokens=0), 400, "max_tokens", None),
    (COMPLETION, completion(stream_options={"include_usage": True}), 400, "stream_options", None),
    (COMPLETION, completion(min_tokens=3), 400, "min_tokens", None),
    (COMPLETION, completion(logprob_token_ids=[3]), 400, "logprob_token_ids", "unsupported_parameter"),
    (CHAT, chat(chat_template="{{ 1 }}"), 400, "chat_template", "unsupported_parameter"),
    (CHAT, chat(return_prompt_text=True), 400, "return_prompt_text", "unsupported_parameter"),
    (COMPLETION, completion(return_token_offsets=True), 400, "return_token_offsets", "unsupported_parameter"),
    (CHAT, chat(documents="x"), 400, "documents", None),
    (COMPLETION, completion(max_tokens=-1), 400, "max_tokens", None),
    (COMPLETION, completion(max_tokens=1.5), 400, "max_tokens", None),
    (COMPLETION, completion(max_tokens=10**40), 400, "max_tokens", None),
    (COMPLETION, completion(max_tokens=256), 400, "max_tokens", None),
    (COMPLETION, completion(max_tokens="2"), 400, "max_tokens", None),
    (COMPLETION, completion(n=0), 400, "n", None),
    (COMPLETION, completion(n=10**9), 400, "n", None),
    (COMPLETION, completion(n=2, temperature=0), 400, "n", None),
    (COMPLETION, completion(temperature=-1), 400, "temperature", None),
    (COMPLETION, completion(temperature="hot"), 400, "temperature", None),
    (COMPLETION, completion(top_p=0), 400, "top_p", None),
    (COMPLETION, completion(top_p=1.1), 400, "top_p", None),
    (COMPLETION, completion(top_k=-2), 400, "top_k", None),
    (COMPLETION, completion(seed=2**70), 400, "seed", None),
    (COMPLETION, completion(stop=""), 400, "stop", None),
    (COMPLETION, completion(stop=[1]), 400, "stop[0]", None),
    (COMPLETION, completion(stop=["a"] * 100), 400, "stop", None),
    (COMPLETION, completion(stop_token_ids=[10**6]), 400, "stop_token_ids", None),
    (COMPLETION, completion(stop_token_ids=["a"]), 400, "stop_token_ids[0]", None),
    (COMPLETION, completion(logprobs=21), 400, "logprobs", None),
    (COMPLETION, completion(logprobs=True), 400, "logprobs", None),
    (COMPLETION, completion(stream="yes"), 400, "stream", None),
    (COMPLETION, completion(stream_options=[]), 400, "stream_options", None),
    (COMPLETION, completion(priority=2**40), 400, "priority", None),
    (COMPLETION, completion(echo=False, max_tokens=0), 400, "max_tokens", None),
    (COMPLETION, completion(suffix="x"), 400, "suffix", "unsupported_parameter"),
    (COMPLETION, completion(best_of=4, n=5), 400, "best_of", None),
    (COMPLETION, completion(best_of=4, stream=True), 400, "best_of", None),
    (COMPLETION, completion(best_of=4, temperature=0), 400, "best_of", None),
    (COMPLETION, completion(presence_penalty=2.5), 400, "presence_penalty", None),
    (COMPLETION, completion(frequency_penalty=-2.5), 400, "frequency_penalty", None),
    (COMPLETION, completion(repetition_penalty=0), 400, "repetition_penalty", None),
    (COMPLETION, completion(repetition_penalty=5e307), 400, "repetition_penalty", None),
    (COMPLETION, completion(repetition_penalty=1e-300), 400, "repetition_penalty", None),
    (COMPLETION, completion(logit_bias={"420": 1}), 400, "logit_bias", None),
    (COMPLETION, completion(logit_bias={"x": 1}), 400, "logit_bias", None),
    (COMPLETION, completion(logit_bias={"5": "x"}), 400, "logit_bias", None),
    (COMPLETION, completion(logit_bias={"-1": 1}), 400, "logit_bias", None),
    (COMPLETION, completion(bad_words=[" "]), 400, "bad_words", None),
    (COMPLETION, completion(logit_bias=[5]), 400, "logit_bias", None),
    (COMPLETION, completion(bad_words=[""]), 400, "bad_words", None),
    (COMPLETION, completion(bad_words="x"), 400, "bad_words", None),
    (COMPLETION, completion(bad_words=[f"word {i}" for i in range(200)]), 400, "bad_words", None),
    (COMPLETION, completion(allowed_token_ids=[]), 400, "allowed_token_ids", None),
    (COMPLETION, completion(allowed_token_ids=[-1]), 400, "allowed_token_ids", None),
    # what leaves no token to choose
    (COMPLETION, completion(allowed_token_ids=[2], min_tokens=1), 400, "allowed_token_ids", None),
    (CHAT, chat(allowed_token_ids=[5, 6], min_tokens=1, stop_token_ids=[5, 6]), 400, "allowed_token_ids", None),
    (COMPLETION, completion(min_tokens=1, stop_token_ids=list(range(420))), 400, "min_tokens", None),
    (COMPLETION, completion(allowed_token_ids=[67], bad_words=["a"]), 400, "allowed_token_ids", None),
    (COMPLETION, completion(min_p=1.1), 400, "min_p", None),
    (COMPLETION, completion(prompt_logprobs=21), 400, "prompt_logprobs", None),
    (COMPLETION, completion(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", None),
    (COMPLETION, completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", None),
    (COMPLETION, completion(truncate_prompt_tokens=256), 400, "truncate_prompt_tokens", None),
    (COMPLETION, completion(truncate_prompt_tokens=3, truncation_side="up"), 400, "truncation_side", None),
    (COMPLETION, completion(stream_interval=0), 400, "stream_interval", None),
    (TOKENIZE, b"{}", 400, "prompt", None),
    (TOKENIZE, b'{"prompt": "x", "messages": []}', 400, "prompt", None),
    (TOKENIZE, b'{"messages": []}', 400, "messages", None),
    (TOKENIZE, b'{"prompt": "x", "model": "gpt-4"}', 404, "model", "model_not_found"),
    (DETOKENIZE, b'{"tokens": [420]}', 400, "tokens", None),
    (DETOKENIZE, b'{"tokens": "x"}', 400, "tokens", None),
    (DETOKENIZE, b"{}", 400, "tokens", None),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools", "unsupported_parameter"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "unsupported_parameter"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format", "unsupported_parameter"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", None),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", None),
    (CHAT, chat(logprobs=3), 400, "logprobs", None),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens", None),
    (CHAT, chat(messages=[]), 400, "messages", None),
    (CHAT, chat(messages="hi"), 400, "messages", None),
    (CHAT, chat(messages=["hi"]), 400, "messages[0]", None),
    (CHAT, chat(messages=[{"content": "hi"}]), 400, "messages", None),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages", None),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages",
        None,
    ),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", None),
    (CHAT, chat(chat_template="{{ x }}"), 400, "chat_template", "unsupported_parameter"),
]


async def test_mistakes(web: httpx.AsyncClient, server: Served) -> None:
    wrong = []
    for path, body, status, param, code in BAD:
        answer = await web.post(path, content=body, headers={"content-type": "application/json"})
        error = answer.json().get("error", {})
        shape = set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        names = param is None or param in error["message"] or error["message"].startswith("The")
        fine = shape and names and answer.status_code == status and error["param"] == param
        fine = fine and 0 < len(error["message"]) < 400
        if not fine or (code is not None and error["code"] != code):
            wrong.append((path, body[:80], answer.status_code, answer.text))
    assert not wrong
    assert not server.engine.seen


async def test_defaults_and_unknown_fields_are_taken(web: httpx.AsyncClient) -> None:
    harmless = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "echo": False,
        "user": "me",
        "something_new": {"a": [1]},
        "max_tokens": 2.0,
        "n": 1,
    }
    assert (await web.post(COMPLETION, json={"prompt": "x", **harmless})).status_code == 200
    more = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"]}
    more |= {"return_prompt_text": False, "return_token_offsets": False}
    assert (await web.post(CHAT, json={**HELLO, "max_tokens": 1, **more})).status_code == 200
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "name": None}
    assert (await web.post(CHAT, json=body)).status_code == 200


async def test_routes(web: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/page/../run.py", 404),
        ("OPTIONS", COMPLETION, 405),
    ):
        answer = await web.request(method, path)
        assert answer.status_code == status, path
        assert answer.json()["error"]["message"]
        if status == 405:
            assert answer.headers["allow"]


async def test_other_content_types_are_refused(web: httpx.AsyncClient) -> None:
    answer = await web.post(COMPLETION, data={"prompt": "x"})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


async def test_body_limit(web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.server.http.MAX_BODY_BYTES", 1 << 20)
    big = b'{"prompt": "' + b"x" * (1 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    assert (await web.post(COMPLETION, content=big, headers=headers)).status_code == 413

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 65536

    assert (await web.post(COMPLETION, content=chunks(), headers=headers)).status_code == 413
    assert (await web.get("/health")).status_code == 200


async def test_without_a_tokenizer() -> None:
    async with served(None) as server, httpx.AsyncClient(base_url=server.url) as web:
        assert (await web.post(CHAT, json=HELLO)).status_code == 400
        assert (await web.post(COMPLETION, json={"prompt": "x"})).status_code == 400
        answer = await web.post(COMPLETION, json={"prompt": [1, 2], "max_tokens": 2, "logprobs": 1})
        assert answer.status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = """prompt messages temperature top_p top_k n seed stop max_tokens stream stream_options logprobs top_logprobs
stop_token_ids ignore_eos cache_salt priority chat_template_kwargs add_special_tokens skip_special_tokens echo
return_token_ids return_tokens_as_token_ids continue_final_message add_generation_prompt documents reasoning_effort
include_stop_str_in_output max_completion_tokens min_p min_tokens presence_penalty frequency_penalty repetition_penalty
logit_bias bad_words allowed_token_ids prompt_logprobs truncate_prompt_tokens truncation_side stream_interval request_id
best_of suffix tools model user"""
FIELDS = st.sampled_from(NAMES.split())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from([CHAT, COMPLETION]), fields=st.dictionaries(FIELDS, JSON, max_size=4))
async def test_whatever_is_sent(web: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    base = HELLO if path == CHAT else {"prompt": "x"}
    body = json.dumps({**base, "max_tokens": 2, **fields}).encode()
    answer = await web.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (fields, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
async def test_who_would_like_another_protocol_is_answered_in_this_one(server: Served, upgrade: str) -> None:
    """As Java's HTTP client asks: its body must not be lost."""
    import asyncio

    body = completion(prompt="fox")
    head = (
        f"POST {COMPLETION} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: localhost\r\n"
        "HTTP2-Settings: AAEAAEAA\r\n"
        f"Upgrade: {upgrade}\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for parts in ([head.encode() + body], [head.encode(), body], [head[:90].encode(), head[90:].encode(), body]):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            assert b" 200 " in await reader.readline()
            length = int((await reader.readuntil(b"\r\n\r\n")).partition(b"content-length: ")[2].split()[0])
            assert json.loads(await reader.readexactly(length))["usage"]["completion_tokens"] == 2
    writer.close()
    await writer.wait_closed()


async def test_raw_garbage(server: Served, web: httpx.AsyncClient, folder: Path) -> None:
    import asyncio

    for data in (
        b"\x00" * 100,
        b"GET /\x80 HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
        await writer.wait_closed()
    assert (await web.get("/health")).status_code == 200
