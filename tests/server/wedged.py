"""An executor whose engine core never gets back from handing over a step."""

from __future__ import annotations

from typing import Any

from drumline.executor.mp import MultiprocExecutor


class Wedged(MultiprocExecutor):
    """Its first step is handed over for ever."""

    def execute_model(self, plan: Any, non_block: bool = False) -> Any:
        while True:
            pass
