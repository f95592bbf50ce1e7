"""With recovery on: whatever of the engine dies or hangs, clients see a pause, and the server is the same as before."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from drumline.errors import ExitCode
from tests.chaos.conftest import figures
from tests.chaos.tree import RULE, Tree
from tests.server.command import COMPLETION, wait_for
from tests.stopped import stop

CHAT = "/v1/chat/completions"
TOKENS = 120
BASE = {"max_tokens": TOKENS, "ignore_eos": True, "prompt": [5, 6, 7], "temperature": 0}
BODIES: list[dict[str, Any]] = [
    {**BASE},
    {**BASE, "logprobs": 2, "echo": True},
    {**BASE, "repetition_penalty": 1.2, "presence_penalty": 0.3, "prompt": "once upon"},
    {**BASE, "temperature": 1.0, "seed": 3, "n": 3, "frequency_penalty": 0.4},
    {**BASE, "temperature": 1.0, "seed": 4, "min_tokens": 60, "prompt": [[8, 9], [10, 11, 12]]},
    {**BASE, "temperature": 0.9, "seed": 5, "top_p": 0.8, "bad_words": ["a", "the b"]},
    {**BASE, "temperature": 1.0, "seed": 6, "stream": False, "best_of": 2, "logprobs": 0, "prompt": [9]},
    {**BASE, "temperature": 1.0, "seed": 7, "stream": False, "prompt_logprobs": 1, "prompt": [9, 8, 7]},
]


def bodies(run: Tree) -> list[dict[str, Any]]:
    """All kinds; one has a stop text that it is known to come to, near its end."""
    body = BODIES[4]
    text = Client(run, body).result()[1]["text"]
    return [one if one is not body else {**body, "stop": [text[-12:-7]]} for one in BODIES]


class Client(threading.Thread):
    """One request; ``text`` by choice, ``whole`` answers, and the longest time without an event."""

    def __init__(self, run: Tree, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._body = {"stream": True, **body}
        self.choices: dict[int, dict[str, Any]] = {}
        self.error: Any = None
        self.events = 0
        self.start()

    def run(self) -> None:
        with self._run.open("POST", COMPLETION, self._body, 120) as answer:
            if not self._body["stream"]:
                found = json.loads(answer.read())
                self.error = found.get("error")
                self.choices = {choice["index"]: choice for choice in found.get("choices", [])}
                return
            for line in answer:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))

    def _take(self, event: dict[str, Any]) -> None:
        self.events += 1
        self.error = event.get("error", self.error)
        for choice in event.get("choices", []):
            known = self.choices.setdefault(choice["index"], {"text": "", "tokens": [], "finish_reason": None})
            assert known["finish_reason"] is None, "something came after the end"
            known["text"] += choice["text"]
            known["tokens"] += (choice.get("logprobs") or {}).get("tokens") or []
            known["finish_reason"] = choice["finish_reason"]
            known["stop_reason"] = choice.get("stop_reason")

    def result(self) -> dict[int, Any]:
        self.join(120)
        assert not self.is_alive()
        assert self.error is None
        kept = ("text", "tokens", "finish_reason", "stop_reason")
        return {index: {key: choice.get(key) for key in kept} for index, choice in self.choices.items()}


class Watch(threading.Thread):
    """Asks all the time whether the server is there, and what it says of itself."""

    def __init__(self, run: Tree) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._over = threading.Event()
        self.port = run.port()
        self.codes: dict[str, set[int]] = {"/livez": set(), "/readyz": set(), "/health": set(), "/startupz": set()}
        self.retry_after: set[str | None] = set()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self._over.wait(0.02):
                for path, codes in self.codes.items():
                    with self._run.open("GET", path) as answer:
                        codes.add(answer.status)
                        if answer.status == 503 and path != "/startupz":
                            self.retry_after.add(answer.getheader("retry-after"))
                        answer.read()
        except Exception as error:  # noqa: BLE001 (told by stop())
            self.error = error

    def stop(self) -> None:
        self._over.set()
        self.join(30)
        assert self.error is None, self.error


def restarts(run: Tree) -> float:
    text = run.request("GET", "/metrics")[1]
    lines = [line for line in text.splitlines() if line.startswith("drumline:engine_restarts_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def end_well(run: Tree, what: str) -> None:
    run.pids = run._pids()
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    gone = run.seconds_to_end(began, 10.0)
    figures.append((run.phase, what, None, gone))
    assert run.process.returncode == ExitCode.OK, run.text
    assert "drumline failed" not in run.text
    run.nothing_is_left()


CELLS = [
    pytest.param(phase, victim, marks=() if (phase, victim) == ("mid-step", "Worker_1") else pytest.mark.chaos)
    for phase in ("idle", "mid-step")
    for victim in ("Worker_0", "Worker_1", "EngineCore_DP0", "ForkServer")
]


@pytest.mark.parametrize(("phase", "victim"), CELLS)
def test_kill(tree: Callable[..., Tree], phase: str, victim: str) -> None:
    """Eight requests of all kinds end with the texts of an undisturbed run; the port answers all the time."""
    run = tree("idle", victim, ("on", "--drain-lag", "0"))
    run.phase = phase
    asked = bodies(run)
    plain = [client.result() for client in [Client(run, body) for body in asked]]
    assert plain[4][1]["stop_reason"] == asked[4]["stop"][0]
    watch = Watch(run)
    clients = [Client(run, body) for body in asked] if phase == "mid-step" else []
    if clients:
        streams = [client for client in clients if client._body["stream"]]
        wait_for(lambda: min(client.events for client in streams) > 3, 60, "tokens")
    old = run._pids()
    began = time.monotonic()
    os.kill(old[victim], signal.SIGKILL)
    wait_for(lambda: restarts(run), 5, "restart")
    told = time.monotonic() - began
    for client, expected in zip(clients, plain, strict=False):
        assert client.result() == expected
    wait_for(lambda: run.request("GET", "/readyz")[0] == 200, 60, "ready again")
    figures.append((phase, f"recovery from kill {victim}", told, time.monotonic() - began))
    watch.stop()
    assert watch.codes == {"/livez": {200}, "/readyz": {200, 503}, "/health": {200, 503}, "/startupz": {200}}
    assert watch.retry_after == {"2"}
    assert run.port() == watch.port
    assert told < 2.0
    again = [client.result() for client in [Client(run, body) for body in asked]]
    assert again == plain
    new = run._pids()
    assert new["APIServer_0"] == old["APIServer_0"]
    assert all(new[name] != old[name] for name in ("EngineCore_DP0", "Worker_0", "Worker_1"))
    assert (new["ForkServer"] == old["ForkServer"]) == (victim != "ForkServer")
    [spare] = set(run.members()) - set(new.values())
    wait_for(lambda: "ForkServer_spare" in psutil.Process(spare).cmdline()[0], 5, "spare")
    text = run.text
    assert text.count("the engine failed; all its processes are started again") == 1
    assert text.count(f"(pid {old[victim]}) was killed by SIGKILL") >= 1
    assert text.count("the engine was started again in") == 1
    end_well(run, f"SIGTERM after {victim}")


@pytest.mark.parametrize("victim", ["Worker_1", pytest.param("EngineCore_DP0", marks=pytest.mark.chaos)])
def test_the_limit_ends_the_server(tree: Callable[..., Tree], victim: str) -> None:
    run = tree("mid-step", victim, ("on", "--recovery-restarts", "1"))
    assert run.stream is not None
    os.kill(run.pids[victim], signal.SIGKILL)
    wait_for(lambda: "the engine was started again in" in run.text, 60, "restart")
    pid = run._pids()[victim]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    run.seconds_to_report(began, 2.0)
    figures.append((run.phase, f"kill {victim} again", None, run.seconds_to_end(began, 5.0)))
    assert f"(pid {pid}) was killed by SIGKILL" in run.report()
    assert "the engine is not started again: 1 restarts within 600 s did not help" in run.text
    assert run.process.returncode == ExitCode.WORKER_DIED
    assert f"(pid {pid})" in run.stream.end()["error"]["message"]
    run.nothing_is_left()


@pytest.mark.chaos
def test_a_step_that_hangs(tree: Callable[..., Tree]) -> None:
    run = tree("idle", "Worker_1", ("on", "--execute-model-timeout", "2", "--drain-lag", "0"))
    client = Client(run, {**BASE, "max_tokens": 2000})
    wait_for(lambda: client.events > 3, 30, "tokens")
    stop(run.pids["Worker_1"])
    wait_for(lambda: restarts(run) == 1, 10, "restart")
    client.result()
    assert run.gauge("poisonous_requests_total") == 0
    end_well(run, "SIGTERM after a hang")


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_recovers(tree: Callable[..., Tree], number: int) -> None:
    run = tree("mid-step", "ForkServer", ("on",))
    os.kill(run.pids["ForkServer"], signal.SIGKILL)
    wait_for(lambda: run.state()["status"] == "recovering", 5, "recovery")
    began = time.monotonic()
    os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
    figures.append((run.phase, "signal in recovery", None, run.seconds_to_end(began, 5.0)))
    assert run.process.returncode == (ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.OK)
    assert RULE not in run.text
    run.nothing_is_left()


@pytest.mark.chaos
def test_kill_of_the_server_while_it_recovers(tree: Callable[..., Tree]) -> None:
    run = tree("mid-step", "ForkServer", ("on",))
    os.kill(run.pids["Worker_1"], signal.SIGKILL)
    wait_for(lambda: run.state()["status"] == "recovering", 5, "recovery")
    began = time.monotonic()
    run.process.kill()
    figures.append((run.phase, "kill APIServer_0 in recovery", None, run.seconds_to_end(began, 5.0)))
    run.nothing_is_left()


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["Worker_1", "ForkServer"])
def test_kill_while_it_drains(tree: Callable[..., Tree], victim: str) -> None:
    """What runs is finished all the same, and then the server ends as after any drain."""
    run = tree("idle", victim, ("on", "--shutdown-timeout", "60", "--drain-lag", "0"))
    body = {**BASE, "max_tokens": 400, "temperature": 1.0, "seed": 3}
    plain = Client(run, body).result()
    client = Client(run, body)
    wait_for(lambda: client.events > 3, 30, "tokens")
    run.process.send_signal(signal.SIGTERM)
    wait_for(lambda: run.state()["status"] == "draining", 5, "drain")
    os.kill(run.pids[victim], signal.SIGKILL)
    wait_for(lambda: run.state()["status"] == "recovering", 5, "recovery")
    assert run.request("POST", COMPLETION, BASE)[0] == 503
    run.pids = {**run.pids, **{f"new {name}": pid for name, pid in run._pids().items() if pid}}
    assert client.result() == plain
    assert run.process.wait(10) == ExitCode.OK, run.text
    assert "the engine was started again in" in run.text
    assert "drumline failed" not in run.text
    run.nothing_is_left()


@pytest.mark.chaos
def test_a_drain_that_begins_while_it_recovers(tree: Callable[..., Tree]) -> None:
    """Running requests finish then, too."""
    run = tree("mid-step", "Worker_1", ("on", "--shutdown-timeout", "60"))
    assert run.stream is not None
    os.kill(run.pids["Worker_1"], signal.SIGKILL)
    wait_for(lambda: run.state()["status"] == "recovering", 5, "recovery")
    run.process.send_signal(signal.SIGTERM)
    run.wait_text("SIGTERM: draining", 1)
    assert run.request("GET", "/readyz")[0] == 503
    assert run.stream.end(60)["choices"][0]["finish_reason"] == "length"
    began = time.monotonic()
    figures.append((run.phase, "SIGTERM while it recovers", None, run.seconds_to_end(began, 5.0)))
    assert run.process.returncode == ExitCode.OK, run.text
    assert "drumline failed" not in run.text
    run.nothing_is_left()
