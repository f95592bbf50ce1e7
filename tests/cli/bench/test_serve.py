"""The command against the real HTTP server of drumline and against servers of bytes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from drumline.cli import bench
from drumline.cli.bench import load, serve
from drumline.text.tokenizer import Tokenizer
from tests.cli.bench.raw import Answer, Request, chunk, chunked_head, raw_server, tokens, whole
from tests.server.peer import Served, served
from tests.text.vocab import byte_level_folder

COMMAND = [sys.executable, "-m", "drumline.cli.main", "bench", "serve"]
Bench = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the command in a thread; its exit code and what it wrote into its JSON file."""

    async def start(*argv: str) -> tuple[int, dict[str, Any]]:
        place = tmp_path / "result.json"
        place.unlink(missing_ok=True)
        code = await asyncio.to_thread(bench.main, ["serve", *argv, "--output-json", str(place)])
        return code, json.loads(place.read_text()) if place.exists() else {}

    return start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("bench"))


@pytest_asyncio.fixture
async def server(folder: Path) -> AsyncIterator[Served]:
    async with served(folder, keys=["k"]) as running:
        yield running


async def test_completions(run: Bench, server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"{server.url} --api-key k --num-prompts 12 --random-input-len 30 --random-output-len 10 --ignore-eos"
    code, found = await run(*argv.split(), "--max-concurrency", "3", "--count-by", "ids")
    assert code == 0
    assert (found["completed"], found["failed"], found["errors"]) == (12, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"], found["token_events"]) == (360, 120, 120)
    assert found["model_id"] == "tiny"
    assert found["max_concurrent_requests"] <= 3
    assert found["mean_itl_token_ms"] == pytest.approx(found["mean_itl_ms"])
    requests = server.engine.seen
    assert len(requests) == 14  # the probe, the warm-up
    assert all(len(request.prompt_token_ids) == 30 for request in requests)
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 14
    assert [request.sampling.max_tokens for request in requests] == [4, *[10] * 13]
    out = capsys.readouterr().out
    assert "12 done, 0 failed" in out
    assert "time to first token" in out


async def test_several_tokens_in_an_event(run: Bench, server: Served) -> None:
    server.engine.at_once = 4
    argv = f"{server.url} --api-key k --num-prompts 4 --random-output-len 10 --random-input-len 9 --ignore-eos".split()
    for count_by in ("ids", "stream", "usage"):
        code, found = await run(*argv, "--count-by", count_by)
        assert code == 0
        assert (found["total_output_tokens"], found["token_events"]) == (40, 12)
        assert found["output_tokens_counted_by"] == [count_by]
        assert ("mean_itl_token_ms" in found) == (count_by != "usage")


async def test_chat_with_random_text(run: Bench, server: Served, folder: Path) -> None:
    argv = f"--base-url {server.url}/v1 --api-key k --endpoint chat --tokenizer {folder} --num-prompts 5".split()
    code, found = await run(*argv, "--random-input-len", "40", "--random-output-len", "6", "--ignore-eos")
    assert code == 0
    assert (found["total_output_tokens"], found["endpoint"]) == (30, "/v1/chat/completions")
    tokenizer = Tokenizer.from_folder(folder)
    empty = len(tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": ""}])))
    assert found["total_input_tokens"] == 5 * (40 + empty)


async def test_given_prompts(run: Bench, server: Served, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "The dog", "output_len": 3}\n{"prompt": "A fox", "output_len": 5}\n')
    code, found = await run(server.url, "--api-key", "k", "--dataset-path", str(file), "--warmup", "0")
    assert code == 0
    assert (found["completed"], found["total_output_tokens"]) == (2, 8)
    tokenizer = Tokenizer.from_folder(folder)
    texts = {tokenizer.decode(request.prompt_token_ids) for request in server.engine.seen}
    assert texts == {"The dog", "A fox"}


async def test_refusals_are_said_in_a_line(run: Bench, server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        ([server.url, "--api-key", "wrong"], "401"),
        ([server.url, "--api-key", "k", "--model", "other"], "other"),
        ([server.url, "--api-key", "k", "--random-input-len", "999"], "400"),
        (["127.0.0.1:9"], "refused"),
        (["ftp://x"], "not a URL"),
    ]
    for argv, said in wrong:
        code, found = await run(*argv)
        assert (code, found) == (1, {})
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def streams(count: int, pause_s: float = 0.0) -> Answer:
    async def answer(request: Request) -> None:
        await request.send(chunked_head(), chunk(tokens(count)), b"0\r\n\r\n", pause_s=pause_s)

    return answer


async def test_errors_by_kind(run: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    turn = -1
    good = streams(8)

    async def answer(request: Request) -> None:
        nonlocal turn
        turn += 1
        # The first is the probe.
        if turn == 1 or turn == 2:
            await request.send(whole(b'{"error": {"message": "too many"}}', "429 Too Many Requests"))
        elif turn == 3:
            await request.send(chunked_head(), chunk(b"data: {]\n\n"), b"0\r\n\r\n")
        elif turn == 4:
            await request.send(chunked_head(), chunk(tokens(8, done=False)), b"0\r\n\r\n")
        elif turn == 5:
            await request.send(chunked_head(), chunk(tokens(3)))
            request.writer.close()
        elif turn == 6:
            await streams(5)(request)
        elif turn == 7:
            await request.send(chunked_head(), chunk(b'data: {"error": {"message": "dead"}}\n\n'), b"0\r\n\r\n")
        elif turn == 8:
            await asyncio.sleep(1.0)
        else:
            await good(request)

    async with raw_server(answer) as server:
        argv = f"{server.url} --num-prompts 10 --max-concurrency 1 --warmup 0 --random-output-len 8 --ignore-eos"
        code, found = await run(*argv.split(), "--timeout", "0.4")
    assert code == 1
    assert found["errors"] == {
        "HTTP 429": 2,
        "malformed stream": 1,
        "broken stream": 1,
        "connection lost": 1,
        "short answer": 1,
        "error event": 1,
        "timeout": 1,
    }
    assert (found["completed"], found["total_output_tokens"]) == (2, 16)
    assert found["error_examples"]["HTTP 429"] == "too many"
    assert "2 x HTTP 429: too many" in capsys.readouterr().out


@pytest.mark.alone
async def test_times_are_those_of_the_server(run: Bench) -> None:
    """First token after 100 ms, then an event of two tokens each 40 ms; all in one chunk would be 0."""
    event = b'data: {"choices": [{"text": "ab", "token_ids": [7, 8]}]}\n\n'

    async def answer(request: Request) -> None:
        await request.send(chunked_head())
        await asyncio.sleep(0.1)
        # Cut anywhere: an event counts when its last byte comes.
        await request.send(*[chunk(event[:9]), chunk(event[9:-1])])
        await request.send(chunk(event[-1:] + event[:-1]), pause_s=0.04)
        for _ in range(5):
            await request.send(chunk(event[-1:] + event[:-1]), pause_s=0.04)
        await request.send(chunk(event[-1:] + b"data: [DONE]\n\n"), b"0\r\n\r\n")

    async with raw_server(answer) as server:
        argv = f"{server.url} --num-prompts 4 --max-concurrency 1 --random-output-len 14 --ignore-eos --count-by ids"
        code, found = await run(*argv.split())
    assert code == 0
    assert (found["total_output_tokens"], found["token_events"]) == (56, 28)
    assert 95 < found["median_ttft_ms"] < 200
    assert 38 < found["median_itl_ms"] < 80
    assert 19 < found["median_itl_token_ms"] < 40
    assert found["mean_tpot_ms"] == pytest.approx(found["mean_itl_ms"] * 6 / 13)
    assert found["mean_e2el_ms"] > 340


async def test_concurrency_is_kept_and_used(run: Bench) -> None:
    async with raw_server(streams(4, pause_s=0.01)) as server:
        code, found = await run(server.url, "--num-prompts", "40", "--max-concurrency", "5", "--random-output-len", "4")
        assert (code, server.most, server.connections) == (0, 5, 5)
        assert found["max_concurrent_requests"] == 5
        assert "mean_late_ms" not in found


@pytest.mark.alone
async def test_rate(run: Bench) -> None:
    async with raw_server(streams(4)) as server:
        argv = f"{server.url} --num-prompts 30 --request-rate 100 --seed 3 --random-output-len 4 --save-detailed"
        code, found = await run(*argv.split())
    assert code == 0
    sent = [one["sent"] for one in found["requests"]]
    assert sent == sorted(sent)
    from drumline.cli.bench.schedule import arrivals

    late = [there - due for there, due in zip(sent, arrivals(30, 100, seed=3), strict=True)]
    assert all(one > -0.05 for one in late)
    assert sorted(late)[15] < 0.1
    assert "mean_late_ms" in found


async def test_a_server_that_takes_neither_ids_nor_usage(
    run: Bench, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(request: Request) -> None:
        body = request.json()
        if not isinstance(body["prompt"], str) or "stream_options" in body:
            await request.send(whole(b'{"detail": "unknown"}', "422 Unprocessable Entity"))
        else:
            data = tokens(4).split(b"data: ")
            await request.send(chunked_head(), chunk(b"data: ".join([*data[:5], data[-1]])), b"0\r\n\r\n")

    async with raw_server(answer) as server:
        argv = f"{server.url} --num-prompts 3 --random-output-len 4 --tokenizer {folder}"
        code, found = await run(*argv.split())
    assert code == 0
    assert (found["total_output_tokens"], found["output_tokens_counted_by"]) == (12, ["events"])
    assert found["prompts_as"] == "text"
    assert found["total_input_tokens"] == 3 * 128
    assert "unknown" in capsys.readouterr().err


async def test_body_and_headers(run: Bench) -> None:
    async with raw_server(streams(4)) as server:
        argv = [server.url, "--num-prompts", "1", "--header", "X-A=b", "--extra-body", '{"top_k": 5, "temperature": 1}']
        await run(*argv, "--api-key", "k", "--random-output-len", "4", "--model", "n", "--count-by", "stream")
        request = server.requests[-1]
    assert request.headers["x-a"] == "b"
    assert request.headers["authorization"] == "Bearer k"
    body = request.json()
    assert len(body.pop("prompt")) == 128  # type: ignore[arg-type]
    assert body == {
        "model": "n",
        "temperature": 1,
        "top_k": 5,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def test_waits_for_a_server_that_starts(run: Bench) -> None:
    asked = 0
    good = streams(4)

    async def answer(request: Request) -> None:
        nonlocal asked
        asked += 1
        await (request.send(whole(b"{}", "503 Starting")) if asked < 3 else good(request))

    async with raw_server(answer) as server:
        argv = (server.url, "--num-prompts", "2", "--random-output-len", "4")
        assert (await run(*argv))[0] == 1
        asked = 0
        assert (await run(*argv, "--ready-timeout", "20"))[0] == 0


async def test_answers_are_read_at_once_where_they_are_many(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "HELD_BYTES", 1000)
    async with raw_server(streams(4)) as server:
        code, found = await run(server.url, "--num-prompts", "9", "--random-output-len", "4")
    assert (code, found["total_output_tokens"]) == (0, 36)


async def test_results_in_files(run: Bench, tmp_path: Path) -> None:
    async with raw_server(streams(4)) as server:
        argv = (server.url, "--num-prompts", "2", "--random-output-len", "4", "--result-dir", str(tmp_path / "new"))
        await run(*argv, "--save-result")
        await run(*argv, "--save-result", "--result-filename", "x.json")
    first, second = sorted((tmp_path / "new").iterdir())
    assert re.fullmatch(r"openai-infqps-m-\d{8}-\d{6}\.json", first.name)
    assert second.name == "x.json"
    assert json.loads(second.read_text())["completed"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_reports_what_there_is(number: int, tmp_path: Path) -> None:
    waiting = asyncio.Event()
    turn = 0

    async def answer(request: Request) -> None:
        nonlocal turn
        turn += 1
        if turn <= 6:
            await streams(4)(request)
            return
        if turn == 9:  # all three wait
            waiting.set()
        await asyncio.Event().wait()

    place = tmp_path / "r.json"
    async with raw_server(answer) as server:
        argv = f"{server.url} --num-prompts 20 --max-concurrency 3 --random-output-len 4 --output-json {place}".split()
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
        )
        async with asyncio.timeout(30):
            await waiting.wait()
            process.send_signal(number)
            out, error = await process.communicate()
    assert (process.returncode, error) == (130, b"")
    assert b"4 done, 0 failed" in out
    found = json.loads(place.read_text())
    assert found["completed"] == 4
    assert found["unfinished"] == 3


async def test_a_bar_on_a_terminal() -> None:
    async with raw_server(streams(4, pause_s=0.2)) as server:
        main, side = pty.openpty()
        argv = f"{server.url} --num-prompts 5 --max-concurrency 1 --random-output-len 4 --warmup 0".split()
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *argv, stdout=asyncio.subprocess.PIPE, stderr=side, env={**os.environ, "TERM": "xterm"}
        )
        os.close(side)
        try:
            async with asyncio.timeout(30):
                out, _ = await process.communicate()
            shown = os.read(main, 1 << 16).decode()
        finally:
            os.close(main)
    assert process.returncode == 0
    assert b"5 done, 0 failed" in out
    assert "1 running" in shown
    assert re.search(r"[1-5]/5", shown)


async def test_many_requests_at_once(run: Bench) -> None:
    """More connections than a process may have by default, as far as the limits go."""
    async with raw_server(streams(4)) as server:
        code, found = await run(server.url, "--num-prompts", "400", "--random-output-len", "4")
    assert (code, found["completed"]) == (0, 400)


async def test_an_interrupt_before_the_load_says_nothing() -> None:
    asked = asyncio.Event()

    async def answer(request: Request) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with raw_server(answer) as server:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, server.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            await asked.wait()
            process.send_signal(signal.SIGINT)
            assert await process.communicate() == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--num-promts", "1"], "did you mean --num-prompts?"),
        (["--endpoint", "responses"], "--endpoint"),
        (["--max-concurrency", "-1"], "--max-concurrency"),
    ],
)
def test_wrong_flags(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        bench.main(["serve", *argv])
    assert e.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["--endpoint", "chat", "--prompts-as", "ids"],
        ["--metric-percentiles", "x"],
        ["--random-range-ratio", "2"],
        ["--dataset-name", "sharegpt"],
    ],
)
def test_flags_that_do_not_go_together(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from drumline.cli.main import main

    assert main(["bench", "serve", *argv]) == 2
    assert capsys.readouterr().err.startswith("drumline bench: error: ")


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == bench.main(["--help"]) == 0
    assert "offline" in capsys.readouterr().out
    assert bench.main(["srve"]) == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err
    assert bench.main(["--num-prompts", "3"]) == 2
    for command in bench.COMMANDS:
        with pytest.raises(SystemExit) as e:
            bench.main([command, "--help"])
        assert e.value.code == 0
        assert "--num-prompts" in capsys.readouterr().out


def test_descriptor_limit_only_goes_up() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    serve._raise_descriptor_limit()
    after = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert after[0] >= before[0]
    assert after[1] == before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
