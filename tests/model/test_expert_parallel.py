"""Expert parallelism over real processes: the tokens of transformers, over TP, PP and engines, however experts move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig, ParallelConfig
from drumline.model.spec import read_spec
from drumline.parallel.layout import Layout
from drumline.plan.sampling import SlotSampling
from tests.model.conftest import engine_config, start_worker
from tests.model.driver import Driver, Running, prompts
from tests.model.equality import Tally, compare_sampled
from tests.model.ranks import RankHost

Tiny = Callable[[str], tuple[Path, Any]]

SAMPLINGS = [
    SlotSampling(),
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.7, top_p=0.8, seed=12),
    SlotSampling(temperature=1.2, top_k=7, seed=13),
    SlotSampling(),
]


def configured(folder: Path, **parallel: Any) -> EngineConfig:
    return replace(
        engine_config(folder),
        parallel=ParallelConfig(enable_expert_parallel=True, distributed_timeout_s=25, **parallel),
    )


def never(plan: Any) -> Any:
    raise AssertionError("engines go in lockstep")


class Engines:
    """All engines of a configuration, driven step by step; who has nothing to do runs a dummy batch."""

    def __init__(self, host: RankHost, config: EngineConfig) -> None:
        self.host = host
        parallel = config.parallel
        self.names = host.start(config, num_blocks=128, block_size=4)
        layout = Layout.of(parallel)
        self.world, self.output = layout.world_size, layout.output_rank
        self.drivers = [Driver(never, max_chunk=11, seed=engine) for engine in range(parallel.data_parallel_size)]
        self.requests: list[Running] = []
        self.dummies = 0

    def add(self, engine: int, vocabulary: int, *, seed: int, count: int = 5, max_tokens: int = 8) -> None:
        """Requests of all kinds for one engine."""
        for prompt, sampling in zip(prompts(count, vocabulary, 30, seed=seed), SAMPLINGS, strict=False):
            self.requests.append(self.drivers[engine].add(prompt, sampling, max_tokens))

    def step(self) -> None:
        plans = [driver.plan() if driver.running else None for driver in self.drivers]
        calls = [("execute_dummy_batch", ()) if plan is None else ("execute_model", (plan,)) for plan in plans]
        self.dummies += plans.count(None)
        answers = self.host.each([call for call in calls for _ in range(self.world)])
        for engine, (driver, plan) in enumerate(zip(self.drivers, plans, strict=True)):
            mine = answers[engine * self.world : (engine + 1) * self.world]
            assert all(answer is None for answer in mine[: self.output])
            if plan is not None:
                assert len({answer.tokens for answer in mine[self.output :]}) == 1
                driver.take(plan, mine[self.output])

    def run(self) -> None:
        while any(driver.running for driver in self.drivers):
            self.step()

    def check(self, model: Any) -> None:
        tally = Tally()
        for request in self.requests:
            assert request.done
            tally.add(compare_sampled(model, request.prompt, request.outputs, request.sampling), request.sampling)
        tally.check()


LONG = [pytest.mark.matrix]
CASES = [
    pytest.param("qwen3_moe", 2, 1, "auto", "sum", marks=LONG),
    ("qwen3_moe", 3, 1, "all_to_all", "all_to_all"),
    pytest.param("mixtral", 3, 1, "allgather_reducescatter", "all_gather", marks=LONG),
    ("mixtral", 2, 2, "auto", "sum"),
    pytest.param("gpt_oss", 3, 1, "auto", "sum", marks=LONG),
    pytest.param("gpt_oss", 2, 1, "all_to_all", "all_to_all", marks=LONG),
    pytest.param("deepseek_v3", 2, 1, "auto", "sum", marks=LONG),
    pytest.param("deepseek_v3", 3, 1, "all_to_all", "all_to_all", marks=LONG),
    pytest.param("qwen3_moe-sparse", 3, 1, "auto", "sum", marks=LONG),
    pytest.param("qwen3_moe-sparse", 2, 1, "all_to_all", "all_to_all", marks=LONG),
]


@pytest.mark.parametrize(("shape", "tp", "pp", "how", "way"), CASES)
def test_experts_over_tensor_parallel_ranks(
    rank_host: RankHost, tiny: Tiny, shape: str, tp: int, pp: int, how: str, way: str
) -> None:
    folder, model = tiny(shape)
    config = configured(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, all2all_backend=how)
    engines = Engines(rank_host, config)
    stages = [f"_PP{stage}" for stage in range(pp)] if pp > 1 else [""]
    assert engines.names == [f"Worker{stage}_TP{rank}_EP{rank}" for stage in stages for rank in range(tp)]
    engines.add(0, model.config.vocab_size, seed=0)
    for _ in range(4):
        engines.step()
    engines.drivers[0].preempt(engines.requests[1])
    engines.run()
    engines.check(model)
    found = rank_host.call("experts")
    spec = read_spec(folder).experts
    assert spec is not None
    count = spec.num_experts
    for stage in range(pp):
        ranks = found[stage * tp : (stage + 1) * tp]
        assert {layer["way"] for rank in ranks for layer in rank} == {way}
        for layers in zip(*ranks, strict=True):  # every expert is on exactly one rank of its stage
            assert sum(layer["rows"] for layer in layers) == count
            assert len({weight for layer in layers for weight in layer["weights"]}) == count


@pytest.mark.parametrize("how", ["auto", "all_to_all", "allgather_reducescatter"])
def test_one_rank_has_all_experts(tiny: Tiny, how: str) -> None:
    """Every way of bringing rows to experts, where they are here already."""
    folder, model = tiny("qwen3_moe-sparse")
    worker = start_worker(configured(folder, all2all_backend=how))
    driver = Driver(worker.execute_model, max_chunk=11)  # type: ignore[arg-type]
    requests = [driver.add(p, s, 5) for p, s in zip(prompts(3, 271, 20), SAMPLINGS, strict=False)]
    driver.run()
    tally = Tally()
    for request in requests:
        tally.add(compare_sampled(model, request.prompt, request.outputs, request.sampling), request.sampling)
    tally.check()
    worker.shutdown()


ENGINES = [
    pytest.param("qwen3_moe", 2, 1, 1, "auto", marks=LONG),
    ("qwen3_moe", 2, 2, 1, "auto"),
    pytest.param("mixtral", 3, 1, 1, "auto", marks=LONG),
    pytest.param("mixtral", 2, 1, 1, "allgather_reducescatter", marks=LONG),
    pytest.param("mixtral", 2, 2, 1, "allgather_reducescatter", marks=LONG),
    pytest.param("mixtral", 2, 1, 2, "all_to_all", marks=LONG),
    pytest.param("deepseek_v3", 2, 2, 1, "all_to_all", marks=LONG),
]


@pytest.mark.parametrize(("shape", "dp", "tp", "pp", "how"), ENGINES)
def test_experts_over_engines_in_lockstep(
    rank_host: RankHost, tiny: Tiny, shape: str, dp: int, tp: int, pp: int, how: str
) -> None:
    """One world of all engines' ranks; engines have unlike batches, and at times nothing to do."""
    folder, model = tiny(shape)
    engines = Engines(
        rank_host,
        configured(
            folder,
            data_parallel_size=dp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            all2all_backend=how,
        ),
    )
    assert len(engines.names) == dp * tp * pp
    assert [name.split("_")[1] for name in engines.names[:: tp * pp]] == [f"DP{engine}" for engine in range(dp)]
    vocabulary = model.config.vocab_size
    engines.add(0, vocabulary, seed=1)
    for _ in range(3):
        engines.step()
    engines.add(dp - 1, vocabulary, seed=2, count=3, max_tokens=5)
    engines.run()
    engines.add(dp - 1, vocabulary, seed=3, count=2)
    engines.run()
    engines.check(model)
    assert engines.dummies > 5


BALANCED = [
    pytest.param("qwen3_moe", {"tensor_parallel_size": 3}, 4, marks=LONG),
    pytest.param("mixtral", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 0, marks=LONG),
    pytest.param("mixtral", {"tensor_parallel_size": 2, "all2all_backend": "all_to_all"}, 2, marks=LONG),
    pytest.param("gpt_oss", {"tensor_parallel_size": 2}, 3, marks=LONG),
    pytest.param("qwen3_moe", {"tensor_parallel_size": 1, "data_parallel_size": 3}, 3, marks=LONG),
    ("qwen3_moe-sparse", {"data_parallel_size": 2, "tensor_parallel_size": 2}, 2),
]


@pytest.mark.parametrize(("shape", "parallel", "redundant"), BALANCED)
def test_experts_move_and_nothing_changes(
    rank_host: RankHost, tiny: Tiny, shape: str, parallel: dict[str, Any], redundant: int
) -> None:
    """Experts are placed anew every third step, over and over; tokens stay those of transformers."""
    folder, model = tiny(shape)
    balancing = {"step_interval": 3, "window_size": 4, "num_redundant_experts": redundant, "log_balancedness": True}
    config = configured(folder, enable_eplb=True, eplb_config=balancing, **parallel)
    engines = Engines(rank_host, config)
    last = config.parallel.data_parallel_size - 1
    before = expert_weights(rank_host, config)
    engines.add(0, model.config.vocab_size, seed=4, max_tokens=12)
    for _ in range(4):
        engines.step()
    engines.add(last, model.config.vocab_size, seed=5, max_tokens=12)
    engines.run()
    engines.check(model)
    for moved in by_stage(rank_host.call("moved"), config):
        assert len(set(moved)) == 1
        assert moved[0] > 0
    assert expert_weights(rank_host, config) == before


def by_stage(ranks: list[Any], config: EngineConfig) -> list[list[Any]]:
    """Answers of all ranks, those of each EP group together."""
    tp, pp = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    return [[answer for place, answer in enumerate(ranks) if place // tp % pp == stage] for stage in range(pp)]


def expert_weights(host: RankHost, config: EngineConfig) -> dict[tuple[int, int, int], float]:
    """Of each (stage, layer, expert) one number of its weights, by what placements and slots say; replicas agree."""
    found: dict[tuple[int, int, int], float] = {}
    for stage, ranks in enumerate(by_stage(host.call("experts"), config)):
        for layer, modules in enumerate(zip(*ranks, strict=True)):
            assert len({module["placement"] for module in modules}) == 1
            weights = [weight for module in modules for weight in module["weights"]]
            for expert, weight in zip(modules[0]["placement"], weights, strict=True):
                assert found.setdefault((stage, layer, expert), weight) == weight
    return found
