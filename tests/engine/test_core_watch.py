"""When the engine core itself stands still. Pure, and the thread that looks."""

from __future__ import annotations

import threading
import time

import pytest

from drumline.engine.core_watch import BUSY, CoreLooks, CoreWatch
from drumline.engine.protocol import Beat


def looked(
    seconds: int, answer: tuple[int, str] | None, *, computes: bool = False, until: int | None = None
) -> list[tuple[int, bool]]:
    """What looks a second apart say; limits of 10 s, and of 60 s for steps. ``answer``: what each question gets."""
    looks = CoreLooks(10.0, 60.0)
    found = []
    for second in range(seconds + 1):
        now = 1000.0 + second
        if (said := looks.look(now)) is not None:
            found.append((second, said[1]))
        looks.asked(second * 0.9 if computes else 0.0, now, apart_s=1.0)
        if answer is not None and (until is None or second < until):
            turns, where = answer
            looks.answered(second if turns < 0 else turns, where, now + 0.1)
    return found


@pytest.mark.parametrize(
    ("answer", "computes", "suspected", "hangs"),
    [
        (None, False, 5, 10),  # silent: stopped, or C code
        (None, True, 55, 60),  # silent, and computes: a step
        ((7, BUSY), False, 6, 11),  # an endless loop
        ((7, BUSY), True, 6, 11),
        ((7, "waiting"), False, None, None),
        ((7, "step"), True, None, None),  # the executor looks after steps
        ((-1, BUSY), True, None, None),  # it turns
    ],
)
def test_when_it_hangs(
    answer: tuple[int, str] | None, computes: bool, suspected: int | None, hangs: int | None
) -> None:
    found = looked(80, answer, computes=computes)
    assert next((second for second, _ in found), None) == suspected
    assert next((second for second, over in found if over), None) == hangs


def test_silence_begins_with_the_first_question_that_is_not_answered() -> None:
    assert looked(40, (-1, BUSY), until=20)[0] == (25, False)


def test_a_front_end_that_was_stopped_itself_cannot_tell() -> None:
    looks = CoreLooks(10.0, 60.0)
    looks.asked(0.0, 1000.0, apart_s=1.0)
    looks.asked(0.0, 1100.0, apart_s=1.0)
    assert looks.look(1101.0) is None


def test_the_thread_looks_only_while_somebody_waits() -> None:
    waiting, asked, told = threading.Event(), [0], threading.Event()
    watch = CoreWatch(
        CoreLooks(0.4, 0.4),
        0.05,
        waits=waiting.is_set,
        ask=lambda number: asked.append(number),
        computed=lambda: 0.0,
        on_look=lambda found: told.set() if found is not None and found[1] else None,
    )
    try:
        time.sleep(0.3)
        assert asked == [0]
        waiting.set()
        watch.arm()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:  # answered: no hang
            watch.on_beat(Beat(asked[-1], asked[-1], BUSY))
            time.sleep(0.02)
        assert not told.is_set()
        assert told.wait(5)  # not answered any more
        waiting.clear()
        time.sleep(0.2)
        count = len(asked)
        time.sleep(0.3)
        assert len(asked) == count
    finally:
        watch.close()
