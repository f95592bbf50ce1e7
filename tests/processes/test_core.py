"""The supervisor's pure core: single stories, and properties over all orders of events."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import FailureReport
from drumline.processes import core as c
from drumline.processes.core import State


class Run:
    """Feeds a core, keeps what came out, with a clock of its own."""

    def __init__(self, members: int = 2, told: bool = True) -> None:
        self.core = c.SupervisorCore(window_s=0.15, rung_s=2.0, kill_wait_s=3.0)
        self.now = 100.0
        self.out: list[c.Instruction] = []
        for key in range(members):
            self(c.Added(key, f"Worker_{key}", key, told))

    def __call__(self, event: c.Event, after: float = 0.0) -> list[c.Instruction]:
        self.wait(after)
        out = self.core.handle(event, self.now)
        self.out += out
        return out

    def wait(self, seconds: float) -> None:
        """Time goes by; Ticks come exactly when they are asked for."""
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            before = (deadline, len(self.out))
            self.out += self.core.handle(c.Tick(), self.now)
            after = self.core.next_deadline()
            assert (after, len(self.out)) != before, "a tick that was asked for did nothing: a busy loop"
        self.now = end

    def start(self, ready: bool = True) -> None:
        for key in list(self.core.members):
            self(c.Born(key, 1000 + key))
            self(c.Named(key, f"Worker_TP{key}", 1000 + key, f"/log/{key}"))
            if ready:
                self(c.BecameReady(key, b"info"))
        self.out.clear()

    def told(self, kind: type) -> list:  # type: ignore[type-arg]
        return [one for one in self.out if isinstance(one, kind)]


def failure(role: str, time: float) -> FailureReport:
    return FailureReport(role=role, type="ValueError", message=role, time=time, pid=hash(role) % 1000)


def test_a_death_is_told_once_with_its_exit_whatever_comes_first() -> None:
    signs: list[c.Event] = [
        c.ConnectionEnded(0, 5.0),
        c.ProcessEnded(0, 5.01),
        c.ExitTold(0, c.Exit(signal=9), 5.02),
    ]
    for order in range(6):
        run = Run()
        run.start()
        random.Random(order).shuffle(signs)
        for sign in signs:
            run(sign, 0.01)
        run.wait(1)
        [gone] = run.told(c.TellGone)
        assert gone.exit == c.Exit(signal=9)
        [told] = run.told(c.TellFailure)
        assert told.keys == (0,)
        assert told.report.headline() == "Worker_TP0 rank 0 (pid 1000) was killed by SIGKILL while ready"
        assert run.core.members[0].state is State.GONE


def test_exit_that_nobody_tells_is_unknown_after_the_window() -> None:
    run = Run(1)
    run.start()
    run(c.ProcessEnded(0, 5.0))
    run.wait(0.1)
    assert run.told(c.TellGone) == []
    run.wait(0.1)
    assert run.told(c.TellGone)[0].exit == c.Exit()
    remote = Run(1, told=False)  # no real parent that would tell, no pidfd: end of file is all there is
    remote.start()
    remote(c.ConnectionEnded(0, 5.0))
    remote.wait(0.2)
    assert remote.told(c.TellGone)[0].exit == c.Exit()


def test_failures_of_one_window_are_one_with_the_earliest_first() -> None:
    run = Run(3)
    run.start()
    run(c.ToldFailure(2, failure("late", 7.05)))
    run(c.ToldFailure(1, failure("early", 7.0)), 0.05)
    run(c.ExitTold(0, c.Exit(code=3), 7.12), 0.05)  # noticed 0.12 s later: not the cause
    run.wait(1)
    [told] = run.told(c.TellFailure)
    assert told.report.role == "early"
    assert [report.role for report in told.report.folded] == ["Worker_TP0", "late"]
    assert set(told.keys) == {0, 1, 2}


def test_once_all_have_said_why_nobody_is_waited_for() -> None:
    run = Run(2)
    run.start()
    run(c.ToldFailure(1, failure("late", 7.05)))
    assert run.told(c.TellFailure) == []
    run(c.ToldFailure(0, failure("early", 7.0)))
    [told] = run.told(c.TellFailure)
    assert (told.report.role, [one.role for one in told.report.folded]) == ("early", ["late"])
    run(c.ExitTold(0, c.Exit(code=1), 7.1))
    run.wait(1)
    assert len(run.told(c.TellFailure)) == 1


def test_who_has_only_ended_has_said_nothing() -> None:
    """Words of the fork server, which may have been what died, may still be on their way."""
    for how, waits in ((c.Exit(), True), (c.Exit(signal=9), False), (c.Exit(code=0), False)):
        run = Run(2)
        run.start()
        run(c.ToldFailure(1, failure("Worker_TP1", 7.05)))
        run(c.ExitTold(0, how, 7.0))
        assert (run.told(c.TellFailure) == []) == waits
        run.wait(0.2)
        assert run.told(c.TellFailure)[0].report.role == "Worker_TP0"
    alone = Run(1)
    alone.start()
    alone(c.ProcessEnded(0, 7.0))
    assert alone.told(c.TellFailure) == []
    alone(c.ExitTold(0, c.Exit(signal=9), 7.0))
    assert len(alone.told(c.TellFailure)) == 1


def test_a_failure_and_the_exit_that_follows_are_one() -> None:
    run = Run(1)
    run.start(ready=False)
    run(c.ToldFailure(0, failure("Worker_TP0", 7.0)))
    run(c.ExitTold(0, c.Exit(code=1), 7.01), 0.01)
    run.wait(5)
    assert len(run.told(c.TellFailure)) == 1
    assert run.told(c.TellGone)[0].report.message == "Worker_TP0"


def test_dead_fork_server_explains_everything() -> None:
    run = Run(3)
    run(c.Born(0, 1000))
    run(c.Born(1, 1001))
    run(c.ExitTold(0, c.Exit(signal=9), 7.0))
    run(c.ServerGone(failure("ForkServer", 7.1)), 0.05)
    run(c.ConnectionEnded(1, 7.1))
    run.wait(0.2)
    told = run.told(c.TellFailure)
    assert told[0].report.role == "ForkServer"
    assert {gone.key for gone in run.told(c.TellGone)} == {0, 1, 2}
    assert [drop.key for drop in run.told(c.Drop)] == [2]  # never made: nobody is left to make it


def test_ladder_goes_up_by_rungs_and_gives_up_at_the_end() -> None:
    run = Run(1)
    run.start()
    run(c.StopRequested((0,)))
    run.wait(20)
    assert run.out == [
        c.AskToStop(0),
        c.SendSignal(0, 15),
        c.SendSignal(0, 9),
        c.Drop(0),
        c.TellGone(0, c.Exit(), None),
    ]
    assert run.core.next_deadline() is None


def test_stopped_processes_and_force_go_straight_to_sigkill() -> None:
    for event in (c.FoundStopped(0), c.StopRequested((0,), ask=False)):
        run = Run(1)
        run.start()
        run(c.StopRequested((0,)))
        run(event, 0.01)
        run(c.ExitTold(0, c.Exit(signal=9), 1.0), 0.01)
        assert [type(one) for one in run.out] == [c.AskToStop, c.SendSignal, c.TellGone]
    outside = Run(1)  # a stopped rank that nobody is ending is a stall, not a case for SIGKILL
    outside.start()
    outside(c.FoundStopped(0))
    assert outside.out == []


def test_stop_before_birth_drops_and_late_birth_is_ignored() -> None:
    run = Run(1)
    run(c.StopRequested((0,)))
    assert run.out == [c.Drop(0), c.TellGone(0, c.Exit(), None)]
    assert run(c.Born(0, 77)) == []


def test_ends_after_a_stop_are_no_failures() -> None:
    run = Run(2)
    run.start()
    run(c.StopRequested((0, 1)))
    run(c.ToldFailure(0, failure("collective lost its peer", 7.0)), 0.1)
    run(c.ExitTold(0, c.Exit(code=1), 7.0), 0.1)
    run(c.ExitTold(1, c.Exit(code=0), 7.0), 0.1)
    run.wait(10)
    assert run.told(c.TellFailure) == []


keys = st.integers(0, 3)
walls = st.floats(0, 10)
exits = st.one_of(
    st.builds(c.Exit, code=st.integers(0, 3)), st.builds(c.Exit, signal=st.sampled_from([9, 11, 15])), st.just(c.Exit())
)
events = st.one_of(
    st.builds(c.Born, keys, st.integers(2, 5)),
    st.builds(c.Named, keys, st.just("Worker"), st.integers(2, 5), st.just("")),
    st.builds(c.Progressed, keys, st.just("load")),
    st.builds(c.Spoke, keys),
    st.builds(c.BecameReady, keys, st.just(b"")),
    st.builds(c.ToldFailure, keys, st.builds(failure, st.sampled_from(["a", "b"]), walls)),
    st.builds(c.ConnectionEnded, keys, walls),
    st.builds(c.ProcessEnded, keys, walls),
    st.builds(c.ExitTold, keys, exits, walls),
    st.builds(c.StopRequested, st.lists(keys, max_size=3).map(tuple), st.booleans()),
    st.builds(c.FoundStopped, keys),
    st.builds(c.ServerProgressed, st.just("imports")),
    st.builds(c.ServerGone, st.builds(failure, st.just("ForkServer"), walls)),
    st.just(c.Tick()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(events, st.floats(0, 1)), max_size=40), st.booleans())
def test_any_order_of_events(story: list[tuple[c.Event, float]], told: bool) -> None:
    run = Run(4, told)
    states = dict.fromkeys(range(4), State.STARTING)
    for event, after in story:
        run(event, after)
        for key, record in run.core.members.items():
            assert record.state >= states[key], "a state went down"
            states[key] = record.state
    run(c.StopRequested(tuple(range(4))))
    run.wait(30)
    assert all(record.state is State.GONE for record in run.core.members.values())
    assert run.core.next_deadline() is None
    assert sorted(gone.key for gone in run.told(c.TellGone)) == [0, 1, 2, 3]
    for key in range(4):
        mine = [one for one in run.out if getattr(one, "key", None) == key]
        assert isinstance(mine[-1], c.TellGone), "something was done to one that was gone"
        signals = [one.signal for one in mine if isinstance(one, c.SendSignal)]
        assert 15 not in signals[signals.index(9) :] if 9 in signals else True
        assert sum(isinstance(one, c.TellReady) for one in mine) <= 1
        assert sum(isinstance(one, c.Drop) for one in mine) <= 1
    failed = {key for one in run.told(c.TellFailure) for key in one.keys}
    for gone in run.told(c.TellGone):
        in_failure = gone.key in failed
        assert (gone.report is not None) >= in_failure, "part of a failure, but without a report"


def test_words_of_a_member_are_progress() -> None:
    run = Run()
    run.start(ready=False)
    run.wait(5.0)
    assert run.core.last_progress == 100.0
    run(c.Spoke(1))
    assert run.core.last_progress == 105.0
    run(c.Spoke(7))  # of nobody
    assert not run.out
