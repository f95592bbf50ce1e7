"""Requests whose first output tokens are known (an engine before gave them): they go on, and say nothing twice.

Whatever the place of the cut, prompt and known tokens are computed, and everything is as if there had been no cut.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.engine.protocol import EngineRequest
from drumline.errors import RequestError

from .rig import VOCAB, Rig, request


def after(whole: EngineRequest, tokens: list[int]) -> EngineRequest:
    return msgspec.structs.replace(whole, output_token_ids=tokens)


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 30), min_size=5, max_size=5),
    eos=st.sampled_from([(), (3,), (3, 7)]),
    budget=st.sampled_from([3, 8, 64]),
    blocks=st.sampled_from([16, 64]),
    depth=st.sampled_from([1, 2]),
)
def test_the_rest_is_the_same(
    prompts: list[list[int]], cuts: list[int], eos: tuple[int, ...], budget: int, blocks: int, depth: int
) -> None:
    def rig() -> Rig:
        return Rig(num_blocks=blocks, max_num_batched_tokens=budget, max_model_len=64, depth=depth)

    asked = [request(str(i), prompt, 24, eos=eos, logprobs=0) for i, prompt in enumerate(prompts)]
    whole = rig()
    whole.run(*asked)
    rest = rig()
    kept = {one.request_id: whole.got[one.request_id][:cut] for one, cut in zip(asked, cuts, strict=False)}
    kept = {name: tokens[:-1] if tokens == whole.got[name] else tokens for name, tokens in kept.items()}
    rest.got = {name: list(tokens) for name, tokens in kept.items()}  # the rig checks that indices go on from there
    rest.run(*(after(one, kept[one.request_id]) for one in asked))
    assert rest.got == whole.got
    for name, last in whole.ended.items():
        other = rest.ended[name]
        assert (other.finish_reason, other.stop_reason) == (last.finish_reason, last.stop_reason)
        assert other.logprobs == last.logprobs


def test_nothing_is_said_of_the_prompt_again() -> None:
    rig, asked = Rig(), request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 8, prompt_logprobs=1)
    rig.got["a"] = [1, 2]
    rig.scheduler.add(after(asked, [1, 2]))
    first = None
    while first is None:
        assert rig.issue()
        found = rig.scheduler.update(rig.flight.popleft())
        first = found[0] if found else None
    assert (first.first_index, first.prompt_logprobs, first.num_cached_tokens) == (2, [], 0)
    assert rig.plans[0].starts[0].sampling.prompt_logprobs == -1


def test_without_a_known_token_all_is_said() -> None:
    rig, asked = Rig(), request("a", [1, 2, 3], 2, prompt_logprobs=1)
    rig.scheduler.add(after(asked, []))
    assert rig.issue()
    (first,) = rig.scheduler.update(rig.flight.popleft())
    assert len(first.prompt_logprobs) == 2


@pytest.mark.parametrize("known", [[1] * 8, [1] * 9, [1, VOCAB], [-1]])
def test_an_output_that_cannot_go_on_is_refused(known: list[int]) -> None:
    rig = Rig()
    with pytest.raises(RequestError):
        rig.scheduler.add(after(request("a", [1, 2, 3], 8), known))
    assert not rig.scheduler.has_requests
