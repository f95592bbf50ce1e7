"""The whole command with all its processes: serving and ending. How it dies is tried in tests/chaos."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline.errors import ExitCode
from drumline.server.sockets import bind
from tests.stopped import stop

from .command import COMPLETION, FLAGS, LONG, Serve, Stream, tiny_folder, wait_for

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    runs: list[Serve] = []

    def start(*flags: str, folder: Path = tiny) -> Serve:
        runs.append(Serve(folder, tmp_path / f"log{len(runs)}", *flags))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def block(server: Serve) -> str:
    """The one report, which is the last thing on the console."""
    rule = "-" * 72
    parts = server.text.split(f"{rule}\n")
    assert len(parts) == 3, server.text
    assert parts[2] == "", server.text
    return parts[1]


@pytest.mark.alone
def test_a_life(serve: Callable[..., Serve], tiny: Path) -> None:
    server = serve("--shutdown-timeout", "0")
    status, state = server.request("GET", "/startupz")
    assert status == 503
    assert state["status"] == "starting"
    phases: dict[str, set[str]] = {}

    def started() -> bool:
        state = server.state()
        for row in state["processes"]:
            phases.setdefault(row["name"], set()).add(row["phase"].partition(" ")[0])
        return bool(state["status"] == "ready")

    wait_for(started, 90, "ready server")
    names = {row["name"] for row in server.state()["processes"]}
    assert names == {"APIServer_0", "ForkServer", "EngineCore_DP0", "Worker_TP0", "Worker_TP1"}
    assert len(phases["ForkServer"]) > 1

    _answers(server)
    _frees_what_clients_left(server)
    _is_idle(server)

    assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    text = server.text
    assert all(name in text for name in names)
    assert "curl http://127.0.0.1:" in text
    assert "the network" not in text  # every listener is on loopback
    listening = {
        connection.laddr.port
        for row in server.state()["processes"]
        for connection in psutil.Process(row["pid"]).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert all(f"127.0.0.1:{port}" in text for port in listening)

    stream = Stream(server)
    server.process.send_signal(signal.SIGTERM)
    assert "shutting down" in stream.end()["error"]["message"]
    assert server.end(5) == ExitCode.OK
    assert "Traceback" not in server.text


def _answers(server: Serve) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer = server.request("POST", CHAT, chat)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 8
    text = answer["choices"][0]["message"]["content"]
    with server.open("POST", CHAT, {**chat, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    status, error = server.request("POST", COMPLETION, {"prompt": [5] * 5000})
    assert status == 400
    assert "at most" in error["error"]["message"]
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 2, "max_tokens": 0}
    echoed = server.request("POST", COMPLETION, body)[1]["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][0] is None
    assert all(value < 0 for value in echoed["token_logprobs"][1:])
    best = {"prompt": [5], "best_of": 3, "temperature": 1, "max_tokens": 4, "ignore_eos": True}
    assert server.request("POST", COMPLETION, best)[1]["usage"]["completion_tokens"] == 12
    assert server.gauge("request_queue_time_seconds_sum") > 0
    assert server.gauge("step_seconds_total") > 0
    assert server.gauge("iteration_tokens_total_sum") > 12


def _frees_what_clients_left(server: Serve) -> None:
    for body in (LONG, {**LONG, "stream": False}, {**LONG, "prompt": [[5], [6], [7]]}):
        with server.open("POST", COMPLETION, LONG) if body["stream"] else _sent(server, body):
            wait_for(lambda: server.gauge("num_requests_running"), 10, "running request")
        wait_for(lambda: not server.gauge("num_requests_running"), 5, "end of the request")
    assert server.gauge("num_requests_waiting") == 0


def _sent(server: Serve, body: dict[str, Any]) -> Any:
    """A request whose answer is not waited for."""
    import contextlib
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port(), timeout=30)
    connection.request("POST", COMPLETION, json.dumps(body), {"content-type": "application/json"})
    return contextlib.closing(connection)


def _is_idle(server: Serve) -> None:
    """In 3 s nobody uses more than a clock tick or two (10 ms each)."""
    processes = [psutil.Process(row["pid"]) for row in server.state()["processes"]]
    time.sleep(0.5)
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(3)
    used = [sum(process.cpu_times()[:2]) - was for process, was in zip(processes, before, strict=True)]
    assert max(used) <= 0.02, used


@pytest.mark.parametrize(
    ("number", "code", "moment"),
    [(signal.SIGINT, ExitCode.INTERRUPTED, "at once"), (signal.SIGTERM, ExitCode.OK, "while starting")],
)
def test_a_signal_during_the_start(serve: Callable[..., Serve], number: int, code: int, moment: str) -> None:
    server = serve()
    server.port()
    if moment == "while starting":
        wait_for(lambda: any(r["name"] == "ForkServer" for r in server.state()["processes"]), 20, "fork server")
    server.process.send_signal(number)
    assert server.end(5) == code
    assert "Traceback" not in server.text


def test_a_start_that_fails(serve: Callable[..., Serve]) -> None:
    server = serve("--worker-cls", "tests.server.odd_workers:Broken")
    assert server.end(90) == ExitCode.START_FAILED
    report = block(server)
    assert "Worker" in report
    assert "no such device here" in report
    assert server.text.count("no such device here") == report.count("no such device here")


def test_the_second_signal_ends_everything_at_once(serve: Callable[..., Serve]) -> None:
    server = serve()
    wait_for(lambda: any(row["name"] == "ForkServer" for row in server.state()["processes"]), 20, "fork server")
    psutil.Process(server.pid("ForkServer")).suspend()
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM" in server.text, 5, "note of the signal")
    server.process.send_signal(signal.SIGTERM)
    assert server.end(1) == ExitCode.INTERRUPTED


def test_a_port_in_use(serve: Callable[..., Serve]) -> None:
    (taken,) = bind("127.0.0.1", 0)
    with taken:
        server = serve("--port", str(taken.getsockname()[1]))
        assert server.end(10) == ExitCode.USAGE
    assert "already in use" in server.text
    assert server.text.count("\n") == 1


def test_a_tokenizer_that_cannot_be_used(serve: Callable[..., Serve], tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    server = serve(folder=folder)
    assert server.end(10) == ExitCode.USAGE
    assert "tokenizer.json" in server.text
    assert "Traceback" not in server.text


def test_no_such_model(serve: Callable[..., Serve]) -> None:
    server = serve(folder=Path("/no/such/folder"))
    assert server.end(10) == ExitCode.USAGE
    assert "/no/such/folder" in server.text
    assert "Traceback" not in server.text


def test_the_second_signal_spares_what_a_shell_had_started(tiny: Path, tmp_path: Path) -> None:
    """``exec`` makes the shell's own children children of the server."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "drumline.cli.main", "serve", str(tiny), *FLAGS]
    with log.open("wb") as console:
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'sleep 300 & echo "shell $!"; exec "$@"', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
    sleeper = None
    try:
        wait_for(lambda: b"ForkServer: " in log.read_bytes(), 30, "fork server")
        found = log.read_text()
        sleeper = psutil.Process(int(found.partition("shell ")[2].split()[0]))
        ours = [child for child in psutil.Process(process.pid).children(recursive=True) if child != sleeper]
        assert sleeper.ppid() == process.pid
        assert ours
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)  # two at once are one
        assert process.wait(5) == ExitCode.INTERRUPTED
        assert not psutil.wait_procs(ours, 5)[1]
        assert sleeper.status() == psutil.STATUS_SLEEPING
    finally:
        if sleeper is not None:
            sleeper.kill()
        if process.poll() is None:
            process.kill()
            process.wait(10)


# ------------------------------------------------------------------------------------------------ consoles of all kinds


class Console:
    """The command with a pipe as its console, or with what a shell makes of its standard descriptors."""

    def __init__(self, folder: Path, *, full: bool = False, redirect: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        if full:
            self.fill()
        command = [sys.executable, "-m", "drumline.cli.main", "serve", str(folder), *FLAGS, "--port", str(self.port)]
        command += ["--recovery", "off"]
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
        )
        os.close(write)

    def fill(self) -> None:
        """Nobody reads any more."""
        fd = os.open(f"/proc/self/fd/{self.read}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, b"x")
        os.close(fd)

    def read_until(self, text: bytes) -> None:
        seen = b""
        while text not in seen:
            data = os.read(self.read, 4096)
            assert data, seen
            seen += data

    def close_reader(self) -> None:
        os.close(self.read)
        self.read = -1

    def pids(self) -> dict[str, int]:
        """All processes of the server, once it is ready."""
        import http.client

        def state() -> Any:
            assert self.process.poll() is None
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/startupz")
                found = json.loads(connection.getresponse().read())
            except OSError:
                return None
            finally:
                connection.close()
            return found if found["status"] == "ready" else None

        return {row["name"]: row["pid"] for row in wait_for(state, 60, "ready server")["processes"]}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self.read >= 0:
            self.close_reader()


@pytest.fixture
def on_console(tiny: Path) -> Iterator[Callable[..., Console]]:
    runs: list[Console] = []

    def start(**options: Any) -> Console:
        runs.append(Console(tiny, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("gone", "what"),
    [
        (False, "SIGTERM"),
        *(
            pytest.param(*one, marks=pytest.mark.chaos)
            for one in ((False, "kill"), (False, "two SIGINT"), (True, "kill"))
        ),
    ],
)
def test_a_console_that_nobody_reads_any_more(on_console: Callable[..., Console], gone: bool, what: str) -> None:
    run = on_console()
    run.read_until(b"curl http")
    pids = run.pids()
    if gone:
        run.close_reader()
    else:
        run.fill()
    if what == "kill":
        os.kill(pids["Worker_TP1"], signal.SIGKILL)
        assert run.process.wait(8) == ExitCode.WORKER_DIED
    elif what == "SIGTERM":
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(5) == ExitCode.OK
    else:
        stop(pids["ForkServer"])
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals at once are one
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(2) == ExitCode.INTERRUPTED
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()), 5, "end of all processes")


def test_a_console_that_was_never_read(on_console: Callable[..., Console]) -> None:
    run = on_console(full=True)
    run.pids()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(5) == ExitCode.OK


@pytest.mark.parametrize("redirect", ["<&- >&- 2>&-", pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.chaos)])
def test_no_console_at_all(on_console: Callable[..., Console], redirect: str) -> None:
    run = on_console(redirect=redirect)
    pids = run.pids()
    if ">&-" in redirect:
        for number in range(3):
            assert Path(f"/proc/{pids['APIServer_0']}/fd/{number}").readlink() == Path(os.devnull)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(5) == ExitCode.OK


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.OK)])
@pytest.mark.parametrize("module", ["drumline.cli.args", "drumline.server.run"])
def test_a_signal_while_the_command_imports(number: int, code: ExitCode, module: str) -> None:
    script = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Interrupt())
from drumline.cli.main import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script, "serve"], capture_output=True, timeout=20, check=False)
    assert done.returncode == code
    assert done.stderr == b""
