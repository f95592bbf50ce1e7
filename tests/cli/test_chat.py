"""``drumline chat`` against a real server."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from drumline.cli import chat
from drumline.cli.client import Client, ServerError
from drumline.text.tokenizer import Tokenizer
from tests.server.peer import Served, served
from tests.text.vocab import byte_level_folder

Run = Callable[..., "asyncio.Future[int]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("chat"))


@pytest_asyncio.fixture
async def server(folder: Path) -> AsyncIterator[Served]:
    async with served(folder, keys=["k"]) as running:
        tokenizer = Tokenizer.from_folder(folder)
        ids = [*tokenizer.encode("The lazy dog 🎉"), tokenizer.eos_token_ids[0]]
        running.engine.script = lambda request: ids
        yield running


@pytest.fixture
def run(server: Served, monkeypatch: pytest.MonkeyPatch) -> Run:
    def start(*argv: str, stdin: str = "") -> asyncio.Future[int]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        return asyncio.ensure_future(asyncio.to_thread(chat.main, ["--url", server.url, "--api-key", "k", *argv]))

    return start


def prompts(server: Served, folder: Path) -> list[str]:
    tokenizer = Tokenizer.from_folder(folder)
    return [tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False) for r in server.engine.seen]


async def test_one_message(run: Run, server: Served, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("-m", "hello", "--system", "be brief", "--seed", "5", "--max-tokens", "50") == 0
    assert capsys.readouterr().out == "The lazy dog 🎉\n"
    assert "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>" in prompts(server, folder)[0]
    assert server.engine.seen[0].seed == 5
    assert server.engine.seen[0].sampling.max_tokens == 50


async def test_the_server_may_stand_first(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(chat.main, [server.url, "--api-key", "k", "-m", "hello"]) == 0
    assert capsys.readouterr().out == "The lazy dog 🎉\n"


async def test_a_pipe(run: Run, server: Served, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(stdin="say\nsomething\n") == 0
    assert capsys.readouterr().out == "The lazy dog 🎉\n"
    assert "say\nsomething" in prompts(server, folder)[0]
    assert await run(stdin="  \n") == 2
    assert "nothing to say" in capsys.readouterr().err


async def test_a_conversation(
    run: Run, server: Served, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "", "again", "/clear", "new"])

    def ask(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    running = run()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert await running == 0
    seen = prompts(server, folder)
    assert len(seen) == 3
    assert "hello" in seen[1]
    assert "The lazy dog 🎉<|im_end|>" in seen[1]
    assert "hello" not in seen[2]
    assert "tokens/s" in capsys.readouterr().out


async def test_ctrl_c_ends_the_answer_and_frees_the_request(
    server: Served, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.pause_s = 0.005
    ids = server.engine.script(None)[:-1]  # type: ignore[arg-type]
    server.engine.script = lambda request: ids
    client = Client(server.url, "k")
    talk = chat.Conversation(client, "tiny", "", {})
    events = client.chat
    count = 0

    def interrupted(body: dict[str, object]) -> object:
        nonlocal count
        for event in events(body):
            count += 1
            if count == 5:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(client, "chat", interrupted)
    assert await asyncio.to_thread(talk.say, "hello") == "stopped"
    await server.engine.until(0)
    assert [message["role"] for message in talk._messages] == ["user", "assistant"]


async def test_errors_are_one_line(run: Run, server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    async def error(code: int, *argv: str) -> str:
        assert await run(*argv) == code
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "Start one with: drumline serve" in await error(1, "--url", "http://127.0.0.1:1", "-m", "x")
    assert "not a URL" in await error(1, "--url", "ftp://x", "-m", "x")
    assert "not a URL" in await error(1, "--url", "http://x:port", "-m", "x")
    assert "API key" in await error(1, "--api-key", "wrong", "-m", "x")
    assert "'other' is not served" in await error(1, "--model", "other", "-m", "x")
    assert "at most 256 tokens" in await error(1, "-m", "word " * 500)
    assert "temperature" in await error(1, "--temperature", "9", "-m", "x")
    server.engine.script = lambda request: (server.engine.die(), [5])[1]  # type: ignore[func-returns-value]
    assert "The engine died" in await error(1, "-m", "x")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("hello", "not as a drumline server"),
        ("[" * 100_000, "not as a drumline server"),
        *((body, "not as a server of the OpenAI API") for body in ("{}", "[]", "5", '{"data": 5}', '{"data": [{}]}')),
        ('{"error": "out of order"}', "out of order"),
        ('{"error": {"message": "out of order"}}', "out of order"),
        ('{"error": {"code": 7}}', "'code': 7"),
    ],
)
async def test_a_server_that_is_no_drumline(body: str, said: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body.encode()))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ServerError, match=said):
            await asyncio.to_thread(Client(f"127.0.0.1:{port}").models)


@pytest.mark.parametrize("url", ["http://[::1", "http://x:port", "ftp://x", "http://a..b:80", f"http://{'a' * 70}"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ServerError):
        Client(url).models()


async def test_a_server_that_goes_away_in_mid_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = json.dumps({"choices": [{"delta": {"content": "x"}}]})
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {event}\n\n".encode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ServerError, match="went away"):
            await asyncio.to_thread(lambda: list(Client(f"http://127.0.0.1:{port}").chat({"messages": []})))
