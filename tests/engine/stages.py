"""What the tests mix into workers of pipeline stages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import torch


class Watched:
    """Notes when its stage was busy, and can be made slow."""

    runner: Any
    rank: int

    def slow_down(self, seconds: float) -> None:
        """From now on each step of this stage takes so much longer, once it has what the stage before gives."""
        stage = self.runner._stage
        receive = type(stage).receive.__get__(stage)
        self.spans: list[tuple[float, float]] = []

        def slowly(ids: torch.Tensor) -> torch.Tensor:
            got: torch.Tensor = receive(ids)
            start = time.monotonic()
            time.sleep(seconds)
            self.spans.append((start, time.monotonic()))
            return got

        stage.receive = slowly

    def busy(self) -> list[tuple[float, float]]:
        """When its steps were slow, since the last call."""
        spans, self.spans = self.spans, []
        return spans

    def opened(self) -> dict[str, Any]:
        """Sockets of the internet, and names of threads, of this process."""
        return {
            "internet": len(psutil.Process().net_connections("inet")),
            "threads": sorted((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()),
        }
