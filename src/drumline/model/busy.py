"""How long a pipeline stage computes, waits for its neighbours not counted.

A stage is busy from when it has what the stage before gives until it has what it passes on, or has sampled. On the host
that is time on the clock. A device works on by itself, so there events are put into its stream, and what has passed
between them is read once they are over, without waiting.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch


class BusyClock(Protocol):
    """Runs while a stage computes."""

    def start(self) -> None:
        """It has its inputs."""

    def stop(self) -> None:
        """It has its outputs."""

    def ns(self) -> int:
        """For how long it has run so far, in ns."""


class HostClock:
    """Of a stage that computes in this thread."""

    def __init__(self) -> None:
        self._total = self._began = 0

    def start(self) -> None:
        """See :class:`BusyClock`."""
        self._began = time.perf_counter_ns()

    def stop(self) -> None:
        """See :class:`BusyClock`."""
        self._total += time.perf_counter_ns() - self._began

    def ns(self) -> int:
        """See :class:`BusyClock`."""
        return self._total


class DeviceClock:
    """Of a stage whose device works on by itself: in the order of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: deque[tuple[torch.Event, torch.Event]] = deque()
        self._began: torch.Event | None = None
        self._total = 0

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """See :class:`BusyClock`."""
        self._began = self._mark()

    def stop(self) -> None:
        """See :class:`BusyClock`."""
        assert self._began is not None
        self._spans.append((self._began, self._mark()))

    def ns(self) -> int:
        """See :class:`BusyClock`. Of what is over."""
        while self._spans and self._spans[0][1].query():
            began, ended = self._spans.popleft()
            self._total += int(began.elapsed_time(ended) * 1e6)
        return self._total


def make_clock(device: torch.device) -> BusyClock:
    """The clock of a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
