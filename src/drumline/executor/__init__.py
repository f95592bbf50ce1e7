"""Runs calls on every worker of one engine: ``base`` the interface and the choice of a backend, ``uni`` and ``mp`` the
backends, ``calls`` ids, futures, order and deadlines.
"""

from __future__ import annotations

from drumline.executor.base import Executor, WorkerState
from drumline.executor.calls import Aggregator, Call

__all__ = ["Aggregator", "Call", "Executor", "WorkerState"]
