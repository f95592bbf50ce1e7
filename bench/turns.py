"""Systems that take turns within one run: the measuring side of `transport.py` and `executor_rpc.py`.

Each system is a tree of processes of its own (`driver.py`), made once for each number of workers. While one is measured
the trees of the others are stopped (SIGSTOP), so that one that spins costs the others nothing. Ratios are to drumline's
median of the same cell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers import ForeignLoad, Tree, about_machine, cpu_seconds, ended_by_sigterm, tree

FOLDER = Path(__file__).resolve().parent
START_S = 180.0
SPINS_FOR_EVER = {"ray-graph"}
BASE = "drumline"
LEAST_WITH_GAPS = 20
"""Messages of a cell, however long the gaps."""


class DriverError(Exception):
    """A system does not work, and why."""


def busy_seconds(pid: int) -> float:
    """CPU time of a tree so far, in nanosecond steps where the system says them."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for process in tree(pid):
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9 if total else cpu_seconds(pid)


class Driver(Tree):
    """One system with n workers, ready when made."""

    def __init__(self, name: str, python: str, script: str, n: int, log: Path) -> None:
        self._sock, theirs = socket.socketpair()
        paths = [str(FOLDER), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
        env = {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [python, str(FOLDER / script), name, str(n), str(theirs.fileno())]
        with theirs:
            super().__init__(name, command, env, log, (theirs.fileno(),))
        self._data = b""

    def wait(self, limit_s: float) -> dict[str, Any]:
        """Its next line."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._data:
            self._sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self._sock.recv(1 << 20)
            except TimeoutError:
                raise DriverError(f"{self.name} says nothing for {limit_s:.0f} s: {self._tail()}") from None
            if not data:
                raise DriverError(f"{self.name} ended: {self._tail()}")
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    def measure(self, **told: Any) -> Taken:
        """One turn: warm up, then measure."""
        limit = told["seconds"] + 60
        self._sock.sendall(json.dumps(told).encode() + b"\n")
        self.wait(limit)
        began, before = time.monotonic(), busy_seconds(self.process.pid)
        self._sock.sendall(b"go\n")
        us = self.wait(limit)["us"]
        cpu, wall = busy_seconds(self.process.pid) - before, time.monotonic() - began
        self.wait(limit)
        return Taken(us, cpu, wall)

    def send_signal(self, number: int) -> None:
        for process in tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def end(self) -> None:
        """It ends by itself when the socket does; if not, as any tree."""
        self.note_shared_memory()
        self.send_signal(signal.SIGCONT)
        self._sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        super().end()


@dataclass
class Taken:
    """Round trips, CPU seconds of the tree and wall seconds."""

    us: list[float] = field(default_factory=list)
    cpu: float = 0.0
    wall: float = 0.0

    def add(self, other: Taken) -> None:
        self.us += other.us
        self.cpu += other.cpu
        self.wall += other.wall


@dataclass(frozen=True)
class Cell:
    """What is measured: payload, who answers, milliseconds between."""

    payload: str
    every: bool = False
    gap_ms: float = 0.0

    def __str__(self) -> str:
        gap = f", {self.gap_ms:g} ms between" if self.gap_ms else ""
        return f"{self.payload}{', all answer' if self.every else ''}{gap}"


class Turns:
    """All systems with one number of workers."""

    def __init__(self, script: str, pythons: dict[str, str], n: int) -> None:
        self._script, self._pythons, self._n = script, pythons, n
        self.drivers: dict[str, Driver] = {}
        self.started: dict[str, float] = {}

    def __enter__(self) -> Turns:
        """One after the other, so that the time that each takes is its own. One that fails is left out, loudly."""
        try:
            for name, python in self._pythons.items():
                log = FOLDER / f".{self._script}-{name}-{os.getpid()}.log"
                driver = Driver(name, python, self._script, self._n, log)
                self.drivers[name] = driver
                try:
                    driver.wait(START_S)
                except DriverError as error:
                    self._drop(name, error)
                    continue
                self.started[name] = time.monotonic() - driver.started
                driver.send_signal(signal.SIGSTOP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for driver in self.drivers.values():
            driver.end()
            driver.log.unlink(missing_ok=True)
        self.drivers.clear()

    def _drop(self, name: str, error: Exception) -> None:
        print(f"! {name} is left out: {error}", file=sys.stderr, flush=True)
        driver = self.drivers.pop(name)
        driver.end()
        driver.log.unlink(missing_ok=True)

    @contextlib.contextmanager
    def running(self, names: Iterable[str]) -> Any:
        """Only these go on meanwhile."""
        running = [self.drivers[name] for name in names if name in self.drivers]
        for driver in running:
            driver.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            for driver in running:
                driver.send_signal(signal.SIGSTOP)

    def _turn(self, name: str, **told: Any) -> Taken | None:
        """None, and the system is left out from then on, if it does not work."""
        try:
            return self.drivers[name].measure(**told)
        except (DriverError, OSError) as error:
            self._drop(name, error)
            return None

    def measure(self, cell: Cell, seconds: float, rounds: int) -> dict[str, Taken]:
        """``seconds`` for each system, in ``rounds`` turns."""
        found: dict[str, Taken] = {}
        told = {"payload": cell.payload, "every": cell.every, "gap_s": cell.gap_ms / 1000, "seconds": seconds / rounds}
        for _ in range(rounds):
            for name in list(self.drivers):
                with self.running([name]):
                    taken = self._turn(name, **told)
                if taken is not None:
                    found.setdefault(name, Taken()).add(taken)
        return found

    def _groups(self) -> list[list[str]]:
        """Which may be awake side by side: those that become quiet, and each that never does alone."""
        quiet = [name for name in self.drivers if name not in SPINS_FOR_EVER]
        return [*([quiet] if quiet else []), *([name] for name in self.drivers if name in SPINS_FOR_EVER)]

    def idle(self, payload: str, seconds: float) -> dict[str, float]:
        """CPU seconds of each tree in ``seconds`` that begin with its last answer."""
        found = {}
        for group in self._groups():
            began = {}
            with self.running(group):
                for name in group:
                    if self._turn(name, payload=payload, every=False, gap_s=0, seconds=0) is not None:
                        began[name] = busy_seconds(self.drivers[name].process.pid), time.monotonic()
                for name, (before, when) in began.items():
                    time.sleep(max(0.0, when + seconds - time.monotonic()))
                    found[name] = busy_seconds(self.drivers[name].process.pid) - before
        return found

    def first(self, payload: str, idle_s: float, times: int) -> dict[str, Taken]:
        """The first round trip after ``idle_s`` without any."""
        found: dict[str, Taken] = {}
        told: dict[str, Any] = {"payload": payload, "every": False, "gap_s": 0, "seconds": 0, "settle": False}
        for group in self._groups():
            for time_no in range(times):
                awake = group[time_no % len(group) :] + group[: time_no % len(group)]  # by turns who is the first
                with self.running(group):
                    awake = [name for name in awake if name in self.drivers and self._turn(name, **told)]
                    time.sleep(idle_s)
                    for name in awake:
                        taken = self._turn(name, **told, warm=0)
                        if taken is not None:
                            found.setdefault(name, Taken()).us.append(taken.us[0])
                            self.drivers[name].send_signal(signal.SIGSTOP)  # who spins now is in the others' way
        return found


def quantiles(us: Sequence[float]) -> tuple[float, float, float]:
    """10th percentile, median, 90th."""
    ordered = sorted(us)
    last = len(ordered) - 1
    return ordered[round(last * 0.1)], statistics.median(ordered), ordered[round(last * 0.9)]


def shown(us: float) -> str:
    return f"{us:.0f}" if us < 10_000 else f"{us / 1000:.1f}m"


class Report:
    """Rows as they come, markdown tables at the end of each number of workers, and everything as JSON."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, n: int, what: str, taken: dict[str, Taken]) -> None:
        for name, one in taken.items():
            low, middle, high = quantiles(one.us)
            row = {"workers": n, "cell": what, "system": name, "p50_us": middle, "p10_us": low, "p90_us": high}
            base = taken.get(BASE)
            if base is not None:
                row["ratio"] = middle / statistics.median(base.us)
            if one.wall:
                row |= {"cpu_us": one.cpu / len(one.us) * 1e6, "cores": one.cpu / one.wall}
            self.rows.append({**row, "samples": len(one.us)})

    def add_seconds(self, n: int, what: str, seconds: dict[str, float]) -> None:
        self.rows += [{"workers": n, "cell": what, "system": name, "seconds": s} for name, s in seconds.items()]

    def table(self, n: int, systems: Sequence[str], text: Any, keys: Sequence[str], title: str) -> None:
        rows: dict[str, dict[str, str]] = {}
        for row in self.rows:
            if row["workers"] == n and all(key in row for key in keys):
                rows.setdefault(row["cell"], {})[row["system"]] = text(row)
        if rows:
            print(f"\n{title}, {n} workers\n\n| | {' | '.join(systems)} |\n|---|{'---|' * len(systems)}")
            for what, cells in rows.items():
                print(f"| {what} | {' | '.join(cells.get(name, '-') for name in systems)} |")
        sys.stdout.flush()

    def tables(self, n: int, systems: Sequence[str]) -> None:
        def trip(row: dict[str, Any]) -> str:
            ratio = f" x{row['ratio']:.2f}" if "ratio" in row and row["system"] != BASE else ""
            return f"{shown(row['p50_us'])} ({shown(row['p10_us'])}-{shown(row['p90_us'])}){ratio}"

        self.table(n, systems, trip, ["p50_us"], "Round trip, median (p10-p90) us (m: ms), ratio to drumline")
        self.table(n, systems, lambda row: f"{row['cpu_us']:.0f}", ["cpu_us"], "CPU us of the tree per round trip")
        self.table(n, systems, lambda row: f"{row['seconds']:.2f}", ["seconds"], "Seconds")


def add_flags(parser: argparse.ArgumentParser, workers: Sequence[int], gaps: Sequence[float]) -> None:
    """What both benchmarks have."""
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("--workers", nargs="+", type=int, default=workers)
    parser.add_argument("--gaps-ms", nargs="*", type=float, default=gaps, help="between the messages of a decode step")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each cell and system")
    parser.add_argument("--rounds", type=int, default=3, help="turns in which each cell is measured")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="CPU of idle systems; 0: not measured")
    parser.add_argument("--idle-workers", nargs="*", type=int, help="with so many workers only")
    parser.add_argument("--first-after", type=float, default=5.0, help="seconds of idleness before a first message")
    parser.add_argument("--first-times", type=int, default=3, help="how often that is measured; 0: not")
    parser.add_argument("--json", type=Path, help="write all figures to this file")


def run(
    args: argparse.Namespace, script: str, pythons: dict[str, str], cells: Sequence[Cell], quiet: tuple[str, str]
) -> int:
    """All cells with each number of workers. ``quiet``: payloads of the idle and of the first-message figures."""
    pythons = {name: python for name, python in pythons.items() if not args.systems or name in args.systems}
    about, foreign, report = about_machine(), ForeignLoad(), Report()
    print(about, flush=True)
    with ended_by_sigterm():
        for n in args.workers:
            with Turns(script, pythons, n) as turns:
                report.add_seconds(n, "start to ready, s", turns.started)
                for cell in cells:
                    seconds = max(args.seconds, LEAST_WITH_GAPS * cell.gap_ms / 1000)
                    report.add(n, str(cell), turns.measure(cell, seconds, args.rounds))
                if args.first_times:
                    taken = turns.first(quiet[1], args.first_after, args.first_times)
                    report.add(n, f"{quiet[1]}, first after {args.first_after:g} s", taken)
                if args.idle_seconds and n in (args.workers if args.idle_workers is None else args.idle_workers):
                    idle = turns.idle(quiet[0], args.idle_seconds)
                    report.add_seconds(n, f"CPU, idle for {args.idle_seconds:g} s", idle)
                report.tables(n, list(pythons))
    print(f"\nothers kept {foreign.cores():.2f} cores busy meanwhile")
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "foreign_cores": foreign.cores(), "rows": report.rows}))
    return 0
