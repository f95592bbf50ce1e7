"""The death chain: whoever is killed, in whatever phase, there is one report and nothing is left.

The tree is the real one: root, fork server, a middle owner (engine core), two workers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stopped import stop

ROOT = Path(__file__).parents[2]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().removeprefix("drumline::")


class Tree:
    """A root that runs root_script, and its descendants by name."""

    def __init__(self, worker: str, folder: Path) -> None:
        self.worker = worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.root_script", worker, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.wait_for("ready" if worker == "serve" else "phase")
        [server] = children(self.process.pid)
        spare = ["ForkServer_spare"] if worker == "serve" else []
        deadline = time.monotonic() + 5
        while True:  # the spare gets its title after it was told of
            self.pids = {title(pid): pid for pid in children(server)}
            self.pids |= {"APIServer_0": self.process.pid, "ForkServer": server}
            if sorted(self.pids) == ["APIServer_0", "EngineCore_DP0", "ForkServer", *spare, "Worker_0", "Worker_1"]:
                break
            assert time.monotonic() < deadline, self.pids
        self.pidfds = [os.pidfd_open(pid) for pid in self.pids.values()]

    def wait_for(self, kind: str) -> None:
        """READY of the core, or load_model of both workers."""
        assert self.process.stdout is not None
        phases = set()
        for line in self.process.stdout:
            event = json.loads(line)
            phases.add(event["phase"])
            if event["kind"] == kind and (kind == "ready" or {f"Worker_{i}: load_model" for i in (0, 1)} <= phases):
                return
        raise AssertionError(self.process.stderr and self.process.stderr.read())

    def console_until_report(self, timeout_s: float) -> str:
        """What the console shows until a report is complete, or all writers are gone."""
        assert self.process.stderr is not None
        fd = self.process.stderr.fileno()
        text, deadline = "", time.monotonic() + timeout_s
        while "log file" not in text and "then:" not in text and "all its processes" not in text:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise AssertionError(f"no report within {timeout_s} s, only: {text}")
            data = os.read(fd, 65536)
            if not data:
                break
            text += data.decode()
        return text

    def rest_of_console(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def all_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for pidfd in self.pidfds:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        return True

    def close(self) -> None:
        for pidfd in self.pidfds:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(pidfd)
        self.process.wait(5)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def make_tree(tmp_path: Path) -> Iterator[Callable[[str], Tree]]:
    trees: list[Tree] = []

    def make(worker: str) -> Tree:
        trees.append(Tree(worker, tmp_path / "log"))
        return trees[-1]

    yield make
    for tree in trees:
        tree.close()


@pytest.mark.parametrize("victim", ["APIServer_0", "ForkServer", "EngineCore_DP0", "Worker_0", "Worker_1"])
@pytest.mark.parametrize("worker", ["block", "serve"], ids=["starting", "ready"])
def test_kill_of_each_process_in_each_phase(make_tree: Callable[[str], Tree], worker: str, victim: str) -> None:
    tree = make_tree(worker)
    pid = tree.pids[victim]
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    if victim == "APIServer_0":
        tree.process.wait(5)  # reaped, so that newer kernels tell how it ended
    report = tree.console_until_report(2.0)
    assert time.monotonic() - start < 2.0
    assert tree.all_gone(5.0)
    assert f"{victim}" in report
    assert f"(pid {pid})" in report.splitlines()[2]
    if victim != "APIServer_0":
        assert "was killed by SIGKILL" in report.splitlines()[2]
        assert tree.process.wait(5) == 4
    everything = report + tree.rest_of_console()
    assert everything.count("drumline failed:") == 1
    assert everything.count(f"(pid {pid})") == 1


@pytest.mark.parametrize("victims", [("APIServer_0", "ForkServer"), ("EngineCore_DP0", "APIServer_0")])
def test_several_killed_at_once_leave_nothing(make_tree: Callable[[str], Tree], victims: tuple[str, ...]) -> None:
    tree = make_tree("serve")
    for victim in victims:
        os.kill(tree.pids[victim], signal.SIGKILL)
    assert tree.all_gone(5.0)


@pytest.mark.parametrize("victim", ["APIServer_0", "EngineCore_DP0", "ForkServer"])
def test_children_that_hang_in_c_code_with_the_gil_end_too(make_tree: Callable[[str], Tree], victim: str) -> None:
    tree = make_tree("hang_in_c")
    os.kill(tree.pids[victim], signal.SIGKILL)
    assert tree.all_gone(5.0)


def test_end_of_the_root_without_a_failure_is_silent(make_tree: Callable[[str], Tree]) -> None:
    tree = make_tree("serve")
    assert tree.process.stdin is not None
    tree.process.stdin.close()
    assert tree.process.wait(5) == 0
    assert tree.all_gone(1.0)
    assert tree.rest_of_console() == ""


def test_root_and_fork_server_killed_at_once_are_reported_by_the_engine_core(make_tree: Callable[[str], Tree]) -> None:
    tree = make_tree("serve")
    for victim in ("ForkServer", "APIServer_0"):
        os.kill(tree.pids[victim], signal.SIGKILL)
    assert tree.all_gone(5.0)
    told = tree.rest_of_console()
    assert told.count("drumline failed:") == 1
    assert f"APIServer_0 (pid {tree.process.pid}) " in told
    assert f"then: ForkServer (pid {tree.pids['ForkServer']})" in told


@pytest.mark.parametrize("others", [(), ("EngineCore_DP0",)], ids=["root", "root and core"])
def test_a_stopped_fork_server_does_not_outlive_its_root(
    make_tree: Callable[[str], Tree], others: tuple[str, ...]
) -> None:
    tree = make_tree("serve")
    stop(tree.pids["ForkServer"])
    for victim in ("APIServer_0", *others):
        os.kill(tree.pids[victim], signal.SIGKILL)
    assert tree.all_gone(5.0)
    told = tree.rest_of_console()
    if not others:
        assert told.count("drumline failed:") == 1
        assert f"APIServer_0 (pid {tree.process.pid}) " in told
