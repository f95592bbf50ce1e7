from __future__ import annotations

import itertools

import pytest

from drumline.engine.protocol import EngineRequest
from drumline.errors import RequestError
from drumline.plan.step import StepOutput, ints, pack

from .rig import Rig, check_all, expected, request


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


def test_hits_are_counted_once_whatever_happens_to_the_request():
    rig = Rig(num_blocks=8, max_model_len=29)
    rig.run(*(request(str(i), [1, 2, 3, 4, i], 20) for i in range(4)))
    stats = rig.scheduler.stats()
    assert stats.preemptions > 0
    assert (stats.prefix_queries, stats.prefix_hits) == (4 * 5, 3 * 4)
    assert [rig.ended[str(i)].num_cached_tokens for i in range(4)] == [0, 4, 4, 4]


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
    assert sum(output.num_preemptions for output in rig.ended.values()) == rig.scheduler.stats().preemptions
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


@pytest.mark.parametrize(("depth", "micro_batches"), [(1, 1), (2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_ends_where_bad_words_leave_no_token(depth: int, micro_batches: int, at: int):
    """Also while others take its blocks, and never with a token too many."""
    rig = Rig(num_blocks=8, max_model_len=29, depth=depth, micro_batches=micro_batches, caching=False)
    others = [request(str(number), [number, number + 1, number + 2], 20) for number in range(4)]
    free = request("free", [1, 2, 3], 20)
    tokens, _ = expected(free, 29)
    before = tokens[max(at - 2, 0) : at]
    assert tokens.index(before[-1]) == at - 1, "it would come to its end before"
    dead = request("dead", [1, 2, 3], 20, allowed_token_ids=[3, 4], bad_words=["x"])
    dead.bad_words_ids = [[*before, 3], [*before, 4], [9, 9, 9, 3]]
    rig.run(others[0], dead, *others[1:])
    check_all(rig, others)
    assert rig.got["dead"] == tokens[:at]
    assert (rig.ended["dead"].finish_reason, rig.ended["dead"].stop_reason) == ("stop", "bad_words")


def test_what_can_have_no_first_token_is_refused():
    rig = Rig()
    for params in (
        {"allowed_token_ids": [5, 6], "min_tokens": 1, "stop_token_ids": [5, 6, 7]},
        {"min_tokens": 2, "stop_token_ids": list(range(10))},
        {"allowed_token_ids": [11, 12]},
    ):
        with pytest.raises(RequestError):
            rig.scheduler.add(request("a", [1, 2], eos=(10,), **params))
    lone = request("a", [1, 2], allowed_token_ids=[5], bad_words=["x"])
    lone.bad_words_ids = [[5]]
    with pytest.raises(RequestError, match="bad_words forbid 5"):
        rig.scheduler.add(lone)
    ended = request("a", [1, 2], allowed_token_ids=[5], bad_words=["x"])
    ended.bad_words_ids, ended.output_token_ids = [[7, 5]], [5, 7]
    with pytest.raises(RequestError, match="after the known output"):
        rig.scheduler.add(ended)
    assert not rig.scheduler.has_requests


@pytest.mark.parametrize("depth", [1, 2])
def test_ends_at_max_model_len(depth: int):
    rig, req = Rig(max_model_len=9, num_blocks=2, depth=depth), request("a", [1, 2, 3], 100)
    rig.run(req)
    assert len(rig.got["a"]) == 6
    assert rig.ended["a"].finish_reason == "length"


@pytest.mark.parametrize("size", [*itertools.product((1, 2), (1, 3), (1, 2), (1, 2), (1, 2, 3), (True, False))])
def test_limits_are_refused_or_serve_the_shortest_request(size: tuple[int, int, int, int, int, bool]):
    num_blocks, block_size, seqs, tokens, length, chunked = size
    options = dict(
        zip(("max_num_seqs", "max_num_batched_tokens", "max_model_len"), (seqs, tokens, length), strict=True)
    )
    if length == 1 or (not chunked and tokens < length):
        with pytest.raises(ValueError, match="max_model_len"):
            Rig(num_blocks=num_blocks, block_size=block_size, chunked=chunked, **options)
        return
    rig, requests = (
        Rig(num_blocks=num_blocks, block_size=block_size, chunked=chunked, **options),
        [request("a", [1], 1)],
    )
    rig.run(*requests)
    check_all(rig, requests)


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


def test_a_lone_request_is_sent_one_plan_ahead():
    rig, req = Rig(depth=4, micro_batches=3), request("a", [1, 2, 3])
    rig.scheduler.add(req)
    assert rig.issue()
    assert rig.issue()
    assert not rig.issue()
    rig.answer()
    assert rig.issue()
    rig.run()
    check_all(rig, [req])


def test_no_plan_makes_the_first_stage_wait_while_there_are_other_requests():
    rig, requests = Rig(depth=3, micro_batches=2), [request(name, [1, 2, 3]) for name in "ab"]
    rig.run(*requests)
    check_all(rig, requests)
    assert [rows(rig, plan) for plan in range(1, 5)] == [[0], [1], [0], [1]]


def test_chunks_of_a_prompt_follow_each_other():
    rig, req = Rig(max_num_batched_tokens=7, depth=3, micro_batches=3), request("a", [1, 2, 3] * 7, 3)
    rig.scheduler.add(req)
    assert rig.issue() and rig.issue() and rig.issue()  # noqa: PT018
    rig.run()
    check_all(rig, [req])


def test_prompts_of_one_step_are_split_over_the_stages():
    """24 tokens of prompts would fit into one plan; each of two stages gets half, while the other works on the rest."""
    rig = Rig(max_num_batched_tokens=64, depth=2, micro_batches=2, least_micro_tokens=4)
    requests = [request(str(i), [i + 1] * 8, 6) for i in range(3)]
    for one in requests:
        rig.scheduler.add(one)
    assert rig.issue() and rig.issue()  # noqa: PT018
    assert counts(rig, 2) == [[8, 4], [1, 4, 8]]  # beside the first token of the first
    rig.run()
    check_all(rig, requests)


def test_few_prompt_tokens_are_not_split_and_many_fill_plans():
    few = Rig(max_num_batched_tokens=64, depth=2, micro_batches=2, least_micro_tokens=24)
    few.run(*(request(str(i), [i + 1] * 8, 2) for i in range(3)))
    assert counts(few, 1) == [[8, 8, 8]]
    many = Rig(max_num_batched_tokens=16, depth=2, micro_batches=2, least_micro_tokens=4)
    many.run(*(request(str(i), [i + 1] * 8, 2) for i in range(6)))
    assert [sum(one) for one in counts(many, 2)] == [16, 16]
    whole = Rig(max_num_batched_tokens=128, depth=2, micro_batches=2, least_micro_tokens=4, chunked=False)
    whole.run(*(request(str(i), [i + 1] * 8, 2) for i in range(3)))
    assert counts(whole, 1) == [[8, 8, 8]]  # without chunks a prompt is never cut


def test_answers_that_come_early_starve_nobody():
    """One plan in flight is not enough for two stages; the requests take turns all the same."""
    rig = Rig(depth=1, micro_batches=2)
    requests = [request(str(i), [i, i, i], 20) for i in range(4)]
    rig.run(*requests)
    check_all(rig, requests)
    ends = [max(n for n in range(len(rig.plans)) if slot in rows(rig, n)) for slot in range(4)]
    assert max(ends) - min(ends) <= 2  # two that are left are one micro-batch each


# prompts beside streams


def test_prompts_that_arrive_at_once_are_finished_one_after_another():
    rig = Rig(max_num_prefill_tokens=8)
    rig.run(*(request(str(i), [i + 1] * 6, 20) for i in range(4)))
    assert [ints(plan.num_tokens).tolist() for plan in rig.plans[:4]] == [[6, 2], [4, 4], [2, 6], [1] * 4]


def counts(rig: Rig, plans: int) -> list[list[int]]:
    return [ints(plan.num_tokens).tolist() for plan in rig.plans[:plans]]


def test_a_prompt_alone_in_its_step_may_have_all_of_it():
    rig = Rig(max_num_prefill_tokens=8)
    rig.scheduler.add(request("a", [1] * 30, 20))
    rig.turn()
    rig.scheduler.add(request("b", [2] * 30, 20))
    rig.run()
    assert counts(rig, 6) == [[30], [8], [8], [8], [6], [1, 1]]


def test_more_prompts_than_half_a_step_share_steps_with_streams():
    rig = Rig(max_num_prefill_tokens=8, max_num_batched_tokens=40)
    rig.scheduler.add(request("a", [1] * 3, 20))
    rig.turn()
    rig.turn()
    rig.scheduler.add(request("b", [2] * 33, 20))
    rig.run()
    assert counts(rig, 8) == [[3], [1], [1, 8], [1, 8], [8], [8], [1], [1, 1]]


def test_a_burst_goes_first_where_no_stream_has_more_than_its_first_token():
    rig = Rig(max_num_prefill_tokens=8, max_num_batched_tokens=20)
    rig.run(*(request(str(number), [number + 1] * 8, 3) for number in range(6)))  # the first is not beside streams
    assert counts(rig, 8) == [[8], [8], [8], [8], [8], [8], [1] * 6, [1] * 6]
    rig = Rig(max_num_prefill_tokens=8, max_num_batched_tokens=20)
    rig.run(*(request(str(number), [number + 1] * 8, 3) for number in range(7)))
    assert counts(rig, 3) == [[8], [1, 8], [1, 1, 8]]


@pytest.mark.parametrize("fresh", [True, False])
def test_prompts_that_keep_coming_hold_streams_up_for_a_bounded_time(fresh: bool):
    rig = Rig(max_num_prefill_tokens=8, max_num_batched_tokens=32, max_num_seqs=32)
    rig.scheduler.add(request("a", [1] * 3, 20))
    rig.turn()
    if not fresh:
        rig.turn()
    for number in range(24):
        rig.scheduler.add(request(str(number), [number % 8 + 1, number // 8 + 1] * 4, 4))
        rig.turn()
    with_stream = "".join("x" if 0 in ints(plan.slots).tolist() else "." for plan in rig.plans)
    assert max(map(len, with_stream.split("x"))) == (8 if fresh else 2)
    rig.run()


def test_a_prompt_that_cannot_be_let_in_does_not_hold_up_streams():
    rig = Rig(max_num_prefill_tokens=8, max_num_seqs=1)
    requests = [request("a", [1] * 3, 5), request("b", [2] * 9, 3)]
    rig.run(*requests)
    check_all(rig, requests)
    assert counts(rig, 6) == [[3], [1], [1], [1], [1], [9]]


@pytest.mark.parametrize(("policy", "micro_batches"), [("priority", 1), ("fcfs", 2)])
def test_streams_and_prompts_share_steps_otherwise(policy: str, micro_batches: int):
    rig = Rig(max_num_prefill_tokens=8, policy=policy, micro_batches=micro_batches)
    rig.scheduler.add(request("a", [1] * 3, 20))
    rig.turn()
    rig.scheduler.add(request("b", [2] * 30, 20))
    rig.run()
    assert counts(rig, 3) == [[3], [1, 8], [1, 8]]


def test_one_long_prompt_leaves_room_for_a_short_one():
    rig = Rig(long_prefill_token_threshold=10)
    rig.scheduler.add(request("long", [1] * 30, 20))
    rig.scheduler.add(request("short", [2] * 5, 20))
    rig.run()
    assert [ints(plan.num_tokens).tolist() for plan in rig.plans[:3]] == [[10, 5], [1, 10], [1, 10]]


# priorities


def priority_rig(**limits: int) -> Rig:
    return Rig(policy="priority", caching=False, **limits)


def order_of(rig: Rig) -> str:
    """Names in the order of their (last) start."""
    starts = [start.request_id for plan in rig.plans for start in plan.starts]
    return "".join(sorted(set(starts), key=lambda name: len(starts) - starts[::-1].index(name)))


def test_lower_priority_comes_first_then_arrival():
    rig = priority_rig(max_num_seqs=1)
    rig.run(
        *(request(name, [1], 2, priority=level) for name, level in zip("abcdef", (3, 0, -1, 3, 0, -1), strict=True))
    )
    assert order_of(rig) == "cfbead"


def test_without_the_policy_priorities_mean_nothing():
    rig = Rig(max_num_seqs=1, caching=False)
    rig.run(*(request(name, [1], 2, priority=level) for name, level in zip("abc", (3, 0, -1), strict=True)))
    assert order_of(rig) == "abc"


def test_an_urgent_request_takes_the_slot_of_the_least_urgent_one():
    rig = priority_rig(max_num_seqs=3)
    for name, level in (("a", 0), ("b", 2), ("c", 2)):
        rig.scheduler.add(request(name, [1, 2, 3], 20, priority=level))
    rig.turn()
    rig.scheduler.add(late := request("d", [3, 2, 1], 20, priority=1))
    rig.turn()
    assert [start.request_id for start in rig.plans[-1].starts] == ["d"]
    assert rig.scheduler.request_ids() == ["a", "b", "c", "d"]
    assert [r.id for r in rig.scheduler._running()] == ["a", "d", "b"]
    rig.scheduler.add(request("e", [1, 2, 3], 20, priority=2))  # no more urgent than b
    rig.run()
    assert rig.scheduler.stats().preemptions == 1
    check_all(rig, [late])


def test_an_urgent_request_takes_the_blocks_of_less_urgent_ones():
    rig = priority_rig(num_blocks=12)
    for name in "ab":
        rig.scheduler.add(request(name, [1, 2, 3] * 5, 20, priority=1))
    rig.turn()
    rig.scheduler.add(request("u", [3, 2, 1] * 6, 10, priority=0))
    rig.turn()
    assert [r.id for r in rig.scheduler._running()] == ["u", "a"]
    rig.run()
    assert next(iter(rig.ended)) == "u"


def test_nobody_is_preempted_in_vain():
    rig = priority_rig(num_blocks=12)
    rig.scheduler.add(request("a", [1, 2, 3] * 9, 20, priority=0))
    rig.scheduler.add(request("b", [1, 2, 3], 20, priority=1))
    rig.turn()
    rig.scheduler.add(request("u", [3, 2, 1] * 9, 10, priority=0))  # all of b's blocks are not enough
    rig.turn()
    assert [r.id for r in rig.scheduler._running()] == ["a", "b"]
    rig.run()


@pytest.mark.parametrize("more", [0, 4])
def test_blocks_that_victims_share_count_once(more: int):
    """Ten requests with the same long beginning: all together they hold hardly more than one of them does."""
    rig = Rig(policy="priority", num_blocks=60, max_num_seqs=16, max_model_len=200, max_num_batched_tokens=512)
    rig.scheduler.add(request("a", list(range(9)) * 8, 20, priority=0))  # 18 blocks
    for name in range(10):
        rig.scheduler.add(request(f"low{name}", [9] * 80 + [name % 9] * 2, 30, priority=5))  # 20 shared, 1 each
    rig.turn()
    assert rig.scheduler.stats().num_running == 11
    rig.scheduler.add(request("u", [3] * (41 * 4 + more), 10, priority=0))  # one more for a, which runs
    rig.turn()
    running = [r.id for r in rig.scheduler._running()]
    assert rig.scheduler.stats().preemptions == (0 if more else 10), running
    assert ("u" in running) == (not more)
    rig.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_urgent_prompt_comes_before_the_rest_of_a_long_one(depth: int):
    rig = priority_rig(max_num_batched_tokens=8)
    rig.depth = depth
    rig.scheduler.add(request("long", [1] * 40, 4, priority=1))
    rig.issue()
    rig.scheduler.add(request("u", [2] * 8, 4, priority=0))
    if depth == 1:
        rig.answer()
    rig.issue()
    assert ints(rig.plans[-1].sample).tolist() == [1]
    rig.run()
    assert list(rig.ended) == ["u", "long"]


def stream(rig: Rig, turns: int) -> None:
    """Urgent requests without end, more than can be served."""
    for turn in range(turns):
        rig.scheduler.add(request(f"u{turn}", [turn % 5, 1, 2], 4, priority=0))
        rig.turn()


@pytest.mark.parametrize("seqs", [1, 3])
def test_a_flood_of_urgent_requests_starves_nobody(seqs: int):
    rig = priority_rig(max_num_seqs=seqs, max_overtakes=4)
    slow = [request(f"s{i}", [i] * 9, 6, priority=i) for i in range(1, 5)]
    for one in slow:
        rig.scheduler.add(one)
    stream(rig, 200)
    check_all(rig, slow)
    assert all(f"u{i}" in rig.ended for i in range(10)), "most are still urgent ones"
    starved = priority_rig(max_num_seqs=seqs, max_overtakes=10**9)
    starved.scheduler.add(slow[0])
    stream(starved, 200)
    assert "s1" not in starved.ended


def test_who_was_promoted_does_not_preempt_who_is_more_urgent():
    rig = priority_rig(max_num_seqs=1, max_overtakes=1)
    rig.scheduler.add(request("low", [1], 4, priority=5))
    for name in "ab":
        rig.scheduler.add(request(name, [1], 4, priority=0))
    rig.run()
    assert list(rig.ended) == ["a", "low", "b"]
    assert rig.scheduler.stats().preemptions == 0
