from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.engine.blocks import BlockPool
from drumline.engine.protocol import EngineRequest, RequestOutput
from drumline.engine.scheduler import Limits, Scheduler
from drumline.errors import RequestError
from drumline.plan.sampling import SamplingParams
from drumline.plan.step import StepOutput, StepPlan, ints, pack

from .simulated import SimulatedWorker, next_token

VOCAB = 11


@dataclass
class Rig:
    """Scheduler and simulated worker; ``depth`` plans may be issued before the first one's output is looked at."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    chunked: bool = True
    caching: bool = True
    depth: int = 1
    micro_batches: int = 1
    got: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, RequestOutput] = field(default_factory=dict)
    flight: deque[StepOutput] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size, enable_prefix_caching=self.caching)
        self.scheduler = Scheduler(
            Limits(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                enable_chunked_prefill=self.chunked,
                vocab_size=VOCAB,
                num_micro_batches=self.micro_batches,
            ),
            self.pool,
        )
        self.worker = SimulatedWorker(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=VOCAB,
        )

    def issue(self) -> bool:
        if len(self.flight) >= self.depth or (plan := self.scheduler.schedule()) is None:
            return False
        self.plans.append(plan)
        unknown = {output.step for output in self.flight}
        for source in ints(plan.token_source).tolist():
            assert source not in unknown or source <= plan.step - self.micro_batches, "the first stage would wait"
        self.flight.append(self.worker.execute(plan))
        self.scheduler.check()
        return True

    def answer(self) -> None:
        for output in self.scheduler.update(self.flight.popleft()):
            assert output.request_id not in self.ended, "nothing comes after the end"
            tokens = self.got.setdefault(output.request_id, [])
            assert output.first_index == len(tokens)
            tokens += output.token_ids
            if output.finish_reason:
                self.ended[output.request_id] = output
        self.scheduler.check()

    def turn(self) -> bool:
        """What the core does in one turn. False if there is nothing left to do."""
        issued = self.issue()
        if self.flight and (not issued or len(self.flight) >= self.depth):
            self.answer()
            return True
        return issued

    def run(self, *requests: EngineRequest, turns: int = 10_000) -> None:
        for added in requests:
            self.scheduler.add(added)
        for _ in range(turns):
            if not self.turn():
                break
        else:
            raise AssertionError("it does not end")
        assert not self.scheduler.has_requests
        assert self.pool.num_free == self.num_blocks


def request(
    name: str, prompt: list[int], max_tokens: int = 8, *, eos: tuple[int, ...] = (), salt: str = "", **sampling: object
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=params,
        seed=sum(prompt) % 3,
        eos_token_ids=list(eos),
        cache_salt=salt,
    )


def expected(req: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """What the simulated model gives this request, alone."""
    history = list(req.prompt_token_ids)
    stop = set(req.sampling.stop_token_ids or ()) | (set() if req.sampling.ignore_eos else set(req.eos_token_ids))
    while True:
        history.append(next_token(req.seed, history, VOCAB))
        outputs = history[len(req.prompt_token_ids) :]
        if outputs[-1] in stop:
            return outputs, "stop"
        if len(outputs) == req.sampling.max_tokens or len(history) == max_model_len:
            return outputs, "length"


def check_all(rig: Rig, requests: list[EngineRequest]) -> None:
    for req in requests:
        tokens, reason = expected(req, rig.max_model_len)
        assert rig.got[req.request_id] == tokens
        assert rig.ended[req.request_id].finish_reason == reason


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request(depth: int):
    rig, req = Rig(depth=depth), request("a", [1, 2, 3, 4, 5])
    rig.run(req)
    check_all(rig, [req])
    assert len(rig.plans) == 8
    assert rig.ended["a"].num_cached_tokens == 0


def test_look_ahead_issues_the_next_plan_before_the_output():
    rig = Rig(depth=2)
    rig.scheduler.add(request("a", [1, 2, 3]))
    assert rig.issue()
    assert rig.issue()
    assert not rig.issue()
    assert ints(rig.plans[1].token_source).tolist() == [0]


@pytest.mark.parametrize("depth", [1, 2])
def test_long_prompt_is_computed_in_chunks(depth: int):
    rig, req = Rig(max_num_batched_tokens=7, depth=depth), request("a", [1, 2, 3] * 10, 3)
    rig.run(req)
    check_all(rig, [req])
    assert [ints(plan.num_tokens).tolist() for plan in rig.plans] == [[7], [7], [7], [7], [2], [1], [1]]
    assert [ints(plan.sample).tolist() for plan in rig.plans] == [[0]] * 4 + [[1]] * 3


def test_running_requests_come_before_waiting_ones():
    rig = Rig(max_num_batched_tokens=8)
    rig.scheduler.add(request("a", [1, 2, 3, 4]))
    rig.turn()
    rig.scheduler.add(request("b", [4] * 20))
    rig.turn()
    assert ints(rig.plans[-1].num_tokens).tolist() == [1, 7]


def test_whole_prompts_only_with_chunked_prefill_off():
    rig = Rig(max_num_batched_tokens=32, max_model_len=32, chunked=False)
    requests = [request(str(i), [i] * 20, 4) for i in range(4)]
    rig.run(*requests)
    check_all(rig, requests)
    assert all(max(ints(plan.num_tokens)) in (1, 20) for plan in rig.plans)


def test_chunked_prefill_off_needs_a_budget_for_the_longest_prompt():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Rig(max_num_batched_tokens=31, max_model_len=32, chunked=False)


def test_prefix_is_shared_within_one_plan_and_later():
    rig, prompt = Rig(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rig.run(request("a", prompt), request("b", prompt))
    assert ints(rig.plans[0].num_tokens).tolist() == [9, 1]
    assert rig.ended["b"].num_cached_tokens == 8
    rig.run(request("c", prompt), request("d", prompt[:8]), request("e", prompt, salt="other"))
    assert [rig.ended[name].num_cached_tokens for name in "cde"] == [8, 4, 0]
    stats = rig.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (9 * 4 + 8, 8 + 8 + 4)


def test_outputs_are_shared_by_the_next_turn_of_a_conversation():
    rig, first = Rig(), request("a", [1, 2, 3, 4, 5], 8)
    rig.run(first)
    rig.run(request("b", [1, 2, 3, 4, 5, *rig.got["a"], 7]))
    assert rig.ended["b"].num_cached_tokens == 12


def test_reset_of_the_prefix_cache_reaches_running_requests():
    rig, prompt = Rig(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rig.scheduler.add(request("a", prompt, 20))
    rig.turn()
    rig.scheduler.reset_prefix_cache()
    rig.run(request("b", prompt))
    assert rig.ended["b"].num_cached_tokens == 0
    rig.run(request("c", [*prompt, *rig.got["a"]], 2))
    assert rig.ended["c"].num_cached_tokens == 16  # what b computed: 9 + 8 tokens, the last one not


@pytest.mark.parametrize("depth", [1, 2])
def test_latest_arrived_is_preempted_and_comes_back_first(depth: int):
    rig = Rig(num_blocks=8, max_model_len=29, depth=depth, caching=False)
    requests = [request(str(i), [i, i + 1, i + 2], 20) for i in range(5)]
    rig.run(*requests)
    check_all(rig, requests)
    assert rig.scheduler.stats().preemptions > 0
    assert list(rig.ended) == sorted(rig.ended), "nobody overtakes"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_end_of_sequence_and_stop_tokens(depth: int):
    free = request("free", [1, 2, 3], 12, eos=(5,), ignore_eos=True)
    tokens, _ = expected(free, 128)
    rig = Rig(depth=depth)
    ends = request("eos", [1, 2, 3], 12, eos=(tokens[4],))
    stops = request("stop", [1, 2, 3], 12, stop_token_ids=[tokens[3]])
    rig.run(free, ends, stops)
    check_all(rig, [free, ends, stops])
    assert rig.ended["free"].finish_reason == "length"
    assert (rig.ended["eos"].finish_reason, rig.ended["eos"].stop_reason) == ("stop", None)
    assert (rig.ended["stop"].finish_reason, rig.ended["stop"].stop_reason) == ("stop", tokens[3])


@pytest.mark.parametrize("depth", [1, 2])
def test_ends_at_max_model_len(depth: int):
    rig, req = Rig(max_model_len=9, num_blocks=2, depth=depth), request("a", [1, 2, 3], 100)
    rig.run(req)
    assert len(rig.got["a"]) == 6
    assert rig.ended["a"].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_frees_at_once_and_nothing_follows(depth: int):
    rig = Rig(depth=depth)
    rig.scheduler.add(request("a", [1, 2, 3], 50))
    rig.scheduler.add(request("b", [4, 5, 6], 50))
    rig.issue()
    rig.issue()
    assert rig.scheduler.abort(["a", "unknown"]) == ["a"]
    assert rig.pool.num_used == len(rig.scheduler._running()[0].blocks)
    rig.scheduler.abort(["b", "b"])
    assert rig.pool.num_free == rig.num_blocks
    while rig.flight:
        rig.answer()
    assert rig.got == {}
    rig.run(request("a", [7], 3))
    assert len(rig.got["a"]) == 3


def test_abort_of_a_waiting_request():
    rig = Rig(max_num_seqs=1)
    rig.scheduler.add(request("a", [1]))
    rig.scheduler.add(request("b", [2]))
    rig.turn()
    rig.scheduler.abort(["b"])
    rig.run()
    assert list(rig.ended) == ["a"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (request("a", []), "empty"),
        (request("a", [1] * 32), "at most 31"),
        (request("a", [1, 11]), "token id 11 is not in the vocabulary"),
        (request("a", [1, -1]), "token id -1 is not in the vocabulary"),
        (request("a", [1] * 20, 9), "whole pool has 6"),
        (request("taken", [1]), "in use"),
    ],
)
def test_what_can_never_be_served_is_refused(wrong: EngineRequest, text: str):
    rig = Rig(max_model_len=32, num_blocks=6)
    rig.scheduler.add(request("taken", [1]))
    with pytest.raises(RequestError, match=text):
        rig.scheduler.add(wrong)
    rig.run()
    assert list(rig.ended) == ["taken"]


def test_what_just_fits_the_pool_is_served():
    rig = Rig(max_model_len=32, num_blocks=6)
    rig.run(request("a", [1] * 20, 5))
    assert len(rig.got["a"]) == 5


def test_logprobs_go_to_those_who_asked():
    rig = Rig()
    rig.run(request("a", [1], 3, logprobs=0), request("b", [2], 3))
    assert rig.ended["a"].logprobs[0] is not None
    assert rig.ended["b"].logprobs == []


def test_output_of_another_step_is_refused():
    rig = Rig(depth=2)
    rig.scheduler.add(request("a", [1]))
    rig.issue()
    rig.issue()
    with pytest.raises(ValueError, match="step 0 is due"):
        rig.scheduler.update(rig.flight[1])
    with pytest.raises(ValueError, match="not those of its plan"):
        rig.scheduler.update(StepOutput(0, pack([3]), pack([1])))


# micro-batches


def rows(rig: Rig, plan: int) -> list[int]:
    return ints(rig.plans[plan].slots).tolist()


@pytest.mark.parametrize("depth", [2, 3])
def test_decoding_requests_are_dealt_out_over_the_stages(depth: int):
    rig = Rig(depth=depth, micro_batches=2, max_num_batched_tokens=6)
    requests = [request(str(i), [i, i, i], 20) for i in range(4)]
    rig.run(*requests)
    check_all(rig, requests)
    assert [sorted(rows(rig, plan)) for plan in range(8, 12)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_lone_request_waits_for_its_token_when_the_first_stage_would():
    rig, req = Rig(depth=3, micro_batches=2), request("a", [1, 2, 3])
    rig.scheduler.add(req)
    assert rig.issue()
    assert not rig.issue()
    rig.answer()
    assert rig.issue()
    rig.run()
    check_all(rig, [req])


def test_chunks_of_a_prompt_follow_each_other():
    rig, req = Rig(max_num_batched_tokens=7, depth=3, micro_batches=3), request("a", [1, 2, 3] * 7, 3)
    rig.scheduler.add(req)
    assert rig.issue() and rig.issue() and rig.issue()  # noqa: PT018
    rig.run()
    check_all(rig, [req])


def test_answers_that_come_early_starve_nobody():
    """One plan in flight is not enough for two stages; the requests take turns all the same."""
    rig = Rig(depth=1, micro_batches=2)
    requests = [request(str(i), [i, i, i], 20) for i in range(4)]
    rig.run(*requests)
    check_all(rig, requests)
    ends = [max(n for n in range(len(rig.plans)) if slot in rows(rig, n)) for slot in range(4)]
    assert max(ends) - min(ends) <= 2  # two that are left are one micro-batch each


# random lives

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, EngineRequest, int | None]]:
    """(turn, request, turns until it is aborted or None)."""
    found = []
    for number in range(draw(st.integers(1, 10))):
        req = request(
            str(number),
            draw(prompts),
            draw(st.integers(1, 16)),
            eos=(0,) if draw(st.booleans()) else (),
            salt=draw(st.sampled_from(["", "", "x"])),
            stop_token_ids=draw(st.sampled_from([None, [1]])),
        )
        found.append((draw(st.integers(0, 20)), req, draw(st.none() | st.none() | st.integers(0, 12))))
    return found


@st.composite
def rigs(draw: st.DrawFn) -> Callable[[int, int], Rig]:
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(25, 41))
    least = -(-(max_model_len - 1) // block_size)
    settings_ = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": least + draw(st.integers(0, 12)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "chunked": draw(st.booleans()),
        "caching": draw(st.booleans()),
        "max_num_batched_tokens": draw(st.integers(1, 30)),
    }
    if not settings_["chunked"]:
        settings_["max_num_batched_tokens"] += max_model_len
    return lambda depth, micro_batches: Rig(depth=depth, micro_batches=micro_batches, **settings_)  # type: ignore[arg-type]


def live(rig: Rig, plan: list[tuple[int, EngineRequest, int | None]]) -> None:
    """Let requests come and be aborted at their turns, until nothing is left."""
    adds = {turn: [r for t, r, _ in plan if t == turn] for turn, _, _ in plan}
    aborts: dict[int, list[str]] = {}
    for turn, req, after in plan:
        if after is not None:
            aborts.setdefault(turn + after, []).append(req.request_id)
    last = max([*adds, *aborts])
    for turn in range(5_000):
        for req in adds.get(turn, ()):
            rig.scheduler.add(req)
        rig.scheduler.abort(aborts.get(turn, ()))
        rig.scheduler.check()
        if not rig.turn() and turn > last:
            return
    raise AssertionError("it does not end")


@settings(max_examples=60, deadline=None)
@given(rigs(), arrivals())
def test_any_life_gives_everyone_what_it_gets_alone(make: Callable[[int, int], Rig], plan: list):
    for depth, micro_batches in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (4, 3)):
        rig = make(depth, micro_batches)
        live(rig, plan)
        aborted = {req.request_id for _, req, after in plan if after is not None}
        for _, req, _ in plan:
            tokens, reason = expected(req, rig.max_model_len)
            got = rig.got.get(req.request_id, [])
            if req.request_id in aborted and req.request_id not in rig.ended:
                assert got == tokens[: len(got)]
            else:
                assert got == tokens
                assert rig.ended[req.request_id].finish_reason == reason
        assert not rig.scheduler.has_requests
        assert rig.pool.num_free == rig.num_blocks
        if not rig.caching:
            assert rig.scheduler.stats().prefix_hits == 0
