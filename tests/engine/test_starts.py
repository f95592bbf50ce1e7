"""Seconds of a start by phase: whatever comes in whatever order, they add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.engine.starts import FrontMarks, StartMarks


def test_a_start_with_two_workers() -> None:
    marks = StartMarks()
    for now, phase in enumerate(
        ["start", "fork server: imports torch", "fork server: imports x", "fork server: ready"]
    ):
        marks.mark(phase, now)
    marks.mark("starting workers", 4)
    for rank, phase, now in (
        (1, "init_device", 5),
        (0, "init_device", 6),
        (1, "load_model", 6.5),
        (0, "load_model", 8),
        (0, "load_model 40%", 8.5),
        (1, "load_model 100%", 9),
    ):
        marks.mark_rank(rank, phase, now)
    marks.mark("KV cache", 10)
    for rank in (0, 1):
        marks.mark_rank(rank, "warm-up", 11 + rank)
    assert "ready" not in marks
    marks.mark("ready", 14)
    assert "ready" in marks
    assert marks.seconds() == {
        "fork server": 1,
        "imports": 2,
        "engine core": 1,
        "workers": 2,
        "groups": 2,
        "model": 2,
        "KV cache": 2,
        "warm-up": 2,
    }


def test_a_fork_server_that_was_there_and_a_worker_in_the_engine_core() -> None:
    marks = StartMarks()
    for now, phase in enumerate(["start", "starting workers", "init_device", "load_model", "KV cache", "ready"]):
        marks.mark(phase, now)
    assert marks.seconds() == {"engine core": 1, "workers": 1, "groups": 1, "model": 1, "warm-up": 1}


PHASES = [
    "fork server: imports torch",
    "fork server: ready",
    "starting workers",
    "init_device",
    "load_model 3%",
    "KV cache",
]
MOMENT = st.floats(0, 100)


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.none() | st.integers(0, 3), MOMENT)), MOMENT, MOMENT)
def test_they_add_up_whatever_is_told(events: list[tuple[str, int | None, float]], start: float, took: float) -> None:
    marks = StartMarks()
    marks.mark("start", start)
    end = start + took
    for phase, rank, at in events:
        if rank is None:
            marks.mark(phase, min(at, end))
        else:
            marks.mark_rank(rank, phase, min(at, end))
    marks.mark("ready", end)
    seconds = marks.seconds()
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(took, abs=1e-6)
    front = FrontMarks(start - 3, start - 2)
    front.end("imports of the command", start - 1)
    front.end("model folder", start)
    phases = front.ready(seconds, end + 1)
    assert sum(phases.values()) == pytest.approx(took + 4, abs=1e-6)
    assert phases["front end"] == pytest.approx(1, abs=1e-6)
