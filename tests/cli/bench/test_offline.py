"""``drumline bench offline`` with a real engine and a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from drumline.cli import bench
from tests.server.command import tiny_folder

FLAGS = "--load-format dummy --kv-cache-memory-bytes 8MiB --log-level warning"


def test_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "found.json"
    flags = f"--num-prompts 3 --random-input-len 20 --random-output-len 6 --repeats 2 --warmup 1 --json {place} {FLAGS}"
    assert bench.main(["offline", str(tiny_folder(tmp_path)), *flags.split()]) == 0
    found = json.loads(place.read_text())
    assert (found["num_prompts"], found["repeats"], found["input_tokens"], found["output_tokens"]) == (3, 2, 60, 18)
    assert len(found["latencies_s"]) == 2
    low, high = sorted(found["latencies_s"])
    assert found["batch_latency_s"] == pytest.approx((low + high) / 2)
    assert found["output_tokens_per_second"] == pytest.approx(18 / found["batch_latency_s"])
    assert found["tokens_per_second"] == pytest.approx(78 / found["batch_latency_s"])
    assert "latency of the batch" in capsys.readouterr().out


async def test_an_interrupt_reports_the_rounds_so_far(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    flags = f"--random-output-len 4 --num-prompts 2 --repeats 100000 --warmup 0 --json {place} {FLAGS}"
    command = [sys.executable, "-m", "drumline.cli.main", "bench", "offline", str(tiny_folder(tmp_path))]
    process = await asyncio.create_subprocess_exec(
        *command,
        *flags.split(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests are a background job
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while b"round 2 of" not in (line := await process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        out, error = await process.communicate()
    assert process.returncode == 130, error
    assert b"latency of the batch" in out
    assert json.loads(place.read_text())["repeats"] >= 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--repeats", "0"], "--repeats"), (["--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size?")],
)
def test_wrong_flags(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        bench.main(["offline", *argv])
    assert e.value.code == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from drumline.cli.main import main

    assert main(["bench", "offline", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
