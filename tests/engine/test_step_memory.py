"""Steps never need more memory than the workers said they have; what does not fit alone fails alone."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drumline.engine import admission
from drumline.engine.admission import MAX_SCORED, MAX_SCORED_VALUES, extra_of
from drumline.engine.protocol import OUT_OF_MEMORY, EngineRequest
from drumline.plan.memory import ORDINARY, Extra, StepCosts, extra_bytes
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import StepPlan, ints

from .rig import COSTS, Rig, check_all, request

EXTRA = st.fixed_dictionaries(
    {}, optional={"prompt_logprobs": st.integers(0, 6), "logprobs": st.integers(0, 9), "ignore_eos": st.just(True)}
)
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), EXTRA), min_size=1, max_size=10)


def bytes_of(*extras: Extra) -> int:
    return extra_bytes(extras, COSTS, most_rows=MAX_SCORED, most_values=MAX_SCORED_VALUES)


def used_by(plan: StepPlan, slots: dict[int, EngineRequest]) -> int:
    """What this step takes beyond an ordinary one."""
    rows = values = 0
    columns = (ints(part).tolist() for part in (plan.slots, plan.num_tokens, plan.num_computed, plan.sample))
    for slot, count, computed, sample in zip(*columns, strict=True):
        asked = slots[slot]
        if asked.sampling.prompt_logprobs is not None:
            scored = max(min(computed + count, len(asked.prompt_token_ids) - 1) - computed, 0)
            rows += scored
            values += scored * (asked.sampling.prompt_logprobs + 1)
        if sample:
            values += max((asked.sampling.logprobs or 0) - admission.ORDINARY_LOGPROBS, 0)
    return rows * COSTS.row_bytes + values * COSTS.value_bytes


@settings(max_examples=150)
@given(
    REQUESTS,
    st.integers(0, 700),
    st.sampled_from([1, 2]),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from([24, 64]),
    st.integers(0, 3),
)
@example([(15, 3, {}), *[(33, 1, {"prompt_logprobs": 0})] * 2], 352, 1, "priority", 24, 0)
@example([(15, 3, {}), *[(33, 1, {"prompt_logprobs": 0})] * 2], 352, 1, "fcfs", 24, 2)
def test_no_step_needs_more_than_there_is(
    asked: list[tuple[int, int, dict[str, int]]], memory: int, depth: int, policy: str, blocks: int, late: int
) -> None:
    """Also where those that held it have ended when the worker says that it has no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "ORDINARY_LOGPROBS", 3)
        rig = Rig(
            memory=memory,
            answers_after=late,
            depth=depth,
            policy=policy,
            num_blocks=blocks,
            max_num_batched_tokens=32,
        )
        requests = [
            request(str(n), [(n + at) % 11 for at in range(length)], tokens, priority=n % 3, **more)
            for n, (length, tokens, more) in enumerate(asked)
        ]
        rig.run(*requests)
        slots: dict[int, EngineRequest] = {}
        for plan in rig.plans:
            slots |= {start.slot: requests[int(start.request_id)] for start in plan.starts}
            assert used_by(plan, slots) <= memory
        fit = []
        for one in requests:
            sampling = one.sampling
            made = SlotSampling(
                temperature=0,
                seed=0,
                logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
                prompt_logprobs=-1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
            )
            if bytes_of(extra_of(len(one.prompt_token_ids), made)) <= memory:
                fit.append(one)
            else:
                assert rig.ended[one.request_id].stop_reason == OUT_OF_MEMORY
                assert one.request_id not in rig.got
        check_all(rig, fit)


def test_what_is_asked_for_is_bounded_as_plans_are() -> None:
    scored = Extra(rows=200, prompt_values=400)
    assert bytes_of(ORDINARY, ORDINARY) == 0
    assert bytes_of(scored) == 200 * 10 + 400
    assert bytes_of(scored, scored, scored) == MAX_SCORED * 10 + 1200
    assert bytes_of(Extra(rows=1, prompt_values=3 * MAX_SCORED_VALUES)) == 10 + 3 * MAX_SCORED_VALUES
    assert StepCosts.highest([StepCosts(row_bytes=1, value_bytes=9), COSTS]) == StepCosts(row_bytes=10, value_bytes=9)


def test_who_ended_while_it_waits_for_memory_is_forgotten() -> None:
    rig = Rig(memory=0)
    rig.scheduler.add(request("a", [1, 2, 3], prompt_logprobs=1))
    assert rig.scheduler.schedule() is None
    assert rig.scheduler.wanted == ("a", 2 * COSTS.row_bytes + 4)
    rig.scheduler.abort(["a"])
    assert rig.scheduler.wanted is None
    assert rig.scheduler.deny("a", 24, "late") == []
    rig.run(request("b", [1, 2]))
