"""One run of ``drumline serve`` with everything that belongs to it: its process group, its TMPDIR, its moments."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from drumline.errors import ExitCode
from tests.chaos.group import Group
from tests.conftest import of_others
from tests.server.command import FLAGS, Serve, Stream, wait_for

SLOWDOWN = float(os.environ.get("CHAOS_SLOWDOWN", "1"))
"""How much longer limits are, for a machine that is busy with other things."""
RULE = "-" * 72
ALL = ("APIServer_0", "ForkServer", "EngineCore_DP0", "Worker_0", "Worker_1")
"""Roles as the tests name them; workers are told by rank, since their names change when they have joined the groups."""
PHASES = ("starting", "loading", "warming up", "ready", "idle", "mid-step", "draining", "stopping")
HELD = {
    "loading": "load_model",
    "warming up": "compile_or_warm_up_model",
    "stuck in its end": "shutdown",
    "prefill": "prefill",
}
"""Phases that pass in an instant here: the workers are held there (``workers.py``). In all others steps are not faster
than those of a small model, so that answers last."""
BEFORE_READY = ("starting", "loading", "warming up")
PRELOAD = str(Path(__file__).with_name("preload"))
"""Where its interpreters find the faults that can be brought about in them."""


class Tree(Serve):
    """The command in a process group of its own, as a shell starts it."""

    def __init__(
        self,
        model: Path,
        phase: str,
        victim: str = "",
        recovery: Sequence[str] = ("off",),
        group: Group | None = None,
        begin: Callable[[Tree], None] | None = None,
        home: Path | None = None,
    ) -> None:
        """Start it and wait for the phase.

        Args:
            model: folder.
            phase: of ``PHASES``, or ``prefill`` or ``decode``.
            victim: role of the process that something is done to.
            recovery: value of that flag, and flags after it.
            group: control group for all its processes.
            begin: called once it is ready, to bring about what belongs to the phase; without it there is a stream.
            home: folder for its temporary files and logs, which stays; none: one of its own.

        """
        self.phase = phase
        self._keep = home is not None
        self.home = home or Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
        self.tmp = self.home / "t"
        self.tmp.mkdir(exist_ok=True)
        if not (self.home / "fifo").exists():
            os.mkfifo(self.home / "fifo")
        self.log = self.home / "console"
        self.shm = shared_memory()
        flags = ["--load-format", "auto", "--shutdown-timeout", "60" if phase == "draining" else "1"]
        flags += ["--recovery", *recovery]
        hold = HELD.get(phase, "steps")
        if hold == "prefill":
            flags += ["--no-enable-prefix-caching", "--max-num-batched-tokens", "128"]
        self.began = time.monotonic()
        with self.log.open("wb") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "drumline.cli.main", "serve", str(model), *FLAGS, *flags],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                process_group=0,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([PRELOAD, *filter(None, [os.environ.get("PYTHONPATH")])]),
                    "CHAOS_FAULTS": "1",
                    "TMPDIR": str(self.tmp),
                    "XDG_STATE_HOME": str(self.home / "state"),
                    "CHAOS_HOLD": hold,
                    "CHAOS_FIFO": str(self.home / "fifo"),
                },
            )
        if group is not None:
            group.add(self.process.pid)  # its interpreter is still starting
        self.stream: Stream | None = None
        self._begin = begin
        self._reach(phase, victim)

    # moments

    def _reach(self, phase: str, victim: str) -> None:
        """Wait for the event that begins the phase."""
        if phase == "starting":
            # The first moment at which this process exists; for the root: somebody else exists too.
            self.wait_state(lambda rows: self._found(rows, "ForkServer" if victim in ("", "APIServer_0") else victim))
        elif phase in ("born", "listening"):
            if phase == "listening":
                self.port()
            self.pids: dict[str, int] = {}
            return
        elif phase in ("loading", "warming up"):
            self.wait_text(f"held in {HELD[phase]}", 2)
        else:
            self.ready(90 * SLOWDOWN)
            self.first_port = self.port()
        if self._begin is not None and phase not in BEFORE_READY:
            self._begin(self)
        if phase == "idle":
            body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            assert self.request("POST", "/v1/completions", body)[0] == 200
            wait_for(lambda: not self.gauge("num_requests_running"), 5, "end of the request")
        elif phase in ("mid-step", "draining") and self._begin is None:
            self.stream = Stream(self)
        self.pids = self._pids()
        if phase == "draining":
            self.process.send_signal(signal.SIGTERM)
            self.wait_text("SIGTERM: draining", 1)
        if phase in ("stopping", "stuck in its end"):
            os.killpg(self.process.pid, signal.SIGINT)
            self.wait_text("SIGINT: ending", 1)
            if phase == "stuck in its end":
                self.wait_text("held in shutdown", 2)

    def wait_state(self, check: Callable[[dict[str, int]], bool]) -> None:
        self.port()
        wait_for(lambda: check(self._pids()), 60 * SLOWDOWN, f"{self.phase}\n{self.text}")

    def wait_text(self, text: str, count: int) -> None:
        def seen() -> bool:
            assert self.process.poll() is None, self.text
            return self.text.count(text) >= count

        wait_for(seen, 60 * SLOWDOWN, f"{text}\n{self.text}")

    def _found(self, rows: dict[str, int], name: str) -> bool:
        return bool(rows.get(name))

    def release(self) -> None:
        """Let those go on that are held. Nobody is: nothing happens."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.home / "fifo", os.O_WRONLY | os.O_NONBLOCK))

    def _pids(self) -> dict[str, int]:
        """Processes that exist, by role."""
        rows = self.state()["processes"]
        return {f"Worker_{row['rank']}" if row["rank"] is not None else row["name"]: row["pid"] for row in rows}

    # the end

    def members(self) -> list[int]:
        """Processes of its group that have not ended (a zombie has)."""
        found = []
        for pid in psutil.pids():
            try:
                if os.getpgid(pid) == self.process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def seconds_to_report(self, since: float, limit_s: float) -> float:
        """Until the console has a whole report."""

        def reported() -> bool:
            return "drumline failed" in self.text and self.text.endswith("\n")

        wait_for(reported, limit_s, f"report\n{self.text}")
        return time.monotonic() - since

    def seconds_to_end(self, since: float, limit_s: float) -> float:
        """Until no process is left."""
        wait_for(lambda: self.process.poll() is not None and not self.members(), limit_s, f"end\n{self._left()}")
        return time.monotonic() - since

    def _left(self) -> str:
        lines = []
        for pid in self.members():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                process = psutil.Process(pid)
                lines.append(f"{pid} {process.status()} {' '.join(process.cmdline())}")
        return "\n".join([*lines, self.text])

    def nothing_is_left(self) -> None:
        assert list(self.tmp.iterdir()) == []
        assert not shared_memory() - self.shm
        holders = []
        for pid in psutil.pids():
            for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    target = str(descriptor.readlink())
                except OSError:
                    continue
                if str(self.home) in target or ("/memfd:drumline" in target and pid in self.pids.values()):
                    holders.append((pid, target))
        assert holders == []

    def report(self) -> str:
        """The one report, which is the last thing on the console."""
        text = self.text
        assert text.count("drumline failed") == 1, text
        before, _, report = text.partition("drumline failed:")
        # At its birth an interpreter has nothing of ours yet, and says itself what broke it.
        assert "Traceback" not in before or self.phase == "starting", text
        lines = report.rstrip().removesuffix(RULE).splitlines()
        assert not [line for line in lines if re.match(r"\((\w+) pid=\d+\)", line)], text  # somebody else's lines
        return report

    def close(self) -> None:
        for pid in self.members():
            psutil.Process(pid).kill()
        self.process.wait(10)
        if not self._keep:
            shutil.rmtree(self.home, ignore_errors=True)  # a test that makes many closes them itself


def shared_memory() -> set[str]:
    """Named shared memory of the kinds that drumline, multiprocessing and torch make, but what others have open."""
    kinds = ("drumline", "psm_", "sem.", "torch_")
    found = (path for path in Path("/dev/shm").iterdir() if path.name.startswith(kinds))
    return {path.name for path in found if not of_others(path)}


def code_of(phase: str) -> ExitCode:
    """Documented exit code of a process's death."""
    return ExitCode.START_FAILED if phase in BEFORE_READY else ExitCode.WORKER_DIED
