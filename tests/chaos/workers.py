"""The model worker held at a moment of its life, as slow storage or a device that will not let go would.

``preload/sitecustomize.py`` calls :func:`change` when the class has been imported. It stays the default worker class,
so that the fork server imports what it imports for that one.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from drumline.model.worker import ModelWorker
from drumline.plan.step import StepOutput, StepPlan, ints

log = logging.getLogger("drumline.chaos")
LEAST_STEP_S = 0.003


def change(worker: Any) -> None:
    """Hold workers in the method that ``CHAOS_HOLD`` names; ``prefill``: make steps that compute prompts slow;
    ``steps``: none takes less than LEAST_STEP_S."""
    moment = os.environ["CHAOS_HOLD"]
    if moment == "prefill":
        worker.execute_model = slow(worker.execute_model)
    elif moment == "steps":
        worker.execute_model = paced(worker.execute_model)
    else:
        setattr(worker, moment, held(getattr(worker, moment), moment))


def held(method: Any, moment: str) -> Any:
    def hold(self: Any) -> None:
        """Block in a system call until the test opens the other end, which it may never do."""
        if os.environ["CHAOS_HOLD"] == moment:
            log.warning("held in %s", moment)
            with open(os.environ["CHAOS_FIFO"], "rb"):
                pass
        method(self)

    return hold


def paced(method: Any) -> Any:
    def execute_model(self: Any, plan: StepPlan) -> StepOutput | None:
        """A tiny model on a fast machine would have ended its answer before anything can happen to it."""
        end = time.monotonic() + LEAST_STEP_S
        output = method(self, plan)
        time.sleep(max(0.0, end - time.monotonic()))
        return output  # type: ignore[no-any-return]

    return execute_model


def slow(method: Any) -> Any:
    def execute_model(self: Any, plan: StepPlan) -> StepOutput | None:
        """Take time over prompts, as a large model does."""
        if ints(plan.num_tokens).max(initial=0) > 1:
            time.sleep(0.1)
        return method(self, plan)  # type: ignore[no-any-return]

    return execute_model


class Held(ModelWorker):
    """The same as a class of its own, for a command that is told of it."""

    load_model = held(ModelWorker.load_model, "load_model")
    compile_or_warm_up_model = held(ModelWorker.compile_or_warm_up_model, "compile_or_warm_up_model")
    shutdown = held(ModelWorker.shutdown, "shutdown")
