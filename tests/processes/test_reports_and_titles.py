from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from drumline.errors import CollectiveError, FailureReport, RemoteCallError, StartupError
from drumline.processes import fold, make_report, print_report, starting_worker_name, titles, worker_name
from drumline.processes.reports import exit_report, log_tail
from tests.processes.targets import OddError


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def report(role: str, time: float, what: str = "exception", **more: object) -> FailureReport:
    return FailureReport(role=role, time=time, what=what, **more)  # type: ignore[arg-type]


def test_any_exception_becomes_text_that_travels() -> None:
    made = make_report(raised(OddError(1, 2, 3)), role="Worker_TP1", rank=1, phase="execute_model", step=7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=FailureReport) == made
    assert made.type == "tests.processes.targets.OddError"
    assert made.message == "(its text cannot be made: RuntimeError)"
    assert "raise error" in made.traceback
    assert (made.pid, made.rank, made.phase, made.step) == (os.getpid(), 1, "execute_model", 7)


def test_an_exception_that_carries_a_report_keeps_it() -> None:
    inner = report("Worker_TP1", 1.0)
    assert make_report(StartupError(inner), role="EngineCore_DP0") is inner
    assert make_report(RemoteCallError(inner), role="EngineCore_DP0") is inner


def test_a_memory_error_is_out_of_memory() -> None:
    made = make_report(raised(MemoryError("no")), role="Worker", phase="load_model")
    assert made.what == "oom"
    assert made.headline().endswith("ran out of memory: MemoryError: no during load_model")
    assert make_report(raised(MemoryError()), role="Worker").headline().endswith("ran out of memory: MemoryError")


def test_a_huge_traceback_is_cut_in_the_middle() -> None:
    made = make_report(raised(ValueError("x" * 100_000)), role="Worker")
    assert len(made.traceback) < 25_000
    assert "characters left out" in made.traceback


def test_the_earliest_is_the_root_and_deaths_are_noticed_late() -> None:
    first, second = report("a", 10.0), report("b", 10.2)
    assert fold([second, first]).role == "a"
    dead = report("dead", 10.05, "signal")
    root = fold([report("a", 10.0), dead])
    assert (root.role, [one.role for one in root.folded]) == ("dead", ["a"])
    root = fold([report("a", 10.0), report("dead", 10.2, "signal")])
    assert root.role == "a"


def test_who_misses_another_is_not_the_root() -> None:
    """Seen where a rank raised in a step: the other one's error was there first, since it had less to write down."""
    misses = make_report(raised(CollectiveError("rank 0 has left the group")), role="Worker_TP1")
    raises = make_report(raised(ValueError("its own")), role="Worker_TP0")
    misses.time, raises.time, raises.pid = 10.0, 10.05, misses.pid + 1
    root = fold([misses, raises])
    assert (root.role, [one.role for one in root.folded]) == ("Worker_TP0", ["Worker_TP1"])
    raises.time = 12.0  # a group's timeout, and what came of it
    assert fold([misses, raises]).role == "Worker_TP1"


def test_what_a_process_says_later_follows_from_what_it_said_first() -> None:
    """A rank whose neighbour was ended misses it, and then is asked for a step that needs the one that failed."""
    misses = make_report(raised(CollectiveError("rank 1 has left the group")), role="Worker_TP0")
    next_step = make_report(raised(RuntimeError("step 8 does not fit slot 0")), role="Worker_TP0")
    ended = exit_report(role="Worker_TP1", rank=1, pid=misses.pid + 1, phase="", code=None, signal=15)
    misses.time, next_step.time, ended.time = 10.0, 10.01, 10.4
    for given in ([misses, next_step, ended], [next_step, ended, misses]):
        root = fold(given)
        assert (root.role, [one.type for one in root.folded]) == ("Worker_TP1", [misses.type, next_step.type])


def test_a_dead_fork_server_is_the_root() -> None:
    root = fold([report("a", 10.0)], report("ForkServer", 11.0))
    assert (root.role, [one.role for one in root.folded]) == ("ForkServer", ["a"])


def test_the_same_failure_is_folded_once() -> None:
    inner = report("Worker_TP1", 1.0, pid=5)
    outer = report("EngineCore_DP0", 1.1, pid=4, folded=[report("Worker_TP1", 1.0, pid=5)])
    root = fold([inner, outer])
    assert [one.role for one in root.folded] == ["EngineCore_DP0"]


def test_out_of_memory_kill_says_so() -> None:
    made = exit_report(role="Worker", rank=0, pid=3, phase="load_model", code=None, signal=9, oom=True)
    assert made.what == "oom"
    said = "Worker rank 0 (pid 3) was killed by the kernel for want of memory (SIGKILL) during load_model"
    assert made.headline() == said
    assert "out-of-memory killer" in made.text()


def test_log_tail_reads_only_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"line %d\n" % i for i in range(100_000)) + b"\xff last")
    tail = log_tail(str(path)).splitlines()
    assert len(tail) == 50
    assert tail[-1] == "\ufffd last"
    assert log_tail(str(tmp_path / "none")) == ""


def test_the_report_is_printed_in_one_piece() -> None:
    read, write = os.pipe()
    print_report(report("Worker_TP1", 1.0, type="ValueError", message="boom", pid=7), write)
    assert os.read(read, 65536).decode() == "\ndrumline failed:\n  Worker_TP1 (pid 7) raised ValueError: boom\n"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("places", "name"),
    [
        ({}, "Worker"),
        ({"tp": (1, 2)}, "Worker_TP1"),
        ({"tp": (3, 4), "pp": (0, 2), "dp": (0, 2)}, "Worker_DP0_PP0_TP3"),
        ({"ep": (3, 8), "tp": (0, 2)}, "Worker_TP0"),
        (
            {"dp": (1, 2), "pp": (2, 3), "pcp": (0, 2), "tp": (5, 8), "dcp": (1, 2), "ep": (9, 16)},
            "Worker_DP1_PP2_PCP0_TP5_DCP1",
        ),
    ],
)
def test_worker_names(places: dict[str, tuple[int, int]], name: str) -> None:
    assert worker_name(**places) == name
    with_ep = worker_name(**places, expert_parallel=True)
    assert with_ep == (f"{name}_EP{places['ep'][0]}" if "ep" in places else name)


def test_other_names() -> None:
    assert starting_worker_name(3) == "Worker_3"
    assert titles.api_server_name() == "APIServer_0"
    assert titles.engine_core_name(1) == "EngineCore_DP1"
    assert titles.FORK_SERVER == "ForkServer"
