"""Worker classes that break in one way each, for ``--worker-cls``."""

from __future__ import annotations

import time
from typing import Any

from drumline.model.worker import ModelWorker


class Broken:
    """Cannot start."""

    def __init__(self, context: Any) -> None:
        raise RuntimeError("no such device here")


class Stuck(ModelWorker):
    """Never ends its first step."""

    def execute_model(self, plan: Any) -> Any:
        time.sleep(3600)


class Garbage(ModelWorker):
    """Gives what no engine core understands."""

    def execute_model(self, plan: Any) -> Any:
        super().execute_model(plan)
        return "garbage"
