"""What ``serve`` refuses: exit code 2, one sentence, and no process of the engine was started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.errors import ExitCode

from .command import tiny_folder


def refused(folder: Path, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "serve", str(folder), "--port", "0", "--device", "cpu", *flags],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    *before, sentence = done.stderr.splitlines()
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "Traceback" not in done.stderr
    assert "ForkServer" not in done.stderr
    assert all("drumline listens on" in line for line in before), done.stderr
    return sentence


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-tp", "10"], "--tensor-parallel-size 10 is more than the model's 9 query heads"),
        (["--max-model-len", "100000"], "--max-model-len 100000 must be between 2 and the model's 4096"),
        (["--max-model-len", "1"], "max_model_len (--max-model-len) 1 leaves no room for any request"),
        (
            ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "1"],
            "1 must be at least 2 without chunked prefill",
        ),
        (["--worker-cls", "nope:No"], "--worker-cls nope:No: there is no module 'nope'"),
        (["--distributed-executor-backend", "foo"], "must be one of uni, mp"),
        (["--distributed-executor-backend", "json.JSONDecoder"], "must be a subclass of Executor"),
    ],
)
def test_configurations(tmp_path: Path, flags: list[str], words: str) -> None:
    sentence = refused(tiny_folder(tmp_path), "--load-format", "dummy", *flags)
    assert sentence.startswith("drumline serve: error: ")
    assert words in sentence


def test_a_model_that_takes_no_request(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1}))
    assert "the model takes sequences of 1 tokens" in refused(folder, "--load-format", "dummy")


def test_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert "lacks model-1.safetensors, which its index names" in refused(folder)
    (folder / "model-1.safetensors").write_bytes(b"\x40" + bytes(7) + b"{")
    assert "model-1.safetensors cannot be read as safetensors: it is truncated" in refused(folder)
