"""Every cell of the matrix (``cells.py``): one report or recovery in time, the right text and code, nothing left.

Times count from the moment at which the fault took effect: the end of the process where that is the fault, else the
signal that brought it. Limits are 2 s to the report (after the timeout, for who is stopped) and 5 s until nothing is
left; CHAOS_SLOWDOWN multiplies both where the machine is busy with other things. CHAOS_MEMORY=limit has MemoryError
instead of the kernel's killer where both are possible.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.errors import ExitCode
from tests.chaos.cells import API, IN_MAKE_TEST, SERVER, STARTING, Cell, Expected, cells, expected
from tests.chaos.client import Client
from tests.chaos.conftest import rows
from tests.chaos.group import Group, can_limit
from tests.chaos.preload.sitecustomize import NUMBERS
from tests.chaos.tree import SLOWDOWN, Tree
from tests.server.command import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300 * SLOWDOWN)]

TOLD_S = 2.0 * SLOWDOWN
LEFT_S = 5.0 * SLOWDOWN
STALL_S = 3.0 * SLOWDOWN
START_S = 9.0 * SLOWDOWN
"""``--stall-timeout`` and ``--start-timeout`` of the cells that stop somebody."""
MEMORY = "memory" if can_limit() else "address space"
LENGTH = {"idle": 8, "prefill": 40, "decode": 600, "draining": 600}
ENDLESS = {"prefill": 90, "decode": 4000, "draining": 4000}
"""Tokens of answers that are not to be over when the fault comes; they fit into the context."""
PROMPT = [3 + place % 200 for place in range(4000)]
"""More than thirty steps of 128 tokens, which ``workers.Slow`` holds up."""


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group | None]:
    """A limit on memory, for the cells that need one."""
    if request.node.callspec.params["cell"].fault != "memory" or MEMORY != "memory":
        yield None
        return
    group = Group()
    yield group
    group.close()


PARAMS = [pytest.param(cell, id=str(cell), marks=() if cell in IN_MAKE_TEST else pytest.mark.chaos) for cell in cells()]


@pytest.mark.parametrize("cell", PARAMS)
def test_cell(group: Group | None, tree: Callable[..., Tree], cell: Cell) -> None:
    run = Run(cell, tree, group)
    try:
        run.play()
    finally:
        rows.append(run.row())


class Run:
    """One cell."""

    def __init__(self, cell: Cell, tree: Callable[..., Tree], group: Group | None) -> None:
        self.cell = cell
        self.expected: Expected = expected(cell, MEMORY)
        flags = ["--stop-timeout", "1", "--drain-lag", "0"]
        if self.expected.stalls:
            flags += ["--stall-timeout", str(STALL_S), "--start-timeout", str(START_S if self._starts else 60)]
        self.outcome = "not done"
        self.told: float | None = None
        self.left: float | None = None
        self.client: Client | None = None
        self.plain = ""
        self.tree = tree(cell.phase, cell.role, (cell.recovery, *flags), group=group, begin=self._begin_request)

    @property
    def _starts(self) -> bool:
        return self.cell.phase in STARTING

    @property
    def _timeout(self) -> float:
        """What comes before the limit."""
        if not self.expected.stalls:
            return 0.0
        return START_S if self._starts else STALL_S

    def row(self) -> tuple[str, ...]:
        """For the table."""
        cell = self.cell
        fault = cell.fault
        if fault == "memory":
            fault = "memory (kernel)" if MEMORY == "memory" else "memory (MemoryError)"
        saw = self.client.saw(self.since) if self.client else "refused"
        told, left = (f"{one:.2f}" if one is not None else "" for one in (self.told, self.left))
        return cell.phase, cell.role, fault, cell.recovery, self.outcome, saw, told, left

    # the fault

    def _begin_request(self, run: Tree) -> None:
        """The request that runs when the fault comes, and before it the same one undisturbed."""
        phase = self.cell.phase
        body = {"prompt": PROMPT} if phase == "prefill" else {}
        if self.expected.outcomes != ("ends",):
            plain = Client(run, max_tokens=LENGTH[phase], **body)
            plain.end(60)
            assert plain.whole, plain.saw()
            self.plain = plain.text
        if phase == "idle":
            return
        self.client = Client(run, max_tokens=(LENGTH if self.plain else ENDLESS)[phase], **body)
        if phase == "prefill":
            wait_for(lambda: run.gauge("num_requests_running") == 1, 30, "running request")
            assert not self.client.times
        else:
            wait_for(lambda: len(self.client.times) > 2, 30, "tokens")  # type: ignore[union-attr]

    since = 0.0
    """time.monotonic() of the moment at which it took effect."""

    def _strike(self) -> None:
        """Do it, and note when it took effect."""
        fault = MEMORY if self.cell.fault == "memory" else self.cell.fault
        pid = self.pid = self.tree.pids[self.cell.role]
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(fault) or NUMBERS[fault]
        if fault in NUMBERS:
            wait_for(lambda: _catches(pid, number), 30, "handler")
        pidfd = os.pidfd_open(pid)
        try:
            self.since = time.monotonic()
            signal.pidfd_send_signal(pidfd, number)
            if fault in ("kill", "exit", "segfault", "memory"):
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                assert poller.poll(20_000 * SLOWDOWN), f"it lives\n{self.tree.text}"
                self.since = time.monotonic()
        finally:
            os.close(pidfd)
        if fault == "stop" and self.cell.phase == "idle":  # nobody hangs while nobody waits
            self.client = Client(self.tree, max_tokens=LENGTH["idle"])

    # what comes of it

    def play(self) -> None:
        self._strike()
        outcome = self._outcome()
        assert outcome in self.expected.outcomes, f"{outcome}\n{self.tree.text}"
        {"ends": self._ends, "recovers": self._recovers, "goes on": self._goes_on}[outcome]()
        self.tree.nothing_is_left()
        self.outcome = outcome

    def _outcome(self) -> str:
        if len(self.expected.outcomes) == 1:
            return self.expected.outcomes[0]
        if self._starts:  # libraries try to import things, and go on without them whatever the import raises
            wait_for(lambda: self._fails() or self._is_ready(), 90 * SLOWDOWN, "end or start")
            return "ends" if self._fails() else "goes on"
        said = re.compile(self.expected.said)
        wait_for(lambda: said.search(self.tree.text), TOLD_S, f"word of it\n{self.tree.text}")
        self.told = time.monotonic() - self.since
        deadline = time.monotonic() + 0.5  # no event says that nothing happens
        while self.tree.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return "ends" if self.tree.process.poll() is not None else "goes on"

    def _fails(self) -> bool:
        return "drumline failed" in self.tree.text or self.tree.process.poll() is not None

    def _is_ready(self) -> bool:
        self.tree.release()
        return "Ready: http" in self.tree.text

    def _ends(self) -> None:
        run, limit = self.tree, TOLD_S + self._timeout
        if self.cell.role == API and len(self.expected.outcomes) > 1:  # its own traceback, no report of another process
            self.left = run.seconds_to_end(self.since, LEFT_S + TOLD_S)
            assert re.search(self.expected.said, run.text), run.text
            # one that hit a request is that request's, and a server that drains ends then as it would have
            codes = (self.expected.code, ExitCode.OK) if self.cell.phase == "draining" else (self.expected.code,)
            assert run.process.returncode in codes, run.text
            return
        self.told = run.seconds_to_report(self.since, limit)
        assert self.told < limit
        self.left = run.seconds_to_end(self.since, LEFT_S + limit)
        assert self.left - self.told < LEFT_S
        report = run.report().strip()
        assert re.search(self.expected.said.format(pid=self.pid), report.splitlines()[0]), run.text
        assert run.process.returncode == self.expected.code, run.text
        if self.cell.role != API and self.cell.phase != "starting":  # it may have none yet
            assert "log file: " in report, run.text
        self._check_client_of_the_dead()

    def _check_client_of_the_dead(self) -> None:
        client = self.client
        if client is None:
            return
        client.end(10)
        if self.cell.role == API:
            assert client.broken, client.saw()
        else:
            assert f"(pid {self.pid})" in client.error, client.saw()

    def _recovers(self) -> None:
        run, limit = self.tree, TOLD_S + self._timeout
        begun = "the engine failed; all its processes are started again"
        wait_for(lambda: begun in run.text, limit + 1.0, f"recovery\n{run.text}")
        self.told = time.monotonic() - self.since
        assert self.told < limit
        if self.cell.phase != "draining":
            wait_for(lambda: run.request("GET", "/readyz")[0] == 200, 60 * SLOWDOWN, "ready again")
            assert run.port() == run.first_port
        if self.client is None:
            self.client = Client(run, max_tokens=LENGTH["idle"])
        self.client.end(60 * SLOWDOWN)
        assert self.client.whole, self.client.saw()
        assert self.client.text == self.plain
        assert re.search(self.expected.said.format(pid=self.pid), run.text), run.text
        assert run.text.count(begun) == 1, run.text
        self._end_well()

    def _goes_on(self) -> None:
        run = self.tree
        if self._starts:
            run.release()
            run.ready(90 * SLOWDOWN)
        if self.client is None:
            self.client = Client(run, max_tokens=LENGTH["idle"])
        self.client.end(60 * SLOWDOWN)
        if self.cell.role == SERVER:
            assert self.client.whole, self.client.saw()
            assert self.client.text == self.plain or not self.plain or self.cell.phase in ("idle", *STARTING)
        self._end_well()

    def _end_well(self) -> None:
        """SIGTERM, unless it was there before the fault: all ends, and nothing of what happened is a failure now."""
        run = self.tree
        if self.cell.phase != "draining":
            run.pids = {**run.pids, **{f"new {name}": pid for name, pid in run._pids().items() if pid}}
            began = time.monotonic()
            run.process.send_signal(signal.SIGTERM)
        else:
            began = time.monotonic()
        self.left = run.seconds_to_end(began, LEFT_S + 2.0)
        assert run.process.returncode == ExitCode.OK, run.text
        assert "drumline failed" not in run.text, run.text


def _catches(pid: int, number: int) -> bool:
    """The process has a handler for this signal."""
    text = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s+(\w+)", text, re.MULTILINE)[1], 16)  # type: ignore[index]
    return bool(caught >> (number - 1) & 1)
