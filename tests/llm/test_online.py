"""AsyncLLM on a tiny random model: streams, aborts, loops, deaths."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from drumline.errors import ConfigError, EngineDeadError, RemoteCallError, RequestError, StartupError

from .conftest import SMALL

LIMIT_S = 60.0
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **more})


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One loop for all tests that share an AsyncLLM."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(scope="module")
def llm(loop: asyncio.AbstractEventLoop, model_path: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model_path, worker_extension_cls="tests.llm.extension.Extension", **SMALL)
    loop.run_until_complete(llm.start())
    yield llm
    loop.run_until_complete(llm.aclose())


@pytest.fixture
def run(loop: asyncio.AbstractEventLoop) -> Any:
    return lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, LIMIT_S))


async def whole(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    last = None
    async for output in stream:
        last = output
    assert last is not None
    return last


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine runs nothing (an abort that is on its way needs a step)."""
    while (stats := await llm.stats()).num_running or stats.num_waiting:
        pass


def test_kinds_of_results(llm: AsyncLLM, run: Any) -> None:
    async def program() -> None:
        results = [output async for output in llm.generate("The quick", greedy())]
        last = results[-1]
        assert last.prompt == "The quick"
        assert [output.finished for output in results] == [False] * (len(results) - 1) + [True]
        for before, after in itertools.pairwise(results):
            first, second = before.outputs[0], after.outputs[0]
            assert second.text.startswith(first.text)
            assert second.token_ids[: len(first.token_ids)] == first.token_ids
            assert len(second.token_ids) > len(first.token_ids) or after.finished
        assert len(last.outputs[0].token_ids) == 12
        assert last.outputs[0].finish_reason == "length"

        deltas = [output.outputs[0] async for output in llm.generate("The quick", greedy(output_kind=DELTA))]
        assert "".join(delta.text for delta in deltas) == last.outputs[0].text
        assert [token for delta in deltas for token in delta.token_ids] == last.outputs[0].token_ids
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)

        finals = [output async for output in llm.generate("The quick", greedy(output_kind=FINAL))]
        assert len(finals) == 1
        assert finals[0].outputs == last.outputs

    run(program())


def test_several_outputs_of_a_prompt(llm: AsyncLLM, run: Any) -> None:
    async def program() -> None:
        params: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 8, "logprobs": 1}
        last = await whole(llm.generate("fox", SamplingParams(**params)))
        texts, counts = ["", "", ""], [0, 0, 0]
        async for output in llm.generate("fox", SamplingParams(**params, output_kind=DELTA)):
            assert output.outputs
            for one in output.outputs:
                texts[one.index] += one.text
                counts[one.index] += len(one.token_ids)
                assert one.logprobs is not None
                assert len(one.logprobs) == len(one.token_ids)
        assert texts == [one.text for one in last.outputs]
        assert counts == [len(one.token_ids) for one in last.outputs]

    run(program())


def test_stop_strings(llm: AsyncLLM, run: Any) -> None:
    async def program() -> None:
        free = (await whole(llm.generate([5, 6, 7], greedy()))).outputs[0].text
        stop = free[len(free) // 2 :][:2]
        for kind in RequestOutputKind:
            params = greedy(max_tokens=200, stop=stop, output_kind=kind)
            texts = [output.outputs[0] async for output in llm.generate([5, 6, 7], params)]
            text = "".join(one.text for one in texts) if kind is DELTA else texts[-1].text
            assert text == free[: free.index(stop)]
            assert (texts[-1].finish_reason, texts[-1].stop_reason) == ("stop", stop)
        await idle(llm)

    run(program())


def test_chat(llm: AsyncLLM, run: Any) -> None:
    talk = [{"role": "user", "content": "Hello"}]

    async def program() -> None:
        started = [*talk, {"role": "assistant", "content": "I am"}]
        gone_on = llm.chat(started, greedy(), add_generation_prompt=False, continue_final_message=True)
        assert (await whole(gone_on)).prompt.endswith("<|im_start|>assistant\nI am")  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="no role"):
            await whole(llm.chat([{"content": "x"}]))
        answer = await whole(llm.chat(talk, greedy()))
        assert answer.prompt == llm.get_tokenizer().render_chat(talk)
        plain = llm.generate(answer.prompt or "", greedy(), tokenization_kwargs={"add_special_tokens": False})
        assert (await whole(plain)).outputs == answer.outputs

    run(program())


def test_thousands_at_once(llm: AsyncLLM, run: Any) -> None:
    async def one(place: int) -> tuple[int, int]:
        kind = RequestOutputKind(place % 3)
        params = greedy(max_tokens=1 + place % 3, output_kind=kind)
        tokens = 0
        async for output in llm.generate([3 + place % 400, 5], params, request_id=f"r{place}"):
            assert output.request_id == f"r{place}"
            new = len(output.outputs[0].token_ids)
            tokens = tokens + new if kind is DELTA else new
        return place, tokens

    async def program() -> None:
        found = await asyncio.gather(*(one(place) for place in range(2000)))
        assert found == [(place, 1 + place % 3) for place in range(2000)]
        assert llm.get_num_unfinished_requests() == 0
        metrics = {metric.name: metric.value for metric in await llm.get_metrics()}
        assert metrics["vllm:generation_tokens"] >= 3999

    run(program())


def test_ends_before_the_end(llm: AsyncLLM, run: Any) -> None:
    """Leaving the loop, closing the iterator, cancelling the task, abort(): the engine runs none of them any more."""

    async def program() -> None:
        async for _ in llm.generate([5], SamplingParams(**LONG)):
            break
        stream = llm.generate([5], SamplingParams(**LONG))
        await anext(stream)
        await stream.aclose()

        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate([5], SamplingParams(**LONG), "cancelled"):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        streams = [llm.generate([5], SamplingParams(**LONG), f"a{i}") for i in range(3)]
        for one in streams:
            await anext(one)
        await llm.abort("a0")
        await llm.abort(["a1", "nobody", "a2"])
        for one in streams:
            last = await whole(one)
            assert last.finished
            assert last.outputs[0].finish_reason == "abort"
        await idle(llm)
        assert llm.get_num_unfinished_requests() == 0

    run(program())


def test_abort_while_the_prompt_is_tokenised(llm: AsyncLLM, run: Any) -> None:
    async def program() -> None:
        talk = [{"role": "user", "content": "Hello"}]
        task = asyncio.create_task(whole(llm.chat(talk, SamplingParams(**LONG), "early")))
        await asyncio.sleep(0)  # the task has begun; its template is rendered in a thread
        assert llm._streams == {"early": None}
        await llm.abort("early")
        assert (await task).outputs[0].finish_reason == "abort"

    run(program())


def test_a_slow_reader_gets_more_at_once(llm: AsyncLLM, run: Any) -> None:
    async def program() -> None:
        stream = llm.generate([5, 6], greedy(max_tokens=30, output_kind=DELTA))
        first = await anext(stream)
        await idle(llm)  # the engine has ended the request, and nobody has read it
        rest = [output async for output in stream]
        assert len(rest) <= 2
        assert sum(len(one.outputs[0].token_ids) for one in [first, *rest]) == 30

    run(program())


def test_bad_requests(llm: AsyncLLM, run: Any) -> None:
    async def program() -> None:
        for prompt, more, words in (
            ("", {}, "prompt is empty"),
            ("x", {"lora_request": object()}, "lora_request"),
            ("x", {"request_id": 3}, "request_id must be a text"),
            ("x", {"request_id": "a\ud800"}, "request_id has a lone surrogate"),
            (None, {}, "list of integers, got None"),
            ("x", {"tokenization_kwargs": {"truncation": True}}, "truncation"),
            ("x" * 100_000, {}, "characters; this model takes at most 256 tokens"),
        ):
            with pytest.raises(RequestError, match=words):
                await whole(llm.generate(prompt, greedy(), **more))
        stream = llm.generate("x", SamplingParams(**LONG), "mine")
        await anext(stream)
        with pytest.raises(RequestError, match="'mine' is in use"):
            await whole(llm.generate("x", greedy(), "mine"))
        await stream.aclose()
        for _ in range(20):  # a name may be used again at once
            again = llm.generate("x", SamplingParams(**LONG), "mine")
            assert (await anext(again)).request_id == "mine"
            await again.aclose()
        assert (await whole(llm.generate("x", greedy(), "mine"))).finished

    run(program())


def test_calls(llm: AsyncLLM, run: Any) -> None:
    async def program() -> None:
        assert await llm.collective_rpc("add_rank", args=(10,)) == [10]
        with pytest.raises(RemoteCallError, match="--model-impl transformers"):
            await llm.apply_model(lambda model: None)
        with pytest.raises(RemoteCallError, match="no such luck"):
            await llm.collective_rpc("fail")
        assert await llm.reset_prefix_cache()
        await llm.check_health()
        assert [process.name for process in llm.processes()] == ["AsyncLLM", "ForkServer", "EngineCore_DP0"]
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=40)
        assert llm.get_tokenizer() is llm.tokenizer
        assert (llm.is_running, llm.is_stopped, llm.errored, llm.dead_error) == (True, False, False, None)
        assert "running" in repr(llm)

    run(program())


def test_another_loop_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(RuntimeError, match="belongs to the event loop that started it"):
        asyncio.run(whole(llm.generate("x", greedy())))
    failed: list[BaseException] = []

    def other() -> None:
        try:
            asyncio.run(llm.check_health())
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "run_coroutine_threadsafe" in str(failed[0])


# ---------------------------------------------------------------------------------------------------------------- life


def gone(pids: list[int]) -> bool:
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs([p for p in left if p.status() != psutil.STATUS_ZOMBIE], timeout=5)[1]


def test_death_of_a_process(model_path: Path) -> None:
    """Every stream that runs ends with one error that names who died; later requests raise the same."""

    async def program() -> list[int]:
        async with AsyncLLM(model_path, tensor_parallel_size=2, recovery="off", **SMALL) as llm:
            pids = {process.name: process.pid for process in llm.processes()}
            streams = [llm.generate([5, i], SamplingParams(**LONG, output_kind=DELTA)) for i in range(5, 9)]
            for stream in streams:
                await anext(stream)
            os.kill(pids["Worker_TP1"], signal.SIGKILL)
            errors = await asyncio.gather(*(whole(stream) for stream in streams), return_exceptions=True)
            assert all(isinstance(error, EngineDeadError) for error in errors)
            assert all("Worker_TP1" in str(error) and "SIGKILL" in str(error) for error in errors)
            assert (await llm.wait_dead()).role == "Worker_TP1"
            for call in (whole(llm.generate("x", greedy())), llm.check_health(), llm.collective_rpc("x")):
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await call
            assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, True)
            assert "SIGKILL" in str(llm.dead_error)
            assert "dead" in repr(llm)
            return list(pids.values())[1:]

    assert gone(asyncio.run(asyncio.wait_for(program(), LIMIT_S)))


def test_closing_while_streams_run_and_starting_lazily(model_path: Path) -> None:
    async def program() -> list[int]:
        llm = AsyncLLM(model_path, **SMALL)
        assert "new" in repr(llm)
        with pytest.raises(RuntimeError, match="is not started"):
            llm.get_tokenizer()
        # Several first requests make one start.
        outputs = await asyncio.gather(*(whole(llm.generate("x", greedy())) for _ in range(3)))
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        pids = [process.pid for process in llm.processes()[1:]]
        stream = llm.generate([5], SamplingParams(**LONG, output_kind=DELTA))
        await anext(stream)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            await whole(stream)
        with pytest.raises(RuntimeError, match="is closed"):
            await whole(llm.generate("x"))
        await llm.aclose()
        assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, False)
        return pids

    assert gone(asyncio.run(asyncio.wait_for(program(), LIMIT_S)))


def test_the_loop_ends_and_nobody_closes_it(model_path: Path) -> None:
    """No process stays, no descriptor."""

    async def program(keep: list[AsyncLLM]) -> list[int]:
        llm = AsyncLLM(model_path, **SMALL)
        await whole(llm.generate("x", greedy()))
        keep.append(llm)
        return [process.pid for process in llm.processes()[1:]]

    kept: list[AsyncLLM] = []
    pids = asyncio.run(asyncio.wait_for(program(kept), LIMIT_S))
    with pytest.raises(RuntimeError, match=r"which has ended.*asyncio\.run makes a new loop"):
        asyncio.run(whole(kept[0].generate("x")))
    kept.clear()
    gc.collect()
    assert gone(pids)


def test_starts_that_fail(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Did you mean 'max_model_len'"):
        AsyncLLM(model_path, max_model_lem=3)

    async def program() -> None:
        with pytest.raises(ConfigError, match="there is no such folder"):
            await AsyncLLM(tmp_path / "missing", **SMALL).start()
        broken = AsyncLLM(model_path, worker_extension_cls="tests.llm.extension.Broken", **SMALL)
        for _ in range(2):
            with pytest.raises((StartupError, EngineDeadError, ConfigError), match="share load_model"):
                await whole(broken.generate("x"))
        # Cancelled in the middle of the start.
        llm = AsyncLLM(model_path, **SMALL)
        task = asyncio.create_task(llm.__aenter__())
        while not llm.processes():
            await asyncio.wait([task], timeout=0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gone([process.pid for process in llm.processes()[1:]])

    asyncio.run(asyncio.wait_for(program(), LIMIT_S))


def test_two_in_one_loop_and_one_is_collected(llm: AsyncLLM, run: Any, model_path: Path) -> None:
    async def program() -> list[int]:
        other = AsyncLLM(model_path, **SMALL)
        outputs = await asyncio.gather(*(whole(one.generate("The quick", greedy())) for one in (llm, other)))
        assert outputs[0].outputs == outputs[1].outputs
        return [process.pid for process in other.processes()[1:]]

    pids = run(program())
    gc.collect()
    assert gone(pids)
    run(llm.check_health())


def test_what_is_left_when_it_is_closed_is_closed_quietly(model_path: Path) -> None:
    """An iterator that nobody holds is closed by the loop some time later: here while the engine ends."""
    told: list[dict[str, Any]] = []

    async def program() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with AsyncLLM(model_path, **SMALL) as llm:
            async for _ in llm.generate([5], SamplingParams(**LONG)):
                break

    asyncio.run(asyncio.wait_for(program(), LIMIT_S))
    assert not told
