"""What this process holds, to be compared over lives of what it starts and ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

GROWTH_BYTES = 8 << 20


class Held:
    """Descriptors by kind, threads, children, resident bytes."""

    def __init__(self) -> None:
        self.descriptors = sorted(target.partition(":")[0] for target in _targets())
        self.threads = sorted(thread.name for thread in threading.enumerate())
        self.children = {child.pid for child in psutil.Process().children(recursive=True)}
        self.bytes = psutil.Process().memory_info().rss

    def same(self, other: Held) -> bool:
        """The same, bytes aside."""
        mine = self.descriptors, self.threads, self.children
        return mine == (other.descriptors, other.threads, other.children)


def _targets() -> Iterator[str]:
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(path.readlink())


def held(like: Held | None = None) -> Held:
    """What there is now; with ``like``, as soon as it is the same, for which threads that end may take a moment."""
    deadline = time.monotonic() + 5.0
    found = Held()
    while like is not None and not found.same(like) and time.monotonic() < deadline:
        time.sleep(0.02)
        found = Held()
    return found


def check_flat(seen: Sequence[Held]) -> None:
    """Each life left what the first one had left, and memory grew by GROWTH_BYTES at most once a quarter was over."""
    for one in seen:
        assert one.descriptors == seen[0].descriptors
        assert one.threads == seen[0].threads
        assert not one.children - seen[0].children
    assert seen[-1].bytes - seen[len(seen) // 4].bytes < GROWTH_BYTES
