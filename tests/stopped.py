"""A process stopped for a test."""

from __future__ import annotations

import os
import signal
import time

import psutil


def stop(pid: int, timeout_s: float = 5.0) -> None:
    """SIGSTOP, and wait until it stands: a sleeping process stops only once it has been given a core."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)
