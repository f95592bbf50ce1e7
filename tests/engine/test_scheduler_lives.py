"""Random lives of the scheduler, against a worker that reads back what it wrote (``rig``, ``simulated``).

Whatever comes, in whatever order: every request gets the tokens that it gets alone, every plan is within the limits,
nobody is overtaken against the order, no block is lost or shared wrongly, somebody can always go on, and in the end
everything is free.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from drumline.engine.protocol import EngineRequest

from .rig import Rig, expected, request


@st.composite
def rigs(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a rig in which every request of ``requests`` fits."""
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(25, 41))
    chunked = draw(st.booleans())
    micro_batches = draw(st.integers(1, 3))
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": -(-(max_model_len - 1) // block_size) + draw(st.integers(0, 12)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "chunked": chunked,
        "caching": draw(st.booleans()),
        "max_num_batched_tokens": draw(st.integers(1, 30)) + (0 if chunked else max_model_len),
        "depth": draw(st.integers(1, 4)),
        "micro_batches": micro_batches,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_num_prefill_tokens": draw(st.sampled_from([0, 1, 5, 16])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 6])),
        "max_overtakes": draw(st.sampled_from([1, 2, 32])),
        "least_micro_tokens": draw(st.sampled_from([1, 4, 256])),
    }


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    """Beginnings are often equal. It gets its name when it is added."""
    beginning = [0, 1, 2, 2, 1, 0] * 3
    return request(
        "",
        beginning[: draw(st.sampled_from([0, 6, 12, 18]))] + draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)),
        draw(st.integers(1, 16)),
        eos=(0,) if draw(st.booleans()) else (),
        salt=draw(st.sampled_from(["", "", "x"])),
        priority=draw(st.integers(-1, 2)),
        stop_token_ids=draw(st.sampled_from([None, [1]])),
    )


class Life(RuleBasedStateMachine):
    """Arrivals, aborts, plans and answers in any order."""

    @initialize(settings_=rigs())
    def start(self, settings_: dict[str, Any]) -> None:
        self.rig = Rig(**settings_)
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()

    @rule(new=requests(), copies=st.sampled_from([1, 2, 3]))
    def arrive(self, new: EngineRequest, copies: int) -> None:
        for _ in range(copies):
            name = str(len(self.requests))
            self.requests[name] = one = request(
                name,
                new.prompt_token_ids,
                new.sampling.max_tokens or 1,
                eos=tuple(new.eos_token_ids),
                salt=new.cache_salt,
                priority=new.priority,
                stop_token_ids=new.sampling.stop_token_ids,
            )
            self.rig.scheduler.add(one)
        self.rig.scheduler.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.update(self.rig.scheduler.abort([name]))
        self.rig.scheduler.check()

    @rule()
    def plan(self) -> None:
        self.rig.issue()

    @rule(turns=st.integers(1, 8))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.rig.turn()

    @precondition(lambda self: self.rig.flight)
    @rule()
    def answer(self) -> None:
        self.rig.answer()

    @rule()
    def reset(self) -> None:
        self.rig.scheduler.reset_prefix_cache()
        self.rig.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.run()
        for name, one in self.requests.items():
            tokens, reason = expected(one, rig.max_model_len)
            got = rig.got.get(name, [])
            if name in self.aborted:
                assert got == tokens[: len(got)]
                assert name not in rig.ended
            else:
                assert got == tokens
                assert rig.ended[name].finish_reason == reason
        assert rig.caching or rig.scheduler.stats().prefix_hits == 0


Life.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestLife = Life.TestCase


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 6)), min_size=20, max_size=60),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_waiting_is_bounded(arrivals: list[tuple[int, int, int]], seqs: int, micro_batches: int, overtakes: int):
    """More and more urgent requests: nobody waits for more of them than the limit says."""
    rig = Rig(
        policy="priority",
        max_num_seqs=seqs,
        num_blocks=24,
        max_overtakes=overtakes,
        micro_batches=micro_batches,
        depth=micro_batches,
        caching=False,
    )
    older: dict[str, int] = {}
    overtaken: dict[str, int] = {}
    started: set[str] = set()
    for number, (level, prompt, tokens) in enumerate(arrivals):
        name = str(number)
        older[name], overtaken[name] = len(set(older) - set(rig.ended)), 0
        rig.scheduler.add(request(name, [number % 5] * prompt, tokens, priority=level))
        rig.turn()
        count_overtakes(rig, started, overtaken)
    while rig.turn():
        count_overtakes(rig, started, overtaken)
    for name, count in overtaken.items():
        # one promotion for each that arrived before, and one for it; a plan lets in as many as there are slots
        assert count <= (older[name] + 1) * (overtakes + seqs)


def count_overtakes(rig: Rig, started: set[str], overtaken: dict[str, int]) -> None:
    """Add up how often somebody was let in for the first time before one that arrived earlier and never was."""
    for plan in rig.plans:
        for start in plan.starts:
            if start.request_id not in started:
                started.add(start.request_id)
                for name in overtaken:
                    if name not in started and int(name) < int(start.request_id):
                        overtaken[name] += 1
    rig.plans.clear()
