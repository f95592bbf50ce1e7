"""The official client against the real server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai as api
import pytest
from openai import AsyncOpenAI

from drumline.text.tokenizer import Tokenizer

from .peer import Served, served


def say(server: Served, folder: Path, text: str, *, end: bool = True) -> None:
    """The engine answers every request with this text."""
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(text) + ([tokenizer.eos_token_ids[0]] if end else [])
    server.engine.script = lambda request: ids


MESSAGES: list[api.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


async def test_chat(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, "The quick brown fox 🎉")
    answer = await openai.chat.completions.create(model="tiny", messages=MESSAGES, seed=7)
    choice = answer.choices[0]
    assert choice.message.content == "The quick brown fox 🎉"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    request = server.engine.seen[0]
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == len(server.engine.script(request))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert request.seed == 7
    rendered = Tokenizer.from_folder(folder).decode(request.prompt_token_ids, skip_special_tokens=False)
    assert rendered.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")


async def test_chat_stream(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, "Käse, 東京 and 🚀")
    stream = await openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Käse, 東京 and 🚀"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(server.engine.script(server.engine.seen[0]))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    # no character is ever cut in two
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks if chunk.choices)


async def test_stream_without_usage_has_none(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, "dog")
    stream = await openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in [chunk async for chunk in stream])


async def test_stop_string_is_cut_and_frees_the_request(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, "The quick brown fox jumps", end=False)
    for stream in (False, True):
        if stream:
            events = await openai.completions.create(
                model="tiny", prompt="x", stop=["wn f", "zzz"], max_tokens=99, stream=True
            )
            pieces = [event.choices[0] async for event in events]
            text, last = "".join(piece.text for piece in pieces), pieces[-1]
        else:
            last = (
                await openai.completions.create(model="tiny", prompt="x", stop=["wn f", "zzz"], max_tokens=99)
            ).choices[0]
            text = last.text
        assert text == "The quick bro"
        assert last.finish_reason == "stop"
        assert last.stop_reason == "wn f"  # type: ignore[attr-defined]
        await server.engine.until(0)


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_behind_a_stop_string_are_nobodys(
    server: Served, openai: AsyncOpenAI, folder: Path, at_once: int, stream: bool
) -> None:
    say(server, folder, "The quick brown fox jumps over the lazy dog", end=False)
    server.engine.at_once = at_once
    ids = list(server.engine.script(None))  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_folder(folder)
    needed = next(count for count in range(len(ids)) if "fox j" in tokenizer.decode(ids[:count]))
    arguments = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 99,
        "stop": "fox j",
        "logprobs": 1,
        "extra_body": {"return_token_ids": True},
    }
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = [event async for event in await openai.completions.create(**arguments, **options)]  # type: ignore[call-overload]
        usage, pieces = events[-1].usage, [event.choices[0] for event in events if event.choices]
    else:
        answer = await openai.completions.create(**arguments)  # type: ignore[call-overload]
        usage, pieces = answer.usage, answer.choices
    assert "".join(piece.text for piece in pieces) == "The quick brown "
    assert [token for piece in pieces for token in piece.token_ids] == ids[:needed]
    assert sum(len(piece.logprobs.tokens) for piece in pieces if piece.logprobs) == needed
    assert usage.completion_tokens == needed
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "fox j")


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids(server: Served, openai: AsyncOpenAI, folder: Path, stream: bool) -> None:
    say(server, folder, "Käse 🎉")
    ids = list(server.engine.script(None))  # type: ignore[arg-type]
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    chat = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "extra_body": extra, "stream": stream}
    answer = await openai.chat.completions.create(**chat)  # type: ignore[call-overload]
    events = [event async for event in answer] if stream else [answer]
    assert events[0].prompt_token_ids == server.engine.seen[0].prompt_token_ids
    assert not any(hasattr(event, "prompt_token_ids") for event in events[1:])
    choices = [event.choices[0] for event in events]
    assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == ids
    names = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert names == [f"token_id:{token}" for token in ids]
    assert all(event.system_fingerprint.startswith("drumline-") for event in events)
    prompts = {"model": "tiny", "prompt": ["a", "bc"], "n": 2, "max_tokens": 99, "stream": stream, "temperature": 1}
    prompts["extra_body"] = extra
    answer = await openai.completions.create(**prompts)  # type: ignore[call-overload]
    events = [event async for event in answer] if stream else [answer]
    for index in range(4):
        mine = [choice for event in events for choice in event.choices if choice.index == index]
        assert mine[0].prompt_token_ids == Tokenizer.from_folder(folder).encode(["a", "bc"][index // 2])
        assert [token for choice in mine for token in choice.token_ids] == ids
        assert not any(hasattr(choice, "prompt_token_ids") for choice in mine[1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(server: Served, openai: AsyncOpenAI, folder: Path, stream: bool) -> None:
    say(server, folder, " the dog")
    ids = Tokenizer.from_folder(folder).encode("fox")
    for prompt, texts in ((["a", "b"], ["a", "b"]), (ids, ["fox"])):
        answer = await openai.completions.create(model="tiny", prompt=prompt, echo=True, stream=stream)  # type: ignore[call-overload]
        events = [event async for event in answer] if stream else [answer]
        for index, text in enumerate(texts):
            mine = [choice.text for event in events for choice in event.choices if choice.index == index]
            assert "".join(mine) == f"{text} the dog"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_begun_is_continued(
    server: Served, openai: AsyncOpenAI, folder: Path, stream: bool
) -> None:
    say(server, folder, " the dog")
    begun = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    for echo in (False, True):
        extra = {"continue_final_message": True, "add_generation_prompt": False, "echo": echo}
        arguments = {"model": "tiny", "messages": begun, "extra_body": extra, "stream": stream}
        answer = await openai.chat.completions.create(**arguments)  # type: ignore[call-overload]
        if stream:
            text = "".join([event.choices[0].delta.content or "" async for event in answer])
        else:
            text = answer.choices[0].message.content
        assert text == ("I am the dog" if echo else " the dog")
    prompt = Tokenizer.from_folder(folder).decode(server.engine.seen[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nI am")
    with pytest.raises(api.BadRequestError, match="exclude each other"):
        await openai.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"continue_final_message": True}
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompted", [None, True, False])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
async def test_a_chat_echoes_what_its_speaker_said_last(
    server: Served, web: httpx.AsyncClient, folder: Path, role: str, prompted: bool | None, stream: bool
) -> None:
    """The last message, if its role is the answer's: vLLM's rule."""
    say(server, folder, " the dog")
    speaker = role if prompted is False else "assistant"
    contents: list[tuple[Any, str]] = [
        ("I am", "I am"),
        ("", ""),
        ([{"type": "text", "text": "I"}, {"type": "text", "text": "am"}], "I\nam"),
    ]
    for content, said in contents:
        for go_on in (False, True):
            if go_on and (prompted is not False or not said):
                continue
            for echo in (False, True):
                body = {
                    "messages": [*MESSAGES, {"role": role, "content": content}],
                    "add_generation_prompt": prompted,
                    "continue_final_message": go_on,
                    "echo": echo,
                    "n": 2,
                    "temperature": 1,
                    "stream": stream,
                }
                answer = await web.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                found = _messages(answer.text) if stream else [c["message"] for c in answer.json()["choices"]]
                expected = (said if echo and role == speaker else "") + " the dog"
                assert [(m["role"], m["content"]) for m in found] == [(speaker, expected)] * 2


def _messages(events: str) -> list[dict[str, str]]:
    """Messages of a stream, put together."""
    found: dict[int, dict[str, str]] = {}
    for line in events.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            message = found.setdefault(choice["index"], {"content": ""})
            assert ("role" in choice["delta"]) == ("role" not in message)
            message["content"] += choice["delta"].pop("content", "")
            message |= choice["delta"]
    return [found[index] for index in sorted(found)]


async def test_several_choices_and_prompts(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    answer = await openai.completions.create(
        model="tiny", prompt=["dog", "lazy fox"], n=2, max_tokens=6, seed=3, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, ["dog", "dog", "lazy fox", "lazy fox"], strict=True):
        ids = tokenizer.encode(prompt)
        assert choice.text == tokenizer.decode((ids * 6)[:6])
        assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(tokenizer.encode("dog")) + len(tokenizer.encode("lazy fox"))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert sorted(request.seed for request in server.engine.seen) == [3, 3, 4, 4]


async def test_several_choices_stream(server: Served, openai: AsyncOpenAI) -> None:
    events = await openai.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, max_tokens=5, temperature=1, stream=True
    )
    seen: dict[int, list[str | None]] = {}
    async for event in events:
        choice = event.choices[0]
        seen.setdefault(choice.index, []).append(choice.finish_reason)
    assert sorted(seen) == [0, 1, 2]
    assert all(reasons[-1] == "length" and not any(reasons[:-1]) for reasons in seen.values())


@pytest.mark.parametrize("form", ["text", "ids", "list of ids"])
async def test_prompt_forms(server: Served, openai: AsyncOpenAI, folder: Path, form: str) -> None:
    ids = Tokenizer.from_folder(folder).encode("the lazy dog")
    prompt = {"text": "the lazy dog", "ids": ids, "list of ids": [ids]}[form]
    await openai.completions.create(model="tiny", prompt=prompt, max_tokens=1)  # type: ignore[arg-type]
    assert server.engine.seen[0].prompt_token_ids == ids


async def length(web: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    """Output tokens of an answer that its length ended, as a stream and whole."""
    whole = (await web.post(path, json=body)).json()
    stream = await web.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(stream.text.split("\n\n")[-3].removeprefix("data: "))
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == last["usage"]["completion_tokens"]
    return int(whole["usage"]["completion_tokens"])


@pytest.mark.parametrize("said", [{}, {"max_tokens": None}])
async def test_how_many_tokens_without_max_tokens(
    server: Served, web: httpx.AsyncClient, folder: Path, said: dict[str, None]
) -> None:
    """A completion 16, as OpenAI and vLLM have it, or what fits if that is less; a chat what fits."""
    say(server, folder, "dog", end=False)
    route = "/v1/completions"
    assert await length(web, route, {"prompt": [5] * 200, **said}) == 16
    assert await length(web, route, {"prompt": [5] * 246, **said}) == 10
    assert await length(web, route, {"prompt": [5] * 999, "truncate_prompt_tokens": -1, **said}) == 16
    assert await length(web, route, {"prompt": [5] * 999, "truncate_prompt_tokens": 250, **said}) == 6
    assert await length(web, route, {"prompt": [5], "echo": True, "min_tokens": 16, **said}) == 16
    refused = await web.post(route, json={"prompt": [5], "min_tokens": 17, **said})
    assert refused.json()["error"]["param"] == "min_tokens"
    chat = {"messages": MESSAGES, "min_tokens": 30, "max_completion_tokens": None, **said}
    asked = await length(web, "/v1/chat/completions", chat)
    assert asked == 256 - len(server.engine.seen[-1].prompt_token_ids)


@pytest.mark.parametrize(("own", "expected"), [(5, (5, 5)), (100, (16, 100))])
async def test_the_models_own_limit(folder: Path, tmp_path: Path, own: int, expected: tuple[int, int]) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"max_new_tokens": own}))
    async with served(tmp_path / "model") as server, httpx.AsyncClient(base_url=server.url, timeout=10) as web:
        say(server, folder, "dog", end=False)
        got = (
            await length(web, "/v1/completions", {"prompt": [5]}),
            await length(web, "/v1/chat/completions", {"messages": MESSAGES}),
        )
        assert got == expected


async def test_chat_logprobs(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, "é", end=False)  # two bytes, perhaps two tokens
    tokens = server.engine.script(None)  # type: ignore[arg-type]
    for stream in (False, True):
        arguments = {
            "model": "tiny",
            "messages": MESSAGES,
            "logprobs": True,
            "top_logprobs": 3,
            "max_tokens": len(tokens),
        }
        if stream:
            events = await openai.chat.completions.create(**arguments, stream=True)  # type: ignore[call-overload]
            found = [c.logprobs.content async for e in events for c in e.choices if c.logprobs]
            content = [entry for part in found for entry in part]
        else:
            answer = await openai.chat.completions.create(**arguments)  # type: ignore[call-overload]
            content = answer.choices[0].logprobs.content
        assert len(content) == len(tokens)
        raw = bytes(byte for entry in content for byte in entry.bytes)
        assert raw.decode() == "é"
        for entry in content:
            assert entry.logprob == -1.0
            assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.0, -9999.0]
            assert entry.top_logprobs[1].token == entry.token


async def test_completion_logprobs(server: Served, openai: AsyncOpenAI, folder: Path) -> None:
    say(server, folder, "the lazy dog", end=False)
    tokens = server.engine.script(None)  # type: ignore[arg-type]
    answer = await openai.completions.create(model="tiny", prompt="x", logprobs=2, max_tokens=len(tokens))
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    assert "".join(found.tokens) == "the lazy dog"
    assert found.token_logprobs == [-1.0] * len(tokens)
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(tokens))]
    assert all(token in top and len(top) == 2 for token, top in zip(found.tokens, found.top_logprobs, strict=True))
    events = await openai.completions.create(model="tiny", prompt="x", logprobs=2, max_tokens=len(tokens), stream=True)
    offsets = [o async for e in events if e.choices[0].logprobs for o in e.choices[0].logprobs.text_offset or []]
    assert offsets == found.text_offset


async def test_models(server: Served, openai: AsyncOpenAI) -> None:
    models = await openai.models.list()
    assert [model.id for model in models.data] == ["tiny", "alias/of-tiny"]
    assert (await openai.models.retrieve("alias/of-tiny")).max_model_len == 256  # type: ignore[attr-defined]
    with pytest.raises(api.NotFoundError):
        await openai.models.retrieve("other")
    assert (await openai.completions.create(model="alias/of-tiny", prompt="x", max_tokens=1)).model == "alias/of-tiny"


async def test_errors_become_the_clients_exceptions(server: Served, openai: AsyncOpenAI) -> None:
    with pytest.raises(api.NotFoundError) as unknown:
        await openai.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.param == "model"
    assert unknown.value.code == "model_not_found"
    with pytest.raises(api.BadRequestError) as long:
        await openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 500}])
    assert long.value.param == "messages"
    assert "at most 256 tokens" in str(long.value)
    assert long.value.code == "context_length_exceeded"


async def test_engine_death_reaches_the_client(server: Served, openai: AsyncOpenAI) -> None:
    server.engine.pause_s = 0.01
    stream = await openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    seen = 0
    with pytest.raises(api.APIError, match=r"Worker_TP1 rank 1 .* killed by SIGKILL"):  # noqa: PT012
        async for _ in stream:
            seen += 1
            if seen == 3:
                server.engine.die()
    with pytest.raises(api.InternalServerError) as dead:
        await openai.completions.create(model="tiny", prompt="x")
    assert dead.value.status_code == 503


async def test_api_key(folder: Path) -> None:
    async with served(folder, keys=["correct horse", "other"]) as server:
        for key, fine in (("correct horse", True), ("other", True), ("wrong", False)):
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if fine:
                    assert (await client.models.list()).data
                else:
                    with pytest.raises(api.AuthenticationError):
                        await client.models.list()
