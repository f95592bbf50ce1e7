"""Serving with real processes: one engine of two workers with a small KV pool for the whole file."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.engine.client import SyncEngineClient
from drumline.errors import RemoteCallError, RequestError, RPCTimeoutError
from tests.model.equality import Tally, compare_greedy

from .processes import VOCAB, Engine, config_for, cpu_ns, engine, greedy, prompt

BLOCKS = 60
"""Of 4 tokens: enough for two of the longest requests below."""


@pytest.fixture(scope="module")
def served(tiny: tuple[Path, Any]) -> Iterator[Engine]:
    with engine(config_for(tiny[0], tp=2, blocks=BLOCKS, max_num_seqs=16, max_num_batched_tokens=48)) as made:
        yield made


def test_says_what_it_is_and_what_runs(served: Engine):
    info = served.client.info
    assert info is not None
    assert (info.num_blocks, info.block_size, info.vocab_size, info.dtype) == (BLOCKS, 4, VOCAB, "float32")
    assert info.max_model_len == BLOCKS * 4 + 1
    names = [process.name for process in served.client.processes()]
    assert names == ["APIServer_0", "ForkServer", "EngineCore_DP0", "Worker_TP0", "Worker_TP1"]
    assert {process.phase for process in served.client.processes()} == {"ready"}
    assert len({process.pid for process in served.client.processes()}) == 5


def test_tokens_stream_and_equal_those_of_transformers(served: Engine, tiny: tuple[Path, Any]):
    request = greedy("a", prompt(1, 19), 30, logprobs=2)
    outputs = served.run(served.outputs(request))
    tokens = [token for output in outputs for token in output.token_ids]
    assert len(outputs) > 10
    assert [output.first_index for output in outputs] == [
        sum(len(before.token_ids) for before in outputs[:i]) for i in range(len(outputs))
    ]
    assert outputs[-1].finish_reason == "length"
    assert all(output.finish_reason is None for output in outputs[:-1])
    assert all(len(lp.top_ids) == 2 for output in outputs for lp in output.logprobs if lp)
    assert sum(len(output.logprobs) for output in outputs) == 30
    tally = Tally()
    tally.add(compare_greedy(tiny[1], request.prompt_token_ids, tokens))
    tally.check()


def test_32_at_once_with_preemption_equal_those_alone(served: Engine, tiny: tuple[Path, Any]):
    requests = [greedy(f"r{i}", prompt(100 + i, 5 + i % 23), 10 + i % 17) for i in range(32)]
    before = served.client.stats().preemptions

    async def all_at_once() -> list[list[int]]:
        return list(await asyncio.gather(*(served.tokens(request) for request in requests)))

    together = served.run(all_at_once())
    assert served.client.stats().preemptions > before
    served.run(served.client.call("reset_prefix_cache"))
    tally = Tally()
    for request, tokens in zip(requests, together, strict=True):
        assert len(tokens) == request.sampling.max_tokens
        tally.add(compare_greedy(tiny[1], request.prompt_token_ids, tokens), request.request_id)
    tally.check()
    alone = served.run(served.tokens(requests[7]))
    assert alone == together[7]


def test_seeded_sampling_is_the_same_alone_and_among_others(served: Engine):
    def request(name: str) -> Any:
        made = greedy(name, prompt(5, 9), 25)
        made.sampling.temperature, made.sampling.top_p, made.seed = 0.9, 0.9, 12345
        return made

    async def crowd() -> list[int]:
        others = [served.tokens(greedy(f"o{i}", prompt(200 + i, 20), 20)) for i in range(15)]
        return (await asyncio.gather(served.tokens(request("b")), *others))[0]

    alone = served.run(served.tokens(request("a")))
    assert served.run(crowd()) == alone


def test_prefix_is_found_again(served: Engine):
    first = served.run(served.outputs(greedy("a", prompt(9, 21), 3)))
    again = served.run(served.outputs(greedy("b", prompt(9, 21), 3)))
    assert again[-1].num_cached_tokens == 20
    assert first[0].token_ids[0] == again[0].token_ids[0]


def test_closing_an_iterator_frees_its_blocks(served: Engine):
    async def leave() -> None:
        stream = served.client.generate(greedy("a", prompt(3, 30), 200))
        async for output in stream:
            if output.first_index >= 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await served.until_idle()
        assert (await served.client.call("stats"))["kv_blocks_used"] == 0

    served.run(leave())


def test_a_cancelled_consumer_frees_its_blocks(served: Engine):
    async def cancel() -> None:
        began = asyncio.Event()

        async def consume() -> None:
            async for _ in served.client.generate(greedy("a", prompt(3, 30), 200)):
                began.set()

        task = asyncio.create_task(consume())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.until_idle()

    served.run(cancel())


def test_abort_ends_the_iterator(served: Engine):
    async def abort() -> None:
        stream = served.client.generate(greedy("a", prompt(4, 10), 200))
        first = await anext(stream)
        await served.client.abort(["a", "unknown"])
        rest = [output async for output in stream]
        assert rest[-1].finish_reason == "abort"
        assert rest[-1].first_index + len(rest[-1].token_ids) >= len(first.token_ids)
        await served.until_idle()

    served.run(abort())


@pytest.mark.parametrize(
    ("tokens", "text"), [([], "empty"), ([VOCAB], "not in the vocabulary"), ([5] * 241, "at most 240")]
)
def test_a_bad_request_ends_with_an_error_of_its_own(served: Engine, tokens: list[int], text: str):
    outputs = served.run(served.outputs(greedy("bad", tokens)))
    assert [output.finish_reason for output in outputs] == ["error"]
    assert text in outputs[0].message
    assert len(served.run(served.tokens(greedy("good", [5], 2)))) == 2


def test_extreme_parameters_break_no_step(served: Engine):
    request = greedy("extreme", [5], 2, logprobs=2**40, stop_token_ids=[2**31 - 1])
    request.sampling.temperature, request.sampling.top_k, request.sampling.top_p = 2.0, 2**40, 1e-300
    request.seed = -(2**63)
    outputs = served.run(served.outputs(request))
    assert len(outputs[0].logprobs[0].top_ids) == VOCAB
    assert len(served.run(served.tokens(greedy("good", [5], 2)))) == 2


def test_an_id_in_use_is_refused_at_once(served: Engine):
    async def twice() -> None:
        stream = served.client.generate(greedy("a", [5], 50))
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            await anext(served.client.generate(greedy("a", [6], 50)))
        await stream.aclose()  # type: ignore[attr-defined]

    served.run(twice())


def test_calls(served: Engine):
    async def calls() -> None:
        client = served.client
        specs = await client.call("collective_rpc", "get_kv_cache_spec")
        assert [spec["num_kv_heads"] for spec in specs] == [2, 1]
        with pytest.raises(RemoteCallError, match="has no method 'nonsense'"):
            await client.call("collective_rpc", "nonsense")
        with pytest.raises(RPCTimeoutError):
            await client.call("ping", timeout=0.0)
        assert await client.call("ping") == "pong"

    served.run(calls())


def test_a_blocked_loop_does_not_hold_up_the_engine(served: Engine):
    """Nobody reads for a while: the engine finishes its work, and what it gave is all there afterwards."""

    async def block() -> None:
        began = asyncio.Event()

        async def slow(number: int) -> int:
            count = 0
            async for output in served.client.generate(greedy(f"slow{number}", prompt(300 + number, 5), 40)):
                count += len(output.token_ids)
                began.set()
            return count

        tasks = [asyncio.create_task(slow(number)) for number in range(8)]
        await began.wait()
        workers = [served.pid("Worker_TP0"), served.pid("EngineCore_DP0")]
        used, quiet_since, deadline = -1, time.monotonic(), time.monotonic() + 20
        while time.monotonic() - quiet_since < 0.3 and time.monotonic() < deadline:  # blocks the loop on purpose
            now = sum(cpu_ns(pid) for pid in workers)
            if now - used > 2_000_000:
                quiet_since = time.monotonic()
            used = now
            time.sleep(0.05)  # noqa: ASYNC251
        assert time.monotonic() < deadline
        assert served.client.stats().num_running  # as far as this side knows
        assert await asyncio.gather(*tasks) == [40] * 8

    served.run(block())


@pytest.mark.alone
def test_an_idle_engine_sleeps(served: Engine):
    """Engine core, fork server, workers: all of them."""
    served.run(served.until_idle())
    pids = [process.pid for process in served.client.processes() if process.pid != os.getpid()]
    assert len(pids) >= 2
    quietest = []
    for _ in range(3):  # the quietest second of each counts: a wake with cold caches is not what is looked for
        before = [cpu_ns(pid) for pid in pids]
        time.sleep(1.0)
        used = [(cpu_ns(pid) - was) / 1e6 for pid, was in zip(pids, before, strict=True)]
        quietest = [min(pair) for pair in zip(quietest or used, used, strict=True)]
    assert max(quietest) < 0.5, f"ms of CPU in 1 s: {quietest}"


def test_threads_that_wait_at_once_all_get_their_answers(tiny: tuple[Path, Any]):
    """One drains the socket for the others; none may sleep on while its answer is there."""
    with SyncEngineClient(config_for(tiny[0], tp=1)) as client:
        client.start()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                for _ in range(40):
                    assert client.call("ping", timeout=20.0) == "pong"
            except BaseException as error:  # noqa: BLE001 (told to the test)
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert time.monotonic() - began < 30
