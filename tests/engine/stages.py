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
    layers: Any

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

    def num_layers(self) -> int:
        """Of this stage."""
        return int(self.layers.size)

    def fail_soon(self, stage: int, steps: int) -> None:
        """So many steps from now this stage raises before its forward, and the others wait for it."""
        if self.layers.start != stage:  # one layer a stage
            return
        forward, left = self.runner.forward, [steps]

        def failing(*args: Any) -> torch.Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("a stage that cannot go on")
            result: torch.Tensor = forward(*args)
            return result

        self.runner.forward = failing

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
