"""The decision of recovery (``engine.recovery``), against a made-up engine that some requests kill."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.engine.recovery import Fail, GiveUp, Instruction, Limits, Recovery, Restart, Send, Withdraw

LIMITS = Limits(restarts=3, window_s=600.0, backoff_s=1.0, trial_tokens=4)


@dataclass
class World:
    """An engine that gives each of its requests a token a turn, and dies when one gets to its poison."""

    length: dict[str, int]
    poison: dict[str, int]
    """The token at which a request kills the engine."""
    turn_s: float = 1.0
    core: Recovery = field(default_factory=lambda: Recovery(LIMITS))
    tokens: dict[str, int] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    gave_up: bool = False
    now: float = 0.0
    deaths: list[float] = field(default_factory=list)
    restart: float | None = None
    killed_in_trial: bool = False

    def add(self, name: str) -> None:
        self.tokens[name] = 0
        if self.core.added(name):
            self.active.add(name)

    def obey(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            match one:
                case Restart():
                    self.restart = one.after_s
                case Send():
                    assert self.restart is None, "nothing is sent to a dead engine"
                    assert not self.active.intersection(one.request_ids), "sent twice"
                    assert not self.ended.intersection(one.request_ids)
                    self.active.update(one.request_ids)
                case Withdraw():
                    self.active.remove(one.request_id)
                case Fail():
                    self.failed.append(one.request_id)
                    assert one.deaths >= 3
                case GiveUp():
                    self.gave_up = True

    def die(self) -> None:
        self.deaths.append(self.now)
        self.active.clear()
        self.obey(self.core.died(self.now))

    def turn(self, killed: bool) -> None:
        self.now += self.turn_s
        if self.restart is not None:
            self.now += self.restart
            self.restart = None
            self.obey(self.core.ready())
        if self.core.trial is not None:
            assert self.active == {self.core.trial}, "a suspect is alone"
            self.killed_in_trial = self.killed_in_trial or killed
        elif not self.gave_up:
            assert self.active == set(self.tokens) - self.ended - set(self.failed), "somebody is forgotten"
        if killed or any(self.poison.get(name) == self.tokens[name] for name in self.active):
            self.die()
            return
        for name in sorted(self.active):
            if name not in self.active:
                continue
            self.tokens[name] += 1
            if self.tokens[name] >= self.length[name]:
                self.active.remove(name)
                self.ended.add(name)
                self.obey(self.core.ended(name, well=True))
            else:
                self.obey(self.core.advanced(name, 1))
            if self.core.trial is not None:
                break  # whoever is sent now gets tokens from the next turn on


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    poisons=st.lists(st.none() | st.integers(0, 29), min_size=6, max_size=6),
    arrivals=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    kills=st.sets(st.integers(1, 60), max_size=3),
)
def test_every_request_has_its_end(
    lengths: list[int], poisons: list[int | None], arrivals: list[int], kills: set[int]
) -> None:
    names = [str(number) for number in range(len(lengths))]
    given_poisons = zip(names, poisons, lengths, strict=False)
    bad = {name: at for name, at, length in given_poisons if at is not None and at < length}
    world = World(dict(zip(names, lengths, strict=True)), bad)
    turn = 0
    while not world.gave_up and (turn < 60 or len(world.ended) + len(world.failed) < len(names)):
        for name, arrival in zip(names, arrivals, strict=False):
            if arrival == turn:
                world.add(name)
        turn += 1
        world.turn(turn in kills)
        assert turn < 2000, "it does not end"
    assert len(set(world.failed)) == len(world.failed)
    assert not world.ended.intersection(bad), "a poisonous request has no good end"
    if not world.killed_in_trial:
        assert set(world.failed) <= set(bad), "an innocent request was failed"
    if not world.gave_up:
        assert world.ended | set(world.failed) == set(names)
    if len(bad) + len(kills) <= 1:
        assert not world.gave_up


@given(gaps=st.lists(st.floats(0, 400), min_size=1, max_size=30))
def test_restarts_are_limited_to_so_many_in_a_window(gaps: list[float]) -> None:
    core, now, times = Recovery(LIMITS), 0.0, []
    for gap in gaps:
        now += gap
        found = core.died(now)
        recent = [time for time in times if now - time < LIMITS.window_s]
        if len(recent) == LIMITS.restarts:
            assert isinstance(found[0], GiveUp)
            assert core.died(now + 10_000) == []
            return
        assert found == [Restart([0.0, 1.0, 2.0][len(recent)])]
        times.append(now)
        assert core.ready() == []


def test_a_poisonous_request_is_named_and_its_deaths_are_forgotten() -> None:
    core = Recovery(LIMITS)
    assert core.added("good")
    assert core.added("bad")
    assert core.died(0.0) == [Restart(0.0)]
    assert not core.added("late")
    assert core.ready() == [Send(("good", "bad", "late"))]
    assert core.died(1.0) == [Restart(1.0)]
    assert core.ready() == [Send(("good",))]
    assert not core.settled
    assert core.advanced("good", 3) == []
    assert core.advanced("good", 1) == [Withdraw("good"), Send(("bad",))]
    assert core.died(2.0) == [Fail("bad", 3), Restart(0.0)]
    assert core.counted(2.0) == 0
    assert core.ready() == [Send(("good", "late"))]
    assert core.settled


def test_deaths_apart_make_no_suspect() -> None:
    core = Recovery(LIMITS)
    core.added("a")
    core.died(0.0)
    core.ready()
    core.ended("a", well=True)
    core.added("b")
    core.died(1.0)
    assert core.ready() == [Send(("b",))]
    assert core.settled


def test_starts_that_fail_make_no_suspects_but_count() -> None:
    core = Recovery(LIMITS)
    core.added("a")
    assert [core.died(float(time)) for time in range(3)] == [[Restart(0.0)], [Restart(1.0)], [Restart(2.0)]]
    assert core.ready() == [Send(("a",))]
    assert core.settled
    (last,) = core.died(4.0)
    assert isinstance(last, GiveUp)


def test_requests_that_kill_now_and_then_are_no_broken_engine() -> None:
    core = Recovery(LIMITS)
    for number in range(9):
        now = number * 201.0 + 1
        core.added("bad")
        for _ in range(2):
            core.died(now)
            core.ready()
        found = core.died(now)
        assert found[0] == Fail("bad", 3)
        if number < 2:
            assert found[1] == Restart(0.0)
            core.ready()
            continue
        assert isinstance(found[1], GiveUp), "three within 600 s and none that was well"
        break
    core = Recovery(LIMITS)
    for number in range(9):
        core.added("bad")
        for _ in range(2):
            core.died(number * 301.0)
            core.ready()
        assert core.died(number * 301.0) == [Fail("bad", 3), Restart(0.0)]
        core.ready()


@pytest.mark.parametrize("well", [True, False])
def test_a_suspect_that_is_over_makes_room_for_the_next(well: bool) -> None:
    core = Recovery(LIMITS)
    for name in "abc":
        core.added(name)
    core.died(0.0)
    core.ready()
    core.died(1.0)
    assert core.ended("b") == []  # its client left while all wait
    assert core.ready() == [Send(("a",))]
    assert core.ended("a", well=well) == [Send(("c",))]
    assert core.ended("c", well=well) == []
    assert core.settled


def test_an_engine_that_every_request_kills_is_given_up() -> None:
    world = World(dict.fromkeys("abcdefgh", 30), dict.fromkeys("abcdefgh", 0))
    for name in "abcdefgh":
        world.add(name)
    for _ in range(50):
        if not world.gave_up:
            world.turn(False)
    assert world.gave_up
    assert len(world.failed) == LIMITS.restarts
