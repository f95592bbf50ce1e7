"""An engine that dies under running requests and is started again: they end as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from drumline.config import ProcessConfig
from drumline.engine.launch import preload_of
from drumline.engine.protocol import EngineRequest, RequestOutput
from drumline.engine.recovery import Limits
from drumline.errors import DrumlineError, EngineDeadError, RequestError
from drumline.plan.sampling import SamplingParams
from drumline.plan.step import TokenLogprobs

from .poison import POISON
from .processes import Engine, config_for, engine, greedy, kill, prompt, wait_gone

TOKENS = 160
LIMITS = Limits(restarts=3, window_s=600.0, backoff_s=0.1)


def eight(mark: str) -> list[EngineRequest]:
    """Requests with all that depends on what came before: each of these would differ if a token were lost, said twice,
    or not counted."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.5},
        {"temperature": 1.2, "min_tokens": TOKENS - 20, "stop_token_ids": list(range(0, 300, 4))},
        {"temperature": 0.8, "logit_bias": {5: 3.0, 9: -2.0}, "presence_penalty": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]
    return [
        EngineRequest(
            request_id=f"{mark}{number}",
            prompt_token_ids=prompt(number, 5 + 3 * number),
            sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True, **kind),
            seed=number + 7,
            bad_words_ids=[[7], [11, 12], [3, 4]] if number == 7 else [],
        )
        for number, kind in enumerate(kinds)
    ]


class Got:
    """All that one request gave; that nothing is missing and nothing comes twice is checked as it comes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.end: RequestOutput | None = None

    def put(self, output: RequestOutput) -> None:
        assert self.end is None
        assert output.first_index == len(self.tokens)
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        if output.prompt_logprobs:
            assert not self.prompt_logprobs
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.end = output

    def same_as(self, other: Got) -> None:
        assert self.end is not None
        assert other.end is not None
        assert self.tokens == other.tokens
        assert (self.end.finish_reason, self.end.stop_reason) == (other.end.finish_reason, other.end.stop_reason)
        for mine, others in ((self.logprobs, other.logprobs), (self.prompt_logprobs, other.prompt_logprobs)):
            assert len(mine) == len(others)
            for one, two in zip(mine, others, strict=True):
                assert one is not None
                assert two is not None
                assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
                assert len(one.top_ids) == len(two.top_ids)


async def run(
    served: Engine, requests: list[EngineRequest], disturb: Callable[[dict[str, Got]], Any] | None = None
) -> dict[str, Got]:
    """All outputs; ``disturb`` is a coroutine beside them."""
    got = {request.request_id: Got() for request in requests}

    async def consume(request: EngineRequest) -> None:
        async for output in served.client.generate(request):
            got[request.request_id].put(output)

    tasks = [asyncio.create_task(consume(request)) for request in requests]
    if disturb is not None:
        await disturb(got)
    await asyncio.gather(*tasks)
    return got


async def at_least(got: dict[str, Got], tokens: int) -> None:
    """Wait until each request has so many."""
    deadline = time.monotonic() + 40
    while min(len(one.tokens) for one in got.values()) < tokens:
        assert time.monotonic() < deadline, {name: len(one.tokens) for name, one in got.items()}
        await asyncio.sleep(0.002)


async def until_served(served: Engine) -> None:
    deadline = time.monotonic() + 40
    recoveries = served.client.recoveries
    assert recoveries is not None
    while recoveries.active:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def below(pids: list[int], served: Engine) -> list[int]:
    return [process.pid for process in served.client.processes() if process.pid not in (*pids, os.getpid())]


@pytest.mark.parametrize(
    "victims", [("Worker_TP1",), pytest.param(("Worker_TP0", "EngineCore_DP0"), marks=pytest.mark.chaos)], ids="+".join
)
def test_streams_end_as_if_nothing_had_happened(
    tiny: tuple[Path, Any], victims: tuple[str, ...], caplog: pytest.LogCaptureFixture
):
    """Also after two kills, when every request is suspect and tried alone. After one, little is computed again."""

    async def disturb(got: dict[str, Got]) -> None:
        for number, victim in enumerate(victims):
            await at_least(got, 20 + 40 * number)
            assert all(one.end is None for one in got.values())
            old = below([], served)
            kill(served.pid(victim), signal.SIGKILL)
            while not recoveries.active:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                await served.client.call("ping")
            await until_served(served)
            wait_gone([pid for pid in old if pid not in below([], served)], 0.5)
            if not number:
                await at_least(got, 40)
                said = re.search(r"(\d+) tokens of theirs are computed again, (\d+) are there", caplog.text)
                assert said is not None
                assert int(said[1]) <= 8 * 12, "what is not full, and what was not answered"
                assert int(said[2]) >= 8 * 12

    with engine(config_for(tiny[0], tp=2), recovery=LIMITS) as served:
        recoveries = served.client.recoveries
        assert recoveries is not None
        plain = served.run(run(served, eight("a")))
        got = served.run(run(served, eight("b"), disturb))
        for name, one in plain.items():
            got[name.replace("a", "b")].same_as(one)
        assert served.client.failure is None
        assert recoveries.by_cause == {"signal": len(victims)}
        assert sum(recoveries.pauses) == len(victims)
        served.run(served.until_idle())
        again = served.run(run(served, eight("c")))
        for name, one in plain.items():
            again[name.replace("a", "c")].same_as(one)


@pytest.mark.chaos
def test_a_poisonous_request_is_failed_alone(tiny: tuple[Path, Any]):
    config = config_for(tiny[0], tp=2)
    preload = preload_of(config)  # a worker class of one's own is not known to need the kernels
    config = config.with_(process=ProcessConfig(worker_cls="tests.engine.poison:Poisoned", preload=preload))
    bad = greedy("bad", [5, POISON, 6], 20)

    async def disturb(got: dict[str, Got]) -> None:
        await at_least(got, 10)
        ended = await served.outputs(bad)
        assert [one.finish_reason for one in ended] == ["error"]

    with engine(config, recovery=LIMITS) as served:
        plain = served.run(run(served, eight("a")))
        got = served.run(run(served, eight("b"), disturb))
        for name, one in plain.items():
            got[name.replace("a", "b")].same_as(one)
        recoveries = served.client.recoveries
        assert recoveries is not None
        assert (recoveries.poisonous, recoveries.by_cause["signal"]) == (1, 3)
        assert not recoveries.active
        for seed in (1, 2):  # clients try again
            with pytest.raises(DrumlineError, match="not tried again"):
                served.run(served.tokens(msgspec.structs.replace(bad, request_id=f"bad{seed}", seed=seed)))
        assert recoveries.by_cause["signal"] == 3
        # its deaths are not counted: a second one is found just the same
        ended = served.run(served.outputs(greedy("worse", [POISON], 20)))
        assert (ended[-1].finish_reason, recoveries.poisonous) == ("error", 2)
        assert "died 3 times in a row while it computed this request" in ended[-1].message
        assert served.run(served.tokens(greedy("good", [5, 6], 5)))


@pytest.mark.chaos
def test_it_gives_up_after_the_limit(tiny: tuple[Path, Any]):
    async def dead() -> EngineDeadError:
        recoveries = served.client.recoveries
        assert recoveries is not None
        try:
            async for output in served.client.generate(greedy("a", [5, 6, 7], 200, ignore_eos=True)):
                if not output.first_index:
                    kill(served.pid("Worker_TP0"), signal.SIGKILL)
                elif sum(recoveries.by_cause.values()) == 1 and not recoveries.active:
                    kill(served.pid("EngineCore_DP0"), signal.SIGKILL)
        except EngineDeadError as error:
            return error
        raise AssertionError("it did not die")

    config = config_for(tiny[0], tp=2)
    with engine(config, recovery=Limits(restarts=1)) as served:
        error = served.run(dead())
        assert error.report.role == "EngineCore_DP0"
        assert served.client.failure is error.report
        assert served.run(served.client.wait_dead()) is error.report
        with pytest.raises(EngineDeadError):
            served.run(served.tokens(greedy("late", [5])))


def test_a_start_that_fails_again_and_again_is_the_end(tiny: tuple[Path, Any], tmp_path: Path):
    for path in tiny[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())

    with engine(config_for(tmp_path, tp=2), recovery=Limits(restarts=2, backoff_s=0.05)) as served:
        next(tmp_path.glob("*.safetensors")).unlink()
        kill(served.pid("Worker_TP1"), signal.SIGKILL)
        report = served.run(served.client.wait_dead())
        assert "safetensors" in report.text()
        recoveries = served.client.recoveries
        assert recoveries is not None
        assert sum(recoveries.by_cause.values()) == 2
        assert not recoveries.active
        folder = Path(report.log_file).parent
        assert len(list(folder.glob("ForkServer-*.log"))) == 2  # the first one and its spare served all starts


def test_what_comes_and_goes_while_it_recovers(tiny: tuple[Path, Any]):
    """An aborted request is not sent again, a new one waits, a call in flight fails, ids are checked."""

    async def play() -> None:
        running = [served.client.generate(greedy(name, prompt(1, 6), 3000, ignore_eos=True)) for name in ("a", "b")]
        for stream in running:
            await anext(stream)
        kill(served.pid("Worker_TP0"), signal.SIGSTOP)
        call = asyncio.create_task(served.client.call("collective_rpc", "check_health"))
        await asyncio.sleep(0.05)
        kill(served.pid("Worker_TP0"), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await call
        assert recoveries.active
        await served.client.abort(["a"])
        late = asyncio.create_task(served.tokens(greedy("late", prompt(2, 6), 10)))
        dropped = served.client.generate(greedy("dropped", prompt(3, 6), 3000, ignore_eos=True))
        first = asyncio.create_task(anext(dropped))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(RequestError):
            await anext(served.client.generate(greedy("b", [5])))
        assert recoveries.active, "all of this was to happen while it recovers"
        assert len(await late) == 10
        assert await served.client.call("request_ids") == ["b"]
        ends = [output async for output in running[0]]
        assert ends[-1].finish_reason == "abort"
        await running[1].aclose()
        await served.until_idle()

    with engine(config_for(tiny[0], tp=2), recovery=LIMITS) as served:
        recoveries = served.client.recoveries
        assert recoveries is not None
        served.run(play())


def spare_of(pid: int) -> int:
    """The spare that this fork server makes."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                if "ForkServer_spare" in child.cmdline()[0]:
                    return child.pid
        time.sleep(0.01)
    raise AssertionError("there is none")


def test_the_death_of_the_fork_server_costs_no_imports(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A spare takes its place, as often as need be; where that does not answer, a start does. One that dies is
    replaced, unless it did at once."""

    async def kill_it() -> None:
        recoveries = served.client.recoveries
        assert recoveries is not None
        deaths = sum(recoveries.by_cause.values())
        stream = served.client.generate(greedy("a", prompt(1, 6), TOKENS, ignore_eos=True))
        await anext(stream)
        kill(served.pid("ForkServer"), signal.SIGKILL)
        ended = [output async for output in stream]
        assert ended[-1].first_index + len(ended[-1].token_ids) == TOKENS
        while sum(recoveries.by_cause.values()) == deaths or recoveries.active:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await served.tokens(greedy("b", prompt(1, 6), 5))

    with engine(config_for(tiny[0]), recovery=Limits(restarts=9, backoff_s=0.001)) as served:
        for least_s in (0.0, 1000.0):
            monkeypatch.setattr("drumline.engine.launch.LEAST_SPARE_S", least_s)
            kill(spare := spare_of(served.pid("ForkServer")), signal.SIGKILL)
            told = f"(pid {spare}) has ended"
            deadline = time.monotonic() + 5
            while told not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert ("another one is made" in caplog.text.partition(told)[2]) == (not least_s)
            if not least_s:
                assert spare_of(served.pid("ForkServer")) != spare
        kill(served.pid("EngineCore_DP0"), signal.SIGKILL)  # a restart makes one again
        assert served.run(served.tokens(greedy("c", prompt(1, 6), 5)))
        for number in (0, 0, signal.SIGSTOP):
            before = served.pid("ForkServer")
            spare = spare_of(before)
            if number:
                kill(spare, number)
            served.run(kill_it())
            assert (served.pid("ForkServer") == spare) == (not number)
            wait_gone([before, *([spare] if number else [])])
        spare = spare_of(served.pid("ForkServer"))
    wait_gone([spare])


def held_by(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(path.readlink()).split(":")[0])
        except OSError:
            continue
    return sorted(found)


@pytest.mark.chaos
def test_nothing_adds_up_over_recoveries(tiny: tuple[Path, Any]):
    async def once(victim: str) -> list[str]:
        await run(served, eight(victim + str(len(seen))), lambda got: kill_at(got, victim))
        await served.until_idle()
        inside.append([len(held_by(served.pid(name))) for name in ("EngineCore_DP0", "Worker_TP0", "Worker_TP1")])
        deadline = time.monotonic() + 5
        while seen and len(held_by(os.getpid())) > len(seen[0]) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return held_by(os.getpid())

    async def kill_at(got: dict[str, Got], victim: str) -> None:
        await at_least(got, 5)
        pids.extend(below(pids, served))
        kill(served.pid(victim), signal.SIGKILL)

    seen: list[list[str]] = []
    inside: list[list[int]] = []
    pids: list[int] = []
    with engine(config_for(tiny[0], tp=2), recovery=Limits(restarts=9, backoff_s=0.001)) as served:
        for victim in ("Worker_TP1", "EngineCore_DP0", "ForkServer", "Worker_TP0", "EngineCore_DP0", "Worker_TP1"):
            seen.append(served.run(once(victim)))
        assert all(one == seen[0] for one in seen[1:]), seen
        now = below([], served)
        wait_gone([pid for pid in pids if pid not in now])
        assert all(one == inside[0] for one in inside[1:]), inside


@pytest.mark.parametrize("moment_s", [0.0, pytest.param(0.3, marks=pytest.mark.chaos)])
def test_shutdown_while_it_recovers(tiny: tuple[Path, Any], moment_s: float):
    async def play() -> list[int]:
        stream = served.client.generate(greedy("a", prompt(1, 6), 3000, ignore_eos=True))
        await anext(stream)
        kill(served.pid("Worker_TP1"), signal.SIGKILL)
        pids = below([], served)
        await asyncio.sleep(moment_s)
        pids += below(pids, served)
        await served.client.shutdown()
        pids += below(pids, served)
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        return pids

    with engine(config_for(tiny[0], tp=2), recovery=LIMITS) as served:
        wait_gone([pid for pid in served.run(play()) if pid])
