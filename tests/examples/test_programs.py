"""Examples that use a model, as programs. They run at once: mostly they wait for their processes to start."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.command import Serve

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 110.0


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.terminate()


def finish(running: subprocess.Popen[str], text: str = "") -> str:
    out, err = running.communicate(text, timeout=TIMEOUT_S)
    assert running.returncode == 0, err
    assert "Traceback" not in err
    return out


def test_plain_ones(model_path: Path) -> None:
    arguments = str(model_path), "--tp", "1"
    with (
        started(str(EXAMPLES / "offline.py"), *arguments) as offline,
        started(str(EXAMPLES / "chat.py"), *arguments) as chat,
        started(str(EXAMPLES / "async_llm.py"), *arguments) as online,
    ):
        assert "The capital of France is" in finish(offline)
        assert finish(chat, "hello\n\nand you?\n").count("> ") == 4
        told = finish(online)
        assert "all four in" in told
        assert "stopped at:" in told


def test_sampling_and_pipeline(model_path: Path) -> None:
    arguments = str(model_path), "--tp", "1"
    with (
        started(str(EXAMPLES / "sampling.py"), *arguments) as sampling,
        started(str(EXAMPLES / "pipeline.py"), *arguments, "--layers", "1,1") as pipeline,
    ):
        told = finish(sampling)
        assert "log-probability of the prompt" in told
        assert told.count("beam search") == 3
        told = finish(pipeline)
        parts = re.findall(r"rank (\d): ([0-9.]+) million weights, KV cache of 1 layers", told)
        assert [rank for rank, _ in parts] == ["0", "1"]
        assert "The capital of France is" in told


def test_openai_client(model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    server = Serve(model_path, tmp_path / "log", "-tp", "1", "--max-model-len", "256")
    try:
        url = f"http://127.0.0.1:{server.ready().port()}/v1"
        with started(str(EXAMPLES / "openai_client.py"), url) as client:
            told = finish(client)
        assert "model:" in told
        assert "refused:" in told
        server.process.terminate()
        assert server.end(30) == 0
    finally:
        server.kill()
