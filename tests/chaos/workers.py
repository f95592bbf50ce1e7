"""A model worker that can be held at a moment of its life, as slow storage or a device that will not let go would."""

from __future__ import annotations

import logging
import os

from drumline.model.worker import ModelWorker

log = logging.getLogger("drumline.chaos")


def hold(moment: str) -> None:
    """Block in a system call if this is the moment that the test asked for; nobody ever opens the other end."""
    if os.environ["CHAOS_HOLD"] == moment:
        log.warning("held in %s", moment)
        with open(os.environ["CHAOS_FIFO"], "rb"):
            pass


class Held(ModelWorker):
    """Blocks in the method that ``CHAOS_HOLD`` names."""

    def load_model(self) -> None:
        hold("load_model")
        super().load_model()

    def compile_or_warm_up_model(self) -> None:
        hold("compile_or_warm_up_model")
        super().compile_or_warm_up_model()

    def shutdown(self) -> None:
        hold("shutdown")
        super().shutdown()
