"""Context parallelism with whole experts on each rank: PCP places bring different tokens to the experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig
from drumline.model.worker import ModelWorker
from drumline.parallel.groups import GroupCoordinator, Groups
from drumline.parallel.layout import GroupKind, Layout
from drumline.worker.protocol import WorkerContext
from tests.model.ranks import RankHost
from tests.model.test_context_ranks import Sizes, name_of, serve, start
from tests.model.test_expert_parallel import Engines, configured

Tiny = Callable[[str], tuple[Path, Any]]


class _WithExperts:
    """A host that starts ranks with expert parallelism."""

    def __init__(self, host: RankHost) -> None:
        self._host = host
        self.call = host.call

    def start(self, config: EngineConfig, num_blocks: int, block_size: int) -> list[str]:
        parallel = replace(config.parallel, enable_expert_parallel=True)
        return self._host.start(config.with_(parallel=parallel), num_blocks, block_size)


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", [Sizes(pcp=2), Sizes(tp=2, pcp=2, dcp=2)], ids=name_of)
def test_tokens_are_those_of_transformers(rank_host: RankHost, tiny: Tiny, sizes: Sizes) -> None:
    folder, model = tiny("qwen3_moe")
    host: Any = _WithExperts(rank_host)
    names = start(host, folder, sizes)
    assert all("_EP" in name for name in names)
    serve(host, sizes, model)


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", [{"prefill_context": 2}, {"tensor": 4, "decode_context": 2}], ids=str)
def test_engines_in_lockstep(rank_host: RankHost, tiny: Tiny, sizes: dict[str, int]) -> None:
    """Groups span engines, and context parallelism is inside of each."""
    folder, model = tiny("qwen3_moe")
    named = {f"{name}_parallel_size": size for name, size in sizes.items()}
    engines = Engines(rank_host, configured(folder, data_parallel_size=2, **named))
    engines.add(0, model.config.vocab_size, seed=6)
    for _ in range(3):
        engines.step()
    engines.add(1, model.config.vocab_size, seed=7, count=3, max_tokens=5)
    engines.run()
    engines.check(model)


@pytest.mark.parametrize("engine", [0, 1])
def test_members_of_a_later_engine_are_found(tiny: Tiny, engine: int) -> None:
    """Ranks of groups that span engines are beyond those of one engine's layout."""
    config = configured(
        tiny("qwen3_moe")[0],
        data_parallel_size=2,
        data_parallel_rank=engine,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
    )
    context = WorkerContext(config=config, rank=1, local_rank=1, distributed_init_method="", is_driver=True)
    worker, layout, rank = ModelWorker(context), Layout.of(config.parallel, span_engines=True), 2 * engine + 1
    kinds = {kind: GroupCoordinator(kind, layout.group_of(kind, rank), rank) for kind in GroupKind}
    assert kinds[GroupKind.DCP].ranks == (2 * engine, 2 * engine + 1)
    joined = worker._join_context(Groups(layout, rank, kinds, ""))
    assert joined is not None
    assert [(member.pcp, member.tp) for member in joined._members] == [(0, 0), (1, 0)]
