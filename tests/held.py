"""What this process holds, to be compared over lives of what it starts and ends."""

from __future__ import annotations

import contextlib
import threading
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


def _targets() -> Iterator[str]:
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(path.readlink())


def check_flat(seen: Sequence[Held]) -> None:
    """Each life left what the first one had left, and memory grew by GROWTH_BYTES at most once a quarter was over."""
    assert all(one.descriptors == seen[0].descriptors for one in seen)
    assert all(one.threads == seen[0].threads for one in seen)
    assert not any(one.children - seen[0].children for one in seen)
    assert seen[-1].bytes - seen[len(seen) // 4].bytes < GROWTH_BYTES
