"""Context parallelism with whole experts on each rank: PCP places bring different tokens to the experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig
from tests.model.ranks import RankHost
from tests.model.test_context_ranks import Sizes, name_of, serve, start

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
