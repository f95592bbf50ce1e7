"""LLM and AsyncLLM whose processes die: they are started again, and results are those of a run without the death."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from drumline import LLM, AsyncLLM, SamplingParams
from drumline.engine.front import FrontChannel
from drumline.errors import ConfigError, EngineDeadError, RequestFailedError
from drumline.text.results import RequestOutput
from tests.engine.poison import POISON

from .conftest import SMALL
from .test_programs import wait_gone

LIMIT_S = 60.0
OPTIONS: dict[str, Any] = {**SMALL, "tensor_parallel_size": 2, "recovery_backoff_s": 0.05, "seed": 3}
POISONED: dict[str, Any] = {
    "worker_cls": "tests.engine.poison:Poisoned",
    # A worker class of one's own is not known to need all this, which each worker would import anew.
    "preload": (
        "torch",
        "torch.distributed",
        "transformers.models.llama.modeling_llama",
        "safetensors.torch",
        "drumline.model.worker",
        "drumline.engine.main",
        "drumline.worker.main",
        "drumline.model.kernels.ready",
    ),
}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15], [16], [17, 18]]
FIRST = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def params(stop: str = "") -> list[SamplingParams]:
    """For PROMPTS: all that depends on what came before. The first one ends soon, when the others are half way."""
    long: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True}
    return [
        FIRST,
        SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, **long),
        SamplingParams(temperature=1.0, seed=11, frequency_penalty=0.5, n=2, **long),
        SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, **long),
        SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01, **long),
        SamplingParams(temperature=0, stop=[stop] if stop else None, **long),
    ]


def same(one: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> None:
    for first, second in zip(one, other, strict=True):
        for mine, others in zip(first.outputs, second.outputs, strict=True):
            assert mine.text == others.text
            assert mine.token_ids == others.token_ids
            assert (mine.finish_reason, mine.stop_reason) == (others.finish_reason, others.stop_reason)
            assert len(mine.logprobs or ()) == len(others.logprobs or ())
        assert len(first.prompt_logprobs or ()) == len(second.prompt_logprobs or ())


def pids_of(llm: LLM | AsyncLLM) -> dict[str, int]:
    return {process.name: process.pid for process in llm.processes()[1:]}


def killer(llm: LLM, victim: str) -> type:
    """A progress bar that kills a process when the first prompt is done."""

    class Bar:
        def __init__(self, **_: Any) -> None:
            self.done = False

        def update(self, n: float) -> None:
            if not self.done:
                self.done = True
                os.kill(pids_of(llm)[victim], signal.SIGKILL)

        def close(self) -> None:
            pass

    return Bar


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def llm(model_path: Path) -> Iterator[LLM]:
    """One for each test: what is started again is not what was there before."""
    with LLM(model_path, recovery_restarts=20, **OPTIONS) as made:
        yield made


def seeded(found: list[SamplingParams]) -> list[SamplingParams]:
    for number, one in enumerate(found):
        if one.seed is None:
            one.seed = number
    return found


def test_generate_gives_what_it_would_have_given(llm: LLM) -> None:
    text = llm.generate(PROMPTS, seeded(params()), use_tqdm=False)[-1].outputs[0].text
    stop = text[len(text) // 2 :][:4]
    plain = llm.generate(PROMPTS, seeded(params(stop)), use_tqdm=False)
    assert plain[-1].outputs[0].stop_reason == stop
    victims = ("Worker_TP1", "EngineCore_DP0", "ForkServer")
    for victim in victims:
        old = list(pids_of(llm).values())
        again = llm.generate(PROMPTS, seeded(params(stop)), use_tqdm=killer(llm, victim))
        same(plain, again)
        assert all(output.error is None for output in again)
        wait_gone([pid for pid in old if pid not in pids_of(llm).values()])
    assert llm.recoveries is not None
    assert sum(llm.recoveries.pauses) == len(victims)
    named = {(metric.name, metric.labels.get("cause")): metric.value for metric in llm.get_metrics()}
    assert named["drumline:engine_restarts", "signal"] == len(victims)
    assert named["drumline:engine_pause_seconds", None] > 0
    # generate is left while it recovers: the engine comes back, and has nothing to do
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, seeded(params()), use_tqdm=interrupter(llm))
    same(plain[:1], llm.generate(PROMPTS[:1], FIRST, use_tqdm=False))
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def interrupter(llm: LLM) -> type:
    """A progress bar that kills a worker when the first prompt is done, and has ctrl-C pressed while it recovers."""

    class Bar(killer(llm, "Worker_TP1")):  # type: ignore[misc]
        def update(self, n: float) -> None:
            super().update(n)

            def interrupt() -> None:
                until(lambda: llm.recoveries.active)  # type: ignore[union-attr]
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()

    return Bar


def test_it_recovers_while_nobody_waits(llm: LLM) -> None:
    plain = llm.generate(PROMPTS[:1], FIRST, use_tqdm=False)
    before = pids_of(llm)
    os.kill(before["Worker_TP0"], signal.SIGKILL)
    same(plain, llm.generate(PROMPTS[:1], FIRST, use_tqdm=False))
    between = pids_of(llm)
    assert between["Worker_TP0"] != before["Worker_TP0"]
    os.kill(between["EngineCore_DP0"], signal.SIGKILL)
    until(lambda: llm.recoveries.active)  # type: ignore[union-attr]
    until(lambda: not llm.recoveries.active)  # type: ignore[union-attr]
    assert pids_of(llm)["EngineCore_DP0"] != between["EngineCore_DP0"]
    names = llm.enqueue(PROMPTS[:2], FIRST)
    os.kill(pids_of(llm)["Worker_TP1"], signal.SIGKILL)
    waited = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in waited] == names
    same(plain, waited[:1])


def test_a_poisonous_prompt_fails_alone(model_path: Path) -> None:
    """In a list of prompts too; it is known afterwards, and costs no engine then."""
    with LLM(model_path, **OPTIONS, **POISONED) as llm:
        plain = llm.generate(PROMPTS, seeded(params()), use_tqdm=False)
        prompts = [*PROMPTS[:3], [5, POISON, 6], *PROMPTS[3:]]
        asked = seeded(params())
        outputs = llm.generate(prompts, [*asked[:3], SamplingParams(n=2), *asked[3:]], use_tqdm=False)
        bad = outputs.pop(3)
        same(plain, outputs)
        assert bad.finished
        assert [one.finish_reason for one in bad.outputs] == ["error", "error"]
        assert isinstance(bad.error, RequestFailedError)
        assert bad.error.reason == bad.outputs[0].stop_reason == "engine_died"
        assert "died 3 times in a row" in str(bad.error)
        assert llm.recoveries is not None
        assert (llm.recoveries.poisonous, llm.recoveries.by_cause) == (1, {"signal": 3})
        outputs = llm.generate([[5, POISON, 6], PROMPTS[0]], [SamplingParams(), FIRST], use_tqdm=False)
        assert "not tried again" in str(outputs[0].error)
        same(plain[:1], outputs[1:])
        assert llm.recoveries.by_cause == {"signal": 3}


@pytest.mark.chaos
def test_a_call_into_the_workers_makes_a_death_final(model_path: Path) -> None:
    with LLM(model_path, **OPTIONS) as llm:
        llm.collective_rpc("check_health")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate(PROMPTS, params(), use_tqdm=killer(llm, "Worker_TP1"))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate(PROMPTS, params(), use_tqdm=False)


def test_a_call_in_flight_fails_and_the_engine_comes_back(model_path: Path) -> None:
    with LLM(model_path, recovery="on", **OPTIONS) as llm:
        plain = llm.generate(PROMPTS[:1], FIRST, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.collective_rpc(kill_rank_1)
        same(plain, llm.generate(PROMPTS[:1], FIRST, use_tqdm=False))
        # closed while it recovers
        old = list(pids_of(llm).values())
        os.kill(pids_of(llm)["Worker_TP1"], signal.SIGKILL)
        until(lambda: llm.recoveries.active)  # type: ignore[union-attr]
        llm.close()
        wait_gone([*old, *(pid for pid in pids_of(llm).values() if pid)])


def kill_rank_1(worker: Any) -> None:
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT_S)


def test_text_that_got_between_the_messages(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a library in the engine core writes to a descriptor of another time. Nobody waits for the end of what is
    no message; the engine is started again."""
    doors: list[int] = []
    close_door = FrontChannel.close_door

    def keep(channel: FrontChannel) -> None:
        if channel.door >= 0:
            doors.append(os.dup(channel.door))
        close_door(channel)

    monkeypatch.setattr(FrontChannel, "close_door", keep)
    with LLM(str(model_path), **OPTIONS) as llm:
        before = llm.generate(PROMPTS, FIRST, use_tqdm=False)
        os.write(doors[0], b"a warning about something\n")
        os.close(doors[0])
        same(llm.generate(PROMPTS, FIRST, use_tqdm=False), before)
        assert len(doors) == 2
        os.close(doors[1])


def test_options() -> None:
    with pytest.raises(ConfigError, match="recovery"):
        LLM("x", recovery="sometimes")
    with pytest.raises(ConfigError, match="recovery_restarts"):
        AsyncLLM("x", recovery_restarts=0)
    with pytest.raises(TypeError, match="Did you mean 'recovery_backoff_s'"):
        LLM("x", recovery_backof_s=1)


async def whole(
    llm: AsyncLLM, prompt: list[int], asked: SamplingParams, at: asyncio.Event | None = None
) -> RequestOutput:
    last = None
    async for last in llm.generate({"prompt_token_ids": prompt}, asked):
        if at is not None and len(last.outputs[0].token_ids) > 10:
            at.set()
    assert last is not None
    return last


def test_streams_of_an_async_llm_go_on(model_path: Path) -> None:
    async def program() -> list[int]:
        async with AsyncLLM(model_path, **OPTIONS, **POISONED) as llm:
            plain = await asyncio.gather(*map(lambda *one: whole(llm, *one), PROMPTS, seeded(params())))
            pids = pids_of(llm)
            asked = seeded(params())
            at = asyncio.Event()
            tasks = [
                asyncio.create_task(whole(llm, prompt, one, at)) for prompt, one in zip(PROMPTS, asked, strict=True)
            ]
            await at.wait()
            os.kill(pids["EngineCore_DP0"], signal.SIGKILL)
            same(plain, await asyncio.gather(*tasks))
            assert llm.recoveries is not None
            assert llm.recoveries.by_cause == {"signal": 1}
            assert llm.is_running
            with pytest.raises(RequestFailedError, match="died 3 times") as failed:
                await whole(llm, [5, POISON], FIRST)
            assert failed.value.reason == "engine_died"
            same(plain[:1], [await whole(llm, PROMPTS[0], FIRST)])
            await llm.collective_rpc("check_health")
            os.kill(pids_of(llm)["Worker_TP0"], signal.SIGKILL)
            assert (await llm.wait_dead()).role == "Worker_TP0"
            return [*pids.values(), *pids_of(llm).values()]

    wait_gone(asyncio.run(asyncio.wait_for(program(), 110.0)))
