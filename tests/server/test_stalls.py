"""A server whose worker stands still: what probes, clients and the console see; and what operators may ask for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline.errors import ExitCode
from tests.stopped import stop

from .command import COMPLETION, Serve, Stream, tiny_folder, wait_for

STALL_S = 4.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    runs: list[Serve] = []

    def start(*flags: str) -> Serve:
        common = ["--stall-timeout", str(STALL_S), "--recovery", "off", "--log-dir", str(tmp_path / "logs")]
        runs.append(Serve(tiny, tmp_path / f"log{len(runs)}", *common, *flags).ready())
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def readiness(server: Serve) -> tuple[int, str]:
    status, body = server.request("GET", "/readyz")
    return status, body["error"]["message"] if "error" in body else ""


def test_a_worker_that_is_stopped_in_a_step(serve: Callable[..., Serve], tmp_path: Path) -> None:
    server = serve()
    stopped = server.pid("Worker_TP1")
    stream = Stream(server)
    stop(stopped)
    began = time.monotonic()
    said = f"rank 1 (Worker_TP1, pid {stopped}, stopped (T))"
    wait_for(lambda: said in readiness(server)[1], STALL_S, "503")
    assert time.monotonic() - began < STALL_S
    assert server.request("GET", "/livez")[0] == 200
    assert "no progress for" in stream.end()["error"]["message"]
    assert STALL_S - 0.5 < time.monotonic() - began < STALL_S + 2.0
    assert server.end(5) == ExitCode.STALLED
    report = server.text.rpartition("drumline failed: ")[2]
    assert report.startswith(f"Worker_TP1 rank 1 (pid {stopped}) hangs: no progress for 4.")
    assert "during execute_model (step " in report
    assert "is stopped (T)" in report
    assert "waits in all_" in report  # rank 0 does, for rank 1
    assert report.count("\n") < 25
    (file,) = (tmp_path / "logs").glob("hang-*.txt")
    assert str(file) in report
    stacks = file.read_text()
    assert "no stack: state T" in stacks
    assert stacks.count("most recent call first") >= 2  # of rank 0's threads


@pytest.mark.chaos
def test_a_worker_that_goes_on_in_time(serve: Callable[..., Serve]) -> None:
    server = serve()
    stopped = server.pid("Worker_TP0")
    stream = Stream(server)
    stop(stopped)
    wait_for(lambda: readiness(server)[0] == 503, STALL_S, "503")
    os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: readiness(server)[0] == 200, 2, "200")
    count = len(stream.events)
    wait_for(lambda: len(stream.events) > count + 10, 10, "more tokens")
    assert server.process.poll() is None
    assert "drumline failed" not in server.text


@pytest.mark.parametrize("victim", ["Worker_TP1", pytest.param("EngineCore_DP0", marks=pytest.mark.chaos)])
def test_an_idle_server_with_a_stopped_process(serve: Callable[..., Serve], victim: str) -> None:
    """Probes say so at once; but they are no work, so nothing is outstanding and nobody hangs."""
    server = serve()
    pid = server.pid(victim)
    stop(pid)
    assert readiness(server) == (503, f"The engine stands still: {victim} (pid {pid}) is stopped (T)")
    os.kill(pid, signal.SIGCONT)
    assert readiness(server)[0] == 200
    stop(pid)
    until = time.monotonic() + 1.5 * STALL_S
    while time.monotonic() < until:
        assert readiness(server)[0] == 503
        time.sleep(0.2)
    assert server.process.poll() is None
    if victim != "Worker_TP1":
        return  # what a request finds then is tried below
    body = {"prompt": [5, 6, 7], "max_tokens": 4}
    status, answer = server.request("POST", COMPLETION, body)
    assert status == 503
    assert "hangs" in answer["error"]["message"]
    assert server.end(5) == ExitCode.STALLED


@pytest.mark.parametrize("victim", ["Worker_TP1", pytest.param("EngineCore_DP0", marks=pytest.mark.chaos)])
def test_a_hang_is_recovered_from(serve: Callable[..., Serve], tmp_path: Path, victim: str) -> None:
    server = serve("--recovery", "on")
    body = {"prompt": [5, 6, 7], "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    text = server.request("POST", COMPLETION, body, 60)[1]["choices"][0]["text"]
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(server.request("POST", COMPLETION, body, 90)))
    asking.start()
    wait_for(lambda: server.gauge("num_requests_running"), 10, "running request")
    stopped = server.pid(victim)
    stop(stopped)
    asking.join(90)
    status, answer = answers[0]
    assert status == 200, answer
    assert answer["choices"][0]["text"] == text
    assert server.process.poll() is None
    assert server.pid(victim) != stopped
    assert not psutil.pid_exists(stopped)
    wait_for(lambda: readiness(server)[0] == 200, 5, "200")
    assert f"(pid {stopped}) hangs: no " in server.text
    assert len(list((tmp_path / "logs").glob("hang-*.txt"))) == 1


NAMES = {"APIServer_0", "ForkServer", "EngineCore_DP0", "Worker_TP0", "Worker_TP1"}


def check_report(found: dict[str, Any]) -> None:
    by_name = {process["name"]: process for process in found["processes"]}
    assert by_name.keys() == NAMES
    for name in NAMES - {"ForkServer"}:
        assert "most recent call first" in by_name[name]["stacks"], name
        assert by_name[name]["threads"]
    assert "step" in by_name["EngineCore_DP0"]["doing"]
    assert by_name["Worker_TP1"]["collectives"]
    assert found["odd"] == []


def test_reports_of_a_healthy_server(serve: Callable[..., Serve], tmp_path: Path) -> None:
    server = serve()
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    text = server.request("POST", COMPLETION, body)[1]["choices"][0]["text"]
    check_report(server.request("GET", "/debug/report")[1])  # idle
    stream = Stream(server)
    check_report(server.request("GET", "/debug/report")[1])  # in the middle of steps
    assert server.request("POST", COMPLETION, body)[1]["choices"][0]["text"] == text
    server.process.send_signal(signal.SIGUSR1)
    (file,) = wait_for(lambda: list((tmp_path / "logs").glob("report-*.txt")), 10, "report")
    wait_for(lambda: str(file) in server.text, 5, "its name on the console")
    written = file.read_text()
    assert all(f"==== {name} (" in written for name in NAMES)
    count = len(stream.events)
    wait_for(lambda: len(stream.events) > count, 10, "more tokens")
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.end(10) == ExitCode.INTERRUPTED


def doctor(*flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "drumline.cli.main", "doctor", "--live", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_doctor_looks_at_a_running_server(serve: Callable[..., Serve]) -> None:
    server = serve()
    stream = Stream(server)
    url = f"http://127.0.0.1:{server.port()}"
    code, text = doctor("--url", url, "--json")
    assert code == ExitCode.OK
    check_report(json.loads(text))
    worker = server.pid("Worker_TP1")
    for pid in (server.process.pid, worker):  # any process of it will do
        code, text = doctor("--pid", str(pid))
        assert code == ExitCode.OK
        assert all(f"==== {name} (" in text for name in NAMES)
    count = len(stream.events)
    wait_for(lambda: len(stream.events) > count, 10, "more tokens")
    stop(worker)
    wait_for(lambda: readiness(server)[0] == 503, STALL_S, "503")
    code, text = doctor("--url", url)
    assert code == ExitCode.STALLED
    assert f"rank 1 (Worker_TP1, pid {worker}) is stopped (T)" in text
    assert server.end(STALL_S + 5) == ExitCode.STALLED


@pytest.mark.chaos
def test_the_doctor_looks_at_a_server_that_does_not_answer(serve: Callable[..., Serve]) -> None:
    server = serve()
    core = server.pid("EngineCore_DP0")
    stop(core)
    code, text = doctor("--pid", str(server.process.pid))
    assert code == ExitCode.OK
    assert f"EngineCore_DP0 (pid {core}) does not answer" in text
    assert "no stack: state T" in text
    os.kill(core, signal.SIGCONT)
    assert server.request("POST", COMPLETION, {"prompt": [5], "max_tokens": 2})[0] == 200
    assert server.process.poll() is None


@pytest.mark.chaos
def test_the_doctor_looks_at_an_api_server_that_is_stopped(serve: Callable[..., Serve]) -> None:
    server = serve()
    port, pid = server.port(), server.process.pid
    stop(pid)
    code, text = doctor("--url", f"http://127.0.0.1:{port}")
    assert code == ExitCode.START_FAILED
    assert "has said nothing for 8 s" in text
    code, text = doctor("--pid", str(pid))
    assert f"APIServer_0 (pid {pid}) is stopped (T)" in text
    os.kill(pid, signal.SIGCONT)


@pytest.mark.chaos
def test_an_engine_core_that_is_stopped(serve: Callable[..., Serve]) -> None:
    server = serve()
    stream = Stream(server)
    core = server.pid("EngineCore_DP0")
    stop(core)
    wait_for(lambda: readiness(server)[0] == 503, STALL_S, "503")
    os.kill(core, signal.SIGCONT)
    wait_for(lambda: readiness(server)[0] == 200, 3, "200")
    count = len(stream.events)
    wait_for(lambda: len(stream.events) > count + 10, 10, "more tokens")
    stop(core)
    began = time.monotonic()
    assert "hangs: no sign of progress" in stream.end()["error"]["message"]
    assert STALL_S - 0.5 < time.monotonic() - began < STALL_S + 2.0
    assert server.end(5) == ExitCode.STALLED
    report = server.text.rpartition("drumline failed: ")[2]
    assert report.startswith(f"EngineCore_DP0 (pid {core}) hangs: ")
    assert "stopped (T)" in report


@pytest.mark.chaos
def test_an_engine_core_in_an_endless_loop(serve: Callable[..., Serve]) -> None:
    server = serve("--distributed-executor-backend", "tests.server.wedged:Wedged")
    began = time.monotonic()
    status, answer = server.request("POST", COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 4})
    assert STALL_S <= time.monotonic() - began < STALL_S + 2.5
    assert status == 503
    assert "hangs: no sign of progress" in answer["error"]["message"]
    assert server.end(5) == ExitCode.STALLED
    assert "in execute_model" in server.text.rpartition("drumline failed: ")[2]


@pytest.mark.chaos
def test_a_server_of_one_process_that_stands_still(serve: Callable[..., Serve]) -> None:
    server = serve("-tp", "1", "--worker-cls", "tests.server.test_stalls:Stuck")
    began = time.monotonic()
    status, answer = server.request("POST", COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 4})
    assert time.monotonic() - began < STALL_S + 2.0
    assert status == 503
    assert "hangs" in answer["error"]["message"]
    assert server.end(5) == ExitCode.STALLED
    assert "hang-" in server.text.rpartition("drumline failed: ")[2]


def __getattr__(name: str) -> Any:
    """Worker classes, made late: the model worker imports torch."""
    if name != "Stuck":
        raise AttributeError(name)
    from drumline.model.worker import ModelWorker

    class Stuck(ModelWorker):
        def execute_model(self, plan: Any) -> Any:
            time.sleep(60)

    return Stuck
