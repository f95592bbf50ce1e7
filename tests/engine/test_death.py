"""Failures of every process: who waits learns the root cause in under 2 s, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.engine.client import SyncEngineClient
from drumline.engine.protocol import RequestOutput
from drumline.errors import EngineDeadError, StartupError

from .processes import Engine, config_for, engine, greedy, kill, prompt, wait_gone


async def stream_until_dead(served: Engine, victim: str, number: int) -> tuple[EngineDeadError, float]:
    """Kill a process while two requests stream; the error and how long it took."""
    streams = [served.client.generate(greedy(f"r{i}", prompt(i, 5), 200)) for i in range(2)]
    for stream in streams:
        await anext(stream)
    call = asyncio.create_task(served.client.call("collective_rpc", "check_health"))
    sent = kill(served.pid(victim), number)

    async def consume(stream: Any) -> EngineDeadError:
        with pytest.raises(EngineDeadError) as caught:
            async for _ in stream:
                pass
        return caught.value

    errors = await asyncio.gather(*(consume(stream) for stream in streams))
    took = time.monotonic() - sent
    await asyncio.wait([call])
    assert call.exception() is None or isinstance(call.exception(), EngineDeadError)
    assert (await served.client.wait_dead()).headline() == errors[0].report.headline()
    return errors[0], took


@pytest.mark.parametrize(
    ("victim", "rank"),
    [
        ("Worker_TP1", 1),
        *(pytest.param(name, None, marks=pytest.mark.chaos) for name in ("EngineCore_DP0", "ForkServer")),
    ],
    ids=str,
)
def test_kill_while_streaming(tiny: tuple[Path, Any], victim: str, rank: int | None):
    with engine(config_for(tiny[0], tp=2)) as served:
        pids = [process.pid for process in served.client.processes() if process.name != "APIServer_0"]
        pid = served.pid(victim)
        error, took = served.run(stream_until_dead(served, victim, signal.SIGKILL))
        assert took < 2.0
        report = error.report
        assert (report.role, report.rank, report.pid, report.what, report.type) == (
            victim,
            rank,
            pid,
            "signal",
            "SIGKILL",
        )
        assert victim in str(error)
        with pytest.raises(EngineDeadError):
            served.run(served.tokens(greedy("late", [5])))
        with pytest.raises(EngineDeadError):
            served.run(served.client.call("ping"))
        assert served.client.failure is report
        wait_gone(pids)  # before anybody asked for it


def test_kill_of_an_idle_worker_reaches_a_waiting_program(tiny: tuple[Path, Any]):
    client = SyncEngineClient(config_for(tiny[0], tp=2))
    try:
        client.start()
        pids = [process.pid for process in client.processes() if process.name != "LLM"]
        sent = kill(pids[-1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"Worker_TP1 rank 1 .* was killed by SIGKILL"):
            client.poll(20)
        assert time.monotonic() - sent < 2.0
        with pytest.raises(EngineDeadError):
            client.add(greedy("a", [5]))
        wait_gone(pids)
    finally:
        client.shutdown()


def test_a_start_that_fails_says_why(tiny: tuple[Path, Any], tmp_path: Path):
    (tmp_path / "config.json").write_bytes((tiny[0] / "config.json").read_bytes())
    with engine(config_for(tmp_path, tp=2), started=False) as served:
        with pytest.raises(StartupError, match="safetensors") as caught:
            served.start()
        assert caught.value.report.role.startswith("Worker_")
        assert caught.value.report.rank in (0, 1)
        assert caught.value.report.phase.startswith("load_model")
        assert served.client.failure is not None


def test_a_pool_that_is_too_small_is_refused_at_the_start(tiny: tuple[Path, Any]):
    config = config_for(tiny[0], blocks=2)
    config = config.with_(model=type(config.model)(path=config.model.path, max_model_len=64))
    with engine(config, started=False) as served, pytest.raises(StartupError, match="At most 9 is possible here"):
        served.start()


@pytest.mark.parametrize("victim", ["ForkServer", "EngineCore_DP0"])
def test_kill_during_the_start(tiny: tuple[Path, Any], victim: str):
    async def start_and_kill(served: Engine) -> tuple[StartupError, float]:
        start = asyncio.create_task(served.client.start())
        while not any(p.name == victim and p.pid for p in served.client.processes()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        sent = kill(served.pid(victim), signal.SIGKILL)
        with pytest.raises(StartupError) as caught:
            await start
        return caught.value, time.monotonic() - sent

    with engine(config_for(tiny[0], tp=2), started=False) as served:
        error, took = served.run(start_and_kill(served))
        assert took < 2.0
        assert (error.report.role, error.report.type) == (victim, "SIGKILL")


def test_shutdown_during_the_start(tiny: tuple[Path, Any]):
    async def start_and_stop(served: Engine) -> None:
        start = asyncio.create_task(served.client.start())
        while not any(p.name == "ForkServer" and p.pid for p in served.client.processes()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await served.client.shutdown()
        with pytest.raises(StartupError):
            await start
        assert served.client.failure is None

    with engine(config_for(tiny[0], tp=2), started=False) as served:
        served.run(start_and_stop(served))


PROGRAM = """
import sys, time
from pathlib import Path
from drumline.engine.client import SyncEngineClient
from tests.engine.processes import config_for, greedy
client = SyncEngineClient(config_for(Path(sys.argv[1]), tp=2))
client.start()
client.add(greedy("a", [5], 200))
client.poll(30)
print(*(process.pid for process in client.processes()), flush=True)
time.sleep(60)
"""


def test_kill_of_the_program_itself(tiny: tuple[Path, Any]):
    """A script without a main guard; when it is killed, everything ends, and the survivors say why."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny[0])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert pids[0] == program.pid
        assert len(pids) == 5
        kill(program.pid, signal.SIGKILL)
        wait_gone(pids)
        told = program.stderr.read()
    assert f"LLM (pid {program.pid}) was killed by SIGKILL" in told
    assert told.count("drumline failed") == 1


def run_all(client: SyncEngineClient, *requests: Any) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    left = set(tokens)
    for request in requests:
        client.add(request)
    while left:
        outputs: list[RequestOutput] = client.poll(30)
        assert outputs
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                left.discard(output.request_id)
    return tokens


def test_two_engines_in_one_process_one_after_the_other_and_in_threads(tiny: tuple[Path, Any]):
    """TP 1 without look-ahead, in a thread, while TP 2 with look-ahead runs in another: the same tokens."""

    async def both() -> list[dict[str, list[int]]]:
        def serve(tp: int, look_ahead: bool) -> dict[str, list[int]]:
            config = config_for(tiny[0], tp=tp, async_scheduling=look_ahead, max_num_batched_tokens=7)
            with SyncEngineClient(config) as client:
                client.start()
                assert client.poll(0) == []
                assert client.call("ping") == "pong"
                return run_all(client, *(greedy(f"r{i}", prompt(i, 4 + 3 * i), 12) for i in range(6)))

        return list(await asyncio.gather(asyncio.to_thread(serve, 1, False), asyncio.to_thread(serve, 2, True)))

    first, second = asyncio.run(both())
    assert first == second
