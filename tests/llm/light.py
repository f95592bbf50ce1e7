"""A worker without torch or weights, for tests of lives and ends: its fork server starts at once."""

from __future__ import annotations

import time
from typing import Any

from drumline.plan.kv import KVSpec
from drumline.worker.protocol import WorkerContext
from tests.engine.simulated import SimulatedModelWorker

from .conftest import SMALL, VOCAB

LIGHT: dict[str, Any] = {
    **SMALL,
    "worker_cls": "tests.llm.light:Light",
    "preload": ("drumline.engine.main", "drumline.worker.main", "tests.llm.light"),
    "platform": "cpu",
}
SLOW = {**LIGHT, "worker_cls": "tests.llm.light:Slow"}
STEP_S = 0.005


class Light(SimulatedModelWorker):
    """Its tokens are a function of prompt and seed."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.rank = context.rank
        self.simulated.vocab_size = VOCAB
        self.block_size = context.config.cache.block_size

    def get_kv_cache_spec(self) -> KVSpec:
        return KVSpec(
            num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=self.block_size, bytes_per_block=64
        )

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_from_config(self, kv_configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass


class Slow(Light):
    """Takes its time, so that there is a middle of it."""

    def execute_model(self, plan: Any) -> Any:
        time.sleep(STEP_S)
        return super().execute_model(plan)
