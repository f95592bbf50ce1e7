"""Servers that benchmarks start and end: `drumline serve` and `vllm serve`, each a tree of processes.

Both get one compute thread a worker and the same KV pool a rank. A server that has ended leaves nothing: its tree is
killed where it does not end by itself, its temporary folder is removed, and so are the shared-memory files that it had
mapped.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

MODEL_NAME = "m"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """CPU time of a tree so far."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class ForeignLoad:
    """How many cores others keep busy meanwhile: all but this process and what it has started."""

    def __init__(self) -> None:
        self._began = time.monotonic(), self._busy(), self._own()

    def cores(self) -> float:
        """Since this object was made."""
        began, busy, own = self._began
        foreign = (self._busy() - busy) - (self._own() - own)
        return max(0.0, foreign / (time.monotonic() - began))

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return float(times.user + times.nice + times.system + times.irq + times.softirq)

    @staticmethod
    def _own() -> float:
        ended = os.times()
        return cpu_seconds(os.getpid()) + ended.children_user + ended.children_system


def about_machine() -> str:
    """What figures should be quoted with."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")]
    return ", ".join(
        [
            f"{len(os.sched_getaffinity(0))} cores ({names[0] if names else platform.processor()})",
            f"load {os.getloadavg()[0]:.1f}",
            f"{platform.system()} {platform.release()}",
            f"Python {platform.python_version()}",
            *(f"{name} {found}" for name in ("torch", "transformers") if (found := _version(name))),
        ]
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def drumline_command(model: str, tp: int, dtype: str, port: int, kv_mib: int, *more: str) -> list[str]:
    kv = ["--kv-cache-memory-bytes", str(kv_mib << 20)]
    return [sys.executable, "-m", "drumline", "serve", model, *_common(tp, dtype, port), *kv, *more]


def vllm_command(vllm: str, model: str, tp: int, dtype: str, port: int, *more: str) -> list[str]:
    return [vllm, "serve", model, *_common(tp, dtype, port), "--enforce-eager", *more]


def _common(tp: int, dtype: str, port: int) -> list[str]:
    flags = ["--tensor-parallel-size", str(tp), "--dtype", dtype, "--port", str(port), "--host", "127.0.0.1"]
    return [*flags, "--max-model-len", "2048", "--served-model-name", MODEL_NAME]


def vllm_env(vllm: str, kv_mib: int, bind: str = "nobind") -> dict[str, str]:
    """vLLM takes whole GiB."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_mib // 1024)),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{Path(vllm).parent}:{os.environ['PATH']}",
    }


class Tree:
    """A running command and all that it starts, in a session and a temporary folder of its own. ``with`` ends it."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path, fds: Sequence[int] = ()) -> None:
        self.name = name
        self.log = log
        self._folder = Path(tempfile.mkdtemp(prefix="drumline-bench-"))
        self._shared: set[Path] = set()
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(self._folder)}
        self.started = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **own, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=fds,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def note_shared_memory(self) -> None:
        """Files in /dev/shm that the tree has mapped: what a tree that is killed leaves there."""
        for process in tree(self.process.pid):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    path = line.partition("/dev/shm/")
                    if path[1] and not path[2].endswith("(deleted)"):
                        self._shared.add(Path("/dev/shm") / path[2])

    def _session(self) -> list[psutil.Process]:
        """All that live of what the command started, orphans too: it began a session of its own."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """Ask, wait, kill, clean up."""
        if self.process.poll() is None:
            self.note_shared_memory()
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        deadline = time.monotonic() + 10
        while (left := self._session()) and time.monotonic() < deadline:
            for process in left:  # some may be starting others
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._shared:
            path.unlink(missing_ok=True)


class Server(Tree):
    """A running server."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, command, env, log)

    def wait_ready(self, limit_s: float = 300.0) -> float:
        """Seconds from the command to the first 200 of /health. SystemExit if it ends or takes longer."""
        path = "/readyz" if self.name.startswith("drumline") else "/health"
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self.process.returncode}: see {self.log}")
            if time.monotonic() - self.started > limit_s:
                raise SystemExit(f"{self.name} is not ready after {limit_s:g} s: see {self.log}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(self.url + path, timeout=5).close()
                self.note_shared_memory()
                return time.monotonic() - self.started
            time.sleep(0.1)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the script as ctrl-C does: servers too."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
