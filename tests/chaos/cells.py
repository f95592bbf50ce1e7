"""The matrix of faults: what is done to whom in which phase, and what has to come of it. Pure.

A cell is a role, a fault, a phase and whether recovery is on. Every combination is either run or has a reason why it is
not (:func:`reason`); :func:`expected` says how a cell that is run has to come out.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from drumline.errors import ExitCode
from tests.chaos.preload.sitecustomize import CODE

API, SERVER, CORE, WORKERS = "APIServer_0", "ForkServer", "EngineCore_DP0", ("Worker_0", "Worker_1")
ROLES = (API, SERVER, CORE, *WORKERS)
FAULTS = ("kill", "stop", "exit", "segfault", "raise", "raise unpicklable", "memory")
PHASES = ("starting", "loading", "warming up", "idle", "prefill", "decode", "draining")
STARTING = PHASES[:3]
RUNNING = ("prefill", "decode", "draining")
"""A request is running."""
RECOVERY = ("off", "on")
RAISES = ("raise", "raise unpicklable")
NAMES = {"Worker_0": "Worker_(?:TP)?0 rank 0", "Worker_1": "Worker_(?:TP)?1 rank 1"}
"""Workers have another name once they have joined the groups."""


@dataclass(frozen=True)
class Cell:
    """One combination."""

    role: str
    fault: str
    phase: str
    recovery: str = "off"

    def __str__(self) -> str:
        return f"{self.role}-{self.fault}-{self.phase}-{self.recovery}".replace(" ", "_")


@dataclass(frozen=True)
class Expected:
    """How a cell has to come out.

    ``ends``: one report, then all end with ``code``. ``recovers``: the same report in the log, and the engine is
    started again. ``goes on``: nothing fails; the fault is in the log if ``said`` is not empty.
    """

    outcomes: tuple[str, ...]
    code: int = 0
    said: str = ""
    """Regular expression; of the report's first line, or of a line of the log."""
    stalls: bool = False
    """The limit on the time of the report comes after a timeout."""


def combinations() -> Iterator[Cell]:
    """All of them."""
    for recovery, phase, fault, role in product(RECOVERY, PHASES, FAULTS, ROLES):
        yield Cell(role, fault, phase, recovery)


def cells() -> list[Cell]:
    """Those that are run."""
    return [cell for cell in combinations() if not reason(cell)]


def reason(cell: Cell) -> str:
    """Why a combination is not run; empty if it is."""
    if cell.role == API and cell.fault == "stop":
        return "nobody above the API server could tell that it is stopped: its user has stopped it, and can continue it"
    if cell.recovery == "on" and cell.fault != "kill":
        if cell.role == API:
            return "the API server is not started again, so its death is what it is with recovery off; a kill is tried"
        if cell.phase in STARTING:
            return "only an engine that was ready is started again: as with recovery off; a kill is tried"
    return ""


def expected(cell: Cell, memory: str = "memory") -> Expected:
    """How a cell that is run has to come out.

    Args:
        cell: the cell.
        memory: what the fault ``memory`` is on this machine: that, or ``address space`` where no control group can be
            made.

    """
    fault = memory if cell.fault == "memory" else cell.fault
    if cell.role == SERVER and fault == "stop" and cell.phase != "starting":
        return Expected(("goes on",), ExitCode.OK)  # it has nothing to do until somebody ends
    raises = fault in (*RAISES, "address space")
    if cell.role == API and raises:
        # it may hit a request, a callback of the loop, or the start itself
        return Expected(("goes on", "ends"), ExitCode.INTERNAL, _raised(fault).removeprefix("raised "))
    if cell.role == SERVER and raises and cell.phase == "starting":  # it imports, and imports may be tried
        return Expected(("goes on", "ends"), ExitCode.START_FAILED, _said(cell, fault))
    if cell.recovery == "on" and cell.role != API and cell.phase not in STARTING:
        return Expected(("recovers",), ExitCode.OK, _said(cell, fault), fault == "stop")
    return Expected(("ends",), _code(cell, fault), _said(cell, fault), fault == "stop")


def _code(cell: Cell, fault: str) -> int:
    if cell.role == API:
        return {"exit": CODE, "segfault": -signal.SIGSEGV}.get(fault, -signal.SIGKILL)
    if cell.phase in STARTING:
        return ExitCode.START_FAILED
    if fault == "stop":
        return ExitCode.STALLED
    if cell.role == CORE and fault in RAISES:
        return ExitCode.INTERNAL
    return ExitCode.WORKER_DIED


def _said(cell: Cell, fault: str) -> str:
    """Headline of the report; ``{pid}`` is the victim's."""
    who = rf"{NAMES.get(cell.role, cell.role)} \(pid {{pid}}\) "
    if fault == "stop":
        return who + "hangs: no (?:sign of )?progress"
    found = {
        "kill": "was killed by SIGKILL",
        "exit": f"ended with exit code {CODE}",
        "segfault": "was killed by SIGSEGV",
        "memory": "was killed by the kernel for want of memory",
    }.get(fault)
    if found is None:
        found = _raised(fault)
        if cell.phase == "starting":  # before it can say anything
            found = f"(?:{found}|ended with exit code {1 if cell.role == SERVER else 70})"
    return who + found


def _raised(fault: str) -> str:
    return {
        "raise": "raised sitecustomize.InjectedError: a fault of the test",
        "raise unpicklable": r"raised \S*LocalError: a fault of the test",
        "address space": "MemoryError",
    }[fault]


IN_MAKE_TEST = frozenset(
    {
        Cell(API, "kill", "starting"),
        Cell(API, "kill", "idle"),
        Cell(API, "memory", "decode"),
        Cell(SERVER, "raise", "loading"),
        Cell(CORE, "raise unpicklable", "decode"),
        Cell(CORE, "exit", "draining"),
        Cell("Worker_1", "stop", "prefill"),
        Cell("Worker_0", "segfault", "decode", "on"),
    }
)
"""Each role, fault, phase and both outcomes; the others are run by ``make chaos``."""
