"""Worker classes whose methods hang, each in its own way."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from tests.executor.workers import Gloo, Plain


class Stuck(Plain):
    """Methods that hang on rank 2."""

    def busy_in_python(self) -> None:
        """Lets go of the interpreter's lock only when somebody asks for it."""
        while self.rank == 2:
            pass

    def busy_in_c(self) -> None:
        """Never lets go of it."""
        if self.rank == 2:
            re.match("(a+)+$", "a" * 64 + "b")

    def blocked_in_c(self) -> None:
        """Lets go of it and never comes back."""
        if self.rank == 2:
            time.sleep(60)

    def waits_for_a_lock(self) -> None:
        """A deadlock within the process."""
        lock = threading.Lock()
        lock.acquire()
        if self.rank == 2:
            lock.acquire()

    def tells_phases(self, seconds: float) -> None:
        """Takes long and says how far it is."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.context.set_phase(f"load_model {time.monotonic():.1f}")
            time.sleep(0.05)


LONG_S = 6.0
"""Longer than any test waits; in the process of the test (uni) a thread sleeps for it."""


class StuckInItsStart(Plain):
    """The last rank hangs when it gets its KV cache, or when it warms up, after it has said something."""

    def initialize_from_config(self, kv_configs: Any) -> None:
        self.last = self.rank == len(kv_configs) - 1
        if self.last and kv_configs[self.rank] == "KV cache":
            time.sleep(LONG_S)

    def compile_or_warm_up_model(self) -> None:
        self.context.set_phase("warm-up: the first half")
        if self.last:
            time.sleep(LONG_S)


class StaysAway(Gloo):
    """Rank 1 does not come to the third collective."""

    def third(self) -> float:
        for _ in range(2):
            self.total()
        if self.rank == 1:
            time.sleep(60)
        return self.total()


class Stages(Gloo):
    """Stage 0 sends to stage 1, after a while."""

    def execute_model(self, plan: Any) -> Any:
        """``plan.step`` seconds, computing if it is above 0."""
        if self.rank:
            return self.groups.pp.recv_bytes()
        until = time.monotonic() + abs(plan.step)
        while time.monotonic() < until:
            if plan.step < 0:
                time.sleep(0.1)
        self.groups.pp.send_bytes(b"hidden states")
        return None


class Sleeper:
    """A step takes as many seconds as its number says."""

    def __init__(self, context: Any) -> None:
        self.rank = context.rank

    def execute_model(self, plan: Any) -> Any:
        time.sleep(plan.step)
        return plan.step
