"""Every exit code that can happen here, of real commands.

Of ``serve``: 0 and 130 are in test_drain, test_processes and tests/chaos, 3 in test_processes, 4 in tests/chaos.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.errors import (
    ConfigError,
    EngineDeadError,
    ExecutorFailedError,
    ExitCode,
    FailureReport,
    StartupError,
)

from .command import COMPLETION, LONG, Serve, tiny_folder
from .peer import Served

ROOT = Path(__file__).parents[2]


def test_the_readme_has_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [(str(int(code)), code.meaning) for code in ExitCode]


def test_codes_are_distinct_and_exceptions_know_theirs() -> None:
    assert len({int(code) for code in ExitCode}) == len(ExitCode.__members__)
    hang = FailureReport(role="Worker_TP1", what="hang")
    died = FailureReport(role="Worker_TP1", what="signal", type="SIGKILL")
    ours = FailureReport(role="EngineCore_DP0", what="exception", type="TypeError")
    node = FailureReport(role="Worker_TP1", what="node lost")
    found = [error(report).exit_code for error in (EngineDeadError, ExecutorFailedError) for report in (hang, died)]
    assert found == [ExitCode.STALLED, ExitCode.WORKER_DIED] * 2
    assert (EngineDeadError(ours).exit_code, EngineDeadError(node).exit_code) == (
        ExitCode.INTERNAL,
        ExitCode.NODE_LOST,
    )
    assert StartupError(hang).exit_code == ExitCode.START_FAILED
    assert ConfigError("x").exit_code == ExitCode.USAGE


# ---------------------------------------------------------------------------------------------------------------- serve


@pytest.mark.parametrize("files", [14, 16, 24])
def test_too_few_open_files(tiny: Path, files: int) -> None:
    """At whatever moment they do not suffice."""
    command = f"ulimit -n {files}; exec {sys.executable} -m drumline serve {tiny} --load-format dummy --port 0"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.START_FAILED, done.stderr
    assert "Traceback" not in done.stderr
    assert "ulimit -n" in done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    runs: list[Serve] = []

    def start(*flags: str) -> Serve:
        runs.append(Serve(tiny, tmp_path / f"log{len(runs)}", *flags))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--no-such-flag"], ExitCode.USAGE, "unknown flag --no-such-flag"),
        (["-tp", "10"], ExitCode.USAGE, "error: "),
    ],
)
def test_a_server_that_is_refused(serve: Callable[..., Serve], flags: list[str], code: ExitCode, said: str) -> None:
    server = serve(*flags)
    assert server.end(20) == code
    assert said in server.text


@pytest.mark.parametrize(
    ("worker", "size", "code", "said"),
    [
        pytest.param("Stuck", "2", ExitCode.STALLED, "gave no answer within 1 s", marks=pytest.mark.chaos),
        ("Stuck", "1", ExitCode.STALLED, "has not ended execute_model within 1 s"),
        ("Garbage", "1", ExitCode.INTERNAL, "EngineCore_DP0"),
    ],
)
def test_a_server_that_breaks(serve: Callable[..., Serve], worker: str, size: str, code: ExitCode, said: str) -> None:
    flags = ["-tp", size, "--worker-cls", f"tests.server.odd_workers:{worker}", "--execute-model-timeout", "1"]
    flags += ["--recovery", "off"]
    server = serve(*flags).ready()
    with server.open("POST", COMPLETION, LONG) as answer:
        assert answer.status == 503
        assert b"The engine died" in answer.read()
    assert server.end(15) == code
    assert said in server.text
    assert server.text.count("drumline failed") == 1


# ------------------------------------------------------------------------------------------------------- chat and bench


def command(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "drumline.cli.main", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["chat", "http://127.0.0.1:9", "-m", "hello"], ExitCode.FAILED),
        (["chat", "--no-such-flag"], ExitCode.USAGE),
        (["bench", "serve", "http://127.0.0.1:9"], ExitCode.FAILED),
        (["bench", "no-such-command"], ExitCode.USAGE),
        (["plan", "-tp", "0"], ExitCode.USAGE),
        (["plan", "-tp", "2"], ExitCode.OK),
        (["no-such-command"], ExitCode.USAGE),
    ],
)
def test_other_commands(argv: list[str], code: ExitCode) -> None:
    with command(*argv) as running:
        _, error = running.communicate(timeout=60)
    assert running.returncode == code, error
    assert "Traceback" not in error


@pytest.mark.parametrize("how", ["answered", "ctrl-C", "SIGTERM", "the server breaks"])
async def test_chat(server: Served, how: str) -> None:
    if how != "answered":
        server.engine.pause_s = 0.05
    argv = ["chat", server.url, "-m", "hello", "--max-tokens", "4" if how == "answered" else "200"]
    with command(*argv) as running:
        outcome = asyncio.create_task(asyncio.to_thread(running.communicate, timeout=60))
        if how != "answered":
            await server.engine.until(1)
            await asyncio.sleep(0.3)  # tokens come
        if how == "the server breaks":
            server.engine.die()
        elif how != "answered":
            running.send_signal(signal.SIGINT if how == "ctrl-C" else signal.SIGTERM)
        _, error = await outcome
    codes = {"answered": ExitCode.OK, "ctrl-C": ExitCode.INTERRUPTED, "SIGTERM": -signal.SIGTERM}
    assert running.returncode == codes.get(how, ExitCode.FAILED), error
    assert "Traceback" not in error
