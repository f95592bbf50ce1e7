"""``drumline serve`` as a real command, for tests that need all its processes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.text.vocab import byte_level_folder

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 420,
    "hidden_size": 36,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
COMPLETION = "/v1/completions"
LONG = {"prompt": [5, 6, 7], "stream": True, "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
FLAGS = ["-tp", "2", "--load-format", "dummy", "--kv-cache-memory-bytes", "8MiB", "--port", "0"]


def tiny_folder(folder: Path) -> Path:
    """A model's folder without weights."""
    byte_level_folder(folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def wait_for(what: Callable[[], Any], timeout_s: float, name: str) -> Any:
    """Poll until ``what`` gives something true."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"no {name} after {timeout_s} s")
        time.sleep(0.02)


class Serve:
    """One run of the command."""

    def __init__(self, folder: Path, log: Path, *flags: str) -> None:
        self.log = log
        self.began = time.monotonic()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "drumline.cli.main", "serve", str(folder), *FLAGS, *flags],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def port(self) -> int:
        def found() -> str | None:
            match = re.search(r"listens on http://127.0.0.1:(\d+)", self.text)
            if match is None and self.process.poll() is not None:
                raise AssertionError(f"ended early:\n{self.text}")
            return match and match[1]

        return int(wait_for(found, 20, "port"))

    def request(self, method: str, path: str, body: Any = None, timeout: float = 30) -> tuple[int, Any]:
        with self.open(method, path, body, timeout) as answer:
            data = answer.read()
        return answer.status, json.loads(data) if data.startswith(b"{") else data.decode()

    @contextmanager
    def open(self, method: str, path: str, body: Any = None, timeout: float = 30) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def state(self) -> dict[str, Any]:
        return self.request("GET", "/startupz")[1]

    def ready(self, timeout_s: float = 90) -> Serve:
        def check() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"ended early:\n{self.text}")
            return self.request("GET", "/readyz")[0] == 200

        wait_for(check, timeout_s, "ready server")
        return self

    def pid(self, name: str) -> int:
        return next(row["pid"] for row in self.state()["processes"] if row["name"] == name)

    def gauge(self, name: str) -> float:
        text = self.request("GET", "/metrics")[1]
        match = re.search(rf"^(?:vllm|drumline):{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])

    def end(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """For the end of a test that failed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)


class Stream(threading.Thread):
    """A client with a long answer; ``events`` as they came."""

    def __init__(self, server: Serve) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.events: list[dict[str, Any]] = []
        self.start()
        wait_for(lambda: len(self.events) > 2, 30, "tokens")

    def run(self) -> None:
        with self._server.open("POST", COMPLETION, LONG) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))

    def end(self, timeout_s: float = 10) -> dict[str, Any]:
        self.join(timeout_s)
        assert not self.is_alive()
        return self.events[-1]
