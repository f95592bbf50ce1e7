"""Pipeline stages behind the engine: several micro-batches in flight, preempted, aborted, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig, ProcessConfig
from drumline.errors import EngineDeadError
from drumline.plan.sampling import SlotSampling
from tests.model.equality import Tally, compare_greedy, compare_sampled

from .processes import Engine, config_for, cpu_ns, engine, greedy, prompt, wait_gone
from .test_death import stream_until_dead

BLOCKS = 60


def staged(folder: Path, tp: int, pp: int, partition: tuple[int, ...] = (), **scheduler: Any) -> EngineConfig:
    config = config_for(folder, tp, BLOCKS, max_num_seqs=16, max_num_batched_tokens=48, **scheduler)
    return config.with_(
        parallel=replace(config.parallel, pipeline_parallel_size=pp, pp_layer_partition=partition),
        process=ProcessConfig(worker_extension_cls="tests.engine.stages:Watched"),
    )


@pytest.fixture(scope="module")
def served(tiny: tuple[Path, Any]) -> Iterator[Engine]:
    """TP 2 x PP 2, with look-ahead: three plans in flight."""
    with engine(staged(tiny[0], 2, 2)) as made:
        yield made


async def all_tokens(served: Engine, requests: list[Any]) -> list[list[int]]:
    return list(await asyncio.gather(*(served.tokens(request) for request in requests)))


def crowd(name: str = "r", count: int = 20) -> list[Any]:
    return [greedy(f"{name}{i}", prompt(100 + i, 5 + i % 23), 10 + i % 17) for i in range(count)]


def check(model: Any, requests: list[Any], found: list[list[int]]) -> None:
    tally = Tally()
    for request, tokens in zip(requests, found, strict=True):
        assert len(tokens) == request.sampling.max_tokens
        tally.add(compare_greedy(model, request.prompt_token_ids, tokens), request.request_id)
    tally.check()


def test_names(served: Engine):
    names = [process.name for process in served.client.processes()]
    assert names[3:] == ["Worker_PP0_TP0", "Worker_PP0_TP1", "Worker_PP1_TP0", "Worker_PP1_TP1"]


def test_many_at_once_with_preemption(served: Engine, tiny: tuple[Path, Any]):
    before = served.client.stats().preemptions
    requests = crowd()
    check(tiny[1], requests, served.run(all_tokens(served, requests)))
    assert served.client.stats().preemptions > before


def test_aborts_while_tokens_are_on_the_way(served: Engine, tiny: tuple[Path, Any]):
    """Clients leave after a few tokens, at every moment of the pipeline; the others' slots are not disturbed."""

    async def leave(number: int) -> None:
        stream = served.client.generate(greedy(f"left{number}", prompt(number, 3 + number), 100))
        async for output in stream:
            if output.first_index >= number % 5:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    async def run() -> list[list[int]]:
        leaving = [asyncio.create_task(leave(number)) for number in range(20)]
        tokens = await all_tokens(served, requests)
        await asyncio.gather(*leaving)
        await served.until_idle()
        assert (await served.client.call("stats"))["kv_blocks_used"] == 0
        return tokens

    requests = crowd("stay")
    check(tiny[1], requests, served.run(run()))


def test_sampling_and_logprobs(served: Engine, tiny: tuple[Path, Any]):
    request = greedy("s", prompt(5, 9), 25, logprobs=2)
    request.sampling.temperature, request.sampling.top_p, request.seed = 0.9, 0.9, 12345
    outputs = served.run(served.outputs(request))
    assert sum(len(output.logprobs) for output in outputs) == 25
    tokens = [token for output in outputs for token in output.token_ids]
    tally = Tally()
    rule = SlotSampling(temperature=0.9, top_p=0.9, seed=12345)
    tally.add(compare_sampled(tiny[1], request.prompt_token_ids, tokens, rule))
    tally.check()


def test_stages_work_at_the_same_time(served: Engine):
    """With stages that take 5 ms longer: of eight requests one stage has some while the other has the others."""

    async def run(count: int) -> tuple[int, int]:
        await served.client.call("collective_rpc", "busy")
        requests = [greedy(f"o{count}-{i}", prompt(i, 4), 20) for i in range(count)]
        await all_tokens(served, requests)
        spans = await served.client.call("collective_rpc", "busy")
        first, last = spans[0], spans[-1]
        overlapping = sum(any(start < end2 and start2 < end for start2, end2 in last) for start, end in first)
        return overlapping, len(first)

    served.run(served.client.call("collective_rpc", "slow_down", [0.005]))
    try:
        alone, steps_alone = served.run(run(1))
        together, steps = served.run(run(8))
    finally:
        served.run(served.client.call("collective_rpc", "slow_down", [0.0]))
    assert steps_alone == 20
    assert alone == 0  # each step of one request needs the token of the one before
    assert steps >= 40
    assert together > steps / 2, (together, steps)


def test_two_micro_batches_are_in_flight_at_once(served: Engine, tiny: tuple[Path, Any], tmp_path: Path):
    """The second stage holds each step until the first has begun the next one: with one in flight it never would."""
    fifos = [str(tmp_path / f"steps{tp}") for tp in range(2)]
    for fifo in fifos:
        os.mkfifo(fifo)

    async def run(count: int, tokens: int) -> int:
        await served.client.call("collective_rpc", "meet", [str(tmp_path / "steps")])
        requests = [greedy(f"m{count}-{i}", prompt(i, 4), tokens) for i in range(count)]
        check(tiny[1], requests, await all_tokens(served, requests))
        return min((await served.client.call("collective_rpc", "part"))[2:])

    assert served.run(run(1, 4)) == 0  # each step of one request needs the token of the one before
    assert served.run(run(4, 20)) >= 20


def test_stages_tell_how_busy_they_are(served: Engine):
    before = served.run(served.client.call("stats"))
    served.run(all_tokens(served, crowd("busy", 8)))
    after = served.run(served.client.call("stats"))
    assert after["active_s"] - before["active_s"] > 0
    assert len(after["stage_busy"]) == len(after["stage_busy_s"]) == 2
    for stage in range(2):
        busy = after["stage_busy_s"][stage] - before["stage_busy_s"][stage]
        assert 0 < busy < after["active_s"] - before["active_s"]
        assert 0 <= after["stage_busy"][stage] <= 1


@pytest.mark.alone
def test_idle_stages_sleep_and_listen_nowhere(served: Engine):
    """No gloo: no listener, no thread of its own, no wakes."""
    served.run(served.until_idle())
    for opened in served.run(served.client.call("collective_rpc", "opened")):
        assert opened["internet"] == 0
        assert not [name for name in opened["threads"] if "gloo" in name]
    pids = [process.pid for process in served.client.processes() if process.pid != os.getpid()]
    quietest: list[float] = []
    for _ in range(3):  # as in test_serving
        before = [cpu_ns(pid) for pid in pids]
        time.sleep(1.0)
        used = [(cpu_ns(pid) - was) / 1e6 for pid, was in zip(pids, before, strict=True)]
        quietest = [min(pair) for pair in zip(quietest or used, used, strict=True)]
    assert max(quietest) < 0.5, f"ms of CPU in 1 s: {quietest}"


@pytest.mark.parametrize(
    ("partition", "victim", "scheduler"),
    [
        pytest.param((1, 1, 1), "Worker_PP1", {}, id="look-ahead", marks=pytest.mark.chaos),
        pytest.param((1, 2), "Worker_PP0", {"async_scheduling": False}, id="in turns"),
    ],
)
def test_death_of_a_stage(tiny: tuple[Path, Any], partition: tuple[int, ...], victim: str, scheduler: dict[str, Any]):
    """After some requests one stage is killed while others stream: a report in under 2 s, and nobody is left."""
    with engine(staged(tiny[0], 1, len(partition), partition, **scheduler)) as served:
        layers = served.run(served.client.call("collective_rpc", "num_layers"))
        assert tuple(layers) == partition
        requests = crowd(count=12)
        check(tiny[1], requests, served.run(all_tokens(served, requests)))
        pids = [process.pid for process in served.client.processes() if process.name != "APIServer_0"]
        error, took = served.run(stream_until_dead(served, victim, signal.SIGKILL))
        assert took < 2.0
        assert (error.report.role, error.report.rank, error.report.type) == (victim, int(victim[-1]), "SIGKILL")
        wait_gone(pids)


def test_a_stage_that_raises(tiny: tuple[Path, Any]):
    """The others wait for it in vain: its exception is what is told, soon, and nobody is left."""
    with engine(staged(tiny[0], 1, 3)) as served:
        pids = [process.pid for process in served.client.processes() if process.name != "APIServer_0"]
        served.run(served.client.call("collective_rpc", "fail_soon", [1, 10]))
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="a stage that cannot go on") as caught:
            served.run(all_tokens(served, crowd(count=4)))
        assert time.monotonic() - began < 5.0
        assert (caught.value.report.role, caught.value.report.phase) == ("Worker_PP1", "execute_model")
        wait_gone(pids)
