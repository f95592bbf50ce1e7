"""A model worker that dies of certain requests, as a fault in a kernel does that only some inputs meet."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from drumline.model.worker import ModelWorker
from drumline.plan.step import StepPlan, ints

POISON = 2
"""The token of a prompt that kills rank 1; ``processes.prompt`` makes none of it."""

LONG = 60
"""Prompt tokens whose log-probabilities are more than ``Poor`` workers have memory for."""


class Poisoned(ModelWorker):
    def execute_model(self, plan: StepPlan) -> Any:
        if self.rank == 1 and any(POISON in ints(start.tokens)[: start.num_prompt] for start in plan.starts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_model(plan)


class Poor(ModelWorker):
    """Rank 1 has no memory for the log-probabilities of ``LONG`` prompt tokens."""

    def reserve_memory(self, nbytes: int) -> None:
        super().reserve_memory(nbytes)
        if nbytes >= self.step_costs().row_bytes * LONG and self.rank >= 1:
            raise MemoryError(f"no room for {nbytes} bytes on rank {self.rank}")


class Poorest(ModelWorker):
    """The same on all ranks, as torch says it."""

    def reserve_memory(self, nbytes: int) -> None:
        super().reserve_memory(nbytes)
        if nbytes >= self.step_costs().row_bytes * LONG:
            raise torch.OutOfMemoryError("CUDA out of memory")
