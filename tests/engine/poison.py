"""A model worker that dies of certain requests, as a fault in a kernel does that only some inputs meet."""

from __future__ import annotations

import os
import signal
from typing import Any

from drumline.model.worker import ModelWorker
from drumline.plan.step import StepPlan, ints

POISON = 2
"""The token of a prompt that kills rank 1; ``processes.prompt`` makes none of it."""


class Poisoned(ModelWorker):
    def execute_model(self, plan: StepPlan) -> Any:
        if self.rank == 1 and any(POISON in ints(start.tokens)[: start.num_prompt] for start in plan.starts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_model(plan)
