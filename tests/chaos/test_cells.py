"""The matrix itself: every combination is run or has a reason, and what is expected makes sense."""

from __future__ import annotations

import re

from drumline.errors import ExitCode
from tests.chaos.cells import (
    API,
    FAULTS,
    IN_MAKE_TEST,
    PHASES,
    RECOVERY,
    ROLES,
    STARTING,
    Cell,
    cells,
    combinations,
    expected,
    reason,
)


def test_every_combination_is_run_or_has_a_reason() -> None:
    found = list(combinations())
    assert len(found) == len(set(found)) == len(ROLES) * len(FAULTS) * len(PHASES) * len(RECOVERY)
    run = set(cells())
    assert all((cell in run) != bool(reason(cell)) for cell in found)


def test_what_is_left_out_is_tried_in_another_way() -> None:
    """Each role meets each fault in each phase without recovery; with it, each but those that it does not touch."""
    run = set(cells())
    for cell in combinations():
        stopped_root = cell.role == API and cell.fault == "stop"
        assert (Cell(cell.role, cell.fault, cell.phase) in run) != stopped_root
        assert Cell(cell.role, "kill", cell.phase, cell.recovery) in run
        if cell.role != API and cell.phase not in STARTING:
            assert cell in run


def test_expectations() -> None:
    for cell in cells():
        for memory in ("memory", "address space"):
            found = expected(cell, memory)
            re.compile(found.said.format(pid=1))
            if "recovers" in found.outcomes or found.outcomes == ("goes on",):
                assert found.code == ExitCode.OK
            else:
                assert found.code != ExitCode.OK
            assert found.stalls == (cell.fault == "stop" and "goes on" not in found.outcomes)


def test_what_make_test_runs() -> None:
    """Each role, fault and phase, with and without recovery."""
    assert set(cells()) >= IN_MAKE_TEST
    for name, values in (("role", ROLES), ("fault", FAULTS), ("recovery", RECOVERY)):
        assert {getattr(cell, name) for cell in IN_MAKE_TEST} == set(values)
    assert {cell.phase for cell in IN_MAKE_TEST} >= set(PHASES) - {"warming up"}
