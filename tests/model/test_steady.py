"""Decode steps that go on as the step before did, against the same steps the general way."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from drumline.model.attention import AttentionBatch, KVCache
from drumline.model.runner import ModelRunner
from drumline.model.sampling import Sampler
from drumline.model.steady import SteadyRows
from drumline.parallel.groups import init_groups
from drumline.parallel.layout import Layout
from drumline.parallel.shards import Range
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import StepPlan, ints
from tests.model.driver import Driver

VOCAB, LONGEST, BLOCK, BLOCKS = 50, 60, 4, 400

SAMPLINGS = [
    SlotSampling(),
    SlotSampling(temperature=1.0, seed=3),
    SlotSampling(temperature=0.7, top_k=5, seed=2**63 + 7),
    SlotSampling(frequency_penalty=1.5),
    SlotSampling(logprobs=2),
]


class Mixing:
    """Logits that depend on all that a forward is told of its rows."""

    def __init__(self, gathers: bool) -> None:
        self.gathers = gathers

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        rows = []
        for row, (computed, count) in enumerate(
            zip(batch.num_computed.tolist(), batch.num_tokens.tolist(), strict=True)
        ):
            blocks = batch.tables[row, : -(-(computed + count) // BLOCK)].tolist()
            rows += [hash((tuple(blocks), computed + place)) % 1000 for place in range(count)]
        mixed = ids * 7 + positions * 31 + torch.tensor(rows)
        return torch.sin(mixed[keep, None] * torch.arange(1, VOCAB + 1)).float() * 4


def outputs(steady: bool, gathers: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], int]:
    """Tokens of random requests, and how many steps went the short way."""
    groups = init_groups(Layout(), 0, "")
    followed = 0
    follow: Callable[[SteadyRows, StepPlan], bool] = SteadyRows.follow

    def counted(rows: SteadyRows, plan: StepPlan) -> bool:
        nonlocal followed
        found = steady and follow(rows, plan)
        followed += found
        return found

    monkeypatch.setattr(SteadyRows, "follow", counted)
    runner = ModelRunner(
        Mixing(gathers),
        Sampler((Range(0, VOCAB),), groups.tp),
        num_kv_heads=1,
        max_model_len=LONGEST,
        device=torch.device("cpu"),
    )
    runner.set_cache(
        KVCache(
            num_layers=1,
            num_blocks=BLOCKS,
            num_kv_heads=1,
            block_size=BLOCK,
            head_dim=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )

    def execute(plan: StepPlan):  # type: ignore[no-untyped-def]
        output = runner.execute(plan)
        return output if output is not None else runner.sample(plan.step)

    rng = random.Random(seed)
    driver = Driver(execute, num_blocks=BLOCKS, block_size=BLOCK, seed=seed)
    requests = []
    for number in range(60):
        if number % 12 == 0 or rng.random() < 0.1:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            requests.append(driver.add(prompt, rng.choice(SAMPLINGS), rng.randint(1, 30)))
        if driver.running and rng.random() < 0.03:
            driver.preempt(rng.choice(driver.running))
        if driver.running:
            driver.step(defer=rng.random() < 0.05)
    driver.run()
    for request in requests:
        assert len(request.outputs) == request.max_tokens
    groups.close()
    return [request.outputs for request in requests], followed


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_short_way_gives_the_same(gathers: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, none = outputs(False, gathers, seed, monkeypatch)
    monkeypatch.undo()
    found, followed = outputs(True, gathers, seed, monkeypatch)
    assert found == expected
    assert none == 0
    assert followed > 0


def test_a_plan_that_contradicts_the_slots_is_refused() -> None:
    """It does not follow, and the general way says what is wrong."""
    groups = init_groups(Layout(), 0, "")
    runner = ModelRunner(
        Mixing(False),
        Sampler((Range(0, VOCAB),), groups.tp),
        num_kv_heads=1,
        max_model_len=LONGEST,
        device=torch.device("cpu"),
    )
    cache = KVCache(
        num_layers=1,
        num_blocks=BLOCKS,
        num_kv_heads=1,
        block_size=BLOCK,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    runner.set_cache(cache)
    plans: list[StepPlan] = []

    def execute(plan: StepPlan):  # type: ignore[no-untyped-def]
        plans.append(plan)
        return runner.execute(plan)

    driver = Driver(execute, num_blocks=BLOCKS, block_size=BLOCK)
    driver.add([1, 2, 3], max_tokens=30)
    for _ in range(6):
        driver.step()
    with pytest.raises(RuntimeError, match="does not fit slot"):
        runner.execute(plans[-1])
    assert ints(plans[-1].slots).tolist() == [driver.running[0].slot]
    groups.close()
