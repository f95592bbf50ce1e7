"""Runs calls on every worker of one engine. docs/executor.md shows how to use it.

``base`` the interface and the choice of a backend; ``uni`` and ``mp`` the backends; ``future`` the future of a call;
``calls`` ids, order, deadlines and failures; ``outbox`` calls that wait for room; ``keeper`` the thread that looks
after calls while nobody waits; ``explain`` who is late; ``grace`` whether an executor is usable after a failure.
"""

from __future__ import annotations

from drumline.executor.base import Executor, WorkerState
from drumline.executor.future import Aggregator, Call

__all__ = ["Aggregator", "Call", "Executor", "WorkerState"]
