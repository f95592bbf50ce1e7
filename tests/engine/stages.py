"""What the tests mix into workers of pipeline stages."""

from __future__ import annotations

import os
import select
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
    layout: Any

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

    def meet(self, fifo: str) -> None:
        """From now on the second stage holds each step until the first has begun the next one, a third of a second at
        most. The first stage puts a byte into a pipe (``fifo`` and the TP place) at the beginning of each step."""
        stage, self.pipe = self.runner._stage, os.open(f"{fifo}{self.layout.coordinates(self.rank).tp}", os.O_RDWR)
        receive, first = stage.receive, self.layout.coordinates(self.rank).pp == 0
        self.began = self.had = self.met = 0

        def meeting(ids: torch.Tensor) -> torch.Tensor:
            got: torch.Tensor = receive(ids)
            if first:
                os.write(self.pipe, b".")
                return got
            self.had += 1
            while self.began <= self.had and select.select([self.pipe], [], [], 0.3)[0]:
                self.began += len(os.read(self.pipe, 4096))
            self.met += self.began > self.had
            return got

        self.before, stage.receive = receive, meeting

    def part(self) -> int:
        """It is as before; how many steps the second stage had while the first had begun the next one."""
        self.runner._stage.receive = self.before
        os.close(self.pipe)
        return self.met

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
